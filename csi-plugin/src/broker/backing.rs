//! Passthrough files: registered with the kernel for the agent, recorded, closed when no open file needs them.

use super::mounts_table::Mount;
use link::broker::BrokerAnswer;
use link::{BACKING_IDS_MAX, Refusal, RefusalKind};
use mounts::{Kernel, KernelError};
use std::os::fd::{AsFd, OwnedFd};

/// `fds`: the cache file.
pub(super) fn open(kernel: &dyn Kernel, mount: &Mount, fds: Vec<OwnedFd>) -> Result<BrokerAnswer, Refusal> {
    let id = mount.id;
    let [file] = <[OwnedFd; 1]>::try_from(fds)
        .map_err(|_| Refusal::new(RefusalKind::Invalid, "BackingOpen takes one descriptor"))?;
    let gone = || Refusal::new(RefusalKind::NotFound, format!("mount {id} has ended"));
    let device = mount.device().ok_or_else(gone)?;
    // Each pins a file, and all of them must fit into the message that gives the mount to the next agent.
    if mount.backing().len() >= BACKING_IDS_MAX {
        let why = format!("mount {id} has {BACKING_IDS_MAX} passthrough files open, which is the limit");
        return Err(Refusal::new(RefusalKind::Unavailable, why));
    }
    let backing = kernel.backing_open(device.as_fd(), file.as_fd()).map_err(refusal)?;
    mount.record_backing(backing);
    if mount.state().is_over() {
        // It ended while the broker asked: the thread that ended it may have read the records before.
        close_recorded(kernel, mount, &device, backing);
        return Err(gone());
    }
    Ok(BrokerAnswer::Backing { id: backing })
}

pub(super) fn close(kernel: &dyn Kernel, mount: &Mount, backing: u32) -> BrokerAnswer {
    match mount.device() {
        Some(device) => close_recorded(kernel, mount, &device, backing),
        None => {
            mount.forget_backing(backing); // the connection took its ids with it
        }
    }
    BrokerAnswer::Done
}

fn close_recorded(kernel: &dyn Kernel, mount: &Mount, device: &OwnedFd, backing: u32) {
    if mount.forget_backing(backing)
        && let Err(error) = kernel.backing_close(device.as_fd(), backing)
    {
        tracing::warn!(mount = %mount.id, backing, %error, "a passthrough id was not closed");
    }
}

fn refusal(error: KernelError) -> Refusal {
    let kind = match error {
        KernelError::NotACacheFile(_) => RefusalKind::Denied,
        _ => RefusalKind::Internal,
    };
    Refusal::new(kind, error.to_string())
}
