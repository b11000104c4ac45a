//! What a run has shown: by class of fault for a person, as JSON for adding up.

use super::killer::Fault;
use super::{Class, SoakReport};
use crate::oracle::{Cause, Failure, Report, Stalls};
use anyhow::{Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

const FAILURES_KEPT: usize = 100;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct TortureReport {
    pub seeds: Vec<u64>,
    pub seconds: f64,
    /// The fewest of the runs.
    pub volumes: usize,
    /// By the name of the class.
    pub classes: BTreeMap<String, ClassReport>,
    pub calls: u64,
    pub bytes: u64,
    pub failed: u64,
    pub wrong: u64,
    pub interrupted: u64,
    pub hangs: u64,
    pub sigbus: u64,
    pub alarms: u64,
    pub panicked: u64,
    pub failures: Vec<Failure>,
    /// Of a run with seldom faults.
    #[serde(default)]
    pub soak: Option<SoakReport>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ClassReport {
    pub faults: u64,
    /// That were killed, asked to stop, stopped or succeeded in these faults. An agent's workers, which end with it, are
    /// not counted.
    pub processes: u64,
    /// Calls that failed after a fault of this class and before the next fault, or in its crowd.
    pub failed: u64,
    /// Calls that failed as docs/failures.md declares: on a mount that another process had ended. They count nowhere
    /// else.
    #[serde(default)]
    pub declared: u64,
    /// Of each fault that an application could feel: how long its longest call kept waiting, microseconds.
    pub stalls_us: Vec<u64>,
    /// The call that waited longest.
    pub longest: String,
    /// Of each fault: until the node was whole again, which includes the restart by the harness.
    pub whole_us: Vec<u64>,
}

impl TortureReport {
    pub(super) fn new(seed: u64, volumes: usize) -> Self {
        Self { seeds: vec![seed], volumes, ..Self::default() }
    }

    /// `seen`: the volume and what its application saw.
    pub(super) fn add_leg(&mut self, faults: Vec<Fault>, seen: Vec<(String, Report)>, elapsed: Duration) {
        for fault in &faults {
            let class = self.classes.entry(fault.class.name().to_owned()).or_default();
            class.faults += 1;
            class.processes += fault.processes;
            class.whole_us.push((fault.whole_ns - fault.at_ns) / 1000);
            let window = fault.whole_ns - fault.at_ns;
            let near = seen.iter().filter(|(v, _)| fault.volumes.is_empty() || fault.volumes.contains(v));
            let near = near.map(|(_, report)| report).chain(fault.ended.iter().map(|seen| &seen.report));
            let felt = near.map(|report| match report.longest_stall(fault.at_ns, window) {
                Some((ns, slow)) => (ns / 1000, slow.call.as_str()),
                None => (0, ""),
            });
            class.declared += fault.ended.iter().map(|seen| seen.declared).sum::<u64>();
            if let Some((us, call)) = felt.max() {
                if class.stalls_us.iter().all(|&known| known < us) {
                    call.clone_into(&mut class.longest);
                }
                class.stalls_us.push(us);
            }
            if let Some(crowd) = &fault.crowd {
                class.failed += crowd.failed;
                self.calls += crowd.calls;
                self.failed += crowd.failed;
                self.wrong += crowd.wrong;
                self.keep(crowd.failures.iter().map(|what| Failure {
                    thread: "crowd".into(),
                    call: "pread".into(),
                    path: String::new(),
                    what: what.clone(),
                    cause: Cause::Wrong,
                    since_ns: fault.at_ns,
                    at_ns: fault.at_ns,
                }));
            }
        }
        for (_, report) in &seen {
            for failure in &report.failures {
                if let Some(fault) = faults.iter().rfind(|fault| fault.at_ns <= failure.at_ns) {
                    self.classes.entry(fault.class.name().to_owned()).or_default().failed += 1;
                }
            }
        }
        let mut reports: Vec<_> = seen.into_iter().map(|(_, report)| report).collect();
        for fault in faults {
            let class = self.classes.entry(fault.class.name().to_owned()).or_default();
            class.failed += fault.ended.iter().map(|seen| seen.report.failed).sum::<u64>();
            reports.extend(fault.ended.into_iter().map(|seen| seen.report));
        }
        for report in reports {
            self.calls += report.total_calls();
            self.bytes += report.bytes;
            self.failed += report.failed;
            self.wrong += report.wrong;
            self.interrupted += report.interrupted;
            self.hangs += report.hangs;
            self.sigbus += report.sigbus;
            self.alarms += report.alarms;
            self.panicked += report.panicked;
            self.keep(report.failures.into_iter());
        }
        self.seconds = elapsed.as_secs_f64();
    }

    /// Another run of the same commit.
    pub fn add(&mut self, other: Self) {
        self.volumes = if self.seeds.is_empty() { other.volumes } else { self.volumes.min(other.volumes) };
        self.seeds.extend(other.seeds);
        self.seconds += other.seconds;
        for (name, class) in other.classes {
            let mine = self.classes.entry(name).or_default();
            mine.faults += class.faults;
            mine.processes += class.processes;
            mine.failed += class.failed;
            mine.declared += class.declared;
            if class.stalls_us.iter().max() > mine.stalls_us.iter().max() {
                mine.longest = class.longest;
            }
            mine.stalls_us.extend(class.stalls_us);
            mine.whole_us.extend(class.whole_us);
        }
        self.calls += other.calls;
        self.bytes += other.bytes;
        self.failed += other.failed;
        self.wrong += other.wrong;
        self.interrupted += other.interrupted;
        self.hangs += other.hangs;
        self.sigbus += other.sigbus;
        self.alarms += other.alarms;
        self.panicked += other.panicked;
        self.keep(other.failures.into_iter());
    }

    fn keep(&mut self, failures: impl Iterator<Item = Failure>) {
        let room = FAILURES_KEPT - self.failures.len();
        self.failures.extend(failures.take(room));
    }

    pub fn faults(&self) -> u64 {
        self.classes.values().map(|class| class.faults).sum()
    }

    pub fn processes(&self) -> u64 {
        self.classes.values().map(|class| class.processes).sum()
    }

    pub fn is_clean(&self) -> bool {
        self.failed == 0 && self.hangs == 0 && self.sigbus == 0 && self.panicked == 0 && self.calls > 0
    }

    /// Nothing failed, nothing hung, and every class came.
    pub fn ensure_clean(&self, classes: &[Class]) -> Result<()> {
        ensure!(
            self.is_clean(),
            "{self}\nfirst failures: {:#?}",
            &self.failures[..self.failures.len().min(20)]
        );
        for class in classes {
            let Some(found) = self.classes.get(class.name()) else {
                bail!("no fault of class {}\n{self}", class.name());
            };
            // Or the mounts had not ended, and it would show nothing.
            let felt = *class != Class::MountEnded || found.declared > 0;
            ensure!(felt, "no application noticed that a mount had ended\n{self}");
        }
        Ok(())
    }
}

impl fmt::Display for TortureReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |us: &[u64]| Stalls::of(us.iter().map(|us| us * 1000).collect());
        writeln!(
            f,
            "{:15} {:>7} {:>9} {:>7} {:>8} {:>9} {:>9} {:>9} {:10}  {:>9} {:>9}",
            "class",
            "faults",
            "processes",
            "failed",
            "declared",
            "stall p50",
            "p99",
            "max ms",
            "in",
            "whole p50",
            "p99 ms"
        )?;
        let mut processes = Vec::new();
        for (name, class) in &self.classes {
            let (stall, whole) = (of(&class.stalls_us), of(&class.whole_us));
            writeln!(
                f,
                "{name:15} {:>7} {:>9} {:>7} {:>8} {:>9.1} {:>9.1} {:>9.1} {:10}  {:>9.1} {:>9.1}",
                class.faults,
                class.processes,
                class.failed,
                class.declared,
                stall.p50_ms,
                stall.p99_ms,
                stall.max_ms,
                class.longest,
                whole.p50_ms,
                whole.p99_ms
            )?;
            if Class::ALL.iter().any(|class| class.name() == name && class.is_death()) {
                processes.extend(&class.stalls_us);
            }
        }
        let all = of(&processes);
        writeln!(
            f,
            "{} faults, {} processes, on {} volumes in {:.0} s, seeds {:?}; process deaths: {all}",
            self.faults(),
            self.processes(),
            self.volumes,
            self.seconds,
            self.seeds
        )?;
        write!(
            f,
            "{} calls, {:.1} MB compared: {} failed, {} wrong, {} SIGBUS, {} EINTR, {} hangs, {} alarms",
            self.calls,
            self.bytes as f64 / 1e6,
            self.failed,
            self.wrong,
            self.sigbus,
            self.interrupted,
            self.hangs,
            self.alarms
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::ended::Seen;
    use super::*;
    use crate::oracle::Slow;
    use std::collections::BTreeSet;

    const MS: u64 = 1_000_000;

    fn fault(class: Class, volume: &str, at_ms: u64) -> Fault {
        let (at_ns, whole_ns) = (at_ms * MS, (at_ms + 50) * MS);
        let volumes = BTreeSet::from([volume.to_owned()]);
        let (crowd, ended, mended_ns) = (None, Vec::new(), None);
        Fault { class, volumes, processes: 2, at_ns, whole_ns, crowd, ended, mended_ns }
    }

    fn report() -> Report {
        let failure = Failure { at_ns: 230 * MS, ..failure() };
        Report {
            calls: BTreeMap::from([("pread".into(), 10)]),
            failed: 1,
            failures: vec![failure],
            slow: vec![Slow { call: "pread".into(), start_ns: 110 * MS, end_ns: 140 * MS }],
            ..Report::default()
        }
    }

    fn failure() -> Failure {
        let (thread, call, path, what) = ("t".into(), "pread".into(), "p".into(), "EIO".into());
        Failure { thread, call, path, what, cause: Cause::Errno(libc::EIO), since_ns: 0, at_ns: 0 }
    }

    #[test]
    fn stalls_and_failures_are_booked_to_the_fault_that_they_followed() {
        let mut total = TortureReport::new(1, 2);
        let faults =
            [fault(Class::Worker, "a", 100), fault(Class::Agent, "a", 200), fault(Class::Broker, "b", 210)];
        total.add_leg(faults.into(), vec![("a".into(), report())], Duration::from_secs(1));
        assert_eq!(total.classes["worker"].stalls_us, [30_000]);
        assert_eq!(total.classes["worker"].longest, "pread");
        assert_eq!(total.classes["agent"].stalls_us, [0]);
        assert!(total.classes["broker"].stalls_us.is_empty(), "no application was there to feel it");
        assert_eq!(total.classes["broker"].failed, 1);
        assert!(!total.is_clean() && total.ensure_clean(&[]).is_err());
    }

    #[test]
    fn what_is_declared_of_mounts_that_ended_counts_apart_and_all_else_as_everywhere() {
        let mut total = TortureReport::new(1, 2);
        let ended = |declared, report| Fault {
            ended: vec![Seen { declared, report }],
            ..fault(Class::MountEnded, "e", 100)
        };
        let calm = Report { failed: 0, failures: Vec::new(), ..report() };
        total.add_leg(vec![ended(7, calm.clone())], vec![], Duration::from_secs(1));
        assert_eq!((total.failed, total.calls, total.classes["mount ended"].declared), (0, 10, 7));
        assert_eq!(total.classes["mount ended"].stalls_us, [30_000]);
        total.ensure_clean(&[Class::MountEnded]).unwrap();
        total.add_leg(vec![ended(0, report())], vec![], Duration::from_secs(1));
        assert_eq!((total.failed, total.classes["mount ended"].failed), (1, 1));
        assert!(total.ensure_clean(&[]).is_err());
        let mut unfelt = TortureReport::new(1, 2);
        unfelt.add_leg(vec![ended(0, calm)], vec![], Duration::from_secs(1));
        assert!(unfelt.ensure_clean(&[Class::MountEnded]).is_err(), "no application noticed anything");
    }

    #[test]
    fn runs_are_added_up() {
        let mut total = TortureReport::default();
        for seed in [5, 6] {
            let mut one = TortureReport::new(seed, 20);
            let calm = Report { failed: 0, failures: Vec::new(), ..report() };
            one.add_leg(
                vec![fault(Class::Worker, "a", 100)],
                vec![("a".into(), calm)],
                Duration::from_secs(2),
            );
            total.add(serde_json::from_str(&serde_json::to_string(&one).unwrap()).unwrap());
        }
        assert_eq!((total.seeds.as_slice(), total.volumes, total.calls), (&[5, 6][..], 20, 20));
        assert_eq!((total.faults(), total.processes(), total.seconds), (2, 4, 4.0));
        total.ensure_clean(&[Class::Worker]).unwrap();
        assert!(total.ensure_clean(&[Class::Worker, Class::Agent]).is_err());
    }
}
