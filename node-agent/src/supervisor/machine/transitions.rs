//! The machine as a table. A test walks the machine at random and compares.

use super::{Event, State};

/// From, event, to: every event that changes something or has something done. Others leave a state as it is.
pub const TRANSITIONS: &[(&str, &str, &str)] = &[
    ("AwaitingPredecessor", "PredecessorGone", "Collecting"),
    ("Introducing", "Introduced", "Answered"),
    ("Introducing", "Introduced", "Starting"),
    ("Introducing", "Introduced", "Reaping"),
    ("Introducing", "NotIntroduced", "Introducing"),
    ("Introducing", "NotIntroduced", "Pausing"),
    ("Introducing", "NotIntroduced", "GivingUp"),
    ("Introducing", "NotIntroduced", "Over"),
    ("Introducing", "Suspended", "Suspended"),
    ("Introducing", "Suspended", "Over"),
    ("Suspended", "Resumed", "Introducing"),
    ("Suspended", "Resumed", "Pausing"),
    ("Suspended", "Resumed", "GivingUp"),
    ("Suspended", "Stop", "Over"),
    ("Pausing", "Tick", "Introducing"),
    ("Pausing", "Stop", "Over"),
    ("Answered", "Go", "Starting"),
    ("Answered", "Tick", "Reaping"),
    ("Answered", "Stop", "Reaping"),
    ("Starting", "Serves", "Serving"),
    ("Starting", "Tick", "Reaping"),
    ("Starting", "Heartbeat", "Starting"),
    ("Starting", "Waiting", "Reaping"),
    ("Starting", "Failed", "Reaping"),
    ("Starting", "Closed", "Reaping"),
    ("Starting", "Stop", "Reaping"),
    ("Serving", "Heartbeat", "Serving"),
    ("Serving", "Waiting", "Reaping"),
    ("Serving", "Failed", "Reaping"),
    ("Serving", "Closed", "Reaping"),
    ("Serving", "Stop", "Reaping"),
    ("Reaping", "Reaped", "Collecting"),
    ("Reaping", "Reaped", "Over"),
    ("Collecting", "Collected", "Introducing"),
    ("Collecting", "Collected", "Pausing"),
    ("Collecting", "Collected", "GivingUp"),
    ("Collecting", "Collected", "Over"),
    ("GivingUp", "Aborted", "Over"),
];

impl State {
    pub fn name(&self) -> &'static str {
        match self {
            Self::AwaitingPredecessor => "AwaitingPredecessor",
            Self::Introducing => "Introducing",
            Self::Suspended => "Suspended",
            Self::Pausing { .. } => "Pausing",
            Self::Answered { .. } => "Answered",
            Self::Starting { .. } => "Starting",
            Self::Serving => "Serving",
            Self::Reaping { .. } => "Reaping",
            Self::Collecting { .. } => "Collecting",
            Self::GivingUp => "GivingUp",
            Self::Over(_) => "Over",
        }
    }
}

impl Event {
    pub fn name(&self) -> &'static str {
        match self {
            Self::PredecessorGone => "PredecessorGone",
            Self::Introduced => "Introduced",
            Self::NotIntroduced { .. } => "NotIntroduced",
            Self::Suspended => "Suspended",
            Self::Resumed => "Resumed",
            Self::Go => "Go",
            Self::Serves => "Serves",
            Self::Failed { .. } => "Failed",
            Self::Closed => "Closed",
            Self::Heartbeat(_) => "Heartbeat",
            Self::Waiting(_) => "Waiting",
            Self::Reaped { .. } => "Reaped",
            Self::Collected { .. } => "Collected",
            Self::Aborted { .. } => "Aborted",
            Self::Stop => "Stop",
            Self::Tick => "Tick",
        }
    }
}
