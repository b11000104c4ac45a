//! The process of an agent: two of them must not serve one mount, so one that should have ended is waited for, or killed.

use super::socket::AgentIdentity;
use std::time::{Duration, Instant};

/// An agent that is to end gets so long to exit before it is killed.
const EXIT_LIMIT: Duration = Duration::from_secs(2);

impl AgentIdentity {
    /// Makes sure that this process is gone: its mounts go to another.
    pub(super) fn see_off(&self) {
        self.see_off_within(EXIT_LIMIT);
    }

    pub(super) fn see_off_within(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while self.is_alive() {
            if Instant::now() >= end {
                tracing::warn!(pid = self.pid, "an agent that should have ended is killed");
                self.kill();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn is_alive(&self) -> bool {
        // An agent in the broker's own process, as tests have it, has no end to wait for, and none to bring about.
        let is_ours = self.pid.unsigned_abs() == std::process::id();
        !is_ours && self.started.is_some() && Self::of(self.pid, self.life) == *self && !is_zombie(self.pid)
    }

    pub(super) fn kill(&self) {
        use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
        let Some(pid) = Pid::from_raw(self.pid) else { return };
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return };
        // Looked at after the descriptor was opened: it cannot become another process any more.
        if self.is_alive() {
            let _ = pidfd_send_signal(&process, Signal::KILL); // gone by itself
        }
    }
}

fn is_zombie(pid: i32) -> bool {
    let stat = procfs::process::Process::new(pid).and_then(|process| process.stat());
    stat.is_ok_and(|stat| matches!(stat.state, 'Z' | 'X'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broker_ends_no_agent_of_its_own_process_and_any_other() {
        let ours = AgentIdentity::of(std::process::id() as i32, 1);
        assert!(ours.started.is_some());
        ours.see_off_within(Duration::ZERO); // would be the end of this test

        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let other = AgentIdentity::of(child.id() as i32, 1);
        assert!(other.is_alive());
        other.see_off_within(Duration::ZERO);
        assert!(!child.wait().unwrap().success());
        assert!(!other.is_alive());
    }
}
