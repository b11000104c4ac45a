//! The lives of a mount's workers, one after the other: started, watched, reaped and succeeded, on the mount's thread.

use super::heal_probe::PendingHeal;
use super::{Current, Mount, MountContext, Phase, confine};
use crate::privileged;
use crate::supervisor::handshake::introduce;
use crate::supervisor::heals::HealCause;
use crate::supervisor::oom;
use crate::supervisor::policy::{self, Deaths, End, Verdict};
use crate::supervisor::spawn::Worker;
use link::broker::{BrokerAnswer, BrokerRequest, Report};
use link::inflight::{Blame, Collected, Inflight};
use link::worker::{Assign, FromWorker, ToWorker, recv};
use link::{MAX_MESSAGE, PacketError, Watchdog, failpoint};
use rustix::event::PollFlags;
use std::os::fd::AsFd;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often the thread looks at heartbeat and stop flag while its worker is silent.
const TICK: Duration = Duration::from_millis(500);
/// From Go to Serving.
const STEP_LIMIT: Duration = Duration::from_secs(10);
/// From Answered to the broker's word that the kernel has its INIT reply.
const GO_LIMIT: Duration = Duration::from_secs(60);
/// How long a killed worker may take to disappear before its successor goes ahead without it.
const REAP_LIMIT: Duration = Duration::from_secs(2);

impl Mount {
    /// The thread of this mount: returns when it is stopped or given up.
    pub fn supervise(self: Arc<Self>, context: &Arc<MountContext>) {
        let mut deaths = Deaths::default();
        let mut takeover = false;
        let mut degraded = false;
        let mut pending = PendingHeal::of(HealCause::Start, 0, None);
        let adopted = self.lock().adopted.take();
        if let Some((since, end)) = adopted {
            takeover = true;
            deaths.died(since, true);
            self.wait_for_the_last_worker();
            failpoint::hit("agent.workers-gone");
            let blame = match end {
                HealCause::Upgrade => {
                    self.inflight.vacate();
                    Blame::Nobody
                }
                _ => Blame::Agent,
            };
            let Some(left) = self.take_up(context, "its agent is gone", None, blame) else { return };
            pending = PendingHeal::of(end, left, None);
            failpoint::hit("agent.collected");
        }
        let heal_timeout = context.workers.in_time(&self.spec).parameters.heal_timeout;
        while !self.stopping() {
            if context.suspend.as_ref().is_some_and(|file| file.exists()) {
                self.enter(Phase::Suspended, "respawn is suspended by the debug file");
                self.pause(Duration::from_millis(20));
                continue;
            }
            match deaths.decide(Instant::now(), heal_timeout) {
                Verdict::GiveUp => return self.give_up(context),
                Verdict::StartAfter(pause) if !pause.is_zero() => {
                    if self.pause(pause) {
                        break;
                    }
                }
                Verdict::StartAfter(_) => {}
            }
            let worker = match context
                .spawner
                .take()
                .map_err(|e| e.to_string())
                .and_then(|w| self.assign(&w, takeover).map(|()| w))
            {
                Ok(worker) => worker,
                Err(why) => {
                    tracing::error!(mount = %self.id, volume = %self.spec.id, why, "worker did not come up");
                    self.enter(if takeover { Phase::Dead } else { Phase::Starting }, &why);
                    deaths.died(Instant::now(), false);
                    // A first start that fails is told to whoever publishes.
                    if takeover && deaths.is_stuck() && !std::mem::replace(&mut degraded, true) {
                        self.tell(context, Report::Degraded { why: format!("no worker comes up: {why}") });
                    }
                    context.spawner.refill();
                    continue;
                }
            };
            if takeover {
                failpoint::hit("agent.worker-assigned");
            }
            let killed_before = oom::kills();
            let current = Current { pid: worker.pid(), socket: worker.socket.clone(), group: None };
            self.set_worker(Some(current));
            context.spawner.refill();
            let mut served = false;
            let end = self.live(&worker, context, &mut |me| {
                served = true;
                // Before anybody is told: once every mount is served its old agent leaves.
                if takeover {
                    failpoint::hit("agent.worker-serving");
                }
                me.enter(Phase::Serving, "");
                me.confine(context);
                if let Some(since) = deaths.unserved_since() {
                    me.prove(context, worker.pid(), pending.clone(), since.elapsed());
                }
                if std::mem::take(&mut degraded) {
                    me.tell(context, Report::Recovered);
                }
                deaths.serving();
            });
            let group = self.set_worker(None).and_then(|worker| worker.group);
            let died = Instant::now();
            let status = worker.kill_and_reap(REAP_LIMIT);
            let memory = group.map(|group| confine::release(context, group));
            if self.stopping() {
                break;
            }
            let oom = oom::kills() > killed_before;
            self.enter(Phase::Dead, &format!("{end:?}"));
            deaths.died(died, served);
            let blame = policy::blame(&end, status, oom);
            if served && blame == Blame::Executing {
                deaths.crashed(died);
            }
            let Some(left) = self.take_up(context, &format!("{end:?}"), status, blame) else { return };
            pending = PendingHeal::of(HealCause::of(&end, status, oom), left, memory).ended(status);
            // Before Go nothing was read from the device, and INIT has not been answered: start over.
            takeover = self.lock().go;
            if !takeover {
                self.enter(Phase::Starting, "");
            }
        }
        self.enter(Phase::Stopped, "");
    }

