//! An agent that starts while another one serves: it prepares to take over, and waits for its turn.
//!
//! ```text
//!  start ──► owner's lock free ────────────────────────────────► the agent of this node
//!     │ taken                                                          ▲
//!     ▼            Hello                Prepare ×n          Succeed    │
//!  standby ────────────► at the broker ───────────► ready ─────────────┤
//!     ▲ not now, lost        │ refused, dismissed                      │
//!     └──────────────────────┤                                         │
//!     └─ meanwhile the other agent has ended ──────────────────────────┘
//!                            ▼
//!                   exits, and says why: the other agent was not touched
//! ```
//!
//! Nothing here opens the cache or the state: they have one owner at a time.

use crate::broker_client::{Broker, Serve};
use crate::config::Config;
use crate::handoff::owner::Owner;
use crate::state::StateDir;
use crate::supervisor::{self, Spawner};
use crate::volumes::{self, Volumes};
use anyhow::{Context, Result, bail};
use link::broker::{Adopt, AgentAnswer, AgentRequest};
use link::budget;
use link::{Refusal, RefusalKind};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::{mpsc, watch};

/// An agent that was killed is gone within this.
const DYING: Duration = Duration::from_millis(300);
/// An agent that is drained has let go before it said so.
const LET_GO: Duration = budget::LET_GO.time;
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// From the broker's word to an agent that can be given mounts.
const UP_LIMIT: Duration = budget::SUCCESSOR_UP.time;
/// For the workers that will take the mounts over.
const STANDBY_LIMIT: Duration = budget::STANDBY_WORKERS.time;

/// What an agent begins with.
pub(crate) struct Start {
    pub(crate) owner: Owner,
    /// Of an agent that was a standby first.
    pub(crate) prepared: Option<Prepared>,
}

pub(crate) struct Prepared {
    pub(crate) broker: Arc<Broker>,
    pub(crate) spawner: Arc<Spawner>,
    standby: Arc<Standby>,
}

impl Prepared {
    /// From now on the broker's questions are the volumes' to answer.
    pub(crate) fn appoint(&self, volumes: Arc<Volumes>) {
        self.spawner.expect_no_more();
        let _ = self.standby.volumes.set(volumes); // called once
        failpoint::hit("standby.up");
        self.standby.up.send_replace(true);
    }
}

/// Returns when cache and state are ours.
pub(crate) async fn enter(config: &Config) -> Result<Start> {
    let state_dir = &config.agent.state_dir;
    let failed = || format!("state directory {}", state_dir.display());
    if let Some(owner) = Owner::take_within(state_dir, DYING).await.with_context(failed)? {
        return Ok(Start { owner, prepared: None });
    }
    let Some(path) = config.agent.broker_socket.clone() else {
        bail!(
            "another agent works in {}, and no broker is configured to take over through",
            state_dir.display()
        )
    };
    tracing::info!("another agent serves this node: preparing to take over from it");
    StateDir::check_version(state_dir)?;
    let spawner = Spawner::start(supervisor::SpawnOptions::of(config)?)
        .context("the worker supervisor cannot start")?;
    let (sender, mut words) = mpsc::unbounded_channel();
    let standby = Arc::new(Standby {
        config: config.clone(),
        spawner: spawner.clone(),
        prepared: AtomicUsize::new(0),
        owns: AtomicBool::new(false),
        volumes: OnceLock::new(),
        up: watch::Sender::new(false),
        words: sender,
    });
    let broker = Broker::new();
    let (client, server, runtime) = (broker.clone(), standby.clone(), tokio::runtime::Handle::current());
    std::thread::Builder::new()
        .name("broker".into())
        .spawn(move || client.run(path, server, runtime))
        .context("no thread for the broker connection")?;
    let beating = standby.clone();
    crate::heartbeat::start(
        move || beating.volumes.get().cloned(),
        spawner.clone(),
        broker.clone(),
        tokio::runtime::Handle::current(),
    )
    .context("no thread for the sign of life")?;
    let owner = loop {
        match tokio::time::timeout(LOOK_EVERY, words.recv()).await {
            Ok(Some(Word::Succeed)) => {
                failpoint::hit("standby.called");
                match Owner::take_within(state_dir, LET_GO).await.with_context(failed)? {
                    Some(owner) => break owner,
                    None => bail!("the agent before has not let go of {}", state_dir.display()),
                }
            }
            Ok(Some(Word::Dismissed(why))) => bail!("this agent does not take over: {why}"),
            Ok(None) => bail!("the thread of the broker connection is gone"),
            Err(_) if broker.is_connected() => {}
            // The other one may have ended while there was no broker to tell us.
            Err(_) => {
                if let Some(owner) = Owner::try_take(state_dir).with_context(failed)? {
                    break owner;
                }
            }
        }
    };
    standby.owns.store(true, Ordering::SeqCst);
    failpoint::hit("standby.owns");
    tracing::info!("this agent takes over");
    Ok(Start { owner, prepared: Some(Prepared { broker, spawner, standby }) })
}

