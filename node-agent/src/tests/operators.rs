//! What `millpond status`, `warm` and `evict` ask, and the page of metrics.

use super::node::{Node, cached, look_up, target};
use super::until;
use hyper_util::rt::TokioIo;
use proto::agent::v1 as pb;
use proto::agent::v1::agent_client::AgentClient;
use std::path::PathBuf;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_stream::StreamExt;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

async fn client(socket: PathBuf) -> AgentClient<Channel> {
    let connect = tower::service_fn(move |_| {
        let socket = socket.clone();
        async move { Ok::<_, std::io::Error>(TokioIo::new(tokio::net::UnixStream::connect(socket).await?)) }
    });
    AgentClient::new(Endpoint::from_static("http://agent").connect_with_connector(connect).await.unwrap())
}

/// The last word of a warm-up, or its error.
async fn warm(api: &mut AgentClient<Channel>, paths: &[&str]) -> Result<pb::WarmProgress, tonic::Status> {
    let paths = paths.iter().map(|path| (*path).to_owned()).collect();
    let mut said = api.warm(pb::WarmRequest { paths }).await?.into_inner();
    let mut last = pb::WarmProgress::default();
    while let Some(progress) = said.next().await {
        last = progress?;
    }
    Ok(last)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operator_sees_warms_and_evicts_what_is_mounted() {
    let node = Node::new();
    for k in 0..20 {
        node.file(&format!("data/d/{k}"), &vec![k; 1000 * usize::from(k)]);
    }
    std::os::unix::fs::symlink("d/1", node.source().join("data/l")).unwrap();
    let (app, agent) = node.start().await;
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    let mut api = client(node.config.agent.api_socket.clone()).await;

    let status = api.get_status(pb::GetStatusRequest {}).await.unwrap().into_inner();
    assert!(status.broker_connected && status.volumes == 1 && status.anonymous_bytes > 0, "{status:?}");
    let volumes = api.list_volumes(pb::ListVolumesRequest {}).await.unwrap().into_inner().volumes;
    let volume = &volumes[0];
    assert_eq!(
        (volume.volume_id.as_str(), volume.target.as_str(), volume.pod.as_str()),
        ("volume-1", &*target(1), "n/p")
    );
    let shown = volume.worker.as_ref().unwrap();
    assert_eq!((shown.pid, shown.state.as_str()), (worker.pid, "serving"));

    let done = warm(&mut api, &[&format!("{}/d", target(1)), &format!("{}/l", target(1))]).await.unwrap();
    assert!(done.done && done.listed && done.failed == 0, "{done:?}");
    assert_eq!((done.files_total, done.files_done, done.bytes_done), (20, 20, done.bytes_total));
    cached(&app.engine, 19).await;
    let cache = api.get_cache(pb::GetCacheRequest {}).await.unwrap().into_inner();
    assert_eq!((cache.tiers[0].name.as_str(), cache.tiers[0].kind.as_str()), ("ssd", "ssd"));
    assert!(cache.tiers[0].bytes >= 190_000 && cache.scopes[0].bytes >= 190_000, "{cache:?}");

    for (paths, code) in [
        (&[][..], Code::InvalidArgument),
        (&["/elsewhere"][..], Code::NotFound),
        (&["/pods/1/mount/absent"][..], Code::NotFound),
    ] {
        assert_eq!(warm(&mut api, paths).await.unwrap_err().code(), code, "{paths:?}");
    }
    for (path, all, code) in [("", false, Code::InvalidArgument), ("/elsewhere", false, Code::NotFound)] {
        let refused = api.evict(pb::EvictRequest { path: path.into(), all }).await.unwrap_err();
        assert_eq!(refused.code(), code);
    }
    let evict = pb::EvictRequest { path: format!("{}/d/19", target(1)), all: false };
    let evicted = api.evict(evict).await.unwrap().into_inner();
    assert_eq!((evicted.files, evicted.bytes >= 19_000), (1, true), "{evicted:?}");
    let evicted = api.evict(pb::EvictRequest { path: String::new(), all: true }).await.unwrap().into_inner();
    assert!(evicted.files >= 18, "{evicted:?}");

    worker.exit();
    node.workers.serving(1, Some(worker.pid)).await;
    until("the heal is proved", || !app.volumes.context.heals.recent().is_empty()).await;
    let heals = api.list_heals(pb::ListHealsRequest {}).await.unwrap().into_inner().heals;
    assert_eq!((heals[0].cause.as_str(), heals[0].volume_id.as_str()), ("exit", "volume-1"));
    let stats = api.get_stats(pb::GetStatsRequest {}).await.unwrap().into_inner();
    assert!(!stats.values.is_empty());

    // What is gone at the source is never counted as brought in.
    std::fs::remove_dir_all(node.source().join("data/d")).unwrap();
    let gone = warm(&mut api, &[&format!("{}/d", target(1))]).await;
    let gone = gone.unwrap();
    assert_eq!(
        (gone.files_total, gone.files_done, gone.failed, gone.bytes_done),
        (20, 1, 19, 0),
        "one is empty"
    );
    assert!(gone.errors.iter().all(|error| error.contains("does not exist")), "{:?}", gone.errors);
    app.shutdown().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_of_metrics_counts_what_happens() {
    let node = Node::new();
    node.file("data/f", b"hello");
    let (app, agent) = node.start().await;
    let (_mount, worker) = node.mount(&agent, node.publish(1, "data", &[])).await;
    look_up(&app.volumes, &worker, "f");
    worker.send(link::worker::FromWorker::Counted(link::worker::Counts {
        reads_hit: 4711,
        ..Default::default()
    }));
    until("it is counted", || app.volumes.mounts()[0].state().counts.reads_hit == 4711).await;
    let mut page = tokio::net::TcpStream::connect(app.metrics_address.unwrap()).await.unwrap();
    page.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut text = String::new();
    page.read_to_string(&mut text).await.unwrap();
    assert!(text.starts_with("HTTP/1.1 200"), "{text}");
    for wanted in ["millpond_volumes 1", "4711", "tier=\"ssd\""] {
        assert!(text.contains(wanted), "no {wanted} in {text}");
    }
    app.shutdown().await;
}
