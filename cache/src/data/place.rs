//! Which root a new file goes to. The choice is pure: what the roots hold in, a root out.

use super::FileKey;
use super::engine::Engine;
use super::index::{Rest, inodes};
use std::sync::atomic::Ordering;

/// What placement knows of one root, in order of preference of its tier.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    pub root: u8,
    pub tier: usize,
    /// Writable.
    pub usable: bool,
    /// The file system is below its floor.
    pub low_space: bool,
    /// The largest file that the file system takes.
    pub file_bytes_max: u64,
    /// Quotas at the high watermark: what may be used before eviction begins.
    pub high_bytes: u64,
    pub high_inodes: u64,
    pub used_bytes: u64,
    pub used_inodes: u64,
    /// Bytes ever placed here.
    pub turned: u64,
}

impl Candidate {
    fn could_take(&self, size: u64, inodes: u64) -> bool {
        self.usable
            && size <= self.high_bytes.min(self.file_bytes_max)
            && inodes <= self.high_inodes
            && (!self.low_space || self.used_bytes > 0)
    }
    fn has_room(&self, size: u64, inodes: u64) -> bool {
        self.could_take(size, inodes)
            && !self.low_space
            && self.used_bytes.saturating_add(size) <= self.high_bytes
            && self.used_inodes + inodes <= self.high_inodes
    }
}

/// The first tier with room, and in it the emptiest root. When everything is full: where the turnover has been lowest for its
/// size, so that files live equally long everywhere and the tiers below the first are not left with dead weight.
/// None: no root can ever take it; the file is read without being cached.
pub(crate) fn choose(candidates: &[Candidate], size: u64, inodes: u64) -> Option<u8> {
    let share = |used: u64, c: &Candidate| u128::from(used) * 1_000_000 / u128::from(c.high_bytes.max(1));
    let with_room = candidates
        .iter()
        .filter(|c| c.has_room(size, inodes))
        .min_by_key(|c| (c.tier, share(c.used_bytes, c), c.root));
    let by_turnover = || {
        candidates
            .iter()
            .filter(|c| c.could_take(size, inodes))
            .min_by_key(|c| (share(c.turned, c), c.tier, c.root))
    };
    with_room.or_else(by_turnover).map(|c| c.root)
}

impl Engine {
    /// Chooses a root for a file that has none yet and charges its inodes there.
    pub(crate) fn place(&self, id: u64, key: &FileKey) -> Option<u8> {
        let mut index = self.lock_index();
        let scope = index.scope_number(&key.scope)?;
        if !index.entries.contains_key(&id)
            || index.scopes[scope as usize].limit.is_some_and(|l| key.size > l)
        {
            return None;
        }
        let high = |quota: u64, percent: u8| (u128::from(quota) * u128::from(percent) / 100) as u64;
        let candidates: Vec<Candidate> = self
            .roots
            .iter()
            .map(|root| {
                let used = &index.roots[usize::from(root.number)];
                Candidate {
                    root: root.number,
                    tier: root.tier,
                    usable: root.is_writable(),
                    low_space: root.low_space.load(Ordering::Relaxed),
                    file_bytes_max: root.file_bytes_max(),
                    high_bytes: high(root.limits.quota_bytes, root.limits.high_percent),
                    high_inodes: high(root.limits.quota_inodes, root.limits.high_percent),
                    used_bytes: used.used_bytes(),
                    used_inodes: used.inodes,
                    turned: used.turned,
                }
            })
            .collect();
        let root = choose(&candidates, key.size, inodes(key.size, self.config.block_bytes))?;
        index.set_root(id, key, root, Rest::Partial);
        Some(root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root(root: u8, tier: usize, high: u64, used: u64) -> Candidate {
        Candidate {
            root,
            tier,
            usable: true,
            low_space: false,
            file_bytes_max: u64::MAX,
            high_bytes: high,
            high_inodes: 100,
            used_bytes: used,
            used_inodes: 0,
            turned: used,
        }
    }

    #[test]
    fn the_first_tier_with_room_takes_a_file() {
        let roots = [root(0, 0, 100, 95), root(1, 1, 1000, 400), root(2, 1, 1000, 300)];
        assert_eq!(choose(&roots, 5, 1), Some(0));
        assert_eq!(choose(&roots, 6, 1), Some(2));
    }

    #[test]
    fn a_file_larger_than_a_tier_goes_to_the_next_or_nowhere() {
        let roots = [root(0, 0, 100, 0), root(1, 1, 1000, 0)];
        assert_eq!(choose(&roots, 500, 1), Some(1));
        assert_eq!(choose(&roots, 5000, 1), None);
        let roots = [Candidate { file_bytes_max: 499, ..roots[1] }, root(2, 1, 1000, 900)];
        assert_eq!(choose(&roots, 499, 1), Some(1));
        assert_eq!(choose(&roots, 500, 1), Some(2), "full, but it has files of that size");
    }

    #[test]
    fn full_roots_take_turns_by_size() {
        let mut roots = [root(0, 0, 100, 100), root(1, 1, 300, 300)];
        let mut placed = [0; 2];
        for _ in 0..400 {
            let chosen = usize::from(choose(&roots, 1, 1).unwrap());
            roots[chosen].turned += 1;
            placed[chosen] += 1;
        }
        assert!((98..=102).contains(&placed[0]), "{placed:?}");
    }

    #[test]
    fn a_degraded_root_and_an_empty_one_on_a_full_disk_take_nothing() {
        let mut roots = [root(0, 0, 100, 0), root(1, 0, 100, 0)];
        roots[0].usable = false;
        roots[1].low_space = true;
        assert_eq!(choose(&roots, 1, 1), None);
    }
}
