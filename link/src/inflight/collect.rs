//! After a worker's death: find out which of its requests the kernel still waits for.

use super::table::{
    ANSWERING, FREE, OPERATING, ORPHAN, SUSPECT_DEATHS, Slot, WAITING, state_of, unique_of, word,
};
use super::{Inflight, RequestHeader, STAGE_BYTES, STAGES};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::{Acquire, Release};

/// A request in whose execution this many workers died is answered EIO.
pub const LIMIT_DEATHS: u32 = 5;
/// All volumes wait while there is no agent, and orchestrators let one that dies again wait ever longer: its death counts
/// as this many of workers' …
pub(super) const AGENT_DEATH: u32 = 2;
/// … and as this many where the thread that executed the request was the one that aborted.
pub(super) const AGENT_ABORT: u32 = 3;

/// FUSE_INT_REQ_BIT: marks the answer to an INTERRUPT.
const INTERRUPT_BIT: u64 = 1;
const OPCODE_LOOKUP: u32 = 1;
const OPCODE_FORGET: u32 = 2;
const OPCODE_OPEN: u32 = 14;
const OPCODE_READ: u32 = 15;
const OPCODE_INIT: u32 = 26;
const OPCODE_INTERRUPT: u32 = 36;
const OPCODE_DESTROY: u32 = 38;
const OPCODE_NOTIFY_REPLY: u32 = 41;
const OPCODE_BATCH_FORGET: u32 = 42;

/// What the kernel says about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    Waiting,
    /// Answered, or never asked.
    Gone,
    /// The connection has ended.
    Ended,
}

/// Asks the kernel whether it waits for an answer to `unique`: the reply to an INTERRUPT that was never sent is
/// accepted, and ignored, exactly as long as it does (fuse_dev_do_write). No side effect, about 0.3 µs.
pub fn probe(device: impl AsFd, unique: u64) -> io::Result<Probe> {
    match answer(device, unique | INTERRUPT_BIT, 0) {
        Ok(()) => Ok(Probe::Waiting),
        Err(e) => match rustix::io::Errno::from_io_error(&e) {
            Some(rustix::io::Errno::NOENT) => Ok(Probe::Gone),
            Some(rustix::io::Errno::NODEV | rustix::io::Errno::PERM | rustix::io::Errno::CONNABORTED) => {
                Ok(Probe::Ended)
            }
            _ => Err(e),
        },
    }
}

/// Answers a request with an error (positive errno). ENOENT: the kernel does not wait for it.
pub fn answer_errno(device: impl AsFd, unique: u64, errno: i32) -> io::Result<()> {
    answer(device, unique, -errno)
}

fn answer(device: impl AsFd, unique: u64, error: i32) -> io::Result<()> {
    let mut header = [0; 16]; // fuse_out_header
    header[0..4].copy_from_slice(&16u32.to_ne_bytes());
    header[4..8].copy_from_slice(&error.to_ne_bytes());
    header[8..16].copy_from_slice(&unique.to_ne_bytes());
    rustix::io::write(device, &header)?;
    Ok(())
}

/// What requests have in common that do the same to whoever executes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subject {
    opcode: u32,
    nodeid: u64,
}

impl Subject {
    fn of(opcode: u32, nodeid: u64) -> Option<Self> {
        match opcode {
            // The directory, and not which of its names.
            OPCODE_LOOKUP => None,
            // Both bring in the content.
            OPCODE_OPEN => Some(Self { opcode: OPCODE_READ, nodeid }),
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
            1 => "LOOKUP",
            3 => "GETATTR",
            5 => "READLINK",
            14 => "OPEN",
            15 => "READ",
            17 => "STATFS",
            18 => "RELEASE",
            22 => "GETXATTR",
            23 => "LISTXATTR",
            27 => "OPENDIR",
            28 => "READDIR",
            44 => "READDIRPLUS",
            _ => "other",
        }
    }
}

/// Who is to blame for a worker's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// Whatever it was executing.
    Executing,
    /// Somebody else ended it.
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

/// The self-test of [`probe`]: the kernel must tell a request that waits from one that does not. `init_unique` is the
/// INIT request's id, which waits until the first mount's reply has been written.
pub fn probe_works(device: impl AsFd, init_unique: u64, init_answered: bool) -> io::Result<bool> {
    let expected = if init_answered { Probe::Gone } else { Probe::Waiting };
    // Ids are given out upwards in steps of two: this one never was.
    Ok(probe(&device, init_unique)? == expected && probe(&device, 1 << 60)? == Probe::Gone)
}

/// The kernel's side of a connection; a model in tests.
pub(super) trait Kernel {
    fn probe(&mut self, unique: u64) -> io::Result<Probe>;
    fn fail(&mut self, unique: u64);
}

struct Device<'a>(BorrowedFd<'a>);
impl Kernel for Device<'_> {
    fn probe(&mut self, unique: u64) -> io::Result<Probe> {
        probe(self.0, unique)
    }
    fn fail(&mut self, unique: u64) {
        // Refused: the caller is gone, which is as good.
        let _ = answer_errno(self.0, unique, rustix::io::Errno::IO.raw_os_error());
    }
}

impl Inflight {
    /// To be run by whoever reaped the worker, while no worker serves the connection, and before the next one does.
    /// Running it twice does no harm; being killed inside it neither.
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
        for stage in 0..STAGES {
            if let Some(committed) = self.stage_left(stage) {
                self.collect_stage(kernel, stage, committed, &mut collected)?;
                self.release_stage(stage);
            }
        }
        self.begun_orphans_word().store(begun, Release);
        self.orphans_word().store(collected.orphans as u32, Release);
        Ok(collected)
    }

    /// What the agent's workers executed is not to blame for its end: in their place stands what it executed itself. True:
    /// these are the ones that it died of. One that dies in here accuses nobody.
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

    /// Clears those that are not to blame, before anybody is blamed: a collector that is killed between the two, and run
    /// again, must not find the bystanders alone.
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
        let sane = (RequestHeader::BYTES..=STAGE_BYTES).contains(&(header.len as usize));
        if header.unique == 0 || header.unique == committed || !sane {
            return Ok(());
        }
        match header.opcode {
            OPCODE_INTERRUPT => {
                // Its body is the id of the request that was interrupted.
                let mut request = [0; RequestHeader::BYTES + 8];
                self.stage_bytes(stage, &mut request);
                if let Some(target) = request.last_chunk() {
                    self.mark_interrupted(u64::from_ne_bytes(*target));
                }
            }
            OPCODE_FORGET | OPCODE_BATCH_FORGET | OPCODE_NOTIFY_REPLY | OPCODE_DESTROY | OPCODE_INIT => {}
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
