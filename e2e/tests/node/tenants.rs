//! Tenants of one node: what one has brought into the cache another reads with credentials that open the source, or
//! not at all.

use crate::{node_with, seed};
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Mounted, Node, Volume};
use e2e::scenario::noisy;
use e2e::tree::{Shape, Tree};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use testkit::s3::{Config, Directory, Key, Rights, Server};
use tonic::{Code, Status};

/// As kubelet publishes a volume that a pod of namespace `team` brings along.
fn publish_inline(
    node: &Node,
    volume: &Volume,
    pod: &str,
    secrets: &[(&str, &str)],
) -> Result<Mounted, Status> {
    let target = node.target(volume, pod).map_err(|e| Status::internal(e.to_string()))?;
    let mut request = node.publish_request(volume, &target);
    request.secrets = secrets.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    for (key, value) in [("ephemeral", "true"), ("pod.name", pod), ("pod.namespace", "team")] {
        request.volume_context.insert(format!("csi.storage.k8s.io/{key}"), value.to_owned());
    }
    node.plugin().publish(request)?;
    Ok(Mounted { id: volume.id.clone(), target })
}

fn inline(node: &Node, n: u8) -> Volume {
    let context = node.parameters("set", &[]).into_iter().collect();
    Volume { id: format!("csi-{}", format!("{n:02x}").repeat(32)), context }
}

#[test]
fn an_inline_volume_reads_nobodys_cache_without_credentials_of_its_own() -> Result<()> {
    let [(_, id), (_, secret)] = e2e::node::secrets();
    // The worst case: everything is cached, and the agent's own keys open the source.
    let mut node = Node::start(AgentOptions { environment: Some((id, secret)), ..AgentOptions::default() })?;
    let tree = Tree::generated("", Shape::LITTLE);
    node.server.add(&tree, "set")?;
    let first = node.volume("a", "set", &[])?;
    node.pod(&first)?.verify(&tree, 2)?.ensure_all(&tree)?;

    // A class without a secret may use the agent's keys …
    let volume = node.create("environment", "set", &[])?;
    let target = node.target(&volume, "pod-environment")?;
    let mut request = node.publish_request(&volume, &target);
    request.secrets.clear();
    node.plugin().publish(request)?;
    node.plugin().unpublish(&volume.id, &target)?;

    // … an inline volume may not, nor with a key id that it has heard of.
    let guesses: [&[(&str, &str)]; 2] = [&[], &[("accessKeyId", id), ("secretAccessKey", "guessed")]];
    for (n, secrets) in guesses.into_iter().enumerate() {
        let volume = inline(&node, n as u8);
        let answer = publish_inline(&node, &volume, "pod-b", secrets);
        let status = answer.err().context("another tenant's cache was opened")?;
        assert_eq!(status.code(), Code::PermissionDenied, "{status:?}");
        println!("{}", status.message());
    }

    // With keys that open the source it shares what is there.
    node.server.reset()?;
    let volume = inline(&node, 9);
    let mounted = publish_inline(&node, &volume, "pod-c", &e2e::node::secrets())?;
    node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
    assert_eq!(node.server.stats()?.of("GetObject"), 0);
    node.plugin().unpublish(&mounted.id, &mounted.target)?;
    ensure!(!node.places().logs().contains("guessed"), "a secret is in a log");
    node.finish()
}

#[test]
fn an_endpoint_that_a_star_covers_does_not_lead_to_the_node() -> Result<()> {
    let node = Node::start(AgentOptions { endpoints: &["http://*"], ..AgentOptions::default() })?;
    let (_, port) = node.server.address().rsplit_once(':').context("an address has a port")?;
    let by_name = format!("http://localhost:{port}");
    node.server.reset()?;
    for (n, endpoint) in [node.server.endpoint(), by_name].iter().enumerate() {
        let mut volume = inline(&node, n as u8);
        volume.context.insert("endpoint".into(), endpoint.clone());
        let status = publish_inline(&node, &volume, "pod", &e2e::node::secrets()).err();
        let status = status.with_context(|| format!("{endpoint} was asked"))?;
        println!("{status:?}");
        assert!(matches!(status.code(), Code::PermissionDenied | Code::InvalidArgument), "{status:?}");
        assert!(status.message().contains("loopback"), "{status:?}");
        assert!(status.message().contains("allow.endpoints"), "what to do: {status:?}");
    }
    let asked = node.server.stats()?.requests;
    assert!(asked.is_empty(), "nothing was sent: {asked:?}");
    node.finish()
}

/// A store of its own keys, which can be exchanged; what lies in it is the node's.
struct Keyed {
    server: Option<Server>,
    address: SocketAddr,
    dir: PathBuf,
}

impl Keyed {
    fn start(node: &Node, keys: Vec<Key>) -> Result<Self> {
        let dir = node.server.dir().clone();
        let server = Self::serve(node, &dir, ([127, 0, 0, 1], 0).into(), keys)?;
        Ok(Self { address: server.address(), server: Some(server), dir })
    }

