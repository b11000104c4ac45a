//! Debug: a worker that harms itself at files of a certain name, to show what becomes of its mount.

use super::{Fs, ino_of};
use link::inflight::Counter;
use link::worker::{Deed, Misdeed};
use startup::log::say;

impl Fs {
    /// At every request for a name.
    pub(super) fn misbehave_at_name(&self, name: &[u8]) {
        let done = self.inflight.counter(Counter::Misdeeds);
        let due = |m: &&Misdeed| m.name.as_bytes() == name && done < u64::from(m.times);
        if let Some(misdeed) = self.settings.misdeeds.iter().find(due) {
            self.inflight.count(Counter::Misdeeds);
            say(&format!("fuse-worker: misdeed {:?} at {:?}", misdeed.what, misdeed.name));
            commit(misdeed.what);
        }
    }

    /// At every request for bytes.
    pub(super) fn misbehave_at_node(&self, nodeid: u64) {
        if self.settings.misdeeds.is_empty() {
            return;
        }
        if let Ok(Some(path)) = self.view.path(ino_of(nodeid)) {
            self.misbehave_at_name(path.rsplit(|byte| *byte == b'/').next().unwrap_or_default());
        }
    }
}

fn commit(deed: Deed) -> ! {
    match deed {
        Deed::Abort => std::process::abort(),
        Deed::Deadlock => loop {
            std::thread::park();
        },
        Deed::Spin => loop {
            std::hint::spin_loop();
        },
        Deed::Allocate => {
            let mut taken = Vec::new();
            loop {
                taken.push(std::hint::black_box(vec![1u8; 1 << 20]));
            }
        }
    }
}
