//! `enum fuse_opcode`: what a request asks for. Those that Millpond names; all are of protocol 7.1 but where it says so.
//!
//! (fuser's enum is private, and its trait method tells which operation it is only after fuser has parsed the request.)

pub const LOOKUP: u32 = 1;
/// Has no answer.
pub const FORGET: u32 = 2;
pub const GETATTR: u32 = 3;
pub const READLINK: u32 = 5;
pub const MKDIR: u32 = 9;
pub const RMDIR: u32 = 11;
pub const OPEN: u32 = 14;
pub const READ: u32 = 15;
pub const WRITE: u32 = 16;
pub const STATFS: u32 = 17;
pub const RELEASE: u32 = 18;
pub const GETXATTR: u32 = 22;
pub const LISTXATTR: u32 = 23;
pub const FLUSH: u32 = 25;
pub const INIT: u32 = 26;
pub const OPENDIR: u32 = 27;
pub const READDIR: u32 = 28;
pub const RELEASEDIR: u32 = 29;
pub const CREATE: u32 = 35;
/// 7.7. Its answer is optional, and carries [`crate::header::INT_REQ_BIT`].
pub const INTERRUPT: u32 = 36;
/// 7.8.
pub const DESTROY: u32 = 38;
/// 7.15. Answers a notification of ours; has no answer.
pub const NOTIFY_REPLY: u32 = 41;
/// 7.16. Has no answer.
pub const BATCH_FORGET: u32 = 42;
/// 7.21.
pub const READDIRPLUS: u32 = 44;
