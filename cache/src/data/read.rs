//! A read: is the range there, is it on its way, or what has to be started. Decided under the file's lock, waited for
//! without it.

use super::blocks::Blocks;
use super::fetch::FetchError;
use super::file::{Body, File, Found, Launch, Presence, State, Woken};
use super::stream::{Goal, Limits, Missing, parts};
use super::{ReadOptions, Reading};
use bytes::Bytes;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use tokio::sync::oneshot;
use volume::Cause;

/// How often a reader looks again (verified wrong, then fetched, then evicted …) before it goes to the source itself.
const LOOKS_MAX: u32 = 16;
/// [`File::whole`] goes in steps of this.
const WARM_STEP: u64 = 4 << 20;

/// What one look at the file decided.
enum Look {
    Present(Option<u64>),
    /// The sidecar has not been read yet.
    Resting,
    Wait(oneshot::Receiver<Woken>),
    Direct,
    Failed(FetchError),
}

impl File {
    /// As [`Self::read_with`], without options.
    pub async fn read(self: &Arc<Self>, offset: u64, len: u32) -> Result<Presence, FetchError> {
        self.read_with(offset, len, ReadOptions::default()).await
    }

    /// Waits until the range (clipped to the file) is in the data file, or gives its bytes. Dropping the future cancels
    /// nothing that others may want. A failed fetch fails its waiters only; the next read tries again. `options` are
    /// this reader's, whatever others of the same file want.
    pub(crate) async fn read_with(
        self: &Arc<Self>,
        offset: u64,
        len: u32,
        options: ReadOptions,
    ) -> Result<Presence, FetchError> {
        match self.present(offset, len, options).await? {
            Found::Present { mark } => Ok(Presence::Present { mark }),
            Found::Elsewhere => Ok(Presence::Uncached(self.past_the_disks(offset, len).await?)),
        }
    }

    /// As [`Self::read_with`], for a caller that must find a place for the bytes first: a range that no disk can take
    /// is fetched by [`Self::past_the_disks`].
    pub async fn present(
        self: &Arc<Self>,
        offset: u64,
        len: u32,
        options: ReadOptions,
    ) -> Result<Found, FetchError> {
        let range = self.clipped(offset, len);
        if range.is_empty() {
            return Ok(Found::Present { mark: None });
        }
        let bytes = range.end - range.start;
        let observer = &self.engine.observer;
        let mut goal = None;
        for looks in 0..LOOKS_MAX {
            match self.look(&range, &mut goal, options) {
                Look::Present(mark) => {
                    if looks == 0 {
                        observer.hit(bytes);
                    }
                    return Ok(Found::Present { mark });
                }
                Look::Resting => self.awaken().await,
                Look::Failed(error) => return Err(error),
                Look::Direct => break,
                Look::Wait(receiver) => {
                    if looks == 0 {
                        observer.miss(bytes);
                    }
                    let _busy = Busy::new(&self.busy);
                    match receiver.await {
                        Ok(Woken::Look) => {}
                        Ok(Woken::Direct) => break,
                        Ok(Woken::Failed(error)) => return Err(error),
                        Err(_) => return Err(FetchError::internal("the file was closed under its reader")),
                    }
                }
            }
        }
        Ok(Found::Elsewhere)
    }

    /// The range's bytes (clipped to the file), from the source.
    pub async fn past_the_disks(self: &Arc<Self>, offset: u64, len: u32) -> Result<Bytes, FetchError> {
        let range = self.clipped(offset, len);
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        self.bypass_disks(range).await
    }

    fn clipped(&self, offset: u64, len: u32) -> Range<u64> {
        offset..offset.saturating_add(u64::from(len)).min(self.key().size)
    }

    /// A sequential reader passed the mark: fetch on. Cheap, and harmless when said too often.
    pub fn advance(self: &Arc<Self>, offset: u64, options: ReadOptions) {
        let mut state = self.lock();
        let limits = self.limits(&state, options);
        state.streams.advance(offset.min(self.key().size), limits);
        self.fetch_ahead(&mut state);
        self.launch(state);
    }

    /// Brings all of the file into the cache (warm-up). Fails when no disk can take it.
    pub async fn whole(self: &Arc<Self>) -> Result<(), FetchError> {
        let mut offset = 0;
        while !self.is_whole() && offset < self.key().size {
            if let Presence::Uncached(_) = self.read(offset, WARM_STEP as u32).await? {
                let message = "no cache directory can take this file: see the cache's quotas and disk errors";
                return Err(FetchError { cause: Cause::Internal, message: message.into() });
            }
            offset += WARM_STEP;
        }
        Ok(())
    }

