//! What agents show, and when the broker takes it.

use super::{Node, holding, identity, resume};
use crate::broker::messages;
use crate::broker::mounts_table::{Mount, State};
use link::broker::{Hold, MountId, Publish};
use link::{Refusal, RefusalKind};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// What the agent of a mount of an earlier broker shows, and its device.
struct Shown {
    publish: Publish,
    device: OwnedFd,
    connection: mounts::Connection,
}

impl Shown {
    fn of(mount: &Mount) -> Self {
        Self {
            publish: messages::publish(mount),
            device: mount.device().unwrap().try_clone().unwrap(),
            connection: mount.connection,
        }
    }

    fn hold(&self) -> Hold {
        let publish = serde_json::from_value(serde_json::to_value(&self.publish).unwrap()).unwrap();
        Hold { publish, resume: resume(), backing: vec![7, 8] }
    }
}

/// A mount of an earlier broker.
fn earlier(node: &Node, number: u64, id: &str, target: &str) -> Shown {
    Shown::of(&node.mounted(number, id, target, &identity(1)))
}

fn show(node: &Node, life: u64, shown: &Shown) -> Result<(), Refusal> {
    let fds = vec![shown.device.try_clone().unwrap(), tempfile::tempfile().unwrap().into()];
    node.broker.holder.hold(&identity(life), shown.hold(), fds).map(drop)
}

fn known(node: &Node, number: u64) -> Option<Arc<Mount>> {
    node.broker.table.get(MountId(number))
}

#[test]
fn what_the_serving_agent_shows_is_served_with_all_that_it_has() {
    let node = Node::new();
    let agent = node.agent(1, true, holding(&[]));
    let shown = earlier(&node, 1, "v", "a");
    show(&node, 1, &shown).unwrap();
    let mount = known(&node, 1).unwrap();
    assert_eq!(
        (mount.state(), mount.connection, mount.backing()),
        (State::Serving, shown.connection, vec![7, 8])
    );
    assert!(mount.control().is_some() && mount.prepared().is_some() && mount.is_of(agent.link.identity()));
    assert_eq!(node.broker.targets.mounted(mount.target.path(), "v"), Some(shown.connection));
    show(&node, 1, &shown).unwrap();
    assert_eq!(node.broker.table.all().len(), 1, "it is shown again");
    assert_eq!(agent.was_asked("Unpublish"), 0);
}

#[test]
fn what_an_agent_shows_that_is_gone_by_then_waits_for_the_next() {
    let node = Node::new();
    show(&node, 1, &earlier(&node, 1, "v", "a")).unwrap();
    assert!(matches!(known(&node, 1).unwrap().state(), State::Orphaned(_)));
}

#[test]
fn a_mount_that_is_known_is_shown_by_its_own_agent_alone() {
    let node = Node::new();
    let agent = node.agent(1, true, holding(&[]));
    let mount = node.serving(1, "v", "a", &identity(1));
    let shown = Shown::of(&mount);
    assert_eq!(show(&node, 2, &shown).unwrap_err().kind, RefusalKind::Conflict);
    show(&node, 1, &shown).unwrap();
    // The broker took it for orphaned: its agent shows that it is not.
    assert!(node.broker.lifecycle.orphan(&mount, &identity(1), "a test"));
    let switching = node.broker.agents.stop_publishes();
    show(&node, 1, &shown).unwrap();
    assert!(matches!(mount.state(), State::Orphaned(_)), "it may be the drained one of two");
    drop(switching);
    show(&node, 1, &shown).unwrap();
    assert_eq!(mount.state(), State::Serving);
    // While it is given to it, the answer to that counts.
    assert!(node.broker.lifecycle.orphan(&mount, &identity(1), "a test"));
    assert!(mount.begin_adoption(&identity(1), std::time::Instant::now()).is_some());
    show(&node, 1, &shown).unwrap();
    assert!(matches!(mount.state(), State::Adopting(_)));
    node.broker.lifecycle.end(&mount, "a test");
    assert_eq!(show(&node, 1, &shown).unwrap_err().kind, RefusalKind::NotFound);
    assert_eq!(agent.was_asked("Unpublish"), 1);
    assert_eq!(show(&node, 2, &shown).unwrap_err().kind, RefusalKind::Conflict);
    assert_eq!(agent.was_asked("Unpublish"), 1, "the agent that serves never had it");
}

#[test]
fn an_orphan_that_an_agent_shows_which_does_not_serve_stays_one() {
    let node = Node::new();
    let _agent = node.agent(2, true, holding(&[]));
    let mount = node.serving(1, "v", "a", &identity(1));
    let shown = Shown::of(&mount);
    assert!(node.broker.lifecycle.orphan(&mount, &identity(1), "a test"));
    show(&node, 1, &shown).unwrap();
    assert!(matches!(mount.state(), State::Orphaned(_)));
}

#[test]
fn what_is_not_at_its_target_is_not_held() {
    let node = Node::new();
    let agent = node.agent(1, true, holding(&[]));
    let refused = |shown: &Shown| show(&node, 1, shown).unwrap_err().kind;
    // Another process has unmounted it, and a container still has it.
    let contained = earlier(&node, 1, "v", "a");
    node.kernel.state().elsewhere = vec![contained.connection.minor];
    node.kernel.state().unmount_top(&node.path("a"));
    assert_eq!(refused(&contained), RefusalKind::NotFound);
    assert_eq!(agent.was_asked("Unpublish"), 0, "the container reads on");
    // Another volume is at its target.
    let (mut shown, other) = (earlier(&node, 2, "w", "b"), earlier(&node, 3, "x", "c"));
    shown.publish.spec.target = other.publish.spec.target;
    assert_eq!(refused(&shown), RefusalKind::NotFound);
    // And nothing at this one.
    shown.publish.spec.target = node.path("d").display().to_string();
    assert_eq!(refused(&shown), RefusalKind::NotFound);
    assert!(node.broker.table.all().is_empty());
}

