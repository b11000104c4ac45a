//! The words of the metadata store: what is asked of it and what it answers.

use volume::Permissions;

/// Inode number of the directory that a scope's source URL names.
pub const ROOT: u64 = 1;
/// Smallest inode number that a name can get; those below are reserved.
pub const FIRST_INO: u64 = 16;
/// Inode numbers stay below this, so that a node id has 24 bits left (see [`Attributes::epoch`]).
pub const INO_LIMIT: u64 = 1 << 40;
/// Longest name of one path segment, bytes.
pub(crate) const NAME_MAX: usize = 255;
/// The largest value of [`Attributes::epoch`]; it is even, and an inode that has used it up stays there.
pub const EPOCH_MAX: u32 = (1 << 24) - 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    File,
    Directory,
    Symlink,
}

/// What is known of one inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attributes {
    pub ino: u64,
    pub kind: Kind,
    /// Bytes.
    pub size: u64,
    /// Modification time in the source, nanoseconds since 1970.
    pub mtime_ns: i64,
    /// Sequence number of this inode's content, from 1: one more whenever size, mtime, token or kind changes.
    /// A directory's stays the same: its content are its entries.
    pub version: u32,
    /// Even: served by the worker. Odd: whole and verified in the cache. Rises whenever `version` or `cached`
    /// changes and never repeats below [`EPOCH_MAX`].
    pub epoch: u32,
    /// The epochs from this one to `epoch` all stood for `version`.
    pub since_epoch: u32,
    /// The source's own name of this content (ETag, or size and mtime).
    pub token: String,
    pub cached: Option<Cached>,
    /// Where a symlink points; empty for all else.
    pub target: Vec<u8>,
    /// As the source tells them, of files and directories. No part of the content: they may change under one `version`.
    pub permissions: Option<Permissions>,
}

/// Where the whole and verified content of a version lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Valid only while the agent of this generation runs.
    pub generation: u64,
    /// Which cache root.
    pub root: u8,
    /// Id of the cache file.
    pub file: u64,
}

/// One name as the source has just reported it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Incoming {
    pub name: Vec<u8>,
    pub kind: Kind,
    pub size: u64,
    pub mtime_ns: i64,
    pub token: String,
    pub target: Vec<u8>,
    /// None: the source does not tell them.
    pub permissions: Option<Permissions>,
}

/// What the store knows of a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// `seen_ms`: the moment for which the source last confirmed this, on the store's own clock
    /// ([`super::View::now_ms`]).
    Found { attributes: Attributes, seen_ms: u64 },
    /// The source was asked and has no such name, or a complete listing lacks it.
    Absent { seen_ms: u64 },
    /// The source was not asked yet.
    Unknown,
}

/// What the store knows of a directory as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListingState {
    /// A listing was stored from its first to its last page.
    pub complete: bool,
    /// When the last complete listing was begun, on the store's own clock; 0: never.
    pub seen_ms: u64,
    /// Names that `read_dir` shows.
    pub entries: u64,
    /// Objects that the last complete listing could not show: hidden behind a directory of the same name, or
    /// unnameable.
    pub hidden: u64,
}

/// Gives out inode numbers. The agent keeps the high-water mark in its state, which outlives this store.
pub trait InodeNumbers: Send + Sync {
    /// A number ≥ [`FIRST_INO`] and < [`INO_LIMIT`] that was never given out before.
    fn next(&self) -> Result<u64, MetaError>;
}

/// How large the store may become and how many may look into it. All of it is virtual until used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Most bytes that the store may ever hold; address space in the agent and in every worker, not memory.
    pub map_bytes: usize,
    /// The file never shrinks. One that has used nine tenths is deleted when it is opened, and started anew.
    pub start_anew: bool,
    /// Bytes of the disk that are taken ahead for new names, as far as there is room: a disk that other programs fill
    /// up does not stop them at once.
    pub reserve_bytes: u64,
    /// Most questions of the writing process at once.
    pub readers_max: u32,
}

impl Default for Options {
    fn default() -> Self {
        Self { map_bytes: 16 << 30, start_anew: true, reserve_bytes: 32 << 20, readers_max: 2048 }
    }
}

/// What `Store::open` found on the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opened {
    /// Nothing: a new store.
    Fresh,
    /// A store that can be trusted, with everything in it.
    Kept,
    /// A store that cannot be trusted or read. It lies beside the new, empty one under the name `data.mdb.set-aside`.
    SetAside { why: String },
    /// A store that was nearly full. It was deleted.
    StartedAnew { why: String },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Names with an inode number, also those that have vanished.
    pub inodes: u64,
    /// Records of names, also negative ones.
    pub names: u64,
    /// Directories of which a listing was begun or a name is known.
    pub directories: u64,
    /// Bytes of the file in use.
    pub used_bytes: u64,
    /// Bytes that it may grow to.
    pub map_bytes: u64,
    /// Highest inode number in the store; 0: none.
    pub highest_ino: u64,
}

pub(super) const DISK_FULL: &str = "no space is left on its disk, make room there";
pub(super) const LIMIT_REACHED: &str =
    "its size limit (cache.metadata_limit) is reached; it is started anew when no volume uses it";

pub(super) const TOTAL_REACHED: &str =
    "all metadata stores together have reached their limit (cache.metadata_total): raise it, or mount less";

/// Every error leaves the store as it was before the call.
#[derive(Debug, thiserror::Error)]
pub enum MetaError {
    /// Serve the caller without storing, and count it.
    #[error("the metadata store is full: {0}")]
    Full(&'static str),
    /// Set aside by the agent at its next start; a worker must ask for a new one.
    #[error("the metadata store has format {found}, this build reads {expected}")]
    Format { found: String, expected: u32 },
    #[error("no metadata store in {0}: the agent has to create it first")]
    NotReady(std::path::PathBuf),
    #[error("the metadata store in {0} is in use by another process or already open in this one")]
    InUse(std::path::PathBuf),
    #[error("the metadata store has been left to this agent's successor")]
    Released,
    #[error("inode {0} is not known")]
    UnknownInode(u64),
    #[error(
        "not a name of a path segment (1 to 255 bytes, neither . nor .., no slash, no NUL), or larger than any file"
    )]
    BadName,
    #[error("a listing of directory {0} is being stored already: wait for it")]
    ListingInProgress(u64),
    #[error("the listing of directory {0} failed earlier: begin a new one")]
    ListingFailed(u64),
    #[error("all inode numbers are used up: empty the metadata store and the inode high-water mark")]
    InodesExhausted,
    /// From the implementation of [`InodeNumbers`].
    #[error("no inode number to be had: {0}")]
    Numbers(String),
    #[error("too many threads of this process read the metadata store at once: raise readers_max")]
    TooManyReaders,
    /// Again and again. The machine is overloaded, or another process stops this one.
    #[error("a question to the metadata store took so long that its answer could not be trusted")]
    Overtaken,
    /// Call `Store::distrust`, and open anew.
    #[error("the metadata store is damaged ({0}): it must be set aside")]
    Damaged(String),
    #[error("{what}: {source}")]
    Io { what: &'static str, source: std::io::Error },
    /// A bug of ours: report it.
    #[error("unexpected answer of the metadata store: {0}")]
    Unexpected(String),
}
