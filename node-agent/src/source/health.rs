//! Whether a source answers: reported once when it stops and once when it goes on, and known in between.

use crate::lock::lock;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc::UnboundedSender;
use volume::ScopeId;

/// A change of state. Some: it fails, and why.
pub(crate) type Change = (ScopeId, Option<String>);

pub(crate) struct Health {
    scope: ScopeId,
    failing: AtomicBool,
    reports: Mutex<Reports>,
}

struct Reports {
    /// Changes are reported in their order.
    to: UnboundedSender<Change>,
    /// The last of them.
    why: Option<String>,
}

impl Health {
    pub(crate) fn new(scope: ScopeId, to: UnboundedSender<Change>) -> Self {
        Self { scope, failing: AtomicBool::new(false), reports: Mutex::new(Reports { to, why: None }) }
    }

    /// After all retries: readers get EIO.
    pub(crate) fn fails(&self, why: &str) {
        self.change(true, || Some(why.to_owned()));
    }

    pub(crate) fn works(&self) {
        self.change(false, || None);
    }

    fn change(&self, failing: bool, why: impl FnOnce() -> Option<String>) {
        // Nearly always nothing changes: that costs a look.
        if self.failing.load(Ordering::Relaxed) == failing {
            return;
        }
        let mut reports = lock(&self.reports);
        if self.failing.swap(failing, Ordering::Relaxed) != failing {
            reports.why = why();
            let _ = reports.to.send((self.scope.clone(), reports.why.clone())); // fails only when the agent is shutting down
        }
    }

    /// Why it fails, if it does.
    pub(crate) fn trouble(&self) -> Option<String> {
        lock(&self.reports).why.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_changes_are_told() {
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        let id = ScopeId::parse(&"0".repeat(32)).unwrap();
        let health = Health::new(id, sender);
        for _ in 0..3 {
            health.works();
        }
        assert_eq!(health.trouble(), None);
        for why in ["a", "b"] {
            health.fails(why);
            assert_eq!(health.trouble().as_deref(), Some("a"), "as it was reported");
        }
        health.works();
        assert_eq!(health.trouble(), None);
        health.works();
        drop(health);
        let all: Vec<_> = std::iter::from_fn(|| receiver.blocking_recv()).map(|(_, why)| why).collect();
        assert_eq!(all, [Some("a".to_owned()), None]);
    }
}
