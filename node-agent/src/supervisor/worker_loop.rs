//! The thread of a mount: performs what the machine of `supervisor::machine` decides, and says what came of it.

use super::confine;
use super::heal_probe::{PendingHeal, prove};
use super::mount::{Mount, MountContext};
use crate::child_log::words;
use crate::privileged;
use crate::supervisor::machine::{Action, Ended, Event, Limits, Machine, State, TICK};
use crate::supervisor::oom;
use crate::supervisor::spawn::Worker;
use inflight::{Blame, Collected};
use link::broker::{BrokerAnswer, BrokerRequest, Report};
use link::budget;
use link::worker::{Assign, FromWorker, ToWorker, recv};
use link::{MAX_MESSAGE, PacketError, RefusalKind};
use std::collections::VecDeque;
use std::process::ExitStatus;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a killed worker may take to disappear before its successor goes ahead without it.
const REAP_LIMIT: Duration = budget::REAP.time;
/// Between two looks at the debug file.
const SUSPENDED_LOOK: Duration = Duration::from_millis(20);

/// The thread of a mount: returns when it is stopped, has ended or is given up.
pub(crate) fn supervise(mount: Arc<Mount>, context: &Arc<MountContext>) {
    let limits = Limits {
        heal_timeout: context.workers.in_time(&mount.spec).parameters.heal_timeout,
        hang_limit: context.hang_limit,
    };
    let (machine, actions) = match mount.take_adopted() {
        Some((since, cause)) => Machine::adopt(limits, since, cause),
        None => Machine::publish(limits, Instant::now()),
    };
    let supervisor = Supervisor {
        mount,
        context,
        machine,
        events: VecDeque::new(),
        worker: None,
        buffer: vec![0; MAX_MESSAGE],
        last_look: Instant::now(),
        oom_kills: 0,
        left: None,
    };
    supervisor.run(actions);
}

/// The machine of one mount, and what its actions need.
struct Supervisor<'c> {
    mount: Arc<Mount>,
    context: &'c Arc<MountContext>,
    machine: Machine,
    events: VecDeque<Event>,
    worker: Option<Worker>,
    buffer: Vec<u8>,
    /// At the heartbeat.
    last_look: Instant,
    /// Of the machine, when the present worker began.
    oom_kills: u64,
    /// How the last worker ended, and what its memory group says of that.
    left: Option<(Option<ExitStatus>, Option<confine::Verdict>)>,
}

