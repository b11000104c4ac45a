//! After a worker's death: find out which of its requests the kernel still waits for.

use super::Inflight;
use super::table::{
    ANSWERING, FREE, OPERATING, ORPHAN, SUSPECT_DEATHS, Slot, WAITING, state_of, unique_of, word,
};
use crate::device::{Device, Kernel, Probe};
use fuse_abi::{InHeader, InterruptIn, opcode};
use std::io;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering::{Acquire, Release};

/// A request in whose execution this many workers died is answered EIO.
pub(crate) const LIMIT_DEATHS: u32 = 5;
/// All volumes wait while there is no agent, and orchestrators let one that dies again wait ever longer: its death
/// counts as this many of workers' …
pub(super) const AGENT_DEATH: u32 = 2;
/// … and as this many where the thread that executed the request was the one that aborted.
pub(super) const AGENT_ABORT: u32 = 3;

/// What requests have in common that do the same to the process that executes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    opcode: u32,
    nodeid: u64,
}

impl Subject {
    fn of(opcode: u32, nodeid: u64) -> Option<Self> {
        match opcode {
            // The directory, and not which of its names.
            opcode::LOOKUP => None,
            // Both bring in the content.
            opcode::OPEN => Some(Self { opcode: opcode::READ, nodeid }),
            _ => Some(Self { opcode, nodeid }),
        }
    }
}

/// A request that killed worker after worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Poisoned {
    pub unique: u64,
    pub opcode: u32,
    pub nodeid: u64,
    /// Of workers; an agent's counts for two, or for three where its own thread aborted.
    pub deaths: u32,
}

impl Poisoned {
    pub fn subject(&self) -> Option<Subject> {
        Subject::of(self.opcode, self.nodeid)
    }

    /// For people, as the kernel's `fuse.h` calls it.
    pub fn operation(&self) -> &'static str {
        match self.opcode {
            opcode::LOOKUP => "LOOKUP",
            opcode::GETATTR => "GETATTR",
            opcode::READLINK => "READLINK",
            opcode::OPEN => "OPEN",
            opcode::READ => "READ",
            opcode::STATFS => "STATFS",
            opcode::RELEASE => "RELEASE",
            opcode::GETXATTR => "GETXATTR",
            opcode::LISTXATTR => "LISTXATTR",
            opcode::OPENDIR => "OPENDIR",
            opcode::READDIR => "READDIR",
            opcode::READDIRPLUS => "READDIRPLUS",
            _ => "other",
        }
    }
}

/// Who is to blame for a worker's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// Whatever it was executing.
    Executing,
    /// Another process ended it.
    Nobody,
    /// It ended with its agent: whatever that one was executing.
    Agent,
}

/// What a dead worker left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Collected {
    /// Requests that a successor has to execute.
    pub orphans: usize,
    /// Answered EIO here; report them.
    pub poisoned: Vec<Poisoned>,
    /// Answered by the dead worker, which did not live to note it.
    pub answered: usize,
    /// Read, but not recorded yet; counted among the orphans.
    pub unrecorded: usize,
    /// Requests for which there was no slot: their callers got EIO. Zero unless the table was full.
    pub lost: usize,
    /// The kernel has ended the connection: there is nothing to take over.
    pub ended: bool,
}

impl Inflight {
    /// To be run by the thread that reaped the worker, while no worker serves the connection, and before the next one
    /// does. Running it twice does no harm; being killed inside it neither.
    pub fn collect(&self, device: impl AsFd, blame: Blame) -> io::Result<Collected> {
        self.collect_with(&mut Device(device.as_fd()), blame)
    }

    pub(super) fn collect_with(&self, kernel: &mut dyn Kernel, blame: Blame) -> io::Result<Collected> {
        let mut collected = Collected::default();
        self.orphans_word().store(0, Release);
        self.suspect_word().store(0, Release);
        let mut weight = 1;
        if blame == Blame::Agent {
            weight = if self.accuse_what_the_agent_executed() { AGENT_ABORT } else { AGENT_DEATH };
        }
        self.acquit(blame);
        let mut begun = 0;
        for slot in 0..self.high_slot() {
            let current = self.word(slot).load(Acquire);
            let unique = unique_of(current);
            match state_of(current) {
                FREE => continue,
                WAITING | ORPHAN | ANSWERING | OPERATING => {}
                // FILLING: the request is still in its staging buffer. Anything else was not written by us.
                _ => {
                    self.word(slot).store(FREE, Release);
                    continue;
                }
            }
            match kernel.probe(unique)? {
                Probe::Waiting => {}
                Probe::Gone => {
                    collected.answered += 1;
                    self.word(slot).store(FREE, Release);
                    continue;
                }
                Probe::Ended => {
                    collected.ended = true;
                    return Ok(collected);
                }
            }
            let deaths = self.blame(slot, unique, weight);
            if deaths >= LIMIT_DEATHS {
                let opcode = self.note_opcode(slot);
                kernel.fail(unique);
                collected.poisoned.push(Poisoned { unique, opcode, nodeid: self.note_nodeid(slot), deaths });
                self.word(slot).store(FREE, Release);
                continue;
            }
            self.word(slot).store(word(unique, ORPHAN), Release);
            collected.orphans += 1;
            begun += u32::from(self.has_begun(slot));
        }
        for stage in 0..self.stages() {
            if let Some(committed) = self.stage_left(stage) {
                self.collect_stage(kernel, stage, committed, &mut collected)?;
                self.release_stage(stage);
            }
        }
        self.begun_orphans_word().store(begun, Release);
        self.orphans_word().store(collected.orphans as u32, Release);
        Ok(collected)
    }

