//! What a write expects of the object that it replaces or deletes.

use super::meta::Meta;
use s3s::dto::ETagCondition;
use s3s::{S3Error, S3Result, s3_error};

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    #[default]
    None,
    /// `If-None-Match: *`
    Absent,
    /// `If-Match: *`
    Present,
    /// `If-Match` with this ETag, without quotes.
    Etag(String),
}

/// Why a write was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmet {
    /// There is an object, and it is not the expected one.
    Other,
    /// One was expected, and there is none.
    Missing,
}

impl Condition {
    /// Of a request's headers; AWS implements no others for writes.
    pub(super) fn of(
        if_match: Option<&ETagCondition>,
        if_none_match: Option<&ETagCondition>,
    ) -> S3Result<Self> {
        match (if_match, if_none_match) {
            (None, None) => Ok(Self::None),
            (None, Some(ETagCondition::Any)) => Ok(Self::Absent),
            (Some(ETagCondition::Any), None) => Ok(Self::Present),
            (Some(ETagCondition::ETag(etag)), None) => Ok(Self::Etag(etag.value().to_owned())),
            (None, Some(_)) => Err(s3_error!(NotImplemented, "a write knows If-None-Match with * only")),
            (Some(_), Some(_)) => Err(s3_error!(NotImplemented, "If-Match and If-None-Match at once")),
        }
    }

    /// `self`, unless the server lies about it.
    pub(super) fn unless(self, ignored: bool) -> Self {
        if ignored { Self::None } else { self }
    }

    /// A bucket asks this under the lock under which it then writes.
    pub fn check(&self, current: Option<&Meta>) -> Result<(), Unmet> {
        match (self, current) {
            (Self::None, _) | (Self::Absent, None) | (Self::Present, Some(_)) => Ok(()),
            (Self::Etag(expected), Some(meta)) if *expected == meta.etag => Ok(()),
            (Self::Absent | Self::Etag(_), Some(_)) => Err(Unmet::Other),
            (Self::Present | Self::Etag(_), None) => Err(Unmet::Missing),
        }
    }
}

impl From<Unmet> for S3Error {
    /// As AWS answers.
    fn from(unmet: Unmet) -> Self {
        match unmet {
            Unmet::Other => s3_error!(PreconditionFailed, "a precondition that you specified did not hold"),
            Unmet::Missing => s3_error!(NoSuchKey, "no such key"),
        }
    }
}
