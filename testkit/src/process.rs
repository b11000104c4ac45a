//! Child processes of tests: started, awaited until ready, killed on drop by their own pid.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// A child that does not outlive the test: SIGTERM and then SIGKILL on drop, and SIGKILL by the kernel should the
/// test itself die first.
#[derive(Debug)]
pub struct Process {
    child: Child,
    name: String,
    /// How long `drop` waits after SIGTERM.
    pub grace: Duration,
}

impl Process {
    /// Starts `command`. Standard input is empty; output goes where the test's goes.
    ///
    /// The thread that calls this must live as long as the child should: the kernel's parent-death signal is tied to
    /// the thread (prctl(2), PR_SET_PDEATHSIG). Runtime threads of a test live until its end.
    pub fn spawn(command: &mut Command) -> Result<Self> {
        use std::os::unix::process::CommandExt;
        let name =
            Path::new(command.get_program()).file_name().unwrap_or_default().to_string_lossy().into_owned();
        command.stdin(Stdio::null());
        // SAFETY: runs between fork and exec; prctl is async-signal-safe and touches no memory of ours. Needed
        // because a test that is killed runs no destructors.
        unsafe {
            command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            });
        }
        let child = command.spawn().with_context(|| format!("start {:?}", command.get_program()))?;
        Ok(Self { child, name, grace: Duration::from_secs(5) })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    pub fn signal(&self, signal: i32) -> Result<()> {
        let pid = i32::try_from(self.child.id()).context("pid")?;
        // SAFETY: plain system call on a pid that is ours: an unreaped child's pid is not reused.
        match unsafe { libc::kill(pid, signal) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error())
                .with_context(|| format!("signal {signal} to {}", self.name)),
        }
    }

    /// `kill -9`, and reaps.
    pub fn kill(&mut self) -> Result<ExitStatus> {
        self.child.kill().with_context(|| format!("kill {}", self.name))?;
        Ok(self.child.wait()?)
    }

    /// SIGTERM, and waits at most `limit` for the end.
    pub fn terminate(&mut self, limit: Duration) -> Result<ExitStatus> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(status);
        }
        self.signal(libc::SIGTERM)?;
        self.wait_for_exit(limit)
    }

    pub fn wait_for_exit(&mut self, limit: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                bail!("{} (pid {}) did not end within {limit:?}", self.name, self.child.id());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until `condition` gives a value; fails at once when the child ends first.
    pub fn wait_until<T>(&mut self, limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Result<T> {
        let deadline = Instant::now() + limit;
        loop {
            if let Some(value) = condition() {
                return Ok(value);
            }
            if let Some(status) = self.child.try_wait()? {
                bail!("{} ended before it was ready: {status}", self.name);
            }
            if Instant::now() >= deadline {
                bail!("{} was not ready within {limit:?}", self.name);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits for a ready file (as `s3-server --ready-file` writes) and returns its trimmed text.
    pub fn wait_for_ready_file(&mut self, path: &Path, limit: Duration) -> Result<String> {
        self.wait_until(limit, || {
            let text = std::fs::read_to_string(path).ok()?;
            text.ends_with('\n').then(|| text.trim().to_owned())
        })
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let grace = self.grace;
            if self.terminate(grace).is_err() {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
        }
    }
}

/// Waits until `condition` gives a value.
pub fn wait_until<T>(what: &str, limit: Duration, mut condition: impl FnMut() -> Option<T>) -> Result<T> {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(value) = condition() {
            return Ok(value);
        }
        if Instant::now() >= deadline {
            bail!("{what}: not within {limit:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Where Cargo put a workspace binary: beside the test executable that asks.
pub fn workspace_binary(name: &str) -> Result<PathBuf> {
    let test = std::env::current_exe()?;
    let found = test.ancestors().skip(1).take(3).map(|dir| dir.join(name)).find(|path| path.is_file());
    found.with_context(|| {
        format!("no binary {name} near {}: build it first (cargo build --bin {name})", test.display())
    })
}

/// Publishes `text` by rename, so that a waiting reader sees all of it or nothing.
pub fn write_ready_file(path: &Path, text: &str) -> Result<()> {
    let staged = path.with_extension("tmp");
    std::fs::write(&staged, format!("{text}\n"))?;
    std::fs::rename(&staged, path)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_child_is_gone() {
        let child = Process::spawn(Command::new("sleep").arg("600")).unwrap();
        let pid = child.pid();
        drop(child);
        assert!(!Path::new(&format!("/proc/{pid}")).exists());
    }

    #[test]
    fn a_child_that_ends_early_is_reported_at_once() {
        let mut child = Process::spawn(&mut Command::new("false")).unwrap();
        let error = child.wait_until(Duration::from_secs(60), || None::<()>).unwrap_err();
        assert!(error.to_string().contains("ended before it was ready"), "{error}");
    }
}
