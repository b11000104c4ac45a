//! When to try again, how long to wait, when to give up.

use crate::StoreError;
use crate::access::Question;
use crate::dispatch::{Lane, NoSlot};
use crate::observe::{Observer, Outcome, RetryCause};
use crate::shares::Turn;
use crate::traffic::{Mover, Place, Slot};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// What one attempt came to, if it did not succeed.
#[derive(Debug)]
pub(crate) enum Fault {
    Retry {
        cause: RetryCause,
        /// For a person, should this be the last attempt.
        detail: String,
        /// What the store asked for (Retry-After).
        after: Option<Duration>,
    },
    Fail(StoreError),
}

impl Fault {
    pub(crate) fn retry(cause: RetryCause, detail: impl Into<String>) -> Self {
        Self::Retry { cause, detail: detail.into(), after: None }
    }

    pub(crate) fn displaced() -> Self {
        Self::retry(RetryCause::Displaced, "another source needed the slot")
    }

    /// What it says about the store: did it answer?
    pub(crate) fn tell(&self, slot: &mut Slot) {
        match self {
            Self::Retry { cause: RetryCause::Connect, .. } => slot.unconnected(),
            Self::Retry { cause: RetryCause::Throttled | RetryCause::ServerError, .. } => slot.refused(),
            Self::Retry { cause: RetryCause::Stalled | RetryCause::Reset, .. } => slot.failed(),
            Self::Retry {
                cause:
                    RetryCause::Truncated | RetryCause::Malformed | RetryCause::Corrupted | RetryCause::Unsettled,
                ..
            } => slot.answered(),
            // Nothing of it is the store's doing.
            Self::Retry { cause: RetryCause::Displaced | RetryCause::Helper, .. } => {}
            Self::Fail(StoreError::Unavailable { .. }) => slot.failed(),
            Self::Fail(StoreError::Invalid { .. } | StoreError::Busy { .. } | StoreError::Damaged { .. }) => {
            }
            Self::Fail(_) => slot.answered(),
        }
    }
}

/// What all attempts of one request have in common.
pub(crate) struct Request<'a> {
    /// As messages name it.
    pub(crate) what: &'a str,
    pub(crate) endpoint: &'a str,
    pub(crate) op: &'static str,
    pub(crate) place: &'a Place,
    pub(crate) lane: Lane,
    pub(crate) observer: &'a Arc<dyn Observer>,
    pub(crate) stall_timeout: Duration,
}

/// The attempts of one request: counts them, spaces them out, ends them.
pub(crate) struct Attempts {
    question: Question,
    started: Instant,
    /// In all.
    made: u32,
    /// Since the last progress.
    in_a_row: u32,
    stalls: u32,
    malformed: u32,
    /// Attempts for which there was a slot.
    begun: u32,
    /// In this node's queue, all attempts together.
    queued: Duration,
    /// What the last one came to.
    last: Option<String>,
}

const AWAY: &str = "it answers none of this node's requests, so this one waited for one that it answers";
/// An answer that makes no sense twice over may be a proxy's hiccup; five times over it is the store.
const MALFORMED_MAX: u32 = 5;
const FIRST_DELAY: Duration = Duration::from_millis(50);
const LONGEST_DELAY: Duration = Duration::from_secs(10);
/// A store may ask for more patience than our own schedule has, within reason.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(30);
const LONGEST_PATIENCE: Duration = Duration::from_secs(60);

impl Attempts {
    pub(crate) fn new(question: Question) -> Self {
        Self {
            question,
            started: Instant::now(),
            made: 0,
            in_a_row: 0,
            stalls: 0,
            malformed: 0,
            begun: 0,
            queued: Duration::ZERO,
            last: None,
        }
    }

    /// Asks until there is an answer, which comes with the slot and the meter of its attempt. The slot is held during
    /// attempts only, never while backing off. `attempt` gets how long the store may be silent.
    pub(crate) async fn ask<T, F: Future<Output = Result<T, Fault>>>(
        &mut self,
        request: &Request<'_>,
        attempt: impl Fn(Duration) -> F,
    ) -> Result<(T, Slot, Meter), StoreError> {
        self.ask_with(request, |patience, _| attempt(patience)).await
    }

