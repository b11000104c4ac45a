//! An agent shows its mounts to a broker that may be new, and is relieved of those that are no more.

use super::agents::Agents;
use super::lifecycle::Lifecycle;
use super::mounts_table::{Mount, Parts, State};
use super::publish::{control, request_timeout};
use super::sight::ALIVE_LIMIT;
use super::socket::AgentIdentity;
use super::targets::{Recipe, Targets};
use crate::config::NodeConfig;
use link::broker::{BrokerAnswer, Hold, MountId, Publish};
use link::{MountSpec, Refusal, RefusalKind};
use mounts::{Connection, MountSource, Ours, Target, probe};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use volume::{Credentials, WireSpec};

/// Takes what agents show.
#[derive(Debug)]
pub(super) struct Holder {
    pub(super) lifecycle: Arc<Lifecycle>,
    pub(super) agents: Arc<Agents>,
    pub(super) targets: Arc<Targets>,
    pub(super) config: Arc<NodeConfig>,
}

impl Holder {
    /// A mount of an earlier broker, shown by the agent that serves it.
    pub(super) fn hold(
        &self,
        agent: &AgentIdentity,
        hold: Hold,
        fds: Vec<OwnedFd>,
    ) -> Result<BrokerAnswer, Refusal> {
        let Hold { publish, resume, backing } = hold;
        let id = publish.mount;
        if let Some(known) = self.lifecycle.table.get(id) {
            return self.hold_known(agent, &known);
        }
        if self.lifecycle.table.was_removed(id) {
            return Err(self.relieve_of_ended(agent, id));
        }
        let invalid = |e: &dyn std::fmt::Display| Refusal::new(RefusalKind::Invalid, e.to_string());
        let [device, inflight] = <[OwnedFd; 2]>::try_from(fds)
            .map_err(|_| invalid(&"Hold takes the device and the shared memory"))?;
        let credentials = Credentials::from_secrets(&publish.secrets).map_err(|e| invalid(&e))?;
        failpoint::hit("broker.hold");
        let path = Path::new(&publish.spec.target);
        let target = Target::resolve(&self.config.kubelet_dirs, path).map_err(|e| invalid(&e))?;
        if self.lifecycle.kernel.has_ended(device.as_fd()) {
            self.hold_dead(agent, publish, credentials, device, target);
            return Err(self.relieve_of_ended(agent, id));
        }
        let (connection, source) = self.mounted(&target, &publish.spec).inspect_err(|why| {
            // Containers may still have it, so it stays theirs; no other agent can adopt it.
            tracing::warn!(mount = %id, %why, "an agent serves a mount that another process has taken from its target");
        })?;
        // The mount at its target may be a later one of the same volume, and this one somewhere else.
        let taken = self
            .lifecycle
            .table
            .all()
            .iter()
            .any(|other| other.connection == connection && other.device().is_some());
        let control = match control(&*self.lifecycle.kernel, connection, &device) {
            Ok(control) if !taken => control,
            _ => {
                let text =
                    format!("at the target of volume {} is another mount of it", publish.spec.volume.id);
                return Err(Refusal::new(RefusalKind::NotFound, text));
            }
        };
        let held = parts(publish, target, (connection, source), credentials, agent, device);
        let mount = Mount::new(Parts { control, limit: request_timeout(&*self.lifecycle.kernel), ..held });
        mount.keep_prepared(inflight, resume);
        failpoint::hit("broker.prepared");
        backing.into_iter().for_each(|id| mount.record_backing(id));
        // Before it is in the table: there, a publish takes one that no thread prepares for a failed one, and ends it.
        mount.enter(State::Serving, "mounted by an earlier broker, held by its agent");
        let mount = self.lifecycle.table.insert(mount);
        failpoint::hit("broker.noted");
        // It ended between our look and our note. From our note on an unpublish finds it in the table, and
        // the watcher of ended connections finds it, too.
        let ended = || mount.device().is_none_or(|device| self.lifecycle.kernel.has_ended(device.as_fd()));
        if mount.state().is_over() || ended() {
            self.hold_ended(&mount);
            return Err(self.relieve_of_ended(agent, id));
        }
        // The thread that noted the agent's end may have done so before our note.
        if !self.agents.slots.has(agent) {
            self.lifecycle.orphan(&mount, agent, "the node agent is gone");
            self.lifecycle.wake_expiry();
        }
        self.targets.add(mount.target.path(), Recipe::of(&mount.order()));
        self.targets.set_mounted(mount.target.path(), mount.volume(), mount.connection);
        mount.set_replaces(self.targets.dead(mount.target.path()));
        if !mount.replaces().is_empty() {
            self.lifecycle.renewals.wake_for(mount.target.path());
        }
        failpoint::hit("broker.held");
        Ok(BrokerAnswer::Done)
    }

