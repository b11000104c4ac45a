//! What is given to an agent that comes, beside one that serves or after it.

use super::{Node, holding, identity};
use crate::broker::mounts_table::State;
use link::broker::{AgentAnswer, AgentEnd, AgentRequest};
use link::{Refusal, RefusalKind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[test]
fn an_agent_is_given_what_no_agent_serves_and_what_one_that_is_gone_served() {
    let node = Node::new();
    let numbers = [1, 2, 3, 4, 5];
    let mounts =
        numbers.map(|n| node.serving(n, "v", &format!("t{n}"), &identity(if n == 2 { 2 } else { 1 })));
    let [orphan, own, noted_late, dead, ended] = &mounts;
    assert!(node.broker.lifecycle.orphan(orphan, &identity(1), "a test"));
    node.broker.lifecycle.end(dead, "a test");
    node.kernel.state().aborted.insert(ended.connection.minor);
    let agent = node.agent(2, true, holding(&[]));
    let given = node.broker.adopter.hand_all_over(&agent.link, None);
    assert_eq!((given.taken, given.refused), (2, None));
    assert_eq!(agent.was_asked("Adopt"), 2);
    let states = mounts.each_ref().map(|mount| mount.state());
    assert_eq!(states, [State::Serving, State::Serving, State::Serving, State::Dead, State::Dead]);
    assert!([orphan, own, noted_late].iter().all(|mount| mount.is_of(agent.link.identity())));
}

/// The first of them, for several are given at once; and what a program comes to wait at meanwhile goes before the rest.
#[test]
fn mounts_at_which_programs_wait_are_given_to_an_agent_first() {
    const IDLE: u64 = 40;
    let node = Node::new();
    let mounts: Vec<_> =
        (1..=IDLE + 2).map(|n| node.serving(n, "v", &format!("t{n}"), &identity(1))).collect();
    let [urgent, later] = [IDLE + 1, IDLE + 2].map(|n| mounts[n as usize - 1].connection.minor);
    node.kernel.state().requested.insert(urgent);
    let (order, kernel) = (Arc::<Mutex<Vec<u64>>>::default(), node.kernel.clone());
    let note = order.clone();
    let agent = node.agent(2, true, move |request| {
        if let AgentRequest::Adopt(adopt) = request {
            note.lock().unwrap().push(adopt.publish.mount.0);
            let mut state = kernel.state();
            state.requested.remove(&urgent);
            state.requested.insert(later);
        }
        Ok(AgentAnswer::Done)
    });
    assert_eq!(node.broker.adopter.hand_all_over(&agent.link, None).taken as u64, IDLE + 2);
    let order = order.lock().unwrap();
    let place = |mount: u64| order.iter().position(|one| *one == mount).unwrap();
    assert!(place(IDLE + 1) < 10 && place(IDLE + 2) < 20, "{order:?}");
}

#[test]
fn what_an_agent_refuses_is_orphaned_with_its_reason_and_the_others_are_served() {
    let node = Node::new();
    let [first, second] = [1, 2].map(|n| node.serving(n, "v", &format!("t{n}"), &identity(1)));
    let agent = node.agent(2, true, |request| match request {
        AgentRequest::Adopt(adopt) if adopt.publish.mount.0 == 1 => {
            Err(Refusal::new(RefusalKind::Unavailable, "no worker comes up"))
        }
        _ => Ok(AgentAnswer::Done),
    });
    let given = node.broker.adopter.hand_all_over(&agent.link, None);
    assert_eq!(given.taken, 1);
    let why = given.refused.unwrap();
    assert!(why.contains("no worker comes up") && why.contains("volume v"), "{why}");
    assert!(matches!((first.state(), second.state()), (State::Orphaned(_), State::Serving)));
    assert!(node.trouble(&first).contains("no worker comes up"));
}

/// By others, or unpublished: the agent may have taken it all the same.
#[test]
fn what_ends_while_it_is_given_to_an_agent_is_let_go_of() {
    let node = Node::new();
    let mount = node.serving(1, "v", "a", &identity(1));
    let meanwhile = mount.clone();
    let agent = node.agent(2, true, move |request| {
        if matches!(request, AgentRequest::Adopt(_)) {
            meanwhile.enter(State::Unpublished, "a test");
        }
        Ok(AgentAnswer::Done)
    });
    let given = node.broker.adopter.hand_all_over(&agent.link, None);
    assert_eq!((given.taken, given.refused), (0, None), "it is no failure");
    assert_eq!((agent.was_asked("Adopt"), agent.was_asked("Unpublish")), (1, 1));
}

#[test]
fn an_agent_learns_how_the_one_before_came_to_its_end() {
    for (spare, end) in [(None, AgentEnd::Hung), (Some(identity(1)), AgentEnd::Asked)] {
        let node = Node::new();
        let mount = node.serving(1, "v", "a", &identity(1));
        node.broker.agents.ends.note(&identity(1), AgentEnd::Hung);
        assert!(node.broker.lifecycle.orphan(&mount, &identity(1), "a test"));
        let seen = Arc::<Mutex<Vec<AgentEnd>>>::default();
        let note = seen.clone();
        let agent = node.agent(2, true, move |request| {
            if let AgentRequest::Adopt(adopt) = request {
                note.lock().unwrap().push(adopt.ended);
            }
            Ok(AgentAnswer::Done)
        });
        node.broker.adopter.hand_all_over(&agent.link, spare.as_ref());
        assert_eq!(*seen.lock().unwrap(), [end]);
    }
}

#[test]
fn a_mount_that_lost_what_was_prepared_stays_an_orphan() {
    let node = Node::new();
    let mount = node.serving(1, "v", "a", &identity(1));
    let since = Instant::now();
    assert!(mount.enter(State::Orphaned(since), "a test"));
    let device = mount.release().device;
    *mount.device.lock().unwrap() = device;
    let agent = node.agent(2, true, holding(&[]));
    let given = node.broker.adopter.hand_all_over(&agent.link, None);
    assert_eq!((given.taken, given.refused, agent.was_asked("Adopt")), (0, None, 0));
    assert_eq!(mount.state(), State::Orphaned(since), "its time goes on");
}

#[test]
fn a_successor_is_tried_with_every_live_mount_and_says_which_it_cannot_serve() {
    let node = Node::new();
    let mounts = [1, 2, 3].map(|n| node.serving(n, "v", &format!("t{n}"), &identity(1)));
    let [_, orphan, dead] = &mounts;
    assert!(node.broker.lifecycle.orphan(orphan, &identity(1), "a test"));
    node.broker.lifecycle.end(dead, "a test");
    let _old = node.agent(1, true, holding(&[1, 2, 3]));
    let secrets = Arc::new(AtomicBool::new(false));
    let seen = secrets.clone();
    let successor = node.agent(2, false, move |request| match request {
        AgentRequest::Prepare(adopt) => {
            seen.fetch_or(!adopt.publish.secrets.is_empty(), Ordering::SeqCst);
            match adopt.publish.mount.0 {
                2 => Err(Refusal::new(RefusalKind::Unavailable, "no worker comes up")),
                _ => Ok(AgentAnswer::Done),
            }
        }
        _ => Ok(AgentAnswer::Done),
    });
    let refused = node.broker.handoff.prepare(&successor.link);
    assert_eq!(successor.was_asked("Prepare"), 2);
    assert!(refused.len() == 1 && refused[0].contains("no worker comes up"), "{refused:?}");
    assert!(!secrets.load(Ordering::SeqCst), "nothing is asked of the store yet");
    // One that has ended meanwhile is no reason against it.
    node.kernel.state().aborted.insert(orphan.connection.minor);
    assert_eq!(node.broker.handoff.prepare(&successor.link), Vec::<String>::new());
}

/// It has not understood what it is asked, or is not ours any more.
#[test]
fn a_successor_that_answers_with_something_else_cannot_serve() {
    let node = Node::new();
    node.serving(1, "v", "a", &identity(1));
    let _old = node.agent(1, true, holding(&[1]));
    let successor =
        node.agent(2, false, |_| Ok(AgentAnswer::Holding { mounts: vec![link::broker::MountId(1)] }));
    let refused = node.broker.handoff.prepare(&successor.link);
    assert!(refused.len() == 1 && refused[0].contains("something else"), "{refused:?}");
}

#[test]
fn a_broker_that_was_not_shown_every_mount_knows_that() {
    let node = Node::new();
    let mount = node.serving(1, "v", "a", &identity(1));
    let handoff = &node.broker.handoff;
    assert!(!handoff.misses_mounts());
    // Of another kubelet, or of nothing that is ours, it knows nothing, and needs to know nothing.
    let source = mounts::MountSource { volume: "x".into(), digest: "d".into() };
    node.kernel.leave_mount(std::path::Path::new("/elsewhere/mount"), &source);
    assert!(!handoff.misses_mounts());
    node.kernel.leave_mount(&node.path("b"), &source);
    assert!(handoff.misses_mounts());
    node.broker.take_down(&mount).unwrap();
    node.kernel.state().table.clear();
    node.kernel.state().fail = Some("table");
    assert!(handoff.misses_mounts(), "it could not look");
    assert!(!handoff.misses_mounts());
}

#[test]
fn what_the_old_agent_holds_is_shown_before_it_is_handed_over() {
    let node = Node::new();
    node.serving(1, "v", "a", &identity(1));
    let old = node.agent(1, true, holding(&[1]));
    assert!(node.broker.handoff.await_shown(&old.link));
    // It shows the second a moment later.
    let other = Node::new();
    other.serving(1, "v", "a", &identity(1));
    let old = other.agent(1, true, holding(&[1, 2]));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| other.broker.handoff.await_shown(&old.link));
        while old.was_asked("Holding") < 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(!waiting.is_finished());
        other.serving(2, "w", "b", &identity(1));
        assert!(waiting.join().unwrap());
    });
    // One that gives no such answer: the mount table says it.
    let mute = Node::new();
    mute.serving(1, "v", "a", &identity(1));
    let old = mute.agent(1, true, |_| Ok(AgentAnswer::Done));
    assert!(mute.broker.handoff.await_shown(&old.link));
}

#[test]
fn publishes_that_are_under_way_are_waited_for() {
    let node = Node::new();
    node.broker.handoff.await_publishes();
    let mount = node.preparing(1, "v", "a", &identity(1));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| node.broker.handoff.await_publishes());
        std::thread::sleep(Duration::from_millis(20));
        assert!(!waiting.is_finished());
        mount.enter(State::Serving, "a test");
    });
}
