//! The agents' socket: made, and listened to.

use super::lifecycle::Lifecycle;
use super::socket::{self, Handler};
use crate::config::NodeConfig;
use link::Packet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// Connections that are being greeted; more are refused.
const CONNECTIONS_MAX: usize = 8;

/// A stale socket file of an earlier broker is replaced.
pub(super) fn listen(config: &NodeConfig) -> io::Result<OwnedFd> {
    let path = &config.broker_socket;
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let listener = Packet::listen(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    if config.agent_uid != 0 {
        std::os::unix::fs::chown(path, Some(config.agent_uid), None)?;
    }
    Ok(listener)
}

/// Serves agents until the broker stops, each on a thread of its own.
pub(super) fn accept(
    listener: &OwnedFd,
    config: &NodeConfig,
    lifecycle: &Lifecycle,
    handler: &Arc<dyn Handler>,
) {
    let connections = Arc::new(AtomicUsize::new(0));
    loop {
        let packet = match Packet::accept(listener.as_fd()) {
            Ok(packet) => packet,
            Err(_) if lifecycle.stopped() => return,
            Err(error) => {
                tracing::warn!(%error, "accepting the node agent failed");
                thread::sleep(Duration::from_millis(100)); // out of descriptors, say: do not spin
                continue;
            }
        };
        if lifecycle.stopped() {
            return;
        }
        if connections.fetch_add(1, Ordering::AcqRel) >= CONNECTIONS_MAX {
            connections.fetch_sub(1, Ordering::AcqRel);
            tracing::warn!("too many connections to the broker at once: one was refused");
            continue;
        }
        let (uid, agents) = (config.agent_uid, lifecycle.agents.clone());
        let (handler, count) = (handler.clone(), connections.clone());
        let spawned = thread::Builder::new().name("agent".into()).spawn(move || {
            socket::serve(packet, uid, &agents.slots, &handler);
            count.fetch_sub(1, Ordering::AcqRel);
        });
        if let Err(error) = spawned {
            connections.fetch_sub(1, Ordering::AcqRel);
            tracing::error!(%error, "no thread for the node agent's connection");
        }
    }
}
