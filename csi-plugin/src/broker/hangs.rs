//! An agent that hangs: it promised a sign of life every second, and none comes. It is killed, so that its DaemonSet
//! starts the one that takes its mounts over.

use super::lifecycle::Lifecycle;
use super::socket::AgentLink;
use link::Watchdog;
use link::broker::AgentEnd;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How often the agent is looked at. A broker that did not run for longer does not blame the agent.
const EVERY: Duration = Duration::from_millis(500);

/// Which agent is watched, and what was seen of it. Decides; [`watch`] acts.
#[derive(Debug)]
struct Watched<A> {
    limit: Duration,
    agent: Option<(Arc<A>, Watchdog)>,
}

impl<A> Watched<A> {
    fn new(limit: Duration) -> Self {
        Self { limit, agent: None }
    }

    /// Another agent, and one that comes back over another connection, is watched anew.
    ///
    /// - `current`: the agent and how often it has beaten; None where it did not promise to, or is busy.
    ///
    /// Returns how long it has been still if that is too long. Then it is not watched any more.
    fn look(&mut self, current: Option<(&Arc<A>, u64)>, now: Instant) -> Option<Duration> {
        let Some((agent, beats)) = current else {
            self.agent = None;
            return None;
        };
        let (_, watchdog) = match self.agent.take() {
            Some((watched, watchdog)) if Arc::ptr_eq(&watched, agent) => {
                self.agent.insert((watched, watchdog))
            }
            _ => self.agent.insert((agent.clone(), Watchdog::new(beats, EVERY, now))),
        };
        let still = watchdog.look(beats, now);
        if still < self.limit {
            return None;
        }
        self.agent = None;
        Some(still)
    }
}

/// Runs until the broker is dropped or stopped.
pub(super) fn watch(lifecycle: &Weak<Lifecycle>, limit: Duration) {
    let mut watched: Watched<AgentLink> = Watched::new(limit);
    loop {
        std::thread::sleep(EVERY);
        let Some(lifecycle) = Lifecycle::running(lifecycle) else { return };
        let Some(agent) = lifecycle.agents.slots.current() else {
            watched.look(None, Instant::now());
            continue;
        };
        let beats = agent.beats().filter(|_| agent.promised_to_beat());
        if let Some(still) = watched.look(beats.map(|beats| (&agent, beats)), Instant::now()) {
            tracing::error!(
                pid = agent.identity().pid,
                ?still,
                "the node agent hangs: killed, so that its successor takes its mounts over"
            );
            lifecycle.agents.ends.note(agent.identity(), AgentEnd::Hung);
            // Its connection ends with it, and the connection's thread hears of it.
            agent.identity().kill();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(15);

    /// Looks every [`EVERY`]: the first time at which it is found to hang, in ms since the first look.
    fn hangs_at(watched: &mut Watched<u8>, start: Instant, looks: &[(Option<&Arc<u8>>, u64)]) -> Vec<u128> {
        let mut found = Vec::new();
        for (n, (agent, beats)) in looks.iter().enumerate() {
            let since = EVERY * n as u32;
            if watched.look(agent.map(|agent| (agent, *beats)), start + since).is_some() {
                found.push(since.as_millis());
            }
        }
        found
    }

    #[test]
    fn an_agent_that_is_still_for_the_limit_hangs_and_one_that_beats_does_not() {
        let (agent, start) = (Arc::new(1), Instant::now());
        let still = vec![(Some(&agent), 7); 80];
        assert_eq!(hangs_at(&mut Watched::new(LIMIT), start, &still), [15_000, 30_500], "once each time");
        let beating: Vec<_> = (0..200).map(|n| (Some(&agent), n / 29)).collect();
        assert!(hangs_at(&mut Watched::new(LIMIT), start, &beating).is_empty());
    }

    #[test]
    fn no_agent_is_blamed_for_the_silence_of_another_or_of_a_time_in_which_it_was_busy() {
        let (first, second, start) = (Arc::new(1), Arc::new(1), Instant::now());
        let turns = |n: usize| Some(if n % 50 < 25 { &first } else { &second });
        let looks: Vec<_> = (0..200).map(|n| (turns(n), 7)).collect();
        assert!(hangs_at(&mut Watched::new(LIMIT), start, &looks).is_empty(), "the second takes its place");
        let looks: Vec<_> = (0..200).map(|n| ((n % 25 > 0).then_some(&first), 7)).collect();
        assert!(hangs_at(&mut Watched::new(LIMIT), start, &looks).is_empty(), "it was busy");
    }
}
