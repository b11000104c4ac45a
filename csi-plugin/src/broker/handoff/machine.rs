//! The hand-off as a state machine: what has come of a step goes in, the next steps come out. It does no I/O, has no
//! clock, and knows no process but "the old agent" and "the successor".
//!
//! ```text
//!                     shown        prepared     no publish      drained       promoted      Done
//!  Idle ─► AwaitingShown ─► Preparing ─► Quiescing ─► Draining ─► Promoting ─► Succeeding ─► Adopting ─► Over: handed over
//!    └────── no agent ────────┘             │   └─ no agent ─────────┘   ▲         │            │
//!                                           │                            │         │            │
//!           not shown: Over, postponed      │      Draining: gone, or late and     └─────┬──────┘
//!           refused:   Over, dismissed      │      killed: no agent to go back to        │ refused, gone
//!           Draining: refused, not now: Over, postponed; else: Over, dismissed           ▼
//!                                                           an agent to go back to: Over, resumed; else: Over, postponed
//! ```
//!
//! [`TRANSITIONS`] is the same as a table, which a test compares with what the machine does.

/// Is there an agent that could serve again?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Old {
    /// It serves still.
    Serving,
    Drained,
    /// There was none, or it is gone.
    None,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Idle,
    /// The running agent shows its mounts to a broker that may be new.
    AwaitingShown,
    /// The successor starts a worker for each mount, and tries it.
    Preparing(Old),
    /// Publishes that are under way end, and so does an earlier adoption.
    Quiescing(Old),
    Draining,
    /// The successor takes the place of the node's agent.
    Promoting(Old),
    /// It opens cache and state.
    Succeeding(Old),
    /// It is given the mounts.
    Adopting(Old),
    Over(Outcome),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    HandedOver,
    /// The successor connects anew, and is tried again.
    Postponed,
    /// The successor gets the reason and ends; the old agent was not touched.
    Dismissed,
    /// The old agent serves again.
    Resumed,
}

/// What the old agent made of the question to drain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Drained,
    /// `now`: it may agree another time.
    Refused {
        now: bool,
        why: String,
    },
    Gone,
    /// No answer in time.
    Late {
        why: String,
    },
}

/// What has happened, or come of an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A successor has connected. Is there an agent that serves?
    Connected {
        running: bool,
    },
    /// Has the running agent shown every mount of its?
    Shown(bool),
    /// Why the successor cannot serve what is served now; empty: it can.
    Prepared {
        refused: Vec<String>,
    },
    /// No publish is under way any more, or their time is over.
    Quiet,
    Drain(Answer),
    /// False: the successor is gone, or another agent has taken the place.
    Promoted(bool),
    Succeeded(Result<(), String>),
    /// Why it did not take the first of those that it did not take. `connected`: it is still there.
    Adopted {
        refused: Option<String>,
        connected: bool,
    },
}

/// To be done in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Answered by [`Event::Shown`].
    AwaitShown,
    /// Answered by [`Event::Prepared`].
    Prepare,
    /// No volume is published from here on: neither agent could take it.
    StopPublishes,
    /// Answered by [`Event::Quiet`].
    AwaitPublishes,
    /// Answered by [`Event::Drain`].
    Drain,
    /// The old agent serves nothing any more: its mounts have no agent.
    OrphanOld,
    KillOld,
    /// Until its process is gone.
    SeeOffOld,
    /// Answered by [`Event::Promoted`].
    Promote,
    /// Answered by [`Event::Succeeded`].
    Succeed,
    /// Answered by [`Event::Adopted`].
    Adopt,
    AllowPublishes,
    /// The old agent exits.
    Depart,
    /// A line in the log: it has taken over.
    Announce,
    /// The successor is hung up on; it connects anew.
    Postpone {
        why: String,
    },
    /// The broker asks the successor to end, and closes the connection.
    Dismiss {
        why: String,
    },
    /// It is killed: two agents must not work on one cache, and applications wait.
    KillSuccessor,
    /// The old agent serves again.
    Resume,
    /// Not every mount is served, and there is no agent to go back to: worth a line in the log.
    Complain {
        why: String,
    },
}

