//! Strikes, does what kubelet would do, and waits until the node is whole again.

use super::super::memory;
use super::crowd::CrowdVolume;
use super::disk::HangingDisk;
use super::ended::{EndedVolumes, Seen};
use super::{Class, Plan, panics};
use crate::clock::{monotonic_ns, wait_until};
use crate::node::{AgentOptions, Mounted, Node, Version};
use crate::oracle::Crowd;
use crate::processes;
use crate::random::Random;
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// Longest pause between the two deaths of a pair.
pub(super) const PAIR: Duration = Duration::from_millis(25);
/// About as long as a hand-over takes.
const HAND_OVER: Duration = Duration::from_millis(600);

/// One fault, and how far it reached.
pub(super) struct Fault {
    pub(super) class: Class,
    /// The volumes whose calls it could delay; empty: all.
    pub(super) volumes: BTreeSet<String>,
    /// See [`super::ClassReport`].
    pub(super) processes: u64,
    /// CLOCK_MONOTONIC.
    pub(super) at_ns: u64,
    pub(super) whole_ns: u64,
    /// Of [`Class::Crowd`].
    pub(super) crowd: Option<Crowd>,
    /// Of [`Class::MountEnded`]: what the applications saw whose mounts ended.
    pub(super) ended: Vec<Seen>,
    /// Of [`Class::DiskHang`]: when the disk answered again.
    pub(super) mended_ns: Option<u64>,
}

pub(super) struct Killer {
    random: Random,
    /// Volumes with an application come first.
    volumes: Vec<String>,
    applications: usize,
    crowd: Option<CrowdVolume>,
    ended: Option<EndedVolumes>,
    disk: Option<HangingDisk>,
    /// Small files of the first volume, and their sizes.
    small: Vec<(PathBuf, u64)>,
    gap: Duration,
    cold_every: u64,
    patience: Duration,
}

impl Killer {
    pub(super) fn new(
        node: &mut Node,
        plan: &Plan,
        mounted: &[Mounted],
        disk: Option<HangingDisk>,
    ) -> Result<Self> {
        let crowd = plan.classes.contains(&Class::Crowd);
        let ended = plan.classes.contains(&Class::MountEnded);
        let small = Tree::generated("torture/", Shape { large: 0, ..plan.shape }).files;
        let first = mounted.first().context("a volume")?;
        let small = small.into_iter().map(|file| (first.target.join(file.path), file.size)).collect();
        Ok(Self {
            random: Random(plan.seed ^ 0x6b69_6c6c),
            volumes: mounted.iter().map(|m| m.id.clone()).collect(),
            applications: plan.applications,
            crowd: crowd.then(|| CrowdVolume::publish(node, plan.crowd)).transpose()?,
            ended: ended.then(|| EndedVolumes::publish(node, plan)).transpose()?,
            disk,
            small,
            gap: plan.gap,
            cold_every: plan.cold_every,
            patience: plan.patience,
        })
    }

    /// Returns the disk, which is in use until the last volume is unpublished.
    pub(super) fn end(self, node: &mut Node) -> Result<Option<HangingDisk>> {
        self.crowd.map_or(Ok(()), |crowd| crowd.unpublish(node))?;
        self.ended.map_or(Ok(()), |ended| ended.unpublish(node))?;
        Ok(self.disk)
    }

