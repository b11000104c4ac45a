//! What killed agent after agent: not executed again for a while.

use crate::lock::lock;
use inflight::Subject;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// A caller that asks again would kill agents again. An orchestrator has forgotten by then that they died.
const CONDEMNED_FOR: Duration = Duration::from_secs(600);
/// On one mount; the oldest are forgotten.
const CONDEMNED_MAX: usize = 64;

#[derive(Default)]
pub(super) struct Condemned(Mutex<Vec<(Subject, Instant)>>);

impl Condemned {
    pub(super) fn add(&self, subject: Subject, now: Instant) {
        let mut all = lock(&self.0);
        if all.len() == CONDEMNED_MAX {
            all.remove(0);
        }
        all.push((subject, now));
    }

    /// `subject` is looked up only if anything is condemned: nearly never.
    pub(super) fn has(&self, subject: impl FnOnce() -> Option<Subject>, now: Instant) -> bool {
        let mut all = lock(&self.0);
        all.retain(|(_, since)| now.saturating_duration_since(*since) < CONDEMNED_FOR);
        !all.is_empty() && subject().is_some_and(|asked| all.iter().any(|(subject, _)| *subject == asked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use inflight::Poisoned;

    fn subject(nodeid: u64) -> Subject {
        let read = Poisoned { unique: 0, opcode: 15, nodeid, deaths: 2 };
        read.subject().unwrap()
    }

    #[test]
    fn what_killed_agents_is_condemned_for_a_while_and_no_other() {
        let (condemned, now) = (Condemned::default(), Instant::now());
        assert!(!condemned.has(|| panic!("looked up for nothing"), now));
        condemned.add(subject(7), now);
        assert!(condemned.has(|| Some(subject(7)), now));
        assert!(!condemned.has(|| Some(subject(8)), now) && !condemned.has(|| None, now));
        assert!(condemned.has(|| Some(subject(7)), now + CONDEMNED_FOR - Duration::from_millis(1)));
        assert!(!condemned.has(|| Some(subject(7)), now + CONDEMNED_FOR));
        assert!(lock(&condemned.0).is_empty());
    }

    #[test]
    fn the_oldest_are_forgotten() {
        let (condemned, now) = (Condemned::default(), Instant::now());
        (0..=CONDEMNED_MAX as u64).for_each(|nodeid| condemned.add(subject(nodeid), now));
        assert!(!condemned.has(|| Some(subject(0)), now));
        assert!(condemned.has(|| Some(subject(1)), now));
    }
}
