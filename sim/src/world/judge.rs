//! What must be true when everything had time to heal.

use super::{Reason, World};
use crate::agent::Role;
use crate::kernel::Outcome;
use anyhow::{Context, Result, ensure};
use csi_plugin::broker::mounts_table::State;
use node_agent::supervisor::machine::State as Life;
use std::time::Duration;

pub(crate) fn judge(world: &mut World) -> Result<()> {
    let now = world.queue.elapsed();
    let broker = world.broker.as_ref().context("there is no broker")?;
    let all: Vec<_> = world.agents.values().map(|agent| (agent.identity.pid, agent.role)).collect();
    ensure!(all.len() == 1, "of the agents one is left: {all:?}");
    let agent = world.agents.values().next().context("there is no agent")?;
    ensure!(agent.role == Role::Serving && world.owner == Some(agent.identity.pid), "{all:?}");
    ensure!(broker.current.as_ref() == Some(&agent.identity), "the broker knows another agent");
    ensure!(broker.handoff.is_none(), "a hand-off never ends: {:?}", broker.handoff);
    for (number, kubelet) in world.kubelets.iter().enumerate() {
        let target = world.volumes[number].target.path();
        let known = broker.table.at(target);
        if !kubelet.is_wanted {
            ensure!(
                known.is_none(),
                "v{number} is unpublished, and the broker has {:?}",
                known.map(|m| m.state())
            );
            continue;
        }
        let known =
            known.with_context(|| format!("v{number} is published, and the broker does not know it"))?;
        ensure!(known.state() == State::Serving, "v{number} ({}) is {:?}", known.id, known.state());
        let held = agent.mounts.get(&known.id);
        let held = held.with_context(|| format!("v{number} ({}) is not the agent's", known.id))?;
        ensure!(
            *held.machine.state() == Life::Serving,
            "v{number}: its machine is {:?}",
            held.machine.state()
        );
        let connection = world.kernel.get(held.connection).context("of a connection")?;
        ensure!(!connection.ended && connection.mounted, "v{number}: its connection has ended");
        ensure!(connection.readers.len() == 1, "v{number} is read by {:?}", connection.readers);
    }
    let published = world.kubelets.iter().filter(|kubelet| kubelet.is_wanted).count();
    ensure!(
        agent.mounts.len() == published && broker.table.all().len() == published,
        "{published} volumes are published, the agent holds {:?} and the broker {:?}",
        agent.mounts.iter().map(|(id, held)| (*id, held.machine.state().name())).collect::<Vec<_>>(),
        broker.table.all().iter().map(|mount| (mount.id, mount.state())).collect::<Vec<_>>()
    );
    let live = world.kernel.connections.values().filter(|connection| !connection.ended).count();
    ensure!(live == published, "{live} connections live for {published} mounts");
    let live = world.workers.values().filter(|it| it.is_alive).count();
    ensure!(live == published, "{live} workers for {published} mounts");
    for (id, connection) in world.kernel.connections.iter().filter(|(_, c)| !c.ended) {
        let oldest = connection.requests.values().map(|request| now - request.made).max();
        ensure!(
            oldest.is_none_or(|oldest| oldest < Duration::from_secs(2)),
            "{id:?}: a call waits for {oldest:?}"
        );
    }
    for (connection, outcome, took) in &world.kernel.outcomes {
        match outcome {
            Outcome::Answered => {
                world.summary.answered += 1;
                world.summary.stall = world.summary.stall.max(*took);
            }
            Outcome::Poisoned => world.summary.poisoned += 1,
            Outcome::Ended => {
                world.summary.ended += 1;
                let reason = world.reasons.get(connection);
                // That mounts are given up in their time only was looked at then.
                let declared = [
                    Reason::Unpublished,
                    Reason::ByOthers,
                    Reason::LetGo,
                    Reason::NotPublished,
                    Reason::HealTimeout,
                    Reason::GivenUp,
                ];
                ensure!(
                    reason.is_some_and(|reason| declared.contains(reason)),
                    "a call failed: {connection:?} has ended for {reason:?}"
                );
            }
        }
    }
    Ok(())
}
