//! Processes come and go.

use super::steps::Process;
use super::{ADOPT_LIMIT, Ev, KILLED, Question, Reason, World};
use crate::agent::{Agent, Role};
use crate::broker::Broker;
use crate::kernel::{ConnectionId, WorkerId};
use anyhow::{Context, Result, ensure};
use csi_plugin::broker::mounts_table::State;
use csi_plugin::broker::socket::AgentIdentity;
use link::broker::MountId;
use std::time::Duration;

impl World {
    pub(super) fn agent_starts(&mut self) -> Result<()> {
        if self.agents.is_empty() {
            self.take_ownership(None)?;
        }
        Ok(())
    }

    /// This process, or a new one, has cache and state from now on, and is the node's agent.
    pub(super) fn take_ownership(&mut self, standby: Option<i32>) -> Result<()> {
        let pid = standby.unwrap_or(self.last_pid + 1);
        self.last_pid = self.last_pid.max(pid);
        ensure!(self.owner.is_none(), "{pid} takes the cache, which {:?} has", self.owner);
        self.owner = Some(pid);
        self.agents.entry(pid).or_insert_with(|| Agent::new(pid, Role::Serving)).role = Role::Serving;
        self.after_ms(1..50, Ev::Connects(pid, self.broker_life));
        Ok(())
    }

    /// A rolling update.
    pub(super) fn standby_starts(&mut self) {
        self.last_pid += 1;
        self.agents.insert(self.last_pid, Agent::new(self.last_pid, Role::Standby));
        self.after_ms(1..50, Ev::Connects(self.last_pid, self.broker_life));
    }

    pub(super) fn broker_starts(&mut self) {
        self.broker_life += 1;
        self.broker = Some(Broker::default());
        self.pending.clear();
        let pids: Vec<i32> = self.agents.keys().copied().collect();
        pids.into_iter().for_each(|pid| self.after_ms(1..50, Ev::Connects(pid, self.broker_life)));
        self.after_ms(250..251, Ev::Look(self.broker_life));
    }

    pub(super) fn connects(&mut self, pid: i32, life: u64) -> Result<()> {
        if life != self.broker_life || self.broker.is_none() {
            return Ok(());
        }
        match self.agents.get(&pid).map(|agent| agent.role) {
            Some(Role::Serving) => self.serving_connects(pid),
            Some(Role::Standby) => self.standby_connects(pid),
            Some(Role::Drained) => self.drained_connects(pid),
            None => Ok(()),
        }
    }

    fn serving_connects(&mut self, pid: i32) -> Result<()> {
        let broker = self.broker.as_mut().context("looked at before")?;
        if broker.current.as_ref().is_some_and(|current| current.pid != pid) {
            // The end of the one before has not been noted yet.
            self.after_ms(50..200, Ev::Connects(pid, self.broker_life));
            return Ok(());
        }
        let agent = self.agents.get_mut(&pid).context("looked at before")?;
        broker.current = Some(agent.identity.clone());
        broker.renewals.wake_for_all(self.queue.now());
        broker.forget_look();
        for id in agent.forsaken() {
            self.stop_mount(pid, id)?;
        }
        self.show(pid)?;
        self.give_all().map(drop)
    }

    /// What an agent holds, to a broker that may be new.
    fn show(&mut self, pid: i32) -> Result<()> {
        let agent = self.agents.get(&pid).context("of an agent that is there")?;
        let (identity, role, shown) = (agent.identity.clone(), agent.role, agent.shown());
        for (id, volume, connection) in shown {
            let Some(broker) = &mut self.broker else { return Ok(()) };
            // What the product's `hold` decides of a mount that it knows, or has taken away.
            match broker.table.get(id) {
                Some(known) if role == Role::Serving => {
                    known.enter_if(State::Serving, "its agent shows it", |state, of| {
                        matches!(state, State::Orphaned(_)) && *of == identity
                    });
                }
                Some(_) => {}
                None if broker.table.was_removed(id) || self.kernel.has_ended(connection) => {}
                None => {
                    if self.dies_at("broker.hold", Process::Broker) {
                        return Ok(());
                    }
                    let Some(broker) = &mut self.broker else { return Ok(()) };
                    let mount = broker.enlist(id, &self.volumes[volume], connection, &identity)?;
                    Broker::prepared(&mount)?;
                    if self.dies_at("broker.prepared", Process::Broker) {
                        return Ok(());
                    }
                    mount.enter(State::Serving, "mounted by an earlier broker, held by its agent");
                    let steps = ["broker.noted", "broker.held"];
                    if steps.iter().any(|step| self.dies_at(step, Process::Broker)) {
                        return Ok(());
                    }
                }
            }
        }
        Ok(())
    }

    /// It takes the node's agent's place if that has ended, and waits for its turn if not.
    fn standby_connects(&mut self, pid: i32) -> Result<()> {
        let is_free = self.broker.as_ref().is_some_and(|it| it.current.is_some() && it.handoff.is_none());
        match (self.owner, is_free) {
            (None, _) => self.take_ownership(Some(pid))?,
            (Some(owner), true) => {
                self.begin_handoff(pid)?;
                if std::mem::take(&mut self.kills_agent_at_handoff) {
                    self.agent_dies(owner);
                }
            }
            (Some(_), false) => self.after_ms(100..300, Ev::Connects(pid, self.broker_life)),
        }
        Ok(())
    }

