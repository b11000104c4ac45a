//! What the runtime made of the security contexts, what the logs tell, and what a tenant can reach.

use super::kinds::attributes;
use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::Pod;
use crate::cluster::view::status;
use crate::mountinfo;
use anyhow::{Context, Result, ensure};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use testkit::s3::SECRET_KEY;

const AGENT_UID: &str = "65532";

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    suite.claim("security")?;
    suite.kubectl.apply(&[Pod::sleeper(TENANT, "security").claim("security").object()])?;
    suite.kubectl.wait_ready(TENANT, "security")?;
    contexts(suite)?;
    other_tenant(suite)?;
    suite.kubectl.delete("pod", TENANT, "security")?;
    suite.kubectl.wait_gone("pod", TENANT, "security")?;
    suite.kubectl.delete("pvc", TENANT, "security")?;
    secrets_in_logs(suite)
}

/// As the kernel sees the agent and its workers.
fn contexts(suite: &Suite) -> Result<()> {
    let view = suite.view();
    let agent = view.only("node-agent")?;
    let workers = view.workers()?;
    ensure!(!workers.is_empty(), "no worker is at work");
    for (what, pid) in workers.iter().map(|&pid| ("fuse-worker", pid)).chain([("node-agent", agent)]) {
        let field = |name: &str| status(pid, name);
        println!(
            "    {what}: Uid {}, Gid {}, CapPrm {}, CapEff {}, CapBnd {}, Seccomp {}, NoNewPrivs {}",
            field("Uid")?,
            field("Gid")?,
            field("CapPrm")?,
            field("CapEff")?,
            field("CapBnd")?,
            field("Seccomp")?,
            field("NoNewPrivs")?,
        );
        for name in ["Uid", "Gid"] {
            ensure!(
                field(name)?.split_whitespace().all(|id| id == AGENT_UID),
                "{what}: {name} {}",
                field(name)?
            );
        }
        for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            ensure!(u64::from_str_radix(&field(name)?, 16)? == 0, "{what}: {name} {}", field(name)?);
        }
        ensure!(field("Seccomp")? == "2" && field("NoNewPrivs")? == "1", "{what} is not confined");
        let root = mountinfo::read(&pid.to_string())?.into_iter().find(|m| m.point == Path::new("/"));
        let root = root.context("a container has a root")?;
        ensure!(
            root.options.split(',').any(|o| o == "ro"),
            "{what}: the root file system is {}",
            root.options
        );
    }
    let mounts = mountinfo::read(&agent.to_string())?;
    let interesting = |m: &&mountinfo::Mount| {
        !["proc", "sysfs", "cgroup", "cgroup2", "mqueue", "devpts"].contains(&m.kind.as_str())
    };
    let shown: Vec<_> = mounts
        .iter()
        .filter(interesting)
        .map(|m| {
            format!("{} ({}, {})", m.point.display(), m.kind, m.options.split(',').next().unwrap_or_default())
        })
        .collect();
    println!("    mounts of the agent: {}", shown.join(", "));
    for mount in mounts.iter().filter(interesting) {
        let expected = ["/var/lib/millpond", "/run/millpond", "/dev", "/proc", "/sys"];
        let rw = mount.options.split(',').any(|o| o == "rw");
        if rw && !expected.iter().any(|p| mount.point.starts_with(p)) {
            // The runtime's own files (/etc/hosts and the like) are mounted writable, but they are root's.
            let point = PathBuf::from(format!("/proc/{agent}/root{}", mount.point.display()));
            let meta = std::fs::metadata(&point).with_context(|| point.display().to_string())?;
            let theirs = meta.uid().to_string() == AGENT_UID || meta.mode() & 0o002 != 0;
            ensure!(!theirs, "the agent can write to {}", mount.point.display());
        }
    }
    ensure!(
        !mounts.iter().any(|m| m.point.starts_with("/var/lib/kubelet")),
        "the agent sees kubelet's directory"
    );
    ensure!(
        !mounts.iter().any(|m| m.point.to_string_lossy().contains("serviceaccount")),
        "the agent has a token for the API server"
    );
    Ok(())
}

/// Cached on the node or not: without credentials of its own a tenant gets nothing.
fn other_tenant(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    suite.tenant(OTHER_TENANT)?;
    let read = "cat /data/d000/f00000 | wc -c";
    let mine = Pod::new(TENANT, "warm", read).inline(attributes(suite), Some(S3_SECRET));
    ensure!(k.run_pod(TENANT, "warm", &mine.object())?.trim() == "100000", "the first tenant cannot read");
    suite.bucket.reset()?;
    // The same source, without a secret, and with one that does not fit.
    k.apply(&[crate::cluster::objects::secret(OTHER_TENANT, "wrong", "a-key-of-another-tenant")])?;
    for (name, secret) in [("no-credentials", None), ("wrong-credentials", Some("wrong"))] {
        k.apply(&[Pod::new(OTHER_TENANT, name, read).inline(attributes(suite), secret).object()])?;
        k.wait_event(OTHER_TENANT, "Pod", name, &["s3://"])?;
        let pod = k.get("pod", OTHER_TENANT, name)?;
        ensure!(pod["status"]["phase"] == "Pending", "the other tenant's pod started: {}", pod["status"]);
        k.delete("pod", OTHER_TENANT, name)?;
        k.wait_gone("pod", OTHER_TENANT, name)?;
    }
    println!(
        "    another tenant with the same source: neither pod started; {} bytes fetched",
        suite.bucket.stats()?.bytes_get
    );
    k.run(&["delete", "namespace", OTHER_TENANT]).map(drop)
}

/// All logs of this run so far, of all containers and all parts of Kubernetes, and the Events.
fn secrets_in_logs(suite: &Suite) -> Result<()> {
    let (mut files, mut bytes) = (0, 0);
    // kubectl apply's own annotation and etcd hold secrets; logs must not.
    let places = [suite.machine().path("/var/log/pods"), suite.machine().places().logs()];
    let mut open: Vec<PathBuf> = places.to_vec();
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(std::fs::read_dir(&path)?.filter_map(|e| Some(e.ok()?.path())));
            continue;
        }
        let Ok(text) = std::fs::read(&path) else { continue }; // rotated meanwhile
        files += 1;
        bytes += text.len();
        for secret in [SECRET_KEY, "a-key-of-another-tenant", "not-the-key"] {
            let found = text.windows(secret.len()).any(|w| w == secret.as_bytes());
            ensure!(!found, "{} holds the value of a secret", path.display());
        }
    }
    let events = suite.kubectl.run(&["get", "events", "-A", "-o", "json"])?;
    ensure!(!events.contains(SECRET_KEY), "an Event holds the value of a secret");
    println!("    {files} log files, {bytes} bytes, and the Events: no value of a secret");
    ensure!(files > 10, "too few logs were looked at");
    Ok(())
}
