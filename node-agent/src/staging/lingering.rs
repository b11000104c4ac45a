//! Files that have lost their names just now. A kernel that has looked a name up opens what it was told, although another mount has
//! removed it in between: so small files are kept for a moment.

use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::Instant;

pub(super) const KEPT: Duration = Duration::from_secs(2);
pub(super) const BYTES_MAX: u64 = 1 << 20;
const MOST: usize = 256;

/// By inode number.
#[derive(Default)]
pub(super) struct Lingering(VecDeque<(Instant, u64)>);

impl Lingering {
    /// One that is not to be kept any longer, so that there are not too many.
    pub(super) fn note(&mut self, ino: u64) -> Option<u64> {
        self.0.push_back((Instant::now(), ino));
        if self.0.len() > MOST { self.0.pop_front().map(|(_, ino)| ino) } else { None }
    }

    pub(super) fn has(&self, ino: u64) -> bool {
        self.0.iter().any(|(_, lingering)| *lingering == ino)
    }

    pub(super) fn take(&mut self, ino: u64) {
        self.0.retain(|(_, lingering)| *lingering != ino);
    }

    /// The one that was noted first, if it was so long ago or longer.
    pub(super) fn take_older(&mut self, age: Duration) -> Option<u64> {
        let is_due = self.0.front().is_some_and(|(since, _)| since.elapsed() >= age);
        if is_due { self.0.pop_front().map(|(_, ino)| ino) } else { None }
    }
}