    fn serve(node: &Node, dir: &Path, listen: SocketAddr, keys: Vec<Key>) -> Result<Server> {
        let config = Config { listen, keys, ..Config::default() };
        let bucket = Directory::new(dir, Duration::from_millis(200));
        Ok(node.runtime().block_on(Server::start(config.bucket("data", bucket)))?)
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// From now on it knows these keys and no others.
    fn exchange(&mut self, node: &Node, keys: &[Key]) -> Result<()> {
        self.server = None;
        // Its listener is closed by a task of its own.
        wait_until(Duration::from_secs(30), || {
            self.server = Self::serve(node, &self.dir, self.address, keys.to_vec()).ok();
            self.server.is_some()
        });
        ensure!(self.server.is_some(), "the server did not come back on {}", self.address);
        Ok(())
    }
}

fn publish_with(node: &Node, volume: &Volume, target: &Path, secret: &[(&str, &str)]) -> Result<(), Status> {
    let mut request = node.publish_request(volume, target);
    request.secrets = secret.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    node.plugin().publish(request)
}

#[test]
fn a_secret_that_changed_is_used_without_a_remount() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let key = |id: &str| Key::new(id, &format!("secret-{id}"), Rights::All);
    let mut store = Keyed::start(&node, vec![key("old"), key("new")])?;

    let volume = node.create("v", "set", &[("endpoint", store.endpoint().as_str())])?;
    let target = node.target(&volume, "pod")?;
    let publish = |node: &Node, id: &str, secret: &str| {
        publish_with(node, &volume, &target, &[("accessKeyId", id), ("secretAccessKey", secret)])
    };
    publish(&node, "old", "secret-old")?;
    // A new one that does not work changes nothing.
    publish(&node, "new", "mistyped")?;
    publish(&node, "new", "secret-new")?;
    let in_use = || node.places().logs().contains("a changed secret is in use");
    ensure!(wait_until(Duration::from_secs(30), in_use), "the new secret was not taken");

    // The old one is revoked.
    store.exchange(&node, &[key("new")])?;
    let mounted = Mounted { id: volume.id.clone(), target: target.clone() };
    node.pod(&mounted)?.verify(&tree, 2)?.ensure_all(&tree)?;
    node.plugin().unpublish(&mounted.id, &mounted.target)?;
    ensure!(!node.places().logs().contains("secret-new"), "a secret is in a log");
    node.finish()
}

#[test]
fn a_second_pod_may_bring_newer_keys_to_a_volume_that_is_written_to() -> Result<()> {
    let (mut node, _) = node_with("set")?;
    let key = |id: &str| Key::new(id, &format!("secret-{id}"), Rights::All);
    let mut store = Keyed::start(&node, vec![key("old"), key("new")])?;
    let endpoint = store.endpoint();
    let volume = node.create("v", "set", &[("endpoint", endpoint.as_str()), ("access", "readWrite")])?;
    let keys = |id, secret| [("accessKeyId", id), ("secretAccessKey", secret)];
    let one = node.publish_writable_with(&volume, "one", &keys("old", "secret-old"))?;
    let refused = node.publish_writable_with(&volume, "guesses", &keys("new", "guessed"));
    ensure!(
        refused.is_err_and(|status| status.code() == Code::PermissionDenied),
        "a guessed secret opens it"
    );
    let two = node.publish_writable_with(&volume, "two", &keys("new", "secret-new"))?;
    std::fs::write(two.target.join("both"), b"from two")?;
    ensure!(std::fs::read(one.target.join("both"))? == b"from two");
    // The old one is revoked.
    store.exchange(&node, &[key("new")])?;
    std::fs::write(one.target.join("both"), b"from one")?;
    ensure!(std::fs::read(two.target.join("both"))? == b"from one");
    node.finish()
}

#[test]
fn readers_wait_while_a_session_token_has_expired_and_go_on_with_the_next() -> Result<()> {
    let (mut node, tree) = node_with("set")?;
    let key = |token: &str| Key::new("session", "secret", Rights::All).with_token(token);
    let mut store = Keyed::start(&node, vec![key("token-1")])?;
    let volume = node.create("v", "set", &[("endpoint", store.endpoint().as_str())])?;
    let target = node.target(&volume, "pod")?;
    let publish = |node: &Node, token: &str| {
        let pairs = [("accessKeyId", "session"), ("secretAccessKey", "secret"), ("sessionToken", token)];
        publish_with(node, &volume, &target, &pairs)
    };
    publish(&node, "token-1")?;
    let mounted = Mounted { id: volume.id.clone(), target: target.clone() };
    let pod = node.pod(&mounted)?;
    // Nothing was asked for since the old one expired: no question waits.
    store.exchange(&node, &[key("token-2")])?;
    publish(&node, "token-2")?;
    pod.verify(&tree, 2)?.ensure_all(&tree)?;
    // After it has expired: a cold reader waits for the next republish, which brings the new one.
    node.agent().evict_all()?;
    store.exchange(&node, &[key("token-3")])?;
    let waits = || node.places().logs().contains("waiting for a renewed secret");
    ensure!(!waits(), "a question waited while the token was good");
    let reader = pod.start_verify(&tree, 2, 1)?;
    ensure!(wait_until(Duration::from_secs(30), waits), "no question waits for a renewed secret");
    // The same again, and another that is not good any more: kubelet may be ahead of the program that renews the secret.
    publish(&node, "token-2")?;
    publish(&node, "token-1")?;
    let refused = || node.places().logs().contains("a changed secret is not used");
    ensure!(wait_until(Duration::from_secs(30), refused), "a token that has expired was taken");
    publish(&node, "token-3")?;
    reader.finish(Duration::from_secs(60))?.ensure_all(&tree)?;
    drop(pod);
    node.plugin().unpublish(&mounted.id, &mounted.target)?;
    ensure!(!node.places().logs().contains("token-"), "a token is in a log");
    node.finish()
}

#[test]
fn beside_tenants_that_mean_harm_no_call_fails_and_the_agent_stays_small() -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    // How much throughput the others keep is for `make noisy` to say, which has the machine for itself.
    let report = noisy::run(&mut node, 1, 60, seed())?;
    println!("{report}");
    report.ensure_memory()?;
    node.finish()
}
