//! Is this descriptor really a file of the cache? The kernel would pass any file through that we vouch for.

use crate::KernelError;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, StatxFlags};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};

/// Cache files lie `<root>/<scope>/<fan-out>/<file>`; some levels more leave room for another layout.
const DEPTH_MAX: usize = 8;

/// Accepts a descriptor opened for reading only, of a regular file that a path beneath one of `roots` names now.
///
/// The name comes from `/proc/self/fd`, but is not believed: the agent may see the cache under another path (it has
/// a mount namespace of its own), and a link text proves nothing. So each tail of it is looked up beneath each root,
/// and only the same device and inode number count.
pub(crate) fn check(file: BorrowedFd<'_>, roots: &[PathBuf]) -> Result<(), KernelError> {
    let flags =
        rustix::fs::fcntl_getfl(file).map_err(|e| KernelError::call("look at", "a passthrough file", e))?;
    if flags.contains(OFlags::PATH) || flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
        return Err(KernelError::NotACacheFile("the descriptor must be open for reading only"));
    }
    let stat = rustix::fs::fstat(file).map_err(|e| KernelError::call("look at", "a passthrough file", e))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Err(KernelError::NotACacheFile("it is not a regular file"));
    }
    let link = std::fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()))
        .map_err(|e| KernelError::call("look at", "a passthrough file", e))?;
    let parts: Vec<_> = link.iter().skip(1).collect();
    let found = roots.iter().any(|root| {
        let Ok(root) =
            rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        else {
            return false; // a cache disk that is gone holds no file that we could vouch for
        };
        // What lies on another disk is not looked for on this one, which may hang.
        if device(root.as_fd()).is_none_or(|found| found != (stat.st_dev as u64)) {
            return false;
        }
        (parts.len().saturating_sub(DEPTH_MAX)..parts.len()).any(|start| {
            let tail: PathBuf = parts[start..].iter().collect();
            same_file(&root, &tail, &stat)
        })
    });
    match found {
        true => Ok(()),
        false => Err(KernelError::NotACacheFile("it does not lie below a cache root")),
    }
}

/// The device number of a file system, which the kernel knows without asking it.
fn device(root: BorrowedFd<'_>) -> Option<u64> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let found = rustix::fs::statx(root, "", flags, StatxFlags::TYPE).ok()?;
    Some(rustix::fs::makedev(found.stx_dev_major, found.stx_dev_minor))
}

fn same_file(root: &std::os::fd::OwnedFd, tail: &Path, stat: &rustix::fs::Stat) -> bool {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat2(root, tail, flags, Mode::empty(), resolve)
        .and_then(rustix::fs::fstat)
        .is_ok_and(|seen| (seen.st_dev, seen.st_ino) == (stat.st_dev, stat.st_ino))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::os::fd::AsFd;

    #[test]
    fn only_read_only_regular_files_below_a_root_pass() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("cache");
        let file = root.join("scope/ab/0123");
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(&file, b"x").unwrap();
        fs::write(dir.path().join("0123"), b"secret").unwrap();
        let roots = [root.clone()];
        let check = |f: &File| check(f.as_fd(), &roots);

        check(&File::open(&file).unwrap()).unwrap();
        assert!(check(&File::open(dir.path().join("0123")).unwrap()).is_err(), "same name, other file");
        assert!(check(&File::open("/etc/passwd").unwrap()).is_err());
        assert!(check(&File::options().read(true).write(true).open(&file).unwrap()).is_err());
        assert!(check(&File::open(&root).unwrap()).is_err(), "a directory");

        // A link inside the cache that leads out of it names no cache file.
        std::os::unix::fs::symlink("/etc", root.join("etc")).unwrap();
        assert!(check(&File::open(root.join("etc/passwd")).unwrap()).is_err());

        let evicted = File::open(&file).unwrap();
        fs::remove_file(&file).unwrap();
        assert!(check(&evicted).is_err(), "unlinked meanwhile");
    }
}
