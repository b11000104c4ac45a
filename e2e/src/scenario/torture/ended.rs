//! Mounts that another process ends, while an application uses them and sometimes while an agent, a broker or a worker
//! dies, too. They are of volumes of their own: what is open when its mount ends is lost. Paths work again, and no call
//! hangs.
//!
//! ```text
//!  application starts ── the end, and what else happens ── another mount in its pod, reported ── node whole ── judged
//!                        └──── what was opened here may fail: ENOTCONN, ECONNABORTED, SIGBUS ────────┘
//! ```

use super::super::ended::{Ending, end, number};
use super::killer::{Killer, PAIR};
use crate::clock::{monotonic_ns, wait_until, within};
use crate::node::{Mounted, Node, Volume};
use crate::oracle::{Cause, Failure, Report};
use crate::pod::{Pod, Running};
use crate::random::Random;
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::time::Duration;
use tonic::Code;

/// Ordinary work of the application once everything is whole again.
const AFTERMATH: Duration = Duration::from_millis(300);
/// The broker's look at its devices, and a mount that is made anew: between two ends one of the two may be under way.
const AGAIN: Duration = Duration::from_millis(600);

pub(super) struct EndedVolumes {
    volumes: Vec<Victim>,
    tree: Tree,
    pause_us: u64,
    hang: Duration,
    patience: Duration,
}

struct Victim {
    volume: Volume,
    pod_name: String,
    mounted: Mounted,
    pod: Pod,
}

/// What happens besides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    /// Its successor's mount is ended, or the dead one a second time.
    AnotherEnd,
    /// kubelet comes by.
    Republish,
    WorkerBefore,
    WorkerAfter,
    /// They are away when the mount ends, or are killed soon after.
    AgentAway,
    AgentAfter,
    BrokerAway,
    BrokerAfter,
    HandOver,
}

impl Beside {
    /// Half of the ends come alone.
    fn draw(random: &mut Random) -> Self {
        const ALL: [Beside; 9] = [
            Beside::AnotherEnd,
            Beside::Republish,
            Beside::WorkerBefore,
            Beside::WorkerAfter,
            Beside::AgentAway,
            Beside::AgentAfter,
            Beside::BrokerAway,
            Beside::BrokerAfter,
            Beside::HandOver,
        ];
        ALL.get(random.below(2 * ALL.len() as u64) as usize).copied().unwrap_or(Self::Nothing)
    }

