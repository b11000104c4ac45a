//! The broker's executor of a hand-off, with the agents' part in it.

use super::steps::Process;
use super::{Ev, World};
use crate::agent::{Agent, Role};
use crate::broker::Broker;
use crate::handoff::{Handoff, Waits};
use anyhow::{Context, Result};
use csi_plugin::broker::handoff::machine::{Action, Answer, Event, Machine, State as Life};
use csi_plugin::broker::mounts_table::State;
use rand::RngExt;
use std::collections::VecDeque;
use std::time::Duration;

const SHOWN_LIMIT: Duration = Duration::from_secs(20);
const PUBLISHES_LIMIT: Duration = Duration::from_secs(5);
const DRAIN_LIMIT: Duration = Duration::from_secs(15);
const SUCCEED_LIMIT: Duration = Duration::from_secs(20);
const EXIT_LIMIT: Duration = Duration::from_secs(2);
const LEAVE_LIMIT: Duration = Duration::from_secs(20);

impl World {
    pub(super) fn begin_handoff(&mut self, successor: i32) -> Result<()> {
        let number = self.id();
        let broker = self.broker.as_mut().context("looked at before")?;
        broker.handoff = Some(Handoff {
            number,
            machine: Machine::default(),
            actions: VecDeque::new(),
            waits: None,
            successor,
            old: None,
            is_switching: false,
            given: Vec::new(),
        });
        // It has its place; the thread that serves it begins a moment later.
        self.after_ms(0..2, Ev::Handoff(self.broker_life, number));
        Ok(())
    }

    fn running(&mut self) -> Result<&mut Handoff> {
        self.broker.as_mut().and_then(|broker| broker.handoff.as_mut()).context("a hand-off is under way")
    }

    fn happened(&mut self, event: Event) -> Result<()> {
        let name = event.name();
        let running = self.running()?;
        let before = running.machine.state().name();
        running.waits = None;
        let actions = running.machine.on(event);
        running.actions.extend(actions);
        let after = running.machine.state().name();
        self.summary.handoffs.insert((before, name, after));
        Ok(())
    }

    /// Goes on as far as it can.
    pub(super) fn handoff(&mut self, life: u64, number: u64) -> Result<()> {
        let is_of = |broker: &&Broker| broker.handoff.as_ref().is_some_and(|it| it.number == number);
        if life != self.broker_life || self.broker.as_ref().filter(is_of).is_none() {
            return Ok(());
        }
        if self.running()?.machine.state() == Life::Idle {
            let old = self.broker.as_ref().and_then(|broker| broker.current.as_ref()).map(|it| it.pid);
            self.running()?.old = old;
            self.happened(Event::Connected { running: old.is_some() })?;
        }
        if let Some(waits) = self.running()?.waits.clone() {
            match self.came(&waits)? {
                Some(Some(event)) => self.happened(event)?,
                Some(None) => self.running()?.waits = None,
                None => {}
            }
        }
        while self.running()?.waits.is_none() {
            let running = self.running()?;
            let Some(action) = running.actions.pop_front() else { break };
            self.act(action)?;
            if self.broker.is_none() {
                return Ok(()); // it has died at a step
            }
        }
        let running = self.running()?;
        if running.waits.is_none() && running.actions.is_empty() {
            if let over @ Life::Over(_) = running.machine.state() {
                *self.summary.outcomes.entry(over.name()).or_default() += 1;
            }
            let broker = self.broker.as_mut().context("looked at before")?;
            broker.handoff = None;
            broker.forget_look();
            return Ok(());
        }
        self.after_ms(1..15, Ev::Handoff(life, number));
        Ok(())
    }

