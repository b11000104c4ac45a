//! Answers the kernel's requests well enough for the mount to count as served; or takes them and says nothing.

use fuse_abi::{Attr, AttrOut, InHeader, Kstatfs, OpenOut, OutHeader, opcode};
use rustix::io::{read, write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Debug, Default)]
pub struct Server {
    /// Requests are taken from the kernel, recorded nowhere and never answered.
    pub swallows: AtomicBool,
    pub swallowed: AtomicU64,
}

impl Server {
    /// Until the connection ends.
    pub fn run(self: &Arc<Self>, device: &OwnedFd) {
        let mut buffer = vec![0; 1 << 20];
        loop {
            match read(device, &mut buffer) {
                Ok(length) => self.serve(device, &buffer[..length]),
                Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN | rustix::io::Errno::NOENT) => {}
                Err(_) => return,
            }
        }
    }

    fn serve(&self, device: &OwnedFd, request: &[u8]) {
        let Some(header) = request.first_chunk().map(InHeader::from_bytes) else { return };
        let is_silent = matches!(
            header.opcode,
            opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT | opcode::NOTIFY_REPLY
        );
        if is_silent {
            return;
        }
        if self.swallows.load(Ordering::SeqCst) {
            self.swallowed.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let directory = Attr { ino: 1, mode: libc::S_IFDIR | 0o555, nlink: 2, ..Attr::default() };
        let body: Result<Vec<u8>, i32> = match header.opcode {
            opcode::GETATTR => Ok(AttrOut { attr: directory, ..AttrOut::default() }.to_bytes().to_vec()),
            opcode::STATFS => Ok(Kstatfs { bsize: 4096, namelen: 255, frsize: 4096, ..Kstatfs::default() }
                .to_bytes()
                .to_vec()),
            opcode::OPENDIR => Ok(OpenOut::default().to_bytes().to_vec()),
            opcode::READDIR | opcode::READDIRPLUS | opcode::RELEASEDIR | opcode::RELEASE => Ok(Vec::new()),
            opcode::LOOKUP => Err(libc::ENOENT),
            opcode::OPEN | opcode::READ | opcode::GETXATTR | opcode::LISTXATTR => Err(libc::EIO),
            _ => Err(libc::ENOSYS),
        };
        let (error, body) = body.map_or_else(|errno| (-errno, Vec::new()), |body| (0, body));
        let mut answer = OutHeader::new(body.len(), error, header.unique).to_bytes().to_vec();
        answer.extend(body);
        let _ = write(device, &answer); // its caller has gone
    }
}
