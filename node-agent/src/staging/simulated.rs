//! In the place of the staging disk, and of this run of the kernel, in histories: what the thread that runs one has set.

use std::cell::RefCell;
use std::fs::File;
use std::sync::Arc;

pub(super) trait Simulated {
    /// Has the job done when its turn comes.
    fn take(self: Arc<Self>, job: Box<dyn FnOnce() + Send>);
    /// The bytes of a staged file are durable now, with the names of its directory.
    fn written_out(&self, data: &File);
    fn journal_written_out(&self);
    fn boot(&self) -> String;
}

pub(super) type SimulatedDisk = Arc<dyn Simulated + Send + Sync>;

thread_local! {
    static DISK: RefCell<Option<SimulatedDisk>> = const { RefCell::new(None) };
}

pub(super) fn set(disk: SimulatedDisk) {
    DISK.set(Some(disk));
}

pub(super) fn of_this_thread() -> Option<SimulatedDisk> {
    DISK.with(|disk| disk.borrow().clone())
}

pub(super) fn written_out(data: &File) {
    if let Some(disk) = of_this_thread() {
        disk.written_out(data);
    }
}

pub(super) fn journal_written_out() {
    if let Some(disk) = of_this_thread() {
        disk.journal_written_out();
    }
}
