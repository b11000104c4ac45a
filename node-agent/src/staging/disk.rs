//! The threads that touch the disk of a staging area. What was begun comes to its end however long the disk takes, and whoever
//! began it holds what it is about until then: what came to pass late beside a later change of the same would undo that. That
//! a call takes longer than the limit is told to all who wait (`Hung`), so that programs get an error in time.

use inflight::carry_job;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;
use tokio::sync::{oneshot, watch};

/// One may be held up by a journal that is written out while another writes bytes.
pub(super) const THREADS: usize = 3;

/// What a disk moves in a second at least, bytes.
const SLOWEST: u64 = 20 << 20;

type Job = Box<dyn FnOnce() + Send>;

pub(super) struct Disk {
    jobs: Jobs,
    limit: Duration,
    silence: Silence,
}

/// How many calls of the staging disk take longer than the limit at the moment.
#[derive(Clone, Default)]
pub(super) struct Silence(Arc<watch::Sender<usize>>);

/// One of them.
struct Silent(Silence);

impl Silence {
    fn begins(&self) -> Silent {
        self.0.send_modify(|calls| *calls += 1);
        Silent(self.clone())
    }

    pub(super) fn is_now(&self) -> bool {
        *self.0.borrow() > 0
    }

    pub(super) async fn begun(&self) {
        let _ = self.0.subscribe().wait_for(|calls| *calls > 0).await; // its sender is here
    }

    pub(super) async fn over(&self) {
        let _ = self.0.subscribe().wait_for(|calls| *calls == 0).await; // its sender is here
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.0.0.send_modify(|calls| *calls -= 1);
    }
}

enum Jobs {
    Threads(mpsc::Sender<Job>),
    #[cfg(test)]
    Simulated(super::simulated::SimulatedDisk),
}

/// It did not answer within the limit.
#[derive(Debug)]
pub(super) struct Hung;

/// The job has ended its thread.
#[derive(Debug)]
pub(super) struct Gone;

impl Disk {
    pub(super) fn start(limit: Duration, silence: Silence) -> std::io::Result<Self> {
        #[cfg(test)]
        if let Some(simulated) = super::simulated::of_this_thread() {
            return Ok(Self { jobs: Jobs::Simulated(simulated), limit, silence });
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
        Ok(Self { jobs: Jobs::Threads(jobs), limit, silence })
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    pub(super) fn silence(&self) -> &Silence {
        &self.silence
    }

    /// However long it takes.
    pub(super) async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Gone> {
        self.run_for(0, job).await
    }

    /// The same of a call that moves so many bytes: a disk that is slow, or has many callers, does not hang.
    pub(super) async fn run_for<T: Send + 'static>(
        &self,
        bytes: u64,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Gone> {
        let (taken, is_taken) = oneshot::channel();
        let mut result = self.begin(move || {
            let _ = taken.send(()); // nobody waits for it any more: done all the same
            job()
        })?;
        // If it waits because others take too long, they tell.
        is_taken.await.map_err(|_| Gone)?;
        let limit = self.limit + Duration::from_secs(bytes / SLOWEST);
        match tokio::time::timeout(limit, &mut result).await {
            Ok(done) => done.map_err(|_| Gone),
            Err(_) => {
                let _silent = self.silence.begins();
                result.await.map_err(|_| Gone)
            }
        }
    }

    /// Within the limit. It is done all the same once the disk answers: for what has no consequences.
    pub(super) async fn run_in_time<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Hung> {
        let result = self.begin(job).map_err(|Gone| Hung)?;
        tokio::time::timeout(self.limit, result).await.ok().and_then(Result::ok).ok_or(Hung)
    }

    fn begin<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> Result<oneshot::Receiver<T>, Gone> {
        let (done, result) = oneshot::channel();
        let job = carry_job(job);
        let job: Job = Box::new(move || drop(done.send(job()))); // nobody waits any more: done all the same
        match &self.jobs {
            Jobs::Threads(jobs) => jobs.send(job).map_err(|_| Gone)?,
            #[cfg(test)]
            Jobs::Simulated(disk) => disk.clone().take(job),
        }
        Ok(result)
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

/// Has the kernel take all of it for not written out: after an fsync that failed it may call pages clean that are not on the disk,
/// and the next fsync would say that they are safe. Nobody may change it meanwhile.
pub(super) fn write_anew(data: &std::fs::File) -> rustix::io::Result<()> {
    let size = rustix::fs::fstat(data)?.st_size as u64;
    let (mut at, mut bytes) = (0, vec![0; 1 << 20]);
    while let Some(range) = data_after(data, at)?.filter(|range| range.start < size) {
        at = range.start;
        while at < range.end.min(size) {
            let len = bytes.len().min((range.end.min(size) - at) as usize);
            let read = rustix::io::retry_on_intr(|| rustix::io::pread(data, &mut bytes[..len], at))?;
            if read == 0 {
                return Ok(());
            }
            let mut written = 0;
            while written < read {
                let from = at + written as u64;
                written +=
                    rustix::io::retry_on_intr(|| rustix::io::pwrite(data, &bytes[written..read], from))?;
            }
            at += read as u64;
        }
    }
    Ok(())
}

/// The first run of data at or behind `at`; without an end where the file system tells no holes.
pub(super) fn data_after(data: &std::fs::File, at: u64) -> rustix::io::Result<Option<std::ops::Range<u64>>> {
    match rustix::fs::seek(data, rustix::fs::SeekFrom::Data(at)) {
        Ok(start) => {
            let end = rustix::fs::seek(data, rustix::fs::SeekFrom::Hole(start)).unwrap_or(u64::MAX);
            Ok(Some(start..end))
        }
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Ok(Some(at..u64::MAX)),
        Err(error) => Err(error),
    }
}
