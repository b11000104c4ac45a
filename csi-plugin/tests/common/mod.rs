//! A driver in this process over a pretended kernel, and an agent that does what a test says.

pub mod api;

use csi_plugin::config::{Config, ControllerConfig, LogFormat, NodeConfig, Pace, RecordsPlace};
use csi_plugin::controller::{erasures, unclaimed};
use link::broker::{
    AgentAnswer, AgentRequest, Away, BrokerAnswer, BrokerRequest, Frame, FromAgent, FromBroker, Hello,
    Resume, Unsent, Usage,
};
use link::{MAX_MESSAGE, Packet, Refusal};
use mounts::{Fake, Kernel};
use proto::csi::v1::controller_client::ControllerClient;
use proto::csi::v1::identity_client::IdentityClient;
use proto::csi::v1::node_client::NodeClient;
use proto::csi::v1::volume_capability::{AccessMode, AccessType, MountVolume, access_mode::Mode};
use proto::csi::v1::{
    ListVolumesRequest, NodePublishVolumeRequest, NodeUnpublishVolumeRequest, VolumeCapability,
};
use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};
use tonic::transport::{Channel, Endpoint};

pub const LIMIT: Duration = Duration::from_secs(20);
const NEVER: Duration = Duration::from_secs(3600);

pub struct Driver {
    pub dir: Arc<tempfile::TempDir>,
    pub kernel: Arc<Fake>,
    pub channel: Channel,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    done: tokio::task::JoinHandle<anyhow::Result<()>>,
}

/// What a driver is started with.
#[derive(Clone, Default)]
pub struct Setup {
    /// Same directory as before: a restart.
    pub dir: Option<Arc<tempfile::TempDir>>,
    pub kernel: Option<Arc<Fake>>,
    /// Address of an API server for Events.
    pub events: Option<String>,
    /// And for records and claims.
    pub records: Option<String>,
    /// None: nothing is compared.
    pub pace: Option<Pace>,
    /// None: records without a volume are not looked for.
    pub unclaimed: Option<unclaimed::Pace>,
    /// None: a DeleteVolume waits for its directory's end.
    pub deletion: Option<erasures::Pace>,
    /// How long the agent may wait for a source; None: 1 s.
    pub source_wait: Option<Duration>,
}

/// Agents of tests say that they hold nothing, unless a test is about that.
pub fn undisturbed() -> Pace {
    Pace { compare_every: Duration::from_secs(3600), ..Pace::default() }
}

impl Driver {
    pub async fn start() -> Self {
        Self::with(Setup::default()).await
    }

    /// A restart: same directories, same kernel.
    pub async fn start_over(dir: Arc<tempfile::TempDir>, kernel: Arc<Fake>) -> Self {
        Self::with(Setup { dir: Some(dir), kernel: Some(kernel), ..Setup::default() }).await
    }

    pub async fn with(setup: Setup) -> Self {
        let dir = setup.dir.clone().unwrap_or_else(|| Arc::new(tempfile::tempdir().unwrap()));
        let kernel = setup.kernel.clone().unwrap_or_default();
        let (channel, stop, done) = serve(dir.path(), kernel.clone(), &setup).await;
        Self { dir, kernel, channel, stop: Some(stop), done }
    }

    pub async fn stop(mut self) -> (Arc<tempfile::TempDir>, Arc<Fake>) {
        self.stop.take().unwrap().send(()).unwrap();
        drop(self.channel);
        (&mut self.done).await.unwrap().unwrap();
        (self.dir.clone(), self.kernel.clone())
    }

    pub fn target(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join("kubelet").join(name)
    }

