//! Checksums of whole objects that stores told while bytes of them came, kept until they are asked for.

use crate::Version;
use crate::dialect::checksum::Checksum;
use reqwest::Url;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// Twice so many are kept at most.
const GENERATION: usize = 2048;
/// After so many wrong ones a store is not believed.
const WRONG: u32 = 3;
/// After so many objects of which the store told nothing …
const UNTOLD: u32 = 16;
/// … it is asked about one in so many.
const ONE_IN: u32 = 64;

#[derive(Default)]
pub(super) struct Told {
    keys: RandomState,
    kept: Mutex<Kept>,
    /// So often in a row the store was asked and told nothing.
    untold: AtomicU32,
    /// So often what it told was wrong.
    wrong: AtomicU32,
    /// The last write was answered with the checksum of what arrived.
    arrived: AtomicBool,
}

/// The older half goes as a whole.
#[derive(Default)]
struct Kept {
    young: HashMap<u64, Option<Checksum>>,
    old: HashMap<u64, Option<Checksum>>,
}

impl Told {
    /// `told`: None where it tells none of this object.
    pub(super) fn note(&self, url: &Url, version: &Version, told: Option<Checksum>) {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.young.len() >= GENERATION {
            kept.old = std::mem::take(&mut kept.young);
        }
        kept.young.insert(self.keys.hash_one((url, version)), told);
    }

    /// None: nothing came of it, or so long ago that it is forgotten.
    pub(super) fn take(&self, url: &Url, version: &Version) -> Option<Option<Checksum>> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let key = self.keys.hash_one((url, version));
        let (young, old) = (kept.young.remove(&key), kept.old.remove(&key));
        young.or(old)
    }

    pub(super) fn is_believed(&self) -> bool {
        self.wrong.load(Ordering::Relaxed) < WRONG
    }

    /// A write was answered, with or without the checksum of what arrived.
    pub(super) fn arrived(&self, was_told: bool) {
        self.arrived.store(was_told, Ordering::Relaxed);
    }

    /// Most likely the next one is told it, too. False before the first one.
    pub(super) fn tells_sums(&self) -> bool {
        self.arrived.load(Ordering::Relaxed)
    }

    /// Once more. Was that too much?
    pub(super) fn is_wrong(&self) -> bool {
        self.wrong.fetch_add(1, Ordering::Relaxed) + 1 == WRONG
    }

    /// Is it worth a request?
    pub(super) fn is_worth_asking(&self) -> bool {
        let untold = self.untold.load(Ordering::Relaxed);
        untold < UNTOLD || self.untold.fetch_add(1, Ordering::Relaxed).is_multiple_of(ONE_IN)
    }

    /// What came of a request.
    pub(super) fn asked(&self, was_told: bool) {
        if was_told {
            self.untold.store(0, Ordering::Relaxed);
        } else {
            self.untold.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crc_fast::CrcAlgorithm;

    fn url(k: u64) -> Url {
        Url::parse(&format!("http://store/{k}")).unwrap()
    }

    fn sum(value: u64) -> Option<Checksum> {
        Some(Checksum { algorithm: CrcAlgorithm::Crc64Nvme, value, of_range: false })
    }

    #[test]
    fn the_last_thousands_are_known_and_no_more() {
        let (told, version) = (Told::default(), Version("v".into()));
        for k in 0..100_000_u64 {
            told.note(&url(k), &version, sum(k));
        }
        let kept = told.kept.lock().unwrap();
        assert!(kept.young.len() + kept.old.len() <= 2 * GENERATION);
        drop(kept);
        let last = url(99_999);
        assert_eq!(told.take(&last, &Version("w".into())), None);
        assert_eq!(told.take(&last, &version), Some(sum(99_999)));
        assert_eq!(told.take(&last, &version), None);
        told.note(&url(7), &version, None);
        assert_eq!(told.take(&url(7), &version), Some(None));
    }

    #[test]
    fn a_store_that_tells_wrong_ones_is_not_believed_for_long() {
        let told = Told::default();
        let believed: Vec<_> = (0..5).map(|_| (told.is_believed(), told.is_wrong())).collect();
        assert_eq!(believed, [(true, false), (true, false), (true, true), (false, false), (false, false)]);
    }

    #[test]
    fn a_store_that_tells_nothing_is_seldom_asked() {
        let told = Told::default();
        let asked = |times: u32, tells: bool| {
            let worth = (0..times).filter(|_| told.is_worth_asking()).inspect(|_| told.asked(tells)).count();
            u32::try_from(worth).unwrap()
        };
        assert_eq!(asked(UNTOLD, false), UNTOLD);
        let seldom = asked(1000 * ONE_IN, false);
        assert!((500..=1100).contains(&seldom), "{seldom}");
        // Once it tells something it is asked each time.
        while !told.is_worth_asking() {}
        told.asked(true);
        assert_eq!(asked(1000, true), 1000);
    }
}
