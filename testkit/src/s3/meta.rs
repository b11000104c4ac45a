//! What a bucket knows of an object before anybody reads it.

use super::draft::About;
use std::sync::Arc;
use std::time::SystemTime;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Meta {
    pub size: u64,
    /// Without quotes.
    pub etag: String,
    pub modified: SystemTime,
    /// None: nothing is known but its bytes.
    pub about: Option<Arc<About>>,
}
