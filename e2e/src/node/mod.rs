//! One node: S3 server, CSI plugin with its broker, agent with its workers, and what was published on it.
//!
//! [`Node::finish`] takes everything down in order and fails if something is left: a mount, a process, a descriptor.
//! A node that is dropped without it (a failed test) prints its logs and is cleaned up by force.

mod agent;
mod disk;
mod handover;
mod log;
mod many;
mod places;
mod plugin;
mod server;

pub use agent::{ALICE, Agent, AgentOptions, Failpoints, InjectedFault, Tier};
pub use disk::{FaultyDisk, small_disk};
pub use handover::Outcome;
pub use log::LogTo;
pub use many::Published;
pub use places::{OneAtATime, Places, Version, clean_up_after, programs};
pub use plugin::{Plugin, capability};
pub use server::{BUCKET, Protocol, Proxy, Server, secrets};

use crate::clock::wait_until;
use crate::pod::Pod;
use crate::{mountinfo, processes};
use anyhow::{Context, Result, bail, ensure};
use plugin::PluginOptions;
use proto::csi::v1 as csi;
use proto::csi::v1::volume_capability::access_mode::Mode as AccessMode;
use rustix::process::Signal;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;
use tokio::runtime::Runtime;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

const ORDERLY_END: Duration = Duration::from_secs(30);

pub struct Node {
    // Dropped in this order: first those that use the others.
    agent: Option<Agent>,
    /// Would take the agent's place.
    standby: Option<Agent>,
    plugin: Option<Plugin>,
    pub server: Server,
    runtime: Runtime,
    places: Places,
    options: AgentOptions,
    published: Vec<Mounted>,
    volumes: Vec<String>,
    /// Of workspaces, by volume.
    contexts: HashMap<String, HashMap<String, String>>,
    pods: usize,
    finished: bool,
    _lock: OneAtATime,
}

/// A volume as the controller made it.
#[derive(Clone, Debug)]
pub struct Volume {
    pub id: String,
    pub context: HashMap<String, String>,
}

/// A volume at a pod's target path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mounted {
    pub id: String,
    pub target: PathBuf,
}

