//! The record of heals: what happened to which volume, how long it took. The newest are kept in memory.

use crate::lock::lock;
use crate::supervisor::End;
use link::broker::MountId;
use std::collections::VecDeque;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};
use volume::VolumeId;

const KEPT: usize = 1000;

#[derive(Clone, Debug)]
pub struct Heal {
    pub at: SystemTime,
    pub volume: VolumeId,
    pub mount: MountId,
    pub cause: HealCause,
    /// From the end of the old worker until its successor serves; from the loss of the old broker until the new one holds
    /// the mount; of a new mount: how long it took to make.
    pub took: Duration,
    /// See [`HealCause::level`].
    pub level: u32,
    /// Requests that the successor executed in the dead one's place.
    pub replayed: u64,
    /// How the worker's process ended, as `waitpid` tells it: `signal: 9 (SIGKILL)`. Empty if it was no worker, or unknown.
    pub ended: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HealCause {
    /// It never came to serve.
    Start,
    Exit,
    Signal,
    /// Killed by the kernel for want of memory.
    Oom,
    Hang,
    /// The agent itself was gone, and its workers with it.
    Agent,
    /// The agent was asked to stop, or is drained for its successor.
    Upgrade,
    /// The agent hung, and the broker has killed it.
    AgentHang,
    /// The broker was away; it is back, or another one is there, and holds the mount.
    Broker,
    /// The mount's connection had ended, mostly with all that held it: the broker has mounted anew.
    Ended,
}

impl HealCause {
    /// `oom`: the kernel has killed a process for want of memory in this worker's time.
    pub(crate) fn of(end: &End, status: Option<ExitStatus>, oom: bool) -> Self {
        match (end, status) {
            (End::Hung, _) | (_, None) => Self::Hang,
            (_, Some(s)) if s.signal() == Some(libc::SIGKILL) && oom => Self::Oom,
            (_, Some(s)) if s.signal().is_some() => Self::Signal,
            (_, Some(_)) => Self::Exit,
        }
    }
    pub fn name(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Exit => "exit",
            Self::Signal => "signal",
            Self::Oom => "oom",
            Self::Hang | Self::AgentHang => "hang",
            Self::Agent => "agent",
            Self::Upgrade => "upgrade",
            Self::Broker => "broker",
            Self::Ended => "ended",
        }
    }

    /// 1: a worker was replaced; 2: the agent; 3: the broker; 4: the mount.
    pub fn level(self) -> u32 {
        match self {
            Self::Agent | Self::Upgrade | Self::AgentHang => 2,
            Self::Broker => 3,
            Self::Ended => 4,
            Self::Start | Self::Exit | Self::Signal | Self::Oom | Self::Hang => 1,
        }
    }
}

/// Called for each heal, after it was recorded: metrics, events.
pub(crate) type Listener = Box<dyn Fn(&Heal) + Send + Sync>;

pub struct Heals {
    recent: Mutex<VecDeque<Heal>>,
    listener: Listener,
}

impl Heals {
    pub fn new(listener: Listener) -> Arc<Self> {
        Arc::new(Self { recent: Mutex::default(), listener })
    }

    pub fn record(&self, heal: Heal) {
        (self.listener)(&heal);
        let mut recent = lock(&self.recent);
        if recent.len() == KEPT {
            recent.pop_back();
        }
        recent.push_front(heal);
    }

    /// Newest first.
    pub fn recent(&self) -> Vec<Heal> {
        lock(&self.recent).iter().cloned().collect()
    }
}
