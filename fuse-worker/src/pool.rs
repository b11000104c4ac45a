//! A few threads that finish requests whose answer has come, so that a slow disk holds up neither the device nor the
//! link.

use inflight::Inflight;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce() + Send>;

pub struct Pool {
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Gets the request under execution, so that a worker's death is blamed on the right one.
    inflight: Option<Arc<Inflight>>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<(u64, Job)>,
    /// Per thread: when it began its job.
    busy: Vec<Option<Instant>>,
}

impl Pool {
    pub fn start(threads: usize, inflight: Option<Arc<Inflight>>) -> std::io::Result<Arc<Self>> {
        let queue = Queue { jobs: VecDeque::new(), busy: vec![None; threads] };
        let pool = Arc::new(Self { queue: Mutex::new(queue), changed: Condvar::new(), inflight });
        for thread in 0..threads {
            let pool = pool.clone();
            std::thread::Builder::new().name(format!("finish-{thread}")).spawn(move || pool.run(thread))?;
        }
        Ok(pool)
    }

    /// `unique`: the request that the job finishes; 0: none. The queue is bounded by the requests in flight.
    pub fn submit(&self, unique: u64, job: Job) {
        self.lock().jobs.push_back((unique, job));
        self.changed.notify_one();
    }

    /// No thread has been at one job for longer than `limit`.
    pub fn is_live(&self, limit: Duration) -> bool {
        !self.lock().busy.iter().any(|since| since.is_some_and(|since| since.elapsed() > limit))
    }

    /// As [`Self::submit`], on the calling thread.
    pub(crate) fn run_here(&self, unique: u64, job: impl FnOnce()) {
        let inflight = self.inflight.as_ref().filter(|_| unique != 0);
        if let Some(inflight) = inflight {
            inflight.resume(unique);
        }
        failpoint::pass("worker.finishing");
        job();
        if let Some(inflight) = inflight {
            inflight.suspend(unique);
        }
    }

    fn run(&self, thread: usize) {
        loop {
            let (unique, job) = {
                let mut queue = self.lock();
                queue.busy[thread] = None;
                loop {
                    if let Some(job) = queue.jobs.pop_front() {
                        queue.busy[thread] = Some(Instant::now());
                        break job;
                    }
                    queue = self.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
                }
            };
            self.run_here(unique, job);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }
}
