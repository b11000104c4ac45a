//! The bytes of staged files for a person, from areas that a mount has or not. Writers go on meanwhile.

use super::closed::Closed;
use super::disk::{Disk, Silence, data_after};
use super::names::data_name;
use super::registry::Staging;
use super::staged::StagedFile;
use rustix::fs::{Mode, OFlags, Stat};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;
use volume::VolumeId;

/// Read at once, bytes.
const CHUNK: u64 = 1 << 20;

/// What can be read of one area.
pub(crate) struct Readable {
    pub(crate) files: Vec<StagedFile>,
    dir: Arc<OwnedFd>,
    disk: Disk,
}

/// A staged file that is being read.
pub(crate) struct Reading {
    data: Arc<std::fs::File>,
    about: Stat,
    at: u64,
}

/// How a file was when all of it was read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct End {
    pub(crate) size: u64,
    pub(crate) modified_ns: i64,
    /// It was written to meanwhile.
    pub(crate) changed: bool,
}

impl Staging {
    /// None: the volume has no area here. `limit`: of the disk.
    pub(crate) async fn readable(&self, id: &VolumeId, limit: Duration) -> Result<Option<Readable>, String> {
        // Threads of its own: a program's writes never wait behind it.
        let disk =
            Disk::start(limit, Silence::default()).map_err(|e| format!("no thread for the disk: {e}"))?;
        // Nobody opens it meanwhile.
        let turn = self.turn(id).await;
        if let Some(area) = self.open_area(id) {
            drop(turn);
            return Ok(Some(Readable { files: area.files_that_wait(), dir: area.files.clone(), disk }));
        }
        let dir = self.dir.join(id.as_str());
        let read = disk.run(move || {
            let closed = Closed::open(&dir)?;
            Ok(closed.map(|closed| (closed.files_that_wait(), closed.files)))
        });
        let read: Result<_, String> = read.await.map_err(|_| silent(limit))?;
        drop(turn);
        Ok(read?.map(|(files, dir)| Readable { files, dir: Arc::new(dir), disk }))
    }
}

fn silent(limit: Duration) -> String {
    format!("the disk of the staging area does not answer within {limit:?}")
}

impl Readable {
    async fn on_disk<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> Result<T, String> + Send + 'static,
    ) -> Result<T, String> {
        self.disk.run_in_time(job).await.map_err(|_| silent(self.disk.limit()))?
    }

    pub(crate) async fn open(&self, ino: u64) -> Result<Reading, String> {
        let dir = self.dir.clone();
        self.on_disk(move || {
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            let data = match rustix::fs::openat(&dir, data_name(ino), flags, Mode::empty()) {
                Err(Errno::NOENT) => {
                    return Err("it has gone meanwhile: the store has it, or it was removed".into());
                }
                data => data.map_err(|e| e.to_string())?,
            };
            let about = rustix::fs::fstat(&data).map_err(|e| e.to_string())?;
            Ok(Reading { data: Arc::new(data.into()), about, at: 0 })
        })
        .await
    }

    /// The next bytes that are no hole, and where they belong. None: that was all, up to the size that the file had when it was
    /// opened, so that one that grows for ever has an end.
    pub(crate) async fn next(&self, reading: &mut Reading) -> Result<Option<(u64, Vec<u8>)>, String> {
        let (data, at, size) = (reading.data.clone(), reading.at, reading.about.st_size as u64);
        let read = self.on_disk(move || {
            let failed = |e: std::io::Error| e.to_string();
            let Some(range) = data_after(&data, at).map_err(|e| failed(e.into()))? else { return Ok(None) };
            let end = range.end.min(range.start.saturating_add(CHUNK)).min(size);
            if range.start >= end {
                return Ok(None);
            }
            let mut bytes = vec![0; (end - range.start) as usize];
            let mut filled = 0;
            while filled < bytes.len() {
                match data.read_at(&mut bytes[filled..], range.start + filled as u64) {
                    Ok(0) => break, // cut off meanwhile
                    Ok(read) => filled += read,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(failed(error)),
                }
            }
            bytes.truncate(filled);
            Ok((filled > 0).then_some((range.start, bytes)))
        });
        let read = read.await?;
        if let Some((start, bytes)) = &read {
            reading.at = start + bytes.len() as u64;
        }
        Ok(read)
    }

    pub(crate) async fn end(&self, reading: &Reading) -> Result<End, String> {
        let (data, before) = (reading.data.clone(), reading.about);
        self.on_disk(move || {
            let now = rustix::fs::fstat(&data).map_err(|e| e.to_string())?;
            let of =
                |s: &Stat| (s.st_size, s.st_mtime, s.st_mtime_nsec, s.st_ctime, s.st_ctime_nsec, s.st_nlink);
            let seconds = before.st_mtime.saturating_mul(1_000_000_000);
            Ok(End {
                size: before.st_size as u64,
                modified_ns: seconds.saturating_add(before.st_mtime_nsec as i64),
                changed: of(&now) != of(&before),
            })
        })
        .await
    }
}
