//! What a source and its HDFS helper say to each other over a socket, and the checks of what users configure for it.
//!
//! A helper is a process around the HDFS library and Kerberos' C code (`hdfs-helper`). It has one user's rights at one
//! file system and is disposable: whatever it does, its caller (`store`) takes it for an error of the store's. Here is
//! what both must agree on, and no I/O: neither end imports the other, and the agent never links the library.
//!
//! ```text
//! caller                              helper
//!        ◄──────── Hello ────────────          which protocol it speaks, before it is told any secret
//!        ───────── Configure ───────►          what to ask, and as whom
//!        ◄──── Ready or Unusable ────          its rights are gone by now
//!        ───────── Ask (id) ────────►          many at once
//!        ◄──────── Data (id)* ───────          no more than was granted
//!        ───────── More (id)* ──────►          the reader has taken so much
//!        ◄──────── Answer (id) ──────
//!        ───────── Cancel (id) ─────►          nobody waits for it any more
//! ```
//!
//! Both ends are of one build and make sure of it, as agent and worker do.

mod frame;
mod krb5_conf;
mod message;
mod site;
mod token_file;

pub use frame::{Frame, FrameError, Frames, encode, encode_before};
pub use krb5_conf::{BadKrb5Conf, cleaned as cleaned_krb5_conf};
pub use message::{
    Answer, Configure, Entry, Failure, FailureKind, FromHelper, Identity, Network, Page, PageStart, Question,
    Secret, Status, ToHelper, Version,
};
pub use site::{BadSite, Settings, is_setting, settings, site_of};
pub use token_file::{BadTokenFile, services as services_of_tokens};

/// Raised with every change of what is said.
pub const PROTOCOL: u32 = 3;
/// The descriptor that a helper finds its socket at.
pub const SOCKET_FD: i32 = 0;
/// Most entries of one page; names that cannot be said count, too.
pub const PAGE_ENTRIES: usize = 1000;
/// Most bytes of the names of one page, those of owners and groups included.
pub const PAGE_NAME_BYTES: usize = 128 << 10;
/// Most bytes of one piece of data.
pub const DATA_BYTES_MAX: usize = 128 << 10;
/// What a helper may send of one read before its reader has taken any of it.
pub const WINDOW_BYTES: u32 = 1 << 20;
/// Questions that a helper works on at once; its callers' request slots are fewer.
pub const QUESTIONS_MAX: usize = 1024;
/// Most characters of what a helper says is wrong.
const WORDS_MAX: usize = 400;

/// What a person may read of a text from elsewhere: its first line, of limited length, without control characters.
/// HDFS's servers send a Java stack trace with each error.
pub fn words(text: &str) -> String {
    let line = text.trim_start().lines().next().unwrap_or_default().trim();
    let shown: String = line.chars().map(|c| if c.is_control() { ' ' } else { c }).take(WORDS_MAX).collect();
    if line.chars().nth(WORDS_MAX).is_some() { format!("{shown}…") } else { shown }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_an_error_with_a_stack_trace_the_first_line_is_shown() {
        let java = "\n  File does not exist: /x\n\tat org.apache.hadoop.hdfs.Server.call(Server.java:1)\n";
        assert_eq!(words(java), "File does not exist: /x");
        assert_eq!(words("a\u{1b}[31mb\tc"), "a [31mb c");
        assert_eq!(words(&"ä".repeat(WORDS_MAX)).chars().count(), WORDS_MAX);
        assert!(words(&"ä".repeat(1 << 20)).ends_with('…'));
        assert_eq!(words(""), "");
    }
}