    /// What the agent's workers executed is not to blame for its end: in their place stands what it executed itself.
    /// True: these are the ones that it died of. One that dies in here accuses no request.
    fn accuse_what_the_agent_executed(&self) -> bool {
        (0..self.high_slot()).for_each(|slot| self.exonerate(slot));
        let (executed, guilty) = self.take_seats();
        executed.iter().for_each(|unique| self.resume(*unique));
        if guilty {
            // The kernel asks for a file in several requests at once: each would have its turn to kill agents.
            let subjects: Vec<Subject> = executed.iter().filter_map(|unique| self.subject(*unique)).collect();
            for slot in 0..self.high_slot() {
                let current = self.word(slot).load(Acquire);
                let alike = self.subject_at(slot).is_some_and(|subject| subjects.contains(&subject));
                if state_of(current) >= WAITING && alike {
                    self.resume(unique_of(current));
                }
            }
        }
        guilty
    }

    /// What a request is about; None: it has been answered, or is about a name, which is not kept here.
    pub fn subject(&self, unique: u64) -> Option<Subject> {
        self.find(unique).and_then(|(Slot(slot), _)| self.subject_at(slot))
    }

    fn subject_at(&self, slot: usize) -> Option<Subject> {
        Subject::of(self.note_opcode(slot), self.note_nodeid(slot))
    }

    /// Clears those that are not to blame, before a request is blamed: a collector that is killed between the two, and
    /// run again, must not find the bystanders alone.
    fn acquit(&self, blame: Blame) {
        let executing = (0..self.high_slot()).filter(|&slot| {
            let current = self.word(slot).load(Acquire);
            state_of(current) >= WAITING && self.is_active(slot, unique_of(current))
        });
        let (suspects, others): (Vec<_>, Vec<_>) =
            executing.partition(|&slot| self.deaths_at(slot) >= SUSPECT_DEATHS);
        if blame == Blame::Nobody || !suspects.is_empty() {
            others.into_iter().for_each(|slot| self.exonerate(slot));
        }
        if blame == Blame::Nobody {
            suspects.into_iter().for_each(|slot| self.exonerate(slot));
        }
    }

    /// A buffer whose owner died: it may hold a request that was read but not recorded.
    fn collect_stage(
        &self,
        kernel: &mut dyn Kernel,
        stage: usize,
        committed: u64,
        collected: &mut Collected,
    ) -> io::Result<()> {
        let header = self.stage_header(stage);
        let sane = (InHeader::BYTES..=self.stage_bytes_max()).contains(&(header.len as usize));
        if header.unique == 0 || header.unique == committed || !sane {
            return Ok(());
        }
        match header.opcode {
            opcode::INTERRUPT => {
                // Its body is the id of the request that was interrupted.
                let mut request = [0; InHeader::BYTES + InterruptIn::BYTES];
                self.stage_bytes(stage, &mut request);
                if let Some(target) = request.last_chunk() {
                    self.mark_interrupted(InterruptIn::from_bytes(target).unique);
                }
            }
            opcode::FORGET | opcode::BATCH_FORGET | opcode::NOTIFY_REPLY | opcode::DESTROY | opcode::INIT => {
            }
            _ if self.is_in_flight(header.unique) => {}
            _ if kernel.probe(header.unique)? != Probe::Waiting => {}
            _ if self.put_as(stage, &header, ORPHAN).is_some() => {
                collected.orphans += 1;
                collected.unrecorded += 1;
            }
            _ => {
                // Better an error than a caller that waits for ever.
                kernel.fail(header.unique);
                collected.lost += 1;
            }
        }
        self.commit_stage(stage, header.unique);
        Ok(())
    }
}
