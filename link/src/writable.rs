//! What a worker asks of the agent for a volume that can be written to. The worker knows nothing of what is staged: each
//! name, attribute and byte of such a volume is asked for, so that all pods of the node see one content at once.

use crate::Cause;
use serde::{Deserialize, Serialize};

/// One request of the kernel's. Inode numbers are node ids here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Operation {
    /// → `Node` or `Absent`
    Lookup { parent: u64, name: Vec<u8> },
    /// → `Node`
    Attributes { ino: u64 },
    /// → `Node`
    SetAttributes { ino: u64, set: SetAttributes },
    /// A regular file; `open`: for its maker, too. → `Node`
    Create { parent: u64, name: Vec<u8>, owner: Owner, exclusive: bool, open: bool },
    /// → `Node`
    MakeDirectory { parent: u64, name: Vec<u8>, owner: Owner },
    /// → `Done`
    Unlink { parent: u64, name: Vec<u8> },
    /// → `Done`
    RemoveDirectory { parent: u64, name: Vec<u8> },
    /// `keep`: not over what is there (RENAME_NOREPLACE). → `Done`
    Rename { parent: u64, name: Vec<u8>, to: u64, to_name: Vec<u8>, keep: bool },
    /// → `Done`
    Open { ino: u64, write: bool },
    /// → `Done`
    Close { ino: u64 },
    /// The bytes and where they go stand in the connection's shared memory, in this request. → `Written`
    Write { ino: u64 },
    /// `fsync`, or one `close` of several. → `Done`
    Sync { ino: u64, closing: bool },
    /// Names from `offset` on, as many as fit into an answer. → `Names`
    ReadDirectory { dir: u64, offset: u64 },
    /// Where the bytes are now. → `Stored`, or `Staged` with its file attached, read-only
    Locate { ino: u64 },
    /// → `Space`
    Space,
}

/// No kernel is told to believe a name or an attribute for longer: so much later changes of other nodes may be seen, and so long a pod
/// may wait for its volume.
pub const BELIEVED_MAX: std::time::Duration = std::time::Duration::from_secs(1);

/// For whom something is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Permissions (07777), with the maker's umask applied.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

/// None: stays as it is. Times in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetAttributes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime_ns: Option<i64>,
    pub mtime_ns: Option<i64>,
}

/// What stat shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    pub ino: u64,
    pub size: u64,
    /// Bytes that it takes on this node or in the store.
    pub stored: u64,
    /// Type and permissions.
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub links: u32,
    pub atime_ns: i64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Name {
    pub name: Vec<u8>,
    /// Where a listing goes on after it.
    pub next: u64,
    pub node: Node,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Done {
    Done,
    Absent,
    Node(Node),
    Written {
        bytes: u32,
    },
    Names(Vec<Name>),
    /// This version of this inode, as the metadata store knows it.
    Stored {
        version: u32,
    },
    Staged {
        size: u64,
    },
    Space {
        total_bytes: u64,
        free_bytes: u64,
        total_inodes: u64,
    },
}

/// Why an operation was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wrong {
    Cause(Cause),
    Exists,
    NotEmpty,
    IsDirectory,
    /// Between what cannot be done in one step: the caller is to copy.
    Elsewhere,
    /// The rename would put a directory below itself, or the like.
    Impossible,
    NameTooLong,
    TooLarge,
    /// Not by this volume, whoever asks.
    NotPermitted,
    /// The disk of the staging area is full and nothing more can be uploaded to make room; or the store is full.
    NoSpace,
    /// Somebody else has changed the object in the store meanwhile; what was written here is kept.
    Conflict,
    /// The mount is read-only.
    ReadOnly,
}

impl From<Cause> for Wrong {
    fn from(cause: Cause) -> Self {
        Self::Cause(cause)
    }
}
