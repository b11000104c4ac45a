//! What was done for a request of the kernel's, so that a worker that executes the request again, because the one before it
//! has died, gets the same answer and nothing is done twice.

use super::Outcome;
use crate::lock::lock;
use std::collections::HashMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex};
use tokio::sync::OnceCell;

/// Of one connection. The requests that are over are forgotten when there are twice as many as at the last time.
#[derive(Default)]
pub(crate) struct Executed {
    requests: Mutex<Requests>,
}

#[derive(Default)]
struct Requests {
    done: HashMap<u64, Arc<Request>>,
    forget_at: usize,
}

#[derive(Default)]
struct Request {
    outcome: OnceCell<Outcome>,
    /// It was answered with an error before it was done.
    given_up: AtomicBool,
}

const FORGET_AT_LEAST: usize = 256;

impl Executed {
    /// Does it, or waits for its end, or tells what came of it. `waits`: does the kernel still wait for that request's answer?
    pub(crate) async fn once(
        &self,
        unique: u64,
        waits: impl Fn(u64) -> bool,
        work: impl Future<Output = Outcome>,
    ) -> Outcome {
        let request = {
            let mut requests = lock(&self.requests);
            if requests.done.len() >= requests.forget_at.max(FORGET_AT_LEAST) {
                requests.done.retain(|unique, request| !request.outcome.initialized() || waits(*unique));
                requests.forget_at = requests.done.len() * 2;
            }
            requests.done.entry(unique).or_default().clone()
        };
        request.outcome.get_or_init(|| work).await.clone()
    }

    /// By this agent or one before it.
    pub(super) fn is_done(&self, unique: u64) -> bool {
        lock(&self.requests).done.get(&unique).is_some_and(|request| request.outcome.initialized())
    }

    /// It was answered with an error, and may not be done yet.
    pub(super) fn give_up(&self, unique: u64) {
        if let Some(request) = lock(&self.requests).done.get(&unique) {
            request.given_up.store(true, Release);
        }
    }

    pub(super) fn is_given_up(&self, unique: u64) -> bool {
        lock(&self.requests).done.get(&unique).is_some_and(|request| request.given_up.load(Acquire))
    }

    #[cfg(test)]
    pub(super) fn is_begun(&self, unique: u64) -> bool {
        lock(&self.requests).done.contains_key(&unique)
    }

    /// What an agent that is gone has noted.
    pub(crate) fn recall(&self, unique: u64, outcome: Outcome) {
        let request = Request { outcome: OnceCell::new_with(Some(outcome)), ..Request::default() };
        lock(&self.requests).done.insert(unique, Arc::new(request));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use link::writable::Done;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    #[tokio::test]
    async fn a_request_is_executed_once_also_by_two_at_once() {
        let (executed, times) = (Arc::new(Executed::default()), Arc::new(AtomicU32::new(0)));
        let tasks: Vec<_> = (0..20)
            .map(|_| {
                let (executed, times) = (executed.clone(), times.clone());
                tokio::spawn(async move {
                    let work = async {
                        tokio::task::yield_now().await;
                        times.fetch_add(1, Relaxed);
                        Ok(Done::Written { bytes: 5 })
                    };
                    executed.once(7, |_| true, work).await
                })
            })
            .collect();
        for task in tasks {
            assert_eq!(task.await.unwrap(), Ok(Done::Written { bytes: 5 }));
        }
        assert_eq!(times.load(Relaxed), 1);
    }

    #[tokio::test]
    async fn what_the_kernel_waits_for_is_remembered_and_little_else() {
        let executed = Executed::default();
        for unique in 0..10_000 {
            let _ = executed.once(unique, |unique| unique == 3, async { Ok(Done::Done) }).await;
        }
        assert!(lock(&executed.requests).done.len() <= 2 * FORGET_AT_LEAST);
        let again = executed.once(3, |_| true, async { panic!("it was done") }).await;
        assert_eq!(again, Ok(Done::Done));
    }
}
