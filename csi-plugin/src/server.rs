//! The gRPC server on its unix socket: built from the configuration, run, drained.

use crate::broker::Broker;
use crate::cluster::Cluster;
use crate::config::{Config, ControllerConfig, NodeConfig, RecordsPlace};
use crate::controller::ControllerService;
use crate::controller::claim::Claims;
use crate::controller::records::{Directory, Kubernetes, Records};
use crate::controller::unclaimed;
use crate::events::{Events, Pace};
use crate::host;
use crate::identity::IdentityService;
use crate::node::NodeService;
use anyhow::Context;
use link::budget;
use mounts::Kernel;
use proto::csi::v1::controller_server::ControllerServer;
use proto::csi::v1::identity_server::IdentityServer;
use proto::csi::v1::node_server::NodeServer;
use std::future::Future;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_stream::wrappers::UnixListenerStream;

/// Calls under way get so long to end after the signal.
const DRAIN_LIMIT: Duration = budget::PLUGIN_DRAINS.time;
/// Calls that block, each with a thread. As many publishes may wait for stores that hang as a node has volumes, and no call
/// for another volume waits for them.
const CALLS_MAX: usize = 4096;
const HELD_POLL: Duration = Duration::from_millis(50);

/// Serves until SIGTERM or SIGINT. Blocks: the runtime is made here, so that the program itself compiles none of it
/// again.
pub fn run_until_signal(config: Config, kernel: Arc<dyn Kernel>) -> anyhow::Result<()> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.enable_all().max_blocking_threads(CALLS_MAX).build().context("no runtime")?;
    runtime.block_on(async {
        let mut term = signal(SignalKind::terminate())?;
        let mut int = signal(SignalKind::interrupt())?;
        let stop = async move {
            tokio::select! {
                _ = term.recv() => {}
                _ = int.recv() => {}
            }
            tracing::info!("asked to stop");
        };
        run(config, kernel, Box::pin(stop)).await
    })?;
    // Work that outlived the drain must not hold the process.
    startup::leave_to_the_end(runtime);
    Ok(())
}

/// Serves until `stop` resolves. Records and broker are opened before the socket, so that a caller that can connect
/// can be served.
pub fn run(
    config: Config,
    kernel: Arc<dyn Kernel>,
    stop: Pin<Box<dyn Future<Output = ()> + Send>>,
) -> Pin<Box<dyn Future<Output = anyhow::Result<()>> + Send>> {
    Box::pin(serve(config, kernel, stop))
}

async fn serve(
    config: Config,
    kernel: Arc<dyn Kernel>,
    stop: Pin<Box<dyn Future<Output = ()> + Send>>,
) -> anyhow::Result<()> {
    let controller = match &config.controller {
        Some(controller) => Some(controller_service(&config, controller).await?),
        None => None,
    };
    let (controller, _search) = match controller {
        Some((service, search)) => (Some(ControllerServer::new(service)), search),
        None => (None, None),
    };
    let broker = match &config.node {
        Some(node) => {
            let events = events(&config, node).await;
            let (node, socket) = (node.clone(), node.broker_socket.clone());
            let started = tokio::task::spawn_blocking(move || {
                host::prepare(&node)?;
                Broker::start(node, kernel, events).context("the mount broker")
            });
            Some(started.await?.with_context(|| format!("cannot start the broker on {}", socket.display()))?)
        }
        None => None,
    };
    let node = broker.clone().map(|broker| NodeServer::new(NodeService::new(broker)));
    let identity = IdentityServer::new(IdentityService {
        driver_name: config.driver_name.clone(),
        has_controller: controller.is_some(),
    });

    let listener = bind(&config.endpoint)?;
    tracing::info!(
        endpoint = %config.endpoint.display(),
        driver = config.driver_name,
        controller = controller.is_some(),
        node = node.is_some(),
        "serving CSI"
    );
    let (stopping, stopped) = tokio::sync::oneshot::channel::<()>();
    let leaving = broker.clone();
    let signal = async move {
        stop.await;
        if let Some(broker) = leaving {
            wait_until_held(&broker).await;
        }
        let _ = stopping.send(()); // the receiver is gone if the server has failed
    };
    let server = tonic::transport::Server::builder()
        .add_service(identity)
        .add_optional_service(controller)
        .add_optional_service(node)
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), signal);
    let overdue = async {
        // An error means that the server ended by itself, which the other branch sees.
        if stopped.await.is_ok() {
            tokio::time::sleep(DRAIN_LIMIT).await;
        } else {
            std::future::pending::<()>().await;
        }
    };
    let result = tokio::select! {
        result = server => result.context("the CSI server failed"),
        () = overdue => {
            tracing::warn!("calls still under way were cut off");
            Ok(())
        }
    };
    if let Some(broker) = broker {
        broker.stop();
    }
    // Fails only if it is removed already.
    let _ = std::fs::remove_file(&config.endpoint);
    result
}

