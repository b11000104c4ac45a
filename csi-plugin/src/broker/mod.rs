//! The mount broker: brings mounts up and down with the agent, and keeps what a successor of the agent will need.
//!
//! It holds a duplicate of every FUSE device and never touches the inside of a mount itself. Calls block; they run on
//! threads of their own.

mod accept;
mod backing;
pub mod compare;
mod condition;
mod confine;
mod counter;
mod ended;
mod ends;
pub mod expiry;
mod handover;
mod hangs;
mod hold;
pub mod mounts_table;
mod notices;
mod renew;
mod sight;
mod slots;
pub mod socket;
mod succession;
mod takedown;
mod targets;

use crate::busy::Busy;
use crate::config::NodeConfig;
use crate::events::{Events, Reason, Subjects, text};
use crate::status::Failure;
use counter::Counter;
use ends::Ends;
use link::broker::{AgentAnswer, AgentRequest, BrokerAnswer, BrokerRequest, Hello, MountId, Publish};
use link::worker::Mode;
use link::{Refusal, RefusalKind, failpoint};
use mounts::{Connection, Control, Kernel, KernelError, MountOptions, MountSource, Target, probe};
use mounts_table::{Mount, Parts, State, Table};
use renew::Renewals;
use slots::AgentSlots;
use socket::{AgentIdentity, AgentLink, AskError, Handler};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;
use targets::{Recipe, Targets};
use volume::{Credentials, RequestTimeout, WireSpec};

const INIT_LIMIT: Duration = Duration::from_secs(2);
const START_LIMIT: Duration = Duration::from_secs(5);
/// The agent answers a publish within its own source wait; this is for the way there and back.
const GRACE: Duration = Duration::from_secs(2);
/// Unpublish must not wait longer for an agent that hangs: the abort frees everything it holds.
const GOODBYE_LIMIT: Duration = Duration::from_secs(1);
const PROBE_LIMIT: Duration = Duration::from_secs(10);
/// A mount that lives or is dead says so at once; one that does not answer is not dead.
pub(crate) const ALIVE_LIMIT: Duration = Duration::from_secs(1);
const REQUEST_TIMEOUT: &str = "the kernel ends a connection in which a request takes longer than fs.fuse.max_request_timeout (or default_request_timeout): healTimeout and storeTimeout are cut to less than half of it; set both to 0";

/// One volume to be mounted at one target.
#[derive(Debug)]
pub struct Order {
    /// Passed on as it is: what a later version has put there is the agent's to understand.
    pub spec: WireSpec,
    pub credentials: Credentials,
    /// May the agent use its own credentials where there are none?
    pub environment: bool,
    pub options: MountOptions,
    pub subjects: Subjects,
}

impl Order {
    /// What marks the mount in the mount table: everything that makes it another one.
    pub fn source(&self) -> MountSource {
        MountSource::new(self.spec.id.as_str(), &self.spec.digest(), self.options)
    }
}

#[derive(Debug)]
pub struct Broker {
    pub(crate) kernel: Arc<dyn Kernel>,
    pub(crate) table: Table,
    pub(crate) config: NodeConfig,
    pub(crate) events: Events,
    /// One at a time for each volume: calls of kubelet and what we do of our own accord.
    pub(crate) busy: Arc<Busy>,
    renewals: Arc<Renewals>,
    agents: AgentSlots,
    /// How the latest agents came to their ends.
    ends: Ends,
    counter: Counter,
    targets: Targets,
    listener: OwnedFd,
    connections: AtomicUsize,
    /// Mounts that are being looked through.
    looks: AtomicUsize,
    groups: confine::Groups,
    stopping: AtomicBool,
    /// An agent holds every mount for our successor: nothing is kept for an agent any more.
    going: AtomicBool,
    /// One agent takes over from another: a publish would be neither's.
    switching: AtomicBool,
    /// Held while mounts are given to an agent: two who do that would give it one mount twice.
    giving: Mutex<()>,
    /// One hand-over at a time, from the first question to the last word.
    succeeding: Mutex<()>,
    watcher: OnceLock<thread::Thread>,
}

