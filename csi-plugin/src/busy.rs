//! One operation at a time for each volume, name and target.

use crate::status::Failure;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a call waits for its turn before it gets ABORTED: pods of one claim start together.
pub const PATIENCE: Duration = Duration::from_millis(300);

/// Of what is done at one target. For calls of kubelet beside [`volume_key`]; for what the broker does of its own
/// accord alone: one volume may have many targets, and none of them waits for another one's store.
pub(crate) fn target_key(target: &Path) -> String {
    format!("target {}", target.display())
}

pub(crate) fn volume_key(volume: &str) -> String {
    format!("volume {volume}")
}

#[derive(Debug, Default)]
pub struct Busy {
    held: Mutex<BTreeSet<String>>,
    freed: Condvar,
}

/// Holds its keys until dropped.
#[derive(Debug)]
pub struct Turn {
    busy: Arc<Busy>,
    keys: Vec<String>,
}

impl Busy {
    /// Takes all keys at once or none, so that no two calls can wait for each other.
    pub fn enter(self: &Arc<Self>, keys: &[String], patience: Duration) -> Result<Turn, Failure> {
        let deadline = Instant::now() + patience;
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while let Some(taken) = keys.iter().find(|key| held.contains(*key)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Failure::Busy(taken.clone()));
            }
            held = self.freed.wait_timeout(held, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        held.extend(keys.iter().cloned());
        Ok(Turn { busy: self.clone(), keys: keys.to_vec() })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut held = self.busy.held.lock().unwrap_or_else(PoisonError::into_inner);
        for key in &self.keys {
            held.remove(key);
        }
        self.busy.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_key_is_busy_until_it_is_dropped() {
        let busy = Arc::new(Busy::default());
        let (a, b) = (["volume a".to_owned()], ["volume a".to_owned(), "volume b".to_owned()]);
        let turn = busy.enter(&a, Duration::ZERO).unwrap();
        assert!(matches!(busy.enter(&b, Duration::ZERO), Err(Failure::Busy(key)) if key == "volume a"));
        let waiting = busy.clone();
        let waiter = std::thread::spawn(move || waiting.enter(&b, Duration::from_secs(60)).map(drop));
        drop(turn);
        waiter.join().unwrap().unwrap();
    }
}
