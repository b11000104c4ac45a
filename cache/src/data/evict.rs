//! Making room: how much must go is decided by a pure function, then whole files are unlinked.

use super::engine::{Engine, Event, Evicted};
use super::index::{Index, Removed};
use super::pool::{call_returned, lock_of_ours};
use super::root::{Root, RootLimits, Space};
use super::{FileKey, Reason, ScopeUsage};
use std::collections::BTreeMap;
use std::sync::Arc;
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

/// A file that is in no index any more, and still on its disk.
pub(crate) struct Doomed {
    id: u64,
    key: Arc<FileKey>,
    sidecar: bool,
}

/// Runs on the root's threads. What cannot be unlinked is found again at the next start, and verified like any other.
pub(crate) fn unlink(root: &Root, files: &[Doomed]) {
    for Doomed { id, key, sidecar } in files {
        if let Err(error) = root.remove(key, *id, *sidecar) {
            root.failed("unlink", &error, true);
        }
        call_returned();
    }
}

impl Engine {
    /// Evicts from one root until nothing demands it. Runs on the root's threads, one at a time.
    /// `space`: a fresh look at the file system, when the caller has one.
    pub(crate) fn relieve(&self, root: &Root, space: Option<Space>) {
        if !root.is_writable() && !root.is_full() {
            // A read-only or failing disk would refuse the unlinks as well.
            return;
        }
        let _one_at_a_time = lock_of_ours(&root.evicting);
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
            self.discard(victims, demand.reason, Some(root.number));
        }
        if bytes > 0 && demand.reason == Reason::DiskFull {
            root.probe_soon();
        }
    }

    /// Brings every scope below its limit. `here`: the root whose thread this is.
    pub(crate) fn relieve_scopes(&self, here: Option<u8>) {
        for usage in self.usage().scopes {
            let want = excess(&usage);
            if want == 0 {
                continue;
            }
            let mut freed = 0;
            for root in &self.roots {
                while freed < want {
                    let mut victims = Vec::new();
                    {
                        let mut index = self.lock_index();
                        let Some(number) = index.scope_number(&usage.scope) else { break };
                        while victims.len() < BATCH && freed < want {
                            let Some(victim) = index.victim(root.number, Some(number), false) else { break };
                            freed += victim.bytes;
                            victims.push(victim);
                        }
                    }
                    if victims.is_empty() {
                        break;
                    }
                    self.discard(victims, Reason::ScopeLimit, here);
                }
            }
        }
    }

    /// Unlinks what was taken out of the index and tells everyone. `here`: the root whose thread this is; what lies on
    /// others is unlinked by their threads.
    pub(crate) fn discard(&self, removed: Vec<Removed>, reason: Reason, here: Option<u8>) {
        let (_, doomed) = self.forget(removed, reason);
        for (number, files) in doomed {
            let Some(root) = self.roots.get(usize::from(number)) else { continue };
            if here == Some(number) {
                unlink(root, &files);
            } else {
                let at = root.clone();
                root.pool.submit(move || unlink(&at, &files));
            }
        }
    }

    /// Tells everyone what was taken out of the index. What is still to be unlinked is returned by its root.
    pub(crate) fn forget(
        &self,
        removed: Vec<Removed>,
        reason: Reason,
    ) -> (Evicted, BTreeMap<u8, Vec<Doomed>>) {
        let (mut evicted, mut doomed) = (Evicted::default(), BTreeMap::<u8, Vec<Doomed>>::new());
        for Removed { id, key, root, bytes, sidecar, file } in removed {
            if let Some(file) = file.upgrade() {
                file.give_up();
            }
            if usize::from(root) < self.roots.len() {
                evicted.files += 1;
                evicted.bytes += bytes;
                doomed.entry(root).or_default().push(Doomed { id, key: key.clone(), sidecar });
                self.send(Event::Gone { key, file: id });
            }
        }
        if evicted.files > 0 {
            self.observer.evicted(evicted.files, evicted.bytes, reason);
        }
        let released = self.lock_index().let_go(|file| file.is_gone());
        drop(released);
        self.reclaim();
        (evicted, doomed)
    }

    /// What there is to do on a disk every second, and whenever the keeper is called. Runs on the root's threads.
    pub(crate) fn keep(&self, root: &Root) {
        let space = root.look_at_space();
        let low = |s: &Space| {
            let l = &root.limits;
            s.free_bytes * 100 < s.total_bytes * u64::from(l.min_free_bytes_percent)
                || s.free_inodes * 100 < s.total_inodes * u64::from(l.min_free_inodes_percent)
        };
        self.relieve(root, space);
        root.low_space.store(root.look_at_space().as_ref().is_some_and(low), Ordering::Relaxed);
        root.check_reads();
        root.probe(std::time::Instant::now());
        self.announce(root);
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
