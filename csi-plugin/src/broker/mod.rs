//! The mount broker: brings mounts up and down with the agent, and keeps what a successor of the agent will need.
//!
//! It holds a duplicate of every FUSE device and never touches the inside of a mount itself. Calls block; they run on
//! threads of their own.
//!
//! Each part owns its state and knows only parts that stand above it here:
//!
//! | Part | What it owns |
//! |---|---|
//! | `mounts_table` | what is mounted, for whom; the states of a mount |
//! | `targets` | the same on disk, as far as it may be |
//! | `agents` (`slots`, `ends`, `agent_process`, `socket`) | who is connected, and how the latest ended |
//! | `renew::schedule` | when a dead mount is made anew |
//! | `lifecycle` (`notices`) | every change of a mount's state, and what follows from it |
//! | `publish` (`counter`, `messages`, `sight`) | a volume becomes a mount |
//! | `renew` | a dead mount becomes a new one |
//! | `adoption`, `handoff` | an agent takes what another one has left, or hands over |
//! | `hold`, `shutdown` | agent and broker keep the descriptors for each other's successors |
//! | `confine`, `backing` | what the agent may not do itself |
//! | `expiry`, `ended`, `hangs`, `comparison` (`compare`) | threads that look again and again |

mod accept;
mod adoption;
mod agent_process;
mod agents;
mod backing;
pub mod compare;
mod comparison;
mod condition;
mod confine;
mod counter;
mod ended;
mod ends;
pub mod expiry;
pub mod handoff;
mod hangs;
mod hold;
mod lifecycle;
mod messages;
pub mod mounts_table;
mod notices;
mod publish;
pub mod renew;
mod shutdown;
mod sight;
mod slots;
pub mod socket;
mod targets;
#[cfg(test)]
mod tests;

pub(crate) use sight::ALIVE_LIMIT;

use crate::busy::Busy;
use crate::config::NodeConfig;
use crate::events::{Events, Reason, text};
use crate::status::Failure;
use adoption::Adopter;
use agents::{Agents, GOODBYE_LIMIT};
use comparison::Comparer;
use confine::Groups;
use counter::Counter;
use handoff::Handoff;
use hold::Holder;
use lifecycle::Lifecycle;
use link::broker::{AgentAnswer, AgentRequest, BrokerAnswer, BrokerRequest, Hello, Usage};
use link::worker::Mode;
use link::{MountSpec, Refusal, RefusalKind, budget};
use mounts::{Kernel, MountOptions, MountSource, Target};
use mounts_table::{Mount, State, Table};
use notices::Notices;
use publish::Publisher;
use renew::{Remounter, Renewals, Renewer};
use shutdown::Shutdown;
use sight::Looks;
use socket::{AgentIdentity, AgentLink, Handler};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use targets::Targets;
use volume::{Credentials, WireSpec};

const UPLOADS_LIMIT: Duration = budget::UPLOADS_ANSWERED.time;

/// One volume to be mounted at one target.
#[derive(Debug)]
pub struct Order {
    pub spec: MountSpec,
    pub credentials: Credentials,
    /// What its user has chosen. Whether it may be written to says the specification alone: see
    /// [`Self::mount_options`].
    pub options: MountOptions,
}

impl Order {
    /// What marks the mount in the mount table: everything that makes it another one.
    pub fn source(&self) -> MountSource {
        MountSource::new(self.spec.volume.id.as_str(), &self.spec.volume.digest(), self.mount_options())
    }

    /// What it is mounted with, now and whenever it is made anew.
    pub(crate) fn mount_options(&self) -> MountOptions {
        MountOptions { writable: self.spec.access.is_writable(), ..self.options }
    }
}

#[derive(Debug)]
pub struct Broker {
    pub(crate) kernel: Arc<dyn Kernel>,
    pub(crate) table: Arc<Table>,
    pub(crate) config: Arc<NodeConfig>,
    lifecycle: Arc<Lifecycle>,
    /// One at a time for each volume: calls of kubelet and what we do of our own accord.
    pub(crate) busy: Arc<Busy>,
    agents: Arc<Agents>,
    targets: Arc<Targets>,
    renewals: Arc<Renewals>,
    publisher: Arc<Publisher>,
    remounter: Arc<Remounter>,
    renewer: Arc<Renewer>,
    adopter: Arc<Adopter>,
    handoff: Handoff,
    holder: Holder,
    shutdown: Shutdown,
    groups: Arc<Groups>,
    comparer: Arc<Comparer>,
    looks: Looks,
    listener: Arc<OwnedFd>,
}

fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.into()).spawn(work)
}

