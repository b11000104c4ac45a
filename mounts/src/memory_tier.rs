//! The memory tier: a tmpfs on the host that outlives pods, mounted for the agent.

use crate::{KernelError, TargetError, parse_mountinfo, stack_at};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use std::ffi::CString;
use std::path::{Path, PathBuf};

/// How the mount table shows it.
const SOURCE: &str = "millpond-memory";
const MOUNTINFO: &str = "/proc/self/mountinfo";
/// More than these were never stacked by us.
const STACK_MAX: u32 = 16;

/// A tmpfs of limited size at one path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryTier {
    pub path: PathBuf,
    pub bytes: u64,
}

impl MemoryTier {
    /// Mounts it for user and group `owner` if it is not mounted; one of another size is resized. The directory
    /// exists and leads over no symbolic link.
    pub fn ensure(&self, owner: u32) -> Result<(), KernelError> {
        let table = table()?;
        let found = stack_at(&table, &self.path).last().map(|top| (top.fs_type.clone(), top.source.clone()));
        match found {
            None => {
                let options = format!("size={},uid={owner},gid={owner},mode=0700", self.bytes);
                let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
                rustix::mount::mount(SOURCE, &self.path, "tmpfs", flags, Some(text(options)?.as_c_str()))
                    .map_err(|e| self.failed("mount the memory tier at", e))
            }
            Some((kind, source)) if kind == "tmpfs" && source == SOURCE => {
                let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
                match rustix::mount::mount_remount(&self.path, flags, text(format!("size={}", self.bytes))?) {
                    Ok(()) => Ok(()),
                    // It holds more than that: it stays as it is until a new agent has emptied it.
                    Err(Errno::INVAL) => {
                        tracing::warn!(path = %self.path.display(), bytes = self.bytes, "the memory tier holds more than its new size, which comes into force when it was emptied and this plugin is started again");
                        Ok(())
                    }
                    Err(error) => Err(self.failed("resize the memory tier at", error)),
                }
            }
            Some((kind, source_text)) => {
                Err(KernelError::Foreign { target: self.path.clone(), kind, source_text })
            }
        }
    }

    /// Unmounts it, and whatever earlier runs stacked there. Returns whether there was one.
    pub fn unmount(path: &Path) -> Result<bool, KernelError> {
        for gone in 0..STACK_MAX {
            let table = table()?;
            let ours = |e: &&&crate::MountEntry| e.fs_type == "tmpfs" && e.source == SOURCE;
            if stack_at(&table, path).last().filter(ours).is_none() {
                return Ok(gone > 0);
            }
            rustix::mount::unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
                .map_err(|e| KernelError::call("unmount", path.display().to_string(), e))?;
        }
        Ok(true)
    }

    fn failed(&self, what: &'static str, error: Errno) -> KernelError {
        KernelError::call(what, self.path.display().to_string(), error)
    }
}

fn table() -> Result<Vec<crate::MountEntry>, KernelError> {
    let text = std::fs::read(MOUNTINFO).map_err(|e| KernelError::call("read", MOUNTINFO, e))?;
    Ok(parse_mountinfo(&text))
}

fn text(text: String) -> Result<CString, KernelError> {
    CString::new(text).map_err(|_| TargetError::NotAbsolute(PathBuf::new()).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn it_is_mounted_once_resized_and_taken_away() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap().join("memory");
        std::fs::create_dir(&path).unwrap();
        let blocks = || {
            let stat = rustix::fs::statvfs(&path).unwrap();
            stat.f_blocks * stat.f_frsize
        };
        for bytes in [1 << 20, 1 << 20, 2 << 20] {
            MemoryTier { path: path.clone(), bytes }.ensure(64_321).expect("this test needs root");
            assert_eq!(blocks(), bytes);
        }
        assert_eq!(std::fs::metadata(&path).unwrap().uid(), 64_321);
        std::fs::write(path.join("file"), vec![1; 1 << 20]).unwrap();
        MemoryTier { path: path.clone(), bytes: 1 << 16 }.ensure(64_321).unwrap();
        assert_eq!(blocks(), 2 << 20, "nothing is lost to a smaller size");
        assert_eq!(stack_at(&table().unwrap(), &path).len(), 1);
        assert!(MemoryTier::unmount(&path).unwrap());
        assert!(!MemoryTier::unmount(&path).unwrap());
        assert_eq!(std::fs::metadata(&path).unwrap().uid(), 0);
    }

    #[test]
    fn a_strangers_mount_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().canonicalize().unwrap();
        rustix::mount::mount("stranger", &path, "tmpfs", MountFlags::empty(), None).expect("needs root");
        let tier = MemoryTier { path: path.clone(), bytes: 1 << 20 };
        let refused = tier.ensure(0);
        let taken = MemoryTier::unmount(&path);
        rustix::mount::unmount(&path, UnmountFlags::DETACH).unwrap();
        assert!(matches!(refused, Err(KernelError::Foreign { .. })));
        assert!(!taken.unwrap());
    }
}
