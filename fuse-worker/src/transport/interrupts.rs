//! Lets only callers go that are being killed: a signal is sent for many reasons.
//!
//! FUSE_INTERRUPT comes once per request, at the first signal. A SIGKILL after a harmless signal sends nothing new, so
//! marked requests are looked at again and again while they wait.

use super::Transport;
use crate::client::Link;
use link::worker::{Ask, Reply};
use std::collections::BTreeSet;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

/// How often the callers of marked requests are looked at.
const AGAIN: Duration = Duration::from_millis(200);
/// Least time between two questions, however many signals come.
const PAUSE: Duration = Duration::from_millis(2);
/// Most threads in one question: a message is 64 KiB.
const TIDS_MAX: usize = 4096;

#[derive(Default)]
pub struct Interrupts {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// A request was marked since the last look.
    marked: bool,
    /// A question to the agent is open.
    asking: bool,
}

impl Interrupts {
    pub fn wake(&self) {
        self.lock().marked = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn answered(&self) {
        self.lock().asking = false;
        self.changed.notify_all();
    }

    /// Waits for a new mark, or for the next look if anything is marked.
    fn wait(&self, anything: bool) {
        let mut state = self.lock();
        if anything && !state.marked {
            state = self.changed.wait_timeout(state, AGAIN).unwrap_or_else(|e| e.into_inner()).0;
        }
        while (!anything && !state.marked) || state.asking {
            state = self.changed.wait(state).unwrap_or_else(|e| e.into_inner());
        }
        state.marked = false;
    }
}

/// Never returns. The first round looks at what the predecessor's callers were marked with.
pub fn run(transport: Arc<Transport>, link: Arc<dyn Link>) -> ! {
    let interrupts = transport.interrupts().clone();
    loop {
        let marked = transport.inflight().interrupted();
        let mut tids: Vec<u32> = marked.iter().map(|request| request.pid).filter(|pid| *pid != 0).collect();
        tids.sort_unstable();
        tids.dedup();
        tids.truncate(TIDS_MAX);
        if !tids.is_empty() {
            interrupts.lock().asking = true;
            let transport = transport.clone();
            link.ask(
                Ask::Dying { tids },
                Box::new(move |answer| {
                    // No answer: no caller is known to be dying; the next look asks again.
                    if let Ok((Reply::Dying { tids }, _)) = answer {
                        let dying: BTreeSet<u32> = tids.into_iter().collect();
                        for request in marked.iter().filter(|request| dying.contains(&request.pid)) {
                            transport.give_up(request.unique);
                        }
                    }
                    transport.interrupts().answered();
                }),
            );
        }
        std::thread::sleep(PAUSE);
        interrupts.wait(!transport.inflight().interrupted().is_empty());
    }
}