    /// Nobody reads the device now: what the dead worker took and did not answer becomes its successor's work. Returns
    /// how many requests that are; None if there is nothing left to serve.
    fn take_up(
        self: &Arc<Self>,
        context: &MountContext,
        end: &str,
        status: Option<ExitStatus>,
        blame: Blame,
    ) -> Option<u64> {
        let collected = self.inflight.collect(self.device.as_fd(), blame).unwrap_or_else(|error| {
            // The device says nothing sensible: the successor will find out, or fail its self-tests.
            tracing::error!(mount = %self.id, %error, "what the dead worker left could not be collected");
            Collected::default()
        });
        if blame == Blame::Agent {
            collected.poisoned.iter().for_each(|request| self.condemn(request));
        }
        self.report(context, end, status, &collected);
        if collected.ended || self.connection_ended() {
            // Unmounted or aborted by somebody.
            self.enter(Phase::Failed, "the kernel has ended the connection");
            let _ = context.ended.send(self.id); // fails only when the agent is shutting down
            return None;
        }
        self.close_leaked_backings(context);
        Some(collected.orphans as u64)
    }

    /// The workers of an agent that is gone are being killed by the kernel; none of them is our child.
    fn wait_for_the_last_worker(&self) {
        let end = Instant::now() + REAP_LIMIT;
        while Inflight::is_held(self.shared.as_fd()) {
            if Instant::now() >= end {
                tracing::warn!(mount = %self.id, "the last worker is stuck in the kernel: its successor goes ahead without it");
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Hands the connection over and waits for the INIT answer.
    fn assign(&self, worker: &Worker, takeover: bool) -> Result<(), String> {
        let assign = Assign { takeover, ..self.assign.clone() };
        let (init_reply, mode) =
            introduce(worker, assign, self.device.as_fd(), self.shared.as_fd(), &self.roots)?;
        // A successor works with the answer that the connection has, or fails.
        if !takeover {
            let mut state = self.lock();
            state.init_reply = init_reply;
            state.mode = Some(mode);
            drop(state);
            self.enter(Phase::Answered, "");
        }
        Ok(())
    }

    /// From Go to the end of this worker; `serving` is called once it serves, and says so.
    fn live(
        self: &Arc<Self>,
        worker: &Worker,
        context: &MountContext,
        serving: &mut dyn FnMut(&Arc<Self>),
    ) -> End {
        {
            let state = self.lock();
            let (state, _) = self
                .changed
                .wait_timeout_while(state, GO_LIMIT, |s| !s.go && !s.stop)
                .unwrap_or_else(|p| p.into_inner());
            if state.stop {
                return End::Stopped;
            }
            if !state.go {
                drop(state);
                // The broker went away in the middle of a publish: nobody will ever ask for this mount.
                tracing::warn!(mount = %self.id, volume = %self.spec.id, "a publish was not completed: dropped");
                let _ = context.ended.send(self.id); // fails only when the agent is shutting down
                self.stop();
                return End::Stopped;
            }
        }
        if worker.send(&ToWorker::Go, &[]).is_err() {
            return End::Closed;
        }
        if worker.socket.set_recv_timeout(Some(TICK)).is_err() {
            return End::Closed;
        }
        let mut buffer = vec![0; MAX_MESSAGE];
        let began = Instant::now();
        let mut watchdog = Watchdog::new(self.inflight.heartbeat(), TICK, began);
        let mut last_look = began;
        let mut is_serving = false;
        loop {
            match recv::<FromWorker>(&worker.socket, &mut buffer) {
                Ok((FromWorker::Serving, _)) => {
                    is_serving = true;
                    serving(self);
                }
                Ok((FromWorker::Failed { why }, _)) => return End::Failed(why),
                Ok((message, _)) => context.answer.handle(self, &worker.socket, message),
                Err(PacketError::TimedOut) => {}
                Err(PacketError::Closed) if self.stopping() => return End::Stopped,
                Err(PacketError::Closed) => return End::Closed,
                Err(error) => return End::Failed(error.to_string()),
            }
            if !is_serving && began.elapsed() > STEP_LIMIT {
                return End::Hung;
            }
            if last_look.elapsed() >= TICK {
                last_look = Instant::now();
                self.forget_unheard(&worker.socket);
                let still = watchdog.look(self.inflight.heartbeat(), last_look);
                // A thread of it that is stuck has stopped the heartbeat after the other half.
                if still >= context.hang_limit / 2 && self.requests_wait(context) {
                    return End::Hung;
                }
            }
        }
    }

    fn requests_wait(&self, context: &MountContext) -> bool {
        let ask = context.privileged.ask(BrokerRequest::Waiting { mount: self.id }, Vec::new());
        match context.runtime.block_on(ask) {
            Ok(BrokerAnswer::Waiting { count }) => count > 0,
            // Unknown (the broker is away, or sees no fusectl): those that were read stand in the shared table, and
            // the device is readable while there are others.
            _ => self.inflight.in_flight() > 0 || self.device_says(PollFlags::IN),
        }
    }

    fn tell(&self, context: &MountContext, report: Report) {
        privileged::report(&context.privileged, &context.runtime, self.id, report);
    }

    fn report(&self, context: &MountContext, end: &str, status: Option<ExitStatus>, collected: &Collected) {
        tracing::warn!(
            mount = %self.id, volume = %self.spec.id, end,
            status = %status.map(|s| s.to_string()).unwrap_or_else(|| "not known".into()),
            left = collected.orphans, "worker ended"
        );
        for request in &collected.poisoned {
            tracing::error!(
                mount = %self.id, volume = %self.spec.id, request = ?request,
                "a request killed worker after worker, or agents: answered EIO. Please report this with the log above"
            );
            context.metrics.poisoned(request.operation());
            let what = Report::Poisoned { operation: request.operation().into(), deaths: request.deaths };
            self.tell(context, what);
        }
    }

    fn give_up(&self, context: &MountContext) {
        let why = format!(
            "nobody could serve this mount for {:?} (healTimeout): {}",
            self.spec.parameters.heal_timeout,
            self.lock().why
        );
        tracing::error!(mount = %self.id, volume = %self.spec.id, why, "giving up: readers get ENOTCONN");
        let ask =
            context.privileged.ask(BrokerRequest::Abort { mount: self.id, why: why.clone() }, Vec::new());
        if let Err(error) = context.runtime.block_on(ask) {
            tracing::error!(mount = %self.id, %error, "the broker could not abort the connection");
        }
        self.enter(Phase::Failed, &why);
    }
}
