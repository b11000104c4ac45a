//! What is found when dead mounts are looked for, and what is made anew.

use super::{Node, holding, identity};
use crate::broker::mounts_table::State;
use link::broker::{AgentAnswer, AgentRequest};
use link::{Refusal, RefusalKind};
use mounts::Connection;

fn obliging(request: &AgentRequest) -> Result<AgentAnswer, Refusal> {
    match request {
        AgentRequest::Holding => Ok(AgentAnswer::Holding { mounts: vec![] }),
        _ => Ok(AgentAnswer::Done),
    }
}

#[test]
fn a_target_is_left_with_the_volume_that_is_made_anew_there_and_not_with_another() {
    let node = Node::new();
    let agent = node.agent(1, true, obliging);
    let mount = node.preparing(1, "v", "a", &identity(1));
    let making = node.broker.renewals.wanted.make(&mount).unwrap();
    drop(node.broker.leave(mount.target.path(), "other"));
    assert_eq!(mount.state(), State::Preparing, "of another volume's unpublish it learns nothing");
    let leaving = node.broker.leave(mount.target.path(), "v");
    assert_eq!((mount.state(), node.is_aborted(&mount)), (State::Unpublished, true));
    drop((leaving, making, agent));
}

#[test]
fn a_renewal_needs_a_dead_mount_or_its_guard() {
    let node = Node::new();
    let _agent = node.agent(1, true, |request| match request {
        AgentRequest::Publish(_) => Err(Refusal::new(RefusalKind::Unavailable, "its store is away")),
        _ => Ok(AgentAnswer::Done),
    });
    let renew =
        |id: &str, at: &str| node.broker.renew(node.order(id, at), node.target(at)).unwrap_err().to_string();
    assert!(renew("v", "a").contains("is gone"), "nothing is there");
    let mount = node.serving(100, "v", "a", &identity(1));
    node.broker.lifecycle.end(&mount, "a test");
    assert!(renew("v", "a").contains("its store is away"));
    assert_eq!(
        (mount.state(), node.kernel.state().table.len()),
        (State::Dead, 2),
        "the dead one is still there"
    );
    assert_eq!(node.broker.targets.dead(mount.target.path()), [mount.connection]);
    assert_eq!(node.broker.table.all().len(), 1, "nothing is left of the try");
    node.kernel.state().unmount_top(mount.target.path());
    assert!(renew("v", "a").contains("its store is away"), "on its guard");
    assert!(renew("w", "a").contains("is gone"), "another volume's guard");
    node.kernel.state().table.clear();
    assert!(renew("v", "a").contains("is gone"));
}

#[test]
fn what_replaces_dead_mounts_in_containers_says_what_it_could_not_replace_until_it_could() {
    let node = Node::new();
    let mount = node.serving(1, "v", "a", &identity(1));
    let dead = Connection { major: 0, minor: 4000 };
    mount.set_replaces(vec![dead]);
    {
        let mut state = node.kernel.state();
        state.elsewhere = vec![dead.minor];
        state.stuck.insert(dead.minor);
    }
    assert!(!node.broker.remounter.replace_elsewhere(&mount));
    assert!(node.trouble(&mount).contains("stuck"), "{}", node.trouble(&mount));
    node.kernel.state().fail = Some("replace");
    assert!(!node.broker.remounter.replace_elsewhere(&mount));
    node.kernel.state().stuck.clear();
    assert!(node.broker.remounter.replace_elsewhere(&mount));
    assert_eq!(node.kernel.state().elsewhere, [mount.connection.minor]);
    assert!(node.trouble(&mount).is_empty());
}

/// Containers may start while their mount is made anew: it is looked for them several times, whatever the first finds.
#[test]
fn stragglers_are_looked_for_until_the_last_try_finds_none() {
    let node = Node::new();
    let mount = node.serving(1, "v", "a", &identity(1));
    let dead = Connection { major: 0, minor: 4000 };
    let (path, volume) = (mount.target.path(), mount.volume());
    mount.set_replaces(node.broker.targets.add_dead(path, volume, dead));
    let look = |tries| node.broker.renewer.find_stragglers(&mount, tries);
    let left = || (mount.replaces(), node.broker.targets.dead(path));
    assert!(!look(0) && left() == (vec![dead], vec![dead]), "there may be more");
    {
        let mut state = node.kernel.state();
        state.elsewhere = vec![dead.minor];
        state.stuck.insert(dead.minor);
    }
    assert!(!look(4) && left() == (vec![dead], vec![dead]), "one cannot be replaced yet");
    node.kernel.state().stuck.clear();
    assert!(look(4) && left() == (vec![], vec![]));
    mount.set_replaces(vec![dead]);
    node.broker.lifecycle.end(&mount, "a test");
    assert!(look(0), "it is over");
}

#[test]
fn without_an_agent_or_between_two_nothing_is_made_anew() {
    let node = Node::new();
    let mount = node.serving(100, "v", "a", &identity(1));
    node.broker.lifecycle.end(&mount, "a test");
    assert!(node.broker.renewer.look_for_dead(), "the next agent wakes it");
    let agent = node.agent(1, true, holding(&[]));
    let switching = node.broker.agents.stop_publishes();
    assert!(!node.broker.renewer.look_for_dead(), "it looks again");
    assert_eq!(agent.was_asked("Publish"), 0);
    drop(switching);
    node.kernel.state().fail = Some("table");
    assert!(!node.broker.renewer.look_for_dead(), "it could not see");
    assert!(node.broker.renewer.look_for_dead());
    let end = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while agent.was_asked("Publish") == 0 {
        assert!(std::time::Instant::now() < end, "it is not made anew");
        std::thread::yield_now();
    }
}