impl Broker {
    /// Binds the agent's socket and starts the threads that serve it.
    pub fn start(config: NodeConfig, kernel: Arc<dyn Kernel>, events: Events) -> io::Result<Arc<Self>> {
        let counter = Counter::open(&config.state_dir)?;
        let targets = Targets::open(&config.state_dir)?;
        targets.clean_previous_boot(&config.kubelet_dirs, &*kernel);
        let listener = accept::listen(&config)?;
        let broker = Arc::new(Self::compose(config, kernel, events, counter, (targets, listener)));
        let earlier = broker.kernel.table().map_err(io::Error::other)?;
        let earlier = earlier.iter().filter(|e| matches!(e.ours(), Some(mounts::Ours::Fuse(_)))).count();
        if earlier > 0 {
            tracing::info!(
                mounts = earlier,
                "mounts of an earlier broker go on; their agent will hand them over"
            );
        }
        broker.publisher.warn_at_start();
        broker.watch()?;
        Ok(broker)
    }

    fn compose(
        config: NodeConfig,
        kernel: Arc<dyn Kernel>,
        events: Events,
        counter: Counter,
        (targets, listener): (Targets, OwnedFd),
    ) -> Self {
        let config = Arc::new(config);
        let (table, targets, busy) = (Arc::<Table>::default(), Arc::new(targets), Arc::<Busy>::default());
        let (agents, renewals) = (Arc::new(Agents::new(&config)), Arc::<Renewals>::default());
        let lifecycle = Arc::new(Lifecycle {
            kernel: kernel.clone(),
            table: table.clone(),
            agents: agents.clone(),
            renewals: renewals.clone(),
            notices: Notices { events, node_id: config.node_id.clone() },
            stopping: AtomicBool::new(false),
            expiry: OnceLock::new(),
        });
        let publisher = Arc::new(Publisher {
            lifecycle: lifecycle.clone(),
            agents: agents.clone(),
            targets: targets.clone(),
            counter,
            config: config.clone(),
        });
        let remounter = Arc::new(Remounter {
            lifecycle: lifecycle.clone(),
            publisher: publisher.clone(),
            targets: targets.clone(),
        });
        let renewer = Arc::new(Renewer {
            lifecycle: lifecycle.clone(),
            remounter: remounter.clone(),
            renewals: renewals.clone(),
            targets: targets.clone(),
            busy: busy.clone(),
            config: config.clone(),
        });
        let adopter = Arc::new(Adopter {
            lifecycle: lifecycle.clone(),
            agents: agents.clone(),
            limit: config.pace.adopt_limit,
            giving: Mutex::default(),
        });
        let groups = Arc::<Groups>::default();
        let comparer = Arc::new(Comparer {
            lifecycle: lifecycle.clone(),
            agents: agents.clone(),
            adopter: adopter.clone(),
            groups: groups.clone(),
            busy: busy.clone(),
            config: config.clone(),
        });
        let handoff = Handoff {
            lifecycle: lifecycle.clone(),
            agents: agents.clone(),
            adopter: adopter.clone(),
            config: config.clone(),
            alone: Mutex::default(),
        };
        let holder = Holder {
            lifecycle: lifecycle.clone(),
            agents: agents.clone(),
            targets: targets.clone(),
            config: config.clone(),
        };
        let shutdown =
            Shutdown { table: table.clone(), agents: agents.clone(), going: AtomicBool::new(false) };
        Self {
            kernel,
            table,
            config,
            lifecycle,
            busy,
            agents,
            targets,
            renewals,
            publisher,
            remounter,
            renewer,
            adopter,
            handoff,
            holder,
            shutdown,
            groups,
            comparer,
            looks: Looks::default(),
            listener: Arc::new(listener),
        }
    }

    /// Starts the threads. They end when the broker is dropped or stopped; the one that accepts, when it is stopped.
    fn watch(self: &Arc<Self>) -> io::Result<()> {
        let lifecycle = || Arc::downgrade(&self.lifecycle);
        let watched = lifecycle();
        let expiry = spawn("expiry", move || expiry::watch(&watched))?;
        let _ = self.lifecycle.expiry.set(expiry.thread().clone()); // set here only
        let (renewer, renewals) = (Arc::downgrade(&self.renewer), self.renewals.clone());
        spawn("renewals", move || renew::watch(&renewer, &renewals))?;
        let (watched, limit) = (lifecycle(), self.config.agent_hang_limit);
        spawn("agent-watch", move || hangs::watch(&watched, limit))?;
        let comparer = Arc::downgrade(&self.comparer);
        spawn("compare", move || comparison::watch(&comparer))?;
        let watched = lifecycle();
        spawn("ended", move || ended::watch(&watched))?;
        let broker = self.clone();
        spawn("broker", move || {
            let handler: Arc<dyn Handler> = broker.clone();
            accept::accept(&broker.listener, &broker.config, &broker.lifecycle, &handler);
        })?;
        Ok(())
    }