impl Node {
    /// Waits until no other node of this machine's tests is up, then starts everything.
    pub fn start(options: AgentOptions) -> Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "these tests mount file systems: run them as root");
        ensure!(Path::new("/dev/fuse").exists(), "no /dev/fuse: load the fuse module");
        let lock = OneAtATime::wait()?;
        let places = Places::create(options.uid)?;
        for root in options.roots(&places) {
            std::fs::create_dir_all(&root)?;
            std::os::unix::fs::chown(&root, Some(options.uid), Some(options.uid))?;
        }
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let server = Server::speaking(options.store, options.server_flags, &places, "s3")?;
        let mut node = Self {
            agent: None,
            standby: None,
            plugin: None,
            server,
            runtime,
            places,
            options,
            published: Vec::new(),
            volumes: Vec::new(),
            contexts: HashMap::new(),
            pods: 0,
            finished: false,
            _lock: lock,
        };
        node.write_allow_config()?;
        node.start_plugin()?;
        node.start_agent()?;
        Ok(node)
    }

    pub fn places(&self) -> &Places {
        &self.places
    }
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }
    pub fn options(&mut self) -> &mut AgentOptions {
        &mut self.options
    }

    /// The cache tiers of the next agent.
    pub fn tiers(&self) -> Vec<Tier> {
        self.options.tiers(&self.places)
    }

    /// Panics when the test has taken the agent down.
    pub fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("the test has not ended the agent")
    }
    /// Panics when the test has taken the plugin down.
    pub fn plugin(&self) -> &Plugin {
        self.plugin.as_ref().expect("the test has not ended the plugin")
    }

    pub fn start_agent(&mut self) -> Result<()> {
        self.agent = Some(Agent::start(&self.places, &self.options, self.runtime.handle())?);
        Ok(())
    }
    /// Without waiting for anything: it may be one that is going to die.
    pub fn spawn_agent(&mut self) -> Result<()> {
        self.agent = Some(Agent::spawn(&self.places, &self.options, self.runtime.handle())?);
        Ok(())
    }
    pub fn start_plugin(&mut self) -> Result<()> {
        let options = self.plugin_options();
        self.plugin = Some(Plugin::start(&self.places, &options, self.runtime.handle())?);
        Ok(())
    }
    /// Without waiting for anything: it may be one that is going to die.
    pub fn spawn_plugin(&mut self) -> Result<()> {
        let options = self.plugin_options();
        self.plugin = Some(Plugin::spawn(&self.places, &options, self.runtime.handle())?);
        Ok(())
    }
    /// What the controller is told that the agent is told, too.
    fn write_allow_config(&self) -> Result<()> {
        let AgentOptions { allow, endpoints, .. } = &self.options;
        let text = format!("[allow]\nsources = [{allow:?}]\nendpoints = {endpoints:?}\n");
        Ok(std::fs::write(self.places.root().join("allow.toml"), text)?)
    }

    fn plugin_options(&self) -> PluginOptions {
        PluginOptions {
            agent_uid: self.options.uid,
            cache_roots: self.options.roots(&self.places),
            hang_limit: self.options.hang_limit,
            failpoint: self.options.failpoints.plugin,
            version: self.options.plugin,
            log: self.options.log,
            descriptors: self.options.plugin_descriptors,
            allow_config: self.options.limits_controller.then(|| self.places.root().join("allow.toml")),
        }
    }
    /// `kill -9`, or the burial of one that has died; its workers go with it.
    pub fn kill_agent(&mut self) -> Result<()> {
        let agent = self.agent.take().context("the agent is down already")?;
        let workers = processes::children(agent.pid());
        agent.kill()?;
        let gone = wait_until(Duration::from_secs(5), || {
            workers.iter().all(|&w| !Path::new(&format!("/proc/{w}/exe")).exists())
        });
        ensure!(gone, "workers outlived their agent");
        Ok(())
    }
    pub fn stop_agent(&mut self) -> Result<()> {
        self.agent.take().context("the agent is down already")?.terminate(ORDERLY_END)
    }
    pub fn kill_plugin(&mut self) -> Result<()> {
        self.plugin.take().context("the plugin is down already")?.kill()
    }
    pub fn stop_plugin(&mut self) -> Result<()> {
        self.plugin.take().context("the plugin is down already")?.terminate(ORDERLY_END)
    }

    /// SIGTERM to both at the same instant; neither has ended when this returns.
    fn ask_both_to_stop(&self) -> Result<()> {
        self.signal_both(Signal::TERM)
    }
    /// SIGKILL to both at the same instant: no process holds the mounts any more.
    pub fn kill_both(&mut self) -> Result<()> {
        self.signal_both(Signal::KILL)?;
        self.kill_agent()?;
        self.kill_plugin()
    }
    fn signal_both(&self, signal: Signal) -> Result<()> {
        for pid in [self.agent().pid(), self.plugin().pid()] {
            processes::signal(pid, signal)?;
        }
        Ok(())
    }
    pub fn agent_has_ended(&mut self) -> bool {
        self.agent.as_mut().is_some_and(|agent| !agent.is_alive())
    }
    pub fn plugin_has_ended(&mut self) -> bool {
        self.plugin.as_mut().is_some_and(|plugin| !plugin.is_alive())
    }
    /// How it ended. None: it lives.
    pub fn agent_end(&mut self) -> Result<Option<ExitStatus>> {
        self.agent.as_mut().context("the agent is down already")?.ended()
    }
    /// How it ended. None: it lives.
    pub fn plugin_end(&mut self) -> Result<Option<ExitStatus>> {
        self.plugin.as_mut().context("the plugin is down already")?.ended()
    }
    /// In place of one that the broker has killed.
    pub fn replace_killed_agent(&mut self) -> Result<()> {
        ensure!(self.agent_has_ended(), "the agent has not ended");
        self.agent = None;
        self.start_agent()
    }
    /// In place of one that has ended by itself. Does not wait for the broker, which may be on its way out.
    pub fn succeed_agent(&mut self) -> Result<()> {
        self.stop_agent()?;
        self.spawn_agent()
    }
    /// In place of one that has ended by itself.
    pub fn succeed_plugin(&mut self) -> Result<()> {
        self.plugin.take().context("the plugin is down already")?.terminate(ORDERLY_END)?;
        self.start_plugin()
    }

    /// Asks both to stop at the same instant. As DaemonSets do, a successor starts when the old one is gone, in whatever
    /// order they go.
    pub fn succeed_both(&mut self, limit: Duration) -> Result<()> {
        self.ask_both_to_stop()?;
        let (mut agent, mut plugin) = (true, true);
        let end = std::time::Instant::now() + limit;
        while agent || plugin {
            if agent && self.agent_has_ended() {
                agent = false;
                self.succeed_agent().context("the agent's successor starts")?;
            }
            if plugin && self.plugin_has_ended() {
                plugin = false;
                self.succeed_plugin().context("the plugin's successor starts")?;
            }
            let late = std::time::Instant::now() >= end;
            ensure!(!late, "asked to stop, still there: agent {agent}, plugin {plugin}");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Waits until every mount is served by a worker, and held by agent and broker, so that either may die.
    pub fn wait_whole(&self, limit: Duration) -> Result<()> {
        self.wait_served(limit)?;
        // Answered by the agent through the broker's table: the broker has the mount (back). One question at a time: a
        // broker that has just started has better things to do.
        let mut unknown: Vec<&Mounted> = self.published.iter().collect();
        let held = wait_until(limit, || {
            while let Some(m) = unknown.last() {
                // A source that is away says nothing of who holds the mount.
                let well = |how: csi::VolumeCondition| !how.abnormal || how.message.contains("its source");
                let stats = self.plugin().stats(&m.id, &m.target);
                if !stats.is_ok_and(|stats| stats.volume_condition.is_some_and(well)) {
                    return false;
                }
                unknown.pop();
            }
            true
        });
        ensure!(held, "the broker does not hold every mount within {limit:?}: {unknown:?}");
        Ok(())
    }

    /// Until every mount has a worker that serves.
    pub fn wait_served(&self, limit: Duration) -> Result<()> {
        let served = wait_until(limit, || self.agent_serves_all());
        ensure!(served, "not every mount is served within {limit:?}: {:#?}", self.agent().volumes());
        Ok(())
    }

    pub fn agent_serves_all(&self) -> bool {
        self.agent().status().is_ok_and(|s| s.broker_connected)
            && self.agent().serving().is_ok_and(|serving| serving.len() == self.published.len())
    }

    /// The worker of a volume; waits until it has one that serves.
    pub fn worker_of(&self, volume: &str, limit: Duration) -> Result<u32> {
        let mut worker = None;
        wait_until(limit, || {
            let serving = self.agent().serving().unwrap_or_default();
            worker = serving.into_iter().find(|(id, _)| id == volume).map(|(_, pid)| pid);
            worker.is_some()
        });
        worker.with_context(|| format!("no worker serves {volume} within {limit:?}"))
    }

    /// A signal to a worker of this node and to nothing else.
    pub fn signal_worker(&self, pid: u32, signal: rustix::process::Signal) -> Result<()> {
        processes::signal_child(pid, self.agent().pid(), signal)
    }

    /// StorageClass parameters for a prefix of this node's bucket, completed by `more`.
    pub fn parameters(&self, prefix: &str, more: &[(&str, &str)]) -> HashMap<String, String> {
        let mut all = HashMap::new();
        // Of those that speak it.
        if self.options.store != Protocol::Hdfs {
            all.insert("allowHttp".to_owned(), "true".to_owned());
        }
        let address = self.options.store.address(&self.server.endpoint(), prefix);
        all.extend(address.into_iter().map(|(name, value)| (name.to_owned(), value)));
        let own = self.options.store.parameters();
        all.extend(own.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())));
        all.extend(more.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())));
        all
    }

    /// Process ids of the agent's HDFS helpers.
    pub fn helpers(&self) -> Vec<u32> {
        let is_helper = |pid: &u32| {
            let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            program.file_name().is_some_and(|name| name == "hdfs-helper")
        };
        processes::children(self.agent().pid()).into_iter().filter(is_helper).collect()
    }

    pub fn create(&mut self, name: &str, prefix: &str, more: &[(&str, &str)]) -> Result<Volume, Status> {
        let parameters = self.parameters(prefix, more);
        self.create_with(name, &parameters)
    }

    pub fn create_with(
        &mut self,
        name: &str,
        parameters: &HashMap<String, String>,
    ) -> Result<Volume, Status> {
        let volume = self.plugin().create(name, parameters)?;
        self.volumes.push(volume.volume_id.clone());
        Ok(Volume { id: volume.volume_id, context: volume.volume_context.into_iter().collect() })
    }

    /// With the provisioner's secret, as of a class that names one.
    pub fn create_with_secret(
        &mut self,
        name: &str,
        parameters: &HashMap<String, String>,
    ) -> Result<Volume, Status> {
        let volume = self.plugin().create_with_secret(name, parameters, self.provisioner_secret())?;
        self.volumes.push(volume.volume_id.clone());
        Ok(Volume { id: volume.volume_id, context: volume.volume_context.into_iter().collect() })
    }

    fn provisioner_secret(&self) -> HashMap<String, String> {
        self.options.store.secrets().into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
    }

    pub fn delete_with_secret(&mut self, volume: &Volume) -> Result<(), Status> {
        self.plugin().delete_with_secret(&volume.id, self.provisioner_secret())?;
        self.volumes.retain(|id| *id != volume.id);
        Ok(())
    }

    pub fn delete(&mut self, volume: &Volume) -> Result<(), Status> {
        self.plugin().delete(&volume.id)?;
        self.volumes.retain(|id| *id != volume.id);
        Ok(())
    }

    /// The target path that kubelet would choose for this pod; its parent exists afterwards, itself not.
    pub fn target(&self, volume: &Volume, pod: &str) -> Result<PathBuf> {
        let parent =
            self.places.kubelet().join(format!("pods/{pod}/volumes/kubernetes.io~csi/{}", volume.id));
        std::fs::create_dir_all(&parent)?;
        Ok(parent.join("mount"))
    }

    pub fn publish_request(&self, volume: &Volume, target: &Path) -> csi::NodePublishVolumeRequest {
        csi::NodePublishVolumeRequest {
            volume_id: volume.id.clone(),
            target_path: target.display().to_string(),
            volume_capability: Some(capability()),
            readonly: true,
            secrets: self.options.store.secrets().into_iter().map(|(k, v)| (k.to_owned(), v)).collect(),
            volume_context: volume.context.clone().into_iter().collect(),
            ..Default::default()
        }
    }

    pub fn publish(&mut self, volume: &Volume, pod: &str) -> Result<Mounted, Status> {
        let secrets = self.options.store.secrets();
        let secrets: Vec<_> = secrets.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.publish_with(volume, pod, &secrets)
    }

    /// Without a secret the agent's environment must have one.
    pub fn publish_with(
        &mut self,
        volume: &Volume,
        pod: &str,
        secrets: &[(&str, &str)],
    ) -> Result<Mounted, Status> {
        let target = self.target(volume, pod).map_err(|e| Status::internal(e.to_string()))?;
        let mut request = self.publish_request(volume, &target);
        request.secrets = secrets.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        self.plugin().publish(request)?;
        let mounted = Mounted { id: volume.id.clone(), target };
        if !self.published.contains(&mounted) {
            self.published.push(mounted.clone());
        }
        Ok(mounted)
    }

    pub fn unpublish(&mut self, mounted: &Mounted) -> Result<(), Status> {
        self.plugin().unpublish(&mounted.id, &mounted.target)?;
        self.published.retain(|m| m != mounted);
        Ok(())
    }

    /// A new volume at a new pod: what most tests begin with.
    pub fn volume(&mut self, name: &str, prefix: &str, more: &[(&str, &str)]) -> Result<Mounted> {
        let volume = self.create(name, prefix, more)?;
        Ok(self.publish(&volume, &format!("pod-{name}"))?)
    }

    /// A new volume that can be written to, at a new pod, as of a claim of access mode ReadWriteMany.
    pub fn workspace(&mut self, name: &str, prefix: &str, more: &[(&str, &str)]) -> Result<Mounted> {
        let secrets = self.options.store.secrets();
        let secrets: Vec<_> = secrets.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.workspace_of(name, self.parameters(prefix, more), &secrets)
    }

    /// The same of a store that the parameters name.
    pub fn workspace_of(
        &mut self,
        name: &str,
        mut parameters: HashMap<String, String>,
        secrets: &[(&str, &str)],
    ) -> Result<Mounted> {
        parameters.insert("access".to_owned(), "readWrite".to_owned());
        let volume = self.create_with(name, &parameters)?;
        self.contexts.insert(volume.id.clone(), volume.context.clone());
        Ok(self.publish_writable_with(&volume, &format!("pod-{name}"), secrets)?)
    }

    /// The same of a directory below the node's allowed root.
    pub fn directory_workspace(&mut self, name: &str, dir: &Path, more: &[(&str, &str)]) -> Result<Mounted> {
        let source = format!("file://{}", dir.display());
        let mut parameters = self.parameters("", &[&[("source", source.as_str())], more].concat());
        parameters.retain(|key, _| key != "endpoint" && key != "allowHttp");
        self.workspace_of(name, parameters, &[])
    }

    /// The same volume at another pod.
    pub fn workspace_again(&mut self, mounted: &Mounted, pod: &str) -> Result<Mounted> {
        let context = self.contexts.get(&mounted.id).context("not a workspace of this test")?.clone();
        let volume = Volume { id: mounted.id.clone(), context };
        Ok(self.publish_writable(&volume, pod)?)
    }

    pub fn publish_writable(&mut self, volume: &Volume, pod: &str) -> Result<Mounted, Status> {
        let secrets = self.options.store.secrets();
        let secrets: Vec<_> = secrets.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.publish_writable_with(volume, pod, &secrets)
    }

    pub fn publish_writable_with(
        &mut self,
        volume: &Volume,
        pod: &str,
        secrets: &[(&str, &str)],
    ) -> Result<Mounted, Status> {
        let target = self.target(volume, pod).map_err(|e| Status::internal(e.to_string()))?;
        let mut request = self.publish_request(volume, &target);
        request.readonly = false;
        request.volume_capability = Some(plugin::capability_of(AccessMode::MultiNodeMultiWriter));
        request.secrets = secrets.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        self.plugin().publish(request)?;
        let mounted = Mounted { id: volume.id.clone(), target };
        self.published.push(mounted.clone());
        Ok(mounted)
    }

    pub fn pod(&mut self, mounted: &Mounted) -> Result<Pod> {
        self.pods += 1;
        let scratch = self.places.pods().join(self.pods.to_string());
        Pod::start(mounted, scratch, self.places.root().join("bin"), self.places.root())
    }

    /// FUSE mounts of this node that exist now.
    pub fn fuse_mounts(&self) -> Result<Vec<mountinfo::Mount>> {
        let all = mountinfo::below(self.places.root())?;
        Ok(all.into_iter().filter(|m| m.kind.starts_with("fuse")).collect())
    }

    /// While suspended, dead workers stay dead.
    pub fn suspend_respawn(&self, yes: bool) -> Result<()> {
        let file = self.places.suspend_file();
        if yes {
            std::fs::write(file, "")?
        } else {
            std::fs::remove_file(file)?
        }
        Ok(())
    }

    /// Unpublishes and deletes what is left, ends every process in order, and fails if anything stays behind.
    pub fn finish(mut self) -> Result<()> {
        for mounted in std::mem::take(&mut self.published) {
            self.plugin().unpublish(&mounted.id, &mounted.target)?;
            ensure!(!mounted.target.exists(), "unpublish left {}", mounted.target.display());
        }
        for volume in std::mem::take(&mut self.volumes) {
            self.plugin().delete(&volume)?;
        }
        ensure!(self.standby.is_none(), "the test has not seen to the end of a standby");
        let mounts = mountinfo::below(&self.places.kubelet())?;
        ensure!(mounts.is_empty(), "mounts left after the last unpublish: {mounts:#?}");
        if self.agent.is_some() {
            let volumes = self.agent().volumes()?;
            ensure!(volumes.is_empty(), "the agent still serves {volumes:?}");
            self.stop_agent()?;
        }
        if self.plugin.is_some() {
            self.stop_plugin()?;
        }
        self.finished = true;
        // Servers of the test itself, which end when their handles are dropped.
        let fine = ["s3-server", "shape-proxy", "fault-fs"].map(|name| self.places.bin(name));
        let left = || -> Vec<_> {
            let running = processes::running_from(&self.places.root().join("bin"));
            running.into_iter().filter(|(_, program)| !fine.contains(program)).collect()
        };
        // A worker that stood by is killed by the kernel when its agent has gone, which takes a moment.
        wait_until(Duration::from_secs(10), || left().is_empty());
        let left = left();
        if !left.is_empty() {
            bail!("processes left: {left:?}\n{}", self.places.logs());
        }
        Ok(())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if !self.finished {
            eprintln!("{}", self.places.logs());
        }
        // Killed rather than asked: by now it is either a failed test or only the servers are left.
        for agent in self.agent.take().into_iter().chain(self.standby.take()) {
            let _ = agent.kill();
        }
        if let Some(plugin) = self.plugin.take() {
            let _ = plugin.kill();
        }
        let done = self.places.clean();
        if !self.finished {
            eprintln!("e2e: cleaned up by force: {done:#?}");
        }
    }
}

/// A channel to a unix socket that connects when it is first used, and again after the server was restarted.
pub(crate) fn channel(socket: &Path, runtime: &tokio::runtime::Handle) -> Result<Channel> {
    let socket = socket.to_owned();
    let connector = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move {
            Ok::<_, std::io::Error>(hyper_util::rt::TokioIo::new(
                tokio::net::UnixStream::connect(socket).await?,
            ))
        }
    });
    let _inside = runtime.enter();
    // The address is never used; tonic wants one.
    Ok(Endpoint::from_static("http://socket.invalid").connect_with_connector_lazy(connector))
}
