//! The steps at which a process of the product can be made to die (`failpoint::hit`), each at its place in the simulated
//! node: what has happened before it has happened, and what comes after it does not.

use super::{ABORTED, World};
use crate::kernel::WorkerId;
use rand::RngExt;

/// Those of the product, all of them: a test compares the two.
pub const STEPS: &[&str] = &[
    "agent.adopt",
    "agent.adopted",
    "agent.collected",
    "agent.memory-mapped",
    "agent.mount-listed",
    "agent.scope-opened",
    "agent.volume-prepared",
    "agent.worker-assigned",
    "agent.worker-serving",
    "agent.workers-gone",
    "broker.adopted-one",
    "broker.held",
    "broker.hold",
    "broker.init-answered",
    "broker.mounted",
    "broker.noted",
    "broker.prepared",
    "broker.renewal-noted",
    "broker.renewal-put",
    "broker.renewal-served",
    "broker.renewed",
    "broker.started",
    "broker.volume-prepared",
    "handoff.drained",
    "handoff.prepared",
    "handoff.succeeded",
    "old.called",
    "old.drained",
    "standby.called",
    "standby.owns",
    "standby.prepares",
    "standby.up",
    "worker.answered",
    "worker.answering",
    "worker.assigned",
    "worker.go",
    "worker.orphan",
    "worker.prepared",
    "worker.read",
    "worker.recorded",
    "worker.serving",
    "worker.spliced",
];

/// Whose step it is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Process {
    Broker,
    Agent(i32),
    Worker(WorkerId),
}

impl World {
    /// The next process that gets to some step dies there.
    pub(super) fn arm_a_step(&mut self) {
        self.armed = Some(STEPS[self.rng.random_range(0..STEPS.len())]);
    }

    /// True: the process was to die at this step, and has.
    pub(super) fn dies_at(&mut self, step: &'static str, process: Process) -> bool {
        debug_assert!(STEPS.contains(&step), "{step} is no step of the product");
        if self.armed != Some(step) || !self.has_faults() {
            return false;
        }
        self.armed = None;
        *self.summary.steps.entry(step).or_default() += 1;
        if self.is_traced {
            eprintln!("{:>12.3?} {process:?} dies at {step}", self.queue.elapsed());
        }
        match process {
            Process::Broker => self.broker_dies(),
            Process::Agent(pid) => self.agent_dies(pid),
            Process::Worker(worker) => self.dies(worker, ABORTED),
        }
        true
    }
}
