//! The time that a store writes down and compares with, which no administrator can set.
//!
//! All processes that read a store must agree on it, it must go on while the machine sleeps, and it must neither stand
//! still nor jump when the wall clock is stepped: then what was seen would look new for as long as the step, and
//! changes at the source would not be. So it is the time since boot, the same for all processes of a machine, plus a
//! base that is chosen once in each boot and written into the store: what the wall clock said then, less the time since
//! boot. That makes it comparable, roughly, with what another boot has left, and with what a build wrote that takes the
//! wall clock. From either, a time may lie in the future: its age is unknown, so it is stale.

use std::sync::Arc;

/// Never stale: the root, which no source can take away. Far from overflowing when a caller adds to it.
pub const ALWAYS_MS: u64 = u64::MAX / 2;

type Millis = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Where a store has its time from.
#[derive(Clone)]
pub struct Clock {
    boot: Arc<str>,
    /// Also while the machine sleeps.
    since_boot: Millis,
    /// Since 1970.
    wall: Millis,
}

impl Clock {
    /// `boot`: names this run of the machine.
    pub fn new(
        boot: &str,
        since_boot_ms: impl Fn() -> u64 + Send + Sync + 'static,
        wall_ms: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Self {
        Self { boot: boot.into(), since_boot: Arc::new(since_boot_ms), wall: Arc::new(wall_ms) }
    }

    /// The machine's own. `boot`: its boot id.
    pub(super) fn of_machine(boot: &str) -> Self {
        Self::new(boot, since_boot_ms, wall_ms)
    }

    /// `recorded`: what the store says of an earlier choice.
    pub(super) fn base(&self, recorded: Option<&[u8]>) -> Base {
        let known = recorded.and_then(Base::decode).filter(|base| *base.boot == *self.boot);
        known.unwrap_or_else(|| Base {
            boot: self.boot.clone(),
            ms: (self.wall)().saturating_sub((self.since_boot)()),
        })
    }

    pub(super) fn now_ms(&self, base_ms: u64) -> u64 {
        base_ms.saturating_add((self.since_boot)())
    }
}

/// What the time since boot is added to, in one boot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Base {
    boot: Arc<str>,
    pub(super) ms: u64,
}

impl Base {
    /// Milliseconds u64 LE, then the boot.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = self.ms.to_le_bytes().to_vec();
        bytes.extend_from_slice(self.boot.as_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let (ms, boot) = bytes.split_first_chunk::<8>()?;
        Some(Self { ms: u64::from_le_bytes(*ms), boot: std::str::from_utf8(boot).ok()?.into() })
    }
}

/// How long ago something was seen, milliseconds. None: unknown, so it is stale.
pub fn age_ms(seen_ms: u64, now_ms: u64) -> Option<u64> {
    if seen_ms == ALWAYS_MS { Some(0) } else { now_ms.checked_sub(seen_ms) }
}

pub(super) fn since_boot_ms() -> u64 {
    // Answered without a system call, like the wall clock.
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

/// Where nothing is recorded.
pub(super) fn wall_base_ms() -> u64 {
    wall_ms().saturating_sub(since_boot_ms())
}

fn wall_ms() -> u64 {
    use std::time::{SystemTime, UNIX_EPOCH};
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_millis() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

    /// What a volume has to keep, whatever happens to the clock.
    const TTL: u64 = 60_000;

    #[derive(Clone, Debug)]
    enum Step {
        Pass(u64),
        /// The wall clock is set.
        Set(u64),
        /// The machine was off for so long.
        Boot(u64),
        /// The agent is restarted.
        Open,
        Ask,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            4 => (0..2 * TTL).prop_map(Step::Pass),
            2 => (0..4_000_000_000_000u64).prop_map(Step::Set),
            1 => (0..10_000_000u64).prop_map(Step::Boot),
            1 => Just(Step::Open),
            6 => Just(Step::Ask),
        ]
    }

    proptest! {
        /// The source is asked when what is known is older than the TTL, and not twice within one, but for what another
        /// boot has left: how old that is, only the wall clocks of both could tell.
        #[test]
        fn whatever_is_done_to_the_clock_answers_are_as_old_as_promised(
            steps in prop::collection::vec(step(), 1..60),
        ) {
            let (since_boot, wall) = (Arc::new(AtomicU64::new(5_000)), Arc::new(AtomicU64::new(1_700_000_000_000)));
            let clock = |boot: u64| {
                let (since_boot, wall) = (since_boot.clone(), wall.clone());
                Clock::new(&boot.to_string(), move || since_boot.load(Relaxed), move || wall.load(Relaxed))
            };
            let mut boot = 0;
            let mut base = clock(boot).base(None);
            // What the store says, and what is true: the boot, and when in it.
            let (mut seen, mut truth) = (None, None);
            for step in steps {
                match step {
                    Step::Pass(ms) => {
                        since_boot.fetch_add(ms, Relaxed);
                        wall.fetch_add(ms, Relaxed);
                    }
                    Step::Set(ms) => wall.store(ms, Relaxed),
                    Step::Boot(off) => {
                        boot += 1;
                        since_boot.store(1_000, Relaxed);
                        wall.fetch_add(off, Relaxed);
                        base = clock(boot).base(Some(&base.encode()));
                    }
                    Step::Open => {
                        let again = clock(boot).base(Some(&base.encode()));
                        prop_assert_eq!(&again, &base, "one base in one boot");
                        base = again;
                    }
                    Step::Ask => {
                        let now = clock(boot).now_ms(base.ms);
                        let fresh = seen.and_then(|seen| age_ms(seen, now)).is_some_and(|age| age < TTL);
                        if let Some((at_boot, at)) = truth && at_boot == boot {
                            let age = since_boot.load(Relaxed) - at;
                            prop_assert_eq!(fresh, age < TTL, "it is {} ms old", age);
                        }
                        if !fresh {
                            (seen, truth) = (Some(now), Some((boot, since_boot.load(Relaxed))));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_another_boot_left_is_as_old_as_the_wall_clock_says_and_stale_if_that_is_not_yet() {
        let at = |boot: &str, since_boot, wall| Clock::new(boot, move || since_boot, move || wall);
        let first = at("a", 1_000, 1_000_000).base(None);
        let seen = at("a", 501_000, 0).now_ms(first.ms);
        assert_eq!(seen, 1_500_000);
        let later = |wall| {
            let clock = at("b", 2_000, wall);
            age_ms(seen, clock.now_ms(clock.base(Some(&first.encode())).ms))
        };
        assert_eq!(later(1_600_000), Some(100_000));
        assert_eq!(later(1_400_000), None, "the clock of that boot, or of this one, was wrong");
        assert_eq!(age_ms(ALWAYS_MS, 5), Some(0));
        assert_eq!(Base::decode(b"short"), None);
    }
}
