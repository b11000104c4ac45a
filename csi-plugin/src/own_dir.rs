//! Directories on the host that an unprivileged part of ours owns: made for it, never over a symbolic link.

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Component, Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub(crate) enum OwnDirError {
    #[error("directory {} must be absolute and without '..'", .0.display())]
    NotAbsolute(PathBuf),
    #[error("directory {} leads over a symbolic link at {}, which is not followed: give the real path", path.display(), at.display())]
    Symlink { path: PathBuf, at: PathBuf },
    #[error("directory {}: {} is not a directory: move it away", path.display(), at.display())]
    NotADirectory { path: PathBuf, at: PathBuf },
    #[error(
        "directory {} belongs to user {found} and not to the agent's user {wanted}: chown -R it to {wanted}, or move it away and an empty one is made",
        path.display()
    )]
    Owner { path: PathBuf, found: u32, wanted: u32 },
    #[error("directory {}: cannot {what}: {source}", path.display())]
    Io { path: PathBuf, what: &'static str, source: io::Error },
}

const OPEN: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC).union(OFlags::NOFOLLOW);
const NO_LINKS: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

/// Makes `path` a directory of user and group `owner`, mode 0700. What is missing above it is made for root, 0755.
/// An existing directory must be the owner's already; one that is root's and empty (made by kubelet, or by us just
/// before a crash) becomes the owner's.
pub(crate) fn own_directory(path: &Path, owner: u32) -> Result<(), OwnDirError> {
    let fail = |what, e: Errno| OwnDirError::Io { path: path.to_owned(), what, source: e.into() };
    let directory = walk(path)?;
    let stat = rustix::fs::fstat(&directory).map_err(|e| fail("look at it", e))?;
    if stat.st_uid != owner {
        if stat.st_uid != 0 || !is_empty(&directory).map_err(|e| fail("list it", e))? {
            return Err(OwnDirError::Owner { path: path.to_owned(), found: stat.st_uid, wanted: owner });
        }
        rustix::fs::fchown(&directory, Some(Uid::from_raw(owner)), Some(Gid::from_raw(owner)))
            .map_err(|e| fail("give it to its owner", e))?;
    }
    if stat.st_mode & 0o7777 != 0o700 {
        rustix::fs::fchmod(&directory, Mode::from_raw_mode(0o700)).map_err(|e| fail("set its mode", e))?;
    }
    Ok(())
}

/// The directory, made where it is missing.
fn walk(path: &Path) -> Result<OwnedFd, OwnDirError> {
    let plain = |c: Component<'_>| matches!(c, Component::RootDir | Component::Normal(_));
    if !path.is_absolute() || !path.components().all(plain) || path.parent().is_none() {
        return Err(OwnDirError::NotAbsolute(path.to_owned()));
    }
    let io = |what, e: Errno| OwnDirError::Io { path: path.to_owned(), what, source: e.into() };
    let mut at = PathBuf::from("/");
    let mut directory =
        rustix::fs::open("/", OPEN, Mode::empty()).map_err(|e| io("open the root directory", e))?;
    for name in path.components().filter(|c| matches!(c, Component::Normal(_))) {
        at.push(name);
        let name = name.as_os_str();
        match rustix::fs::mkdirat(&directory, name, Mode::from_raw_mode(0o755)) {
            Ok(()) | Err(Errno::EXIST) => {}
            // A read-only file system above a mount of the host: the name may be there.
            Err(e) if rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW).is_err() => {
                return Err(io("make it", e));
            }
            Err(_) => {}
        }
        directory = rustix::fs::openat2(&directory, name, OPEN, Mode::empty(), NO_LINKS).map_err(|e| {
            let kind = rustix::fs::statat(&directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .map(|stat| FileType::from_raw_mode(stat.st_mode));
            match kind {
                Ok(FileType::Symlink) => OwnDirError::Symlink { path: path.to_owned(), at: at.clone() },
                Ok(FileType::Directory) | Err(_) => io("open it", e),
                Ok(_) => OwnDirError::NotADirectory { path: path.to_owned(), at: at.clone() },
            }
        })?;
    }
    Ok(directory)
}

fn is_empty(directory: &OwnedFd) -> rustix::io::Result<bool> {
    for entry in rustix::fs::Dir::read_from(directory)? {
        let name = entry?.file_name().to_bytes().to_owned();
        if name != b"." && name != b".." {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    const USER: u32 = 64_321;

    fn root() -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap();
        (dir, real)
    }

    #[test]
    fn a_missing_directory_is_made_for_its_owner_and_found_again() {
        let (_dir, root) = root();
        let path = root.join("a/b/cache");
        for _ in 0..2 {
            own_directory(&path, USER).expect("this test needs root");
            let found = std::fs::metadata(&path).unwrap();
            assert_eq!((found.uid(), found.gid(), found.permissions().mode() & 0o7777), (USER, USER, 0o700));
        }
        assert_eq!(std::fs::metadata(root.join("a/b")).unwrap().uid(), 0);
    }

    #[test]
    fn an_empty_directory_of_roots_is_given_and_a_full_or_foreign_one_is_not() {
        let (_dir, root) = root();
        let path = root.join("cache");
        std::fs::create_dir(&path).unwrap();
        own_directory(&path, USER).unwrap();
        std::fs::write(path.join("file"), b"x").unwrap();
        own_directory(&path, USER).unwrap();
        let error = own_directory(&path, USER + 1).unwrap_err();
        assert!(matches!(error, OwnDirError::Owner { found: USER, .. }), "{error}");
        std::os::unix::fs::chown(&path, Some(0), Some(0)).unwrap();
        let error = own_directory(&path, USER).unwrap_err().to_string();
        assert!(error.contains("chown"), "{error}");
    }

    #[test]
    fn links_and_files_on_the_way_are_refused_and_nothing_behind_them_is_touched() {
        let (_dir, root) = root();
        let precious = root.join("precious");
        std::fs::create_dir(&precious).unwrap();
        symlink(&precious, root.join("link")).unwrap();
        std::fs::write(root.join("file"), b"").unwrap();
        for at in ["link", "link/below"] {
            let error = own_directory(&root.join(at), USER).unwrap_err();
            assert!(matches!(error, OwnDirError::Symlink { .. }), "{at}: {error}");
        }
        for at in ["file", "file/below"] {
            let error = own_directory(&root.join(at), USER).unwrap_err();
            assert!(matches!(error, OwnDirError::NotADirectory { .. }), "{at}: {error}");
        }
        for bad in ["relative", "/a/../b", "/"] {
            assert!(matches!(own_directory(Path::new(bad), USER), Err(OwnDirError::NotAbsolute(_))), "{bad}");
        }
        assert_eq!(std::fs::metadata(&precious).unwrap().uid(), 0);
        assert_eq!(std::fs::read_dir(&precious).unwrap().count(), 0);
    }
}
