//! The one place where a failure becomes a gRPC code.

use link::{Refusal, RefusalKind};
use mounts::{KernelError, TargetError};
use tonic::Status;

/// Why an RPC failed; the text tells the caller what to do next.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// Fix the request.
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    NotFound(String),
    /// The same thing exists with other arguments.
    #[error("{0}")]
    Conflict(String),
    /// The state of something else forbids it.
    #[error("{0}")]
    Precondition(String),
    #[error("{0}")]
    OutOfRange(String),
    #[error("{0}")]
    Denied(String),
    /// Another call works on the same volume: repeat it later.
    #[error("an operation on {0} is still under way: repeat the call")]
    Busy(String),
    /// The work goes on without the call; the text says how far it is.
    #[error("{0}")]
    UnderWay(String),
    #[error("starting_token {0:?} was not given out by this driver: list from the beginning")]
    BadToken(String),
    /// Repeat later; the text says what is missing.
    #[error("{0}")]
    Unavailable(String),
    #[error("{0} is not offered by this driver")]
    Unsupported(&'static str),
    /// A defect or a broken node.
    #[error("{0}")]
    Internal(String),
}

/// gRPC sends the text percent-encoded in a header, of which clients take 16 KiB; what is longer is a broken connection to
/// them, without a code. It may be another process's text.
const TEXT_CHARS_MAX: usize = 1000;

impl From<Failure> for Status {
    fn from(failure: Failure) -> Self {
        let mut text = failure.to_string();
        if let Some((end, _)) = text.char_indices().nth(TEXT_CHARS_MAX) {
            text.truncate(end);
            text.push('…');
        }
        match failure {
            Failure::Invalid(_) => Self::invalid_argument(text),
            Failure::NotFound(_) => Self::not_found(text),
            Failure::Conflict(_) => Self::already_exists(text),
            Failure::Precondition(_) => Self::failed_precondition(text),
            Failure::OutOfRange(_) => Self::out_of_range(text),
            Failure::Denied(_) => Self::permission_denied(text),
            Failure::Busy(_) | Failure::UnderWay(_) | Failure::BadToken(_) => Self::aborted(text),
            Failure::Unavailable(_) => Self::unavailable(text),
            Failure::Unsupported(_) => Self::unimplemented(text),
            Failure::Internal(_) => Self::internal(text),
        }
    }
}

/// An error with everything that caused it, on one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

impl Failure {
    pub fn missing(field: &str) -> Self {
        Self::Invalid(format!("{field} is missing in the request"))
    }
}

impl From<volume::ParameterError> for Failure {
    fn from(error: volume::ParameterError) -> Self {
        match error {
            volume::ParameterError::NotAllowed { .. } => Self::Denied(error.to_string()),
            other => Self::Invalid(other.to_string()),
        }
    }
}
impl From<volume::TemplateError> for Failure {
    fn from(error: volume::TemplateError) -> Self {
        Self::Invalid(error.to_string())
    }
}
impl From<volume::CredentialsError> for Failure {
    fn from(error: volume::CredentialsError) -> Self {
        Self::Invalid(error.to_string())
    }
}
impl From<volume::BadVolumeId> for Failure {
    fn from(error: volume::BadVolumeId) -> Self {
        Self::Invalid(error.to_string())
    }
}

/// Of a directory that is to be deleted.
impl From<store::StoreError> for Failure {
    fn from(error: store::StoreError) -> Self {
        use store::StoreError;
        let text = error.to_string();
        match error {
            StoreError::Denied { .. } | StoreError::Expired { .. } => Self::Denied(text),
            StoreError::Unavailable { .. }
            | StoreError::Busy { .. }
            | StoreError::Stale { .. }
            | StoreError::Conflict { .. } => Self::Unavailable(text),
            StoreError::NotFound { .. } | StoreError::Invalid { .. } | StoreError::Unsupported { .. } => {
                Self::Precondition(text)
            }
            StoreError::Full { .. } | StoreError::Damaged { .. } | StoreError::Malformed { .. } => {
                Self::Internal(text)
            }
        }
    }
}

impl From<TargetError> for Failure {
    fn from(error: TargetError) -> Self {
        let text = error.to_string();
        match error {
            TargetError::NotAbsolute(_)
            | TargetError::Outside { .. }
            | TargetError::NoParent(_)
            | TargetError::Symlink(_)
            | TargetError::NotADirectory(_) => Self::Invalid(text),
            TargetError::Io { .. } => Self::Internal(text),
        }
    }
}

impl From<KernelError> for Failure {
    fn from(error: KernelError) -> Self {
        let text = error.to_string();
        match error {
            KernelError::Target(target) => target.into(),
            KernelError::Foreign { .. } => Self::Precondition(text),
            KernelError::ProbeTimedOut { .. } | KernelError::ProbeFailed { .. } | KernelError::NoInit(_) => {
                Self::Unavailable(text)
            }
            KernelError::NotACacheFile(_) => Self::Invalid(text),
            KernelError::Call { .. }
            | KernelError::BadInit(_)
            | KernelError::NoFusectl { .. }
            | KernelError::Ended
            | KernelError::OtherConnection
            | KernelError::Vanished(_) => Self::Internal(text),
        }
    }
}

/// What the agent refused.
impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        let text = refusal.message;
        match refusal.kind {
            RefusalKind::Invalid => Self::Invalid(text),
            RefusalKind::Denied => Self::Denied(text),
            RefusalKind::NotFound => Self::NotFound(text),
            RefusalKind::Unavailable => Self::Unavailable(text),
            RefusalKind::Conflict => Self::Conflict(text),
            RefusalKind::Internal => Self::Internal(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_fits_into_a_header_whatever_it_is() {
        let long = Status::from(Failure::Invalid("\u{1b}é".repeat(10_000)));
        assert_eq!(long.message().chars().count(), TEXT_CHARS_MAX + 1);
        assert!(long.message().ends_with('…'));
        let short = "x".repeat(TEXT_CHARS_MAX);
        assert_eq!(Status::from(Failure::Denied(short.clone())).message(), short);
    }
}
