//! What the broker's connection asks of the agent as a whole: between `volumes`, which hears it, and `drain`, which does it.

use tokio::sync::oneshot;

pub(crate) enum Order {
    /// Answered when cache and state are free.
    Drain(oneshot::Sender<()>),
    Resume,
    Depart,
    /// Of an agent that is drained: a broker is there, perhaps a new one, and holds every mount.
    Shown,
}
