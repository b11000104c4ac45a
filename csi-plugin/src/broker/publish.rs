//! A volume becomes a mount: its directory, the FUSE connection, the agent that serves it, and a look through it.

use super::Order;
use super::agents::Agents;
use super::counter::Counter;
use super::lifecycle::Lifecycle;
use super::messages;
use super::mounts_table::{Mount, Parts, State};
use super::sight::{PROBE_LIMIT, primes};
use super::socket::{AgentLink, AskError};
use super::targets::{Recipe, Targets};
use crate::config::NodeConfig;
use crate::events::{Reason, text};
use crate::status::Failure;
use link::RefusalKind;
use link::broker::{AgentAnswer, AgentRequest, MountId, Publish, Secrets};
use link::budget;
use link::worker::Mode;
use mounts::{Connection, Control, Kernel, KernelError, Target, probe};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use volume::{Credentials, RequestTimeout};

const INIT_LIMIT: Duration = budget::KERNEL_INIT.time;
const START_LIMIT: Duration = budget::START.time;
/// The agent answers a publish within its own source wait; this is for the way there and back.
const GRACE: Duration = Duration::from_secs(2);
/// An agent asks for a few MiB. The kernel reads ahead into memory of the node whatever it is told.
const READ_AHEAD_KB_MAX: u32 = 64 << 10;
/// A republish answers within 2 s, whatever the source does with a new key. The agent goes on trying.
const ROTATE_LIMIT: Duration = Duration::from_secs(1);
/// Device, control and the connection's shared memory.
const DESCRIPTORS_OF_A_MOUNT: u64 = 3;
/// Kept for the mounts that are there.
const SPARE_DESCRIPTORS: u64 = 128;
const REQUEST_TIMEOUT: &str = "the kernel ends a connection in which a request takes longer than fs.fuse.max_request_timeout (or default_request_timeout): healTimeout and storeTimeout are cut to less than half of it; set both to 0";

#[derive(Debug)]
pub(super) struct Publisher {
    pub(super) lifecycle: Arc<Lifecycle>,
    pub(super) agents: Arc<Agents>,
    pub(super) targets: Arc<Targets>,
    pub(super) counter: Counter,
    pub(super) config: Arc<NodeConfig>,
}

/// Of the connections that are made now.
pub(super) fn request_timeout(kernel: &dyn Kernel) -> Option<RequestTimeout> {
    RequestTimeout::of_sysctl(|name| kernel.fuse_sysctl(name))
}

/// What its connection can be ended with, whatever becomes of its number; an error if the mount that was found is
/// another connection's. Before another process hears of the mount.
pub(super) fn control(
    kernel: &dyn Kernel,
    connection: Connection,
    device: &OwnedFd,
) -> Result<Option<Control>, KernelError> {
    match kernel.control(connection, device.as_fd()) {
        Ok(control) => Ok(Some(control)),
        Err(KernelError::Ended) => Ok(None),
        Err(KernelError::OtherConnection) => Err(KernelError::OtherConnection),
        Err(error) => {
            let connection = format!("{}:{}", connection.major, connection.minor);
            tracing::warn!(connection, %error, "a connection can be ended only where it is mounted, and its waiting requests are not counted");
            Ok(None)
        }
    }
}

/// The mounts that are there need descriptors for what comes: an agent that shows them, a look through each. Those that
/// are being prepared are counted whole: all that come at once would find room for one.
fn has_room(
    startup::Descriptors { used, most }: startup::Descriptors,
    preparing: usize,
) -> Result<(), Failure> {
    if used.saturating_add(DESCRIPTORS_OF_A_MOUNT * preparing as u64 + SPARE_DESCRIPTORS) <= most {
        return Ok(());
    }
    Err(Failure::Unavailable(format!(
        "csi-plugin has {used} of {most} descriptors in use on this node: raise its limit (LimitNOFILE of the container runtime), or place fewer pods with volumes on this node"
    )))
}