    /// The same of one that sends: `attempt` tells the slot how far it has come.
    pub(crate) async fn ask_with<T, F: Future<Output = Result<T, Fault>>>(
        &mut self,
        request: &Request<'_>,
        attempt: impl Fn(Duration, Mover) -> F,
    ) -> Result<(T, Slot, Meter), StoreError> {
        loop {
            let mut slot = self.enter(request).await?;
            let meter = Meter::start(request.observer, request.op);
            let answer = attempt(self.patience(request.stall_timeout), slot.mover());
            // Why the attempts before it failed says more than that this one was cut off.
            let last = || self.last.clone().unwrap_or_else(|| format!("{} did not answer", request.endpoint));
            let late = || Err(Fault::Fail(self.exhausted(request.what, last())));
            let answer = tokio::select! {
                answer = self.question.in_time(answer) => answer.unwrap_or_else(late),
                () = slot.displaced() => Err(Fault::displaced()),
            };
            match answer {
                Ok(answer) => {
                    slot.answered();
                    self.question.answered();
                    return Ok((answer, slot, meter));
                }
                Err(fault) => {
                    fault.tell(&mut slot);
                    drop(slot);
                    meter.end_with(&fault);
                    self.back_off(request, fault).await?;
                }
            }
        }
    }

    /// Waits for the slot of the next attempt.
    async fn enter(&mut self, request: &Request<'_>) -> Result<Slot, StoreError> {
        let Request { what, place, lane, observer, op, .. } = *request;
        let turn = if self.made == 0 { Turn::First } else { Turn::Again };
        let begun = Instant::now();
        let entered = self.question.enter(place, lane, turn).await;
        self.question.begin_attempt();
        let queued = begun.elapsed();
        self.queued += queued;
        observer.queued(op, queued);
        self.begun += u32::from(entered.is_ok());
        entered.map_err(|why| match (why, &self.last) {
            (NoSlot::Busy, None) => {
                StoreError::Busy { what: what.to_owned(), waited: self.started.elapsed() }
            }
            (_, Some(last)) => self.exhausted(what, last.clone()),
            (_, None) => self.exhausted(what, AWAY),
        })
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.question.deadline()
    }

    /// How long the store may be silent in the next attempt.
    pub(crate) fn patience(&self, stall_timeout: Duration) -> Duration {
        let patience = stall_timeout.saturating_mul(1 << self.stalls.min(16));
        patience.min(LONGEST_PATIENCE.max(stall_timeout))
    }

    /// The attempt brought something: the schedule starts afresh, the deadline stays.
    pub(crate) fn progress(&mut self) {
        self.in_a_row = 0;
        self.malformed = 0;
    }

    /// Returns when it is time for the next attempt, or with the error to end with.
    pub(crate) async fn back_off(&mut self, request: &Request<'_>, fault: Fault) -> Result<(), StoreError> {
        if let Fault::Fail(error @ StoreError::Expired { .. }) = fault {
            return self.question.await_renewal(error).await;
        }
        let Request { what, observer, op, .. } = *request;
        if let Fault::Retry { cause: cause @ RetryCause::Displaced, .. } = fault {
            observer.retry(op, cause);
            return Ok(()); // to the end of the queue
        }
        let (cause, delay) = self.after(what, fault, rand::random())?;
        observer.retry(op, cause);
        tokio::time::sleep(delay).await;
        Ok(())
    }

    /// Decides about a fault: how long to wait before the next attempt, or the error to end with.
    fn after(&mut self, what: &str, fault: Fault, random: f64) -> Result<(RetryCause, Duration), StoreError> {
        let (cause, detail, after) = match fault {
            Fault::Fail(error) => return Err(error),
            Fault::Retry { cause, detail, after } => (cause, detail, after),
        };
        self.made += 1;
        self.in_a_row += 1;
        self.last = Some(detail.clone());
        match cause {
            RetryCause::Stalled => self.stalls += 1,
            RetryCause::Malformed => self.malformed += 1,
            _ => {}
        }
        if self.malformed >= MALFORMED_MAX {
            return Err(StoreError::malformed(what, detail));
        }
        let delay = delay(self.in_a_row, after, random);
        if Instant::now() + delay >= self.deadline() {
            return Err(self.exhausted(what, detail));
        }
        Ok((cause, delay))
    }

    pub(crate) fn exhausted(&self, what: &str, cause: impl Into<String>) -> StoreError {
        StoreError::Unavailable {
            what: what.to_owned(),
            waited: self.started.elapsed(),
            queued: self.queued,
            attempts: self.begun,
            cause: cause.into(),
        }
    }
}

