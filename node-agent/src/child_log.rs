//! What workers and helpers say on their standard error, as lines of the agent's log.
//!
//! Each has a pipe of its own that does not block: whatever becomes of the agent's log, a child's words neither wait nor
//! fail, and what an attacker who has taken one over makes it say is marked as its own, and limited.

use std::io;
use std::os::fd::OwnedFd;
use std::process::Stdio;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::runtime::Handle;

/// Of one child; one that fares well says none, a worker that panics some hundred (RUST_BACKTRACE).
const LINES_MAX: usize = 1000;
const LINE_BYTES_MAX: usize = 2048;

/// Where the agent reads, and the child's standard error.
pub(crate) fn pipe() -> io::Result<(OwnedFd, Stdio)> {
    use rustix::pipe::{PipeFlags, pipe_with};
    let (said, says) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    Ok((said, says.into()))
}

/// Until the child has ended and everything is read. `tell` logs a line, and whose it is.
pub(crate) fn follow(
    said: OwnedFd,
    runtime: &Handle,
    tell: impl Fn(&str) + Send + 'static,
) -> io::Result<()> {
    let _inside = runtime.enter();
    let mut said = Receiver::from_owned_fd(said)?;
    runtime.spawn(async move {
        let mut lines = Lines::default();
        let mut buffer = [0; 1024];
        // An error is the end, as for any pipe.
        while let Ok(length @ 1..) = said.read(&mut buffer).await {
            lines.take(&buffer[..length], &tell);
        }
        lines.end(&tell);
    });
    Ok(())
}

/// Cuts a stream into lines of limited number and length.
#[derive(Default)]
struct Lines {
    line: Vec<u8>,
    logged: usize,
    /// Of this line nothing more is kept.
    cut: bool,
}

impl Lines {
    fn take(&mut self, bytes: &[u8], mut tell: impl FnMut(&str)) {
        for &byte in bytes {
            match byte {
                b'\n' => self.end(&mut tell),
                _ if self.line.len() < LINE_BYTES_MAX => self.line.push(byte),
                _ => self.cut = true,
            }
        }
    }

    fn end(&mut self, mut tell: impl FnMut(&str)) {
        if !self.line.is_empty() && self.logged <= LINES_MAX {
            self.logged += 1;
            match self.logged > LINES_MAX {
                true => tell("it says more than is logged of one process"),
                false => tell(&readable(&self.line, self.cut)),
            }
        }
        self.line.clear();
        self.cut = false;
    }
}

/// Why a child fails, in its own words: they go into the log, to the broker and into an Event, whatever they are.
pub(crate) fn words(why: &str) -> String {
    let whole = why.len() <= LINE_BYTES_MAX;
    let end = (0..=why.len().min(LINE_BYTES_MAX)).rev().find(|end| why.is_char_boundary(*end));
    readable(&why.as_bytes()[..end.unwrap_or(0)], !whole)
}

/// Nothing in it controls a terminal or looks like the end of the line.
fn readable(line: &[u8], cut: bool) -> String {
    let text = String::from_utf8_lossy(line);
    let mut text: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    if cut {
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logged(chunks: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut all) = (Lines::default(), Vec::new());
        for chunk in chunks {
            lines.take(chunk, |line| all.push(line.to_owned()));
        }
        lines.end(|line| all.push(line.to_owned()));
        all
    }

    #[test]
    fn lines_are_put_together_and_what_controls_a_terminal_is_taken_out() {
        let said: [&[u8]; 3] = [b"first\nsec", b"ond\n\n", b"\x1b[31mred\rlast \xff"];
        assert_eq!(logged(&said), ["first", "second", " [31mred last \u{fffd}"]);
    }

    #[test]
    fn a_worker_that_fails_at_length_says_little_and_controls_nothing() {
        assert_eq!(words("no \u{1b}[2Jdevice"), "no  [2Jdevice");
        let long = words(&"é\u{1}".repeat(30_000));
        assert!(long.len() < LINE_BYTES_MAX + 8 && long.ends_with('…') && !long.contains('\u{1}'));
    }

    #[test]
    fn a_worker_that_says_too_much_is_cut_short_and_told_so_once() {
        let long = vec![b'x'; 10 << 20];
        let one = logged(&[&long]);
        assert_eq!(one.len(), 1);
        assert!(one[0].len() < LINE_BYTES_MAX + 8 && one[0].ends_with('…'), "{}", one[0].len());
        let many = logged(&[&b"word\n".repeat(100_000)]);
        assert_eq!(many.len(), LINES_MAX + 1);
        assert_eq!(many[LINES_MAX], "it says more than is logged of one process");
    }
}