    /// Outer None: it is waited for still. Inner None: it has no event.
    fn came(&mut self, waits: &Waits) -> Result<Option<Option<Event>>> {
        let now = self.queue.elapsed();
        let running = self.running()?;
        let (successor, old, given) = (running.successor, running.old, running.given.clone());
        let is_there = self.agents.contains_key(&successor);
        let broker = self.broker.as_ref().context("looked at before")?;
        let event = match *waits {
            Waits::Shown { until } => {
                let old = old.and_then(|pid| self.agents.get(&pid));
                let is_shown = old.is_none_or(|old| old.holding().all(|id| broker.table.get(id).is_some()));
                (is_shown || now >= until).then_some(Event::Shown(is_shown))
            }
            Waits::Prepared { .. } if !is_there => {
                Some(Event::Prepared { refused: vec!["it is gone".into()] })
            }
            Waits::Prepared { at } => (now >= at).then(|| {
                let refused = self.no_workers.is_some().then(|| "no worker starts".to_owned());
                Event::Prepared { refused: refused.into_iter().collect() }
            }),
            Waits::Quiet { until } => {
                let is_quiet = broker.table.all().iter().all(|mount| mount.state() != State::Preparing);
                ((is_quiet || now >= until) && !self.is_giving()).then_some(Event::Quiet)
            }
            Waits::Drained { until } => match old.and_then(|pid| self.agents.get(&pid)) {
                None => Some(Event::Drain(Answer::Gone)),
                Some(old) if old.mounts.is_empty() => Some(Event::Drain(Answer::Drained)),
                Some(_) => (now >= until).then(|| Event::Drain(Answer::Late { why: "no answer".into() })),
            },
            Waits::Gone { pid, until } => {
                let is_gone = !self.agents.contains_key(&pid);
                if !is_gone && now >= until {
                    self.agent_dies(pid);
                }
                return Ok((is_gone || now >= until).then_some(None));
            }
            Waits::Succeeded { .. } if !is_there => Some(Event::Succeeded(Err("it is gone".into()))),
            Waits::Succeeded { until, .. } if self.owner.is_some() => {
                if now >= until {
                    self.agent_dies(successor);
                }
                None
            }
            Waits::Succeeded { at, .. } if now < at => None,
            Waits::Succeeded { .. } => {
                self.owner = Some(successor);
                self.agents.get_mut(&successor).context("it is there")?.role = Role::Serving;
                let steps = ["standby.owns", "standby.up"];
                match steps.iter().any(|step| self.dies_at(step, Process::Agent(successor))) {
                    true => Some(Event::Succeeded(Err("it is gone".into()))),
                    false => Some(Event::Succeeded(Ok(()))),
                }
            }
            Waits::Left { until } => {
                let mut left = broker.table.all();
                let drained = |pid: i32| self.agents.get(&pid).is_some_and(|it| it.role == Role::Drained);
                left.retain(|mount| mount.state() == State::Serving && drained(mount.agent().pid));
                if left.is_empty() {
                    let given = self.give_all()?;
                    let running = self.running()?;
                    (running.given, running.waits) = (given, Some(Waits::Adopted));
                } else if now >= until {
                    left.into_iter().for_each(|mount| self.agent_dies(mount.agent().pid));
                }
                None
            }
            Waits::Adopted => {
                let is_refused =
                    |id| broker.table.get(id).is_some_and(|it| matches!(it.state(), State::Orphaned(_)));
                let refused = given.into_iter().find(|id| is_refused(*id));
                let refused = refused.map(|id| format!("{id} was not taken"));
                (!self.is_giving()).then_some(Event::Adopted { refused, connected: is_there })
            }
        };
        Ok(event.map(Some))
    }

