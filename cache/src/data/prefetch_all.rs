//! How far a file has come, and fetching all of it for those that wait until it is whole.

use super::file::{Body, File};
use std::sync::Arc;

/// One look at a file that is being fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    pub whole: bool,
    pub size: u64,
    /// In the data file and verified, bytes; rounded to blocks.
    pub present: u64,
    /// GETs are under way.
    pub fetching: bool,
    /// How far the longest of its sequential readers has come, bytes.
    pub in_sequence: u64,
}

/// While one of these lives, all of its file is wanted.
#[derive(Debug)]
pub struct PrefetchAll(Arc<File>);

impl File {
    pub fn progress(&self) -> Progress {
        let state = self.lock();
        let size = self.key().size;
        let present = match &state.body {
            Body::Whole => size,
            Body::Resting => 0,
            Body::Partial(blocks) => (blocks.present() * self.block_bytes()).min(size),
        };
        Progress {
            whole: matches!(state.body, Body::Whole),
            size,
            present,
            fetching: state.flights > 0,
            in_sequence: state.streams.longest(),
        }
    }

    /// Fetches whatever is missing, as much at once as one file may; to be called within the runtime.
    pub fn prefetch_all(self: &Arc<Self>) -> PrefetchAll {
        let mut state = self.lock();
        state.prefetch_all += 1;
        self.fetch_ahead(&mut state);
        self.launch(state);
        PrefetchAll(self.clone())
    }
}

impl Drop for PrefetchAll {
    fn drop(&mut self) {
        // What is under way goes on: another reader is at this file.
        self.0.lock().prefetch_all -= 1;
    }
}
