//! The messages. Paths are absolute and UTF-8, for HDFS has no others that could be asked for.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

#[derive(Debug, Serialize, Deserialize)]
pub enum ToHelper {
    /// The first message, and no other is.
    Configure(Box<Configure>),
    /// `patience_ms`: how long HDFS may be silent.
    Ask {
        id: u64,
        patience_ms: u32,
        question: Question,
    },
    /// So many more bytes of this read may be sent.
    More {
        id: u64,
        bytes: u32,
    },
    Cancel {
        id: u64,
    },
}

/// What to ask, and as whom.
#[derive(Debug, Serialize, Deserialize)]
pub struct Configure {
    /// `host:port`, or the name of a name service that `settings` describe.
    pub authority: String,
    /// Properties of `core-site.xml` and `hdfs-site.xml`; those that a helper does not know are ignored.
    pub settings: BTreeMap<String, String>,
    pub identity: Identity,
    /// Whatever HDFS or a `krb5.conf` names there is not asked.
    pub refused: Vec<Network>,
    /// Nor there,
    pub own: Vec<Network>,
    /// but where an operator has said that HDFS's servers are.
    pub meant: Vec<Network>,
}

/// Addresses with the same beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    pub base: IpAddr,
    /// How many bits of it count.
    pub bits: u8,
}

impl Network {
    pub fn contains(&self, address: IpAddr) -> bool {
        match (self.base, address) {
            (IpAddr::V4(base), IpAddr::V4(address)) => {
                let differ = base.to_bits() ^ address.to_bits();
                differ.checked_shr(32_u32.saturating_sub(self.bits.into())).unwrap_or(0) == 0
            }
            (IpAddr::V6(base), IpAddr::V6(address)) => {
                let differ = base.to_bits() ^ address.to_bits();
                differ.checked_shr(128_u32.saturating_sub(self.bits.into())).unwrap_or(0) == 0
            }
            _ => false,
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Identity {
    /// HDFS believes whatever name it is told.
    Simple { user: String },
    Kerberos {
        principal: String,
        krb5_conf: String,
        /// With it tickets are fetched and renewed.
        keytab: Option<Secret>,
        /// Tickets that somebody else fetches and renews.
        ticket_cache: Option<Secret>,
    },
    /// A file of delegation tokens that somebody else has fetched, and renews.
    Tokens { file: Secret },
}

/// Never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Secret(pub Vec<u8>);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    Stat {
        path: String,
    },
    List {
        path: String,
        start: PageStart,
    },
    /// Exactly these bytes of exactly this version. `window`: see [`ToHelper::More`].
    Read {
        path: String,
        version: Version,
        start: u64,
        end: u64,
        window: u32,
    },
}

/// Where a page begins. A NameNode lists in the order of names, so this is known without what was listed before.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PageStart {
    /// The last name that was told.
    pub after: Option<String>,
    /// And so many names behind it that cannot be told.
    pub hidden: u32,
}

/// HDFS tells no other: equal times and lengths mean equal bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Version {
    /// Since the epoch.
    pub modified_ms: u64,
    pub length: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub is_directory: bool,
    /// Of a directory its length says nothing.
    pub version: Version,
    /// The lowest bits of st_mode.
    pub mode: u16,
    /// Names, as HDFS has them; empty: longer than any user's.
    pub owner: String,
    pub group: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub name: String,
    pub status: Status,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Page {
    pub entries: Vec<Entry>,
    /// Names of this page that are not UTF-8: they cannot be asked for.
    pub hidden: u32,
    /// None: it was the last.
    pub next: Option<PageStart>,
}

#[derive(Debug, Serialize, Deserialize)]
pub enum FromHelper {
    /// The first message.
    Hello {
        protocol: u32,
    },
    /// `missing`: what of its confinement this kernel cannot do.
    Ready {
        missing: Vec<String>,
    },
    /// With this configuration nothing can be asked: a person must change it.
    Unusable {
        why: String,
    },
    Answer {
        id: u64,
        answer: Result<Answer, Failure>,
    },
    /// The next bytes of a read: the frame's body.
    Data {
        id: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// None: there is nothing of this name.
    Status(Option<Status>),
    Page(Page),
    /// All data was sent.
    End,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    pub kind: FailureKind,
    /// For a person.
    pub why: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureKind {
    NotFound,
    /// This user may not, or HDFS does not believe that it is this user.
    Denied,
    /// The tickets were good for a time, which is over.
    Expired,
    /// The file has another version now, or is gone.
    Stale,
    /// No connection: refused, unreachable, unknown host.
    Unreachable,
    /// Nothing came for as long as it may be silent.
    Silent,
    /// HDFS answers that it cannot now: standby, safe mode, too busy.
    Refused,
    /// The connection broke, or no DataNode gave the bytes.
    Broken,
    /// Less came than was announced.
    Truncated,
    /// It is being written, and this part of it cannot be read yet. When it can, it has another version.
    Unfinished,
    /// An answer that makes no sense.
    Malformed,
    /// The helper's code failed, and not HDFS.
    Panicked,
    /// A person must change the configuration.
    Invalid,
}
