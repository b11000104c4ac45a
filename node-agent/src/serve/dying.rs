//! Which callers are being killed.
//!
//! Only the broker can see that, and it reads a file in `/proc` for each thread, where it hears all that the agent asks.
//! A pod may have thousands of threads that wait, and a worker that is not ours any more may ask without end. So the
//! broker is asked about few at a time, of one worker after the other, and each worker has one question under way.

use super::questions::Questions;
use crate::privileged::Privileged;
use link::broker::{BrokerAnswer, BrokerRequest};
use tokio::sync::Semaphore;

/// In all of one question of a worker: as many as wait in a pod that is being killed, and then some.
const TIDS_MAX: usize = 4096;
/// Of which the broker looks at so many at once: some five milliseconds.
const AT_ONCE: usize = 256;

/// Whose turn it is to ask.
pub(crate) struct DyingCallers(Semaphore);

impl Default for DyingCallers {
    fn default() -> Self {
        Self(Semaphore::new(1))
    }
}

impl DyingCallers {
    /// Those of `tids` of which the broker knows it; of the others nothing is known, and they count as alive.
    pub(crate) async fn among(
        &self,
        questions: &Questions,
        privileged: &dyn Privileged,
        mut tids: Vec<u32>,
    ) -> Vec<u32> {
        let _only = questions.one_look().await;
        tids.truncate(TIDS_MAX);
        let mut dying = Vec::new();
        for some in tids.chunks(AT_ONCE) {
            let Ok(_turn) = self.0.acquire().await else { break };
            match privileged.ask(BrokerRequest::Dying { tids: some.to_vec() }, Vec::new()).await {
                Ok(BrokerAnswer::Dying { tids }) => dying.extend(tids),
                _ => break,
            }
        }
        dying
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use link::{Refusal, RefusalKind};
    use std::os::fd::OwnedFd;
    use std::sync::{Arc, Mutex};

    /// Odd ones die. Answers `answers` times.
    struct Broker {
        asked: Mutex<Vec<Vec<u32>>>,
        answers: usize,
    }

    #[async_trait::async_trait]
    impl Privileged for Broker {
        async fn ask(&self, request: BrokerRequest, _: Vec<OwnedFd>) -> Result<BrokerAnswer, Refusal> {
            let BrokerRequest::Dying { tids } = request else { panic!("{request:?}") };
            let asked = {
                let mut asked = self.asked.lock().unwrap();
                asked.push(tids.clone());
                asked.len()
            };
            tokio::task::yield_now().await; // the broker is another process
            if asked > self.answers {
                return Err(Refusal::new(RefusalKind::Unavailable, "it has gone"));
            }
            Ok(BrokerAnswer::Dying { tids: tids.into_iter().filter(|tid| tid % 2 == 1).collect() })
        }
        fn connected(&self) -> bool {
            true
        }
    }

    fn broker(answers: usize) -> Arc<Broker> {
        Arc::new(Broker { asked: Mutex::default(), answers })
    }

    #[tokio::test]
    async fn many_are_asked_about_in_parts_and_no_more_than_wait_in_a_pod() {
        let (callers, questions, broker) =
            (DyingCallers::default(), Questions::default(), broker(usize::MAX));
        let dying = callers.among(&questions, &*broker, (0..1000).collect()).await;
        assert_eq!(dying, (0..1000).filter(|tid| tid % 2 == 1).collect::<Vec<_>>());
        let sizes = |broker: &Broker| broker.asked.lock().unwrap().iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes(&broker), [256, 256, 256, 232]);
        let all = callers.among(&questions, &*broker, (0..20_000).collect()).await;
        assert_eq!(all.len(), TIDS_MAX / 2, "of the others nothing is known");
        assert!(callers.among(&questions, &*broker, Vec::new()).await.is_empty());
    }

    #[tokio::test]
    async fn where_the_broker_goes_meanwhile_what_it_has_said_counts() {
        let (callers, questions, broker) = (DyingCallers::default(), Questions::default(), broker(2));
        let dying = callers.among(&questions, &*broker, (0..4096).collect()).await;
        assert_eq!((dying.len(), broker.asked.lock().unwrap().len()), (256, 3), "it is not asked on");
    }

    #[tokio::test]
    async fn a_worker_that_asks_without_end_holds_up_another_for_one_part() {
        let (callers, broker) = (Arc::new(DyingCallers::default()), broker(usize::MAX));
        let hostile = Arc::new(Questions::default());
        let ask = |questions: &Arc<Questions>, tids: Vec<u32>| {
            let (callers, broker, questions) = (callers.clone(), broker.clone(), questions.clone());
            tokio::spawn(async move { callers.among(&questions, &*broker, tids).await })
        };
        let without_end: Vec<_> = (0..500).map(|_| ask(&hostile, (0..4096).collect())).collect();
        while broker.asked.lock().unwrap().len() < 20 {
            tokio::task::yield_now().await;
        }
        let before = broker.asked.lock().unwrap().len();
        assert_eq!(ask(&Arc::new(Questions::default()), vec![70_001]).await.unwrap(), [70_001]);
        let asked = broker.asked.lock().unwrap().clone();
        let at = asked.iter().position(|tids| *tids == [70_001]).unwrap();
        assert!(at <= before + 2, "{} came first", at - before);
        without_end.iter().for_each(|task| task.abort());
    }
}
