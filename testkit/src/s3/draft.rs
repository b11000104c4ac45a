//! An object as a write brings it, before the bucket has made a version of it.

use super::digests::Checksum;
use super::pieces::Pieces;
use std::collections::BTreeMap;
use std::time::SystemTime;

/// What is kept with an object besides its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct About {
    pub content_type: Option<String>,
    /// `x-amz-meta-*`, by the name after that prefix.
    pub metadata: BTreeMap<String, String>,
    /// Of all its bytes.
    pub checksum: Option<Checksum>,
}

#[derive(Clone, Debug)]
pub struct Draft {
    pub body: Pieces,
    pub about: About,
    /// Of a multipart upload; its ETag ends in this number.
    pub parts: Option<usize>,
    /// By the server's clock.
    pub modified: SystemTime,
}

impl Draft {
    /// A version of these bytes has this ETag where `etag` names it alone.
    pub(super) fn etag(&self, etag: String) -> String {
        match self.parts {
            Some(parts) => format!("{etag}-{parts}"),
            None => etag,
        }
    }
}
