//! `millpond status`: what this node serves and how it is doing.

use crate::client::connect;
use crate::output::{Format, ago, bytes, print, print_json, table};
use crate::staging::{self, Listed};
use anyhow::Result;
use proto::agent::v1 as pb;
use serde_json::json;
use std::path::Path;
use std::process::ExitCode;

const HEALS_SHOWN: usize = 5;

#[derive(clap::Args)]
pub(crate) struct Options {
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

pub(crate) async fn run(api: &Path, options: Options) -> Result<ExitCode> {
    let mut agent = connect(api).await?;
    let status = agent.get_status(pb::GetStatusRequest {}).await?.into_inner();
    let volumes = agent.list_volumes(pb::ListVolumesRequest {}).await?.into_inner().volumes;
    let cache = agent.get_cache(pb::GetCacheRequest {}).await?.into_inner();
    let heals = agent.list_heals(pb::ListHealsRequest {}).await?.into_inner().heals;
    // None of an agent of the version before.
    let staged = staging::areas(&mut agent, "", false).await?.unwrap_or_default();
    match options.output {
        Format::Json => print_json(&as_json(&status, &volumes, &staged, &cache, &heals))?,
        Format::Table => as_tables(&status, &volumes, &staged, &cache, &heals)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn as_tables(
    status: &pb::GetStatusResponse,
    volumes: &[pb::Volume],
    staged: &[Listed],
    cache: &pb::GetCacheResponse,
    heals: &[pb::Heal],
) -> Result<()> {
    print(format_args!(
        "agent {} (pid {}, up since {}), broker {}, memory {} of workers and agent, {} standby",
        status.version,
        status.pid,
        ago(status.started_ms),
        if status.broker_connected { "connected" } else { "NOT CONNECTED: new pods cannot mount" },
        bytes(status.anonymous_bytes),
        status.standby_workers,
    ))?;
    print("\nVolumes")?;
    let mut t =
        table(&["volume", "source", "pod", "mode", "worker", "state", "since", "heals", "hits", "staged"]);
    for v in volumes {
        let worker = v.worker.clone().unwrap_or_default();
        t.add_row([
            v.volume_id.clone(),
            v.source.clone(),
            if v.pod.is_empty() { v.target.clone() } else { v.pod.clone() },
            v.mode.clone(),
            worker.pid.to_string(),
            state(&worker, v.stale_since_ms),
            ago(worker.since_ms),
            v.heals.to_string(),
            percent(v.reads_hit, v.reads_miss),
            waiting(v),
        ]);
    }
    print(&t)?;
    let left: Vec<&Listed> = staged.iter().filter(|listed| listed.is_noteworthy()).collect();
    if !left.is_empty() {
        print("\nNot in the store yet (see `millpond staging`)")?;
        print(staging::as_table(left))?;
    }
    print("\nCache")?;
    let mut t = table(&["tier", "kind", "used", "quota", "files", "free on disk", "state"]);
    for c in &cache.tiers {
        t.add_row([
            c.name.clone(),
            c.kind.clone(),
            bytes(c.bytes),
            bytes(c.quota_bytes),
            c.files.to_string(),
            bytes(c.free_bytes),
            if c.degraded { "FAILING".to_owned() } else { "fine".to_owned() },
        ]);
    }
    print(&t)?;
    if !heals.is_empty() {
        print(format_args!("\nLatest heals ({} in memory)", heals.len()))?;
        let mut t = table(&["when", "volume", "level", "cause", "took", "requests taken over"]);
        for h in heals.iter().take(HEALS_SHOWN) {
            t.add_row([
                ago(h.at_ms),
                h.volume_id.clone(),
                h.level.to_string(),
                cause(h),
                format!("{:.1} ms", h.duration_us as f64 / 1e3),
                h.replayed.to_string(),
            ]);
        }
        print(&t)?;
    }
    Ok(())
}

/// What the worker does, and whether the source is there.
fn state(worker: &pb::Worker, stale_since_ms: i64) -> String {
    match stale_since_ms {
        0 => worker.state.clone(),
        since => format!("{}, source away since {}: STALE", worker.state, ago(since)),
    }
}

fn cause(heal: &pb::Heal) -> String {
    // Of the others, that one was killed is no news.
    let tells = !heal.ended.is_empty() && matches!(heal.cause.as_str(), "exit" | "signal");
    if tells { heal.ended.clone() } else { heal.cause.clone() }
}

/// What was written and is not in the store yet.
fn waiting(volume: &pb::Volume) -> String {
    match (volume.staged_files, volume.staged_conflicts) {
        (0, _) => "-".into(),
        (files, 0) => format!("{files} files, {}", bytes(volume.staged_bytes)),
        (files, conflicts) => {
            format!("{files} files, {}, {conflicts} CONFLICTS", bytes(volume.staged_bytes))
        }
    }
}

fn percent(hit: u64, miss: u64) -> String {
    match hit + miss {
        0 => "-".into(),
        all => format!("{:.0} %", 100.0 * hit as f64 / all as f64),
    }
}

fn as_json(
    status: &pb::GetStatusResponse,
    volumes: &[pb::Volume],
    staged: &[Listed],
    cache: &pb::GetCacheResponse,
    heals: &[pb::Heal],
) -> serde_json::Value {
    json!({
        "agent": {
            "version": status.version, "pid": status.pid, "startedMs": status.started_ms,
            "brokerConnected": status.broker_connected, "anonymousBytes": status.anonymous_bytes,
            "memoryBudgetBytes": status.memory_budget_bytes, "standbyWorkers": status.standby_workers,
        },
        "volumes": volumes.iter().map(|v| {
            let worker = v.worker.clone().unwrap_or_default();
            json!({
                "mount": v.mount, "volumeId": v.volume_id, "source": v.source, "scope": v.scope,
                "target": v.target, "pod": v.pod, "mode": v.mode, "heals": v.heals,
                "publishedMs": v.published_ms, "readsHit": v.reads_hit, "readsMiss": v.reads_miss,
                "staleSinceMs": v.stale_since_ms,
                "staged": {
                    "files": v.staged_files, "bytes": v.staged_bytes, "conflicts": v.staged_conflicts,
                },
                "worker": {
                    "pid": worker.pid, "state": worker.state, "sinceMs": worker.since_ms,
                    "anonymousBytes": worker.anonymous_bytes,
                },
            })
        }).collect::<Vec<_>>(),
        "staging": staged.iter().map(|listed| staging::as_json(listed, false)).collect::<Vec<_>>(),
        "cache": {
            "tiers": cache.tiers.iter().map(|t| json!({
                "name": t.name, "kind": t.kind, "paths": t.paths, "bytes": t.bytes,
                "quotaBytes": t.quota_bytes, "files": t.files, "quotaFiles": t.quota_files,
                "freeBytes": t.free_bytes, "degraded": t.degraded,
            })).collect::<Vec<_>>(),
            "scopes": cache.scopes.iter().map(|s| json!({
                "scope": s.scope, "source": s.source, "bytes": s.bytes, "files": s.files,
            })).collect::<Vec<_>>(),
        },
        "heals": heals.iter().map(|h| json!({
            "atMs": h.at_ms, "volumeId": h.volume_id, "mount": h.mount, "cause": h.cause,
            "durationUs": h.duration_us, "level": h.level, "replayed": h.replayed, "ended": h.ended,
        })).collect::<Vec<_>>(),
    })
}
