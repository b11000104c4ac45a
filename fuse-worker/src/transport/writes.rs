//! WRITE requests as the kernel sends them. They do not go through fuser, which would copy the bytes: those stay where
//! the kernel has put them, in the shared memory, until the request is answered (`Inflight::head`).

use fuse_abi::{InHeader, WriteIn};

/// What of a WRITE comes before its bytes.
pub(super) const HEAD_BYTES: usize = InHeader::BYTES + WriteIn::BYTES;

/// One WRITE; its bytes are those from 80 on of the recorded request, `size` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    pub unique: u64,
    pub nodeid: u64,
    pub fh: u64,
    pub offset: u64,
    /// Bytes.
    pub size: u32,
    /// `FUSE_WRITE_*`.
    pub write_flags: u32,
    /// `O_*`, of the open file.
    pub flags: u32,
    pub uid: u32,
    pub gid: u32,
    /// The caller's thread id in the PID namespace of the process that mounted; 0: not visible from there.
    pub pid: u32,
}

/// Executes WRITEs: it is called on a thread that reads the device, and sees to it that each is answered, later if that
/// takes more than a moment.
pub type WriteHandler = Box<dyn Fn(Write) + Send + Sync>;

impl Write {
    /// None: the request does not have as many bytes as it says.
    pub(super) fn parse(header: &InHeader, head: &[u8; HEAD_BYTES]) -> Option<Self> {
        let body = WriteIn::from_bytes(head.last_chunk()?);
        ((header.len as usize).checked_sub(HEAD_BYTES)? == body.size as usize).then_some(Self {
            unique: header.unique,
            nodeid: header.nodeid,
            fh: body.fh,
            offset: body.offset,
            size: body.size,
            write_flags: body.write_flags,
            flags: body.flags,
            uid: header.uid,
            gid: header.gid,
            pid: header.pid,
        })
    }
}
