//! Builds of two versions on one node, and volumes that use what only the later one knows: a parameter that may be
//! ignored (`nextHint`), one that may not (`nextRule`), a value of an enum (profile `next`) and a scheme (`next://`).

use crate::node_with_options;
use crate::workload::judge;
use anyhow::{Context, Result, bail, ensure};
use e2e::clock::wait_until;
use e2e::mountinfo;
use e2e::node::{AgentOptions, Mounted, Node, Outcome, Version};
use e2e::pod::Pod;
use e2e::tree::Tree;
use std::fs;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(30);

fn of(version: Version, plugin: Version) -> AgentOptions {
    AgentOptions { version, plugin, ..AgentOptions::default() }
}

/// Waits until the node's agent serves each mount.
fn served(node: &Node) -> Result<()> {
    let pid = node.agent().pid();
    let all = || node.agent().status().is_ok_and(|s| s.pid == pid) && node.agent_serves_all();
    ensure!(wait_until(PATIENCE, all), "not every mount is served: {:?}", node.agent().volumes());
    Ok(())
}

/// The scheme of the next version, on a directory below the node's allowed root.
fn next_scheme(node: &mut Node) -> Result<Mounted> {
    let dir = node.places().buckets().join("directory");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("file"), b"next")?;
    let source = format!("next://{}", dir.display());
    let mut parameters = node.parameters("", &[("source", source.as_str())]);
    parameters.retain(|key, _| key != "endpoint" && key != "allowHttp");
    let volume = node.create_with("scheme", &parameters)?;
    Ok(node.publish_with(&volume, "pod-scheme", &[])?)
}

fn pods(node: &mut Node, mounted: &[&Mounted]) -> Result<Vec<Pod>> {
    mounted.iter().map(|m| node.pod(m)).collect()
}

fn verify(pods: &[Pod], tree: &Tree) -> Result<()> {
    pods.iter().try_for_each(|pod| pod.verify(tree, 2)?.ensure_all(tree))
}

/// The agent of this version does not take over, and says of which volume it is, and why.
fn is_refused(node: &mut Node, mounted: &Mounted, why: &str) -> Result<()> {
    let pid = node.agent().pid();
    node.start_standby(&of(Version::This, Version::Next))?;
    let outcome = node.decide()?;
    let Outcome::Failed(status) = outcome else { bail!("{why}: {outcome:?}") };
    ensure!(!status.success(), "{why}: it ended with {status}");
    let log = fs::read_to_string(node.places().log("node-agent"))?;
    let logged = log.lines().any(|line| line.contains(&mounted.id) && line.contains(why));
    ensure!(logged, "the log does not name {} and {why}:\n{log}", mounted.id);
    ensure!(node.agent().pid() == pid, "another agent serves");
    served(node)
}

#[test]
fn what_only_the_next_version_knows_is_ignored_by_this_one_or_keeps_the_next_ones_agent() -> Result<()> {
    let (mut node, tree) = node_with_options("set", of(Version::Next, Version::Next))?;
    let plain = node.volume("plain", "set", &[("profile", "large")])?;
    let hinted = node.volume("hinted", "set", &[("nextHint", "h"), ("uid", "7")])?;
    let pods_of_both = pods(&mut node, &[&plain, &hinted])?;
    verify(&pods_of_both, &tree)?;
    // There and back, twice: what this version ignored is not lost on the way.
    for version in [Version::This, Version::Next, Version::This, Version::Next] {
        node.hand_over(&of(version, Version::Next)).with_context(|| format!("to {version:?}"))?;
        served(&node)?;
        verify(&pods_of_both, &tree)?;
    }
    let ruled = node.volume("ruled", "set", &[("nextRule", "r")])?;
    is_refused(&mut node, &ruled, "nextRule")?;
    verify(&pods_of_both, &tree)?;
    node.unpublish(&ruled)?;
    let valued = node.volume("valued", "set", &[("profile", "next")])?;
    is_refused(&mut node, &valued, "profile")?;
    node.unpublish(&valued)?;
    let scheme = next_scheme(&mut node)?;
    ensure!(fs::read(scheme.target.join("file"))? == b"next");
    is_refused(&mut node, &scheme, "scheme")?;
    node.unpublish(&scheme)?;
    // Without them there is nothing in its way.
    node.hand_over(&of(Version::This, Version::Next))?;
    served(&node)?;
    verify(&pods_of_both, &tree)?;
    drop(pods_of_both);
    node.finish()
}