#[derive(Debug)]
pub struct Machine {
    state: State,
}

impl Default for Machine {
    fn default() -> Self {
        Self { state: State::Idle }
    }
}

impl Machine {
    pub fn state(&self) -> State {
        self.state
    }

    /// What is to be done next. An event that does not belong to the state changes nothing.
    pub fn on(&mut self, event: Event) -> Vec<Action> {
        let (state, actions) = next(self.state, event);
        self.state = state;
        actions
    }
}

fn next(state: State, event: Event) -> (State, Vec<Action>) {
    match (state, event) {
        (State::Idle, Event::Connected { running: true }) => (State::AwaitingShown, vec![Action::AwaitShown]),
        (State::Idle, Event::Connected { running: false }) => {
            (State::Preparing(Old::None), vec![Action::Prepare])
        }
        (State::AwaitingShown, Event::Shown(true)) => (State::Preparing(Old::Serving), vec![Action::Prepare]),
        (State::AwaitingShown, Event::Shown(false)) => {
            let why = "the running agent has not shown every mount to this broker yet".to_owned();
            (State::Over(Outcome::Postponed), vec![Action::Postpone { why }])
        }
        (State::Preparing(old), Event::Prepared { refused }) if refused.is_empty() => {
            (State::Quiescing(old), vec![Action::StopPublishes, Action::AwaitPublishes])
        }
        (State::Preparing(_), Event::Prepared { refused }) => {
            (State::Over(Outcome::Dismissed), vec![Action::Dismiss { why: refused.join("; ") }])
        }
        (State::Quiescing(Old::Serving), Event::Quiet) => (State::Draining, vec![Action::Drain]),
        (State::Quiescing(old), Event::Quiet) => (State::Promoting(old), vec![Action::Promote]),
        (State::Draining, Event::Drain(answer)) => drained(answer),
        (State::Promoting(old), Event::Promoted(true)) => (State::Succeeding(old), vec![Action::Succeed]),
        (State::Promoting(old), Event::Promoted(false)) => {
            give_up(old, "it is gone, or another agent has come".into())
        }
        (State::Succeeding(old), Event::Succeeded(Ok(()))) => (State::Adopting(old), vec![Action::Adopt]),
        (State::Succeeding(old), Event::Succeeded(Err(why))) => give_up(old, why),
        (State::Adopting(old), Event::Adopted { refused, connected }) => adopted(old, refused, connected),
        (state, _) => (state, Vec::new()),
    }
}

fn drained(answer: Answer) -> (State, Vec<Action>) {
    match answer {
        Answer::Drained => (State::Promoting(Old::Drained), vec![Action::OrphanOld, Action::Promote]),
        Answer::Refused { now: true, why } => {
            (State::Over(Outcome::Postponed), vec![Action::Postpone { why }, Action::AllowPublishes])
        }
        Answer::Refused { now: false, why } => {
            let why = format!("the running agent goes on: {why}");
            (State::Over(Outcome::Dismissed), vec![Action::Dismiss { why }, Action::AllowPublishes])
        }
        Answer::Gone => (State::Promoting(Old::None), vec![Action::SeeOffOld, Action::Promote]),
        Answer::Late { why } => {
            let why = format!("the old agent does not drain and is killed: {why}");
            let actions = vec![Action::Complain { why }, Action::KillOld, Action::SeeOffOld, Action::Promote];
            (State::Promoting(Old::None), actions)
        }
    }
}

fn adopted(old: Old, refused: Option<String>, connected: bool) -> (State, Vec<Action>) {
    let over = State::Over(Outcome::HandedOver);
    match (refused, old) {
        (None, Old::None) => (over, vec![Action::AllowPublishes, Action::Announce]),
        (None, _) => {
            (over, vec![Action::AllowPublishes, Action::Announce, Action::Depart, Action::SeeOffOld])
        }
        (Some(why), Old::None) if connected => {
            let why = format!("not every mount is served by the new agent, and the old one is gone: {why}");
            (over, vec![Action::Complain { why }, Action::AllowPublishes, Action::Announce])
        }
        (Some(why), old) => give_up(old, why),
    }
}

