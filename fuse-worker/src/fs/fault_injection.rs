//! Debug: a worker that harms itself at files of a certain name, to show what becomes of its mount.

use super::{Fs, ino_of};
use link::inflight::Counter;
use link::worker::{FaultKind, InjectedFault};
use startup::log::say;

impl Fs {
    /// At every request for a name.
    pub(super) fn inject_faults_at_name(&self, name: &[u8]) {
        let done = self.inflight.counter(Counter::InjectedFaults);
        let due = |m: &&InjectedFault| m.name.as_bytes() == name && done < u64::from(m.times);
        if let Some(fault) = self.settings.injected_faults.iter().find(due) {
            self.inflight.count(Counter::InjectedFaults);
            say(&format!("fuse-worker: fault {:?} at {:?}", fault.what, fault.name));
            commit(fault.what);
        }
    }

    /// At every request for bytes.
    pub(super) fn inject_faults_at_node(&self, nodeid: u64) {
        if self.settings.injected_faults.is_empty() {
            return;
        }
        if let Ok(Some(path)) = self.view.path(ino_of(nodeid)) {
            self.inject_faults_at_name(path.rsplit(|byte| *byte == b'/').next().unwrap_or_default());
        }
    }
}

fn commit(deed: FaultKind) -> ! {
    match deed {
        FaultKind::Abort => std::process::abort(),
        FaultKind::Deadlock => loop {
            std::thread::park();
        },
        FaultKind::Spin => loop {
            std::hint::spin_loop();
        },
        FaultKind::Allocate => {
            let mut taken = Vec::new();
            loop {
                taken.push(std::hint::black_box(vec![1u8; 1 << 20]));
            }
        }
    }
}
