//! The control files of one connection (the kernel's `fs/fuse/control.c`), held: a number is given to another connection as
//! soon as its connection is gone, a file that was opened in time is this connection's for ever, and without effect
//! afterwards (`fuse_ctl_remove_conn` clears it).

use crate::{Connection, KernelError, device};
use rustix::fs::{Mode, OFlags};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

#[derive(Debug)]
pub struct Control {
    connection: Connection,
    /// None: a pretended kernel's.
    files: Option<Files>,
}

#[derive(Debug)]
struct Files {
    abort: OwnedFd,
    /// Opened anew for each look, because it can be read once.
    waiting: OwnedFd,
}

impl Control {
    /// `device` is the connection's, whose number the mount table showed while it lived. If it still lives when the
    /// files are open, its number was its own all the time, and they are its own.
    pub(crate) fn open(
        fusectl: &Path,
        connection: Connection,
        device: BorrowedFd<'_>,
    ) -> Result<Self, KernelError> {
        let files = Files::open(fusectl, connection)?;
        match device::has_ended(device) {
            true => Err(KernelError::Ended),
            // Newer kernels say it themselves; then the mount table is not needed.
            false if device::number(device).is_some_and(|number| number != connection.minor) => {
                Err(KernelError::OtherConnection)
            }
            false => Ok(Self { connection, files: Some(files) }),
        }
    }

    /// A descriptor pins the superblock, and with it its number, as long as this runs.
    pub(crate) fn open_pinned(fusectl: &Path, connection: Connection) -> Result<Self, KernelError> {
        Ok(Self { connection, files: Some(Files::open(fusectl, connection)?) })
    }

    pub(crate) fn pretended(connection: Connection) -> Self {
        Self { connection, files: None }
    }

    pub(crate) fn connection(&self) -> Connection {
        self.connection
    }

    /// Ends the connection, if it has not ended.
    pub(crate) fn abort(&self) -> Result<(), KernelError> {
        let Some(files) = &self.files else { return Ok(()) };
        match rustix::io::write(&files.abort, b"1") {
            Ok(_) => Ok(()),
            Err(e) => Err(self.failed("write", "abort", e.into())),
        }
    }

    /// Unanswered requests; none when the connection is gone.
    pub(crate) fn waiting(&self) -> Result<u64, KernelError> {
        let Some(files) = &self.files else { return Ok(0) };
        let text = std::fs::read_to_string(format!("/proc/self/fd/{}", files.waiting.as_fd().as_raw_fd()))
            .map_err(|e| self.failed("read", "waiting", e))?;
        match text.trim() {
            "" => Ok(0),
            number => number
                .parse()
                .map_err(|_| self.failed("understand", "waiting", io::Error::from(ErrorKind::InvalidData))),
        }
    }

    fn failed(&self, what: &'static str, file: &str, error: io::Error) -> KernelError {
        let Connection { major, minor } = self.connection;
        KernelError::call(what, format!("the control file {file} of connection {major}:{minor}"), error)
    }
}

impl Files {
    fn open(fusectl: &Path, connection: Connection) -> Result<Self, KernelError> {
        let minor = connection.minor;
        let directory = fusectl.join(minor.to_string());
        let open = |name: &str, flags: OFlags| {
            let file = directory.join(name);
            rustix::fs::open(&file, flags | OFlags::CLOEXEC | OFlags::NOFOLLOW, Mode::empty()).map_err(|e| {
                match e {
                    rustix::io::Errno::NOENT => KernelError::NoFusectl { dir: fusectl.to_owned(), minor },
                    e => KernelError::call("open", file.display().to_string(), e),
                }
            })
        };
        Ok(Self { abort: open("abort", OFlags::WRONLY)?, waiting: open("waiting", OFlags::PATH)? })
    }
}
