//! What came of the last attempts to bring something of an area into the store, for people.

use crate::lock::lock;
use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::SystemTime;

/// Of so many paths the last one is kept.
const KEPT: usize = 16;
/// The path of a probe is its node's own, and whatever is sent next succeeds only behind it.
const PROBE: &str = "probe";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) at: SystemTime,
    /// Below the volume's source.
    pub(crate) path: Vec<u8>,
    /// What was tried, and what the store, or its silence, has said. Holds no secret.
    pub(crate) why: String,
    what: &'static str,
}

/// In the order in which they came.
#[derive(Debug, Default)]
pub(super) struct Failures(Mutex<VecDeque<Failure>>);

impl Failures {
    pub(super) fn note(&self, what: &'static str, path: &[u8], error: &dyn std::fmt::Display) {
        let failure =
            Failure { at: SystemTime::now(), path: path.to_vec(), why: format!("{what}: {error}"), what };
        let mut all = lock(&self.0);
        all.retain(|other| other.path != path);
        if all.len() >= KEPT {
            all.pop_front();
        }
        all.push_back(failure);
    }

    /// The store has it now.
    pub(super) fn over(&self, path: &[u8]) {
        lock(&self.0).retain(|failure| failure.path != path && failure.what != PROBE);
    }

    pub(super) fn last(&self) -> Option<Failure> {
        lock(&self.0).back().cloned()
    }

    pub(super) fn since(&self, begun: SystemTime) -> Vec<Failure> {
        lock(&self.0).iter().filter(|failure| failure.at >= begun).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_failure_of_each_path_is_told_until_the_store_has_it_and_few_are_kept() {
        let failures = Failures::default();
        failures.note(PROBE, b".millpond-probe-x", &"no answer");
        failures.note("upload", b"a", &"503");
        failures.note("upload", b"a", &"403");
        assert_eq!(failures.last().unwrap().why, "upload: 403");
        assert_eq!(failures.since(SystemTime::UNIX_EPOCH).len(), 2);
        failures.over(b"b");
        assert_eq!(failures.since(SystemTime::UNIX_EPOCH).len(), 1, "the probe has succeeded");
        failures.over(b"a");
        assert_eq!(failures.last(), None);
        for number in 0..10_000_u32 {
            failures.note("upload", &number.to_be_bytes(), &"503");
        }
        assert_eq!(failures.since(SystemTime::UNIX_EPOCH).len(), KEPT);
    }
}