/// At its target is a later mount of the same volume: this one is at another place.
#[test]
fn a_mount_is_held_where_it_is_and_not_where_another_of_its_volume_is() {
    let node = Node::new();
    let _agent = node.agent(1, true, holding(&[]));
    let old = earlier(&node, 1, "v", "a");
    node.kernel.state().elsewhere = vec![old.connection.minor];
    node.kernel.state().unmount_top(&node.path("a"));
    let new = earlier(&node, 2, "v", "a");
    assert_eq!(show(&node, 1, &old).unwrap_err().kind, RefusalKind::NotFound);
    show(&node, 1, &new).unwrap();
    // A device of which the kernel says nothing, beside the mount that is known there.
    let mut unknown = Shown::of(&known(&node, 2).unwrap());
    (unknown.publish.mount, unknown.device) = (MountId(3), tempfile::tempfile().unwrap().into());
    assert_eq!(show(&node, 1, &unknown).unwrap_err().kind, RefusalKind::NotFound);
    // Once that one has ended, whose number it was, it may be it.
    node.broker.lifecycle.end(&known(&node, 2).unwrap(), "a test");
    show(&node, 1, &unknown).unwrap();
}

#[test]
fn what_has_ended_while_there_was_no_broker_is_known_and_made_anew_where_it_still_is() {
    let node = Node::new();
    let agent = node.agent(1, true, holding(&[]));
    let shown = earlier(&node, 1, "v", "a");
    node.kernel.state().aborted.insert(shown.connection.minor);
    assert_eq!(show(&node, 1, &shown).unwrap_err().kind, RefusalKind::NotFound);
    let mount = known(&node, 1).expect("what it is made anew from");
    assert_eq!(
        (mount.state(), mount.device().is_none(), agent.was_asked("Unpublish")),
        (State::Dead, true, 1)
    );
    assert!(mount.is_ended_by_others() && node.trouble(&mount).contains("ended its mount"));

    // One that lives is in its place.
    let dead = earlier(&node, 2, "w", "b");
    node.kernel.state().aborted.insert(dead.connection.minor);
    node.kernel.state().table.retain(|entry| entry.mount_point != node.path("b"));
    let lives = earlier(&node, 3, "w", "b");
    assert!(show(&node, 1, &dead).is_err());
    assert!(known(&node, 2).is_none(), "it is another one that is there");
    show(&node, 1, &lives).unwrap();
    node.kernel.state().aborted.insert(lives.connection.minor);
    assert!(show(&node, 1, &dead).is_err());
    assert!(known(&node, 2).is_none(), "one is known there");
}

/// Between the look at its device and the note of it.
#[test]
fn what_ends_while_it_is_shown_is_made_anew_if_any_of_it_is_left_at_its_target() {
    for (left, state) in [("mount", Some(State::Dead)), ("guard", Some(State::Dead)), ("nothing", None)] {
        let node = Node::new();
        let _agent = node.agent(1, true, holding(&[]));
        let shown = earlier(&node, 1, "v", "a");
        let mount = held(&node, &shown);
        node.kernel.state().aborted.insert(shown.connection.minor);
        match left {
            "mount" => {}
            "guard" => node.kernel.state().unmount_top(&node.path("a")),
            _ => node.kernel.state().table.clear(),
        }
        node.broker.holder.hold_ended(&mount);
        assert_eq!(known(&node, 1).map(|mount| mount.state()), state, "{left} is left");
        assert!(mount.state().is_over() && mount.device().is_none(), "{left} is left");
    }
    // An unpublish came first, and has taken the mount away.
    let node = Node::new();
    let shown = earlier(&node, 1, "v", "a");
    let mount = held(&node, &shown);
    mount.enter(State::Unpublished, "a test");
    node.broker.holder.hold_ended(&mount);
    assert!(known(&node, 1).is_none() && mount.device().is_none());
}

fn held(node: &Node, shown: &Shown) -> Arc<Mount> {
    show(node, 1, shown).unwrap();
    known(node, shown.publish.mount.0).unwrap()
}

#[test]
fn what_was_unpublished_is_not_held_and_its_agent_lets_go() {
    let node = Node::new();
    let agent = node.agent(1, true, holding(&[]));
    let mount = node.serving(1, "v", "a", &identity(1));
    let shown = Shown::of(&mount);
    node.broker.take_down(&mount).unwrap();
    let before = agent.was_asked("Unpublish");
    assert_eq!(show(&node, 1, &shown).unwrap_err().kind, RefusalKind::NotFound);
    assert_eq!(agent.was_asked("Unpublish"), before + 1);
}

#[test]
fn a_message_without_its_descriptors_or_with_a_target_elsewhere_is_wrong() {
    let node = Node::new();
    let shown = earlier(&node, 1, "v", "a");
    let one: Vec<OwnedFd> = vec![shown.device.try_clone().unwrap()];
    let refused = node.broker.holder.hold(&identity(1), shown.hold(), one).unwrap_err();
    assert_eq!(refused.kind, RefusalKind::Invalid);
    let mut elsewhere = shown;
    elsewhere.publish.spec.target = "/etc".into();
    assert_eq!(show(&node, 1, &elsewhere).unwrap_err().kind, RefusalKind::Invalid);
}
