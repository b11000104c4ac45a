//! How long one process waits for another. The one that waits has more time than what it waits for may take, so that
//! the one which knows the reason gives up first and can say it. Limits that depend on each other stand here, with the
//! relation between them; a limit that concerns one process alone stands beside its use.

use std::time::Duration;

/// A limit in time of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Process, and what it waits for.
    pub name: &'static str,
    pub time: Duration,
}

const fn millis(name: &'static str, millis: u64) -> Limit {
    Limit { name, time: Duration::from_millis(millis) }
}

const fn secs(name: &'static str, secs: u64) -> Limit {
    millis(name, secs * 1000)
}

// A worker and its agent.
pub const WORKER_BEAT: Limit = millis("worker: between two heartbeats", 100);
pub const AGENT_LOOKS: Limit = millis("agent: between two looks at a worker's heartbeat", 500);
pub const HANG_LIMIT_LEAST: Limit = secs("agent: least hang_limit of a worker", 2);
pub const WORKER_READY: Limit = secs("agent: a worker that was started stands by", 10);
pub const WORKER_ANSWERS: Limit = secs("agent: a worker answers INIT", 10);
pub const WORKER_SERVES: Limit = secs("agent: a worker that may read serves", 10);
pub const REAP: Limit = secs("agent: a killed worker is gone", 2);
pub const MOUNT_STARTS: Limit = secs("agent: a worker comes up for a publish", 15);

// Agent and broker.
pub const AGENT_BEAT: Limit = secs("agent: between two signs of life to the broker", 1);
pub const AGENT_HANG_LIMIT_LEAST: Limit = secs("broker: least --agent-hang-limit", 2);
pub const KERNEL_INIT: Limit = secs("broker: the kernel sends INIT", 2);
pub const START: Limit = secs("broker: a publish's worker serves", 5);
pub const PUBLISH_DROPPED: Limit = secs("agent: the broker goes on with a publish that was answered", 60);
pub const GOODBYE: Limit = secs("broker: the agent lets a mount go", 1);
pub const UPLOADS: Limit = secs("agent: what was written is in the store, before an unpublish", 20);
pub const UPLOADS_ANSWERED: Limit = secs("broker: the agent says what is left of it", 22);
pub const UNPUBLISH_TURN: Limit =
    millis("plugin: another call for the volume ends, before an unpublish", 1300);

// A hand-off between two agents.
pub const STANDBY_WORKERS: Limit = secs("successor: workers stand by for its mounts", 20);
pub const PREPARE: Limit = secs("broker: the successor prepares one mount", 30);
pub const LET_GO: Limit = secs("agent: it and its workers close what they hold", 3);
pub const DRAIN: Limit = secs("broker: the old agent lets cache and state go", 5);
pub const SUCCESSOR_UP: Limit = secs("successor: cache and state are open", 15);
pub const SUCCEED: Limit = secs("broker: the successor can be given mounts", 20);
pub const ADOPTED: Limit = secs("agent: an adopted mount is served", 10);
pub const ADOPT: Limit = secs("broker: an agent takes a mount over", 20);

// A pod and its program: `terminationGracePeriodSeconds` of the manifests.
pub const AGENT_LEAVES: Limit = secs("agent: a broker holds every mount, when it is asked to stop", 290);
pub const AGENT_SHUTS_DOWN: Limit = secs("agent: workers, cache and state end", 20);
pub const AGENT_POD: Limit = secs("kubelet: the agent's pod ends", 310);
pub const PLUGIN_LEAVES: Limit = secs("plugin: an agent holds every mount, when it is asked to stop", 290);
pub const PLUGIN_DRAINS: Limit = secs("plugin: calls that are under way end", 25);
pub const PLUGIN_POD: Limit = secs("kubelet: the plugin's pod ends", 320);

/// `outer` does not run out before every one of `inner`, one after the other, has.
#[cfg(test)]
#[derive(Clone, Copy, Debug)]
struct Outlasts {
    outer: Limit,
    inner: &'static [Limit],
}

#[cfg(test)]
const fn outlasts(outer: Limit, inner: &'static [Limit]) -> Outlasts {
    Outlasts { outer, inner }
}

#[cfg(test)]
const RELATIONS: &[Outlasts] = &[
    outlasts(AGENT_LOOKS, &[WORKER_BEAT, WORKER_BEAT]),
    outlasts(HANG_LIMIT_LEAST, &[AGENT_LOOKS, AGENT_LOOKS]),
    outlasts(MOUNT_STARTS, &[WORKER_ANSWERS]),
    outlasts(MOUNT_STARTS, &[WORKER_READY]),
    outlasts(ADOPTED, &[WORKER_SERVES]),
    outlasts(ADOPT, &[REAP, ADOPTED]),
    outlasts(AGENT_HANG_LIMIT_LEAST, &[AGENT_BEAT, AGENT_BEAT]),
    outlasts(PUBLISH_DROPPED, &[MOUNT_STARTS, KERNEL_INIT, START]),
    outlasts(UNPUBLISH_TURN, &[GOODBYE]),
    outlasts(UPLOADS_ANSWERED, &[UPLOADS]),
    outlasts(PLUGIN_DRAINS, &[UPLOADS_ANSWERED, UNPUBLISH_TURN, GOODBYE]),
    outlasts(PREPARE, &[STANDBY_WORKERS, WORKER_ANSWERS]),
    outlasts(LET_GO, &[REAP]),
    outlasts(DRAIN, &[LET_GO]),
    outlasts(SUCCEED, &[LET_GO, SUCCESSOR_UP]),
    outlasts(AGENT_POD, &[AGENT_LEAVES, AGENT_SHUTS_DOWN]),
    outlasts(PLUGIN_POD, &[PLUGIN_LEAVES, PLUGIN_DRAINS]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_outlasts_what_it_waits_for() {
        for Outlasts { outer, inner } in RELATIONS {
            let sum: Duration = inner.iter().map(|limit| limit.time).sum();
            assert!(outer.time >= sum, "{outer:?} runs out before {inner:?}");
        }
    }
}
