//! Making room: how much must go is decided by a pure function, then whole files are unlinked.

use super::engine::{Engine, Event, Evicted};
use super::index::{Index, Removed};
use super::root::{Root, RootLimits, Space};
use super::{Reason, ScopeUsage};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;

/// Victims taken under one hold of the index lock.
const BATCH: usize = 64;
/// A scope over its limit is brought down to this share of it, so that the next file does not start it all again.
const SCOPE_LOW_PERCENT: u64 = 95;
/// After ENOSPC this share of what the root holds goes.
const FULL_PERCENT: u64 = 5;

/// What the decision is based on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gauge {
    pub used_bytes: u64,
    pub used_inodes: u64,
    pub limits: RootLimits,
    /// None: the file system does not say.
    pub space: Option<Space>,
    /// A write failed because the disk is full.
    pub full: bool,
}

/// How much has to go, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Demand {
    pub reason: Reason,
    pub bytes: u64,
    pub inodes: u64,
}

/// The most pressing demand, or none. The file system's floor counts what others use too.
pub(crate) fn demand(gauge: &Gauge) -> Option<Demand> {
    let l = &gauge.limits;
    let share = |total: u64, percent: u8| (u128::from(total) * u128::from(percent) / 100) as u64;
    if let Some(space) = &gauge.space {
        let floor = share(space.total_bytes, l.min_free_bytes_percent);
        // One percent more than the floor asks for: else every file written starts it again.
        if space.free_bytes < floor {
            let bytes = floor - space.free_bytes + share(space.total_bytes, 1);
            return Some(Demand { reason: Reason::FreeSpace, bytes, inodes: 0 });
        }
        let floor = share(space.total_inodes, l.min_free_inodes_percent);
        if space.free_inodes < floor {
            let inodes = floor - space.free_inodes + share(space.total_inodes, 1);
            return Some(Demand { reason: Reason::FreeInodes, bytes: 0, inodes });
        }
    }
    if gauge.full {
        let bytes = (gauge.used_bytes * FULL_PERCENT / 100).max(1);
        return Some(Demand { reason: Reason::DiskFull, bytes, inodes: 0 });
    }
    if gauge.used_bytes > share(l.quota_bytes, l.high_percent) {
        let bytes = gauge.used_bytes - share(l.quota_bytes, l.low_percent);
        return Some(Demand { reason: Reason::Quota, bytes, inodes: 0 });
    }
    if gauge.used_inodes > share(l.quota_inodes, l.high_percent) {
        let inodes = gauge.used_inodes - share(l.quota_inodes, l.low_percent);
        return Some(Demand { reason: Reason::Inodes, bytes: 0, inodes });
    }
    None
}

/// Bytes by which a scope is to shrink.
pub(crate) fn excess(scope: &ScopeUsage) -> u64 {
    match scope.limit_bytes {
        Some(limit) if scope.bytes > limit => {
            scope.bytes - (u128::from(limit) * u128::from(SCOPE_LOW_PERCENT) / 100) as u64
        }
        _ => 0,
    }
}

impl Engine {
    /// Evicts from one root until nothing demands it. Blocking; one thread at a time per root.
    /// `space`: a fresh look at the file system, when the caller has one.
    pub(crate) fn relieve(&self, root: &Root, space: Option<Space>) {
        if !root.is_writable() && !root.is_full() {
            // A read-only or failing disk would refuse the unlinks as well.
            return;
        }
        let _one_at_a_time = root.evicting.lock().unwrap_or_else(PoisonError::into_inner);
        let gauge = |index: &Index| {
            let usage = &index.roots[usize::from(root.number)];
            Gauge {
                used_bytes: usage.used_bytes(),
                used_inodes: usage.inodes,
                limits: root.limits,
                space,
                full: root.is_full(),
            }
        };
        let Some(demand) = demand(&gauge(&self.lock_index())) else { return };
        let floor = matches!(demand.reason, Reason::FreeSpace | Reason::FreeInodes | Reason::DiskFull);
        let (mut bytes, mut inodes) = (0, 0);
        let enough = |bytes: u64, inodes: u64| bytes >= demand.bytes && inodes >= demand.inodes;
        while !enough(bytes, inodes) {
            let mut victims = Vec::new();
            {
                let mut index = self.lock_index();
                while victims.len() < BATCH && !enough(bytes, inodes) {
                    // Beyond the quota proper (or the floor) even files in use must go; between the watermarks they may stay.
                    let gauge = gauge(&index);
                    let hard = floor
                        || gauge.used_bytes > gauge.limits.quota_bytes
                        || gauge.used_inodes > gauge.limits.quota_inodes;
                    let Some(victim) = index.victim(root.number, None, hard) else { break };
                    bytes += victim.bytes;
                    inodes += if victim.sidecar { 2 } else { 1 };
                    victims.push(victim);
                }
            }
            if victims.is_empty() {
                break;
            }
            self.discard(victims, demand.reason);
        }
        if bytes > 0 && demand.reason == Reason::DiskFull {
            root.probe_soon();
        }
    }

