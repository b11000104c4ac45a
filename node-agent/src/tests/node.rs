//! A node: an agent in this process, the directory that its volumes show, its broker and its workers.

use super::broker::{Agent, Broker};
use super::until;
use super::worker::{INIT_REPLY, Worker, Workers};
use crate::app::App;
use crate::config::Config;
use crate::volumes::Volumes;
use cache::data::Engine;
use cache::meta::{Lookup, ROOT};
use link::broker::{AgentAnswer, AgentRequest, MountId, Publish, Resume};
use link::worker::{Ask, Reply};
use link::{Access, Claim, MountSpec, Pod, Refusal, Subjects};
use std::collections::BTreeMap;
use std::io::PipeReader;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;
use volume::{VolumeId, WireSpec};

pub(super) struct Node {
    pub(super) home: TempDir,
    pub(super) broker: Arc<Broker>,
    pub(super) workers: Arc<Workers>,
    pub(super) config: Config,
}

/// A volume that was prepared, and all that a broker keeps of it.
pub(super) struct Prepared {
    pub(super) id: MountId,
    pub(super) publish: Publish,
    pub(super) resume: Resume,
    pub(super) device: OwnedFd,
    pub(super) shared: OwnedFd,
    /// The kernel's end of the connection, which ends when this is dropped.
    pub(super) kernel: PipeReader,
}

impl Node {
    pub(super) fn new() -> Self {
        Self::with("")
    }

    /// `workers`: further settings of workers.
    pub(super) fn with(workers: &str) -> Self {
        let home = tempfile::tempdir().unwrap();
        let at = |name: &str| home.path().join(name);
        for dir in ["source", "state", "meta", "cache"] {
            std::fs::create_dir(at(dir)).unwrap();
        }
        let (broker, played) = (Broker::listen(home.path()), Workers::listen(home.path()));
        let text = format!(
            r#"
            [agent]
            broker_socket = {broker:?}
            api_socket = {api:?}
            state_dir = {state:?}
            worker = {worker:?}
            metrics = "127.0.0.1:0"
            source_wait = "2s"
            [allow]
            roots = [{source:?}]
            [cache]
            metadata_dir = {meta:?}
            block = "4Ki"
            part = "64Ki"
            [[cache.tiers]]
            name = "ssd"
            kind = "ssd"
            paths = [{cache:?}]
            quota = "64Mi"
            min_free_bytes = 0
            min_free_inodes = 0
            [workers]
            standby = 0
            {workers}
            "#,
            broker = broker.path(),
            api = at("api"),
            state = at("state"),
            worker = played.binary,
            source = at("source"),
            meta = at("meta"),
            cache = at("cache"),
        );
        std::fs::write(at("agent.toml"), text).unwrap();
        let config = Config::load(&at("agent.toml")).unwrap();
        Self { home, broker, workers: played, config }
    }

    pub(super) async fn start(&self) -> (App, Arc<Agent>) {
        let app = App::start(self.config.clone(), None).await.unwrap();
        (app, self.broker.agent(false).await)
    }

    pub(super) fn source(&self) -> PathBuf {
        self.home.path().join("source")
    }

    pub(super) fn file(&self, name: &str, bytes: &[u8]) {
        let path = self.source().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }

    /// Of the directory `name` of the source.
    pub(super) fn publish(&self, id: u64, name: &str, parameters: &[(&str, &str)]) -> Publish {
        let own = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        Publish {
            mount: MountId(id),
            spec: MountSpec {
                volume: WireSpec {
                    id: VolumeId::parse(&format!("volume-{id}")).unwrap(),
                    source: format!("file://{}", self.source().join(name).display()),
                    parameters: parameters.iter().map(own).collect(),
                    hints: BTreeMap::new(),
                },
                sources: Vec::new(),
                access: Access::ReadOnly,
                environment: false,
                target: target(id),
                subjects: Subjects {
                    pod: Some(Pod { name: "p".into(), namespace: "n".into(), uid: format!("u{id}") }),
                    claim: Some(Claim { name: "c".into(), namespace: "n".into(), uid: None }),
                },
            },
            secrets: BTreeMap::new(),
            init: b"the kernel's INIT".to_vec(),
        }
    }

    /// The first half of a publish.
    pub(super) async fn prepare(&self, agent: &Agent, publish: Publish) -> Result<Prepared, Refusal> {
        // What the agent polls and writes; it never ends before its other end does.
        let (kernel, device) = std::io::pipe().unwrap();
        let (id, device, copy) = (publish.mount, OwnedFd::from(device), copy_of(&publish));
        let (answer, mut fds) =
            agent.ask(AgentRequest::Publish(Box::new(publish)), &[device.as_fd()]).await?;
        let AgentAnswer::Prepared { init_reply, resume, .. } = answer else { panic!("{answer:?}") };
        assert_eq!(init_reply, INIT_REPLY);
        Ok(Prepared { id, publish: copy, resume, device, shared: fds.pop().unwrap(), kernel })
    }

    /// A volume that is served.
    pub(super) async fn mount(&self, agent: &Agent, publish: Publish) -> (Prepared, Arc<Worker>) {
        let prepared = self.prepare(agent, publish).await.unwrap();
        agent.done(AgentRequest::Start { mount: prepared.id }).await.unwrap();
        let worker = self.workers.serving(prepared.id.0, None).await;
        (prepared, worker)
    }
}

pub(super) fn target(id: u64) -> String {
    format!("/pods/{id}/mount")
}

pub(super) fn copy_of(publish: &Publish) -> Publish {
    Publish {
        mount: publish.mount,
        spec: publish.spec.clone(),
        secrets: publish.secrets.clone(),
        init: publish.init.clone(),
    }
}

/// Cache files of the engine, all of them whole.
pub(super) async fn cached(engine: &Engine, files: u64) {
    let count = || engine.usage().tiers.iter().map(|tier| tier.inodes).sum::<u64>();
    until("files are cached", || count() >= files).await;
}

/// Inode, version and size of a path, as this worker finds it out.
pub(super) fn look_up(volumes: &Volumes, worker: &Worker, path: &str) -> Option<(u64, u32, u64)> {
    let metadata = worker.assigned().assign.metadata.clone();
    let scope = volumes.scopes.all().into_iter().find(|scope| scope.metadata_dir == metadata).unwrap();
    let mut found = (ROOT, 0, 0);
    for name in Path::new(path) {
        let name = name.as_encoded_bytes();
        let asked = worker.ask(Ask::Lookup { parent: found.0, name: name.to_vec() });
        assert!(matches!(asked, Ok((Reply::Stored, _))), "{asked:?}");
        match scope.names.lookup(found.0, name).unwrap() {
            Lookup::Found { attributes, .. } => {
                found = (attributes.ino, attributes.version, attributes.size);
            }
            _ => return None,
        }
    }
    Some(found)
}
