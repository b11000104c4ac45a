//! Reads that bypass the disks: no cache directory can take the file, or its disk has just failed.
//!
//! A sequential reader gets chunks of 1 MiB, of which a few are kept for it and for others that read alongside, so that
//! a full disk does not turn every 128 KiB into a request.

use super::fetch::FetchError;
use super::file::File;
use super::memory::Share;
use bytes::{Bytes, BytesMut};
use futures::StreamExt;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::OnceCell;
use volume::Cause;

const CHUNK_BYTES: u64 = 1 << 20;
const CHUNKS_MAX: usize = 4;

/// The chunks of one file that are in memory or on their way.
#[derive(Default)]
pub(crate) struct Bypass {
    chunks: VecDeque<Chunk>,
}

#[derive(Clone)]
struct Chunk {
    range: Range<u64>,
    body: Arc<OnceCell<Body>>,
}

struct Body {
    bytes: Bytes,
    /// None: there was no memory to keep it.
    kept: Option<Share>,
}

impl File {
    /// The bytes of `range`, from the source.
    pub(crate) async fn bypass_disks(self: &Arc<Self>, range: Range<u64>) -> Result<Bytes, FetchError> {
        let sequential = range.start == 0 || self.lock().streams.is_sequential(range.start);
        let chunk_bytes = if sequential { CHUNK_BYTES.max(self.block_bytes()) } else { self.block_bytes() };
        let mut pieces = Vec::new();
        let mut position = range.start;
        while position < range.end {
            let start = position / chunk_bytes * chunk_bytes;
            let chunk = start..(start + chunk_bytes).min(self.key().size);
            let bytes = self.chunk(chunk.clone()).await?;
            let end = range.end.min(chunk.end);
            pieces.push(bytes.slice((position - chunk.start) as usize..(end - chunk.start) as usize));
            position = end;
        }
        self.engine.observer.uncached(range.end - range.start);
        if pieces.len() == 1 {
            return Ok(pieces.swap_remove(0));
        }
        let mut all = BytesMut::with_capacity((range.end - range.start) as usize);
        pieces.iter().for_each(|piece| all.extend_from_slice(piece));
        Ok(all.freeze())
    }

    /// Fetched once for all that want it at the same time.
    async fn chunk(self: &Arc<Self>, range: Range<u64>) -> Result<Bytes, FetchError> {
        let chunk = {
            let mut bypass = self.bypass.lock().unwrap_or_else(PoisonError::into_inner);
            match bypass.chunks.iter().find(|c| c.range == range) {
                Some(chunk) => chunk.clone(),
                None => {
                    let chunk = Chunk { range: range.clone(), body: Arc::default() };
                    bypass.chunks.push_back(chunk.clone());
                    if bypass.chunks.len() > CHUNKS_MAX {
                        bypass.chunks.pop_front();
                    }
                    chunk
                }
            }
        };
        let result = chunk.body.get_or_try_init(|| self.fetch_chunk(range.clone())).await;
        if !result.as_ref().is_ok_and(|body| body.kept.is_some()) {
            let mut bypass = self.bypass.lock().unwrap_or_else(PoisonError::into_inner);
            bypass.chunks.retain(|c| !Arc::ptr_eq(&c.body, &chunk.body));
        }
        Ok(result?.bytes.clone())
    }

    async fn fetch_chunk(&self, range: Range<u64>) -> Result<Body, FetchError> {
        let len = range.end - range.start;
        let scope = &self.key().scope;
        // Before the source is asked: a read that waits for memory keeps no other from asking.
        let _in_flight = self.engine.memory.take(scope, len).await;
        let started = Instant::now();
        let mut first_byte = Duration::ZERO;
        let mut bytes = BytesMut::with_capacity(len as usize);
        let result = async {
            let fetch = self.lock().fetch.clone();
            let mut body = fetch.fetch(range.clone()).await?;
            first_byte = started.elapsed();
            while (bytes.len() as u64) < len {
                let piece = body.next().await.ok_or_else(|| FetchError {
                    cause: Cause::Unavailable,
                    message: format!("the source ended the body at {} of {len} bytes", bytes.len()),
                })??;
                bytes.extend_from_slice(&piece);
            }
            Ok(())
        }
        .await;
        self.engine.observer.fetched(
            bytes.len() as u64,
            first_byte,
            started.elapsed(),
            result.as_ref().err(),
        );
        result?;
        bytes.truncate(len as usize);
        let keep = || self.engine.bypass_memory.try_take(scope, len);
        let mut kept = keep();
        while kept.is_none() {
            // A reader has passed the older ones by now.
            let mut bypass = self.bypass.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(at) = bypass.chunks.iter().position(|c| c.body.initialized()) else { break };
            let older = bypass.chunks.remove(at);
            drop(bypass);
            drop(older);
            kept = keep();
        }
        Ok(Body { bytes: bytes.freeze(), kept })
    }
}
