//! The end of an agent whose successor is there: it drains, and leaves when the successor serves everything.
//!
//! ```text
//!               Drain                      Depart
//!  serving ─────────────► drained ────────────────────────► exit
//!     ▲    workers ended,   │  │ the broker is gone: shown to the next one, then
//!     │    cache and state  │  │ the owner's lock is taken by the successor ──► exit
//!     │    closed           │  └─────────────────────────────────────────┐ free
//!     └─── Resume: executes itself anew, and is given every mount ◄──────┘
//! ```
//!
//! What is drained holds the descriptors of its mounts and nothing else. It does not open again what it has
//! closed: a new life of the same program does that, as after a crash.

use crate::app::App;
use crate::handoff::order::Order;
use crate::handoff::owner::Owner;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;

/// How an agent's service ends.
pub(crate) enum End {
    /// The successor has everything.
    Departed,
    /// Serve again.
    Again,
}

/// Carries out orders; returns when one of them ends the agent's service.
pub(crate) async fn follow(app: &mut App, state_dir: &Path) -> io::Result<End> {
    while let Some(order) = app.next_order().await {
        let drained = app.is_drained();
        match order {
            Order::Drain(done) => {
                failpoint::hit("old.called");
                if !app.drain().await {
                    // The successor has them as after a death, when the kernel has let go of them; everything else at once: the broker
                    // gets no answer, and promotes it.
                    std::mem::forget(done);
                    return Err(io::Error::other(
                        "a staging disk does not answer: its areas are let go with the process",
                    ));
                }
                failpoint::hit("old.drained");
                let _ = done.send(()); // the connection is gone: the next broker will be shown the mounts
            }
            Order::Resume if drained => return Ok(End::Again),
            Order::Depart if drained => return Ok(End::Departed),
            Order::Shown if drained => {
                return match Owner::try_take(state_dir)? {
                    Some(_) => Ok(End::Again),
                    None => Ok(End::Departed),
                };
            }
            Order::Resume | Order::Depart | Order::Shown => {}
        }
    }
    std::future::pending().await // there is no broker to give orders: a signal ends this agent
}

/// Becomes a new process of the same program: same id, same arguments, nothing else. Returns only on failure.
pub(crate) fn execute_anew() -> io::Error {
    let mut arguments = std::env::args_os();
    let name = arguments.next().unwrap_or_default();
    // Whatever lies under the program's name by now.
    if let Err(error) = startup::log::restore() {
        return error;
    }
    std::process::Command::new("/proc/self/exe").arg0(name).args(arguments).exec()
}
