//! Debug: a worker that harms itself at files of a certain name, to show what becomes of its mount.

use super::ino_of;
use cache::meta::View;
use inflight::{Counter, Inflight};
use link::worker::{FaultKind, InjectedFault};
use startup::log::say;
use std::sync::Arc;

/// The faults that are left to inject, counted in shared memory. Each part that needs it has its own.
#[derive(Clone)]
pub(super) struct FaultInjection {
    faults: Arc<[InjectedFault]>,
    view: View,
    inflight: Arc<Inflight>,
}

impl FaultInjection {
    pub(super) fn new(faults: &[InjectedFault], view: View, inflight: Arc<Inflight>) -> Self {
        Self { faults: faults.into(), view, inflight }
    }

    /// At every request for a name.
    pub(super) fn at_name(&self, name: &[u8]) {
        let done = self.inflight.counter(Counter::InjectedFaults);
        let due = |m: &&InjectedFault| m.name.as_bytes() == name && done < u64::from(m.times);
        if let Some(fault) = self.faults.iter().find(due) {
            self.inflight.count(Counter::InjectedFaults);
            say(&format!("fuse-worker: fault {:?} at {:?}", fault.what, fault.name));
            commit(fault.what);
        }
    }

    /// At every request for bytes.
    pub(super) fn at_node(&self, nodeid: u64) {
        if self.faults.is_empty() {
            return;
        }
        if let Ok(Some(path)) = self.view.path(ino_of(nodeid)) {
            self.at_name(path.rsplit(|byte| *byte == b'/').next().unwrap_or_default());
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