    /// Stops accepting and hangs up. Mounts stay: the agent holds their devices.
    pub fn stop(&self) {
        self.lifecycle.stopping.store(true, Ordering::Release);
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both); // wakes accept
        self.agents.slots.all().iter().for_each(|agent| agent.close());
        self.renewals.end();
        self.lifecycle.wake_expiry();
    }

    pub(crate) fn events(&self) -> &Events {
        &self.lifecycle.notices.events
    }

    /// Has another process ended its connection? Then that is noted first.
    pub(crate) fn note_if_ended(&self, mount: &Mount) -> bool {
        self.lifecycle.note_if_ended(mount)
    }

    pub fn agent(&self) -> Result<Arc<AgentLink>, Failure> {
        self.agents.serving()
    }

    /// Mounts at `target`, where nothing of ours is. After an error nothing is left that was not there before.
    pub fn bring_up(&self, order: Order, target: Target) -> Result<(), Failure> {
        self.publisher.bring_up(order, target)
    }

    /// At `target` is a dead mount of the same volume, or its guard, from which another process has taken the mount. After an
    /// error that is still there; the caller holds the volume's turn.
    pub fn renew(&self, order: Order, target: Target) -> Result<(), Failure> {
        self.remounter.renew(order, target)
    }

    /// Takes one known mount away. If the unmount fails, the next call goes on.
    pub fn take_down(&self, mount: &Mount) -> Result<(), Failure> {
        self.lifecycle.take_down(mount)
    }

    /// A target of this volume shall go: as long as the answer lives nothing is made anew there.
    pub(crate) fn leave(&self, path: &Path, volume: &str) -> renew::Leaving<'_> {
        self.remounter.leave(path, volume)
    }

    /// A republish brought another secret.
    pub fn rotate(&self, mount: &Mount, credentials: Credentials) {
        self.publisher.rotate(mount, credentials);
    }

    /// Does a living agent hold everything of every live mount? Once true this broker must go. Blocks.
    pub fn may_go(&self) -> bool {
        self.shutdown.of_broker()
    }

    /// What was mounted there in this boot, by whichever build.
    pub(crate) fn recorded_spec(&self, target: &Path) -> Option<WireSpec> {
        self.targets.recipe(target).map(|recipe| recipe.spec.volume)
    }

    /// On the guard at `target` nothing is mounted: was there a mount of this volume, which a container may still have?
    pub(crate) fn was_mounted(&self, target: &Path, volume: &str) -> bool {
        let known = self.table.at(target).is_some_and(|mount| mount.volume().as_str() == volume);
        known || self.targets.mounted(target, volume).is_some()
    }

    /// The target is gone: nothing of it needs to be known any more.
    pub(crate) fn forget_target(&self, target: &Target) {
        self.targets.remove(target.path());
        self.renewals.all_told(target.path());
    }

    /// Asks the agent's memory.
    pub fn usage(&self, target: &Target) -> Result<Usage, Failure> {
        let agent = self.agent()?;
        let mount = self.table.at(target.path()).ok_or_else(|| {
            Failure::Unavailable("the node agent has not shown this mount to the restarted plugin yet".into())
        })?;
        if !mount.is_of(agent.identity()) {
            return Err(Failure::Unavailable("the agent that served this mount is gone".into()));
        }
        match agent.ask(AgentRequest::Usage { mount: mount.id }, &[], GOODBYE_LIMIT)? {
            (AgentAnswer::Usage(usage), _) => {
                mount.condition.note_usage(usage.clone());
                Ok(usage)
            }
            _ => Err(Failure::Internal("the node agent answered a usage request with something else".into())),
        }
    }

    /// What is wrong with the mount at this target, if anything was said.
    pub fn trouble(&self, volume: &str, target: &Target) -> Option<String> {
        let known = self.table.at(target.path());
        let said = known.as_ref().and_then(|mount| mount.condition.trouble());
        // What was said of its predecessor is over when one lives.
        let lives = known.is_some_and(|mount| !mount.state().is_over());
        let not_renewed = || self.renewals.told_of(target.path()).filter(|_| !lives);
        said.or_else(|| not_renewed().map(|why| text::not_renewed(volume, &why)))
    }

    /// What is wrong with its source, as the agent says that serves it.
    pub(crate) fn source_trouble(&self, volume: &str, usage: &Usage) -> Option<String> {
        notices::source_trouble(volume, usage, &self.config.node_id)
    }

    /// What was written through the mount at this target gets to its store, within a limit; its owner is told what is left.
    /// Nothing of an unpublish depends on it.
    pub(crate) fn upload_before_end(&self, target: &Path, volume: &str) {
        let Some(mount) = self.table.at(target).filter(|mount| mount.volume().as_str() == volume) else {
            return;
        };
        let is_writable = mount.prepared().is_some_and(|(_, resume)| resume.mode == Mode::Writable);
        if !is_writable || mount.state() != State::Serving {
            return;
        }
        let Ok(agent) = self.agent() else { return };
        if !mount.is_of(agent.identity()) {
            return;
        }
        let limit_ms = budget::UPLOADS.time.as_millis() as u64;
        match agent.ask(AgentRequest::Upload { mount: mount.id, limit_ms }, &[], UPLOADS_LIMIT) {
            Ok((AgentAnswer::Unsent(unsent), _)) if unsent.files > 0 => {
                let message = text::uploads_left(volume, &unsent, &self.config.node_id);
                self.lifecycle.notices.tell_of_uploads(&mount, Reason::UploadsLeft, &message);
            }
            Ok(_) => {}
            // An agent before this version; or one that is on its way to the next, which goes on.
            Err(error) => {
                tracing::info!(mount = %mount.id, volume, %error, "the agent did not say what of it is left to upload");
            }
        }
    }

    /// What its agent last reported of it.
    pub(crate) fn last_usage(&self, target: &Target) -> Usage {
        self.table.at(target.path()).map(|mount| mount.condition.usage()).unwrap_or_default()
    }
}

