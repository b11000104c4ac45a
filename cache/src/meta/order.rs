//! What this node has changed at the source, and what it has asked it.

/// Which came first: a listing or a change of this node's at the source. Of both the times differ, if by a millisecond that has not
/// come yet: a listing that was begun before a change does not know of it, and one that was begun after it does.
#[derive(Debug, Default)]
pub(super) struct Order {
    listed_ms: Option<u64>,
    changed_ms: Option<u64>,
}

impl Order {
    /// When a listing begins.
    pub(super) fn begins(&mut self, now_ms: u64) -> u64 {
        *self.listed_ms.insert(after(self.changed_ms, now_ms))
    }

    /// When this node has changed something.
    pub(super) fn changes(&mut self, now_ms: u64) -> u64 {
        *self.changed_ms.insert(after(self.listed_ms, now_ms))
    }

    /// When this node has changed something last, if that was after this.
    pub(super) fn changed_since(&self, asked_ms: u64) -> Option<u64> {
        self.changed_ms.filter(|changed_ms| *changed_ms > asked_ms)
    }

    /// Now, and after all that has happened.
    pub(super) fn now(&self, now_ms: u64) -> u64 {
        now_ms.max(self.changed_ms.unwrap_or(0))
    }
}

fn after(other_ms: Option<u64>, now_ms: u64) -> u64 {
    other_ms.map_or(now_ms, |other_ms| now_ms.max(other_ms.saturating_add(1)))
}