/// csi-plugin of that version, in the place of the one before.
fn upgrade_plugin(node: &mut Node, version: Version) -> Result<()> {
    node.stop_plugin()?;
    node.options().plugin = version;
    node.start_plugin()?;
    served(node).with_context(|| format!("csi-plugin of {version:?}"))
}

fn upgrade_agent(node: &mut Node, version: Version) -> Result<()> {
    let plugin = node.options().plugin;
    node.hand_over(&of(version, plugin)).with_context(|| format!("agent of {version:?}"))?;
    served(node)
}

#[test]
fn agent_and_plugin_are_upgraded_in_either_order_and_back_and_no_call_fails() -> Result<()> {
    let (mut node, tree) = node_with_options("set", AgentOptions::default())?;
    let mut volumes = Vec::new();
    for profile in ["large", "small"] {
        let more = [("profile", profile), ("metadataTtl", "5m"), ("uid", "10001"), ("fileMode", "0440")];
        let volume = node.create(profile, "set", &more)?;
        let mounted = node.publish(&volume, profile)?;
        let pod = node.pod(&mounted)?;
        let running = pod.oracle(&tree, &["--alarm"])?;
        volumes.push((volume, pod, running));
    }
    let before = mountinfo::below(&node.places().kubelet())?.len();
    for plugin_first in [true, false] {
        for version in [Version::Next, Version::This] {
            let steps = [upgrade_plugin, upgrade_agent];
            let order = if plugin_first { [0, 1] } else { [1, 0] };
            for step in order {
                steps[step](&mut node, version).with_context(|| format!("plugin first: {plugin_first}"))?;
                // Kubelet repeats its publishes.
                for (volume, ..) in &volumes {
                    node.publish(volume, &volume.context["profile"]).with_context(|| {
                        format!("step {step} to {version:?}, plugin first: {plugin_first}")
                    })?;
                }
            }
        }
    }
    assert_eq!(mountinfo::below(&node.places().kubelet())?.len(), before, "mounts were stacked");
    for (_, _pod, running) in volumes {
        judge(running)?;
    }
    node.finish()
}

#[test]
fn a_broker_passes_on_what_only_the_next_version_knows() -> Result<()> {
    let (mut node, tree) = node_with_options("set", of(Version::Next, Version::Next))?;
    let more = [("nextHint", "h"), ("nextRule", "r"), ("profile", "next")];
    let ruled = node.create("ruled", "set", &more)?;
    let mounted = node.publish(&ruled, "pod-ruled")?;
    let plain = node.volume("plain", "set", &[])?;
    let all = pods(&mut node, &[&mounted, &plain])?;
    // The way back, for the broker alone.
    node.stop_plugin()?;
    node.options().plugin = Version::This;
    node.start_plugin()?;
    served(&node)?;
    let status = node.publish(&ruled, "pod-ruled").err().context("this version does not know it")?;
    ensure!(status.code() == tonic::Code::Unavailable, "{status}");
    // It gives them to an agent that understands them; killed, too.
    node.hand_over(&of(Version::Next, Version::This))?;
    served(&node)?;
    verify(&all, &tree)?;
    node.kill_agent()?;
    node.options().version = Version::Next;
    node.start_agent()?;
    served(&node)?;
    verify(&all, &tree)?;
    // And to the next version's broker.
    node.stop_plugin()?;
    node.options().plugin = Version::Next;
    node.start_plugin()?;
    served(&node)?;
    node.publish(&ruled, "pod-ruled")?;
    verify(&all, &tree)?;
    drop(all);
    node.finish()
}

#[test]
fn a_volume_that_the_agent_does_not_understand_is_refused_and_others_are_not() -> Result<()> {
    let (mut node, tree) = node_with_options("set", of(Version::This, Version::Next))?;
    for (name, more, why) in
        [("ruled", ("nextRule", "r"), "nextRule"), ("valued", ("profile", "next"), "profile")]
    {
        let volume = node.create(name, "set", &[more])?;
        let status = node.publish(&volume, "pod").err().with_context(|| format!("{name} was published"))?;
        ensure!(status.message().contains(why) && status.message().contains("upgrade"), "{status}");
    }
    let status = next_scheme(&mut node).err().context("the scheme was published")?.to_string();
    ensure!(status.contains("scheme") && status.contains("upgrade"), "{status}");
    let plain = node.volume("plain", "set", &[])?;
    let hinted = node.volume("hinted", "set", &[("nextHint", "h")])?;
    let both = pods(&mut node, &[&plain, &hinted])?;
    verify(&both, &tree)?;
    drop(both);
    node.finish()
}
