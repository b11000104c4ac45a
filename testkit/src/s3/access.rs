//! Who may ask, and for what.

use super::{Key, Rights};
use async_trait::async_trait;
use s3s::access::{S3Access, S3AccessContext};
use s3s::{S3Result, s3_error};
use std::time::{Duration, SystemTime};

/// What every protocol asks of a request.
pub(super) struct Guard {
    pub(super) keys: Vec<Key>,
    pub(super) anonymous: bool,
    pub(super) requester_pays: bool,
    pub(super) customer_key: Option<String>,
    pub(super) gate: Option<(&'static str, &'static str)>,
    pub(super) page_max: usize,
    pub(super) clock_ahead: Duration,
}

impl Guard {
    /// By the server's clock.
    pub(super) fn now(&self) -> SystemTime {
        SystemTime::now() + self.clock_ahead
    }
}

impl Rights {
    /// `op`: as S3 names it.
    pub(super) fn allow(self, op: &str) -> bool {
        let lists = matches!(op, "ListObjectsV2" | "HeadBucket");
        let reads = matches!(op, "HeadObject" | "GetObject");
        match self {
            Self::All => true,
            Self::NoDelete => !matches!(op, "DeleteObject" | "DeleteObjects"),
            Self::NoWrite => lists || reads || matches!(op, "ListMultipartUploads" | "ListParts"),
            Self::ListOnly => lists,
            Self::ReadOnly => reads,
            Self::None => false,
        }
    }
}

/// Anonymous access is a switch, and each key has its rights.
pub(super) struct Access {
    pub(super) anonymous: bool,
    pub(super) keys: Vec<Key>,
}

#[async_trait]
impl S3Access for Access {
    async fn check(&self, cx: &mut S3AccessContext<'_>) -> S3Result<()> {
        let rights = match cx.credentials() {
            None if self.anonymous => Rights::All,
            None => return Err(s3_error!(AccessDenied, "anonymous access is off")),
            Some(who) => {
                let key = self.keys.iter().find(|key| key.id == who.access_key);
                let brought = cx.headers().get("x-amz-security-token").and_then(|token| token.to_str().ok());
                if key.is_some_and(|key| key.token.is_some() && key.token.as_deref() != brought) {
                    return Err(s3_error!(ExpiredToken, "the provided token has expired"));
                }
                key.map_or(Rights::None, |key| key.rights)
            }
        };
        // AWS answers a batch without the right to delete with an error for each key.
        let op = cx.s3_op().name();
        if rights.allow(op) || op == "DeleteObjects" {
            cx.extensions_mut().insert(rights);
            return Ok(());
        }
        Err(s3_error!(AccessDenied, "this key may not do that"))
    }
}
