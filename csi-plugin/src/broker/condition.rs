//! How a volume does, in the words of its latest Events: what `NodeGetVolumeStats` tells kubelet, too.

use crate::events::Reason;
use link::broker::Usage;
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

    pub(super) fn note(&self, reason: Reason, message: &str) {
        match reason {
            Reason::Degraded | Reason::Failed => self.latest().mount = Some(message.to_owned()),
            Reason::Recovered => self.latest().mount = None,
            // One call failed, no reader noticed, or it is the source's.
            Reason::RequestFailed | Reason::Healed | Reason::ServingStale => {}
            // The agent that serves it is asked.
            Reason::UploadsLate | Reason::UploadConflict | Reason::UploadsDone | Reason::UploadsLeft => {}
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
        condition.note(Reason::Degraded, "no worker serves it");
        assert_eq!(trouble(&condition).as_deref(), Some("no worker serves it"));
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