    /// Its connection has ended while there was no broker. What is known of it now (its secret is on no disk)
    /// is what it is made anew from.
    fn hold_dead(
        &self,
        agent: &AgentIdentity,
        publish: Publish,
        credentials: Credentials,
        device: OwnedFd,
        target: Target,
    ) {
        let Ok((connection, source)) = self.mounted(&target, &publish.spec) else { return };
        // A dead mount says so at once. One that lives is another one, in its place.
        let dead = self.lifecycle.kernel.probe(&target, probe::What::Alive, ALIVE_LIMIT);
        if self.lifecycle.table.at(target.path()).is_some() || !matches!(dead, Ok(probe::Outcome::Dead)) {
            return;
        }
        let held = parts(publish, target, (connection, source), credentials, agent, device);
        let mount = Mount::new(held);
        mount.end_of_others("another process has ended its connection while there was no broker", |_| true);
        mount.release();
        let mount = self.lifecycle.table.insert(mount);
        self.targets.add(mount.target.path(), Recipe::of(&mount.order()));
        self.lifecycle.tell_of_ends(&[mount]);
    }

    /// It ended while its agent showed it. As long as something of it is at its target kubelet has not unpublished it,
    /// and what is known of it now is what it is made anew from.
    pub(super) fn hold_ended(&self, mount: &Mount) {
        let path = mount.target.path();
        let is_there = self.lifecycle.kernel.stack(&mount.target).is_ok_and(|stack| match stack.last() {
            Some(top) if top.connection() == mount.connection => true,
            Some(top) => top.ours() == Some(Ours::Guard { volume: mount.volume().as_str().to_owned() }),
            None => false,
        });
        if is_there {
            self.targets.add(path, Recipe::of(&mount.order()));
            self.lifecycle.note_if_ended(mount);
        }
        if !is_there || mount.state() == State::Unpublished {
            mount.enter(State::Unpublished, "it was unpublished while its agent showed it");
            mount.release();
            self.lifecycle.table.remove(mount.id);
        }
    }

    fn hold_known(&self, agent: &AgentIdentity, known: &Mount) -> Result<BrokerAnswer, Refusal> {
        let id = known.id;
        if !known.is_of(agent) {
            return Err(Refusal::new(RefusalKind::Conflict, format!("mount {id} is another agent's")));
        }
        if known.state().is_over() {
            return Err(self.relieve_of_ended(agent, id));
        }
        let serves = self.agents.slots.current().is_some_and(|current| current.identity() == agent);
        if serves && !self.agents.is_switching() {
            self.lifecycle.enter_if(
                known,
                State::Serving,
                "its agent shows that it serves it",
                |state, of| matches!(state, State::Orphaned(_)) && of == agent,
            );
        }
        Ok(BrokerAnswer::Done)
    }

    /// A mount that came to nothing (its broker died while it made it), was unpublished, or taken away by another
    /// process: what is at its target now is another one.
    fn relieve_of_ended(&self, agent: &AgentIdentity, id: MountId) -> Refusal {
        if let Some(link) = self.agents.slots.current().filter(|link| link.identity() == agent) {
            tracing::info!(mount = %id, "an agent shows a mount that has ended, and is asked to let go of it");
            link.relieve(id, "its connection has ended");
        }
        Refusal::new(RefusalKind::NotFound, format!("the connection of mount {id} has ended"))
    }

    /// The mount table knows the mount's options; the agent does not. It knows whether applications may write to it, and
    /// is not believed if the table says otherwise: what it shows now is what the mount will be made anew from.
    fn mounted(&self, target: &Target, spec: &MountSpec) -> Result<(Connection, MountSource), Refusal> {
        let volume = &spec.volume;
        let stack = self.lifecycle.kernel.stack(target);
        let stack = stack.map_err(|e| Refusal::new(RefusalKind::Internal, e.to_string()))?;
        let absent = || {
            let text = format!("volume {} is not mounted at {}", volume.id, target.path().display());
            Refusal::new(RefusalKind::NotFound, text)
        };
        let top = stack.last().ok_or_else(absent)?;
        match top.ours() {
            // Mounted by a build whose digests cannot be compared with ours: the volume decides.
            Some(Ours::Fuse(source)) if source.may_be_of(volume.id.as_str(), &volume.digest()) => {
                match source.options().writable == spec.access.is_writable() {
                    true => Ok((top.connection(), source)),
                    false => Err(other_access(volume, target)),
                }
            }
            _ => Err(absent()),
        }
    }
}

fn other_access(volume: &WireSpec, target: &Target) -> Refusal {
    let text = format!(
        "volume {} is mounted at {} with another access than its agent says",
        volume.id,
        target.path().display()
    );
    Refusal::new(RefusalKind::NotFound, text)
}

/// A mount as the agent that serves it shows it, without what only a living connection has.
fn parts(
    publish: Publish,
    target: Target,
    (connection, source): (Connection, MountSource),
    credentials: Credentials,
    agent: &AgentIdentity,
    device: OwnedFd,
) -> Parts {
    Parts {
        id: publish.mount,
        target: Arc::new(target),
        connection,
        source,
        spec: publish.spec,
        credentials,
        agent: agent.clone(),
        device,
        control: None,
        limit: None,
    }
}
