//! Checksums that stores tell beside an object's bytes.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::{CrcAlgorithm, checksum};
use http::{HeaderMap, HeaderName, HeaderValue};

/// As which store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    S3,
    Oss,
    Gcs,
    Azure,
    Nobody,
}

impl Sums {
    /// `asked`: the request's headers. `part`: what the answer brings, None for one without a body.
    pub(super) fn of(
        self,
        asked: &HeaderMap,
        part: Option<&[u8]>,
        whole: &[u8],
    ) -> Option<(HeaderName, HeaderValue)> {
        let asks = |name: &str, value: &str| {
            asked.get(name).is_some_and(|asked| asked.as_bytes().eq_ignore_ascii_case(value.as_bytes()))
        };
        let of = |algorithm| checksum(algorithm, whole);
        let is_whole = part.is_none_or(|part| part.len() == whole.len());
        let (name, text) = match self {
            Self::S3 if is_whole && asks("x-amz-checksum-mode", "enabled") => (
                "x-amz-checksum-crc64nvme",
                BASE64_STANDARD.encode(of(CrcAlgorithm::Crc64Nvme).to_be_bytes()),
            ),
            Self::Oss => ("x-oss-hash-crc64ecma", of(CrcAlgorithm::Crc64Xz).to_string()),
            Self::Gcs => {
                let crc = &of(CrcAlgorithm::Crc32Iscsi).to_be_bytes()[4..];
                (
                    "x-goog-hash",
                    format!("crc32c={},md5=1B2M2Y8AsgTpgAmY7PhCfg==", BASE64_STANDARD.encode(crc)),
                )
            }
            Self::Azure if asks("x-ms-range-get-content-crc64", "true") => {
                let of_part = checksum(CrcAlgorithm::Crc64Nvme, part?);
                ("x-ms-content-crc64", BASE64_STANDARD.encode(of_part.to_le_bytes()))
            }
            _ => return None,
        };
        Some((
            HeaderName::from_static(name),
            HeaderValue::try_from(text).expect("Base64 and digits can be sent"),
        ))
    }
}