    /// Where a heal is found that was reported: an agent that was killed takes its list with it.
    fn reported(self) -> Reported {
        match self {
            Self::AgentAfter | Self::HandOver => Reported::ByBroker,
            // The one that made the mount anew may have died before it said so.
            Self::BrokerAfter => Reported::Perhaps,
            _ => Reported::ByAgent,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reported {
    ByAgent,
    ByBroker,
    Perhaps,
}

/// One whose mount has ended.
pub(super) struct Struck<'a> {
    victim: &'a Victim,
    application: Running<Report>,
    mounts: usize,
    heals: Heals,
    /// The connections that were ended.
    dead: BTreeSet<String>,
    ended_ns: u64,
    /// When its pod had another mount.
    again_ns: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Heals {
    newest: Option<proto::agent::v1::Heal>,
    /// Lines of the broker's log.
    said: usize,
}

/// What the application saw.
pub(super) struct Seen {
    pub(super) declared: u64,
    /// Without what is declared.
    pub(super) report: Report,
}

impl EndedVolumes {
    pub(super) fn publish(node: &mut Node, plan: &super::Plan) -> Result<Self> {
        let tree = Tree::generated("ended/", Shape::LITTLE);
        node.server.add(&tree, "ended")?;
        let mut volumes = Vec::new();
        for profile in ["large", "small"] {
            let volume = node.create(&format!("ended-{profile}"), "ended", &[("profile", profile)])?;
            let pod_name = format!("pod-ended-{profile}");
            let mounted = node.publish(&volume, &pod_name)?;
            let pod = node.pod(&mounted)?;
            pod.verify(&tree, 2)?.ensure_all(&tree)?;
            volumes.push(Victim { volume, pod_name, mounted, pod });
        }
        Ok(Self { volumes, tree, pause_us: plan.pause_us, hang: plan.hang, patience: plan.patience })
    }

    pub(super) fn unpublish(self, node: &mut Node) -> Result<()> {
        for victim in self.volumes {
            victim.pod.end()?;
            node.unpublish(&victim.mounted)?;
        }
        Ok(())
    }

    /// Returns when another mount is in every pod's place. [`Self::judge`] the applications when the node is whole.
    pub(super) fn strike(&self, node: &mut Node, random: &mut Random) -> Result<(u64, Vec<Struck<'_>>)> {
        let beside = Beside::draw(random);
        eprintln!("torture: {} ns: mounts end, {beside:?}", monotonic_ns());
        let chosen = match random.below(3) {
            0 => 0..self.volumes.len(),
            one => one as usize - 1..one as usize,
        };
        let mut struck = Vec::new();
        for victim in &self.volumes[chosen] {
            struck.push(self.start(node, victim, random)?);
        }
        std::thread::sleep(Duration::from_micros(random.below(AFTERMATH.as_micros() as u64)));
        let processes = self.end(node, random, beside, &mut struck).with_context(|| format!("{beside:?}"))?;
        for one in &mut struck {
            self.wait_again(node, one, beside.reported()).with_context(|| format!("{beside:?}"))?;
        }
        Ok((processes, struck))
    }

    fn start<'a>(&self, node: &Node, victim: &'a Victim, random: &mut Random) -> Result<Struck<'a>> {
        let (seed, pause) = (random.below(1 << 32).to_string(), self.pause_us.to_string());
        let hang = self.hang.as_secs().to_string();
        let kinds = "pread,small,open,stat,readdir,mmap,sequential,held";
        let arguments =
            ["--alarm", "--seed", &seed, "--pause-us", &pause, "--hang-s", &hang, "--kinds", kinds];
        Ok(Struck {
            victim,
            application: victim.pod.oracle(&self.tree, &arguments)?,
            mounts: victim.pod.mounts(node.places().root())?.len(),
            heals: heals(node, victim)?,
            dead: BTreeSet::new(),
            ended_ns: 0,
            again_ns: 0,
        })
    }

    /// Returns how many processes were killed or succeeded besides.
    fn end(
        &self,
        node: &mut Node,
        random: &mut Random,
        beside: Beside,
        struck: &mut [Struck<'_>],
    ) -> Result<u64> {
        match beside {
            Beside::WorkerBefore => self.kill_workers(node, struck)?,
            Beside::AgentAway => node.kill_agent()?,
            Beside::BrokerAway => node.kill_plugin()?,
            _ => {}
        }
        if matches!(beside, Beside::WorkerBefore | Beside::AgentAway) {
            pause(random, PAIR);
        }
        for one in struck.iter_mut() {
            let how = if random.one_in(2) { Ending::Abort } else { Ending::ForcedUnmount };
            one.dead.insert(number(&one.victim.mounted.target)?);
            one.ended_ns = monotonic_ns();
            end(node, &one.victim.mounted, how).with_context(|| format!("{how:?}"))?;
        }
        pause(random, if matches!(beside, Beside::AnotherEnd | Beside::Republish) { AGAIN } else { PAIR });
        match beside {
            Beside::Nothing | Beside::WorkerBefore => {}
            Beside::AnotherEnd => {
                for one in struck.iter_mut() {
                    // Where the guard alone is left there is nothing to end.
                    let Ok(number) = number(&one.victim.mounted.target) else { continue };
                    one.dead.insert(number);
                    // One that is being replaced may be gone when it is written to.
                    let _ = end(node, &one.victim.mounted, Ending::Abort);
                }
            }
            Beside::Republish => {
                for one in struck.iter() {
                    self.republish(node, one.victim)?;
                }
            }
            Beside::WorkerAfter => self.kill_workers(node, struck)?,
            Beside::AgentAway => node.start_agent()?,
            Beside::AgentAfter => Killer::restart_agent(node)?,
            Beside::BrokerAway => node.start_plugin()?,
            Beside::BrokerAfter => Killer::restart_broker(node)?,
            Beside::HandOver => {
                let options = Killer::other_version(node);
                node.hand_over(&options)?;
            }
        }
        if matches!(beside, Beside::BrokerAway | Beside::BrokerAfter) {
            // Its secret may have died with the broker: the next republish brings it.
            for one in struck.iter() {
                self.republish(node, one.victim)?;
            }
        }
        Ok(match beside {
            Beside::Nothing | Beside::AnotherEnd | Beside::Republish => 0,
            Beside::WorkerBefore | Beside::WorkerAfter => struck.len() as u64,
            _ => 1,
        })
    }

    /// Their workers, if they (still) have one: a worker that has lost its connection ends.
    fn kill_workers(&self, node: &Node, struck: &[Struck<'_>]) -> Result<()> {
        for (volume, pid) in node.agent().serving()? {
            if struck.iter().any(|one| one.victim.mounted.id == volume) {
                // It may have ended meanwhile.
                let _ = node.signal_worker(pid, Signal::KILL);
            }
        }
        Ok(())
    }

    /// As kubelet does, again and again until it is answered OK. Not yet: UNAVAILABLE, and ABORTED while it is made anew.
    fn republish(&self, node: &mut Node, victim: &Victim) -> Result<()> {
        let mut other = None;
        let done = wait_until(self.patience, || match node.publish(&victim.volume, &victim.pod_name) {
            Ok(_) => true,
            Err(status) if matches!(status.code(), Code::Unavailable | Code::Aborted) => false,
            Err(status) => {
                other = Some(status);
                true
            }
        });
        ensure!(done, "a republish of {} is not answered OK", victim.mounted.id);
        other.map_or(Ok(()), |status| Err(status).context("a republish of what has ended"))
    }

    /// Until its pod has a mount that has not ended, which is reported and whose paths work at once.
    fn wait_again(&self, node: &Node, one: &mut Struck<'_>, reported: Reported) -> Result<()> {
        let victim = one.victim;
        let is_another =
            |all: Vec<String>| !all.is_empty() && all.iter().all(|number| !one.dead.contains(number));
        let another = || connections(node, victim).is_ok_and(is_another);
        let again = wait_until(self.patience, another);
        one.again_ns = monotonic_ns();
        ensure!(again, "{} is not made anew in its pod; ended: {:?}", victim.mounted.id, one.dead);
        let (path, tree) = (victim.pod.reach(), self.tree.clone());
        let read = move || -> Result<bool> {
            let file = &tree.files[0];
            tree.is_whole(file, &std::fs::read(path.join(&file.path))?)
        };
        let right = within(self.patience, read)?.context("a path of a mount that was made anew")?;
        ensure!(right, "a file of {} has other bytes", victim.mounted.id);
        let is_reported = || {
            heals(node, victim).is_ok_and(|now| match reported {
                Reported::ByAgent => now.newest.is_some() && now.newest != one.heals.newest,
                Reported::ByBroker => now.said > one.heals.said,
                Reported::Perhaps => true,
            })
        };
        ensure!(
            wait_until(self.patience, is_reported),
            "it is not reported ({reported:?}) that {} was made anew: {:?}",
            victim.mounted.id,
            heals(node, victim)
        );
        Ok(())
    }

    /// The node is whole: what the application saw until now, and that everything is right and nothing was left.
    pub(super) fn judge(&self, node: &Node, one: Struck<'_>) -> Result<Seen> {
        std::thread::sleep(AFTERMATH);
        let volume = &one.victim.mounted.id;
        let mut report = one.application.finish(6 * self.hang).context(volume.clone())?;
        let declared = report.excuse(|failure, _| is_declared(failure, one.ended_ns, one.again_ns));
        one.victim.pod.verify(&self.tree, 2)?.ensure_all(&self.tree).context(volume.clone())?;
        let mounts = one.victim.pod.mounts(node.places().root())?;
        ensure!(mounts.len() == one.mounts, "{} mounts in the pod of {volume}: {mounts:#?}", one.mounts);
        Ok(Seen { declared, report })
    }
}

impl Struck<'_> {
    pub(super) fn volume(&self) -> &str {
        &self.victim.mounted.id
    }
}

fn pause(random: &mut Random, limit: Duration) {
    std::thread::sleep(Duration::from_micros(random.below(limit.as_micros() as u64)));
}

/// Numbers of the FUSE connections at the pod's path: two while one takes the place of the other.
fn connections(node: &Node, victim: &Victim) -> Result<Vec<String>> {
    let all = victim.pod.mounts(node.places().root())?;
    let here = all.into_iter().filter(|m| m.point == victim.pod.data() && m.kind.starts_with("fuse"));
    Ok(here.map(|m| m.device.rsplit(':').next().unwrap_or_default().to_owned()).collect())
}

/// Of level 4.
fn heals(node: &Node, victim: &Victim) -> Result<Heals> {
    let volume = &victim.mounted.id;
    let is_one = |heal: &proto::agent::v1::Heal| heal.level == 4 && heal.volume_id == *volume;
    let newest = node.agent().heals()?.into_iter().find(is_one);
    let log = std::fs::read(node.places().log("csi-plugin"))?;
    let log = String::from_utf8_lossy(&log);
    let said = log.lines().filter(|line| line.contains("healed: mounted anew") && line.contains(&**volume));
    Ok(Heals { newest, said: said.count() })
}

/// What docs/failures.md declares (D3, E1): what was opened, or looked for by its path, before another mount was in its
/// place has lost its connection; a read under way returns what it had got. Nothing else, and nothing that was opened
/// afterwards.
fn is_declared(failure: &Failure, ended_ns: u64, again_ns: u64) -> bool {
    use Cause::{Bus, Errno, Short};
    let lost = matches!(failure.cause, Errno(libc::ENOTCONN | libc::ECONNABORTED) | Bus | Short);
    lost && failure.at_ns >= ended_ns && failure.since_ns < again_ns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_open_before_another_mount_was_there_may_fail_and_only_as_lost() {
        let failure = |cause, since_ns, at_ns| Failure {
            thread: "t".into(),
            call: "pread".into(),
            path: "p".into(),
            what: String::new(),
            cause,
            since_ns,
            at_ns,
        };
        let declared = |cause, since_ns, at_ns| is_declared(&failure(cause, since_ns, at_ns), 100, 200);
        let errors = [libc::ENOTCONN, libc::ECONNABORTED].map(Cause::Errno);
        for lost in errors.into_iter().chain([Cause::Bus, Cause::Short]) {
            assert!(declared(lost, 50, 100) && declared(lost, 199, 900));
            assert!(!declared(lost, 50, 99), "before the end");
            assert!(!declared(lost, 200, 201), "opened on the new mount");
        }
        for other in [Cause::Errno(libc::EIO), Cause::Errno(libc::ENOENT), Cause::Wrong, Cause::Hang] {
            assert!(!declared(other, 50, 150), "{other:?}");
        }
    }

    #[test]
    fn everything_happens_besides_and_often_nothing() {
        let mut random = Random(1);
        let drawn: Vec<_> = (0..1000).map(|_| format!("{:?}", Beside::draw(&mut random))).collect();
        let different: BTreeSet<_> = drawn.iter().collect();
        assert_eq!(different.len(), 10);
        assert!((300..700).contains(&drawn.iter().filter(|b| *b == "Nothing").count()));
    }
}
