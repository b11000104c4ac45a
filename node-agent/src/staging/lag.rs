//! Whether what was written gets to the store in time, as the owners of the volume are told.

use super::Waiting;
use super::area::Area;
use super::file::File;
use crate::lock::lock;
use link::broker::{Report, Unsent};
use std::sync::Arc;
use std::time::Duration;

/// Of a path, or of what a store has said: what follows it in an Event is to be read, too.
const SHOWN_CHARS_MAX: usize = 250;

impl Area {
    /// What waits for the store.
    pub(crate) fn unsent(&self) -> Unsent {
        let Waiting { files, bytes, conflicts } = self.waiting();
        let waiting: Vec<Arc<File>> = {
            let state = self.state();
            state.files.values().filter(|file| lock(&file.record).waits()).cloned().collect()
        };
        // Of those that wait for the store, and not for a person.
        let since = waiting.iter().filter(|file| !lock(&file.record).conflict);
        let oldest = since.filter_map(|file| file.waits_since()).min();
        // For a person one that is in conflict comes first.
        let path = waiting.iter().filter_map(|file| {
            let record = lock(&file.record);
            Some((!record.conflict, record.path.clone()?))
        });
        let why = self.last_failure().filter(|_| files > 0);
        Unsent {
            files: files as u64,
            bytes,
            conflicts: conflicts as u64,
            oldest_ms: oldest.map_or(0, |since| since.elapsed().as_millis() as u64),
            path: path.min().map_or_else(String::new, |(_, path)| shown(&String::from_utf8_lossy(&path))),
            why: why.map(|failure| shown(&failure.why)),
        }
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

/// As a terminal may show it: a tenant chooses the names of files, and a store what it answers.
fn shown(text: &str) -> String {
    let clean: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    match clean.char_indices().nth(SHOWN_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &clean[..end]),
        None => clean,
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

    #[test]
    fn what_a_tenant_or_a_store_has_said_is_short_and_does_nothing_to_a_terminal() {
        assert_eq!(shown("a/b"), "a/b");
        assert_eq!(shown("a\u{1b}[2Jb\nc"), "a\u{fffd}[2Jb\u{fffd}c");
        assert_eq!(shown(&"é".repeat(1000)).chars().count(), SHOWN_CHARS_MAX + 1);
    }
}
