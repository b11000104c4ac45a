//! A mount is healed when a helper process of the broker has read through it. No call waits for the proof.

use super::confine::Verdict;
use super::mount::{Mount, MountContext};
use crate::supervisor::heals::{Heal, HealCause, Heals};
use link::broker::{BrokerAnswer, BrokerRequest};
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

/// The broker may be away, or busy with the mounts of others.
const PAUSE: Duration = Duration::from_millis(250);
/// A mount that serves answers long before.
const LIMIT: Duration = Duration::from_secs(60);

/// What a successor finds.
#[derive(Clone, Debug)]
pub(super) struct PendingHeal {
    cause: HealCause,
    /// Requests that it executes in the dead one's place.
    replayed: u64,
    /// What the dead one's memory group says.
    memory: Option<Verdict>,
    ended: String,
}

impl PendingHeal {
    pub(super) fn of(cause: HealCause, replayed: u64, memory: Option<Verdict>) -> Self {
        Self { cause, replayed, memory, ended: String::new() }
    }

    /// How the dead one's process ended.
    pub(super) fn ended(mut self, status: Option<ExitStatus>) -> Self {
        self.ended = status.map(|status| status.to_string()).unwrap_or_default();
        self
    }

    /// Its group knows better than the machine's count, in which others may have died.
    async fn cause(&self) -> HealCause {
        match (self.cause, &self.memory) {
            (HealCause::Signal | HealCause::Oom, Some(memory)) => match memory.clone().await {
                Some(true) => HealCause::Oom,
                Some(false) => HealCause::Signal,
                None => self.cause,
            },
            (cause, _) => cause,
        }
    }
}

/// Records a heal as soon as it can be seen from outside that `worker` serves.
pub(super) fn prove(
    mount: &Arc<Mount>,
    context: &MountContext,
    worker: u32,
    pending: PendingHeal,
    took: Duration,
) {
    // Not the mount itself: one that is unpublished meanwhile must let its scope go at once.
    let (weak, id, volume) = (Arc::downgrade(mount), mount.id, mount.spec.id.clone());
    let (privileged, heals) = (context.privileged.clone(), context.heals.clone());
    context.runtime.spawn(async move {
        let end = Instant::now() + LIMIT;
        loop {
            let asked = privileged.ask(BrokerRequest::Probe { mount: id }, Vec::new()).await;
            let is_it = weak.upgrade().is_some_and(|mount| mount.served_by() == Some(worker));
            match asked {
                Ok(BrokerAnswer::Probed { serving: true }) if is_it => break,
                _ if !is_it => {
                    tracing::debug!(mount = %id, worker, "a successor went before it was seen to serve");
                    return;
                }
                other if Instant::now() >= end => {
                    tracing::error!(
                        mount = %id, %volume, cause = pending.cause.name(), ?other,
                        "a worker serves, but nothing could be read through the mount"
                    );
                    return;
                }
                _ => tokio::time::sleep(PAUSE).await,
            }
        }
        let (cause, replayed) = (pending.cause().await, pending.replayed);
        if let Some(mount) = weak.upgrade() {
            mount.count_heal();
        }
        let ended = pending.ended;
        tracing::info!(
            mount = %id, %volume, level = cause.level(), cause = cause.name(), ended, replayed,
            duration_us = took.as_micros() as u64, "healed: {}", text(cause)
        );
        heals.record(Heal {
            at: SystemTime::now(),
            volume,
            mount: id,
            cause,
            took,
            level: cause.level(),
            replayed,
            ended,
        });
    });
}

/// A new broker holds it, `took` after the old one was lost. While its worker is being replaced that heal tells of it.
pub(crate) fn prove_held(mount: &Arc<Mount>, context: &MountContext, took: Duration) {
    if let Some(worker) = mount.served_by() {
        prove(mount, context, worker, PendingHeal::of(HealCause::Broker, 0, None), took);
    }
}

/// It was made in the place of a dead one, and the broker has read through it.
pub(crate) fn note_renewal(mount: &Mount, heals: &Heals, took: Duration) {
    mount.count_heal();
    let cause = HealCause::Ended;
    heals.record(Heal {
        at: SystemTime::now(),
        volume: mount.spec.id.clone(),
        mount: mount.id,
        cause,
        took,
        level: cause.level(),
        replayed: 0,
        ended: String::new(),
    });
}

fn text(cause: HealCause) -> &'static str {
    match cause {
        HealCause::Broker => "the broker is back, and holds the mount",
        _ => "a successor serves the mount",
    }
}
