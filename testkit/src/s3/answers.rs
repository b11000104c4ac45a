//! How answers say what happened to an object.

use super::meta::Meta;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::ETag;
use s3s::{S3Error, S3ErrorCode, s3_error};
use std::io::{self, ErrorKind};

/// What a bucket cannot do is the client's fault, or nobody's.
pub(super) fn failed(e: io::Error) -> S3Error {
    match e.kind() {
        ErrorKind::Unsupported | ErrorKind::ReadOnlyFilesystem => {
            s3_error!(e, NotImplemented, "this bucket cannot do that")
        }
        ErrorKind::InvalidInput => s3_error!(e, InvalidArgument, "this bucket cannot hold that key"),
        // A key and a key below it, which a file system cannot hold both; in the words of MinIO.
        ErrorKind::IsADirectory
        | ErrorKind::NotADirectory
        | ErrorKind::AlreadyExists
        | ErrorKind::DirectoryNotEmpty => {
            let mut error = S3Error::new(S3ErrorCode::Custom("XMinioObjectExistsAsDirectory".into()));
            error.set_status_code(http::StatusCode::CONFLICT);
            error
        }
        _ => s3_error!(e, InternalError, "backend failed"),
    }
}

pub(super) fn etag(meta: &Meta) -> Option<ETag> {
    Some(ETag::Strong(meta.etag.clone()))
}

/// `encoding-type=url` the way AWS does it: like a form, a space becomes `+`.
const FORM: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'*').remove(b'/').remove(b' ');

pub(super) fn encode(text: &str, url: bool) -> String {
    if url { utf8_percent_encode(text, FORM).to_string().replace(' ', "+") } else { text.to_owned() }
}