    pub(super) fn strike(&mut self, node: &mut Node, class: Class) -> Result<Fault> {
        if self.random.one_in(self.cold_every.max(1)) {
            node.agent().evict_all()?;
        }
        self.pause(self.gap);
        let mut fault = Fault {
            class,
            volumes: BTreeSet::new(),
            processes: 1,
            at_ns: monotonic_ns(),
            whole_ns: 0,
            crowd: None,
            ended: Vec::new(),
            mended_ns: None,
        };
        let mut struck = Vec::new();
        let anew = self.random.below(self.small.len() as u64);
        match class {
            Class::Worker => self.kill_workers(node, 1, &mut fault)?,
            Class::Workers => {
                let n = 2 + self.random.below(9) as usize;
                self.kill_workers(node, n, &mut fault)?;
            }
            Class::Agent => Self::restart_agent(node)?,
            Class::Broker => Self::restart_broker(node)?,
            Class::AgentAndWorker => {
                fault.processes = 2;
                self.kill_a_worker(node)?;
                self.pause(PAIR);
                Self::restart_agent(node)?;
            }
            Class::BrokerAndWorker if self.random.one_in(2) => {
                fault.processes = 2;
                self.kill_a_worker(node)?;
                self.pause(PAIR);
                Self::restart_broker(node)?;
            }
            Class::BrokerAndWorker => {
                fault.processes = 2;
                node.kill_plugin()?;
                self.kill_a_worker(node)?;
                self.pause(PAIR);
                node.start_plugin()?;
            }
            Class::AgentTerm => {
                node.stop_agent()?;
                node.start_agent()?;
            }
            Class::BrokerTerm => {
                node.stop_plugin()?;
                node.start_plugin()?;
            }
            Class::BothTerm => {
                fault.processes = 2;
                node.succeed_both(self.patience)?;
            }
            Class::HandOver => {
                let options = Self::other_version(node);
                node.hand_over(&options)?;
            }
            Class::HandOverAndDeath => {
                fault.processes = 2;
                self.hand_over_and_kill(node)?;
            }
            Class::Crowd => {
                if let Some(crowd) = &self.crowd {
                    fault.volumes.insert(crowd.volume().to_owned());
                    let (deaths, seen) = crowd.strike(node, &mut self.random, self.patience)?;
                    (fault.processes, fault.crowd) = (deaths, Some(seen));
                }
            }
            Class::WorkerOom => self.starve_a_worker(node, &mut fault)?,
            Class::WorkerPanic => {
                let (volume, pid) = self.victim(node, self.applications)?;
                fault.at_ns = monotonic_ns();
                fault.volumes.insert(volume);
                panics::worker(node, pid, &mut self.random, self.patience)?;
            }
            Class::AgentPanic => {
                panics::agent(node, &mut self.random, self.patience)?;
                Self::restart_agent(node)?;
            }
            Class::BrokerPanic => {
                panics::broker(node, &mut self.random, self.patience)?;
                Self::restart_broker(node)?;
            }
            Class::WorkerHang => self.stop_a_worker(node, &mut fault)?,
            Class::AgentHang => {
                processes::signal(node.agent().pid(), Signal::STOP)?;
                let killed = wait_until(self.patience, || node.agent_has_ended());
                ensure!(killed, "the broker did not end an agent that stands still");
                Self::restart_agent(node)?;
            }
            Class::MountEnded => {
                if let Some(ended) = &self.ended {
                    (fault.processes, struck) = ended.strike(node, &mut self.random)?;
                    fault.volumes.extend(struck.iter().map(|one| one.volume().to_owned()));
                }
            }
            Class::Helpers => {
                let helpers = node.helpers();
                fault.processes = helpers.len() as u64;
                for helper in helpers {
                    let _ = processes::kill_child(helper, node.agent().pid()); // it may have ended by itself
                }
            }
            Class::DiskHang => {
                if let Some(disk) = &self.disk {
                    let (volumes, patience) = (&self.volumes[..self.applications.max(1)], self.patience);
                    let volume = &volumes[self.random.below(volumes.len() as u64) as usize];
                    let victim = |node: &Node| node.worker_of(volume, patience);
                    let (processes, mended_ns) = disk.strike(node, &mut self.random, victim)?;
                    (fault.processes, fault.mended_ns) = (processes, Some(mended_ns));
                }
            }
        }
        match class {
            // Broker and agent are the same processes.
            Class::Worker | Class::Workers | Class::WorkerOom | Class::WorkerPanic | Class::WorkerHang => {
                node.wait_served(self.patience)?;
            }
            Class::Helpers => self.read_anew(node, anew)?,
            _ => node.wait_whole(self.patience)?,
        }
        fault.whole_ns = monotonic_ns();
        if let Some(ended) = &self.ended {
            fault.ended = struck.into_iter().map(|one| ended.judge(node, one)).collect::<Result<_>>()?;
        }
        Ok(fault)
    }

    /// Of a file that the store must be asked for: before that, nobody's reads get on.
    fn read_anew(&self, node: &Node, which: u64) -> Result<()> {
        let (path, size) = &self.small[which as usize];
        node.agent().evict(path)?;
        let bytes = std::fs::read(path).with_context(|| path.display().to_string())?;
        ensure!(bytes.len() as u64 == *size, "{} has {} bytes", path.display(), bytes.len());
        Ok(())
    }

    fn pause(&mut self, limit: Duration) {
        std::thread::sleep(Duration::from_micros(self.random.below(limit.as_micros() as u64)));
    }

    pub(super) fn restart_agent(node: &mut Node) -> Result<()> {
        node.kill_agent()?;
        node.start_agent()
    }

    pub(super) fn restart_broker(node: &mut Node) -> Result<()> {
        node.kill_plugin()?;
        node.start_plugin()
    }

    pub(super) fn other_version(node: &mut Node) -> AgentOptions {
        let version = match node.agent().version() {
            Version::This => Version::Next,
            Version::Next | Version::Far => Version::This,
        };
        AgentOptions { version, ..node.options().clone() }
    }

