//! The end of an agent whose successor is there: it steps back, and leaves when the successor serves everything.
//!
//! ```text
//!             StepBack                          Depart
//!  serving ─────────────► stepped back ────────────────────► exit
//!     ▲    workers ended,      │  │ the broker is gone: shown to the next one, then
//!     │    cache and state     │  │ the owner's lock is taken by the successor ──► exit
//!     │    closed              │  └──────────────────────────────────────┐ free
//!     └── StepForward: executes itself anew, and is given every mount ◄──┘
//! ```
//!
//! What has stepped back holds the descriptors of its mounts and nothing else. It does not open again what it has
//! closed: a new life of the same program does that, as after a crash.

use crate::app::App;
use crate::handoff::owner::Owner;
use link::failpoint;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use tokio::sync::oneshot;

/// What the broker's connection tells the agent as a whole.
pub(crate) enum Order {
    /// Answered when cache and state are free.
    StepBack(oneshot::Sender<()>),
    StepForward,
    Depart,
    /// Of an agent that has stepped back: a broker is there, perhaps a new one, and holds every mount.
    Shown,
}

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
        let stepped_back = app.has_stepped_back();
        match order {
            Order::StepBack(done) => {
                failpoint::hit("old.called");
                app.step_back().await;
                failpoint::hit("old.stepped-back");
                let _ = done.send(()); // the connection is gone: the next broker will be shown the mounts
            }
            Order::StepForward if stepped_back => return Ok(End::Again),
            Order::Depart if stepped_back => return Ok(End::Departed),
            Order::Shown if stepped_back => {
                return match Owner::try_take(state_dir)? {
                    Some(_) => Ok(End::Again),
                    None => Ok(End::Departed),
                };
            }
            Order::StepForward | Order::Depart | Order::Shown => {}
        }
    }
    std::future::pending().await // nobody gives orders any more: a signal ends this agent
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