impl Supervisor<'_> {
    fn run(mut self, actions: Vec<Action>) {
        self.perform(actions);
        while !self.machine.is_over() {
            let event = self.events.pop_front().unwrap_or_else(|| self.wait());
            if let Event::Serves = event
                && self.machine.is_successor()
            {
                // Before any report: once every mount is served the old agent departs.
                failpoint::hit("agent.worker-serving");
            }
            // Said to every message of the worker: worth no lock.
            let is_quiet = matches!(event, Event::Tick | Event::Heartbeat(_));
            let before = self.machine.phase();
            let actions = self.machine.on(event, Instant::now());
            if !is_quiet || self.machine.phase() != before {
                self.mount.enter(self.machine.phase(), self.machine.why());
            }
            self.perform(actions);
        }
    }

    fn perform(&mut self, actions: Vec<Action>) {
        for action in actions {
            let is_about_worker = matches!(action, Action::Introduce { .. } | Action::KillAndReap);
            let event = self.perform_one(action);
            // A stop that came before the worker was known did not reach it; one that came after has closed its socket.
            if is_about_worker && self.mount.stopping() && !self.machine.is_stopping() {
                self.events.push_back(Event::Stop);
            }
            self.events.extend(event);
        }
    }

    fn perform_one(&mut self, action: Action) -> Option<Event> {
        let (mount, context) = (self.mount.clone(), self.context);
        match action {
            Action::AwaitPredecessor => {
                // They are being killed by the kernel; none of them is our child.
                if !mount.connection.wait_until_free(REAP_LIMIT) {
                    tracing::warn!(mount = %mount.id, "the last worker is stuck in the kernel: its successor goes ahead without it");
                }
                failpoint::hit("agent.workers-gone");
                Some(Event::PredecessorGone)
            }
            Action::Introduce { takeover } => Some(self.introduce(takeover)),
            Action::SendGo => {
                self.last_look = Instant::now();
                let worker = self.worker.as_ref()?;
                let sent = worker.send(&ToWorker::Go, &[]).is_ok();
                match sent && worker.socket.set_recv_timeout(Some(TICK)).is_ok() {
                    true => Some(Event::Heartbeat(mount.connection.heartbeat())),
                    false => Some(Event::Closed),
                }
            }
            Action::AskWaiting => Some(Event::Waiting(self.requests_wait())),
            Action::KillAndReap => {
                let group = mount.end_worker();
                let status = self.worker.take().and_then(|worker| worker.kill_and_reap(REAP_LIMIT));
                let memory = group.map(|group| confine::release(context, group));
                self.left = Some((status, memory));
                Some(Event::Reaped { status, oom: oom::kills() > self.oom_kills })
            }
            Action::Collect { blame, vacate } => {
                if vacate {
                    mount.connection.vacate();
                }
                Some(self.collect(blame))
            }
            Action::Prove { cause, replayed, took } => {
                let (status, memory) = self.left.clone().unwrap_or_default();
                let pending = PendingHeal::of(cause, replayed, memory).ended(status);
                if let Some(worker) = &self.worker {
                    prove(&mount, context, worker.pid(), pending, took);
                }
                None
            }
            Action::Confine => {
                confine::confine(&mount, context);
                None
            }
            Action::ReportDegraded { why } => {
                self.tell(Report::Degraded { why });
                None
            }
            Action::ReportRecovered => {
                self.tell(Report::Recovered);
                None
            }
            Action::Drop => {
                tracing::warn!(mount = %mount.id, volume = %mount.spec.id, "a publish was not completed: dropped");
                let _ = context.ended.send(mount.id); // fails only when the agent is shutting down
                mount.stop();
                None
            }
            Action::NoteEnded => {
                let _ = context.ended.send(mount.id); // fails only when the agent is shutting down
                None
            }
            Action::Abort { why } => {
                tracing::error!(mount = %mount.id, volume = %mount.spec.id, why, "giving up: readers get ENOTCONN");
                let ask = context.privileged.ask(BrokerRequest::Abort { mount: mount.id, why }, Vec::new());
                let asked = context.runtime.block_on(ask);
                if let Err(error) = &asked {
                    tracing::error!(mount = %mount.id, %error, "the broker could not abort the connection");
                }
                // One that came when the connection had ended already does not take such a mount.
                let is_known = !asked.is_err_and(|refusal| refusal.kind == RefusalKind::NotFound);
                Some(Event::Aborted { is_known })
            }
        }
    }

    fn introduce(&mut self, takeover: bool) -> Event {
        let (mount, context) = (self.mount.clone(), self.context);
        if context.suspend.as_ref().is_some_and(|file| file.exists()) {
            return Event::Suspended;
        }
        let taken = context.spawner.take().map_err(|e| e.to_string());
        let introduced = taken.and_then(|worker| assign(&mount, &worker, takeover).map(|()| worker));
        let event = match introduced {
            Ok(worker) => {
                if takeover {
                    failpoint::hit("agent.worker-assigned");
                }
                self.oom_kills = oom::kills();
                mount.set_worker(&worker);
                self.worker = Some(worker);
                Event::Introduced
            }
            Err(why) => {
                tracing::error!(mount = %mount.id, volume = %mount.spec.id, why, "worker did not come up");
                Event::NotIntroduced { why }
            }
        };
        context.spawner.refill();
        event
    }

    fn collect(&self, blame: Blame) -> Event {
        let (mount, context) = (&self.mount, self.context);
        let is_adopted = matches!(self.machine.state(), State::Collecting { ended: Ended::Agent(_) });
        let (end, status) = match self.machine.state() {
            State::Collecting { ended: Ended::Worker { end, status, .. } } => (format!("{end:?}"), *status),
            _ => ("its agent is gone".to_owned(), None),
        };
        let collected = mount.connection.collect(blame).unwrap_or_else(|error| {
            // The device says nothing sensible: the successor will find out, or fail its self-tests.
            tracing::error!(mount = %mount.id, %error, "what the dead worker left could not be collected");
            Collected::default()
        });
        if blame == Blame::Agent {
            collected.poisoned.iter().for_each(|request| mount.condemn(request));
        }
        self.report(&end, status, &collected);
        let ended = collected.ended || mount.connection.has_ended();
        if !ended {
            close_leaked_backings(mount, context);
            if is_adopted {
                failpoint::hit("agent.collected");
            }
        }
        Event::Collected { orphans: collected.orphans as u64, ended }
    }

    fn requests_wait(&self) -> bool {
        let ask = self.context.privileged.ask(BrokerRequest::Waiting { mount: self.mount.id }, Vec::new());
        match self.context.runtime.block_on(ask) {
            Ok(BrokerAnswer::Waiting { count }) => count > 0,
            // Unknown: the broker is away, or sees no fusectl.
            _ => self.mount.connection.requests_wait(),
        }
    }

    fn tell(&self, report: Report) {
        privileged::report(&self.context.privileged, &self.context.runtime, self.mount.id, report);
    }

    fn report(&self, end: &str, status: Option<ExitStatus>, collected: &Collected) {
        let mount = &self.mount;
        tracing::warn!(
            mount = %mount.id, volume = %mount.spec.id, end,
            status = %status.map(|s| s.to_string()).unwrap_or_else(|| "not known".into()),
            left = collected.orphans, "worker ended"
        );
        for request in &collected.poisoned {
            tracing::error!(
                mount = %mount.id, volume = %mount.spec.id, request = ?request,
                "a request killed worker after worker, or agents: answered EIO. Please report this with the log above"
            );
            self.context.metrics.poisoned(request.operation());
            let what = Report::Poisoned { operation: request.operation().into(), deaths: request.deaths };
            self.tell(what);
        }
    }

    /// Until something happens that the machine has to know.
    fn wait(&mut self) -> Event {
        let mount = self.mount.clone();
        match self.machine.state() {
            // A stop closes the worker's socket.
            State::Starting { .. } | State::Serving => self.hear(),
            _ if mount.stopping() && !self.machine.is_stopping() => Event::Stop,
            State::Suspended => {
                mount.pause(SUSPENDED_LOOK);
                match self.context.suspend.as_ref().is_some_and(|file| file.exists()) {
                    true => Event::Tick,
                    false => Event::Resumed,
                }
            }
            State::Answered { until } => match mount.wait_for_go(*until) {
                true => Event::Go,
                false => Event::Tick,
            },
            _ => {
                let left =
                    self.machine.deadline().map(|until| until.saturating_duration_since(Instant::now()));
                mount.pause(left.unwrap_or(SUSPENDED_LOOK));
                Event::Tick
            }
        }
    }

    /// What the worker says; its questions are answered on the way.
    fn hear(&mut self) -> Event {
        let Some(worker) = &self.worker else { return Event::Closed };
        match recv::<FromWorker>(&worker.socket, &mut self.buffer) {
            Ok((FromWorker::Serving, _)) => return Event::Serves,
            Ok((FromWorker::Failed { why }, _)) => return Event::Failed { why: words(&why) },
            Ok((message, _)) => self.context.answer.handle(&self.mount, &worker.socket, message),
            Err(PacketError::TimedOut) => {}
            Err(PacketError::Closed) if self.mount.stopping() => return Event::Stop,
            Err(PacketError::Closed) => return Event::Closed,
            Err(error) => return Event::Failed { why: error.to_string() },
        }
        if self.last_look.elapsed() < TICK {
            return Event::Tick;
        }
        self.last_look = Instant::now();
        self.mount.flush_forgets(&worker.socket);
        Event::Heartbeat(self.mount.connection.heartbeat())
    }
}

