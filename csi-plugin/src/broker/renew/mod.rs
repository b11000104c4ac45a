//! Mounts whose connection has ended are made anew, once there is an agent: in their own place and in every container
//! that has them. What was open before stays dead; paths work again.
//!
//! ```text
//!  an agent has come ──► look: what is there to do at which target? ──► a thread for each: mount anew, replace
//!  or a mount ended        ▲                                   (see `look`)    │                    (see `mount`)
//!                          └── again, after a pause of its own ◄───────────────┘ failed, or: a container may have
//!                                                                                started meanwhile
//! ```
//!
//! A mount is dead if the kernel says so; one that a living agent is about to show to a new broker is not. What fails
//! is tried again, ever more slowly, and one that waits for a store without answers holds up no other. `schedule`
//! says when what is done.

mod candidates;
mod look;
mod mount;
pub mod schedule;
mod wanted;

pub(super) use candidates::candidates;
pub(super) use look::Renewer;
pub(super) use mount::Remounter;
pub(super) use schedule::Renewals;
pub(crate) use wanted::Leaving;

use std::sync::Weak;

/// Runs until the broker is dropped or stopped.
pub(super) fn watch(renewer: &Weak<Renewer>, renewals: &Renewals) {
    while !renewals.is_over() {
        let due = renewals.wait();
        let Some(renewer) = renewer.upgrade() else { return };
        if due {
            renewals.looked(renewer.look_for_dead());
        }
    }
}
