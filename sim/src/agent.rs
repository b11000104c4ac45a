//! The agent's process: its mounts, each with the product's machine, and its workers.

use crate::kernel::{ConnectionId, WorkerId};
use csi_plugin::broker::socket::AgentIdentity;
use link::broker::MountId;
use node_agent::supervisor::machine::{Action, Event, Machine, Phase};
use std::collections::BTreeMap;
use std::time::Instant;

/// What the broker waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    Answered,
    Serving,
}

/// A question of a broker that is not answered yet.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub broker: u64,
    pub ask: u64,
    pub wanted: Wanted,
}

#[derive(Debug)]
pub struct Held {
    pub volume: usize,
    pub connection: ConnectionId,
    pub machine: Machine,
    pub worker: Option<WorkerId>,
    /// The kernel has its INIT reply.
    pub is_started: bool,
    pub asked: Option<Asked>,
}

impl Held {
    pub fn on(&mut self, event: Event, now: Instant) -> Vec<Action> {
        self.machine.on(event, now)
    }

    /// What the question is answered with, once it can be.
    pub fn answer(&mut self) -> Option<(Asked, bool)> {
        let asked = self.asked?;
        let done = match (asked.wanted, self.machine.phase()) {
            (_, Phase::Failed | Phase::Stopped) => Some(false),
            (Wanted::Answered, Phase::Answered) | (Wanted::Serving, Phase::Serving) => Some(true),
            (Wanted::Answered, Phase::Dead) => Some(false),
            _ => None,
        }?;
        self.asked = None;
        Some((asked, done))
    }
}

/// What a process of the agent is, of the two that there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Serving,
    /// Waits for the word to succeed the one that serves.
    Standby,
    /// Holds descriptors, and nothing else.
    Drained,
}

#[derive(Debug)]
pub struct Agent {
    pub identity: AgentIdentity,
    pub role: Role,
    /// What it had when it was drained.
    pub kept: Vec<(MountId, usize, ConnectionId)>,
    pub mounts: BTreeMap<MountId, Held>,
    /// Were not started when the broker was lost.
    pub unfinished: Vec<MountId>,
}

impl Agent {
    pub fn new(pid: i32, role: Role) -> Self {
        Self {
            identity: AgentIdentity { pid, started: Some(1), life: 1 },
            role,
            kept: Vec::new(),
            mounts: BTreeMap::new(),
            unfinished: Vec::new(),
        }
    }

    /// As the product's `lost`: publishes that no broker will ever complete.
    pub(crate) fn broker_lost(&mut self) {
        self.unfinished =
            self.mounts.iter().filter(|(_, held)| !held.is_started).map(|(id, _)| *id).collect();
    }

    /// As the product's `connected`: what no broker will ever ask to drop.
    pub(crate) fn forsaken(&mut self) -> Vec<MountId> {
        let mut forsaken = std::mem::take(&mut self.unfinished);
        forsaken.retain(|id| self.mounts.get(id).is_some_and(|held| !held.is_started));
        let failed = self.mounts.iter().filter(|(_, held)| held.machine.phase() == Phase::Failed);
        forsaken.extend(failed.map(|(id, _)| *id));
        forsaken
    }

    pub(crate) fn has_device(&self, connection: ConnectionId) -> bool {
        let kept = self.kept.iter().map(|(_, _, kept)| *kept);
        kept.chain(self.mounts.values().map(|held| held.connection)).any(|held| held == connection)
    }

    /// What it would show to a new broker, with its volume.
    pub fn shown(&self) -> Vec<(MountId, usize, ConnectionId)> {
        let held = self.holding().map(|id| (id, self.mounts[&id].volume, self.mounts[&id].connection));
        match self.role {
            Role::Drained => self.kept.clone(),
            Role::Serving | Role::Standby => held.collect(),
        }
    }

    /// The mounts that it serves.
    pub fn holding(&self) -> impl Iterator<Item = MountId> {
        let is_live = |held: &Held| held.is_started && held.machine.phase() != Phase::Failed;
        self.mounts.iter().filter(move |(_, held)| is_live(held)).map(|(id, _)| *id)
    }
}

/// A worker's process.
#[derive(Clone, Debug)]
pub struct Worker {
    pub agent: i32,
    pub mount: MountId,
    pub connection: ConnectionId,
    pub is_alive: bool,
    /// It does nothing, and does not end.
    pub is_stuck: bool,
    /// The signal that it died of.
    pub signal: i32,
    pub beats: u64,
}
