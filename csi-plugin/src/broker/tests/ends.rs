//! How mounts come to their ends, and what their owners hear of it.

use super::{Node, holding, identity};
use crate::broker::expiry;
use crate::broker::mounts_table::State;
use link::RefusalKind;
use link::broker::{AgentEnd, BrokerAnswer, MountId, Report};
use mounts::Kernel;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[test]
fn an_agent_that_is_back_gets_back_what_it_served_and_nothing_else() {
    let node = Node::new();
    let lifecycle = &node.broker.lifecycle;
    let (ours, other) = (identity(1), identity(2));
    let mounts: Vec<_> = [(1, &ours), (2, &other), (3, &ours), (4, &ours)]
        .map(|(number, agent)| node.serving(number, "v", &format!("t{number}"), agent))
        .into();
    assert!(lifecycle.orphan(&mounts[0], &ours, "gone"));
    assert!(!lifecycle.orphan(&mounts[0], &ours, "gone"), "it is orphaned already");
    assert!(!lifecycle.orphan(&mounts[1], &ours, "gone"), "another agent serves it");
    assert!(lifecycle.orphan(&mounts[1], &other, "gone"));
    assert!(lifecycle.orphan(&mounts[2], &ours, "gone"));
    assert!(mounts[2].begin_adoption(&ours, Instant::now()).is_some());
    lifecycle.end(&mounts[3], "a test");
    let agent = node.agent(1, true, holding(&[]));
    lifecycle.welcome_back(&agent.link);
    let states: Vec<State> = mounts.iter().map(|mount| mount.state()).collect();
    assert!(
        matches!(states[..], [State::Serving, State::Orphaned(_), State::Adopting(_), State::Dead]),
        "{states:?}"
    );
    assert!(node.trouble(&mounts[0]).is_empty() && node.trouble(&mounts[1]).contains("gone"));
}

#[test]
fn a_broker_that_stops_tells_of_nothing_that_it_notes() {
    for stops in [false, true] {
        let node = Node::new();
        let mount = node.serving(1, "v", "a", &identity(1));
        let ended = node.serving(2, "w", "b", &identity(1));
        node.broker.lifecycle.stopping.store(stops, Ordering::Release);
        assert_eq!(node.broker.lifecycle.stopped(), stops);
        node.broker.lifecycle.orphan_all_of(&identity(1), "the node agent is gone");
        assert!(matches!(mount.state(), State::Orphaned(_)));
        assert_eq!(node.trouble(&mount).is_empty(), stops, "{}", node.trouble(&mount));
        node.kernel.state().aborted.insert(ended.connection.minor);
        node.broker.lifecycle.note_all_that_ended();
        assert_eq!(ended.state(), State::Dead);
        assert_eq!(node.trouble(&ended).contains("ended its mount"), !stops);
    }
}

#[test]
fn nothing_good_is_said_of_a_mount_that_another_process_has_ended() {
    let node = Node::new();
    let lifecycle = &node.broker.lifecycle;
    let mount = node.serving(1, "v", "a", &identity(1));
    assert!(!lifecycle.note_if_ended(&mount), "it lives");
    lifecycle.report(&mount, Report::Degraded { why: "one of its workers hangs".into() });
    assert!(node.trouble(&mount).contains("hangs"));
    lifecycle.report(&mount, Report::Recovered);
    assert!(node.trouble(&mount).is_empty());
    assert!(lifecycle.orphan(&mount, &identity(1), "the node agent is gone"));
    node.kernel.state().aborted.insert(mount.connection.minor);
    assert!(!lifecycle.enter_if(&mount, State::Serving, "an agent serves it", |_, _| true));
    assert!(node.trouble(&mount).contains("ended its mount"), "{}", node.trouble(&mount));
    // What its agent says of it comes too late.
    lifecycle.report(&mount, Report::Recovered);
    assert!(node.trouble(&mount).contains("ended its mount"));
    assert!(mount.is_ended_by_others() && !lifecycle.note_if_ended(&mount), "it is noted once");
}

