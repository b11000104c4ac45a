//! The body of a GET: a stream that outlives its connections.
//!
//! ```text
//!             ┌──────── connect ◄─────── back off ◄──┐ slot given back
//!             ▼                                      │
//!   get() ► [slot, If-Match, from where it stopped] ─┴─ reset, short, stalled, 5xx, expired token
//!             │ every byte came                      └─ 412, 403, 404, deadline: error, end
//!             ▼
//!            end
//! ```
//!
//! Of a small object whose checksum the store tells, nothing is given out before all of it has come and fits.

use super::client::{Client, broken_body, stalled};
use crate::access::Question;
use crate::dialect::checksum::{Checksum, HELD_MAX, Summing};
use crate::dialect::{content_range, header, whole_size};
use crate::dispatch::Lane;
use crate::observe::{Outcome, RetryCause};
use crate::retry::{Attempts, Fault, Meter};
use crate::traffic::Slot;
use crate::{ByteStream, StoreError, Version};
use bytes::Bytes;
use futures::StreamExt;
use http::header::CONTENT_RANGE;
use reqwest::{Response, Url};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

struct Body {
    client: Arc<Client>,
    url: Url,
    what: String,
    version: Version,
    /// What was asked for, and of it what is still to come.
    whole: Range<u64>,
    rest: Range<u64>,
    /// What has come and is not given out yet.
    held: Held,
    /// So often what came did not have its checksum.
    corrupted: u32,
    attempts: Attempts,
    transfer: Option<Transfer>,
    /// All has come; its end has not been read.
    over: Option<Response>,
}

#[derive(Default)]
struct Held {
    pieces: VecDeque<Bytes>,
    /// Until it fits; None: there is none to wait for.
    summing: Option<Summing>,
}

/// A bit that is flipped so often flips where it is sent from.
const CORRUPTED_MAX: u32 = 3;

/// One connection's part of the work. Dropped on any fault, and with it the slot.
struct Transfer {
    response: Response,
    meter: Meter,
    slot: Slot,
}

/// Opens the first connection at once, so that 404 and 412 come from the call and not from the stream.
pub(super) async fn open(
    client: Arc<Client>,
    key: &[u8],
    version: &Version,
    range: Range<u64>,
    question: Question,
) -> Result<ByteStream, StoreError> {
    if range.is_empty() {
        return Ok(futures::stream::empty().boxed());
    }
    let what = client.what(key);
    let url = client.dialect().content(key, version);
    let url = url.ok_or_else(|| StoreError::malformed(&what, "no request can name its version"))?;
    let attempts = Attempts::new(question);
    let mut body = Body {
        client,
        url,
        what,
        version: version.clone(),
        whole: range.clone(),
        rest: range,
        held: Held::default(),
        corrupted: 0,
        attempts,
        transfer: None,
        over: None,
    };
    body.connect().await?;
    let stream = futures::stream::unfold(Some(body), |body| async {
        let mut body = body?;
        match body.next().await {
            Ok(Some(piece)) => Some((Ok(piece), Some(body))),
            Ok(None) => None,
            Err(e) => Some((Err(e), None)),
        }
    });
    Ok(stream.boxed())
}

impl Body {
    async fn next(&mut self) -> Result<Option<Bytes>, StoreError> {
        loop {
            if self.held.summing.is_none()
                && let Some(piece) = self.held.pieces.pop_front()
            {
                return Ok(Some(piece));
            }
            if self.rest.is_empty() {
                self.finish().await;
                return Ok(None);
            }
            if self.transfer.is_none() {
                self.connect().await?;
            }
            match self.receive().await.and_then(|piece| self.hold(piece)) {
                Ok(()) => {
                    if self.rest.is_empty() {
                        self.all_came();
                    }
                }
                Err(fault) => self.back_off(fault).await?,
            }
        }
    }

    /// Err: all that came is not what the store has.
    fn hold(&mut self, piece: Bytes) -> Result<(), Fault> {
        let Held { pieces, summing } = &mut self.held;
        summing.iter_mut().for_each(|summing| summing.update(&piece));
        pieces.push_back(piece);
        if !self.rest.is_empty() || summing.take().is_none_or(|summing| summing.fits()) {
            return Ok(());
        }
        pieces.clear();
        self.rest = self.whole.clone();
        self.corrupted += 1;
        let why = "what came does not have the checksum that the store tells: it was changed on its way";
        match self.corrupted < CORRUPTED_MAX {
            true => Err(Fault::retry(RetryCause::Corrupted, why)),
            false => Err(Fault::Fail(StoreError::malformed(&self.what, why))),
        }
    }