impl Broker {
    /// Binds the agent's socket and starts the threads that serve it.
    pub fn start(config: NodeConfig, kernel: Arc<dyn Kernel>, events: Events) -> io::Result<Arc<Self>> {
        let counter = Counter::open(&config.state_dir)?;
        let targets = Targets::open(&config.state_dir)?;
        targets.clean_previous_boot(&config.kubelet_dirs, &*kernel);
        let listener = accept::listen(&config)?;
        let broker = Arc::new(Self {
            kernel,
            table: Table::default(),
            config,
            events,
            busy: Arc::default(),
            renewals: Arc::default(),
            agents: AgentSlots::default(),
            ends: Ends::default(),
            counter,
            targets,
            listener,
            connections: AtomicUsize::new(0),
            looks: AtomicUsize::new(0),
            groups: confine::Groups::default(),
            stopping: AtomicBool::new(false),
            going: AtomicBool::new(false),
            switching: AtomicBool::new(false),
            giving: Mutex::default(),
            succeeding: Mutex::default(),
            watcher: OnceLock::new(),
        });
        let earlier = broker.kernel.table().map_err(io::Error::other)?;
        let earlier = earlier.iter().filter(|e| matches!(e.ours(), Some(mounts::Ours::Fuse(_)))).count();
        if earlier > 0 {
            tracing::info!(
                mounts = earlier,
                "mounts of an earlier broker go on; their agent will hand them over"
            );
        }
        if let Some(limit) = broker.request_timeout() {
            tracing::warn!(limit = ?limit.limit(), "{REQUEST_TIMEOUT}");
        }
        let watch = Arc::downgrade(&broker);
        let watcher = thread::Builder::new().name("expiry".into()).spawn(move || expiry::watch(watch))?;
        let _ = broker.watcher.set(watcher.thread().clone()); // set here only
        let (weak, renewals) = (Arc::downgrade(&broker), broker.renewals.clone());
        thread::Builder::new().name("renewals".into()).spawn(move || renew::watch(&weak, &renewals))?;
        let watch = Arc::downgrade(&broker);
        thread::Builder::new().name("agent-watch".into()).spawn(move || hangs::watch(&watch))?;
        let watch = Arc::downgrade(&broker);
        thread::Builder::new().name("compare".into()).spawn(move || compare::watch(&watch))?;
        let watch = Arc::downgrade(&broker);
        thread::Builder::new().name("ended".into()).spawn(move || ended::watch(&watch))?;
        let accepting = broker.clone();
        thread::Builder::new().name("broker".into()).spawn(move || accept::accept(&accepting))?;
        Ok(broker)
    }