#[test]
fn an_agent_speaks_of_its_own_mounts_alone() {
    let node = Node::new();
    let mount = node.serving(1, "v", "a", &identity(1));
    let owned = |life, id| node.broker.lifecycle.owned(&identity(life), MountId(id));
    assert_eq!(owned(1, 1).unwrap().id, mount.id);
    for (life, id) in [(2, 1), (1, 2)] {
        assert_eq!(owned(life, id).unwrap_err().kind, RefusalKind::NotFound);
    }
}

/// Once a mount has ended its number may be another connection's.
#[test]
fn a_connection_is_aborted_once_and_none_that_has_ended() {
    let node = Node::new();
    let lifecycle = &node.broker.lifecycle;
    let mount = node.serving(1, "v", "a", &identity(1));
    mount
        .record_backing(node.kernel.backing_open(mount.device().unwrap().as_fd(), a_file().as_fd()).unwrap());
    lifecycle.end(&mount, "a test");
    assert!(node.is_aborted(&mount) && node.kernel.state().backing_open.is_empty());
    assert!(mount.device().is_none() && mount.prepared().is_none());
    node.kernel.state().aborted.clear();
    lifecycle.abort(&mount);
    lifecycle.end(&mount, "a test");
    assert!(!node.is_aborted(&mount));

    // Its last process is gone.
    let gone = node.serving(2, "w", "b", &identity(1));
    node.kernel.state().dead.insert(gone.connection.minor);
    lifecycle.abort(&gone);
    assert!(!node.is_aborted(&gone) && gone.device().is_none());

    // Where there is no fusectl it is ended at its target.
    let uncontrolled = node.serving(3, "x", "c", &identity(1));
    let released = uncontrolled.release();
    *uncontrolled.device.lock().unwrap() = released.device;
    lifecycle.abort(&uncontrolled);
    assert!(node.is_aborted(&uncontrolled));
}

fn a_file() -> std::fs::File {
    tempfile::tempfile().unwrap()
}

#[test]
fn what_is_given_up_is_let_go_of_by_the_agent_that_serves_it() {
    let node = Node::new();
    let agent = node.agent(1, true, holding(&[]));
    let (ours, other) = (node.serving(1, "v", "a", &identity(1)), node.serving(2, "w", "b", &identity(7)));
    node.broker.take_down(&ours).unwrap();
    assert_eq!((agent.was_asked("Unpublish"), ours.state()), (1, State::Unpublished));
    assert!(node.is_aborted(&ours) && node.broker.table.get(ours.id).is_none());
    node.broker.take_down(&other).unwrap();
    assert_eq!(agent.was_asked("Unpublish"), 1, "of another agent's it knows nothing");
    assert!(node.kernel.state().table.is_empty());
}

#[test]
fn a_mount_is_in_use_at_its_target_or_in_a_container_and_not_where_another_of_its_volume_is() {
    let node = Node::new();
    let [here, gone, contained] = [1, 2, 3].map(|n| node.serving(n, "v", &format!("t{n}"), &identity(1)));
    node.kernel.state().unmount_top(gone.target.path());
    node.kernel.state().unmount_top(contained.target.path());
    node.kernel.state().elsewhere = vec![contained.connection.minor];
    let in_use = |mounts: &[&std::sync::Arc<_>]| {
        let mounts: Vec<_> = mounts.iter().map(|mount| std::sync::Arc::clone(mount)).collect();
        node.broker.lifecycle.in_use(&mounts).unwrap()
    };
    assert_eq!(in_use(&[&here]), [true]);
    assert_eq!(node.kernel.state().scans, 0, "it is at its target: no other place is looked at");
    assert_eq!(in_use(&[&gone, &here, &contained]), [false, true, true]);
    assert_eq!(node.kernel.state().scans, 1);
    // Its number is another volume's by now.
    let other = node.serving(4, "w", "t4", &identity(1));
    let minor = gone.connection.minor;
    node.kernel
        .state()
        .table
        .iter_mut()
        .filter(|e| e.minor == other.connection.minor)
        .for_each(|e| e.minor = minor);
    assert_eq!(in_use(&[&here]), [true]);
    let scans = node.kernel.state().scans;
    let _ = in_use(&[&gone]);
    assert_eq!(node.kernel.state().scans, scans + 1, "another volume's mount is not it");
}

