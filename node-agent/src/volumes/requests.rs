//! What the broker asks, handed to the volumes.

use super::{Absence, Volumes};
use crate::handoff::order::Order;
use crate::lock::lock;
use crate::supervisor::{self, Phase};
use link::broker::{AgentAnswer, AgentRequest};
use link::{Refusal, RefusalKind};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

#[async_trait::async_trait]
impl crate::broker_client::Serve for Volumes {
    async fn serve(
        &self,
        request: AgentRequest,
        fds: Vec<OwnedFd>,
    ) -> Result<(AgentAnswer, Vec<OwnedFd>), Refusal> {
        match request {
            AgentRequest::Publish(publish) => self.publish(*publish, fds).await,
            AgentRequest::Start { mount } => {
                self.start(mount).await.map(|()| (AgentAnswer::Done, Vec::new()))
            }
            AgentRequest::Adopt(adopt) => {
                self.adopt(*adopt, fds).await.map(|()| (AgentAnswer::Done, Vec::new()))
            }
            AgentRequest::Holding => {
                // An agent that departs takes no mount.
                let leaving = self.leaving.load(Ordering::Acquire);
                let mounts = if leaving { Vec::new() } else { self.holding() };
                Ok((AgentAnswer::Holding { mounts }, Vec::new()))
            }
            AgentRequest::Unpublish { mount } => {
                self.unpublish(mount).await;
                Ok((AgentAnswer::Done, Vec::new()))
            }
            AgentRequest::Usage { mount } => self.usage(mount).map(|u| (AgentAnswer::Usage(u), Vec::new())),
            AgentRequest::Upload { mount, limit_ms } => {
                let left = self.upload_before_end(mount, Duration::from_millis(limit_ms)).await?;
                Ok((AgentAnswer::Unsent(left), Vec::new()))
            }
            AgentRequest::Rotate { mount, secrets } => {
                self.rotate(mount, &secrets.0).await.map(|()| (AgentAnswer::Done, Vec::new()))
            }
            AgentRequest::Renewed { mount, took_us } => {
                let mount = self.get(mount)?;
                supervisor::note_renewal(&mount, &self.context.heals, Duration::from_micros(took_us));
                Ok((AgentAnswer::Done, Vec::new()))
            }
            AgentRequest::Drain => {
                let not_now = |why| Err(Refusal::new(RefusalKind::Unavailable, why));
                if self.leaving.load(Ordering::Acquire) {
                    return not_now("this agent is exiting");
                }
                if !self.is_held().await {
                    return not_now("the broker does not hold every mount of this agent yet");
                }
                let (done, drained) = oneshot::channel();
                self.order(Order::Drain(done));
                match drained.await {
                    Ok(()) => Ok((AgentAnswer::Done, Vec::new())),
                    Err(_) => not_now("this agent is exiting"),
                }
            }
            AgentRequest::Resume => {
                self.order(Order::Resume);
                Ok((AgentAnswer::Done, Vec::new()))
            }
            AgentRequest::Depart => {
                self.order(Order::Depart);
                Ok((AgentAnswer::Done, Vec::new()))
            }
            AgentRequest::Prepare(_) | AgentRequest::Succeed | AgentRequest::Dismiss { .. } => {
                Err(Refusal::new(RefusalKind::Conflict, "this agent is no successor: it serves already"))
            }
        }
    }

    async fn connected(self: Arc<Self>) {
        let drained = self.is_drained();
        let absence = lock(&self.absence).take();
        for id in absence.iter().flat_map(|absence| &absence.unfinished) {
            // No request would ever name it: the publish failed with its broker, and is repeated as another mount.
            if self.get(*id).is_ok_and(|mount| !mount.is_started()) {
                self.unpublish(*id).await;
            }
        }
        // A new broker is not shown what was given up: it would never ask for it to be dropped.
        for given_up in self.mounts().into_iter().filter(|mount| mount.state().phase == Phase::Failed) {
            self.unpublish(given_up.id).await;
        }
        let since = absence.map(|absence| absence.since).filter(|_| !drained);
        self.clone().show_to_broker(since).await;
        if drained {
            // Its descriptors are closed next.
            self.leave().await;
            self.order(Order::Shown);
        }
    }

    fn is_drained(&self) -> bool {
        self.drained.load(Ordering::Acquire)
    }

    fn lost(&self) {
        // Mounts go on: workers need the broker for backing ids and dying callers only.
        let absence = || Absence { since: Instant::now(), unfinished: self.unfinished() };
        lock(&self.absence).get_or_insert_with(absence);
    }
}
