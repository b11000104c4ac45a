//! The threads that touch one cache directory, so that a slow disk holds up neither the runtime nor another disk.
//!
//! A call that the disk does not answer keeps its thread, for ever if need be: nothing can end a thread that waits in
//! the kernel. So the number of threads is the number of calls that can hang, and the watcher of the pool closes it to
//! new work ([`Pool::suspend`]) once a call has taken too long; what waited in the queue is dropped, which tells those
//! that wait for it.
//!
//! The queue needs no bound of its own. Every write in it holds its share of `memory_bytes`. Every other job belongs to
//! a task that waits for it, or to an errand of which one at a time is under way (the keeper's round, a sweep, a
//! probe), or unlinks files that were taken out of the index, a batch of them at once.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

type Job = Box<dyn FnOnce() + Send>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sort {
    /// It holds memory that others wait for; without it, readers go to the source.
    Body,
    Other,
}

pub(crate) struct Pool {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    wake: Condvar,
    idle: Notify,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<(Sort, Job)>,
    /// To be closed: that, too, may wait for the disk, so while it hangs they stay here as its threads do. They go
    /// before the jobs, each of which opens few: else a queue that is never empty would keep descriptors and room for
    /// ever.
    closings: Vec<OwnedFd>,
    /// Of each thread.
    doing: Vec<Doing>,
    closed: bool,
    suspended: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Doing {
    #[default]
    Nothing,
    /// Since when its present call is under way.
    Call(Instant),
    /// Waits for another thread of ours, which may be in a call.
    Waiting,
}

thread_local! {
    /// The pool and the place in it, of a thread of a pool.
    static PLACE: RefCell<Option<(Arc<Shared>, usize)>> = const { RefCell::new(None) };
}

#[cfg(test)]
thread_local! {
    static RETURNED: std::cell::Cell<u64> = const { std::cell::Cell::new(0) };
}

/// Of this thread.
#[cfg(test)]
pub(crate) fn calls_returned() -> u64 {
    RETURNED.get()
}

/// The call that this thread of a pool has made has come back: the next one's time begins. Elsewhere it does nothing.
pub(crate) fn call_returned() {
    #[cfg(test)]
    RETURNED.set(RETURNED.get() + 1);
    now_doing(|| Doing::Call(Instant::now()));
}

/// Locks what other threads hold while they work on the disk: that wait is no call of it.
pub(crate) fn lock_of_ours<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    now_doing(|| Doing::Waiting);
    let guard = mutex.lock().unwrap_or_else(PoisonError::into_inner);
    now_doing(|| Doing::Call(Instant::now()));
    guard
}

