//! Digests that a client sends beside a body: the server checks them, and keeps the checksum with the object.

use super::encryption::md5;
use super::pieces::Pieces;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};
use http::HeaderMap;
use s3s::{S3Result, s3_error};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    Crc32,
    Crc32c,
    Crc64nvme,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checksum {
    pub algorithm: Algorithm,
    /// Base64 of its big-endian bytes.
    pub value: String,
}

const ALL: [Algorithm; 3] = [Algorithm::Crc32, Algorithm::Crc32c, Algorithm::Crc64nvme];
const PREFIX: &str = "x-amz-checksum-";

impl Algorithm {
    pub fn header(self) -> &'static str {
        match self {
            Self::Crc32 => "x-amz-checksum-crc32",
            Self::Crc32c => "x-amz-checksum-crc32c",
            Self::Crc64nvme => "x-amz-checksum-crc64nvme",
        }
    }

    /// As `x-amz-checksum-algorithm` names it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Crc32 => "CRC32",
            Self::Crc32c => "CRC32C",
            Self::Crc64nvme => "CRC64NVME",
        }
    }

    pub(super) fn named(name: &str) -> S3Result<Self> {
        let found = ALL.into_iter().find(|algorithm| algorithm.name() == name);
        found.ok_or_else(|| s3_error!(NotImplemented, "the testkit does not know the checksum {name}"))
    }

    pub fn of(self, body: &Pieces) -> Checksum {
        let (algorithm, length) = match self {
            Self::Crc32 => (CrcAlgorithm::Crc32IsoHdlc, 4),
            Self::Crc32c => (CrcAlgorithm::Crc32Iscsi, 4),
            Self::Crc64nvme => (CrcAlgorithm::Crc64Nvme, 8),
        };
        let mut digest = Digest::new(algorithm);
        body.iter().for_each(|piece| digest.update(piece));
        let bytes = digest.finalize().to_be_bytes();
        Checksum { algorithm: self, value: BASE64_STANDARD.encode(&bytes[8 - length..]) }
    }
}

impl Checksum {
    /// For an answer that has a field for each algorithm: CRC32, CRC32C, CRC64NVME.
    pub(super) fn fields(told: Option<&Self>) -> [Option<String>; 3] {
        ALL.map(|algorithm| told.filter(|sum| sum.algorithm == algorithm).map(|sum| sum.value.clone()))
    }
}

/// What is claimed about a body.
#[derive(Debug, Default)]
pub(super) struct Digests {
    md5: Option<String>,
    pub(super) checksum: Option<Checksum>,
}

impl Digests {
    /// Of a request's headers, and of what came after its body.
    pub(super) fn of(
        headers: &HeaderMap,
        trailers: Option<&HeaderMap>,
        no_checksums: bool,
    ) -> S3Result<Self> {
        let md5 = headers.get("content-md5").and_then(|value| value.to_str().ok()).map(str::to_owned);
        let is_one = |md5: &String| BASE64_STANDARD.decode(md5).is_ok_and(|md5| md5.len() == 16);
        if md5.as_ref().is_some_and(|md5| !is_one(md5)) {
            return Err(s3_error!(InvalidDigest, "the Content-MD5 is not one"));
        }
        let mut digests = Self { md5, checksum: None };
        if no_checksums {
            return Ok(digests);
        }
        let claims = headers.iter().chain(trailers.into_iter().flatten());
        for (name, value) in claims {
            let Some(short) = name.as_str().strip_prefix(PREFIX) else { continue };
            // How checksums are told, not one of them.
            if matches!(short, "mode" | "type" | "algorithm") {
                continue;
            }
            let algorithm = Algorithm::named(&short.to_ascii_uppercase())?;
            let value = value.to_str().unwrap_or_default().to_owned();
            let length = if algorithm == Algorithm::Crc64nvme { 8 } else { 4 };
            if !BASE64_STANDARD.decode(&value).is_ok_and(|sum| sum.len() == length) {
                return Err(s3_error!(InvalidRequest, "the value of {name} is invalid"));
            }
            if digests.checksum.replace(Checksum { algorithm, value }).is_some() {
                return Err(s3_error!(InvalidRequest, "expecting a single {PREFIX} header"));
            }
        }
        Ok(digests)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.md5.is_none() && self.checksum.is_none()
    }

    pub(super) fn check(&self, body: &Bytes) -> S3Result<()> {
        if self.md5.as_ref().is_some_and(|claimed| *claimed != BASE64_STANDARD.encode(md5(body))) {
            return Err(s3_error!(BadDigest, "the Content-MD5 you specified did not match what we received"));
        }
        match &self.checksum {
            Some(claimed) => matches(claimed, &body.clone().into()),
            None => Ok(()),
        }
    }
}

pub(super) fn matches(claimed: &Checksum, body: &Pieces) -> S3Result<()> {
    if claimed.algorithm.of(body) == *claimed {
        return Ok(());
    }
    let name = claimed.algorithm.name();
    Err(s3_error!(BadDigest, "the {name} you specified did not match the calculated checksum"))
}
