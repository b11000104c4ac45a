//! A node whose broker has no threads, over a pretended kernel: its parts do one thing at a time, when a test
//! calls them. Agents are links whose other end answers what the test says.

mod ends;
mod handoffs;
mod held;
mod looks;

use super::mounts_table::{Mount, Parts, State};
use super::socket::{Admission, AgentIdentity, AgentLink};
use super::targets::{Recipe, Targets};
use super::{Broker, Counter, Order, accept};
use crate::config::{NodeConfig, Pace};
use crate::events::Events;
use link::broker::{AgentAnswer, AgentRequest, MountId, Resume};
use link::worker::Mode;
use link::{MountSpec, Refusal};
use mounts::{Fake, Kernel, MountOptions, Target};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use volume::{Credentials, Parameters, SourceUrl, VolumeId, VolumeSpec};

pub(super) struct Node {
    pub(super) broker: Broker,
    pub(super) kernel: Arc<Fake>,
    dir: tempfile::TempDir,
}

/// One life of one agent process that does not exist: nothing is waited for, and nothing is killed.
pub(super) fn identity(life: u64) -> AgentIdentity {
    AgentIdentity { pid: 1 << 22, started: None, life }
}

pub(super) fn volume(id: &str) -> VolumeSpec {
    VolumeSpec {
        id: VolumeId::parse(id).unwrap(),
        source: SourceUrl::parse("s3://bucket").unwrap(),
        parameters: Parameters::default(),
    }
}

impl Node {
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(root.join("kubelet")).unwrap();
        let config = NodeConfig {
            node_id: "node-1".into(),
            state_dir: root.join("state"),
            broker_socket: root.join("broker.sock"),
            agent_uid: rustix::process::geteuid().as_raw(),
            kubelet_dirs: vec![root.join("kubelet")],
            cache_roots: Vec::new(),
            agent_source_wait: Duration::from_secs(1),
            handover_wait: Duration::ZERO,
            agent_hang_limit: Duration::from_secs(15),
            fusectl_dir: PathBuf::new(),
            mount_fusectl: false,
            events: false,
            own_dirs: Vec::new(),
            memory_tier: None,
            pace: Pace { adopt_limit: Duration::from_millis(50), ..Pace::default() },
        };
        let kernel = Arc::new(Fake::default());
        std::fs::create_dir_all(&config.state_dir).unwrap();
        let counter = Counter::open(&config.state_dir).unwrap();
        let targets = Targets::open(&config.state_dir).unwrap();
        let listener = accept::listen(&config).unwrap();
        let broker = Broker::compose(config, kernel.clone(), Events::off(), counter, (targets, listener));
        Self { broker, kernel, dir }
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join("kubelet").join(name)
    }

    pub(super) fn target(&self, name: &str) -> Target {
        Target::resolve(&self.broker.config.kubelet_dirs, &self.path(name)).unwrap()
    }

    pub(super) fn order(&self, id: &str, target: &str) -> Order {
        Order {
            spec: MountSpec::new(volume(id), self.path(target).display().to_string()),
            credentials: Credentials::anonymous(),
            options: MountOptions::default(),
        }
    }

    /// Mounted, on record, and not in the table.
    pub(super) fn mounted(&self, number: u64, id: &str, target: &str, agent: &AgentIdentity) -> Mount {
        let (order, at) = (self.order(id, target), self.target(target));
        let device = self.kernel.open_device().unwrap();
        let connection =
            self.kernel.mount(&at, device.as_fd(), &order.source(), order.mount_options()).unwrap();
        let control = self.kernel.control(connection, device.as_fd()).unwrap();
        self.broker.targets.add(at.path(), Recipe::of(&order));
        self.broker.targets.set_mounted(at.path(), &order.spec.volume.id, connection);
        Mount::new(Parts {
            id: MountId(number),
            target: Arc::new(at),
            connection,
            source: order.source(),
            spec: order.spec,
            credentials: order.credentials,
            agent: agent.clone(),
            device,
            control: Some(control),
            limit: None,
        })
    }

    /// In the middle of a publish.
    pub(super) fn preparing(&self, number: u64, id: &str, target: &str, agent: &AgentIdentity) -> Arc<Mount> {
        self.broker.table.insert(self.mounted(number, id, target, agent))
    }

    /// As after a publish: `agent` serves it.
    pub(super) fn serving(&self, number: u64, id: &str, target: &str, agent: &AgentIdentity) -> Arc<Mount> {
        let mount = self.preparing(number, id, target, agent);
        mount.keep_prepared(tempfile::tempfile().unwrap().into(), resume());
        assert!(mount.enter(State::Serving, "a test"));
        mount
    }

    /// A connected agent; in the serving agent's place if `serves`.
    pub(super) fn agent(
        &self,
        life: u64,
        serves: bool,
        answer: impl Fn(&AgentRequest) -> Result<AgentAnswer, Refusal> + Send + 'static,
    ) -> Scripted {
        let asked = Arc::<Mutex<Vec<String>>>::default();
        let noted = asked.clone();
        let link = AgentLink::scripted(identity(life), !serves, move |request| {
            let text = format!("{request:?}");
            let name = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
            noted.lock().unwrap().push(name.to_owned());
            answer(request)
        });
        self.broker.agents.slots.take(&link, &|| {}).unwrap();
        Scripted { link, asked }
    }

    pub(super) fn is_aborted(&self, mount: &Mount) -> bool {
        self.kernel.state().aborted.contains(&mount.connection.minor)
    }

    /// What the mount's owner was last told, as its condition.
    pub(super) fn trouble(&self, mount: &Mount) -> String {
        mount.condition.trouble().unwrap_or_default()
    }
}

pub(super) struct Scripted {
    pub(super) link: Arc<AgentLink>,
    asked: Arc<Mutex<Vec<String>>>,
}

impl Scripted {
    /// How often it was asked this.
    pub(super) fn was_asked(&self, what: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|name| *name == what).count()
    }
}

pub(super) fn resume() -> Resume {
    Resume::new(Mode::Passthrough, "0".repeat(32))
}

/// Says Done to everything, and that it holds these.
pub(super) fn holding(ids: &[u64]) -> impl Fn(&AgentRequest) -> Result<AgentAnswer, Refusal> + Send + use<> {
    let mounts: Vec<MountId> = ids.iter().copied().map(MountId).collect();
    move |request| {
        Ok(match request {
            AgentRequest::Holding => AgentAnswer::Holding { mounts: mounts.clone() },
            _ => AgentAnswer::Done,
        })
    }
}
