//! `millpond doctor`: looks for what is wrong on this node and says what to do about it.

use crate::client::{Client, connect};
use crate::output::{Format, ago, bytes, print, print_json, table};
use crate::staging;
use anyhow::Result;
use proto::agent::v1 as pb;
use serde_json::json;
use std::net::ToSocketAddrs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::time::Instant;

#[derive(clap::Args)]
pub(crate) struct Options {
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
    /// Endpoints to reach, such as https://s3.eu-central-1.amazonaws.com (repeatable).
    #[arg(long)]
    endpoint: Vec<url::Url>,
    /// Cache directories to look at; default: those of the running agent.
    #[arg(long)]
    cache: Vec<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Grade {
    Fine,
    /// Works, with less.
    Less,
    Broken,
}

struct Finding {
    what: String,
    grade: Grade,
    saw: String,
    todo: String,
}

impl Finding {
    fn new(what: &str, grade: Grade, saw: impl Into<String>, todo: impl Into<String>) -> Self {
        Self { what: what.to_owned(), grade, saw: saw.into(), todo: todo.into() }
    }
    fn fine(what: &str, saw: impl Into<String>) -> Self {
        Self::new(what, Grade::Fine, saw, "")
    }
}

pub(crate) async fn run(api: &Path, options: Options) -> Result<ExitCode> {
    let mut findings = vec![kernel(), fuse_device(), descriptors(), request_timeout()];
    findings.extend(features());
    let mut caches = options.cache.clone();
    match connect(api).await {
        Err(error) => findings.push(Finding::new(
            "node agent",
            Grade::Broken,
            format!("{error:#}"),
            "start it (on Kubernetes: look at the agent DaemonSet's pod on this node)",
        )),
        Ok(mut agent) => {
            let status = agent.get_status(pb::GetStatusRequest {}).await?.into_inner();
            findings
                .push(Finding::fine("node agent", format!("version {}, pid {}", status.version, status.pid)));
            findings.push(match status.broker_connected {
                true => Finding::fine("mount broker", "connected"),
                false => Finding::new(
                    "mount broker",
                    Grade::Broken,
                    "not connected",
                    "start csi-plugin in node mode with the broker socket of the agent's configuration",
                ),
            });
            let cache = agent.get_cache(pb::GetCacheRequest {}).await?.into_inner();
            for tier in &cache.tiers {
                if tier.degraded {
                    let what = format!("cache tier {}", tier.name);
                    let todo = "look at the disk (dmesg, SMART); readers go past it meanwhile";
                    findings.push(Finding::new(&what, Grade::Broken, "failing", todo));
                }
                caches.extend(tier.paths.iter().map(PathBuf::from));
            }
            findings.extend(sources(&mut agent).await?);
            findings.extend(staged(&mut agent).await?);
            let volumes = agent.list_volumes(pb::ListVolumesRequest {}).await?.into_inner().volumes;
            for v in volumes {
                let state = v.worker.map(|w| w.state).unwrap_or_default();
                if state != "serving" {
                    let todo =
                        "see the agent's log for this volume; a failed mount is made anew when its pod is";
                    findings.push(Finding::new(
                        &format!("volume {}", v.volume_id),
                        Grade::Broken,
                        state,
                        todo,
                    ));
                }
            }
        }
    }
    findings.extend(caches.iter().map(|path| cache_directory(path)));
    findings.extend(options.endpoint.iter().map(endpoint));
    show(&findings, options.output)?;
    let broken = findings.iter().any(|f| f.grade == Grade::Broken);
    Ok(if broken { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn show(findings: &[Finding], format: Format) -> Result<()> {
    let word = |g| match g {
        Grade::Fine => "fine",
        Grade::Less => "less",
        Grade::Broken => "BROKEN",
    };
    if format == Format::Json {
        let rows = findings.iter().map(
            |f| json!({"check": f.what, "grade": word(f.grade).to_lowercase(), "saw": f.saw, "todo": f.todo}),
        );
        return print_json(&rows.collect());
    }
    let mut t = table(&["check", "", "saw", "what to do"]);
    for f in findings {
        t.add_row([f.what.as_str(), word(f.grade), f.saw.as_str(), f.todo.as_str()]);
    }
    print(t)
}

fn kernel_version() -> Option<(u32, u32)> {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn kernel() -> Finding {
    let release = rustix::system::uname().release().to_string_lossy().into_owned();
    match kernel_version() {
        Some(v) if v >= (6, 9) => Finding::fine("kernel", release),
        Some(v) if v >= (5, 10) => Finding::new(
            "kernel",
            Grade::Less,
            release,
            "fine; 6.9 and later read whole files at the disk's own speed (passthrough)",
        ),
        Some(_) => Finding::new("kernel", Grade::Broken, release, "use Linux 5.10 or later"),
        None => Finding::new("kernel", Grade::Less, release, "unknown version format"),
    }
}

/// What is probed and not guessed from the version is probed by the parts that use it; these follow from the version.
fn features() -> Vec<Finding> {
    let Some(version) = kernel_version() else { return Vec::new() };
    let known = [
        ("Landlock", (5, 13), "workers are confined by seccomp alone"),
        ("MADV_POPULATE_WRITE", (5, 14), "buffers are touched page by page instead"),
        ("FUSE passthrough", (6, 9), "whole files are read through the kernel's page cache of the mount"),
    ];
    let row = |(name, since, without): (&str, (u32, u32), &str)| match version >= since {
        true => Finding::fine(name, format!("since {}.{}", since.0, since.1)),
        false => Finding::new(name, Grade::Less, format!("needs {}.{}", since.0, since.1), without),
    };
    known.into_iter().map(row).collect()
}

fn fuse_device() -> Finding {
    use rustix::fs::{Mode, OFlags, open};
    match open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(_) => Finding::fine("/dev/fuse", "opens"),
        Err(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::NXIO) => {
            Finding::new("/dev/fuse", Grade::Broken, "missing", "load the fuse module: modprobe fuse")
        }
        Err(e) => {
            Finding::new("/dev/fuse", Grade::Broken, e.to_string(), "run this as root, on the node itself")
        }
    }
}

fn descriptors() -> Finding {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).maximum.unwrap_or(u64::MAX);
    match limit {
        n if n >= 65_536 => Finding::fine("open files limit", n.to_string()),
        n => Finding::new(
            "open files limit",
            Grade::Less,
            n.to_string(),
            "raise LimitNOFILE to 65536 for the agent",
        ),
    }
}

/// An administrator's timeout aborts a connection while a worker is being replaced or the store is slow.
fn request_timeout() -> Finding {
    let read = |name: &str| -> u64 {
        let text = std::fs::read_to_string(format!("/proc/sys/fs/fuse/{name}")).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    match (read("default_request_timeout"), read("max_request_timeout")) {
        (0, 0) => Finding::fine("FUSE request timeout", "none"),
        (default, max) => Finding::new(
            "FUSE request timeout",
            Grade::Broken,
            format!("default {default} s, max {max} s"),
            "set fs.fuse.default_request_timeout and fs.fuse.max_request_timeout to 0: they abort mounts during a stall",
        ),
    }
}

/// A node may have a thousand that do not answer, and a person waits.
const SOURCES_LIMIT: Duration = Duration::from_secs(60);

/// Of each source that this node's volumes read from the first step that fails, or what all of them saw.
async fn sources(agent: &mut Client) -> Result<Vec<Finding>> {
    let mut stream = match agent.check_sources(pb::CheckSourcesRequest {}).await {
        Ok(stream) => stream.into_inner(),
        // An agent of the version before.
        Err(status) if status.code() == tonic::Code::Unimplemented => return Ok(Vec::new()),
        Err(status) => return Err(status.into()),
    };
    let (mut findings, until) = (Vec::new(), Instant::now() + SOURCES_LIMIT);
    loop {
        let source = match tokio::time::timeout_at(until, stream.message()).await {
            Ok(Ok(Some(source))) => source,
            Ok(Ok(None)) => break,
            Ok(Err(status)) => return Err(status.into()),
            Err(_) => {
                let saw = format!("only {} were asked within {} s", findings.len(), SOURCES_LIMIT.as_secs());
                let todo = "mend what does not answer, then ask again";
                findings.push(Finding::new("sources", Grade::Less, saw, todo));
                break;
            }
        };
        let what = match source.volumes {
            1 => format!("source {}", source.source),
            many => format!("source {} ({many} volumes)", source.source),
        };
        let failed = source.steps.iter().find(|step| !step.works);
        findings.push(match failed {
            Some(step) => Finding::new(&what, Grade::Broken, step.saw.clone(), todo(&step.step)),
            None => {
                let saw: Vec<_> = source.steps.iter().map(|step| step.saw.as_str()).collect();
                Finding::fine(&what, saw.join("; "))
            }
        });
    }
    findings.sort_by(|one, other| one.what.cmp(&other.what));
    Ok(findings)
}

fn todo(step: &str) -> &'static str {
    match step {
        "name" => "check 'endpoint' and 'region' of the class, and the name servers of this node",
        "connection" => {
            "check 'endpoint', routes, firewall and NetworkPolicy between this node and it; for an authority of its own put \
             caBundle into the secret"
        }
        "clock" => "synchronise this node's clock (chrony, systemd-timesyncd): signatures have a time",
        _ => {
            "do what the message says; a changed secret is used with the next republish, within some minutes"
        }
    }
}

/// What waits longer than this is said: attempts are made every 15 s.
const LAGS: Duration = Duration::from_secs(300);

/// What was written on this node and does not reach its store by itself.
async fn staged(agent: &mut Client) -> Result<Vec<Finding>> {
    // None of an agent of the version before.
    let Some(all) = staging::areas(agent, "", false).await? else { return Ok(Vec::new()) };
    let mut findings: Vec<Finding> = all.iter().flat_map(|listed| judged(&listed.area)).collect();
    if findings.is_empty() {
        findings.push(Finding::fine("staged files", "nothing lags, and there is no conflict"));
    }
    Ok(findings)
}

fn judged(area: &pb::StagingArea) -> Vec<Finding> {
    let volume = &area.volume_id;
    let what = format!("staged files of {volume}");
    let broken = |saw: String, todo: String| Finding::new(&what, Grade::Broken, saw, todo);
    if !area.problem.is_empty() {
        let todo = format!("nothing of it is lost by that: look at the disk, and keep {}", area.directory);
        return vec![broken(area.problem.clone(), todo)];
    }
    let mut findings = Vec::new();
    if area.conflicts > 0 {
        let saw =
            format!("somebody else has changed {} files in the store that were changed here", area.conflicts);
        let todo = format!(
            "`millpond staging list {volume} --files` names them; copy them with `millpond staging export {volume} --to DIR`, then \
             `millpond staging discard {volume} PATH`: theirs is seen again"
        );
        findings.push(broken(saw, todo));
    }
    let others = area.files.saturating_sub(area.conflicts);
    if others > 0 && !area.sending {
        let saw = format!("{others} files, {} are left of a pod that is gone", bytes(area.bytes));
        let how = match area.described {
            true => format!(", or run `millpond staging upload {volume} --secret-file FILE`"),
            false => format!(", or copy them with `millpond staging export {volume} --to DIR`"),
        };
        findings.push(broken(saw, format!("publish the volume on this node again{how}")));
    } else if others > 0 && lags(area.oldest_ms) {
        let why = match area.failure.as_str() {
            "" => "no attempt has failed so far".to_owned(),
            failure => staging::shown(failure.as_bytes()),
        };
        let saw = format!("{others} files wait, the oldest since {} ({why})", ago(area.oldest_ms));
        let todo = format!(
            "mend what the store says; it is tried every 15 s, and now by `millpond staging upload {volume}`"
        );
        findings.push(broken(saw, todo));
    }
    findings
}

fn lags(since_ms: i64) -> bool {
    let since = UNIX_EPOCH + Duration::from_millis(since_ms.max(0) as u64);
    since_ms > 0 && SystemTime::now().duration_since(since).unwrap_or_default() >= LAGS
}

fn cache_directory(path: &Path) -> Finding {
    let what = format!("cache {}", path.display());
    let Ok(s) = rustix::fs::statvfs(path) else {
        return Finding::new(
            &what,
            Grade::Broken,
            "cannot be looked at",
            "create it, owned by the agent's user",
        );
    };
    const OVERLAYFS: i64 = 0x794c_7630;
    if rustix::fs::statfs(path).is_ok_and(|f| f.f_type == OVERLAYFS) {
        let todo = "put the cache on a host path: passthrough does not work on a container's own file system";
        return Finding::new(&what, Grade::Less, "overlayfs", todo);
    }
    let free = 100 * s.f_bavail / s.f_blocks.max(1);
    // A file system that counts no inodes does not run out of them.
    let inodes = (100 * s.f_favail).checked_div(s.f_files).unwrap_or(100);
    let saw = format!("{} free ({free} %), inodes {inodes} % free", bytes(s.f_bavail * s.f_frsize));
    match free >= 15 && inodes >= 10 {
        true => Finding::fine(&what, saw),
        false => Finding::new(
            &what,
            Grade::Less,
            saw,
            "make room: below 15 % / 10 % nothing new is cached, and kubelet evicts pods",
        ),
    }
}

fn endpoint(url: &url::Url) -> Finding {
    let what = format!("endpoint {}", url.host_str().unwrap_or("?"));
    let port = url.port_or_known_default().unwrap_or(443);
    let addresses = match (url.host_str().unwrap_or_default(), port).to_socket_addrs() {
        Ok(addresses) => addresses.collect::<Vec<_>>(),
        Err(e) => {
            return Finding::new(&what, Grade::Broken, e.to_string(), "check the name and the node's DNS");
        }
    };
    for address in &addresses {
        if std::net::TcpStream::connect_timeout(address, Duration::from_secs(3)).is_ok() {
            return Finding::fine(&what, format!("{address} accepts connections"));
        }
    }
    let todo = "check routes, firewall and NetworkPolicy between this node and the endpoint";
    Finding::new(&what, Grade::Broken, format!("{addresses:?}: no connection within 3 s"), todo)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(change: impl FnOnce(&mut pb::StagingArea)) -> pb::StagingArea {
        let mut area = pb::StagingArea {
            volume_id: "v".into(),
            files: 2,
            mounts: 1,
            sending: true,
            described: true,
            oldest_ms: SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64,
            ..pb::StagingArea::default()
        };
        change(&mut area);
        area
    }

    #[test]
    fn what_does_not_reach_its_store_is_named_with_the_command_that_helps() {
        let of = |change: fn(&mut pb::StagingArea)| {
            let all: Vec<_> = judged(&area(change)).into_iter().map(|finding| finding.todo).collect();
            all.join("; ")
        };
        assert_eq!(of(|_| ()), "", "it was written a moment ago");
        assert!(of(|a| a.oldest_ms -= 301_000).contains("millpond staging upload v"));
        assert!(of(|a| a.conflicts = 1).contains("millpond staging discard v PATH"));
        let left = |a: &mut pb::StagingArea| (a.mounts, a.sending) = (0, false);
        assert!(of(left).contains("upload v --secret-file"));
        let undescribed = |a: &mut pb::StagingArea| (a.sending, a.described) = (false, false);
        assert!(of(undescribed).contains("export v --to") && !of(undescribed).contains("upload"));
        assert!(of(|a| (a.sending, a.conflicts) = (false, 2)).contains("discard"));
        assert!(!of(|a| (a.sending, a.conflicts) = (false, 2)).contains("upload"));
        assert!(of(|a| a.problem = "its journal: damaged".into()).contains("keep"));
    }
}
