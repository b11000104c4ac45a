//! A SEQPACKET socket that carries bounded messages with file descriptors.

use rustix::io::IoSlice;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

/// Largest body, bytes. Below the default socket buffer (212,992), so that a send to an idle peer never fails with
/// EMSGSIZE.
pub const MAX_MESSAGE: usize = 64 * 1024;
/// Most descriptors in one message.
pub const MAX_FDS: usize = 4;

/// One end of a SEQPACKET connection. Shared by reference between threads: one packet is one atomic send or receive.
#[derive(Debug)]
pub struct Packet {
    fd: OwnedFd,
}

#[derive(Debug, thiserror::Error)]
pub enum PacketError {
    #[error("the peer closed the connection")]
    Closed,
    #[error("nothing arrived in time")]
    TimedOut,
    #[error("message of {0} bytes or {1} descriptors exceeds the protocol's limits")]
    TooLarge(usize, usize),
    #[error("message cannot be understood: {0}")]
    Malformed(String),
    /// Of another version in what it says, but not in what it is: its sender can get an answer, or the thread that
    /// waits for it.
    #[error("message {id} cannot be understood: {why}")]
    NotUnderstood { id: u64, question: bool, why: String },
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Who is at the other end, as the kernel says (SO_PEERCRED at connect time).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerIdentity {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

impl Packet {
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self { fd: a }, Self { fd: b }))
    }

    pub fn connect(path: &Path) -> io::Result<Self> {
        let fd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::net::connect(&fd, &SocketAddrUnix::new(path)?)?;
        Ok(Self { fd })
    }

    /// A listening socket; the caller has removed a stale file and sets the mode of the new one.
    pub fn listen(path: &Path) -> io::Result<OwnedFd> {
        let fd =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        rustix::net::bind(&fd, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&fd, 16)?;
        Ok(fd)
    }

    pub fn accept(listener: BorrowedFd<'_>) -> io::Result<Self> {
        Ok(Self { fd: rustix::net::accept_with(listener, SocketFlags::CLOEXEC)? })
    }

    pub fn from_fd(fd: OwnedFd) -> Self {
        Self { fd }
    }

    pub fn peer(&self) -> io::Result<PeerIdentity> {
        let c = sockopt::socket_peercred(&self.fd)?;
        Ok(PeerIdentity { pid: c.pid.as_raw_nonzero().get(), uid: c.uid.as_raw(), gid: c.gid.as_raw() })
    }

    /// Sends one message. Blocks while the peer's buffer is full, until the send timeout.
    pub fn send(&self, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), PacketError> {
        self.send_flags(body, fds, SendFlags::NOSIGNAL)
    }

    /// As `send`, but a full buffer is `TimedOut` at once: for threads that must not block.
    pub fn try_send(&self, body: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), PacketError> {
        self.send_flags(body, fds, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)
    }

    fn send_flags(&self, body: &[u8], fds: &[BorrowedFd<'_>], flags: SendFlags) -> Result<(), PacketError> {
        if body.len() > MAX_MESSAGE || fds.len() > MAX_FDS || body.is_empty() {
            return Err(PacketError::TooLarge(body.len(), fds.len()));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(PacketError::TooLarge(body.len(), fds.len()));
        }
        loop {
            match rustix::net::sendmsg(&self.fd, &[IoSlice::new(body)], &mut ancillary, flags) {
                Ok(_) => return Ok(()),
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::AGAIN) => return Err(PacketError::TimedOut),
                Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => {
                    return Err(PacketError::Closed);
                }
                Err(e) => return Err(PacketError::Io(e.into())),
            }
        }
    }

    /// Receives one message into `buffer`, which should be [`MAX_MESSAGE`] long. Descriptors are close-on-exec.
    pub fn recv<'b>(&self, buffer: &'b mut [u8]) -> Result<(&'b [u8], Vec<OwnedFd>), PacketError> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let mut iov = [IoSliceMut::new(buffer)];
            match rustix::net::recvmsg(&self.fd, &mut iov, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
                Ok(r) => break r,
                Err(rustix::io::Errno::INTR) => continue,
                Err(rustix::io::Errno::CONNRESET) => return Err(PacketError::Closed),
                Err(rustix::io::Errno::AGAIN) => return Err(PacketError::TimedOut),
                Err(e) => return Err(PacketError::Io(e.into())),
            }
        };
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.flags.intersects(ReturnFlags::TRUNC | ReturnFlags::CTRUNC) {
            return Err(PacketError::TooLarge(received.bytes, fds.len()));
        }
        if received.bytes == 0 {
            return Err(PacketError::Closed); // bodies are never empty, so this is the end
        }
        Ok((&buffer[..received.bytes], fds))
    }

    /// Bounds every later `recv` on this socket; None: wait for ever.
    pub fn set_recv_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        Ok(sockopt::set_socket_timeout(&self.fd, sockopt::Timeout::Recv, limit)?)
    }

    /// Bounds every later `send`: a peer that stopped reading must not hold us for ever.
    pub fn set_send_timeout(&self, limit: Option<Duration>) -> io::Result<()> {
        Ok(sockopt::set_socket_timeout(&self.fd, sockopt::Timeout::Send, limit)?)
    }

    /// Wakes every thread that waits in `recv` on either end.
    pub fn shutdown(&self) {
        // Fails only if the peer is gone already, which is what the caller wants.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }
}

impl AsFd for Packet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
impl AsRawFd for Packet {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}
impl From<Packet> for OwnedFd {
    fn from(p: Packet) -> OwnedFd {
        p.fd
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_carry_descriptors_and_keep_their_borders() {
        let (a, b) = Packet::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        a.send(b"one", &[file.as_fd()]).unwrap();
        a.send(b"two", &[]).unwrap();
        let mut buffer = vec![0; MAX_MESSAGE];
        let (body, fds) = b.recv(&mut buffer).unwrap();
        assert_eq!((body, fds.len()), (&b"one"[..], 1));
        let (body, fds) = b.recv(&mut buffer).unwrap();
        assert_eq!((body, fds.len()), (&b"two"[..], 0));
        drop(a);
        assert!(matches!(b.recv(&mut buffer), Err(PacketError::Closed)));
    }

    #[test]
    fn oversized_messages_are_refused_on_both_sides() {
        let (a, b) = Packet::pair().unwrap();
        assert!(matches!(a.send(&vec![0; MAX_MESSAGE + 1], &[]), Err(PacketError::TooLarge(..))));
        assert!(matches!(a.send(b"", &[]), Err(PacketError::TooLarge(..))));
        a.send(&[1; 100], &[]).unwrap();
        assert!(matches!(b.recv(&mut [0; 10]), Err(PacketError::TooLarge(..))));
    }

    #[test]
    fn a_silent_peer_times_out() {
        let (_a, b) = Packet::pair().unwrap();
        b.set_recv_timeout(Some(Duration::from_millis(5))).unwrap();
        assert!(matches!(b.recv(&mut [0; 10]), Err(PacketError::TimedOut)));
    }
}
