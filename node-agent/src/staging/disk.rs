//! The threads that touch the disk of a staging area. What they do not get done within the limit is an error to whoever
//! waits for it, and is finished all the same once the disk answers: so whoever asks leaves the consequences to the job.

use inflight::carry_job;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use tokio::sync::oneshot;

/// One may be held up by a journal that is written out while another writes bytes.
const THREADS: usize = 3;

type Job = Box<dyn FnOnce() + Send>;

pub(super) struct Disk {
    jobs: Jobs,
    limit: Duration,
}

enum Jobs {
    Threads(mpsc::Sender<Job>),
    #[cfg(test)]
    Simulated(super::simulated::SimulatedDisk),
}

/// It did not answer within the limit.
#[derive(Debug)]
pub(super) struct Hung;

impl Disk {
    pub(super) fn start(limit: Duration) -> std::io::Result<Self> {
        #[cfg(test)]
        if let Some(simulated) = super::simulated::of_this_thread() {
            return Ok(Self { jobs: Jobs::Simulated(simulated), limit });
        }
        let (jobs, queue) = mpsc::channel::<Job>();
        let queue = Arc::new(Mutex::new(queue));
        for number in 0..THREADS {
            let queue = queue.clone();
            std::thread::Builder::new().name(format!("staging-{number}")).spawn(move || {
                loop {
                    let job = crate::lock::lock(&queue).recv();
                    let Ok(job) = job else { return }; // the area is closed
                    job();
                }
            })?;
        }
        Ok(Self { jobs: Jobs::Threads(jobs), limit })
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    pub(super) async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Hung> {
        let (done, result) = oneshot::channel();
        let job = carry_job(job);
        let job: Job = Box::new(move || drop(done.send(job()))); // nobody waits any more: done all the same
        match &self.jobs {
            Jobs::Threads(jobs) => jobs.send(job).map_err(|_| Hung)?,
            #[cfg(test)]
            Jobs::Simulated(disk) => disk.clone().take(job),
        }
        tokio::time::timeout(self.limit, result).await.ok().and_then(Result::ok).ok_or(Hung)
    }
}

/// Makes the bytes of a staged file durable, with its name.
pub(super) fn write_out(data: &std::fs::File, dir: &OwnedFd) -> rustix::io::Result<()> {
    rustix::fs::fdatasync(data)?;
    rustix::fs::fsync(dir)?;
    #[cfg(test)]
    super::simulated::written_out(data);
    Ok(())
}