impl Publisher {
    /// Mounts at `target`, where nothing of ours is. After an error nothing is left that was not there before.
    pub(super) fn bring_up(&self, order: Order, target: Target) -> Result<(), Failure> {
        let agent = self.agents.publishing()?;
        let target = Arc::new(target);
        self.targets.add(target.path(), Recipe::of(&order));
        let made_directory = target.ensure_directory()?;
        self.mount(&agent, order, &target).inspect_err(|_| {
            if made_directory && let Err(error) = target.remove() {
                let target_path = target.path().display();
                tracing::warn!(%target_path, %error, "the directory of a failed mount stays");
            }
            self.targets.remove(target.path());
        })
    }

    fn mount(&self, agent: &AgentLink, order: Order, target: &Arc<Target>) -> Result<(), Failure> {
        let kernel = &self.lifecycle.kernel;
        let device = kernel.open_device()?;
        let descriptors = startup::descriptors();
        let descriptors =
            descriptors.map_err(|e| Failure::Internal(format!("descriptors are not counted: {e}")))?;
        let preparing = |mount: &Arc<Mount>| mount.state() == State::Preparing;
        has_room(descriptors, self.lifecycle.table.all().iter().filter(|mount| preparing(mount)).count())?;
        let id = self.next_id()?;
        let connection = kernel.mount(target, device.as_fd(), &order.source(), order.mount_options())?;
        self.targets.set_mounted(target.path(), &order.spec.volume.id, connection);
        let mount = self.enlist(id, agent, order, target, device, connection);
        failpoint::hit("broker.mounted");
        let served = self.serve(agent, &mount).and_then(|mode| self.look_into(&mount, mode));
        if served.is_ok() {
            self.warn_of_request_timeout(&mount);
        }
        served.inspect_err(|_| {
            if let Err(error) = self.lifecycle.take_down(&mount) {
                tracing::error!(mount = %mount.id, %error, "a failed mount could not be taken down");
            }
        })
    }

    pub(super) fn next_id(&self) -> Result<MountId, Failure> {
        self.counter.next().map_err(|e| {
            Failure::Internal(format!("no mount id from {}: {e}", self.config.state_dir.display()))
        })
    }

    pub(super) fn enlist(
        &self,
        id: MountId,
        agent: &AgentLink,
        order: Order,
        target: &Arc<Target>,
        device: OwnedFd,
        connection: Connection,
    ) -> Arc<Mount> {
        let kernel = &*self.lifecycle.kernel;
        let control = control(kernel, connection, &device).unwrap_or_default();
        self.lifecycle.table.insert(Mount::new(Parts {
            id,
            target: target.clone(),
            connection,
            source: order.source(),
            spec: order.spec,
            credentials: order.credentials,
            agent: agent.identity().clone(),
            device,
            control,
            limit: request_timeout(kernel),
        }))
    }

    pub(super) fn warn_at_start(&self) {
        if let Some(limit) = request_timeout(&*self.lifecycle.kernel) {
            tracing::warn!(limit = ?limit.limit(), "{REQUEST_TIMEOUT}");
        }
    }

    /// An administrator's limit that is shorter than what a volume may wait: its waits are shortened, and its owner
    /// knows.
    fn warn_of_request_timeout(&self, mount: &Mount) {
        let shortens = |limit: &RequestTimeout| {
            mount.spec.volume.understand().is_ok_and(|spec| limit.shortens(&spec.parameters))
        };
        let Some(limit) = request_timeout(&*self.lifecycle.kernel).filter(shortens) else {
            return;
        };
        let (volume, node) = (mount.volume(), &self.config.node_id);
        tracing::warn!(mount = %mount.id, %volume, limit = ?limit.limit(), "{REQUEST_TIMEOUT}");
        let message = text::request_timeout(volume, limit, node);
        self.lifecycle.notices.events.note(&mount.spec.subjects, Reason::Degraded, &message);
    }

