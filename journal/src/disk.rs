//! The directory that a journal lies in, as the few calls that a journal makes; the tests put a simulated one here.

use crate::error::{JournalError, while_it};
use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

pub(crate) trait Disk: Send + Sync {
    /// None: there is no such file.
    fn open(&self, name: &str) -> io::Result<Option<Box<dyn File>>>;
    /// An error if the file is there.
    fn create(&self, name: &str) -> io::Result<Box<dyn File>>;
    fn rename(&self, from: &str, to: &str) -> io::Result<()>;
    /// Not there is a success.
    fn remove(&self, name: &str) -> io::Result<()>;
    /// Makes names durable: what was created, renamed and removed.
    fn sync(&self) -> io::Result<()>;
}

pub(crate) trait File: Send + Sync {
    fn size(&self) -> io::Result<u64>;
    /// May read less, and nothing only at the end.
    fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize>;
    /// May write less.
    fn write(&self, bytes: &[u8], at: u64) -> io::Result<usize>;
    fn set_size(&self, size: u64) -> io::Result<()>;
    /// Makes bytes and size durable.
    fn sync(&self) -> io::Result<()>;
}

impl dyn File + '_ {
    pub(crate) fn read_exact(&self, into: &mut [u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            match self.read(&mut into[done..], at + done as u64)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                read => done += read,
            }
        }
        Ok(())
    }

    /// One write, unless it is short: only the next one tells why (ENOSPC, EIO).
    pub(crate) fn write_all(&self, bytes: &[u8], at: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match self.write(&bytes[done..], at + done as u64)? {
                0 => return Err(io::ErrorKind::WriteZero.into()),
                written => done += written,
            }
        }
        Ok(())
    }
}

/// A directory of the kernel's.
pub(crate) struct Directory {
    dir: OwnedFd,
    /// Carries the flock for as long as this lives.
    _lock: OwnedFd,
}

const FLAGS: OFlags = OFlags::NOFOLLOW.union(OFlags::CLOEXEC);
const OWNER: Mode = Mode::RUSR.union(Mode::WUSR);

impl Directory {
    /// Locks the journal `name`. The lock has a file of its own, which is never removed: the journal's own file is
    /// replaced at each compaction, and whoever waited for its lock would then hold that of a file without a name.
    pub(crate) fn lock(dir: BorrowedFd<'_>, name: &str) -> Result<Directory, JournalError> {
        // A description of our own, whatever the caller's was opened for: fsync refuses one with O_PATH.
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(dir, c".", flags, Mode::empty())
            .map_err(|e| while_it("open its directory")(e.into()))?;
        let lock =
            rustix::fs::openat(&dir, format!("{name}.lock"), FLAGS | OFlags::RDWR | OFlags::CREATE, OWNER)
                .map_err(|e| while_it("open its lock")(e.into()))?;
        match retry_on_intr(|| rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive)) {
            Ok(()) => Ok(Directory { dir, _lock: lock }),
            Err(Errno::WOULDBLOCK) => Err(JournalError::InUse),
            Err(error) => Err(while_it("take its lock")(error.into())),
        }
    }
}

impl Disk for Directory {
    fn open(&self, name: &str) -> io::Result<Option<Box<dyn File>>> {
        match rustix::fs::openat(&self.dir, name, FLAGS | OFlags::RDWR, Mode::empty()) {
            Ok(file) => Ok(Some(Box::new(file))),
            Err(Errno::NOENT) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn create(&self, name: &str) -> io::Result<Box<dyn File>> {
        let flags = FLAGS | OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        Ok(Box::new(rustix::fs::openat(&self.dir, name, flags, OWNER)?))
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&self.dir, from, &self.dir, to)?)
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.dir, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.dir)?)
    }
}

impl File for OwnedFd {
    fn size(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(self)?.st_size.cast_unsigned())
    }

    fn read(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::pread(self, &mut *into, at))?)
    }

    fn write(&self, bytes: &[u8], at: u64) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::pwrite(self, bytes, at))?)
    }

    fn set_size(&self, size: u64) -> io::Result<()> {
        Ok(retry_on_intr(|| rustix::fs::ftruncate(self, size))?)
    }

    fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fdatasync(self)?)
    }
}