fn now_doing(what: impl FnOnce() -> Doing) {
    PLACE.with_borrow(|place| {
        if let Some((shared, thread)) = place {
            shared.lock().doing[*thread] = what();
        }
    });
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pool {
    pub(crate) fn start(name: &str, threads: usize) -> std::io::Result<Self> {
        let shared = Arc::<Shared>::default();
        shared.lock().doing = vec![Doing::Nothing; threads];
        let pool = Self { shared: shared.clone() };
        for thread in 0..threads {
            let shared = shared.clone();
            std::thread::Builder::new().name(name.to_owned()).spawn(move || work(&shared, thread))?;
        }
        Ok(pool)
    }

    /// False when the pool is closed or suspended: the job was dropped.
    pub(crate) fn submit(&self, job: impl FnOnce() + Send + 'static) -> bool {
        self.enqueue(Sort::Other, Box::new(job))
    }

    /// As [`Self::submit`], for the bytes of a body: while they wait they can be shed.
    pub(crate) fn submit_body(&self, job: impl FnOnce() + Send + 'static) -> bool {
        self.enqueue(Sort::Body, Box::new(job))
    }

    fn enqueue(&self, sort: Sort, job: Job) -> bool {
        let mut queue = self.shared.lock();
        if queue.closed || queue.suspended {
            drop(queue); // before the job, which may wake a task that submits another
            return false;
        }
        queue.jobs.push_back((sort, Box::new(inflight::carry_job(job))));
        self.shared.wake.notify_one();
        true
    }

    /// Drops the bodies that wait.
    pub(crate) fn shed(&self) {
        let shed: VecDeque<_> = {
            let mut queue = self.shared.lock();
            let (shed, kept): (VecDeque<_>, _) =
                std::mem::take(&mut queue.jobs).into_iter().partition(|j| j.0 == Sort::Body);
            queue.jobs = kept;
            shed
        };
        drop(shed); // without the lock: it wakes the waiters
    }

    /// As [`Self::submit`], for the probe of a suspended pool.
    pub(crate) fn submit_probe(&self, job: impl FnOnce() + Send + 'static) {
        let mut queue = self.shared.lock();
        if !queue.closed {
            queue.jobs.push_back((Sort::Other, Box::new(job)));
            self.shared.wake.notify_one();
        }
    }

    /// None when the job was not done: the pool is closed or suspended, or the job panicked.
    pub(crate) async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        self.submit(move || {
            let _ = sender.send(job());
        });
        receiver.await.ok()
    }

    /// Closes a descriptor of a file on this disk, when the disk lets us.
    pub(crate) fn close_file(&self, file: OwnedFd) {
        let mut queue = self.shared.lock();
        if queue.closed && !queue.suspended {
            drop(queue);
            drop(file); // the threads may be gone; the disk answered when they went
            return;
        }
        queue.closings.push(file);
        self.shared.wake.notify_one();
    }

    /// How long the longest of the calls has taken that are under way.
    pub(crate) fn longest_call(&self) -> Option<Duration> {
        let now = Instant::now();
        let call = |doing: &Doing| match doing {
            Doing::Call(since) => Some(now.saturating_duration_since(*since)),
            Doing::Nothing | Doing::Waiting => None,
        };
        self.shared.lock().doing.iter().filter_map(call).max()
    }

    /// Takes no more work, and drops what has not begun.
    pub(crate) fn suspend(&self) {
        let dropped = {
            let mut queue = self.shared.lock();
            queue.suspended = true;
            std::mem::take(&mut queue.jobs)
        };
        // Not under the lock: the waiters wake, and may submit another job.
        drop(dropped);
    }

    pub(crate) fn resume(&self) {
        self.shared.lock().suspended = false;
    }

    /// What was submitted before is still done.
    pub(crate) fn close(&self) {
        self.shared.lock().closed = true;
        self.shared.wake.notify_all();
    }

    /// Returns when everything is done that was submitted before.
    pub(crate) async fn drained(&self) {
        loop {
            let idle = self.shared.idle.notified();
            tokio::pin!(idle);
            idle.as_mut().enable();
            {
                let queue = self.shared.lock();
                if queue.jobs.is_empty()
                    && queue.closings.is_empty()
                    && queue.doing.iter().all(|doing| *doing == Doing::Nothing)
                {
                    return;
                }
            }
            idle.await;
        }
    }
}

impl Drop for Pool {
    // No join: the last reference may well be dropped by one of these threads.
    fn drop(&mut self) {
        self.close();
    }
}

