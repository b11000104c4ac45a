//! `millpond staging export`: staged files, copied into a directory. Their names are a tenant's: none leads out of the
//! directory, none goes through a link, and nothing that is there is replaced.

use super::{said, shown};
use crate::client::Client;
use crate::output::{bytes, print, remark};
use anyhow::{Context, Result, bail, ensure};
use proto::agent::v1 as pb;
use proto::agent::v1::staged_piece::Piece;
use rustix::fs::{AtFlags, Mode, OFlags, RenameFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

pub(super) async fn run(
    agent: &mut Client,
    volume: String,
    to: &Path,
    paths: Vec<Vec<u8>>,
) -> Result<ExitCode> {
    let request = pb::ReadStagingRequest { volume_id: volume, paths };
    let mut stream = agent.read_staging(request).await.map_err(|status| said(&status))?.into_inner();
    let top = Top::open(to)?;
    let (mut files, mut copied, mut partial, mut left) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut current: Option<(Vec<u8>, Result<Copy<'_>>)> = None;
    while let Some(piece) = stream.message().await.map_err(|status| said(&status))? {
        match piece.piece.context("the agent says nothing: report this")? {
            Piece::File(file) => {
                ensure!(current.is_none(), "the agent begins a file within another: report this");
                let copy = top.begin(&file.path);
                current = Some((file.path, copy));
            }
            Piece::Bytes(pb::StagedBytes { offset, bytes }) => {
                let (_, copy) = current.as_mut().context("the agent sends bytes of no file: report this")?;
                if let Ok(begun) = copy
                    && let Err(error) = begun.write(offset, &bytes)
                {
                    *copy = Err(error);
                }
            }
            Piece::End(end) => {
                let (path, copy) = current.take().context("the agent ends no file: report this")?;
                let finished = match (copy, end.failure.as_str()) {
                    (Ok(copy), "") => copy.finish(&end),
                    (Ok(_), failure) => Err(anyhow::anyhow!("{failure}")),
                    (Err(error), _) => Err(error),
                };
                match finished {
                    Ok(()) => {
                        (files, copied) = (files + 1, copied + end.size.saturating_sub(end.missing));
                        if end.missing > 0 {
                            partial += 1;
                            remark(format_args!(
                                "  {} is not whole: {} of it are in the store's object alone, and the copy has zeros in their place. \
                                 Unless somebody else has changed that object, `millpond staging upload` brings and sends them",
                                shown(&path),
                                bytes(end.missing)
                            ));
                        }
                        if end.changed {
                            remark(format_args!(
                                "  {} was written to while it was copied: the copy may be a mixture",
                                shown(&path)
                            ));
                        }
                    }
                    Err(error) => {
                        left += 1;
                        remark(format_args!("  {} was not copied: {error:#}", shown(&path)));
                    }
                }
            }
        }
    }
    ensure!(current.is_none(), "the agent ended in the middle of a file: see its log, and run this again");
    print(format_args!("{files} files, {} copied to {}", bytes(copied), to.display()))?;
    if left > 0 {
        remark(format_args!("{left} files were not copied"));
    }
    if left + partial > 0 {
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// The directory into which everything goes.
struct Top(OwnedFd);

/// A file on its way: under a name of ours until all of it is there.
struct Copy<'t> {
    top: &'t Top,
    file: File,
    unfinished: String,
    /// Where it belongs.
    dir: OwnedFd,
    name: Vec<u8>,
    is_finished: bool,
}

const BENEATH: ResolveFlags =
    ResolveFlags::BENEATH.union(ResolveFlags::NO_SYMLINKS).union(ResolveFlags::NO_MAGICLINKS);

impl Top {
    /// Made, for its owner alone, if it is not there.
    fn open(path: &Path) -> Result<Self> {
        let shown = || format!("directory {}", path.display());
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => made.with_context(shown)?,
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self(rustix::fs::open(path, flags, Mode::empty()).with_context(shown)?))
    }

    /// One step down, which is made if it is not there.
    fn down(dir: &OwnedFd, name: &[u8]) -> Result<OwnedFd> {
        match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(error) => bail!("directory {}: {error}", shown(name)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let opened = rustix::fs::openat2(dir, name, flags, Mode::empty(), BENEATH);
        opened.map_err(|error| anyhow::anyhow!("directory {}: {error}", shown(name)))
    }

    fn begin(&self, path: &[u8]) -> Result<Copy<'_>> {
        let mut names: Vec<&[u8]> = path.split(|byte| *byte == b'/').collect();
        let is_bad = |name: &&[u8]| matches!(**name, [] | [b'.'] | [b'.', b'.']) || name.contains(&0);
        ensure!(!names.iter().any(is_bad), "its name could lead elsewhere");
        let name = names.pop().context("it has no name")?.to_vec();
        let mut dir = rustix::io::fcntl_dupfd_cloexec(&self.0, 0).context("no descriptor")?;
        for name in names {
            dir = Self::down(&dir, name)?;
        }
        // Said before its bytes come; what comes meanwhile is not replaced either.
        match rustix::fs::statat(&dir, &name[..], AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => {}
            Ok(_) => bail!("there is something of that name, and nothing is replaced"),
            Err(error) => return Err(error.into()),
        }
        for number in 0..1000 {
            let unfinished = format!(".millpond-export-{}-{number}", std::process::id());
            let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let mode = Mode::from_raw_mode(0o600);
            match rustix::fs::openat2(&self.0, &unfinished, flags, mode, BENEATH) {
                Ok(file) => {
                    return Ok(Copy {
                        top: self,
                        file: file.into(),
                        unfinished,
                        dir,
                        name,
                        is_finished: false,
                    });
                }
                Err(Errno::EXIST) => {} // of one that was killed
                Err(error) => return Err(error.into()),
            }
        }
        bail!("too many .millpond-export-… of attempts that were ended: remove them")
    }
}

impl Copy<'_> {
    fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, offset).context("write")
    }

    fn finish(mut self, end: &pb::StagedEnd) -> Result<()> {
        self.file.set_len(end.size).context("size")?;
        let since = Duration::from_nanos(end.modified_ns.try_into().unwrap_or(0));
        let _ = self.file.set_modified(UNIX_EPOCH + since); // some file systems have no such time
        self.file.sync_all().context("it was not written out")?;
        let (top, dir) = (self.top.0.as_fd(), self.dir.as_fd());
        let (from, to) = (self.unfinished.as_str(), &self.name[..]);
        let moved = match rustix::fs::renameat_with(top, from, dir, to, RenameFlags::NOREPLACE) {
            // Some file systems cannot: a link does not replace either.
            Err(Errno::INVAL | Errno::NOSYS) => rustix::fs::linkat(top, from, dir, to, AtFlags::empty())
                .and_then(|()| rustix::fs::unlinkat(top, from, AtFlags::empty())),
            moved => moved,
        };
        match moved {
            Err(Errno::EXIST) => bail!("there is something of that name by now, and nothing is replaced"),
            moved => moved?,
        }
        self.is_finished = true;
        Ok(())
    }
}

