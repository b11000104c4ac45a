//! What came of each attempt, as a line of JSON in a file that was opened before the lock-down.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Mutex;

#[derive(Debug)]
pub struct Report(Mutex<File>);

impl Report {
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(Mutex::new(File::options().create(true).append(true).open(path)?)))
    }

    /// `result`: the name of an errno, of an answer, or what was achieved.
    pub fn note(&self, attempt: &str, result: impl Into<String>) {
        let line = serde_json::json!({ "attempt": attempt, "result": result.into() });
        let mut file = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let _ = file.write_all(format!("{line}\n").as_bytes()); // a test misses the line
    }
}

/// As manuals name it.
pub fn errno_name(errno: i32) -> String {
    let known = [
        (libc::EACCES, "EACCES"),
        (libc::EAGAIN, "EAGAIN"),
        (libc::EBADF, "EBADF"),
        (libc::ECONNREFUSED, "ECONNREFUSED"),
        (libc::EFAULT, "EFAULT"),
        (libc::EINVAL, "EINVAL"),
        (libc::EISCONN, "EISCONN"),
        (libc::EMFILE, "EMFILE"),
        (libc::EMSGSIZE, "EMSGSIZE"),
        (libc::ENOENT, "ENOENT"),
        (libc::ENOMEM, "ENOMEM"),
        (libc::ENOSYS, "ENOSYS"),
        (libc::EPERM, "EPERM"),
        (libc::EPIPE, "EPIPE"),
        (libc::EROFS, "EROFS"),
        (libc::ESRCH, "ESRCH"),
        (libc::ETXTBSY, "ETXTBSY"),
    ];
    let name = known.iter().find(|(number, _)| *number == errno).map(|(_, name)| (*name).to_owned());
    name.unwrap_or_else(|| format!("errno {errno}"))
}