/// The successor does not take over.
fn give_up(old: Old, why: String) -> (State, Vec<Action>) {
    match old {
        Old::None => {
            // Where no other agent works it comes back as the node's agent.
            let text = format!("mounts wait for an agent: {why}");
            let actions =
                vec![Action::AllowPublishes, Action::Complain { why: text }, Action::Postpone { why }];
            (State::Over(Outcome::Postponed), actions)
        }
        Old::Serving | Old::Drained => {
            let actions = vec![
                Action::AllowPublishes,
                Action::Complain { why: format!("the old agent serves again: {why}") },
                Action::Dismiss { why },
                Action::KillSuccessor,
                Action::Resume,
            ];
            (State::Over(Outcome::Resumed), actions)
        }
    }
}

/// From, event, to. Any other event leaves a state as it is.
pub const TRANSITIONS: &[(&str, &str, &str)] = &[
    ("Idle", "Connected", "AwaitingShown"),
    ("Idle", "Connected", "Preparing"),
    ("AwaitingShown", "Shown", "Preparing"),
    ("AwaitingShown", "Shown", "Postponed"),
    ("Preparing", "Prepared", "Quiescing"),
    ("Preparing", "Prepared", "Dismissed"),
    ("Quiescing", "Quiet", "Draining"),
    ("Quiescing", "Quiet", "Promoting"),
    ("Draining", "Drain", "Promoting"),
    ("Draining", "Drain", "Postponed"),
    ("Draining", "Drain", "Dismissed"),
    ("Promoting", "Promoted", "Succeeding"),
    ("Promoting", "Promoted", "Resumed"),
    ("Promoting", "Promoted", "Postponed"),
    ("Succeeding", "Succeeded", "Adopting"),
    ("Succeeding", "Succeeded", "Resumed"),
    ("Succeeding", "Succeeded", "Postponed"),
    ("Adopting", "Adopted", "HandedOver"),
    ("Adopting", "Adopted", "Resumed"),
    ("Adopting", "Adopted", "Postponed"),
];

impl State {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Idle => "Idle",
            Self::AwaitingShown => "AwaitingShown",
            Self::Preparing(_) => "Preparing",
            Self::Quiescing(_) => "Quiescing",
            Self::Draining => "Draining",
            Self::Promoting(_) => "Promoting",
            Self::Succeeding(_) => "Succeeding",
            Self::Adopting(_) => "Adopting",
            Self::Over(Outcome::HandedOver) => "HandedOver",
            Self::Over(Outcome::Postponed) => "Postponed",
            Self::Over(Outcome::Dismissed) => "Dismissed",
            Self::Over(Outcome::Resumed) => "Resumed",
        }
    }
}

