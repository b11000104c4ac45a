//! A live FUSE connection as sysfs and fusectl name it: by the device number of its superblock.

use crate::KernelError;
use std::fs;
use std::io::ErrorKind;
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

    pub(crate) fn waiting(self, fusectl: &Path) -> Result<u64, KernelError> {
        let file = fusectl.join(self.minor.to_string()).join("waiting");
        let text = fs::read_to_string(&file).map_err(|e| self.explain(fusectl, "read", &file, e))?;
        text.trim().parse().map_err(|_| {
            KernelError::call(
                "understand",
                file.display().to_string(),
                std::io::Error::from(ErrorKind::InvalidData),
            )
        })
    }

    pub(crate) fn abort(self, fusectl: &Path) -> Result<(), KernelError> {
        let file = fusectl.join(self.minor.to_string()).join("abort");
        fs::write(&file, "1").map_err(|e| self.explain(fusectl, "write", &file, e))
    }

    fn explain(self, fusectl: &Path, what: &'static str, file: &Path, error: std::io::Error) -> KernelError {
        match error.kind() {
            ErrorKind::NotFound => KernelError::NoFusectl { dir: fusectl.to_owned(), minor: self.minor },
            _ => KernelError::call(what, file.display().to_string(), error),
        }
    }
}

/// Is this what the kernel answers when a connection has ended?
pub(crate) fn is_death(errno: i32) -> bool {
    matches!(errno, libc::ENOTCONN | libc::ECONNABORTED)
}
