//! Looks through mounts: for the broker, and on behalf of the agent, which must never touch its own.

use super::mounts_table::Mount;
use link::broker::BrokerAnswer;
use link::worker::Mode;
use link::{Refusal, RefusalKind};
use mounts::{Kernel, probe};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Below the agent's patience with any question.
const LIMIT: Duration = Duration::from_millis(1500);
/// Each is a process. The agent asks again.
const LOOKS_MAX: usize = 4;

/// A mount that lives or is dead says so at once; one that does not answer is not dead.
pub(crate) const ALIVE_LIMIT: Duration = Duration::from_secs(1);
/// The broker's own look at a mount that is new, or has another agent.
pub(super) const PROBE_LIMIT: Duration = Duration::from_secs(10);

/// What a probe does with a mount to have it ready.
pub(super) fn primes(mode: Mode) -> probe::What {
    match mode {
        Mode::NoOpen => probe::What::Small,
        Mode::Passthrough | Mode::Kept | Mode::Writable => probe::What::Large,
    }
}

/// Mounts that are being looked through for the agent.
#[derive(Debug, Default)]
pub(super) struct Looks(AtomicUsize);

impl Looks {
    /// Blocks until the mount has answered, or has not.
    pub(super) fn look(&self, kernel: &dyn Kernel, mount: &Mount) -> Result<BrokerAnswer, Refusal> {
        if self.0.fetch_add(1, Ordering::AcqRel) >= LOOKS_MAX {
            self.0.fetch_sub(1, Ordering::AcqRel);
            return Err(Refusal::new(RefusalKind::Unavailable, "too many mounts are being looked through"));
        }
        let seen = kernel.probe(&mount.target, probe::What::Alive, LIMIT);
        self.0.fetch_sub(1, Ordering::AcqRel);
        match seen {
            Ok(probe::Outcome::Primed | probe::Outcome::Serving) => {
                Ok(BrokerAnswer::Probed { serving: true })
            }
            Ok(probe::Outcome::Dead) => Ok(BrokerAnswer::Probed { serving: false }),
            Err(error) => Err(Refusal::new(RefusalKind::Unavailable, error.to_string())),
        }
    }
}
