//! What outlives a process of the agent or of the broker: mounts are taken over from an agent that is gone, shown to a
//! broker that is new, and left behind in good order.

use crate::supervisor::heals::HealCause;
use crate::supervisor::{self, Left, Mount};
use crate::volumes::scope::Wants;
use crate::volumes::{self, Arriving, Volumes};
use link::broker::{Adopt, AgentEnd, BrokerAnswer, BrokerRequest, Hold, MountId, Publish};
use link::budget;
use link::{Refusal, RefusalKind};
use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use volume::ScopeId;

/// A successor's worker is there long before; a broker that waits for it longer would hold up its other mounts.
const SERVING_LIMIT: Duration = budget::ADOPTED.time;
/// How long an agent that was asked to stop waits for a broker that holds its mounts. The pod's grace period is longer.
const LEAVE_LIMIT: Duration = budget::AGENT_LEAVES.time;
const LEAVE_POLL: Duration = Duration::from_millis(20);
/// Before a mount is shown again to a broker that had no time for it; later ones wait longer.
const SHOW_PAUSE: Duration = Duration::from_millis(250);
const SHOW_PAUSE_MAX: Duration = Duration::from_secs(5);

impl Volumes {
    /// Serves a mount whose agent is gone. Needs nothing of the source: what is cached must be readable at once.
    pub(crate) async fn adopt(&self, adopt: Adopt, fds: Vec<OwnedFd>) -> Result<(), Refusal> {
        let [device, shared] = <[OwnedFd; 2]>::try_from(fds)
            .map_err(|_| Refusal::new(RefusalKind::Internal, "adopt must carry two descriptors"))?;
        let id = adopt.publish.mount;
        let scope = volumes::scope_of(&adopt.resume)?;
        let Some(arrival) = self.arrive(id, &scope, adopt.publish.spec.namespace())? else {
            // Done means that it is served, or will be.
            return match self.has_live(id) {
                true => Ok(()),
                false => {
                    let why = format!("this agent has given up mount {id}, or is still publishing it");
                    Err(Refusal::new(RefusalKind::Conflict, why))
                }
            };
        };
        let taken = self.take_over(arrival, adopt, scope.clone(), device, shared).await;
        if taken.is_err() {
            self.release_scope(&scope);
        }
        taken
    }

    async fn take_over(
        &self,
        arrival: Arriving<'_>,
        adopt: Adopt,
        scope: ScopeId,
        device: OwnedFd,
        shared: OwnedFd,
    ) -> Result<(), Refusal> {
        let Adopt { publish, resume, backing, orphaned_ms, ended } = adopt;
        let mode = resume.mode;
        let id = publish.mount;
        failpoint::hit("agent.adopt");
        let orphaned = Duration::from_millis(orphaned_ms);
        let since = Instant::now().checked_sub(orphaned).unwrap_or_else(Instant::now);
        let spec = volumes::understand(&publish.spec)?;
        self.may_serve(&spec)?;
        let credentials = self.opener.credentials(&spec, &publish.secrets, publish.spec.environment)?;
        let rotated = !spec.is_in(&scope, &credentials, self.opener.numbers.scope_key());
        let scope = self.open_scope(scope, &spec, &credentials, false).await?;
        if rotated {
            // It asks with newer keys than those that it is named after: see `rotate`.
            scope.source.note_rotated();
        }
        let member = scope.join(Wants::of(&self.config().workers.in_time(&spec).parameters));
        failpoint::hit("agent.scope-opened");
        let descriptors = self.opener.descriptors(device, &scope).await?;
        let area = self.area(mode, &spec, &scope).await?;
        let parts = self.parts(publish, spec, scope, member, mode, &descriptors, area);
        let cause = match ended {
            AgentEnd::Unknown => HealCause::Agent,
            AgentEnd::Asked => HealCause::Upgrade,
            AgentEnd::Hung => HealCause::AgentHang,
        };
        let left = Left { shared, mode, backing, since, cause };
        let mount = Mount::adopt(parts, descriptors, left).map_err(|why| {
            Refusal::new(RefusalKind::Conflict, format!("mount {id} cannot be taken over: {why}"))
        })?;
        if let Some(area) = &mount.area {
            area.note_adopted();
            area.join(id, &mount.executed);
            // The application waits for the mount, and not for this.
            let (area, described) = (area.clone(), mount.described.clone());
            tokio::spawn(async move { area.describe(&described).await });
        }
        failpoint::hit("agent.memory-mapped");
        self.run(arrival, &mount)?;
        // The mount is ours from here on, whatever comes: if no worker comes up, its thread gives it up in time.
        let waiter = mount.clone();
        match tokio::task::spawn_blocking(move || waiter.start(SERVING_LIMIT)).await {
            Ok(Ok(())) => tracing::info!(mount = %id, volume = %mount.spec.id, ?mode, "taken over"),
            _ if !self.has(id) => return Err(volumes::ended_meanwhile(id)),
            Ok(Err(why)) => {
                tracing::error!(mount = %id, volume = %mount.spec.id, why, "taken over, not served yet")
            }
            Err(error) => tracing::error!(mount = %id, %error, "taken over, not served yet"),
        }
        failpoint::hit("agent.adopted");
        Ok(())
    }