/// Exponential, with jitter over the upper half, so that clients that failed together do not return together.
fn delay(in_a_row: u32, after: Option<Duration>, random: f64) -> Duration {
    let doubled = FIRST_DELAY.saturating_mul(1 << in_a_row.saturating_sub(1).min(16)).min(LONGEST_DELAY);
    let jittered = doubled.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0);
    // Jitter on top of what the store asked for, for the same reason.
    after.map_or(jittered, |after| after.min(LONGEST_RETRY_AFTER) + jittered)
}

/// An error and its sources in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let next = error.to_string();
        // Wrappers tend to repeat what they wrap.
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        source = error.source();
    }
    text
}

/// Reports one attempt to the observer when it ends, however it ends.
pub(crate) struct Meter {
    observer: Arc<dyn Observer>,
    op: &'static str,
    started: Instant,
    pub(crate) bytes: u64,
    outcome: Outcome,
}

impl Meter {
    pub(crate) fn start(observer: &Arc<dyn Observer>, op: &'static str) -> Self {
        let outcome = Outcome::Abandoned;
        Self { observer: observer.clone(), op, started: Instant::now(), bytes: 0, outcome }
    }

    pub(crate) fn end(mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    pub(crate) fn end_with(self, fault: &Fault) {
        self.end(match fault {
            Fault::Retry { cause: RetryCause::Displaced, .. } => Outcome::Abandoned,
            Fault::Retry { .. } | Fault::Fail(StoreError::Unavailable { .. } | StoreError::Busy { .. }) => {
                Outcome::Fault
            }
            Fault::Fail(StoreError::NotFound { .. }) => Outcome::NotFound,
            Fault::Fail(StoreError::Denied { .. } | StoreError::Expired { .. }) => Outcome::Denied,
            Fault::Fail(StoreError::Stale { .. } | StoreError::Conflict { .. }) => Outcome::Stale,
            Fault::Fail(
                StoreError::Malformed { .. }
                | StoreError::Invalid { .. }
                | StoreError::Full { .. }
                | StoreError::Unsupported { .. }
                | StoreError::Damaged { .. },
            ) => Outcome::Broken,
        });
    }
}

impl Drop for Meter {
    fn drop(&mut self) {
        self.observer.request(self.op, self.outcome, self.started.elapsed(), self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempts() -> Attempts {
        Attempts::new(crate::access::tests::fixed().probe(Duration::from_secs(300)))
    }

    #[test]
    fn delays_grow_are_jittered_and_bounded() {
        assert_eq!(delay(1, None, 0.0), FIRST_DELAY / 2);
        assert_eq!(delay(1, None, 1.0), FIRST_DELAY);
        assert_eq!(delay(3, None, 1.0), FIRST_DELAY * 4);
        assert_eq!(delay(400, None, 1.0), LONGEST_DELAY);
        assert_eq!(delay(1, Some(Duration::from_secs(3)), 1.0), Duration::from_secs(3) + FIRST_DELAY);
        assert_eq!(delay(1, Some(Duration::from_secs(86_400)), 1.0), LONGEST_RETRY_AFTER + FIRST_DELAY);
    }

    #[tokio::test]
    async fn a_store_that_talks_nonsense_is_given_up_before_the_deadline() {
        let mut attempts = attempts();
        let mut nonsense = || attempts.after("x", Fault::retry(RetryCause::Malformed, "one byte short"), 0.5);
        for _ in 1..MALFORMED_MAX {
            nonsense().unwrap();
        }
        assert!(matches!(nonsense(), Err(StoreError::Malformed { why, .. }) if why == "one byte short"));
    }

    #[tokio::test]
    async fn patience_doubles_with_each_stall() {
        let mut attempts = attempts();
        let stall = Duration::from_secs(10);
        assert_eq!(attempts.patience(stall), stall);
        attempts.after("x", Fault::retry(RetryCause::Stalled, ""), 0.5).unwrap();
        assert_eq!(attempts.patience(stall), stall * 2);
        for _ in 0..9 {
            attempts.after("x", Fault::retry(RetryCause::Stalled, ""), 0.5).unwrap();
        }
        assert_eq!(attempts.patience(stall), LONGEST_PATIENCE);
    }
}
