//! The FUSE connection of one mount: the device, the shared memory beside it, and the cache roots that go with them to
//! each worker. What is asked of the kernel or of the shared memory is asked here.

use super::handshake::introduce;
use super::spawn::Worker;
use inflight::{Behalf, Blame, Collected, Inflight, InflightError, Room, Subject};
use link::worker::{Assign, Mode};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A FUSE device, and the cache roots from which its mount is served.
pub(crate) struct Descriptors {
    pub(crate) device: OwnedFd,
    pub(crate) roots: Vec<OwnedFd>,
}

pub(super) struct Connection {
    device: OwnedFd,
    shared: OwnedFd,
    inflight: Arc<Inflight>,
    roots: Vec<OwnedFd>,
}

impl Connection {
    pub(super) fn create(descriptors: Descriptors, init: &[u8], room: Room) -> Result<Self, InflightError> {
        let Descriptors { device, roots } = descriptors;
        let shared = Inflight::create(room)?;
        let inflight = Inflight::map(shared.as_fd())?;
        inflight.set_init(init)?;
        Ok(Self { device, shared, inflight: Arc::new(inflight), roots })
    }

    /// Of an agent that is gone. With the INIT reply that the kernel has.
    pub(super) fn take_over(descriptors: Descriptors, shared: OwnedFd) -> Result<(Self, Vec<u8>), String> {
        let Descriptors { device, roots } = descriptors;
        let inflight = Inflight::map(shared.as_fd()).map_err(|e| e.to_string())?;
        let init_reply = inflight.init_reply().ok_or("its shared memory holds no INIT reply")?;
        Ok((Self { device, shared, inflight: Arc::new(inflight), roots }, init_reply))
    }

    pub(super) fn shared(&self) -> std::io::Result<OwnedFd> {
        self.shared.try_clone()
    }

    pub(super) fn device(&self) -> std::io::Result<OwnedFd> {
        self.device.try_clone()
    }

    /// Hands it over and waits for the INIT answer.
    pub(super) fn introduce(&self, worker: &Worker, assign: Assign) -> Result<(Vec<u8>, Mode), String> {
        introduce(worker, assign, self.device.as_fd(), self.shared.as_fd(), &self.roots)
    }

    /// No worker reads the device now: what the dead one took and did not answer becomes its successor's work.
    pub(super) fn collect(&self, blame: Blame) -> std::io::Result<Collected> {
        self.inflight.collect(self.device.as_fd(), blame)
    }

    pub(super) fn vacate(&self) {
        self.inflight.vacate();
    }

    /// Waits until no process holds the shared memory; false: one still does after `limit`.
    pub(super) fn wait_until_free(&self, limit: Duration) -> bool {
        let end = Instant::now() + limit;
        while Inflight::is_held(self.shared.as_fd()) {
            if Instant::now() >= end {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    pub(super) fn heartbeat(&self) -> u64 {
        self.inflight.heartbeat()
    }

    /// As far as the agent sees by itself: those that were read stand in the shared memory, and the device is readable
    /// while there are others.
    pub(super) fn requests_wait(&self) -> bool {
        self.inflight.in_flight() > 0 || self.device_says(PollFlags::IN)
    }

    /// The kernel says so through poll; a read would say it with ENODEV, but might take a request.
    pub(super) fn has_ended(&self) -> bool {
        self.device_says(PollFlags::ERR)
    }

    fn device_says(&self, event: PollFlags) -> bool {
        let mut device = [PollFd::new(&self.device, PollFlags::IN)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut device, Some(&now)).is_ok() && device[0].revents().contains(event)
    }

    /// For whom the agent runs that answers a question of this request's.
    pub(super) fn behalf(&self, unique: u64) -> Option<Behalf> {
        Behalf::of(&self.inflight, unique)
    }

    /// What the connection's processes share.
    pub(super) fn inflight(&self) -> &Inflight {
        &self.inflight
    }

    pub(super) fn is_in_flight(&self, unique: u64) -> bool {
        self.inflight.is_in_flight(unique)
    }

    pub(super) fn subject(&self, unique: u64) -> Option<Subject> {
        self.inflight.subject(unique)
    }

    /// Passthrough ids that workers have recorded.
    pub(super) fn recorded_ids(&self) -> HashSet<u32> {
        self.inflight.backings().into_iter().map(|(_, backing)| backing.id).collect()
    }
}