    /// The mounts whose every piece is here: a broker that loses its copies gets them back from us.
    pub(crate) fn holding(&self) -> Vec<MountId> {
        self.mounts().iter().filter(|m| m.is_live()).map(|m| m.id).collect()
    }

    /// Shows every mount to a broker that may be new. `away`: when the one before was lost. Returns when each was shown
    /// once; those for which the broker had no time are shown again until it has, or its connection ends.
    pub(crate) async fn show_to_broker(self: Arc<Self>, away: Option<Instant>) {
        let turn = self.shows.fetch_add(1, Ordering::SeqCst) + 1;
        let mut left = self.show(self.holding(), away).await;
        if left.is_empty() || !self.context.privileged.connected() {
            return;
        }
        tracing::warn!(
            mounts = left.len(),
            "the broker has no time to take every mount back: they are shown again"
        );
        let (me, mut pause) = (self.clone(), SHOW_PAUSE);
        self.context.runtime.spawn(async move {
            while !left.is_empty() {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(SHOW_PAUSE_MAX);
                // With the next connection all are shown anew.
                if me.shows.load(Ordering::SeqCst) != turn || !me.context.privileged.connected() {
                    return;
                }
                left = me.show(left, away).await;
            }
            tracing::info!("the broker has been shown every mount");
        });
    }

    /// Returns those for which the broker had no time.
    async fn show(&self, mounts: Vec<MountId>, away: Option<Instant>) -> Vec<MountId> {
        let mut left = Vec::new();
        for mount in mounts.into_iter().filter_map(|id| self.get(id).ok()).filter(|mount| mount.is_live()) {
            supervisor::confine(&mount, &self.context);
            let shown = async {
                let fds = vec![mount.device()?, mount.shared()?];
                Ok::<_, std::io::Error>(self.context.privileged.ask(hold(&mount), fds).await)
            };
            match shown.await {
                Ok(Ok(_)) => {
                    if let Some(away) = away {
                        supervisor::prove_held(&mount, &self.context, away.elapsed());
                    }
                }
                Ok(Err(refusal)) if refusal.kind == RefusalKind::Unavailable => {
                    tracing::debug!(mount = %mount.id, volume = %mount.spec.id, %refusal, "the broker does not take this mount back yet");
                    left.push(mount.id);
                }
                Ok(Err(refusal)) => {
                    tracing::warn!(mount = %mount.id, volume = %mount.spec.id, %refusal, "the broker does not take this mount back");
                }
                Err(error) => {
                    tracing::error!(mount = %mount.id, %error, "no descriptors for the broker's copy")
                }
            }
        }
        left
    }

    /// Is every mount where a successor gets it from?
    pub(crate) async fn is_held(&self) -> bool {
        let ours: BTreeSet<MountId> = self.holding().into_iter().collect();
        if ours.is_empty() {
            return true;
        }
        match self.context.privileged.ask(BrokerRequest::Leaving, Vec::new()).await {
            Ok(BrokerAnswer::Holding { mounts }) => ours.is_subset(&mounts.into_iter().collect()),
            _ => false,
        }
    }

    /// Waits until every mount is where a successor gets it from; takes no new ones from now on.
    pub(crate) async fn leave(&self) {
        self.stop_taking();
        let end = Instant::now() + LEAVE_LIMIT;
        let mut logged = false;
        loop {
            if self.is_held().await {
                tracing::info!("the broker holds every mount for the next agent");
                return;
            }
            if Instant::now() >= end {
                tracing::error!("no broker holds the mounts: they end with this process");
                return;
            }
            if !logged {
                tracing::warn!(limit = ?LEAVE_LIMIT, "waiting for a broker that holds every mount");
                logged = true;
            }
            tokio::time::sleep(LEAVE_POLL).await;
        }
    }
}

fn hold(mount: &Mount) -> BrokerRequest {
    BrokerRequest::Hold(Box::new(Hold {
        publish: Publish {
            mount: mount.id,
            spec: mount.described.clone(),
            secrets: mount.secrets(),
            init: Vec::new(),
        },
        resume: mount.resume(),
        backing: mount.backing(),
    }))
}