    async fn connect(&mut self) -> Result<(), StoreError> {
        if self.held.summing.take().is_some() {
            // Nothing of it was given out.
            self.held.pieces.clear();
            self.rest = self.whole.clone();
        }
        let Self { client, url, what, version, whole, rest, held, attempts, transfer, .. } = self;
        let attempt = |patience| client.get(url, what, version, rest.clone(), patience);
        let (response, slot, meter) = attempts.ask(&client.request("get", Lane::Data, what), attempt).await?;
        slot.moves(0);
        let tells = client.dialect().checksum(response.headers());
        let of_all = is_whole(&response);
        let size = header(response.headers(), CONTENT_RANGE).map_or(Some(rest.end), whole_size);
        let of_more = size.is_some_and(|size| size > HELD_MAX);
        if of_more && (of_all || client.dialect().tells_of_all()) {
            client.told().note(url, version, tells);
        }
        if *rest == *whole && rest.end - rest.start <= HELD_MAX {
            held.summing = tells.filter(|sum| sum.of_range || of_all).map(Checksum::begin);
        }
        *transfer = Some(Transfer { response, meter, slot });
        Ok(())
    }

    async fn receive(&mut self) -> Result<Bytes, Fault> {
        let transfer = self.transfer.as_mut().expect("next() connects first");
        let patience = self.attempts.patience(self.client.limits().config().stall_timeout);
        let deadline = self.attempts.deadline().min(Instant::now() + patience);
        transfer.slot.waits();
        let piece = tokio::select! {
            piece = timeout_at(deadline, transfer.response.chunk()) => piece,
            () = transfer.slot.displaced() => {
                return Err(Fault::displaced());
            }
        };
        let mut piece = match piece {
            Err(_) if Instant::now() >= self.attempts.deadline() => {
                return Err(Fault::Fail(self.attempts.exhausted(&self.what, "the transfer was too slow")));
            }
            Err(_) => return Err(stalled(patience)),
            Ok(Err(e)) => return Err(broken_body(e)),
            Ok(Ok(None)) => return Err(Fault::retry(RetryCause::Truncated, "the body ended early")),
            Ok(Ok(Some(piece))) => piece,
        };
        let left = self.rest.end - self.rest.start;
        if piece.len() as u64 > left {
            // Only without Content-Length can more come than was announced; what was asked for is still right.
            piece.truncate(usize::try_from(left).expect("less than a chunk"));
        }
        self.rest.start += piece.len() as u64;
        transfer.slot.moves(piece.len() as u64);
        transfer.meter.bytes += piece.len() as u64;
        self.attempts.progress();
        self.client.limits().pay(piece.len() as u64).await;
        Ok(piece)
    }

    /// Gives the slot back, then waits.
    async fn back_off(&mut self, fault: Fault) -> Result<(), StoreError> {
        if let Some(transfer) = self.transfer.take() {
            transfer.meter.end_with(&fault);
        }
        self.attempts.back_off(&self.client.request("get", Lane::Data, &self.what), fault).await
    }

    /// Most readers know how much comes and do not ask whether that was all: the request is over now.
    fn all_came(&mut self) {
        let Some(Transfer { response, meter, slot }) = self.transfer.take() else { return };
        meter.end(Outcome::Ok);
        drop(slot);
        self.over = Some(response);
    }

    async fn finish(&mut self) {
        let Some(mut response) = self.over.take() else { return };
        // Reading the end lets the connection go back to the pool; it is there already, or not worth waiting for.
        let _ = timeout(Duration::from_millis(100), response.chunk()).await;
    }
}

/// Does it bring all of the object?
fn is_whole(response: &Response) -> bool {
    let Some(text) = header(response.headers(), CONTENT_RANGE) else { return true };
    content_range(text).is_some_and(|range| range.start == 0 && whole_size(text) == Some(range.end))
}
