//! How a volume does, in the words of its latest Events: what `NodeGetVolumeStats` tells kubelet, too.

use super::Broker;
use super::mounts_table::Mount;
use crate::events::{Reason, text};
use link::broker::{Away, Usage};
use mounts::Target;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Of one mount. The default: all is well, and nothing is known of its size.
#[derive(Debug, Default)]
pub(super) struct Condition {
    latest: Mutex<Latest>,
}

#[derive(Debug, Default)]
struct Latest {
    /// What is wrong with the mount.
    mount: Option<String>,
    /// A container has the dead mount in whose place this one is, and cannot be given it.
    left_behind: Option<String>,
    usage: Usage,
}

impl Condition {
    fn latest(&self) -> MutexGuard<'_, Latest> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, reason: Reason, message: &str) {
        match reason {
            Reason::Degraded | Reason::Failed => self.latest().mount = Some(message.to_owned()),
            Reason::Recovered => self.latest().mount = None,
            // One call failed, nobody noticed, or it is the source's.
            Reason::RequestFailed | Reason::Healed | Reason::ServingStale => {}
        }
    }

    /// True if this is news.
    pub(super) fn note_left_behind(&self, message: Option<&str>) -> bool {
        let message = message.map(str::to_owned);
        let before = std::mem::replace(&mut self.latest().left_behind, message.clone());
        before != message
    }

    pub(super) fn trouble(&self) -> Option<String> {
        let latest = self.latest();
        latest.mount.clone().or_else(|| latest.left_behind.clone())
    }

    pub(super) fn note_usage(&self, usage: Usage) {
        self.latest().usage = usage;
    }

    pub(super) fn usage(&self) -> Usage {
        self.latest().usage.clone()
    }
}

impl Broker {
    /// What is wrong with the mount at this target, if anything was said.
    pub fn trouble(&self, volume: &str, target: &Target) -> Option<String> {
        let known = self.table.at(target.path());
        let said = known.as_ref().and_then(|mount| mount.condition.trouble());
        // What was said of its predecessor is over when one lives.
        let lives = known.is_some_and(|mount| !mount.state().is_over());
        let not_renewed = || self.renewals.told_of(target.path()).filter(|_| !lives);
        said.or_else(|| not_renewed().map(|why| text::not_renewed(volume, &why)))
    }

    /// What is wrong with its source, as the agent says that serves it: a level, so no report of it can be lost.
    pub fn source_trouble(volume: &str, usage: &Usage) -> Option<String> {
        usage.away.as_ref().map(|Away { why, stale }| match stale {
            true => text::serving_stale(volume, why),
            false => text::source_away(volume, why),
        })
    }

    /// The last that its agent has told of it.
    pub fn last_usage(&self, target: &Target) -> Usage {
        self.table.at(target.path()).map(|mount| mount.condition.usage()).unwrap_or_default()
    }

    /// An Event on the mount's pod and claim, which is its condition from now on.
    pub(super) fn tell(&self, mount: &Mount, reason: Reason, message: &str) {
        mount.condition.note(reason, message);
        self.events.note(&mount.subjects, reason, message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_event_is_the_condition_and_the_mounts_own_comes_first() {
        let condition = Condition::default();
        let trouble = |condition: &Condition| condition.trouble();
        assert_eq!(trouble(&condition), None);
        assert!(condition.note_left_behind(Some("a container")));
        assert!(!condition.note_left_behind(Some("a container")), "which is no news");
        condition.note(Reason::Degraded, "nobody serves it");
        assert_eq!(trouble(&condition).as_deref(), Some("nobody serves it"));
        condition.note(Reason::Failed, "it has ended");
        condition.note(Reason::Healed, "healed");
        condition.note(Reason::RequestFailed, "one call");
        assert_eq!(trouble(&condition).as_deref(), Some("it has ended"));
        condition.note(Reason::Recovered, "well");
        assert_eq!(trouble(&condition).as_deref(), Some("a container"), "which is not over");
        assert!(condition.note_left_behind(None) && !condition.note_left_behind(None));
        assert_eq!(trouble(&condition), None);
    }
}
