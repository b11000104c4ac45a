//! Connections that another process ends: what an administrator, another program or the kernel itself does to a mount.

use crate::mountinfo;
use crate::node::{Mounted, Node};
use anyhow::{Context, Result};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// `echo 1 > /sys/fs/fuse/connections/N/abort`; the kernel's `max_request_timeout` does the same.
    Abort,
    /// `umount -f` at the target.
    ForcedUnmount,
}

/// Minor device number of the FUSE mount at the target.
pub fn number(target: &Path) -> Result<String> {
    let all = mountinfo::below(target)?;
    let fuse = all.into_iter().rfind(|m| m.kind.starts_with("fuse")).context("there is no FUSE mount")?;
    Ok(fuse.device.rsplit(':').next().unwrap_or_default().to_owned())
}

pub fn end(node: &Node, mounted: &Mounted, how: Ending) -> Result<()> {
    match how {
        Ending::Abort => abort(node, &mounted.target),
        Ending::ForcedUnmount => {
            match rustix::mount::unmount(&mounted.target, UnmountFlags::FORCE) {
                // The kernel ends the connection first. Then somebody, a broker say, was just looking at the mount: it stays.
                Err(Errno::BUSY) => Ok(()),
                unmounted => unmounted.context("umount -f"),
            }
        }
    }
}

pub fn abort(node: &Node, target: &Path) -> Result<()> {
    abort_through(&node.places().root().join("run/fusectl-from-outside"), &number(target)?)
}

/// Mounts fusectl at `control` meanwhile.
pub fn abort_through(control: &Path, number: &str) -> Result<()> {
    std::fs::create_dir_all(control)?;
    rustix::mount::mount("fusectl", control, "fusectl", MountFlags::empty(), None)?;
    let aborted = std::fs::write(control.join(number).join("abort"), "1");
    rustix::mount::unmount(control, UnmountFlags::DETACH)?;
    aborted.context("abort")
}
