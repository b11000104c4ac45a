//! Why a journal could not be opened, changed or made durable, and what to do next.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    #[error("another process writes this journal: wait until it has ended, or stop it, then open again")]
    InUse,
    /// Nothing on the disk was changed.
    #[error(
        "the journal is damaged at byte {at}, before what had been made durable: the disk lost or changed bytes. Keep \
         a copy of the file, check the disk, then restore the file or start with an empty one"
    )]
    Damaged { at: u64 },
    #[error(
        "the journal has format {found}, this program reads format {expected}: run the version that wrote it, or let \
         that version finish what it recorded"
    )]
    Format { found: u32, expected: u32 },
    /// The change was not made.
    #[error("no space left for the journal: free space, or raise the quota, then repeat the change")]
    Full(#[source] io::Error),
    /// What was changed since the last sync may be there after a power loss or not, and no later sync could tell.
    #[error("the journal could not be made durable: check the disk, then open the journal again")]
    NotDurable(#[source] io::Error),
    #[error(
        "an earlier failure left it open what of the journal is on the disk: open it again before it is changed"
    )]
    Poisoned,
    #[error(
        "a {what} of {bytes} bytes is more than a journal takes ({max} bytes): split it, or refuse the request"
    )]
    TooLarge { what: &'static str, bytes: usize, max: usize },
    #[error("the journal could not {doing}: check the disk, then try again")]
    Io { doing: &'static str, source: io::Error },
}

/// Turns the error of a system call into ours.
pub(crate) fn while_it(doing: &'static str) -> impl FnOnce(io::Error) -> JournalError {
    move |source| match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => JournalError::Full(source),
        _ => JournalError::Io { doing, source },
    }
}