    /// It shows what it kept, and goes: as the node's agent if it is the last.
    fn drained_connects(&mut self, pid: i32) -> Result<()> {
        if self.agents.get(&pid).is_some_and(|agent| !agent.mounts.is_empty()) {
            self.after_ms(1..5, Ev::Connects(pid, self.broker_life));
            return Ok(());
        }
        self.show(pid)?;
        if self.broker.is_none() {
            return Ok(()); // it shows them to the next one
        }
        match self.owner {
            Some(_) => self.after_ms(1..20, Ev::AgentExits(pid)),
            None => self.execute_anew(pid),
        }
        Ok(())
    }

    /// The same program, in another process here: what a new life does is done by another agent.
    pub(super) fn execute_anew(&mut self, pid: i32) {
        self.agent_dies(pid);
        self.after_ms(1..20, Ev::AgentStarts);
    }

    /// What has no agent becomes the current one's.
    pub(super) fn give_all(&mut self) -> Result<Vec<MountId>> {
        let mut given = Vec::new();
        let Some(broker) = &self.broker else { return Ok(given) };
        let Some(current) = broker.current.clone() else { return Ok(given) };
        let now = self.queue.now();
        let is_drained = |agent: &AgentIdentity| {
            self.agents.get(&agent.pid).is_some_and(|agent| agent.role == Role::Drained)
        };
        let mut mounts = broker.table.all();
        // A drained agent that has shown its mounts leaves, and is waited for.
        mounts.retain(|mount| {
            mount.prepared().is_some() && (mount.state() != State::Serving || !is_drained(&mount.agent()))
        });
        for mount in mounts {
            if let Some((since, _)) = mount.begin_adoption(&current, now) {
                let volume = self.volumes.iter().position(|v| v.target.path() == mount.target.path());
                let volume = volume.context("of a volume of this node")?;
                given.push(mount.id);
                self.ask(mount.id, volume, Question::Adopt { since }, ADOPT_LIMIT);
            }
        }
        Ok(given)
    }

    pub(super) fn lost(&mut self, life: u64, pid: i32) -> Result<()> {
        if life != self.broker_life {
            return Ok(());
        }
        self.orphan_all_of(pid, "the node agent is gone");
        let Some(broker) = self.broker.as_mut() else { return Ok(()) };
        let was_current = broker.current.as_ref().is_some_and(|current| current.pid == pid);
        if was_current {
            broker.current = None;
        }
        // Its answers are waited for no longer.
        let waiting: Vec<u64> =
            self.pending.iter().filter(|(_, it)| it.pid == Some(pid)).map(|(ask, _)| *ask).collect();
        waiting.into_iter().for_each(|ask| self.queue.after(Duration::ZERO, Ev::Limit(life, ask)));
        // What a drained one has left is for the agent that is there already.
        let is_switching = self.broker.as_ref().is_some_and(Broker::is_switching);
        if !was_current && !is_switching {
            self.give_all()?;
        }
        Ok(())
    }

    pub(super) fn orphan_all_of(&mut self, pid: i32, why: &str) {
        let now = self.queue.now();
        for mount in self.broker.iter().flat_map(|broker| broker.table.all()) {
            mount.enter_if(State::Orphaned(now), why, |state, of| state == State::Serving && of.pid == pid);
        }
    }

    pub(super) fn agent_dies(&mut self, pid: i32) {
        let Some(agent) = self.agents.remove(&pid) else { return };
        if self.owner == Some(pid) {
            self.owner = None;
        }
        let own: Vec<WorkerId> =
            self.workers.iter().filter(|(_, it)| it.is_alive && it.agent == pid).map(|(id, _)| *id).collect();
        // The kernel kills them one after the other.
        own.into_iter().for_each(|worker| self.after_ms(0..15, Ev::Dies(worker, KILLED)));
        let held = agent.mounts.values().map(|held| held.connection);
        let held: Vec<ConnectionId> = held.chain(agent.kept.iter().map(|(_, _, kept)| *kept)).collect();
        held.into_iter().for_each(|connection| self.let_go(connection));
        self.after_ms(0..3, Ev::Lost(self.broker_life, pid));
        // kubelet starts it again where no other one is left.
        self.after_ms(50..3000, Ev::AgentStarts);
    }

    pub(super) fn broker_dies(&mut self) {
        let Some(broker) = self.broker.take() else { return };
        self.pending.clear();
        // A detached mount ends with the descriptor of the broker that made it.
        for connection in broker.renewing.keys().filter_map(|id| broker.connections.get(id)) {
            self.end(*connection, Reason::NotPublished);
        }
        broker.connections.values().for_each(|connection| self.let_go(*connection));
        self.agents.values_mut().for_each(Agent::broker_lost);
        // Calls of kubelet end with it, and are repeated.
        for kubelet in &mut self.kubelets {
            (kubelet.is_busy, kubelet.is_renewed) = (false, false);
        }
        self.after_ms(50..3000, Ev::BrokerStarts);
    }
}