/// What the broker has decided.
enum Word {
    Succeed,
    Dismissed(String),
}

struct Standby {
    config: Config,
    spawner: Arc<Spawner>,
    /// Mounts for which a worker stands by.
    prepared: AtomicUsize,
    owns: AtomicBool,
    /// Set when this is the agent of the node.
    volumes: OnceLock<Arc<Volumes>>,
    up: watch::Sender<bool>,
    words: mpsc::UnboundedSender<Word>,
}

impl Standby {
    /// Everything of a takeover that can be tried without touching the connection.
    async fn prepare(&self, adopt: Adopt, fds: Vec<OwnedFd>) -> Result<(), Refusal> {
        let [device, shared] = <[OwnedFd; 2]>::try_from(fds)
            .map_err(|_| Refusal::new(RefusalKind::Internal, "prepare must carry two descriptors"))?;
        failpoint::hit("standby.prepares");
        let Adopt { publish, resume, .. } = adopt;
        let spec = volumes::understand(&publish.spec)?;
        volumes::allowed(&self.config, &spec)?;
        let scope = volumes::scope_of(&resume)?;
        let metadata = self.config.cache.metadata_dir.join(scope.as_str());
        let assign = volumes::assign(&self.config, &spec, metadata, 0, resume.mode, 0);
        let (spawner, count) = (self.spawner.clone(), self.prepared.fetch_add(1, Ordering::SeqCst) + 1);
        let tried = tokio::task::spawn_blocking(move || {
            supervisor::dry_run(&spawner, assign, device.as_fd(), shared.as_fd())?;
            match spawner.expect(count, STANDBY_LIMIT) {
                true => Ok(()),
                false => Err(format!("{count} workers are not ready within {STANDBY_LIMIT:?}")),
            }
        });
        let tried = tried.await.unwrap_or_else(|e| Err(e.to_string()));
        tried.map_err(|why| Refusal::new(RefusalKind::Conflict, why))
    }

    async fn succeed(&self) -> Result<(), Refusal> {
        let _ = self.words.send(Word::Succeed); // ours is exiting: the broker sees it
        self.agent().await.map(drop)
    }

    /// The agent that this one becomes.
    async fn agent(&self) -> Result<&Arc<Volumes>, Refusal> {
        let mut up = self.up.subscribe();
        let _ = tokio::time::timeout(UP_LIMIT, up.wait_for(|up| *up)).await; // looked at below
        let late = || format!("the agent is not up after {UP_LIMIT:?}");
        self.volumes.get().ok_or_else(|| Refusal::new(RefusalKind::Unavailable, late()))
    }
}

#[async_trait::async_trait]
impl Serve for Standby {
    async fn serve(
        &self,
        request: AgentRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<(AgentAnswer, Vec<OwnedFd>), Refusal> {
        if let Some(volumes) = self.volumes.get() {
            return volumes.serve(request, fds).await;
        }
        match request {
            AgentRequest::Prepare(adopt) => self.prepare(*adopt, fds).await?,
            AgentRequest::Succeed => self.succeed().await?,
            AgentRequest::Dismiss { why } => {
                let _ = self.words.send(Word::Dismissed(why)); // ours is exiting
            }
            _ if self.is_successor() => {
                let why = "this agent does not serve: another one does";
                return Err(Refusal::new(RefusalKind::Unavailable, why));
            }
            // It came while this agent opens its cache.
            request => return self.agent().await?.serve(request, fds).await,
        }
        Ok((AgentAnswer::Done, Vec::new()))
    }

    async fn connected(self: Arc<Self>) {
        if let Some(volumes) = self.volumes.get() {
            volumes.clone().connected().await;
        }
    }

    fn lost(&self) {
        self.prepared.store(0, Ordering::SeqCst);
        if let Some(volumes) = self.volumes.get() {
            volumes.lost();
        }
    }

    fn is_successor(&self) -> bool {
        !self.owns.load(Ordering::SeqCst)
    }

    fn is_drained(&self) -> bool {
        self.volumes.get().is_some_and(|volumes| volumes.is_drained())
    }

    fn refused(&self, refusal: &Refusal) {
        if self.is_successor() && refusal.kind != RefusalKind::Unavailable {
            let _ = self.words.send(Word::Dismissed(refusal.message.clone())); // ours is exiting
        }
    }
}
