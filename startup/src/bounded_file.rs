//! A log file that does not grow for ever: at its limit it becomes `<name>.1`, in place of the one before.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(crate) struct BoundedFile {
    path: PathBuf,
    file: File,
    bytes: u64,
    bytes_max: u64,
}

impl BoundedFile {
    /// Goes on with what is there.
    pub(crate) fn open(path: &Path, bytes_max: u64) -> io::Result<Self> {
        let file = open(path)?;
        let bytes = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), file, bytes, bytes_max })
    }

    /// What cannot be set aside is begun anew: the log goes on, and does not grow.
    fn turn_over(&mut self) -> io::Result<()> {
        match set_aside(&self.path) {
            Ok(file) => self.file = file,
            Err(_) => self.file.set_len(0)?,
        }
        self.bytes = 0;
        Ok(())
    }
}

fn set_aside(path: &Path) -> io::Result<File> {
    let mut old = path.to_owned().into_os_string();
    old.push(".1");
    match fs::rename(path, old) {
        // The file was taken away: to be set aside, or for good.
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => open(path),
    }
}

impl Write for BoundedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes > 0 && self.bytes + bytes.len() as u64 > self.bytes_max {
            self.turn_over()?;
        }
        let written = self.file.write(bytes)?;
        self.bytes += written as u64;
        Ok(written)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// For its owner only. A link is not followed: root may log into a directory of another user's choice.
fn open(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_at_its_limit_is_set_aside_and_there_are_never_more_than_two() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, "before\n").unwrap();
        let mut log = BoundedFile::open(&path, 100).unwrap();
        for n in 0..50 {
            log.write_all(format!("line {n}\n").as_bytes()).unwrap();
        }
        let names = fs::read_dir(dir.path()).unwrap().count();
        assert_eq!(names, 2);
        let (old, new) =
            (fs::read_to_string(dir.path().join("log.1")).unwrap(), fs::read_to_string(&path).unwrap());
        assert!(old.len() <= 100 && new.len() <= 100);
        assert!(new.ends_with("line 49\n") && (old + &new).contains("line 38\nline 39\n"));
    }

    #[test]
    fn a_log_that_somebody_takes_away_goes_on_under_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = BoundedFile::open(&path, 100).unwrap();
        for n in 0..50 {
            fs::remove_file(&path).ok();
            log.write_all(format!("line {n}\n").as_bytes()).unwrap();
        }
        log.write_all(&[b'\n'; 100]).unwrap();
        assert!(fs::read_to_string(&path).unwrap().len() <= 100);
    }

    #[test]
    fn a_log_that_cannot_be_set_aside_goes_on_and_does_not_grow() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        let mut log = BoundedFile::open(&path, 100).unwrap();
        fs::create_dir(dir.path().join("log.1")).unwrap();
        for n in 0..50 {
            log.write_all(format!("line {n}\n").as_bytes()).unwrap();
        }
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.len() <= 100 && text.ends_with("line 49\n"), "{text}");
    }

    #[test]
    fn a_link_is_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/null", dir.path().join("log")).unwrap();
        assert!(BoundedFile::open(&dir.path().join("log"), 100).is_err());
    }
}
