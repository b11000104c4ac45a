//! The only place that looks into a mount of ours: a child process without any FUSE descriptor, run under a deadline.
//!
//! ```text
//!  broker ──spawn──► child: must answer (stat of the root) ──"serving"──► priming, best effort ──"primed"──► exit
//!                     no "serving" in time: killed, the mount is not served      cut short: no harm done
//! ```
//!
//! Priming fills the kernel's caches and gets the answers ENOSYS for OPEN, OPENDIR and FLUSH on record, so that warm
//! files can be opened while no worker is alive. It may wait for the store, so it has a limit of its own.

use crate::KernelError;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
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
    /// Is anybody serving this mount at all? Asks for statfs, which no cache answers.
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

/// How to start the child: the caller's own binary, whose `main` calls [`run_if_asked`] first.
#[derive(Clone, Debug)]
pub struct Helper {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Helper {
    pub fn new(program: impl Into<PathBuf>, arguments: impl IntoIterator<Item = OsString>) -> Self {
        Self { program: program.into(), arguments: arguments.into_iter().collect() }
    }

    /// This very binary.
    pub fn own() -> Self {
        Self::new("/proc/self/exe", [])
    }

    pub(crate) fn run(&self, target: &Path, what: What, limit: Duration) -> Result<Outcome, KernelError> {
        let failed = |reason: String| KernelError::ProbeFailed { target: target.to_owned(), reason };
        let mut child = Command::new(&self.program)
            .args(&self.arguments)
            .env_clear()
            .env(WHAT, what.word())
            .env(TARGET, target)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| failed(format!("cannot start {}: {e}", self.program.display())))?;
        let Some(output) = child.stdout.take() else { return Err(failed("no pipe".into())) };

        let started = Instant::now();
        let mut text = Vec::new();
        let outcome = loop {
            let said = String::from_utf8_lossy(&text).into_owned();
            let serving = said.lines().any(|l| l == "serving");
            if said.lines().any(|l| l == "primed") {
                break Ok(Outcome::Primed);
            }
            if let Some(reason) = said.lines().find_map(|l| l.strip_prefix("failed ")).map(str::to_owned)
                && said.ends_with('\n')
            {
                break match reason.as_str() {
                    "dead" => Ok(Outcome::Dead),
                    _ => Err(failed(reason)),
                };
            }
            let deadline = started + if serving { limit.min(PRIME_LIMIT).max(limit / 2) } else { limit };
            let left = deadline.saturating_duration_since(Instant::now());
            match read_some(&output, &mut text, left) {
                Ok(Some(0)) if serving => break Ok(Outcome::Serving),
                Ok(Some(0)) => break Err(failed("the probe process ended without an answer".into())),
                Ok(Some(_)) => {}
                Ok(None) if serving => break Ok(Outcome::Serving),
                Ok(None) => break Err(KernelError::ProbeTimedOut { target: target.to_owned(), limit }),
                Err(e) => break Err(failed(e.to_string())),
            }
        };
        reap(child);
        outcome
    }
}

/// One read, or None when nothing came in time.
fn read_some(from: &impl AsFd, text: &mut Vec<u8>, limit: Duration) -> io::Result<Option<usize>> {
    let wait = Timespec { tv_sec: limit.as_secs() as i64, tv_nsec: i64::from(limit.subsec_nanos()) };
    match poll(&mut [PollFd::new(from, PollFlags::IN)], Some(&wait)) {
        Ok(0) => return Ok(None),
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(Some(usize::MAX)), // look at the clock again
        Err(e) => return Err(e.into()),
    }
    let mut buffer = [0; 512];
    let length = rustix::io::read(from, &mut buffer)?;
    text.extend_from_slice(&buffer[..length]);
    Ok(Some(length))
}

/// Kills and waits elsewhere: a child that is stuck in the mount goes when the connection does.
fn reap(mut child: Child) {
    let _ = child.kill(); // fails only if it has been reaped
    if matches!(child.try_wait(), Ok(Some(_))) {
        return;
    }
    let spawned = std::thread::Builder::new().name("probe-reaper".into()).spawn(move || child.wait());
    if let Err(error) = spawned {
        tracing::warn!(%error, "no thread to reap a probe process");
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

/// Call this first in `main`: in a probe child it does the work and never returns.
pub fn run_if_asked() {
    let (Some(what), Some(target)) = (std::env::var_os(WHAT), std::env::var_os(TARGET)) else { return };
    let target = PathBuf::from(OsString::from_vec(target.as_bytes().to_vec()));
    let what = match what.to_str() {
        Some("alive") => What::Alive,
        Some("small") => What::Small,
        _ => What::Large,
    };
    if let Err(error) = look(&target, what) {
        let dead = matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED));
        say(&match dead {
            true => "failed dead".to_owned(),
            false => format!("failed {error}"),
        });
    }
    std::process::exit(0);
}

fn say(line: &str) {
    let mut out = io::stdout().lock();
    // The broker may have gone; nobody else listens.
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
