//! The only place that looks into a mount of ours: a child process without any FUSE descriptor, run under a deadline.
//!
//! ```text
//!  broker ──spawn──► child: must answer (stat of the root) ──"serving"──► priming, best effort ──"primed"──► exit
//!                     no "serving" in time: killed, the mount is not served      cut short: no harm done
//! ```
//!
//! Priming fills the kernel's caches and gets the answers ENOSYS for OPEN, OPENDIR and FLUSH on record, so that warm
//! files can be opened while no worker is alive. It may wait for the store, so it has a limit of its own.

use crate::helper::{Heard, Helper};
use crate::{KernelError, connection};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

const WHAT: &str = "MILLPOND_PROBE";
const TARGET: &str = "MILLPOND_PROBE_TARGET";
/// How long priming may take beyond the answer that counts.
const PRIME_LIMIT: Duration = Duration::from_millis(1500);
/// A name that no source has: its negative entry is worth keeping.
const ABSENT: &str = ".millpond-absent";
/// How far down a file to open is looked for.
const DEPTH_MAX: usize = 4;
const ENTRIES_MAX: usize = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Is this mount served at all? Asks for statfs, which no cache answers.
    Alive,
    /// Serve and prime, profile *large*.
    Large,
    /// Serve and prime, profile *small*.
    Small,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Answered, and primed as far as asked.
    Primed,
    /// Answered; priming was cut short.
    Serving,
    /// The connection is dead (ENOTCONN, ECONNABORTED).
    Dead,
}

impl Helper {
    pub(crate) fn probe(&self, target: &Path, what: What, limit: Duration) -> Result<Outcome, KernelError> {
        let failed = |reason: String| KernelError::ProbeFailed { target: target.to_owned(), reason };
        let role = [(WHAT, what.word().into()), (TARGET, target.into())];
        let mut child = self.start(role, Stdio::null()).map_err(|e| failed(e.to_string()))?;
        let started = Instant::now();
        loop {
            let said = child.said();
            let serving = said.lines().any(|l| l == "serving");
            if said.lines().any(|l| l == "primed") {
                return Ok(Outcome::Primed);
            }
            if let Some(reason) = said.lines().find_map(|l| l.strip_prefix("failed ")).map(str::to_owned)
                && said.ends_with('\n')
            {
                return match reason.as_str() {
                    "dead" => Ok(Outcome::Dead),
                    _ => Err(failed(reason)),
                };
            }
            let deadline = started + if serving { limit.min(PRIME_LIMIT).max(limit / 2) } else { limit };
            match child.listen(deadline) {
                Ok(Heard::Something) => {}
                Ok(Heard::End | Heard::Nothing) if serving => return Ok(Outcome::Serving),
                Ok(Heard::End) => return Err(failed("the probe process ended without an answer".into())),
                Ok(Heard::Nothing) => {
                    return Err(KernelError::ProbeTimedOut { target: target.to_owned(), limit });
                }
                Err(e) => return Err(failed(e.to_string())),
            }
        }
    }
}

impl What {
    fn word(self) -> &'static str {
        match self {
            Self::Alive => "alive",
            Self::Large => "large",
            Self::Small => "small",
        }
    }
}

/// In a probe child this does the work and never returns.
pub(crate) fn run_if_asked() {
    let (Some(what), Some(target)) = (std::env::var_os(WHAT), std::env::var_os(TARGET)) else { return };
    let target = PathBuf::from(target);
    let what = match what.to_str() {
        Some("alive") => What::Alive,
        Some("small") => What::Small,
        _ => What::Large,
    };
    if let Err(error) = look(&target, what) {
        say(&match error.raw_os_error().is_some_and(connection::is_death) {
            true => "failed dead".to_owned(),
            false => format!("failed {error}"),
        });
    }
    std::process::exit(0);
}

fn say(line: &str) {
    let mut out = io::stdout().lock();
    // The broker may have gone; it alone listens.
    let _ = writeln!(out, "\n{line}").and_then(|()| out.flush());
}

fn look(target: &Path, what: What) -> io::Result<()> {
    if what == What::Alive {
        rustix::fs::statfs(target)?;
        say("serving");
        say("primed");
        return Ok(());
    }
    let root = File::open(target)?;
    root.metadata()?;
    say("serving");
    // From here on only caches are at stake: an error ends the priming, not the publish.
    let _ = fs::symlink_metadata(target.join(ABSENT));
    let mut directory = target.to_owned();
    for _ in 0..DEPTH_MAX {
        let Ok(entries) = fs::read_dir(&directory) else { break };
        let (mut file, mut below) = (None, None);
        for entry in entries.take(ENTRIES_MAX).flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_file() => file = Some(entry.path()),
                Ok(kind) if kind.is_dir() => below = Some(entry.path()),
                _ => {}
            }
            if file.is_some() {
                break;
            }
        }
        match (file, below) {
            // Opening tells OPEN, closing tells FLUSH. Profile large learns nothing from it.
            (Some(path), _) if what == What::Small => {
                let _ = File::open(path);
                break;
            }
            (None, Some(path)) if what == What::Small => directory = path,
            _ => break,
        }
    }
    say("primed");
    Ok(())
}
