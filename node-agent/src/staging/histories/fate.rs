//! When the agent of a history dies: at a step, or at any time.

use crate::lock::lock;
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use tokio::sync::Notify;

#[derive(Default)]
pub(super) struct Fate {
    dead: AtomicBool,
    /// Its workers are gone.
    leaving: AtomicBool,
    /// The step, and how often the agent gets past it.
    armed: Mutex<Option<(&'static str, u32)>>,
    /// Deaths at each step.
    pub(super) deaths: Mutex<BTreeMap<&'static str, u32>>,
    died: Notify,
}

/// What unwinds.
struct Died;

impl Fate {
    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(SeqCst)
    }

    /// Another agent starts.
    pub(super) fn begins(&self, armed: Option<(&'static str, u32)>) {
        *lock(&self.armed) = armed;
        self.dead.store(false, SeqCst);
        self.leaving.store(false, SeqCst);
    }

    /// What it has begun goes on, and nobody hears what comes of it.
    pub(super) fn leaves(&self) {
        self.leaving.store(true, SeqCst);
    }

    /// Nothing of it goes on.
    pub(super) fn ends(&self) {
        self.dead.store(true, SeqCst);
    }

    pub(super) async fn death(&self) {
        self.died.notified().await;
    }

    /// Never returns in an agent that is dead (what it had begun does not go on) or leaves.
    pub(super) async fn is_alive(&self) {
        if self.is_dead() || self.leaving.load(SeqCst) {
            std::future::pending().await
        }
    }

    pub(super) fn step(&self, step: &str) {
        let armed = |armed: &mut Option<(&'static str, u32)>| {
            let (at, left) = armed.as_mut().filter(|(at, _)| *at == step)?;
            match left.checked_sub(1) {
                Some(fewer) => *left = fewer,
                None => return Some(*at),
            }
            None
        };
        let at = armed(&mut lock(&self.armed));
        if let Some(at) = at.filter(|_| !self.is_dead()) {
            *lock(&self.deaths).entry(at).or_default() += 1;
            self.ends();
            self.died.notify_one();
        }
        if self.is_dead() {
            std::panic::resume_unwind(Box::new(Died)); // says nothing
        }
    }
}