    fn act(&mut self, action: Action) -> Result<()> {
        let now = self.queue.elapsed();
        let (successor, old) = (self.running()?.successor, self.running()?.old);
        match action {
            Action::AwaitShown => self.wait(Waits::Shown { until: now + SHOWN_LIMIT })?,
            Action::Prepare => {
                self.dies_at("standby.prepares", Process::Agent(successor));
                let takes = if self.chance(5) { 3_000 } else { 30 };
                self.wait(Waits::Prepared { at: now + Duration::from_millis(takes) })?;
            }
            Action::StopPublishes => {
                if !self.dies_at("handoff.prepared", Process::Broker) {
                    self.running()?.is_switching = true;
                }
            }
            Action::AwaitPublishes => self.wait(Waits::Quiet { until: now + PUBLISHES_LIMIT })?,
            Action::Drain => self.drain()?,
            Action::OrphanOld => {
                old.into_iter().for_each(|pid| self.orphan_all_of(pid, "its agent is drained"))
            }
            Action::KillOld => old.into_iter().for_each(|pid| self.agent_dies(pid)),
            Action::SeeOffOld => {
                if let Some(pid) = old {
                    self.wait(Waits::Gone { pid, until: now + EXIT_LIMIT })?;
                }
            }
            Action::Promote => {
                if self.dies_at("handoff.drained", Process::Broker) {
                    return Ok(());
                }
                let identity = self.agents.get(&successor).map(|agent| agent.identity.clone());
                let broker = self.broker.as_mut().context("looked at before")?;
                let is_free = broker.current.as_ref().is_none_or(|current| Some(current.pid) == old);
                let promoted = is_free && identity.is_some();
                if promoted {
                    broker.current = identity;
                }
                self.happened(Event::Promoted(promoted))?;
            }
            Action::Succeed => {
                self.dies_at("standby.called", Process::Agent(successor));
                let at = now + Duration::from_millis(self.rng.random_range(5..300));
                self.wait(Waits::Succeeded { at, until: now + SUCCEED_LIMIT })?;
            }
            Action::Adopt => {
                if !self.dies_at("handoff.succeeded", Process::Broker) {
                    self.wait(Waits::Left { until: now + LEAVE_LIMIT })?;
                }
            }
            Action::AllowPublishes => self.running()?.is_switching = false,
            Action::Depart => {
                if let Some(pid) = old {
                    self.after_ms(1..20, Ev::AgentExits(pid));
                }
            }
            Action::Postpone { .. } => {
                self.hang_up(successor);
                self.after_ms(100..1000, Ev::Connects(successor, self.broker_life));
            }
            Action::Dismiss { .. } => {
                self.hang_up(successor);
                self.after_ms(1..200, Ev::AgentExits(successor));
            }
            Action::KillSuccessor => self.agent_dies(successor),
            // What is drained does not open again what it has closed: a new life does.
            Action::Resume => old.into_iter().for_each(|pid| self.execute_anew(pid)),
            Action::Announce | Action::Complain { .. } => {}
        }
        Ok(())
    }

    fn wait(&mut self, waits: Waits) -> Result<()> {
        self.running()?.waits = Some(waits);
        Ok(())
    }

    /// Its place is free at once.
    fn hang_up(&mut self, successor: i32) {
        if let Some(broker) = &mut self.broker
            && broker.current.as_ref().is_some_and(|current| current.pid == successor)
        {
            broker.current = None;
        }
        self.orphan_all_of(successor, "the node agent is gone");
    }

    /// The old agent ends its workers, closes cache and state, and keeps the descriptors.
    fn drain(&mut self) -> Result<()> {
        let until = self.queue.elapsed() + DRAIN_LIMIT;
        let Some(pid) = self.running()?.old else { return self.wait(Waits::Drained { until }) };
        let is_refused = self.chance(4);
        let hangs = self.chance(3);
        let Some(broker) = &self.broker else { return Ok(()) };
        let Some(agent) = self.agents.get_mut(&pid) else { return self.wait(Waits::Drained { until }) };
        let is_held = agent.holding().all(|id| broker.table.get(id).is_some());
        if is_refused || !is_held {
            let (now, why) = (!is_held, "it is exiting".to_owned());
            return self.happened(Event::Drain(Answer::Refused { now, why }));
        }
        if self.dies_at("old.called", Process::Agent(pid)) {
            return self.wait(Waits::Drained { until });
        }
        let Some(agent) = self.agents.get_mut(&pid) else { return Ok(()) };
        if !hangs {
            agent.kept = agent.shown();
            agent.role = Role::Drained;
            let mounts: Vec<_> = agent.mounts.keys().copied().collect();
            for mount in mounts {
                self.stop_mount(pid, mount)?;
            }
            self.close_if_drained(pid);
        }
        self.wait(Waits::Drained { until })
    }

    /// Cache and state are closed once no worker of a drained agent is left.
    pub(super) fn close_if_drained(&mut self, pid: i32) {
        let is_empty = |agent: &Agent| agent.role == Role::Drained && agent.mounts.is_empty();
        if self.owner == Some(pid) && self.agents.get(&pid).is_some_and(is_empty) {
            self.owner = None;
            self.dies_at("old.drained", Process::Agent(pid));
        }
    }
}