#[test]
fn mounts_without_an_agent_end_when_their_time_is_over_and_others_wait() {
    let node = Node::new();
    let lifecycle = &node.broker.lifecycle;
    let [early, late, served] = [1, 2, 3].map(|n| node.serving(n, "v", &format!("t{n}"), &identity(n)));
    let now = Instant::now();
    let limit = early.heal_timeout();
    for (mount, since) in [(&early, now), (&late, now + Duration::from_secs(2))] {
        assert!(mount.enter(State::Orphaned(since), "a test"));
    }
    assert_eq!(expiry::end_overdue(lifecycle, now + limit - Duration::from_secs(1)), Duration::from_secs(1));
    assert_eq!(expiry::end_overdue(lifecycle, now + limit), Duration::from_secs(2));
    assert_eq!(early.state(), State::Dead);
    assert!(node.is_aborted(&early) && !node.is_aborted(&late) && !node.is_aborted(&served));
    assert!(expiry::end_overdue(lifecycle, now + limit * 2) >= Duration::from_secs(1));
    assert_eq!((late.state(), served.state()), (State::Dead, State::Serving));
}

#[test]
fn an_agent_that_leaves_learns_which_mounts_a_successor_could_be_given() {
    let node = Node::new();
    let shutdown = &node.broker.shutdown;
    let [whole, ended, unprepared] = [1, 2, 3].map(|n| node.serving(n, "v", &format!("t{n}"), &identity(n)));
    node.broker.lifecycle.end(&ended, "a test");
    let device = unprepared.release().device;
    *unprepared.device.lock().unwrap() = device;
    match shutdown.of_agent(&identity(1)) {
        Ok(BrokerAnswer::Holding { mounts }) => assert_eq!(mounts, [whole.id]),
        other => panic!("{other:?}"),
    }
    assert_eq!(node.broker.agents.ends.of(&identity(1)), AgentEnd::Asked);
    shutdown.going.store(true, Ordering::SeqCst);
    assert_eq!(shutdown.of_agent(&identity(1)).unwrap_err().kind, RefusalKind::Unavailable);
}

#[test]
fn a_broker_goes_only_while_the_agent_that_serves_holds_every_mount() {
    let node = Node::new();
    assert!(node.broker.may_go(), "there is no mount");
    node.broker.shutdown.going.store(false, Ordering::SeqCst);
    let first = node.serving(1, "v", "a", &identity(1));
    assert!(!node.broker.may_go(), "there is no agent");
    assert!(!node.broker.shutdown.going.load(Ordering::SeqCst), "it stays, and keeps mounts for agents");
    let holds = std::sync::Arc::new(std::sync::Mutex::new(vec![1]));
    let said = holds.clone();
    let _agent = node.agent(1, true, move |request| holding(&said.lock().unwrap())(request));
    assert!(node.broker.may_go());
    let second = node.serving(2, "w", "b", &identity(1));
    assert!(!node.broker.may_go(), "it does not hold the second");
    holds.lock().unwrap().push(2);
    assert!(node.broker.may_go());
    // Of one that has ended nothing needs to be held.
    node.broker.lifecycle.end(&second, "a test");
    holds.lock().unwrap().pop();
    assert!(node.broker.may_go());
    let other = node.serving(3, "x", "c", &identity(7));
    holds.lock().unwrap().push(3);
    assert!(!node.broker.may_go(), "another agent serves it");
    node.broker.lifecycle.end(&other, "a test");
    assert!(node.broker.lifecycle.orphan(&first, &identity(1), "a test"));
    assert!(!node.broker.may_go(), "the agent does not serve it");
}