impl Drop for Copy<'_> {
    fn drop(&mut self) {
        if !self.is_finished {
            let _ = rustix::fs::unlinkat(&self.top.0, &self.unfinished, AtFlags::empty()); // it says what it is
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn copy(top: &Top, path: &[u8], text: &[u8]) -> Result<()> {
        let copy = top.begin(path)?;
        copy.write(0, text)?;
        copy.finish(&pb::StagedEnd { size: text.len() as u64 + 2, ..pb::StagedEnd::default() })
    }

    #[test]
    fn files_come_whole_for_their_owner_alone_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let to = dir.path().join("to");
        let top = Top::open(&to).unwrap();
        copy(&top, b"a/b/c", b"text").unwrap();
        assert_eq!(fs::read(to.join("a/b/c")).unwrap(), b"text\0\0");
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&to.join("a/b/c")), mode(&to)), (0o600, 0o700));
        drop(top.begin(b"a/d").unwrap());
        assert_eq!(fs::read_dir(&to).unwrap().count(), 1);
        assert_eq!(fs::read_dir(to.join("a")).unwrap().count(), 1);
    }

    #[test]
    fn nothing_is_replaced_whenever_it_comes() {
        let dir = tempfile::tempdir().unwrap();
        let top = Top::open(dir.path()).unwrap();
        fs::write(dir.path().join("a"), b"mine").unwrap();
        symlink("nowhere", dir.path().join("link")).unwrap();
        assert!(copy(&top, b"a", b"theirs").is_err() && copy(&top, b"link", b"theirs").is_err());
        let late = top.begin(b"b").unwrap();
        fs::write(dir.path().join("b"), b"mine").unwrap();
        assert!(late.finish(&pb::StagedEnd::default()).is_err());
        for name in ["a", "b"] {
            assert_eq!(fs::read(dir.path().join(name)).unwrap(), b"mine");
        }
        assert!(!dir.path().join("nowhere").exists());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 3);
    }

    #[test]
    fn no_name_leads_out_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let (to, outside) = (dir.path().join("to"), dir.path().join("outside"));
        fs::create_dir(&outside).unwrap();
        let top = Top::open(&to).unwrap();
        symlink(&outside, to.join("away")).unwrap();
        symlink("../outside", to.join("up")).unwrap();
        for path in
            ["../outside/x", "away/x", "up/x", "/x", "a//x", "./x", "a/../../x", "", ".", "..", "a/", "a\0b"]
        {
            assert!(copy(&top, path.as_bytes(), b"x").is_err(), "{path:?}");
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
        assert!(!dir.path().join("x").exists() && !to.join("x").exists());
    }
}
