//! A cache disk that stops answering for a while, beside one that goes on: what it holds comes from the store, and it is
//! used again when it answers. A process in a call of it cannot even be killed until then.

use super::killer::{Killer, PAIR};
use crate::clock::{monotonic_ns, wait_until};
use crate::node::{FaultyDisk, Node, Tier};
use crate::oracle::{Cause, Failure, Slow};
use crate::processes::signal;
use crate::random::Random;
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::time::Duration;
use testkit::fault_fs::{Call, DiskFaults};

/// A disk that hangs again and again is asked again ever later, after a minute at last.
const USED_AGAIN: Duration = Duration::from_secs(90);
/// While no agent can start all calls wait, not only those for the disk: well below an oracle's patience.
const NO_AGENT: Duration = Duration::from_secs(2);

/// A process that is killed and waits for no disk is gone by then.
const GONE: Duration = Duration::from_millis(500);

pub(super) struct HangingDisk {
    disk: FaultyDisk,
    tiers_before: Vec<Tier>,
    hang_limit: Duration,
    patience: Duration,
}

/// What happens meanwhile.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    /// The disk answers again before the agent could say that it hangs.
    Hiccup,
    Nothing,
    Worker,
    /// One whose thread waits for the disk has no successor before that answers.
    Broker,
    /// It has no successor until the disk answers: its threads that wait for the disk are not gone before.
    Agent,
    /// An agent starts without the disk, and uses it again from its next start on.
    AgentStarts,
}

impl Meanwhile {
    const ALL: [Self; 6] =
        [Self::Hiccup, Self::Nothing, Self::Worker, Self::Broker, Self::Agent, Self::AgentStarts];
}

impl HangingDisk {
    /// Broker and agent are started anew, with another cache root.
    pub(super) fn insert(node: &mut Node, patience: Duration) -> Result<Self> {
        let hang_limit =
            node.options().hang_limit.context("disks that hang need a hang limit: --hang-limit")?;
        let (tiers_before, uid) = (node.options().tiers.clone(), node.options().uid);
        node.stop_agent()?;
        node.stop_plugin()?;
        let disk = FaultyDisk::start(node.places(), uid)?;
        let mut tiers = node.tiers();
        tiers.first_mut().context("a node has a tier")?.paths.push(disk.path().to_owned());
        node.options().tiers = tiers;
        node.start_plugin()?;
        node.start_agent()?;
        Ok(Self { disk, tiers_before, hang_limit, patience })
    }

    /// Nothing is published any more.
    pub(super) fn remove(self, node: &mut Node) -> Result<()> {
        node.stop_agent()?;
        node.stop_plugin()?;
        node.options().tiers = self.tiers_before;
        self.disk.end()?;
        node.start_plugin()?;
        node.start_agent()
    }

    /// How long one call may take before the agent says that the disk hangs: at most two thirds of the hang limit.
    fn timeout(&self) -> Duration {
        self.hang_limit * 2 / 3
    }

    /// Returns when the disk is used again: how many processes were killed, and when it was mended.
    pub(super) fn strike(
        &self,
        node: &mut Node,
        random: &mut Random,
        victim: impl FnOnce(&Node) -> Result<u32>,
    ) -> Result<(u64, u64)> {
        let meanwhile = Meanwhile::ALL[random.below(Meanwhile::ALL.len() as u64) as usize];
        eprintln!("torture: {} ns: a disk hangs, {meanwhile:?}", monotonic_ns());
        let (processes, mended_ns) =
            self.hang(node, random, meanwhile, victim).with_context(|| format!("{meanwhile:?}"))?;
        let again = wait_until(USED_AGAIN, || is_degraded(node).is_ok_and(|degraded| !degraded));
        ensure!(again, "{meanwhile:?}: the disk is not used again: {:?}", node.agent().cache());
        Ok((processes, mended_ns))
    }

