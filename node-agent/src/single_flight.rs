//! Single flight: callers that ask for the same thing at the same time share one run of the work.

use crate::lock::lock;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use inflight::carry;
use link::Cause;
use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Mutex};

type Run<T> = Shared<BoxFuture<'static, Result<T, Cause>>>;

/// `T` is what a run yields; a failed run fails all that joined it, and the next caller starts anew.
pub(crate) struct SingleFlight<K, T: Clone> {
    running: Arc<Mutex<HashMap<K, Run<T>>>>,
}

impl<K, T: Clone> Default for SingleFlight<K, T> {
    fn default() -> Self {
        Self { running: Arc::default() }
    }
}

impl<K, T> SingleFlight<K, T>
where
    K: Clone + Eq + Hash + Send + 'static,
    T: Clone + Send + Sync + 'static,
{
    /// Joins the run for `key` or starts one. The run goes on when its caller is dropped: others may wait for it.
    pub(crate) async fn join<F>(&self, key: K, work: impl FnOnce() -> F) -> Result<T, Cause>
    where
        F: Future<Output = Result<T, Cause>> + Send + 'static,
    {
        let run = {
            let mut running = lock(&self.running);
            match running.get(&key) {
                Some(run) => run.clone(),
                None => {
                    let (work, table, mine) = (work(), self.running.clone(), key.clone());
                    let task = tokio::spawn(carry(async move {
                        let done = std::panic::AssertUnwindSafe(work).catch_unwind().await;
                        lock(&table).remove(&mine);
                        done.unwrap_or(Err(Cause::Internal))
                    }));
                    let run = async move { task.await.unwrap_or(Err(Cause::Internal)) }.boxed().shared();
                    running.insert(key, run.clone());
                    run
                }
            }
        };
        run.await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};

    #[tokio::test]
    async fn concurrent_callers_share_one_run_and_later_ones_start_anew() {
        let flights: SingleFlight<u8, u32> = SingleFlight::default();
        let runs = Arc::new(AtomicU32::new(0));
        let (open, gate) = tokio::sync::watch::channel(false);
        let call = || {
            let (runs, mut gate) = (runs.clone(), gate.clone());
            flights.join(1, move || async move {
                gate.wait_for(|open| *open).await.map_err(|_| Cause::Internal)?;
                Ok(runs.fetch_add(1, Ordering::SeqCst))
            })
        };
        let (a, b, ()) = tokio::join!(call(), call(), async { open.send(true).unwrap() });
        assert_eq!((a, b), (Ok(0), Ok(0)));
        assert_eq!(call().await, Ok(1));
    }

    #[tokio::test]
    async fn a_panic_fails_the_run_and_not_the_table() {
        let flights: SingleFlight<u8, ()> = SingleFlight::default();
        let first = flights.join(1, || async { panic!("on purpose") }).await;
        assert_eq!(first, Err(Cause::Internal));
        assert_eq!(flights.join(1, || async { Ok(()) }).await, Ok(()));
    }
}
