//! Mounts that no agent serves any more: ended when their `healTimeout` is over, so that readers fail instead of
//! hanging.

use super::lifecycle::Lifecycle;
use super::mounts_table::State;
use std::time::{Duration, Instant};

/// How long without a look at the clock; a lost agent wakes the watcher as well.
const IDLE: Duration = Duration::from_secs(5);

/// Is this mount's time over, or when will it be?
pub fn left(state: State, heal_timeout: Duration, now: Instant) -> Option<Duration> {
    match state {
        // An agent that is given a mount may hang: readers wait no longer for that.
        State::Orphaned(since) | State::Adopting(since) => {
            Some((since + heal_timeout).saturating_duration_since(now))
        }
        State::Preparing | State::Serving | State::Dead | State::Unpublished => None,
    }
}

/// Runs until the broker is dropped or stopped.
pub(super) fn watch(lifecycle: &std::sync::Weak<Lifecycle>) {
    loop {
        let Some(lifecycle) = Lifecycle::running(lifecycle) else { return };
        let wait = end_overdue(&lifecycle, Instant::now());
        drop(lifecycle);
        std::thread::park_timeout(wait);
    }
}

/// Ends what is due; returns how long until the next look.
pub(super) fn end_overdue(lifecycle: &Lifecycle, now: Instant) -> Duration {
    let mut wait = IDLE;
    for mount in lifecycle.table.all() {
        let seen = mount.state();
        match left(seen, mount.heal_timeout(), now) {
            Some(Duration::ZERO) => {
                let why = format!("its agent has been gone for healTimeout ({:?})", mount.heal_timeout());
                // An agent may have taken it since we looked.
                lifecycle.end_if(&mount, &why, |state, _| state == seen);
            }
            Some(left) => wait = wait.min(left),
            None => {}
        }
    }
    wait
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_orphans_expire() {
        let now = Instant::now();
        let limit = Duration::from_secs(60);
        assert_eq!(left(State::Serving, limit, now), None);
        assert_eq!(left(State::Dead, limit, now), None);
        assert_eq!(left(State::Unpublished, limit, now), None);
        assert_eq!(left(State::Orphaned(now), limit, now), Some(limit));
        assert_eq!(left(State::Adopting(now), limit, now + limit / 2), Some(limit / 2));
        assert_eq!(left(State::Orphaned(now), limit, now + limit * 2), Some(Duration::ZERO));
    }
}