    /// Stops accepting and hangs up. Mounts stay: the agent holds their devices.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both); // wakes accept
        self.agents.all().iter().for_each(|agent| agent.close());
        self.renewals.end();
        self.wake_watcher();
    }

    fn stopped(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn wake_watcher(&self) {
        if let Some(watcher) = self.watcher.get() {
            watcher.unpark();
        }
    }

    pub fn agent(&self) -> Result<Arc<AgentLink>, Failure> {
        self.agents.current().ok_or_else(|| {
            Failure::Unavailable(format!(
                "the node agent is not running (no connection on {}): check the agent DaemonSet on node {}",
                self.config.broker_socket.display(),
                self.config.node_id
            ))
        })
    }

    /// The agent that a volume may be given to now.
    fn publishing_agent(&self) -> Result<Arc<AgentLink>, Failure> {
        match self.switching.load(Ordering::SeqCst) {
            false => self.agent(),
            true => Err(Failure::Unavailable(
                "a node agent is taking over from another one: the publish will be repeated".into(),
            )),
        }
    }

    /// Mounts at `target`, where nothing of ours is. After an error nothing is left that was not there before.
    pub fn bring_up(&self, order: Order, target: Target) -> Result<(), Failure> {
        let agent = self.publishing_agent()?;
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

    /// What was mounted there in this boot, by whichever build.
    pub fn recorded_spec(&self, target: &std::path::Path) -> Option<WireSpec> {
        self.targets.recipe(target).map(|recipe| recipe.spec)
    }

    /// On the guard at `target` nothing is mounted: was there a mount of this volume, which a container may still have?
    pub fn was_mounted(&self, target: &std::path::Path, volume: &str) -> bool {
        let known = self.table.at(target).is_some_and(|mount| mount.spec.id.as_str() == volume);
        known || self.targets.mounted(target, volume).is_some()
    }

    /// The target is gone: nothing of it needs to be known any more.
    pub fn forget_target(&self, target: &Target) {
        self.targets.remove(target.path());
        self.renewals.all_told(target.path());
    }

    fn mount(&self, agent: &AgentLink, order: Order, target: &Arc<Target>) -> Result<(), Failure> {
        let device = self.kernel.open_device()?;
        let id = self.next_id()?;
        let connection = self.kernel.mount(target, device.as_fd(), &order.source(), order.options)?;
        self.targets.set_mounted(target.path(), &order.spec.id, connection);
        let mount = self.enlist(id, agent, order, target, device, connection);
        failpoint::hit("broker.mounted");
        let served = self.serve(agent, &mount).and_then(|mode| self.look_into(&mount, mode));
        if served.is_ok() {
            self.warn_of_request_timeout(&mount);
        }
        served.inspect_err(|_| {
            if let Err(error) = self.take_down(&mount) {
                tracing::error!(mount = %mount.id, %error, "a failed mount could not be taken down");
            }
        })
    }

    fn next_id(&self) -> Result<MountId, Failure> {
        self.counter.next().map_err(|e| {
            Failure::Internal(format!("no mount id from {}: {e}", self.config.state_dir.display()))
        })
    }

    fn enlist(
        &self,
        id: MountId,
        agent: &AgentLink,
        order: Order,
        target: &Arc<Target>,
        device: OwnedFd,
        connection: Connection,
    ) -> Arc<Mount> {
        let control = self.control(connection, &device).unwrap_or_default();
        self.table.insert(Mount::new(Parts {
            id,
            target: target.clone(),
            connection,
            source: order.source(),
            spec: order.spec,
            credentials: order.credentials,
            subjects: order.subjects,
            environment: order.environment,
            agent: agent.identity().clone(),
            device,
            control,
            limit: self.request_timeout(),
        }))
    }

    /// Of the connections that are made now.
    fn request_timeout(&self) -> Option<RequestTimeout> {
        RequestTimeout::of_sysctl(|name| self.kernel.fuse_sysctl(name))
    }

    /// An administrator's limit that is shorter than what a volume may wait: its waits are shortened, and its owner knows.
    fn warn_of_request_timeout(&self, mount: &Mount) {
        let shortens = |limit: &RequestTimeout| {
            mount.spec.understand().is_ok_and(|spec| limit.shortens(&spec.parameters))
        };
        let Some(limit) = self.request_timeout().filter(shortens) else {
            return;
        };
        let (volume, node) = (&mount.spec.id, &self.config.node_id);
        tracing::warn!(mount = %mount.id, %volume, limit = ?limit.limit(), "{REQUEST_TIMEOUT}");
        let message = text::request_timeout(volume, limit, node);
        self.events.note(&mount.subjects, Reason::Degraded, &message);
    }

    /// What its connection can be ended with, whatever becomes of its number; an error if the mount that was found is
    /// another connection's. Before anybody else hears of the mount.
    fn control(&self, connection: Connection, device: &OwnedFd) -> Result<Option<Control>, KernelError> {
        match self.kernel.control(connection, device.as_fd()) {
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

    /// Device to agent, INIT back and forth, go.
    fn serve(&self, agent: &AgentLink, mount: &Mount) -> Result<Mode, Failure> {
        let gone = || Failure::Unavailable("the mount was ended while it was set up".into());
        let device = mount.device().ok_or_else(gone)?;
        let init = self.kernel.read_init(device.as_fd(), INIT_LIMIT)?;
        let publish = AgentRequest::Publish(Box::new(Publish { init, ..handover::publish(mount) }));
        let wait = self.config.agent_source_wait + GRACE;
        // Whoever unpublishes does not wait for its source.
        let wanted = || !mount.state().is_over();
        let (answer, fds) = agent.ask_while(wanted, publish, &[device.as_fd()], wait).map_err(|e| match e {
            AskError::TimedOut(_) => Failure::Unavailable(format!(
                "source {} was not ready within {:?}: check endpoint and network; the publish will be repeated",
                mount.spec.source, self.config.agent_source_wait
            )),
            other => other.into(),
        })?;
        let odd = || Failure::Internal("the node agent answered a publish with something else".into());
        let AgentAnswer::Prepared { init_reply, read_ahead_kb, resume } = answer else { return Err(odd()) };
        let [inflight] = <[OwnedFd; 1]>::try_from(fds).map_err(|_| odd())?;
        let mode = resume.mode;
        mount.keep_prepared(inflight, resume);
        failpoint::hit("broker.volume-prepared");
        self.kernel.write_init_reply(device.as_fd(), &init_reply)?;
        // The kernel sets its own readahead while it takes the INIT reply: ours comes after.
        if let Err(error) = self.kernel.set_read_ahead_kb(mount.connection, read_ahead_kb) {
            tracing::warn!(mount = %mount.id, %error, "readahead stays at the kernel's default");
        }
        failpoint::hit("broker.init-answered");
        agent.ask(AgentRequest::Start { mount: mount.id }, &[], START_LIMIT)?;
        failpoint::hit("broker.started");
        if !mount.enter(State::Serving, "the agent serves it") {
            return Err(gone());
        }
        // The agent may have gone between its answer and our note of it; `lost` looked before.
        if self.agents.current().is_none_or(|a| !mount.is_of(a.identity())) {
            return Err(AskError::Gone.into());
        }
        Ok(mode)
    }

    /// Success is what can be seen through the mount.
    fn look_into(&self, mount: &Mount, mode: Mode) -> Result<(), Failure> {
        match self.kernel.probe(&mount.target, primes(mode), PROBE_LIMIT)? {
            probe::Outcome::Primed | probe::Outcome::Serving => Ok(()),
            probe::Outcome::Dead => Err(Failure::Unavailable("the mount's connection ended at once".into())),
        }
    }

    /// Asks the agent's memory.
    pub fn usage(&self, target: &Target) -> Result<link::broker::Usage, Failure> {
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
}

impl From<AskError> for Failure {
    fn from(error: AskError) -> Self {
        let text = error.to_string();
        match error {
            AskError::Refused(refusal) => refusal.into(),
            AskError::Gone | AskError::TimedOut(_) | AskError::Withdrawn => Self::Unavailable(text),
            AskError::Send(_) => Self::Internal(text),
        }
    }
}

impl Handler for Broker {
    fn answer(
        &self,
        agent: &AgentIdentity,
        request: BrokerRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<BrokerAnswer, Refusal> {
        match request {
            BrokerRequest::Hello(_) => Err(Refusal::new(RefusalKind::Invalid, "Hello comes first and once")),
            BrokerRequest::BackingOpen { mount } => self.backing_open(agent, mount, fds),
            BrokerRequest::BackingClose { mount, id } => self.backing_close(agent, mount, id),
            BrokerRequest::Dying { tids } => {
                let tids = tids.into_iter().filter(|tid| self.kernel.dying(*tid)).collect();
                Ok(BrokerAnswer::Dying { tids })
            }
            BrokerRequest::Waiting { mount } => {
                let mount = self.owned(agent, mount)?;
                let refused = |why: String| Refusal::new(RefusalKind::Internal, why);
                let control = mount
                    .control()
                    .ok_or_else(|| refused("the control of this connection is not held".into()))?;
                let count = self.kernel.waiting(&control).map_err(|e| refused(e.to_string()))?;
                Ok(BrokerAnswer::Waiting { count })
            }
            BrokerRequest::Probe { mount } => self.look(agent, mount),
            BrokerRequest::Beat => Ok(BrokerAnswer::Done),
            BrokerRequest::Confine { bytes } => self.confine(agent, fds, bytes),
            BrokerRequest::Release { group } => self.release(agent, &group),
            BrokerRequest::Abort { mount, why } => {
                let mount = self.owned(agent, mount)?;
                self.end(&mount, &why);
                Ok(BrokerAnswer::Done)
            }
            BrokerRequest::Hold(hold) => self.hold(agent, *hold, fds),
            BrokerRequest::Leaving => self.leaving(agent),
            BrokerRequest::Report { mount, report } => {
                let mount = self.owned(agent, mount)?;
                self.reported(&mount, report);
                Ok(BrokerAnswer::Done)
            }
        }
    }

    fn connected(&self, agent: &Arc<AgentLink>) {
        self.note_groups_of(agent.identity());
        if !agent.hello().stepped_back {
            self.welcome_back(agent);
        }
    }

    fn succeed(&self, agent: &Arc<AgentLink>) {
        match agent.hello() {
            Hello { successor: true, .. } => self.succession(agent),
            Hello { stepped_back: true, .. } => return,
            _ => self.give_all(agent),
        }
        self.renewals.wake_for_all();
    }

    fn lost(&self, link: &AgentLink) {
        let agent = link.identity();
        self.sweep_groups_of(agent);
        // A mount that is being prepared fails with its publish; one that it is given, with that.
        self.orphan_all_of(agent, "the node agent is gone");
        // It may be back already, and have been welcomed before we noted that it was gone.
        if let Some(back) = self.agents.current().filter(|current| current.identity() == agent) {
            self.welcome_back(&back);
        }
        // What it has left here is for the agent that is there already.
        if link.hello().stepped_back
            && let Some(current) = self.agents.current()
        {
            self.give_all(&current);
        }
    }
}

/// What a probe does with a mount to have it ready.
fn primes(mode: Mode) -> probe::What {
    match mode {
        Mode::NoOpen => probe::What::Small,
        Mode::Passthrough | Mode::Kept => probe::What::Large,
    }
}
