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

/// Runs until the broker is dropped or stopped.
pub(super) fn watch(lifecycle: &Weak<Lifecycle>, limit: Duration) {
    let mut watched: Option<(Arc<AgentLink>, Watchdog)> = None;
    loop {
        std::thread::sleep(EVERY);
        let Some(lifecycle) = Lifecycle::running(lifecycle) else { return };
        let now = Instant::now();
        let agent = lifecycle.agents.slots.current().filter(|agent| agent.promised_to_beat());
        let Some((agent, beats)) = agent.and_then(|agent| Some((agent.clone(), agent.beats()?))) else {
            watched = None;
            continue;
        };
        let (_, watchdog) = match watched.take() {
            Some((link, watchdog)) if Arc::ptr_eq(&link, &agent) => watched.insert((link, watchdog)),
            _ => watched.insert((agent.clone(), Watchdog::new(beats, EVERY, now))),
        };
        let still = watchdog.look(beats, now);
        if still >= limit {
            tracing::error!(
                pid = agent.identity().pid,
                ?still,
                "the node agent hangs: killed, so that its successor takes its mounts over"
            );
            lifecycle.agents.ends.note(agent.identity(), AgentEnd::Hung);
            agent.identity().kill();
            // Its connection ends with it, and the connection's thread hears of it. A new one is watched anew.
            watched = None;
        }
    }
}
