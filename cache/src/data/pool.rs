//! The threads that touch one cache directory, so that a slow disk holds up neither the runtime nor another disk.
//!
//! The queue needs no bound of its own: every write in it holds its share of `memory_bytes`, and every other job has
//! a waiter that submitted it and waits.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

type Job = Box<dyn FnOnce() + Send>;

pub(crate) struct Pool {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Pool {
    pub(crate) fn start(name: &str, threads: usize) -> std::io::Result<Self> {
        let shared = Arc::<Shared>::default();
        let pool = Self { shared: shared.clone() };
        for _ in 0..threads {
            let shared = shared.clone();
            std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&shared))?;
        }
        Ok(pool)
    }

    /// False when the pool is closed: the job was dropped.
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) -> bool {
        let mut queue = self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if queue.closed {
            return false;
        }
        queue.jobs.push_back(Box::new(job));
        self.shared.wake.notify_one();
        true
    }

    /// None when the pool is closed or the job panicked.
    pub(crate) async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.submit(move || {
            let _ = sender.send(job());
        });
        receiver.await.ok()
    }

    /// What was submitted before is still done.
    pub(crate) fn close(&self) {
        self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner).closed = true;
        self.shared.wake.notify_all();
    }
}

impl Drop for Pool {
    // No join: the last reference may well be dropped by one of these threads.
    fn drop(&mut self) {
        self.close();
    }
}

fn work(shared: &Shared) {
    let mut queue = shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
    loop {
        if let Some(job) = queue.jobs.pop_front() {
            drop(queue);
            // A panic is a defect of one job; its waiters learn of it because what they wait for is dropped.
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!("a cache disk job panicked: please report this");
            }
            queue = shared.queue.lock().unwrap_or_else(PoisonError::into_inner);
        } else if queue.closed {
            return;
        } else {
            queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
