//! A file's bytes: a stream that outlives its helpers. What has come is not asked for again.

use super::Client;
use super::session::{Asked, Brought, Lost, Session};
use crate::access::Question;
use crate::dispatch::Lane;
use crate::observe::{Outcome, RetryCause};
use crate::retry::{Attempts, Fault, Meter};
use crate::traffic::Slot;
use crate::{ByteStream, StoreError};
use bytes::Bytes;
use futures::StreamExt;
use hdfs::{Answer, Version, WINDOW_BYTES};
use std::ops::Range;
use std::sync::Arc;
use tokio::time::timeout_at;

struct Body {
    client: Arc<Client>,
    path: String,
    what: String,
    version: Version,
    /// Still to come.
    rest: Range<u64>,
    attempts: Attempts,
    transfer: Option<Transfer>,
}

/// One attempt's part of the work. Dropped on any fault, and with it the slot.
struct Transfer {
    session: Arc<Session>,
    asked: Asked,
    /// Has come with the answer to the attempt.
    first: Option<Bytes>,
    meter: Meter,
    slot: Slot,
}

/// Makes the first attempt at once, so that a file that is gone or changed is an error of the call and not of the stream.
pub(super) async fn open(
    client: Arc<Client>,
    path: String,
    what: String,
    version: Version,
    range: Range<u64>,
    question: Question,
) -> Result<ByteStream, StoreError> {
    if range.is_empty() {
        return Ok(futures::stream::empty().boxed());
    }
    let attempts = Attempts::new(question);
    let mut body = Body { client, path, what, version, rest: range, attempts, transfer: None };
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
            if self.rest.is_empty() {
                return Ok(None);
            }
            if self.transfer.is_none() {
                self.connect().await?;
            }
            match self.receive().await {
                Ok(piece) => {
                    // Most readers know how much comes and do not ask whether that was all: the read is over now.
                    if self.rest.is_empty()
                        && let Some(transfer) = self.transfer.take()
                    {
                        transfer.meter.end(Outcome::Ok);
                    }
                    return Ok(Some(piece));
                }
                Err(fault) => self.back_off(fault).await?,
            }
        }
    }

    async fn connect(&mut self) -> Result<(), StoreError> {
        let Self { client, path, what, version, rest, attempts, transfer } = self;
        let attempt = |patience: std::time::Duration| {
            let (client, path, what) = (&*client, &*path, &*what);
            let (version, rest) = (*version, rest.clone());
            async move {
                let session = client.session(what).await?;
                let question = hdfs::Question::Read {
                    path: path.clone(),
                    version,
                    start: rest.start,
                    end: rest.end,
                    window: WINDOW_BYTES,
                };
                let lost = |lost| client.lost(&session, lost);
                let mut asked = session.ask(question, patience).map_err(lost)?;
                // A file that is not in a reader's memory takes questions to NameNode and DataNode: three.
                let first = match asked.next(patience.saturating_mul(3)).await.map_err(lost)? {
                    Brought::Data(first) => first,
                    Brought::End(Err(failure)) => return Err(client.fault(what, failure)),
                    Brought::End(Ok(_)) => return Err(lost(Lost::Lies("that nothing is all"))),
                };
                client.keeper.answered();
                Ok((session.clone(), asked, first))
            }
        };
        let request = client.request("get", Lane::Data, what);
        let ((session, asked, first), slot, meter) = attempts.ask(&request, attempt).await?;
        slot.moves(0);
        *transfer = Some(Transfer { session, asked, first: Some(first), meter, slot });
        Ok(())
    }

    async fn receive(&mut self) -> Result<Bytes, Fault> {
        let transfer = self.transfer.as_mut().expect("next() connects first");
        let patience = self.attempts.patience(self.client.limits.config().stall_timeout);
        let piece = match transfer.first.take() {
            Some(first) => first,
            None => {
                transfer.slot.waits();
                let deadline = self.attempts.deadline();
                let brought = tokio::select! {
                    brought = timeout_at(deadline, transfer.asked.next(patience)) => brought,
                    () = transfer.slot.displaced() => return Err(Fault::displaced()),
                };
                match brought {
                    Err(_) => {
                        let late = self.attempts.exhausted(&self.what, "the transfer was too slow");
                        return Err(Fault::Fail(late));
                    }
                    Ok(Err(lost)) => return Err(self.client.lost(&transfer.session, lost)),
                    Ok(Ok(Brought::Data(piece))) => piece,
                    Ok(Ok(Brought::End(Ok(Answer::End)))) => {
                        return Err(Fault::retry(RetryCause::Truncated, "HDFS gave less than was asked for"));
                    }
                    Ok(Ok(Brought::End(Ok(_)))) => {
                        return Err(self
                            .client
                            .lost(&transfer.session, Lost::Lies("what was not asked for")));
                    }
                    Ok(Ok(Brought::End(Err(failure)))) => return Err(self.client.fault(&self.what, failure)),
                }
            }
        };
        let length = piece.len() as u64;
        if length > self.rest.end - self.rest.start {
            return Err(self.client.lost(&transfer.session, Lost::Lies("more than was asked for")));
        }
        self.rest.start += length;
        transfer.slot.moves(length);
        transfer.meter.bytes += length;
        self.attempts.progress();
        self.client.limits.pay(length).await;
        // What is paid for may come again: a reader that does not ask holds up its helper, and no memory grows.
        let _ = transfer.asked.took(piece.len()); // of a helper that is gone the next step tells
        Ok(piece)
    }

    /// Gives the slot back, then waits.
    async fn back_off(&mut self, fault: Fault) -> Result<(), StoreError> {
        if let Some(transfer) = self.transfer.take() {
            transfer.meter.end_with(&fault);
        }
        self.attempts.back_off(&self.client.request("get", Lane::Data, &self.what), fault).await
    }
}
