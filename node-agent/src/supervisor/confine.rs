//! A limit of memory for each worker, from the broker: asked for when it serves, so that no call waits for it, and
//! given back when it is dead.

use super::mount::{Mount, MountContext};
use crate::privileged::Privileged;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use link::RefusalKind;
use link::broker::{BrokerAnswer, BrokerRequest};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::sync::{Arc, Weak};

/// Whether the kernel has killed for want of memory in a worker's group; None: not known.
pub(super) type Verdict = Shared<BoxFuture<'static, Option<bool>>>;

/// Asks for the present worker's limit, unless it has one.
pub(crate) fn confine(mount: &Arc<Mount>, context: &Arc<MountContext>) {
    let Some(bytes) = context.memory_limit else { return };
    let Some(pid) = mount.worker_without_group() else { return };
    let process = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let process = process.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    // Our child is not reaped as long as it is the present worker: looked at after the descriptor was opened.
    let Some(process) = process.filter(|_| mount.is_worker(pid)) else { return };
    // Not the mount itself: see `heal_probe`.
    let (weak, id, context) = (Arc::downgrade(mount), mount.id, context.clone());
    let is_worker = move |mount: &Weak<Mount>| mount.upgrade().is_some_and(|mount| mount.is_worker(pid));
    context.runtime.clone().spawn(async move {
        match context.privileged.ask(BrokerRequest::Confine { bytes }, vec![process]).await {
            Ok(BrokerAnswer::Confined { group }) => {
                let late = match weak.upgrade() {
                    Some(mount) => mount.note_group(pid, group),
                    None => Some(group),
                };
                if let Some(late) = late {
                    let _ = ask_release(context.privileged.as_ref(), late).await; // the broker sweeps in the end
                }
            }
            // A broker that comes back is asked again.
            Err(refusal) if refusal.kind == RefusalKind::Unavailable => {
                tracing::debug!(mount = %id, pid, %refusal, "a worker without a limit of memory");
            }
            Err(refusal) if is_worker(&weak) => context.unlimited.call_once(|| {
                tracing::warn!(%refusal, "workers have no limit of memory of their own: one that takes too much may take the agent along");
            }),
            // It was dead before the broker could look at it, or the broker talks nonsense.
            other => tracing::debug!(mount = %id, pid, ?other, "no limit of memory"),
        }
    });
}

/// Gives a dead worker's group back, whether a caller waits for the answer or not.
pub(super) fn release(context: &MountContext, group: String) -> Verdict {
    let privileged = context.privileged.clone();
    let asked = context.runtime.spawn(async move { ask_release(privileged.as_ref(), group).await });
    async move { asked.await.ok().flatten() }.boxed().shared()
}

async fn ask_release(privileged: &dyn Privileged, group: String) -> Option<bool> {
    match privileged.ask(BrokerRequest::Release { group }, Vec::new()).await {
        Ok(BrokerAnswer::Released { oom_kills }) => Some(oom_kills > 0),
        other => {
            tracing::debug!(?other, "a dead worker's group was not released");
            None
        }
    }
}