impl Event {
    pub fn name(&self) -> &'static str {
        match self {
            Self::Connected { .. } => "Connected",
            Self::Shown(_) => "Shown",
            Self::Prepared { .. } => "Prepared",
            Self::Quiet => "Quiet",
            Self::Drain(_) => "Drain",
            Self::Promoted(_) => "Promoted",
            Self::Succeeded(_) => "Succeeded",
            Self::Adopted { .. } => "Adopted",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    const WHY: &str = "why";

    /// Every event there is, with every content that matters.
    fn events() -> Vec<Event> {
        let why = || WHY.to_owned();
        let mut all = vec![Event::Quiet];
        all.extend([true, false].map(|running| Event::Connected { running }));
        all.extend([true, false].map(Event::Shown));
        all.extend([vec![], vec![why(), why()]].map(|refused| Event::Prepared { refused }));
        all.extend([true, false].map(|now| Event::Drain(Answer::Refused { now, why: why() })));
        all.extend([Answer::Drained, Answer::Gone, Answer::Late { why: why() }].map(Event::Drain));
        all.extend([true, false].map(Event::Promoted));
        all.extend([Ok(()), Err(why())].map(Event::Succeeded));
        for connected in [true, false] {
            all.extend([None, Some(why())].map(|refused| Event::Adopted { refused, connected }));
        }
        all
    }

    /// Every history: the states that were passed, and all actions.
    fn histories() -> Vec<(Vec<State>, Vec<Action>)> {
        let mut open = vec![(vec![State::Idle], Vec::new())];
        let mut over = Vec::new();
        while let Some((states, actions)) = open.pop() {
            let now = states[states.len() - 1];
            for event in events() {
                let (to, more) = next(now, event);
                if to == now {
                    assert_eq!(more, [], "{now:?}");
                    continue;
                }
                let states = [&states[..], &[to]].concat();
                let actions = [&actions[..], &more].concat();
                match to {
                    State::Over(_) => over.push((states, actions)),
                    _ => open.push((states, actions)),
                }
            }
        }
        over
    }

    #[test]
    fn the_table_of_transitions_is_what_the_machine_does() {
        let mut seen = BTreeSet::new();
        for (states, _) in histories() {
            for pair in states.windows(2) {
                for event in events() {
                    let (to, _) = next(pair[0], event.clone());
                    if to != pair[0] {
                        seen.insert((pair[0].name(), event.name(), to.name()));
                    }
                }
            }
        }
        assert_eq!(seen, TRANSITIONS.iter().copied().collect());
    }

    #[test]
    fn nothing_follows_the_end() {
        for outcome in [Outcome::HandedOver, Outcome::Postponed, Outcome::Dismissed, Outcome::Resumed] {
            for event in events() {
                assert_eq!(next(State::Over(outcome), event), (State::Over(outcome), vec![]));
            }
        }
    }

    /// Of every history there is.
    #[test]
    fn no_mount_is_left_without_an_agent_that_could_serve_it() {
        let all = histories();
        assert!(all.len() > 20, "{}", all.len());
        for (states, actions) in all {
            let outcome = states[states.len() - 1];
            let at = |action: &Action| actions.iter().position(|other| other == action);
            let is_there = |action: &Action| at(action).is_some();
            let hung_up = actions
                .iter()
                .any(|action| matches!(action, Action::Postpone { .. } | Action::Dismiss { .. }));
            // Publishes go on, whatever happened.
            assert_eq!(is_there(&Action::StopPublishes), is_there(&Action::AllowPublishes), "{actions:?}");
            assert!(at(&Action::StopPublishes) <= at(&Action::AllowPublishes));
            // Of two agents exactly one stays.
            assert_eq!(hung_up, outcome != State::Over(Outcome::HandedOver), "{actions:?}");
            let drained = is_there(&Action::OrphanOld);
            assert_eq!(drained, is_there(&Action::Depart) || is_there(&Action::Resume), "{actions:?}");
            assert!(!(is_there(&Action::Depart) && is_there(&Action::Resume)), "{actions:?}");
            // One that has not drained and did not end was not touched.
            let touched =
                [Action::KillOld, Action::SeeOffOld, Action::Depart, Action::Resume, Action::Promote];
            if matches!(outcome, State::Over(Outcome::Dismissed)) {
                assert!(!touched.iter().any(is_there), "{actions:?}");
            }
            // Two never work on one cache.
            if let (Some(resume), Some(killed)) = (at(&Action::Resume), at(&Action::KillSuccessor)) {
                assert!(killed < resume);
            }
            assert_eq!(is_there(&Action::Resume), is_there(&Action::KillSuccessor), "{actions:?}");
            // Nothing is given before the other has let go.
            if let Some(adopt) = at(&Action::Adopt) {
                assert!(at(&Action::Succeed).is_some_and(|succeed| succeed < adopt));
                let asked = at(&Action::Drain).is_none_or(|drain| {
                    let let_go = at(&Action::OrphanOld).or(at(&Action::SeeOffOld));
                    let_go.is_some_and(|let_go| drain < let_go && let_go < adopt)
                });
                assert!(asked, "{actions:?}");
            }
            if is_there(&Action::KillOld) {
                assert!(at(&Action::KillOld) < at(&Action::SeeOffOld));
            }
        }
    }
}
