//! The lock that tells which of several agents of a node may work on its cache and state.

use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

const FILE: &str = "owner";
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Held from before the first look into the state directory until cache and state are closed.
#[derive(Debug)]
pub(crate) struct Owner {
    handle: File,
}

impl Owner {
    /// None: another agent has it.
    pub(crate) fn try_take(state_dir: &Path) -> io::Result<Option<Self>> {
        std::fs::create_dir_all(state_dir)?;
        let mut options = File::options();
        let handle =
            options.write(true).create(true).truncate(false).mode(0o600).open(state_dir.join(FILE))?;
        match rustix::fs::flock(&handle, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Self { handle })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// As [`Self::try_take`], for an agent that is about to end or to let go.
    pub(crate) async fn take_within(state_dir: &Path, limit: Duration) -> io::Result<Option<Self>> {
        let end = Instant::now() + limit;
        loop {
            match Self::try_take(state_dir)? {
                None if Instant::now() < end => tokio::time::sleep(LOOK_EVERY).await,
                taken => return Ok(taken),
            }
        }
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        // Closing is not enough: a child forked a moment ago has a copy of the handle until it executes its program.
        // Failure leaves what closing leaves.
        let _ = rustix::fs::flock(&self.handle, rustix::fs::FlockOperation::Unlock);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_agent_at_a_time_and_the_next_when_it_has_let_go() {
        let dir = tempfile::tempdir().unwrap();
        let first = Owner::try_take(dir.path()).unwrap().unwrap();
        assert!(Owner::take_within(dir.path(), Duration::from_millis(3)).await.unwrap().is_none());
        // It lets go while it is waited for.
        let waiting = Owner::take_within(dir.path(), Duration::from_secs(20));
        let letting_go = async { drop(first) }; // after the first look, which is made at once
        let (taken, ()) = tokio::join!(waiting, letting_go);
        drop(taken.unwrap().unwrap());
        assert!(Owner::try_take(dir.path()).unwrap().is_some());
    }
}