    /// Device to agent, INIT back and forth, go.
    pub(super) fn serve(&self, agent: &AgentLink, mount: &Mount) -> Result<Mode, Failure> {
        let kernel = &self.lifecycle.kernel;
        let gone = || Failure::Unavailable("the mount was ended while it was set up".into());
        let device = mount.device().ok_or_else(gone)?;
        let init = kernel.read_init(device.as_fd(), INIT_LIMIT)?;
        let publish = AgentRequest::Publish(Box::new(Publish { init, ..messages::publish(mount) }));
        let wait = self.config.agent_source_wait + GRACE;
        // An unpublish does not wait for the volume's source.
        let wanted = || !mount.state().is_over();
        let (answer, fds) = agent.ask_while(wanted, publish, &[device.as_fd()], wait).map_err(|e| match e {
            AskError::TimedOut(_) => Failure::Unavailable(format!(
                "source {} was not ready within {:?}: check endpoint and network; the publish will be repeated",
                mount.spec.volume.source, self.config.agent_source_wait
            )),
            other => other.into(),
        })?;
        let odd = || Failure::Internal("the node agent answered a publish with something else".into());
        let AgentAnswer::Prepared { init_reply, read_ahead_kb, resume } = answer else { return Err(odd()) };
        let [inflight] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| odd())?;
        let mode = resume.mode;
        mount.keep_prepared(inflight, resume);
        failpoint::hit("broker.volume-prepared");
        kernel.write_init_reply(device.as_fd(), &init_reply)?;
        // The kernel sets its own readahead while it takes the INIT reply: ours comes after.
        if let Err(error) = kernel.set_read_ahead_kb(mount.connection, read_ahead_kb.min(READ_AHEAD_KB_MAX)) {
            tracing::warn!(mount = %mount.id, %error, "readahead stays at the kernel's default");
        }
        failpoint::hit("broker.init-answered");
        agent.ask(AgentRequest::Start { mount: mount.id }, &[], START_LIMIT)?;
        failpoint::hit("broker.started");
        if !mount.enter(State::Serving, "the agent serves it") {
            return Err(gone());
        }
        // The agent may have gone between its answer and our note of it; `lost` looked before.
        if self.agents.slots.current().is_none_or(|a| !mount.is_of(a.identity())) {
            return Err(AskError::Gone.into());
        }
        Ok(mode)
    }

    /// Success is what can be seen through the mount.
    pub(super) fn look_into(&self, mount: &Mount, mode: Mode) -> Result<(), Failure> {
        match self.lifecycle.kernel.probe(&mount.target, primes(mode), PROBE_LIMIT)? {
            probe::Outcome::Primed | probe::Outcome::Serving => Ok(()),
            probe::Outcome::Dead => Err(Failure::Unavailable("the mount's connection ended at once".into())),
        }
    }

    /// A republish brought another secret. The mount goes on with the old one until the new one is known to work.
    pub(super) fn rotate(&self, mount: &Mount, credentials: Credentials) {
        // No secret any more is no reason to take away the one that works.
        if credentials.is_empty() || credentials == mount.credentials() {
            return;
        }
        let Some(agent) = self.agents.slots.current().filter(|a| mount.is_of(a.identity())) else { return };
        let ask = AgentRequest::Rotate { mount: mount.id, secrets: Secrets(credentials.to_secrets()) };
        match agent.ask(ask, &[], ROTATE_LIMIT) {
            Ok(_) => {
                tracing::info!(mount = %mount.id, volume = %mount.volume(), "the changed secret is in use");
                mount.rotated(credentials);
                self.targets.add(mount.target.path(), Recipe::of(&mount.order()));
            }
            Err(AskError::Refused(refusal)) if refusal.kind != RefusalKind::Unavailable => {
                tracing::warn!(mount = %mount.id, volume = %mount.volume(), why = %refusal, "a changed secret is not used");
                let message = text::secret_refused(mount.volume(), &refusal.message);
                self.lifecycle.notices.events.note(&mount.spec.subjects, Reason::Degraded, &message);
            }
            // Not known yet: the next republish asks again.
            Err(error) => {
                tracing::info!(mount = %mount.id, volume = %mount.volume(), %error, "a changed secret is being tried");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_descriptors_are_kept_for_the_mounts_that_are_there() {
        let with = |used, preparing, most| has_room(startup::Descriptors { used, most }, preparing);
        assert!(with(100, 265, 1024).is_ok() && with(100, 266, 1024).is_err(), "those that come at once");
        let has_room = |used, most| with(used, 0, most);
        assert!(has_room(1024 - SPARE_DESCRIPTORS, 1024).is_ok());
        let failure = has_room(1024 - SPARE_DESCRIPTORS + 1, 1024).unwrap_err();
        assert!(matches!(&failure, Failure::Unavailable(why) if why.contains("of 1024 descriptors")));
        assert!(has_room(u64::MAX, u64::MAX).is_ok());
    }
}