    fn look(self: &Arc<Self>, range: &Range<u64>, goal: &mut Option<Goal>, options: ReadOptions) -> Look {
        let mut state = self.lock();
        let want = self.blocks_of(range);
        if self.is_passed_by() {
            return Look::Direct; // what it has is there, but no reader can read it
        }
        match state.body {
            Body::Whole => return Look::Present(None),
            Body::Resting => return Look::Resting,
            Body::Partial(_) => {}
        }
        let limits = self.limits(&state, options);
        let goal = *goal.get_or_insert_with(|| state.streams.note(range.clone(), limits));
        if state.has(want.clone()) {
            self.fetch_ahead(&mut state);
            self.launch(state);
            return Look::Present(goal.mark);
        }
        if let Some(error) = &state.stale {
            return Look::Failed(error.clone());
        }
        // A small file is one GET: what it costs is the round trip, not the bytes.
        let (want, ahead) = if self.is_large() {
            let ahead = goal.ahead.max(range.end).div_ceil(self.block_bytes()).min(self.blocks());
            (want, ahead)
        } else {
            (0..self.blocks(), self.blocks())
        };
        self.verify_soon(&mut state, &want);
        if !self.start(&mut state, &want, ahead, limits.reading) {
            self.launch(state);
            return Look::Direct;
        }
        let (sender, receiver) = oneshot::channel();
        state.waiters.push(self.blocks_of(range), sender);
        self.launch(state);
        Look::Wait(receiver)
    }

    /// Starts fetching what is missing: all of `want`, and of what follows up to the block `ahead` as much as may be
    /// under way at once. False when something of `want` is missing and no disk can take it.
    fn start(&self, state: &mut State, want: &Range<u64>, ahead: u64, reading: Reading) -> bool {
        let Body::Partial(blocks) = &state.body else { return true };
        if blocks.next_missing(want.clone()).is_none() && want.end >= ahead {
            return true;
        }
        let writable = self.place(state).is_some_and(|root| root.is_writable()) && !self.is_gone();
        let Body::Partial(blocks) = &mut state.body else { return true };
        if !writable {
            return blocks.next_missing(want.clone()).is_none();
        }
        let part = (reading.part_bytes / self.block_bytes()).max(1);
        let slots = reading.parallel_parts.saturating_sub(state.flights);
        for run in parts(&**blocks, want, ahead, part, slots) {
            blocks.claim(run.clone());
            state.flights += 1;
            state.sums.is_fetched = true;
            state.launches.push(Launch::Fetch(run));
        }
        true
    }

    /// Starts what the sequential readers want and what there is room for.
    pub(crate) fn fetch_ahead(&self, state: &mut State) {
        if state.stale.is_some() || matches!(state.body, Body::Whole | Body::Resting) {
            return;
        }
        let mut wanted: Vec<(Range<u64>, Reading)> =
            state.streams.wanted().map(|(bytes, reading)| (self.blocks_of(&bytes), reading)).collect();
        wanted.extend((state.prefetch_all > 0).then(|| (0..self.blocks(), state.reading)));
        for (blocks, reading) in wanted {
            if state.flights < reading.parallel_parts {
                self.start(state, &(blocks.start..blocks.start), blocks.end.min(self.blocks()), reading);
            }
        }
    }

    fn limits(&self, state: &State, options: ReadOptions) -> Limits {
        let reading = options.within(&self.engine.config, state.reading);
        // A small file comes whole anyway.
        let readahead_bytes = if self.is_large() { reading.readahead_bytes } else { 0 };
        Limits { size: self.key().size, reading: Reading { readahead_bytes, ..reading } }
    }
}

impl Missing for Blocks {
    fn next_missing(&self, range: Range<u64>) -> Option<u64> {
        Self::next_missing(self, range)
    }
    fn end_of_missing(&self, range: Range<u64>) -> u64 {
        Self::end_of_missing(self, range)
    }
}

/// Counts a user of the file, so that it is not evicted before others.
pub(crate) struct Busy(Arc<AtomicU32>);

impl Busy {
    pub(crate) fn new(count: &Arc<AtomicU32>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self(count.clone())
    }
}
impl Drop for Busy {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
