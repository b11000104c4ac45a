//! Who is measured: Millpond, what it is measured against, and the peers that are installed.

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Who {
    Millpond,
    /// The server's own file, read where it lies; of rows that write, a directory of the staging area's disk.
    Native,
    /// Millpond's file in the cache, read past Millpond.
    CacheFile,
    /// The same file through a mount that passes every read on to it and does nothing else.
    Passthrough,
    /// One curl into files of the cache disk, which are then read.
    Curl,
    /// Eight curls of an eighth each, to /dev/null.
    EightCurls,
    /// 32 curls of a part each into files of the cache disk, then cat.
    ManyCurls,
    /// Eight curls that PUT an eighth each, from files in the page cache.
    EightUploads,
    MountS3,
    S3fs,
    Rclone,
}

impl Who {
    pub(super) const PEERS: [Self; 3] = [Self::MountS3, Self::S3fs, Self::Rclone];
    pub(super) const BASELINES: [Self; 7] = [
        Self::Native,
        Self::CacheFile,
        Self::Passthrough,
        Self::Curl,
        Self::EightCurls,
        Self::ManyCurls,
        Self::EightUploads,
    ];

    /// In records and tables; of a peer the name of its program, too.
    pub fn name(self) -> &'static str {
        match self {
            Self::Millpond => "millpond",
            Self::Native => "native",
            Self::CacheFile => "cache file",
            Self::Passthrough => "passthrough",
            Self::Curl => "curl",
            Self::EightCurls => "8 curls",
            Self::ManyCurls => "32 curls",
            Self::EightUploads => "8 uploads",
            Self::MountS3 => "mount-s3",
            Self::S3fs => "s3fs",
            Self::Rclone => "rclone",
        }
    }

    pub(super) fn is_peer(self) -> bool {
        Self::PEERS.contains(&self)
    }
}
