//! What stores tell about the bytes that they send: checksums that survive proxies, memory and disks on the way.

use super::header;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::{CrcAlgorithm, Digest};
use http::header::HeaderMap;

/// A checksum as a store tells it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Checksum {
    pub(crate) algorithm: CrcAlgorithm,
    pub(crate) value: u64,
    /// Of what this answer brings; else of the whole object.
    pub(crate) of_range: bool,
}

impl Checksum {
    pub(crate) fn begin(self) -> Summing {
        Summing { digest: Digest::new(self.algorithm), expected: self.value }
    }
}

/// So much waits in memory for its checksum, of each request. Larger bodies are given out as they come.
pub(crate) const HELD_MAX: u64 = 512 << 10;

/// On its way through a body.
pub(crate) struct Summing {
    digest: Digest,
    expected: u64,
}

impl Summing {
    pub(crate) fn update(&mut self, piece: &[u8]) {
        self.digest.update(piece);
    }

    pub(crate) fn fits(&self) -> bool {
        self.digest.finalize() == self.expected
    }
}

/// As S3 and Google write them: Base64 of a big-endian number. None: of the parts of an object (`…-7`), or no such number.
pub(super) fn big_endian(text: &str, algorithm: CrcAlgorithm) -> Option<u64> {
    let bytes = BASE64_STANDARD.decode(text.trim()).ok()?;
    let is_64 = matches!(algorithm, CrcAlgorithm::Crc64Nvme | CrcAlgorithm::Crc64Xz);
    (bytes.len() == if is_64 { 8 } else { 4 })
        .then(|| bytes.iter().fold(0, |value, byte| value << 8 | u64::from(*byte)))
}

/// Of the whole object, in S3's headers.
pub(super) fn s3(headers: &HeaderMap) -> Option<Checksum> {
    const NAMES: [(&str, CrcAlgorithm); 3] = [
        ("x-amz-checksum-crc64nvme", CrcAlgorithm::Crc64Nvme),
        ("x-amz-checksum-crc32c", CrcAlgorithm::Crc32Iscsi),
        ("x-amz-checksum-crc32", CrcAlgorithm::Crc32IsoHdlc),
    ];
    // Of an object in parts: the checksum of their checksums.
    if header(headers, "x-amz-checksum-type") == Some("COMPOSITE") {
        return None;
    }
    NAMES.iter().find_map(|(name, algorithm)| {
        let value = big_endian(header(headers, *name)?, *algorithm)?;
        Some(Checksum { algorithm: *algorithm, value, of_range: false })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderName, HeaderValue};

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::try_from(*value).unwrap())
        };
        pairs.iter().map(pair).collect()
    }

    /// Check values of the catalogue of CRCs: of "123456789".
    #[test]
    fn each_algorithm_is_the_one_that_its_store_means() {
        for (name, value) in [
            ("x-amz-checksum-crc32", 0xcbf4_3926_u64),
            ("x-amz-checksum-crc32c", 0xe306_9283),
            ("x-amz-checksum-crc64nvme", 0xae8b_1486_0a79_9888),
        ] {
            let bytes = if name.ends_with("nvme") {
                value.to_be_bytes()[..].to_vec()
            } else {
                value.to_be_bytes()[4..].to_vec()
            };
            let mut summing = s3(&headers(&[(name, &BASE64_STANDARD.encode(bytes))])).unwrap().begin();
            summing.update(b"1234");
            summing.update(b"56789");
            assert!(summing.fits(), "{name}");
            summing.update(b"0");
            assert!(!summing.fits(), "{name}");
        }
        let xz = Checksum { algorithm: CrcAlgorithm::Crc64Xz, value: 0x995d_c9bb_df19_39fa, of_range: false };
        let mut summing = xz.begin();
        summing.update(b"123456789");
        assert!(summing.fits());
    }

    #[test]
    fn what_is_no_checksum_of_the_whole_is_none() {
        for none in [
            &[("x-amz-checksum-crc32c", "4waSgw==-3")][..],
            &[("x-amz-checksum-crc32c", "4waSgw=="), ("x-amz-checksum-type", "COMPOSITE")],
            &[("x-amz-checksum-crc32c", "")],
            &[("x-amz-checksum-crc64nvme", "4waSgw==")],
            &[("x-amz-checksum-sha256", "4waSgw==")],
            &[],
        ] {
            assert_eq!(s3(&headers(none)), None, "{none:?}");
        }
        assert!(
            s3(&headers(&[("x-amz-checksum-crc32c", "4waSgw=="), ("x-amz-checksum-type", "FULL_OBJECT")]))
                .is_some()
        );
    }
}
