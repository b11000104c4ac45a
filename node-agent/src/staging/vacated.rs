//! Names that files have left just now. A listing goes on after the name of an inode, which may have another one by then.

use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::Instant;

/// A program that lists a directory and moves what it finds goes on before that.
const KEPT: Duration = Duration::from_secs(300);
const MOST: usize = 4096;

#[derive(Default)]
pub(super) struct Vacated(VecDeque<Name>);

struct Name {
    since: Instant,
    dir: u64,
    ino: u64,
    name: Vec<u8>,
}

impl Vacated {
    pub(super) fn note(&mut self, dir: u64, ino: u64, name: &[u8]) {
        while self.0.len() >= MOST || self.0.front().is_some_and(|name| name.since.elapsed() >= KEPT) {
            self.0.pop_front();
        }
        self.0.push_back(Name { since: Instant::now(), dir, ino, name: name.to_vec() });
    }

    /// These inodes were just shown in this directory, under the names that they have now.
    pub(super) fn note_shown(&mut self, dir: u64, is_shown: impl Fn(u64) -> bool) {
        self.0.retain(|name| name.dir != dir || !is_shown(name.ino));
    }

    /// The name that it had last in this directory, if it has left it.
    pub(super) fn find(&self, dir: u64, ino: u64) -> Option<Vec<u8>> {
        let of_it = self.0.iter().rev().find(|name| (name.dir, name.ino) == (dir, ino));
        of_it.map(|name| name.name.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_last_name_is_found_for_a_while_and_there_are_never_too_many() {
        let mut vacated = Vacated::default();
        vacated.note(1, 7, b"a");
        vacated.note(1, 7, b"b");
        vacated.note(2, 7, b"c");
        assert_eq!([vacated.find(1, 7), vacated.find(2, 7)], [Some(b"b".to_vec()), Some(b"c".to_vec())]);
        assert_eq!(vacated.find(1, 8), None);
        vacated.note_shown(2, |_| true);
        assert_eq!((vacated.find(1, 7), vacated.find(2, 7)), (Some(b"b".to_vec()), None));
        tokio::time::advance(KEPT).await;
        vacated.note(3, 1, b"d");
        assert_eq!((vacated.find(1, 7), vacated.0.len()), (None, 1));
        (0..2 * MOST as u64).for_each(|ino| vacated.note(4, ino, b"e"));
        assert_eq!(vacated.0.len(), MOST);
    }
}
