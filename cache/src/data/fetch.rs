//! A flight: one ranged GET whose body goes to the writer threads as it arrives.

use super::Reason;
use super::file::{Body, File, Woken, send_all};
use super::memory::Share;
use super::read::Busy;
use super::sums::Checksum;
use super::write::Batch;
use async_trait::async_trait;
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::Cause;

/// Handed to the writers at once at most. Enough to make a thread's wake-up cheap, little enough to wake readers early.
const BATCH_BYTES: u64 = 1 << 20;

/// Where the bytes of one version of one object come from.
#[async_trait]
pub trait Fetch: Send + Sync {
    /// Exactly `range` (bytes) of exactly this version, retried and checked as far as the source's limits allow.
    async fn fetch(
        &self,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, FetchError>>, FetchError>;

    /// What to add bodies up with as they come, because [`Self::checksum`] will most likely tell such a sum. None: there is
    /// nothing to compare.
    fn sums(&self) -> Option<CrcAlgorithm> {
        None
    }

    /// Of the whole object in this version, as its store tells it. None: it tells none.
    async fn checksum(&self) -> Result<Option<Checksum>, FetchError> {
        Ok(None)
    }

    /// What came does not have the checksum that was told. `again`: it came twice with the same bytes, so it stays.
    fn came_wrong(&self, _again: bool) {}
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct FetchError {
    pub cause: Cause,
    pub message: String,
}

impl FetchError {
    pub(crate) fn internal(message: &str) -> Self {
        Self { cause: Cause::Internal, message: message.to_owned() }
    }
}

/// The source of a file that was opened by its id only. It is asked only if a whole file turns out to be damaged.
pub(crate) fn nowhere() -> Arc<dyn Fetch> {
    struct Nowhere;
    #[async_trait]
    impl Fetch for Nowhere {
        async fn fetch(
            &self,
            _: Range<u64>,
        ) -> Result<BoxStream<'static, Result<Bytes, FetchError>>, FetchError> {
            let message = "the cached file is damaged: open it again".to_owned();
            Err(FetchError { cause: Cause::Unavailable, message })
        }
    }
    Arc::new(Nowhere)
}

impl File {
    /// The blocks are claimed already. Runs to its end even if every reader stops waiting.
    pub(crate) fn fly(self: &Arc<Self>, fetch: Arc<dyn Fetch>, blocks: Range<u64>) {
        let flight = Flight { _busy: Busy::new(&self.busy), rest: blocks, file: self.clone(), error: None };
        self.engine.runtime.spawn(inflight::carry(flight.run(fetch)));
    }

    /// The version is gone from the source: this instance serves what it has, a new open begins anew.
    fn become_stale(self: &Arc<Self>, error: &FetchError) {
        self.lock().stale = Some(error.clone());
        self.engine.drop_file(self.id(), Reason::Stale);
    }
}

/// However it ends, it gives back the blocks that it did not bring and wakes their waiters.
struct Flight {
    file: Arc<File>,
    /// Not handed to the writers yet.
    rest: Range<u64>,
    error: Option<FetchError>,
    _busy: Busy,
}

impl Flight {
    async fn run(mut self, fetch: Arc<dyn Fetch>) {
        tracing::trace!(file = self.file.id(), blocks = ?self.rest, "fetch");
        let started = Instant::now();
        let (mut first_byte, mut bytes) = (Duration::ZERO, 0);
        let mut batch = Batch::new(self.file.clone(), self.rest.start);
        let result = self.carry(&*fetch, &mut batch, started, &mut first_byte, &mut bytes).await;
        // What came before an error is as good as the rest.
        self.flush(&mut batch);
        self.error = result.err();
        self.file.engine.observer.fetched(bytes, first_byte, started.elapsed(), self.error.as_ref());
    }

    async fn carry(
        &mut self,
        fetch: &dyn Fetch,
        batch: &mut Batch,
        started: Instant,
        first_byte: &mut Duration,
        received: &mut u64,
    ) -> Result<(), FetchError> {
        let range = self.file.bytes_of(&self.rest);
        let mut body = fetch.fetch(range.clone()).await?;
        *first_byte = started.elapsed();
        let block_bytes = self.file.block_bytes();
        let (mut chunk, mut position) = (Bytes::new(), range.start);
        let (mut block, mut filled): (Vec<Bytes>, u64) = (Vec::new(), 0);
        let mut permit = None;
        let mut digest = self.file.sums.map(Digest::new);
        while position < range.end {
            let block_end = ((position / block_bytes + 1) * block_bytes).min(range.end);
            if permit.is_none() {
                permit = Some(self.memory(block_end - position, batch).await?);
            }
            if chunk.is_empty() {
                // What has arrived is worth more on the disk than waiting for company.
                let next = match body.next().now_or_never() {
                    Some(next) => next,
                    None => {
                        self.flush(batch);
                        body.next().await
                    }
                };
                chunk = next.ok_or_else(|| {
                    let message = format!("the source ended the body at {position} of {}", range.end);
                    FetchError { cause: Cause::Unavailable, message }
                })??;
                *received += chunk.len() as u64;
                if let Some(digest) = &mut digest {
                    let ours = chunk.len().min((range.end - position) as usize);
                    digest.update(&chunk[..ours]);
                }
                continue;
            }
            let take = chunk.len().min((block_end - position) as usize);
            block.push(chunk.split_to(take));
            position += take as u64;
            filled += take as u64;
            if position == range.end
                && let Some(digest) = digest.take()
            {
                // Before the last block makes the file whole.
                self.file.lock().sums.add(range.clone(), digest.finalize());
            }
            if position == block_end {
                batch.push(std::mem::take(&mut block), filled, permit.take());
                filled = 0;
                if batch.bytes() >= BATCH_BYTES {
                    self.flush(batch);
                }
            }
        }
        Ok(())
    }

    /// Memory for one block. No fetch waits for memory while it holds finished blocks, so each gets some in the end.
    async fn memory(&mut self, bytes: u64, batch: &mut Batch) -> Result<Share, FetchError> {
        let memory = self.file.engine.memory.clone();
        let scope = self.file.key().scope.clone();
        if let Some(share) = memory.try_take(&scope, bytes) {
            return Ok(share);
        }
        self.flush(batch);
        memory.take(&scope, bytes).await.ok_or_else(|| FetchError::internal("the cache is closed"))
    }

    /// From here on the writers answer for the batch's blocks.
    fn flush(&mut self, batch: &mut Batch) {
        self.rest.start = batch.end();
        let next = Batch::new(self.file.clone(), batch.end());
        std::mem::replace(batch, next).submit();
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let error = self.error.take();
        let woken = {
            let mut state = self.file.lock();
            let file = self.file.clone();
            state.flights -= 1;
            let given_back = self.rest.clone();
            if let Body::Partial(blocks) = &mut state.body {
                blocks.give_back(&given_back);
            }
            let woken = match &error {
                _ if given_back.is_empty() => Vec::new(),
                Some(error) => state.wake(&given_back, Some(&Woken::Failed(error.clone()))),
                // Dropped with its runtime, or by a panic of the source's.
                None => {
                    let error = FetchError::internal("the fetch was abandoned");
                    state.wake(&given_back, Some(&Woken::Failed(error)))
                }
            };
            // Not after a failure (that is for the next reader to try), nor when the runtime drops us: it would drop
            // the next too.
            if error.is_none() && given_back.is_empty() {
                file.fetch_ahead(&mut state);
                file.launch(state);
            }
            woken
        };
        if let Some(error) = error.filter(|e| e.cause == Cause::Stale) {
            self.file.become_stale(&error);
        }
        send_all(woken);
    }
}