    fn hang(
        &self,
        node: &mut Node,
        random: &mut Random,
        meanwhile: Meanwhile,
        victim: impl FnOnce(&Node) -> Result<u32>,
    ) -> Result<(u64, u64)> {
        let mut pause = |limit: Duration| {
            std::thread::sleep(Duration::from_micros(random.below(limit.as_micros() as u64)))
        };
        if matches!(meanwhile, Meanwhile::AgentStarts) {
            node.kill_agent()?;
        }
        self.disk.set(&DiskFaults { hangs: Call::ALL.to_vec(), ..DiskFaults::default() })?;
        let mut stuck = false;
        match meanwhile {
            Meanwhile::Hiccup => {
                pause(self.timeout());
                return Ok((0, self.mend()?));
            }
            Meanwhile::Nothing => {}
            Meanwhile::Worker => {
                pause(self.hang_limit);
                let worker = victim(node)?;
                // Replaced for standing still meanwhile: it has been killed already.
                let _ = node.signal_worker(worker, Signal::KILL);
            }
            Meanwhile::Broker => {
                pause(self.hang_limit);
                signal(node.plugin().pid(), Signal::KILL)?;
                stuck = !wait_until(GONE, || node.plugin_has_ended());
                if !stuck {
                    Killer::restart_broker(node)?;
                }
            }
            Meanwhile::Agent => {
                pause(self.hang_limit);
                signal(node.agent().pid(), Signal::KILL)?;
                pause(NO_AGENT);
                let mended = self.mend()?;
                Killer::restart_agent(node)?;
                return Ok((1, mended));
            }
            Meanwhile::AgentStarts => {
                pause(PAIR);
                node.start_agent()?;
                pause(self.hang_limit);
                let mended = self.mend()?;
                Killer::restart_agent(node)?;
                return Ok((2, mended));
            }
        }
        let noticed = wait_until(self.timeout() + self.patience, || is_degraded(node).unwrap_or(false));
        ensure!(noticed, "the agent does not say that the disk hangs: {:?}", node.agent().cache());
        pause(2 * self.hang_limit);
        let mended = self.mend()?;
        if stuck {
            Killer::restart_broker(node)?;
        }
        Ok((u64::from(!matches!(meanwhile, Meanwhile::Nothing)), mended))
    }

    fn mend(&self) -> Result<u64> {
        self.disk.set(&DiskFaults::default())?;
        Ok(monotonic_ns())
    }
}

fn is_degraded(node: &Node) -> Result<bool> {
    Ok(node.agent().cache()?.tiers.iter().any(|tier| tier.degraded))
}

/// What docs/failures.md declares (exception 1): the kernel opens and reads a file that is passed through on its disk, and
/// the caller waits for that disk. It goes on when the disk has answered. From `noticed` after the disk began to hang
/// on, new opens go past it.
pub(super) fn waited_for_disk(
    failure: &Failure,
    slow: &[Slow],
    hung_ns: u64,
    mended_ns: u64,
    noticed: Duration,
    after: Duration,
) -> bool {
    let waits = match failure.call.as_str() {
        "pread" | "read" | "read-on" | "map-touch" => true,
        "open" => failure.since_ns <= hung_ns + noticed.as_nanos() as u64,
        _ => false,
    };
    let is_it = |call: &&Slow| call.start_ns == failure.since_ns && call.call == failure.call;
    let end_ns = slow.iter().find(is_it).map(|call| call.end_ns);
    failure.cause == Cause::Hang
        && waits
        && end_ns.is_some_and(|end| end > hung_ns && end <= mended_ns + after.as_nanos() as u64)
        && failure.since_ns < mended_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_read_that_goes_on_when_the_disk_answers_has_waited_for_it() {
        let s = 1_000_000_000;
        let failure = |call: &str, cause| Failure {
            thread: "t".into(),
            call: call.into(),
            path: "p".into(),
            what: String::new(),
            cause,
            since_ns: s,
            at_ns: 11 * s,
        };
        let ended = |call: &str, end| [Slow { call: call.into(), start_ns: s, end_ns: end }];
        let waited = |failure: &Failure, slow: &[Slow]| {
            waited_for_disk(failure, slow, s / 2, 13 * s, Duration::from_secs(4), Duration::from_secs(10))
        };
        let read = failure("pread", Cause::Hang);
        assert!(waited(&read, &ended("pread", 13 * s + 5)));
        assert!(!waited(&read, &[]), "it never ended");
        assert!(!waited(&read, &ended("pread", 24 * s)), "it went on waiting");
        assert!(!waited(&read, &ended("stat", 13 * s)), "another call");
        assert!(!waited(&failure("pread", Cause::Errno(libc::EIO)), &ended("pread", 13 * s)));
        assert!(!waited(&failure("stat", Cause::Hang), &ended("stat", 13 * s)), "names are on no disk");
        let (soon, long) = (Duration::from_millis(400), Duration::from_secs(60));
        assert!(!waited_for_disk(&read, &ended("pread", 13 * s), 0, s, soon, long), "too late");
        let open = failure("open", Cause::Hang);
        assert!(waited(&open, &ended("open", 13 * s)));
        let ended = ended("open", 13 * s);
        assert!(!waited_for_disk(&open, &ended, s / 2, 13 * s, soon, long), "the agent knew better");
    }
}