    pub fn node(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone())
    }
    pub fn controller(&self) -> ControllerClient<Channel> {
        ControllerClient::new(self.channel.clone())
    }
    /// Every volume, listed two at a time; and the tokens that led from page to page.
    pub async fn list_in_pages(&self) -> (Vec<String>, Vec<String>) {
        let (mut seen, mut tokens) = (Vec::new(), Vec::new());
        let mut starting_token = String::new();
        loop {
            let request = ListVolumesRequest { max_entries: 2, starting_token };
            let page = self.controller().list_volumes(request).await.unwrap().into_inner();
            seen.extend(page.entries.into_iter().map(|e| e.volume.unwrap().volume_id));
            if page.next_token.is_empty() {
                return (seen, tokens);
            }
            tokens.push(page.next_token.clone());
            starting_token = page.next_token;
        }
    }

    pub fn identity(&self) -> IdentityClient<Channel> {
        IdentityClient::new(self.channel.clone())
    }

    pub fn publish(&self, volume: &str, target: &str) -> NodePublishVolumeRequest {
        NodePublishVolumeRequest {
            volume_id: volume.into(),
            target_path: self.target(target).display().to_string(),
            volume_capability: Some(capability(Mode::SingleNodeWriter)),
            volume_context: context(&[("source", "s3://bucket/data"), ("healTimeout", "1s")]),
            ..Default::default()
        }
    }

    pub fn unpublish(&self, volume: &str, target: &str) -> NodeUnpublishVolumeRequest {
        NodeUnpublishVolumeRequest {
            volume_id: volume.into(),
            target_path: self.target(target).display().to_string(),
        }
    }

    pub fn agent(&self) -> Agent {
        Agent::connect(&self.dir.path().join("broker.sock"))
    }

    pub fn mounts(&self) -> usize {
        self.kernel.state().table.len()
    }
}

/// The stores of tests are on this machine, which an operator must name.
fn stores() -> store::LimitsConfig {
    let named = vec![volume::EndpointPattern::parse("http://127.0.0.1:*").unwrap()];
    let egress = store::EgressConfig { named, ..store::EgressConfig::default() };
    store::LimitsConfig { egress, ..store::LimitsConfig::default() }
}