impl Handler for Broker {
    fn answer(
        &self,
        agent: &AgentIdentity,
        request: BrokerRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<BrokerAnswer, Refusal> {
        let (kernel, lifecycle) = (&*self.kernel, &self.lifecycle);
        match request {
            BrokerRequest::Hello(_) => Err(Refusal::new(RefusalKind::Invalid, "Hello comes first and once")),
            BrokerRequest::BackingOpen { mount } => {
                backing::open(kernel, &*lifecycle.owned(agent, mount)?, fds)
            }
            BrokerRequest::BackingClose { mount, id } => {
                Ok(backing::close(kernel, &*lifecycle.owned(agent, mount)?, id))
            }
            BrokerRequest::Dying { tids } => {
                let tids = tids.into_iter().filter(|tid| kernel.dying(*tid)).collect();
                Ok(BrokerAnswer::Dying { tids })
            }
            BrokerRequest::Waiting { mount } => {
                let mount = lifecycle.owned(agent, mount)?;
                let refused = |why: String| Refusal::new(RefusalKind::Internal, why);
                let control = mount
                    .control()
                    .ok_or_else(|| refused("the control of this connection is not held".into()))?;
                let count = kernel.waiting(&control).map_err(|e| refused(e.to_string()))?;
                Ok(BrokerAnswer::Waiting { count })
            }
            BrokerRequest::Probe { mount } => self.looks.look(kernel, &*lifecycle.owned(agent, mount)?),
            BrokerRequest::Beat => Ok(BrokerAnswer::Done),
            BrokerRequest::Confine { bytes } => self.groups.confine(agent, fds, bytes),
            BrokerRequest::Release { group } => self.groups.release(agent, &group),
            BrokerRequest::Abort { mount, why } => {
                let mount = lifecycle.owned(agent, mount)?;
                lifecycle.end(&mount, &why);
                Ok(BrokerAnswer::Done)
            }
            BrokerRequest::Hold(hold) => self.holder.hold(agent, *hold, fds),
            BrokerRequest::Leaving => self.shutdown.of_agent(agent),
            BrokerRequest::Report { mount, report } => {
                let mount = lifecycle.owned(agent, mount)?;
                lifecycle.report(&mount, report);
                Ok(BrokerAnswer::Done)
            }
        }
    }

    fn connected(&self, agent: &Arc<AgentLink>) {
        self.groups.note_all_of(agent.identity());
        if !agent.hello().drained {
            self.lifecycle.welcome_back(agent);
        }
    }

    fn succeed(&self, agent: &Arc<AgentLink>) {
        match agent.hello() {
            Hello { successor: true, .. } => self.handoff.run(agent),
            Hello { drained: true, .. } => return,
            _ => self.adopter.give_all(agent),
        }
        self.renewals.wake_for_all();
    }

    fn lost(&self, link: &AgentLink) {
        let agent = link.identity();
        self.groups.leave_all_of(agent);
        // A mount that is being prepared fails with its publish; one that it is given, with that.
        self.lifecycle.orphan_all_of(agent, "the node agent is gone");
        // It may be back already, and have been welcomed before we noted that it was gone.
        if let Some(back) = self.agents.slots.current().filter(|current| current.identity() == agent) {
            self.lifecycle.welcome_back(&back);
        }
        // What it has left here is for the agent that is there already.
        if link.hello().drained
            && let Some(current) = self.agents.slots.current()
        {
            self.adopter.give_all(&current);
        }
    }
}