    /// One of old agent, new agent and broker dies at some moment of the hand-over, or just after it.
    fn hand_over_and_kill(&mut self, node: &mut Node) -> Result<()> {
        let options = Self::other_version(node);
        node.start_standby(&options)?;
        self.pause(HAND_OVER);
        match self.random.below(3) {
            0 => node.kill_old_agent()?,
            1 => node.kill_standby()?,
            _ => Self::restart_broker(node)?,
        }
        node.decide()?;
        // The new one may have died as the old one left. kubelet would start one again.
        wait_until(self.patience, || node.agent_has_ended() || node.agent_serves_all());
        match node.agent_has_ended() {
            true => node.replace_killed_agent(),
            false => Ok(()),
        }
    }

    /// How many of the volumes come into question: mostly those with an application, for an application should notice.
    fn reach(&mut self) -> usize {
        if self.random.one_in(4) { self.volumes.len() } else { self.applications }
    }

    /// The serving worker of one of the first `among` volumes.
    fn victim(&mut self, node: &Node, among: usize) -> Result<(String, u32)> {
        let volume = self.volumes[self.random.below(among.max(1) as u64) as usize].clone();
        let pid = node.worker_of(&volume, self.patience)?;
        Ok((volume, pid))
    }

    fn kill_a_worker(&mut self, node: &Node) -> Result<()> {
        let reach = self.reach();
        let (_, pid) = self.victim(node, reach)?;
        node.signal_worker(pid, Signal::KILL)
    }

    fn kill_workers(&mut self, node: &Node, n: usize, fault: &mut Fault) -> Result<()> {
        let agent = node.agent().pid();
        let mut victims = Vec::new();
        for _ in 0..n {
            let reach = self.reach();
            victims.push(self.victim(node, reach)?);
        }
        victims.sort();
        victims.dedup();
        fault.at_ns = monotonic_ns();
        for (volume, pid) in &victims {
            node.signal_worker(*pid, Signal::KILL)?;
            fault.volumes.insert(volume.clone());
        }
        fault.processes = victims.len() as u64;
        // Now and then also what is taking over: children that hold a connection and were not there before.
        if self.random.one_in(3) {
            let old: BTreeSet<u32> = processes::fuse_children(agent).into_iter().collect();
            self.pause(PAIR);
            for pid in processes::fuse_children(agent).into_iter().filter(|pid| !old.contains(pid)) {
                // Ended meanwhile: not one of ours.
                fault.processes += u64::from(node.signal_worker(pid, Signal::KILL).is_ok());
            }
        }
        let killed = |serving: &(String, u32)| victims.contains(serving);
        let replaced = wait_until(self.patience, || {
            node.agent().serving().is_ok_and(|serving| !serving.iter().any(killed))
        });
        ensure!(replaced, "dead workers are still shown as serving: {victims:?}");
        Ok(())
    }

    /// The kernel must have killed it, and the agent must say so.
    fn starve_a_worker(&mut self, node: &Node, fault: &mut Fault) -> Result<()> {
        let (volume, pid) = self.victim(node, self.applications)?;
        let newest = || -> Result<_> {
            Ok(node.agent().heals()?.into_iter().find(|heal| heal.level == 1 && heal.volume_id == volume))
        };
        let before = newest()?;
        let mut group = None;
        wait_until(self.patience, || {
            group = memory::group_of(pid);
            group.is_some()
        });
        let group = group.context("a worker without a limit of memory of its own")?;
        fault.at_ns = monotonic_ns();
        fault.volumes.insert(volume.clone());
        let glutton = memory::fill(&group)?;
        let mut after = None;
        // A heal from an earlier fault may come to be known only now.
        let healed = wait_until(self.patience, || {
            after = newest().unwrap_or_default();
            after != before && after.as_ref().is_some_and(|heal| heal.cause == "oom")
        });
        drop(glutton);
        ensure!(healed, "a worker was out of memory, and the last heal that is known is {after:?}");
        // The agent could not while the glutton was in it.
        let gone = wait_until(self.patience, || std::fs::remove_dir(&group).is_ok() || !group.exists());
        ensure!(gone, "{} is left", group.display());
        Ok(())
    }

    fn stop_a_worker(&mut self, node: &Node, fault: &mut Fault) -> Result<()> {
        // One that is asked something, or no caller would miss it.
        let (volume, pid) = self.victim(node, self.applications)?;
        fault.at_ns = monotonic_ns();
        node.signal_worker(pid, Signal::STOP)?;
        fault.volumes.insert(volume);
        let replaced = wait_until(self.patience, || {
            node.agent().serving().is_ok_and(|serving| !serving.iter().any(|(_, p)| *p == pid))
        });
        ensure!(replaced, "the agent did not replace a worker that stands still");
        Ok(())
    }
}