/// Hands the connection over and waits for the INIT answer.
fn assign(mount: &Mount, worker: &Worker, takeover: bool) -> Result<(), String> {
    let assign = Assign { takeover, ..mount.assign.clone() };
    let (init_reply, mode) = mount.connection.introduce(worker, assign)?;
    // A successor works with the answer that the connection has, or fails.
    if !takeover {
        mount.set_init_reply(init_reply, mode);
    }
    Ok(())
}

/// The successor does not wait for it: on a disk that hangs each takes as long as a question may.
fn close_leaked_backings(mount: &Arc<Mount>, context: &MountContext) {
    let leaked = mount.leaked_backings();
    // Not the mount itself: see `heal_probe`.
    let (weak, id, privileged) = (Arc::downgrade(mount), mount.id, context.privileged.clone());
    context.runtime.spawn(async move {
        for (closed, leak) in leaked.iter().enumerate() {
            let ask = privileged.ask(BrokerRequest::BackingClose { mount: id, id: *leak }, Vec::new());
            if let Err(error) = ask.await {
                let left = leaked.len() - closed;
                tracing::warn!(mount = %id, left, %error, "leaked backing ids stay until the next worker, or unmount");
                return;
            }
            let Some(mount) = weak.upgrade() else { return };
            mount.backing_closed(*leak);
        }
    });
}
