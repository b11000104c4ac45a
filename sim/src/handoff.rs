//! A hand-off that is under way in the broker: the product's machine, and what it waits for.

use csi_plugin::broker::handoff::machine::{Action, Machine};
use link::broker::MountId;
use std::collections::VecDeque;
use std::time::Duration;

/// What an action waits for. `until`, `at`: since the beginning of the history.
#[derive(Clone, Debug)]
pub enum Waits {
    Shown {
        until: Duration,
    },
    Prepared {
        at: Duration,
    },
    Quiet {
        until: Duration,
    },
    Drained {
        until: Duration,
    },
    Gone {
        pid: i32,
        until: Duration,
    },
    /// It opens cache and state, until `at` at least.
    Succeeded {
        at: Duration,
        until: Duration,
    },
    /// Drained agents show what the broker does not know, and leave.
    Left {
        until: Duration,
    },
    Adopted,
}

#[derive(Debug)]
pub struct Handoff {
    /// Of all hand-offs of a history.
    pub number: u64,
    pub machine: Machine,
    pub actions: VecDeque<Action>,
    pub waits: Option<Waits>,
    pub successor: i32,
    /// The process that was the node's agent when it began.
    pub old: Option<i32>,
    pub is_switching: bool,
    /// Given to the successor.
    pub given: Vec<MountId>,
}