/// The mounts live as long as a process holds their devices: until a living agent confirms that it does, this process
/// stays, and serves. At a shutdown of the node kubelet's own, shorter limit applies.
async fn wait_until_held(broker: &Arc<Broker>) {
    let end = tokio::time::Instant::now() + broker.config.handover_wait;
    let mut logged = false;
    loop {
        let asked = broker.clone();
        let held = tokio::task::spawn_blocking(move || asked.may_go()).await.unwrap_or(false);
        if held {
            return;
        }
        if !logged {
            tracing::info!(limit = ?broker.config.handover_wait, "waiting for an agent that holds every mount");
            logged = true;
        }
        if tokio::time::Instant::now() >= end {
            tracing::error!("no agent holds the mounts: those that no process holds end with this one");
            return;
        }
        tokio::time::sleep(HELD_POLL).await;
    }
}

async fn controller_service(
    config: &Config,
    controller: &ControllerConfig,
) -> anyhow::Result<(ControllerService, Option<Search>)> {
    let (records, claims, search): (Box<dyn Records>, _, _) = match &controller.records {
        RecordsPlace::Directory(path) => (Box::new(Directory::open(path.clone())?), None, None),
        RecordsPlace::Kubernetes => {
            let cluster = Cluster::configure(config.kubernetes_api.as_deref()).await;
            let cluster = cluster.context(
                "no way to the Kubernetes API server: run in a cluster with a service account, or set KUBECONFIG",
            )?;
            let cluster = Arc::new(cluster);
            let claims = Claims { cluster: cluster.clone(), driver_name: config.driver_name.clone() };
            let search = Search(tokio::spawn(unclaimed::run(cluster.clone(), controller.unclaimed)));
            (Box::new(Kubernetes::new(cluster)), Some(claims), Some(search))
        }
    };
    let (allow, stores) = (controller.allow.clone(), controller.stores.clone());
    Ok((ControllerService::new(records, claims, allow, stores, controller.deletion), search))
}

/// The search for records without a volume; it ends with the server.
struct Search(tokio::task::JoinHandle<()>);

impl Drop for Search {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A node without Events still mounts.
async fn events(config: &Config, node: &NodeConfig) -> Events {
    if !node.events {
        return Events::off();
    }
    match Cluster::configure(config.kubernetes_api.as_deref()).await {
        Ok(cluster) => Events::start(&cluster, &node.node_id, Pace::default()),
        Err(error) => {
            tracing::error!(
                error = format!("{error:#}"),
                "no events are posted: run in a cluster with a service account, or leave --events out"
            );
            Events::off()
        }
    }
}

/// A stale socket of an earlier run is replaced.
fn bind(path: &Path) -> anyhow::Result<UnixListener> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).with_context(|| format!("cannot make {}", parent.display()))?;
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("cannot replace {}", path.display()));
        }
        _ => {}
    }
    let listener =
        UnixListener::bind(path).with_context(|| format!("cannot listen on {}", path.display()))?;
    // A client that connects can mount: root only, as kubelet and the sidecars are.
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))
        .with_context(|| format!("cannot set the mode of {}", path.display()))?;
    Ok(listener)
}