    /// Brings every scope below its limit. Blocking.
    pub(crate) fn relieve_scopes(&self) {
        for usage in self.usage().scopes {
            let want = excess(&usage);
            if want == 0 {
                continue;
            }
            let mut freed = 0;
            for root in &self.roots {
                let mut victims = Vec::new();
                {
                    let mut index = self.lock_index();
                    let Some(number) = index.scope_number(&usage.scope) else { break };
                    while freed < want {
                        let Some(victim) = index.victim(root.number, Some(number), false) else { break };
                        freed += victim.bytes;
                        victims.push(victim);
                    }
                }
                self.discard(victims, Reason::ScopeLimit);
            }
        }
    }

    /// Unlinks what was taken out of the index and tells everyone.
    pub(crate) fn discard(&self, removed: Vec<Removed>, reason: Reason) -> Evicted {
        let mut evicted = Evicted::default();
        for Removed { id, key, root, bytes, sidecar, file } in removed {
            if let Some(file) = file.upgrade() {
                file.give_up();
            }
            if let Some(root) = self.roots.get(usize::from(root)) {
                // If it cannot be unlinked it is found again at the next start, and verified like any other.
                if let Err(error) = root.remove(&key, id, sidecar) {
                    root.failed("unlink", &error, true);
                }
                evicted.files += 1;
                evicted.bytes += bytes;
                self.send(Event::Gone { key, file: id });
            }
        }
        if evicted.files > 0 {
            self.observer.evicted(evicted.files, evicted.bytes, reason);
        }
        let released = self.lock_index().let_go(|file| file.is_gone());
        drop(released);
        self.bury();
        evicted
    }

    /// What the keeper does every second, and whenever it is called.
    pub(crate) fn keep(&self) {
        for root in &self.roots {
            let space = root.space();
            let low = |s: &Space| {
                let l = &root.limits;
                s.free_bytes * 100 < s.total_bytes * u64::from(l.min_free_bytes_percent)
                    || s.free_inodes * 100 < s.total_inodes * u64::from(l.min_free_inodes_percent)
            };
            self.relieve(root, space);
            root.low_space.store(root.space().as_ref().is_some_and(low), Ordering::Relaxed);
            root.check_reads();
            root.probe(std::time::Instant::now());
            if let Some(works) = root.news() {
                self.send(Event::Disk { root: root.number, works });
            }
        }
        self.relieve_scopes();
        self.sweep_scopes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gauge() -> Gauge {
        Gauge {
            used_bytes: 0,
            used_inodes: 0,
            limits: RootLimits {
                quota_bytes: 1000,
                quota_inodes: 100,
                high_percent: 90,
                low_percent: 70,
                min_free_bytes_percent: 15,
                min_free_inodes_percent: 10,
            },
            space: Some(Space {
                total_bytes: 10_000,
                free_bytes: 5_000,
                total_inodes: 1_000,
                free_inodes: 500,
            }),
            full: false,
        }
    }

    #[test]
    fn nothing_goes_at_the_high_watermark_and_all_above_the_low_one_beyond_it() {
        assert_eq!(demand(&Gauge { used_bytes: 900, ..gauge() }), None);
        let want = Some(Demand { reason: Reason::Quota, bytes: 201, inodes: 0 });
        assert_eq!(demand(&Gauge { used_bytes: 901, ..gauge() }), want);
        let want = Some(Demand { reason: Reason::Inodes, bytes: 0, inodes: 21 });
        assert_eq!(demand(&Gauge { used_inodes: 91, ..gauge() }), want);
    }

    #[test]
    fn the_floor_of_the_file_system_counts_whatever_the_quota_says() {
        let mut gauge = gauge();
        gauge.space.as_mut().unwrap().free_bytes = 1_400;
        assert_eq!(demand(&gauge), Some(Demand { reason: Reason::FreeSpace, bytes: 200, inodes: 0 }));
        gauge.space.as_mut().unwrap().free_bytes = 1_500;
        gauge.space.as_mut().unwrap().free_inodes = 99;
        assert_eq!(demand(&gauge), Some(Demand { reason: Reason::FreeInodes, bytes: 0, inodes: 11 }));
    }
}
