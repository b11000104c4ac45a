//! What is done to the node.

use super::{ABORTED, Ev, KILLED, NOBODY, Reason, World};
use crate::kernel::WorkerId;
use anyhow::Result;
use node_agent::supervisor::machine::Event;
use rand::RngExt;

/// Again and again.
pub(super) fn hurt_and_go_on(world: &mut World) -> Result<()> {
    if world.faults_left > 0 {
        world.after_ms(1..3000, Ev::Fault);
    }
    hurt(world)
}

/// As long as the plan has faults left.
pub(super) fn hurt(world: &mut World) -> Result<()> {
    if world.faults_left == 0 {
        return Ok(());
    }
    world.faults_left -= 1;
    let alive: Vec<WorkerId> = world.workers.iter().filter(|(_, w)| w.is_alive).map(|(id, _)| *id).collect();
    let some = (!alive.is_empty()).then(|| alive[world.rng.random_range(0..alive.len())]);
    let what = match world.rng.random_range(0..100) {
        0..8 => {
            world.arm_a_step();
            "a death at a step"
        }
        8..40 => {
            some.into_iter().for_each(|worker| world.dies(worker, KILLED));
            "worker killed"
        }
        40..50 => {
            some.into_iter().for_each(|worker| world.dies(worker, ABORTED));
            "worker panicked"
        }
        50..56 => {
            some.into_iter().for_each(|worker| world.hang(worker));
            "worker hung"
        }
        56..58 => {
            if let Some((pid, mount)) =
                some.and_then(|id| world.workers.get(&id)).map(|it| (it.agent, it.mount))
            {
                let why = "it says nonsense".to_owned();
                world.machine(pid, mount, some.unwrap_or(NOBODY), Event::Failed { why })?;
            }
            "worker failed"
        }
        58..67 => {
            kill_an_agent(world);
            "agent killed"
        }
        67..76 => {
            world.broker_dies();
            "broker killed"
        }
        76..79 => {
            kill_an_agent(world);
            world.broker_dies();
            "agent and broker killed"
        }
        79..86 if world.agents.len() == 1 => {
            world.standby_starts();
            // What is hurt next is mostly a part of the hand-off.
            match world.rng.random_range(0..10) {
                0..6 => world.after_ms(20..400, Ev::FaultOfHandoff),
                6 => {
                    world.kills_agent_at_handoff = true;
                    world.after_ms(20..400, Ev::FaultOfHandoff);
                }
                _ => {}
            }
            "hand-off"
        }
        79..86 => {
            let pids: Vec<i32> = world.agents.keys().copied().collect();
            pids.into_iter().for_each(|pid| world.agent_dies(pid));
            "every agent killed"
        }
        86..90 => {
            let live = world.kubelets.iter().filter_map(|kubelet| kubelet.connection).collect::<Vec<_>>();
            if !live.is_empty() {
                let connection = live[world.rng.random_range(0..live.len())];
                world.end(connection, Reason::ByOthers);
            }
            "connection aborted"
        }
        90..93 => {
            world.store_is_away = true;
            world.after_ms(500..20_000, Ev::StoreBack);
            "store away"
        }
        // It ends by itself, and is not made longer.
        _ if world.no_workers.is_some() => "nothing",
        93..95 => {
            world.lose_workers();
            world.after_ms(500..20_000, Ev::WorkersBack);
            "no worker starts"
        }
        95..98 => {
            world.lose_workers();
            world.is_suspended = true;
            world.after_ms(500..20_000, Ev::WorkersBack);
            "respawn suspended"
        }
        _ => {
            world.lose_workers();
            match world.rng.random_range(0..4) {
                0 | 1 => world.is_suspended = true,
                2 => world.self_test_fails = true,
                _ => {}
            }
            world.after_ms(45_000..120_000, Ev::WorkersBack);
            "no worker starts for long"
        }
    };
    *world.summary.faults.entry(what).or_default() += 1;
    Ok(())
}

fn kill_an_agent(world: &mut World) {
    let pids: Vec<i32> = world.agents.keys().copied().collect();
    if !pids.is_empty() {
        let pid = pids[world.rng.random_range(0..pids.len())];
        world.agent_dies(pid);
    }
}
