//! A live FUSE connection as sysfs and the mount table name it: by the device number of its superblock. The number of one
//! that has ended is soon another's: see [`crate::Control`] for what must not reach that one.

use crate::KernelError;
use std::fs;
use std::path::{Path, PathBuf};

/// Device number of the FUSE superblock, taken from the mount table, because a stat would ask the worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Connection {
    pub major: u32,
    pub minor: u32,
}

impl Connection {
    /// A directory of sysfs that lives as long as the superblock.
    pub(crate) fn directory(self, bdi: &Path) -> PathBuf {
        bdi.join(format!("{}:{}", self.major, self.minor))
    }

    pub(crate) fn set_read_ahead_kb(self, bdi: &Path, kb: u32) -> Result<(), KernelError> {
        let file = self.directory(bdi).join("read_ahead_kb");
        fs::write(&file, kb.to_string())
            .map_err(|e| KernelError::call("write", file.display().to_string(), e))
    }
}

/// Is this what the kernel answers when a connection has ended?
pub(crate) fn is_death(errno: i32) -> bool {
    matches!(errno, libc::ENOTCONN | libc::ECONNABORTED)
}