fn work(shared: &Arc<Shared>, thread: usize) {
    PLACE.set(Some((shared.clone(), thread)));
    let mut queue = shared.lock();
    loop {
        if let Some(file) = queue.closings.pop() {
            queue.doing[thread] = Doing::Call(Instant::now());
            drop(queue);
            drop(file);
        } else if let Some((_, job)) = queue.jobs.pop_front() {
            queue.doing[thread] = Doing::Call(Instant::now());
            drop(queue);
            // A panic is a defect of one job; its waiters learn of it because what they wait for is dropped.
            if catch_unwind(AssertUnwindSafe(job)).is_err() {
                tracing::error!("a cache disk job panicked: please report this");
            }
        } else if queue.closed {
            return;
        } else {
            queue = shared.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
            continue;
        }
        queue = shared.lock();
        queue.doing[thread] = Doing::Nothing;
        if queue.jobs.is_empty() && queue.closings.is_empty() {
            shared.idle.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    const LIMIT: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn a_suspended_pool_drops_what_waits_and_a_call_that_hangs_is_seen() {
        let pool = Pool::start("test", 1).unwrap();
        let ((stuck, is_stuck), (release, released)) = (channel(), channel::<()>());
        assert!(pool.longest_call().is_none());
        pool.submit(move || {
            stuck.send(()).unwrap();
            let _ = released.recv();
        });
        is_stuck.recv_timeout(LIMIT).unwrap();
        let begun = pool.longest_call().unwrap();
        let waiting = pool.run(|| ());
        tokio::pin!(waiting);
        assert!(futures::poll!(waiting.as_mut()).is_pending());
        assert!(pool.longest_call().unwrap() >= begun);
        pool.suspend();
        assert_eq!(tokio::time::timeout(LIMIT, waiting).await.unwrap(), None, "a call that waits learns it");
        assert_eq!(pool.run(|| ()).await, None, "and so does the next");
        let (read, write) = rustix::pipe::pipe().unwrap();
        pool.close_file(write);
        drop(release);
        pool.drained().await;
        assert_eq!(rustix::io::read(&read, &mut [0; 1]).unwrap(), 0, "closed by the pool's thread");
        pool.resume();
        assert_eq!(pool.run(|| 7).await, Some(7));
    }

    #[tokio::test]
    async fn descriptors_are_closed_however_many_jobs_wait() {
        let pool = Pool::start("test", 1).unwrap();
        let ((stuck, is_stuck), (release, released)) = (channel(), channel::<()>());
        pool.submit(move || {
            stuck.send(()).unwrap();
            let _ = released.recv();
        });
        is_stuck.recv_timeout(LIMIT).unwrap();
        let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
        let next = pool.run(move || rustix::io::read(&read, &mut [0; 1]));
        tokio::pin!(next);
        assert!(futures::poll!(next.as_mut()).is_pending());
        pool.close_file(write);
        drop(release);
        assert_eq!(next.await, Some(Ok(0)), "the job that waited found it closed");
    }

    #[test]
    fn a_job_of_many_calls_has_a_time_for_each() {
        let pool = Pool::start("test", 1).unwrap();
        let ((sender, receiver), (go_on, may_go)) = (channel(), channel::<()>());
        pool.submit(move || {
            sender.send(()).unwrap();
            may_go.recv().unwrap();
            call_returned();
            sender.send(()).unwrap();
            let _ = may_go.recv();
        });
        receiver.recv_timeout(LIMIT).unwrap();
        let since = || match pool.shared.lock().doing[0] {
            Doing::Call(since) => since,
            other => panic!("{other:?}"),
        };
        let first = since();
        go_on.send(()).unwrap();
        receiver.recv_timeout(LIMIT).unwrap();
        assert!(since() > first);
    }

    #[test]
    fn who_waits_for_another_thread_of_ours_is_in_no_call() {
        let pool = Pool::start("test", 1).unwrap();
        let ours = Arc::new(Mutex::new(()));
        let guard = ours.lock().unwrap();
        let (got, has_it) = channel();
        let waits = ours.clone();
        pool.submit(move || {
            let _guard = lock_of_ours(&waits);
            got.send(()).unwrap();
        });
        let until = Instant::now() + LIMIT;
        while pool.shared.lock().doing[0] != Doing::Waiting {
            assert!(Instant::now() < until);
            std::thread::yield_now();
        }
        assert_eq!(pool.longest_call(), None);
        drop(guard);
        has_it.recv_timeout(LIMIT).unwrap();
    }
}
