//! Is a disk to be trusted with readers that we do not see? The kernel hands an error of a passthrough file to its
//! reader; a process of ours that reads fetches the bytes instead. A disk that fails now and then answers a probe in
//! between, so that one is not enough: it is suspected until it has been without an error for a while, and for longer
//! each time that one comes soon after.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

/// Of failures that are rarer than this, one may reach a reader.
const LEAST: Duration = Duration::from_secs(60);
const MOST: Duration = Duration::from_secs(30 * 60);
/// A disk that has not failed for this long begins anew.
const FORGOTTEN: Duration = Duration::from_secs(6 * 3600);

#[derive(Debug, Default)]
pub(crate) struct Suspicion {
    failed_at: Option<Instant>,
    lasts: Duration,
}

impl Suspicion {
    /// A call of the disk has failed.
    pub(crate) fn failed(&mut self, error: &io::Error, now: Instant) {
        if !is_of_the_disk(error) {
            return;
        }
        self.lasts = match self.failed_at.map(|at| now.saturating_duration_since(at)) {
            Some(quiet) if quiet < self.lasts => self.lasts, // one failure rarely comes alone
            Some(quiet) if quiet < FORGOTTEN => (self.lasts * 2).min(MOST),
            _ => LEAST,
        };
        self.failed_at = Some(now);
    }

    pub(crate) fn holds(&self, now: Instant) -> bool {
        self.failed_at.is_some_and(|at| now.saturating_duration_since(at) < self.lasts)
    }
}

/// Not that it is full, read-only, or has no such file: what it has is read without an error all the same.
fn is_of_the_disk(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::StorageFull
            | ErrorKind::QuotaExceeded
            | ErrorKind::FileTooLarge
            | ErrorKind::ReadOnlyFilesystem
            | ErrorKind::NotFound
            | ErrorKind::PermissionDenied
            | ErrorKind::NotConnected // of ours: its directory could not be opened at start
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::io::Errno;

    #[test]
    fn a_disk_that_failed_is_suspected_until_it_was_quiet_and_for_longer_each_time() {
        let eio = io::Error::from(Errno::IO);
        let (mut suspicion, mut now) = (Suspicion::default(), Instant::now());
        let tick = Duration::from_millis(1);
        assert!(!suspicion.holds(now));
        for seconds in [60, 120, 240, 480, 960, 1800, 1800] {
            let lasts = Duration::from_secs(seconds);
            for _ in 0..3 {
                suspicion.failed(&eio, now);
                now += lasts - tick;
                assert!(suspicion.holds(now), "{seconds} s after each failure");
            }
            now += tick;
            assert!(!suspicion.holds(now), "{seconds} s after the last");
        }
        now += FORGOTTEN;
        suspicion.failed(&eio, now);
        assert!(suspicion.holds(now) && !suspicion.holds(now + LEAST));
    }

    #[test]
    fn a_full_disk_and_a_read_only_one_are_read_like_any() {
        let mut suspicion = Suspicion::default();
        let now = Instant::now();
        for errno in [Errno::NOSPC, Errno::DQUOT, Errno::FBIG, Errno::ROFS, Errno::NOENT, Errno::ACCESS] {
            suspicion.failed(&errno.into(), now);
        }
        assert!(!suspicion.holds(now));
    }
}
