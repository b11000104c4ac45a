//! Whether what was written gets to the store in time, as the owners of the volume are told.

use super::area::Area;
use super::file::File;
use crate::lock::lock;
use link::broker::{Report, Unsent};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

impl Area {
    /// What waits for the store.
    pub(crate) fn unsent(&self) -> Unsent {
        let waiting: Vec<Arc<File>> = {
            let state = self.state();
            state.files.values().filter(|file| lock(&file.record).waits()).cloned().collect()
        };
        let mut unsent = Unsent::default();
        let mut oldest: Option<Instant> = None;
        let mut first: Option<(bool, Vec<u8>)> = None;
        for file in waiting {
            let record = file.record();
            unsent.files += 1;
            unsent.conflicts += u64::from(record.conflict);
            // Of one that was removed no bytes go anywhere.
            let Some(path) = record.path else { continue };
            unsent.bytes = unsent.bytes.saturating_add(file.size());
            if let Some(since) = file.waits_since() {
                oldest = Some(oldest.map_or(since, |oldest| oldest.min(since)));
            }
            // One that is in conflict waits for a person, and not for the store.
            let shown = (!record.conflict, path);
            first = Some(first.map_or_else(|| shown.clone(), |first| first.min(shown.clone())));
        }
        unsent.oldest_ms = oldest.map_or(0, |since| since.elapsed().as_millis() as u64);
        unsent.path = first.map_or_else(String::new, |(_, path)| String::from_utf8_lossy(&path).into_owned());
        unsent.why = self.last_failure().filter(|_| unsent.files > 0).map(|failure| failure.why);
        unsent
    }

    /// The same, if it has waited for longer than `limit`, or somebody must look at it.
    pub(crate) fn upload_trouble(&self, limit: Duration) -> Option<Unsent> {
        Some(self.unsent()).filter(|unsent| is_late(unsent, limit) || unsent.conflicts > 0)
    }

    /// What the owners are to be told that they were not told yet.
    pub(crate) fn upload_news(&self, limit: Duration) -> Option<Report> {
        let unsent = self.unsent();
        let late = is_late(&unsent, limit);
        lock(&self.told).step(&unsent, late)
    }
}

fn is_late(unsent: &Unsent, limit: Duration) -> bool {
    unsent.files > 0 && u128::from(unsent.oldest_ms) >= limit.as_millis()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_late_from_the_limit_on_and_nothing_that_waits_never_is() {
        let limit = Duration::from_secs(300);
        let waiting = |files, oldest_ms| Unsent { files, oldest_ms, ..Unsent::default() };
        assert!(is_late(&waiting(1, 300_000), limit) && !is_late(&waiting(1, 299_999), limit));
        assert!(!is_late(&waiting(0, 0), Duration::ZERO));
    }
}