/// Starts the server and waits until it can be reached.
async fn serve(
    dir: &Path,
    kernel: Arc<dyn Kernel>,
    setup: &Setup,
) -> (Channel, tokio::sync::oneshot::Sender<()>, tokio::task::JoinHandle<anyhow::Result<()>>) {
    std::fs::create_dir_all(dir.join("kubelet")).unwrap();
    let config = Config {
        endpoint: dir.join("csi.sock"),
        driver_name: "csi.millpond.io".into(),
        controller: Some(ControllerConfig {
            records: match setup.records {
                Some(_) => RecordsPlace::Kubernetes,
                None => RecordsPlace::Directory(dir.join("volumes")),
            },
            allow: None,
            stores: stores(),
            deletion: setup.deletion.unwrap_or(erasures::Pace { wait: LIMIT, settle: Duration::ZERO }),
            unclaimed: setup.unclaimed.unwrap_or(unclaimed::Pace { every: NEVER, grace: NEVER }),
        }),
        node: Some(NodeConfig {
            node_id: "node-1".into(),
            state_dir: dir.join("state"),
            broker_socket: dir.join("broker.sock"),
            agent_uid: rustix::process::geteuid().as_raw(),
            kubelet_dirs: vec![dir.join("kubelet")],
            cache_roots: Vec::new(),
            agent_source_wait: setup.source_wait.unwrap_or(Duration::from_secs(1)),
            handover_wait: Duration::ZERO,
            agent_hang_limit: Duration::from_secs(15),
            fusectl_dir: "/sys/fs/fuse/connections".into(),
            mount_fusectl: false,
            events: setup.events.is_some(),
            own_dirs: Vec::new(),
            memory_tier: None,
            pace: setup.pace.clone().unwrap_or_else(undisturbed),
        }),
        cleanup: None,
        kubernetes_api: setup.records.clone().or_else(|| setup.events.clone()),
        log_format: LogFormat::Text,
    };
    let endpoint = Endpoint::from_shared(format!("unix://{}", config.endpoint.display())).unwrap();
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let stopped = Box::pin(async {
        let _ = stopped.await;
    });
    let done = tokio::spawn(csi_plugin::server::run(config, kernel, stopped));
    let deadline = Instant::now() + LIMIT;
    let channel = loop {
        match endpoint.connect().await {
            Ok(channel) => break channel,
            Err(error) => assert!(Instant::now() < deadline && !done.is_finished(), "{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    };
    (channel, stop, done)
}

pub fn capability(mode: Mode) -> VolumeCapability {
    VolumeCapability {
        access_type: Some(AccessType::Mount(MountVolume::default())),
        access_mode: Some(AccessMode { mode: mode.into() }),
    }
}

/// What kubelet says of a publish into pod team/pod, and the record of its claim.
pub fn of_pod() -> HashMap<String, String> {
    context(&[
        ("csi.storage.k8s.io/pod.name", "pod"),
        ("csi.storage.k8s.io/pod.namespace", "team"),
        ("csi.storage.k8s.io/pod.uid", "uid-pod"),
        ("internal.millpond.io/pvc-name", "claim"),
        ("internal.millpond.io/pvc-namespace", "team"),
    ])
}

pub fn context(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !holds() {
        assert!(Instant::now() < deadline, "still waiting: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub type Answer = Result<(AgentAnswer, Vec<OwnedFd>), Refusal>;
/// None: never answer.
pub type Behaviour = dyn FnMut(&AgentRequest, &[OwnedFd]) -> Option<Answer> + Send;

/// An agent over the real socket.
pub struct Agent {
    packet: Arc<Packet>,
    pub seen: Arc<Mutex<Vec<String>>>,
    pub behave: Arc<Mutex<Box<Behaviour>>>,
    /// Questions that its behaviour did not answer.
    unanswered: Arc<Mutex<Vec<u64>>>,
    answers: Mutex<mpsc::Receiver<(u64, Result<BrokerAnswer, Refusal>)>>,
    next: AtomicU64,
}

pub fn obliging(request: &AgentRequest, _fds: &[OwnedFd]) -> Option<Answer> {
    Some(Ok(match request {
        AgentRequest::Publish(_) => (
            AgentAnswer::Prepared {
                init_reply: vec![7; 80],
                read_ahead_kb: 4096,
                resume: Resume::new(link::worker::Mode::Passthrough, String::new()),
            },
            vec![tempfile::tempfile().unwrap().into()],
        ),
        AgentRequest::Start { .. }
        | AgentRequest::Unpublish { .. }
        | AgentRequest::Rotate { .. }
        | AgentRequest::Renewed { .. } => (AgentAnswer::Done, vec![]),
        AgentRequest::Upload { .. } => (AgentAnswer::Unsent(Unsent::default()), vec![]),
        AgentRequest::Usage { .. } => {
            let usage = Usage { total_bytes: 4096, total_inodes: 3, cached_bytes: 1, ..Usage::default() };
            (AgentAnswer::Usage(usage), vec![])
        }
        AgentRequest::Adopt(_)
        | AgentRequest::Prepare(_)
        | AgentRequest::Drain
        | AgentRequest::Succeed
        | AgentRequest::Dismiss { .. }
        | AgentRequest::Resume
        | AgentRequest::Depart => (AgentAnswer::Done, vec![]),
        AgentRequest::Holding => (AgentAnswer::Holding { mounts: vec![] }, vec![]),
    }))
}

/// Never answers a publish: its source says nothing.
pub fn waiting(request: &AgentRequest, fds: &[OwnedFd]) -> Option<Answer> {
    match request {
        AgentRequest::Publish(_) => None,
        _ => obliging(request, fds),
    }
}

/// Of every mount it says that its source does not answer.
pub fn source_away(request: &AgentRequest, fds: &[OwnedFd]) -> Option<Answer> {
    match request {
        AgentRequest::Usage { .. } => {
            let away = Some(Away { why: "503".into(), stale: false });
            Some(Ok((AgentAnswer::Usage(Usage { away, ..Usage::default() }), vec![])))
        }
        _ => obliging(request, fds),
    }
}

/// Of an agent of this build.
pub fn hello() -> Hello {
    Hello {
        protocol: version::LINK,
        agent_version: "test".into(),
        pid: std::process::id(),
        state: version::STATE,
        life: 1,
        successor: false,
        drained: false,
        beats: false,
    }
}

impl Agent {
    pub fn connect(socket: &Path) -> Self {
        Self::introduce(socket, hello()).unwrap()
    }

    /// As the agent that it says it is.
    pub fn introduce(socket: &Path, hello: Hello) -> Result<Self, Refusal> {
        Self::introduce_with(socket, hello, obliging)
    }

    /// It behaves like this from the first question on.
    pub fn introduce_with(
        socket: &Path,
        hello: Hello,
        behave: impl FnMut(&AgentRequest, &[OwnedFd]) -> Option<Answer> + Send + 'static,
    ) -> Result<Self, Refusal> {
        let packet = Arc::new(Packet::connect(socket).unwrap());
        let (send, answers) = mpsc::channel();
        let agent = Self {
            packet: packet.clone(),
            seen: Arc::default(),
            behave: Arc::new(Mutex::new(Box::new(behave))),
            unanswered: Arc::default(),
            answers: Mutex::new(answers),
            next: AtomicU64::new(1),
        };
        let (seen, behave) = (agent.seen.clone(), agent.behave.clone());
        let unanswered = agent.unanswered.clone();
        std::thread::spawn(move || {
            let mut buffer = vec![0; MAX_MESSAGE];
            while let Ok((frame, fds)) = link::broker::recv::<FromBroker>(&packet, &mut buffer) {
                match frame {
                    Frame::Answer { id, body } => drop(send.send((id, body))),
                    Frame::Ask { id, body } => {
                        let answer = behave.lock().unwrap()(&body, &fds);
                        if answer.is_none() {
                            unanswered.lock().unwrap().push(id);
                        }
                        seen.lock().unwrap().push(format!("{body:?}"));
                        let Some(answer) = answer else { continue };
                        let (body, fds) = match answer {
                            Ok((answer, fds)) => (Ok(answer), fds),
                            Err(refusal) => (Err(refusal), vec![]),
                        };
                        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
                        let _ = link::broker::send(&packet, &FromAgent::Answer { id, body }, &fds);
                    }
                }
            }
        });
        let welcome = agent.ask(BrokerRequest::Hello(hello), &[]);
        match welcome {
            Ok(BrokerAnswer::Welcome { .. }) => Ok(agent),
            Ok(other) => panic!("Hello answered with {other:?}"),
            Err(refusal) => Err(refusal),
        }
    }

    pub fn ask(&self, body: BrokerRequest, fds: &[BorrowedFd<'_>]) -> Result<BrokerAnswer, Refusal> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        link::broker::send(&self.packet, &FromAgent::Ask { id, body }, fds).unwrap();
        let (answered, body) = self.answers.lock().unwrap().recv_timeout(LIMIT).unwrap();
        assert_eq!(answered, id);
        body
    }

    /// What this build has no type for.
    pub fn ask_in_words(&self, body: &str) -> Result<BrokerAnswer, Refusal> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.packet.send(format!(r#"{{"ask":{{"id":{id},"body":{body}}}}}"#).as_bytes(), &[]).unwrap();
        let (answered, body) = self.answers.lock().unwrap().recv_timeout(LIMIT).unwrap();
        assert_eq!(answered, id);
        body
    }

    /// Answers so to all that its behaviour did not answer, and says how many that were.
    pub fn answer_in_words(&self, body: &str) -> usize {
        let ids: Vec<u64> = self.unanswered.lock().unwrap().drain(..).collect();
        for id in &ids {
            self.packet.send(format!(r#"{{"answer":{{"id":{id},"body":{body}}}}}"#).as_bytes(), &[]).unwrap();
        }
        ids.len()
    }

    pub fn behave(&self, how: impl FnMut(&AgentRequest, &[OwnedFd]) -> Option<Answer> + Send + 'static) {
        *self.behave.lock().unwrap() = Box::new(how);
    }

    /// Answers Done to all that its behaviour did not answer.
    pub fn answer_late(&self) {
        for id in self.unanswered.lock().unwrap().drain(..) {
            let body = Ok(AgentAnswer::Done);
            link::broker::send(&self.packet, &FromAgent::Answer { id, body }, &[]).unwrap();
        }
    }

    pub fn saw(&self, prefix: &str) -> usize {
        self.seen.lock().unwrap().iter().filter(|s| s.starts_with(prefix)).count()
    }

    pub fn die(&self) {
        self.packet.shutdown();
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.die();
    }
}
