//! What processes that work for an agent give up before they work: system calls, and limits that they lower.
//!
//! A process without rights lists what it needs ([`Calls`]); everything else fails with EPERM, so that a library finds its
//! fallback and a last word still gets out. What only some arguments make harmless is allowed for those alone.

use rustix::process::{Resource, Rlimit};
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use std::collections::BTreeMap;

/// The system calls of one process.
pub struct Calls(BTreeMap<i64, Vec<SeccompRule>>);

impl Calls {
    /// These whatever their arguments; beside them an abort of this very process, and threads but no process (clone).
    pub fn allowing(numbers: &[i64]) -> Result<Self, BackendError> {
        let mut calls = Self(numbers.iter().map(|number| (*number, Vec::new())).collect());
        let me = u64::from(std::process::id());
        calls.only(libc::SYS_tgkill, 0, &[me])?;
        let threads = (libc::CLONE_VM | libc::CLONE_THREAD | libc::CLONE_SIGHAND) as u64;
        let is_thread =
            SeccompCondition::new(0, SeccompCmpArgLen::Qword, SeccompCmpOp::MaskedEq(threads), threads);
        calls.0.insert(libc::SYS_clone, vec![SeccompRule::new(vec![is_thread?])?]);
        // Refused by a filter of its own: what it shall do lies in memory, where no filter sees it.
        calls.0.insert(libc::SYS_clone3, Vec::new());
        Ok(calls)
    }

    /// This one whatever its arguments.
    pub fn allow(&mut self, number: i64) {
        self.0.insert(number, Vec::new());
    }

    /// This one if an argument (32 bits, counted from 0) is one of these.
    pub fn only(&mut self, number: i64, argument: u8, values: &[u64]) -> Result<(), BackendError> {
        let is = |value: &u64| {
            SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, *value)
                .and_then(|condition| SeccompRule::new(vec![condition]))
        };
        let rules = values.iter().map(is).collect::<Result<_, _>>()?;
        self.0.insert(number, rules);
        Ok(())
    }

    /// This one if an argument (64 bits) is this, a pointer for example.
    pub fn only_wide(&mut self, number: i64, argument: u8, value: u64) -> Result<(), BackendError> {
        let is = SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, value)?;
        self.0.insert(number, vec![SeccompRule::new(vec![is])?]);
        Ok(())
    }

    /// mmap and mprotect make no memory of code; with `of_files` mmap does, of files.
    pub fn forbid_code(&mut self, of_files: bool) -> Result<(), BackendError> {
        let has_not = |argument, bits: u64| {
            SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::MaskedEq(bits), 0)
                .and_then(|condition| SeccompRule::new(vec![condition]))
        };
        let exec = libc::PROT_EXEC as u64;
        self.0.insert(libc::SYS_mprotect, vec![has_not(2, exec)?]);
        let mut mapped = vec![has_not(2, exec)?];
        if of_files {
            mapped.push(has_not(3, libc::MAP_ANONYMOUS as u64)?);
        }
        self.0.insert(libc::SYS_mmap, mapped);
        Ok(())
    }

    /// For this thread and all that it starts, or for all of the process. Returns what this kernel cannot do.
    pub fn enforce(self, all_threads: bool) -> Result<Vec<String>, BackendError> {
        let mut missing = Vec::new();
        // Without clone3 glibc starts threads with clone. In this order: where both refuse, the newer one's errno counts.
        let without_clone3 = BTreeMap::from([(libc::SYS_clone3, Vec::new())]);
        let programs = [
            program(without_clone3, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32))?,
            program(self.0, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow)?,
        ];
        for program in programs {
            let applied = match all_threads {
                true => seccompiler::apply_filter_all_threads(&program),
                false => seccompiler::apply_filter(&program),
            };
            if let Err(error) = applied {
                missing.push(format!("seccomp is not possible here: {error}"));
            }
        }
        Ok(missing)
    }
}

/// These fail from now on, in all threads.
///
/// # Errors
/// A sentence.
pub fn take_away(numbers: &[i64]) -> Result<(), String> {
    let rules = numbers.iter().map(|number| (*number, Vec::new())).collect();
    let program = program(rules, SeccompAction::Allow, SeccompAction::Errno(libc::EPERM as u32));
    let program = program.map_err(|e| format!("seccomp: {e}"))?;
    seccompiler::apply_filter_all_threads(&program).map_err(|e| format!("seccomp is not possible here: {e}"))
}

fn program(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    otherwise: SeccompAction,
    matched: SeccompAction,
) -> Result<BpfProgram, BackendError> {
    SeccompFilter::new(rules, otherwise, matched, std::env::consts::ARCH.try_into()?)?.try_into()
}

/// Lowers soft and hard limit of a resource; never raises one.
pub fn lower(resource: Resource, limit: u64) -> rustix::io::Result<()> {
    let now = rustix::process::getrlimit(resource);
    let limit = Some(now.maximum.map_or(limit, |most| most.min(limit)));
    rustix::process::setrlimit(resource, Rlimit { current: limit, maximum: limit })
}
