//! A target path that kubelet names, resolved beneath a configured root without following any symbolic link.
//!
//! Only the parent is opened; the target itself may be a dead FUSE mount, which no thread of the broker must touch.

use crate::place::{Shown, shown_at};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

#[derive(Debug)]
pub struct Target {
    parent: OwnedFd,
    name: OsString,
    /// As the mount table shows it: the root may itself have been reached over a link.
    path: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    #[error("target path {} must be absolute and without '..'", .0.display())]
    NotAbsolute(PathBuf),
    #[error("target path {} is not below a directory that this driver may mount in ({roots})", path.display())]
    Outside { path: PathBuf, roots: String },
    #[error("the parent directory of target path {} does not exist: the caller must create it", .0.display())]
    NoParent(PathBuf),
    #[error("target path {} leads over a symbolic link, which is not followed", .0.display())]
    Symlink(PathBuf),
    #[error("target path {} is not a directory", .0.display())]
    NotADirectory(PathBuf),
    #[error("target path {}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

const NO_LINKS: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

impl Target {
    /// The parent must exist below one of `roots`; the target need not.
    pub fn resolve(roots: &[PathBuf], asked: &Path) -> Result<Self, TargetError> {
        let plain = |c: Component<'_>| matches!(c, Component::RootDir | Component::Normal(_));
        if !asked.is_absolute() || !asked.components().all(plain) {
            return Err(TargetError::NotAbsolute(asked.to_owned()));
        }
        let outside = || TargetError::Outside {
            path: asked.to_owned(),
            roots: roots.iter().map(|r| r.display().to_string()).collect::<Vec<_>>().join(", "),
        };
        let root = roots.iter().find(|root| asked.starts_with(root)).ok_or_else(outside)?;
        let below = asked.strip_prefix(root).map_err(|_| outside())?;
        let name = below.file_name().ok_or_else(outside)?.to_owned();
        let above = match below.parent() {
            Some(above) if above != Path::new("") => above,
            _ => Path::new("."),
        };

        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let wrap = |e: Errno| match e {
            Errno::NOENT => TargetError::NoParent(asked.to_owned()),
            Errno::LOOP | Errno::XDEV => TargetError::Symlink(asked.to_owned()),
            Errno::NOTDIR => TargetError::NotADirectory(asked.to_owned()),
            other => TargetError::Io { path: asked.to_owned(), source: other.into() },
        };
        let root = rustix::fs::open(root, directory, Mode::empty()).map_err(wrap)?;
        let parent = rustix::fs::openat2(&root, above, directory, Mode::empty(), NO_LINKS).map_err(wrap)?;
        let real = std::fs::read_link(format!("/proc/self/fd/{}", parent.as_raw_fd()))
            .map_err(|source| TargetError::Io { path: asked.to_owned(), source })?;
        let path = real.join(&name);
        Ok(Self { parent, name, path })
    }

    /// The path to look for in the mount table and to show.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn name(&self) -> &OsStr {
        &self.name
    }

    /// The target as a path whose every component but the last is pinned by a descriptor of ours.
    pub(crate) fn pinned_path(&self) -> PathBuf {
        Path::new("/proc/self/fd").join(self.parent.as_raw_fd().to_string()).join(&self.name)
    }

    /// Makes the directory if it is missing. Returns whether it did. Call it only when nothing of ours is mounted.
    pub fn ensure_directory(&self) -> Result<bool, TargetError> {
        let io = |e: Errno| TargetError::Io { path: self.path.clone(), source: e.into() };
        match rustix::fs::mkdirat(&self.parent, &self.name, Mode::from_raw_mode(0o750)) {
            Ok(()) => return Ok(true),
            Err(Errno::EXIST) => {}
            Err(e) => return Err(io(e)),
        }
        let stat = rustix::fs::statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW).map_err(io)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => Ok(false),
            FileType::Symlink => Err(TargetError::Symlink(self.path.clone())),
            _ => Err(TargetError::NotADirectory(self.path.clone())),
        }
    }

    /// Removes the directory; a missing one is a success. Call it only when nothing of ours is mounted.
    pub fn remove(&self) -> Result<(), TargetError> {
        match rustix::fs::unlinkat(&self.parent, &self.name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(Errno::NOTDIR) => Err(TargetError::NotADirectory(self.path.clone())),
            Err(e) => Err(TargetError::Io { path: self.path.clone(), source: e.into() }),
        }
    }

    /// What is mounted here; None: nothing.
    pub(crate) fn shown(&self) -> Result<Option<Shown>, TargetError> {
        shown_at(&self.parent, &self.name)
            .map_err(|e| TargetError::Io { path: self.path.clone(), source: e.into() })
    }

    /// A path-only descriptor of the directory itself, to mount upon.
    pub(crate) fn open(&self) -> Result<OwnedFd, TargetError> {
        // Without O_NOFOLLOW, so that a link is ELOOP (by NO_LINKS) and not ENOTDIR.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat2(self.parent.as_fd(), &self.name, flags, Mode::empty(), NO_LINKS).map_err(|e| {
            match e {
                Errno::LOOP | Errno::XDEV => TargetError::Symlink(self.path.clone()),
                Errno::NOTDIR => TargetError::NotADirectory(self.path.clone()),
                other => TargetError::Io { path: self.path.clone(), source: other.into() },
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn resolve(root: &Path, at: &str) -> Result<Target, TargetError> {
        Target::resolve(&[root.to_owned()], &root.join(at))
    }

    #[test]
    fn targets_below_the_root_resolve_and_others_say_why() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        std::fs::create_dir(root.join("pod")).unwrap();
        std::fs::write(root.join("file"), b"").unwrap();
        symlink("/etc", root.join("out")).unwrap();
        symlink("pod", root.join("in")).unwrap();

        let target = resolve(root, "pod/mount").unwrap();
        assert_eq!(target.path(), root.canonicalize().unwrap().join("pod/mount"));
        assert!(target.ensure_directory().unwrap());
        assert!(!target.ensure_directory().unwrap());
        target.remove().unwrap();
        target.remove().unwrap();

        assert!(matches!(resolve(root, "missing/mount"), Err(TargetError::NoParent(_))));
        assert!(matches!(resolve(root, "out/mount"), Err(TargetError::Symlink(_))));
        assert!(matches!(resolve(root, "in/mount"), Err(TargetError::Symlink(_))));
        assert!(matches!(resolve(root, "file/mount"), Err(TargetError::NotADirectory(_))));
        assert!(matches!(resolve(root, "pod/../x"), Err(TargetError::NotAbsolute(_))));
        assert!(matches!(resolve(root, ""), Err(TargetError::Outside { .. })));
        let roots = [root.to_owned()];
        assert!(matches!(Target::resolve(&roots, Path::new("/etc/x")), Err(TargetError::Outside { .. })));
        assert!(matches!(Target::resolve(&roots, Path::new("pod/x")), Err(TargetError::NotAbsolute(_))));

        assert!(matches!(resolve(root, "in").unwrap().ensure_directory(), Err(TargetError::Symlink(_))));
        assert!(matches!(
            resolve(root, "file").unwrap().ensure_directory(),
            Err(TargetError::NotADirectory(_))
        ));
    }

    #[test]
    fn a_root_that_is_a_link_itself_is_fine() {
        let dir = tempfile::tempdir().unwrap();
        let real = dir.path().canonicalize().unwrap().join("real");
        std::fs::create_dir(&real).unwrap();
        symlink(&real, dir.path().join("kubelet")).unwrap();
        let target = resolve(&dir.path().join("kubelet"), "mount").unwrap();
        assert_eq!(target.path(), real.join("mount"));
    }
}
