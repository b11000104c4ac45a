//! Which keys have a POSIX name, and how a key is written into a URL.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};

/// Linux refuses longer names (NAME_MAX), and so would every program that copies them elsewhere.
pub(crate) const NAME_BYTES_MAX: usize = 255;

/// May this be a name in a directory? Control characters and spaces may; POSIX allows them.
///
/// S3 keys are UTF-8 by definition: what is not could not be asked for again.
pub(crate) fn is_name(name: &[u8]) -> bool {
    !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && !matches!(name, b"." | b"..")
        && !name.contains(&0)
        && !name.contains(&b'/')
        && std::str::from_utf8(name).is_ok()
}

/// Is every segment a name? Keys that fail this are never asked for: URL parsers resolve `.` and `..`.
pub(crate) fn is_path(path: &[u8]) -> bool {
    path.split(|byte| *byte == b'/').all(is_name)
}

/// RFC 3986's unreserved characters stay; all else is encoded. Signature V4 wants exactly this.
const STRICT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
const STRICT_PATH: &AsciiSet = &STRICT.remove(b'/');

pub(crate) fn encode_path(key: &[u8]) -> String {
    percent_encode(key, STRICT_PATH).to_string()
}

pub(crate) fn encode_query(value: &[u8]) -> String {
    percent_encode(value, STRICT).to_string()
}

/// Undoes `encoding-type=url`: AWS writes a space as `+` and a plus as `%2B`; a store that writes `%20` fits too.
pub(crate) fn decode_form(text: &str) -> Vec<u8> {
    let spaced: Vec<u8> = text.bytes().map(|byte| if byte == b'+' { b' ' } else { byte }).collect();
    percent_encoding::percent_decode(&spaced).collect()
}

/// No store has longer keys (S3: 1,024 bytes); messages do not repeat what claims to be one.
const SHOWN_BYTES_MAX: usize = 1024;

/// A key as text for a person.
pub(crate) fn show(key: &[u8]) -> String {
    let shown = &key[..key.len().min(SHOWN_BYTES_MAX)];
    let text = String::from_utf8_lossy(shown);
    let readable =
        text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] });
    readable.chain((shown.len() < key.len()).then_some('…')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_that_posix_cannot_have_are_told_apart() {
        for bad in [&b""[..], b".", b"..", b"a/b", b"a\0b", b"\xff\xfe", &[b'x'; 256]] {
            assert!(!is_name(bad), "{bad:?}");
        }
        for good in [&b"a"[..], b"...", b" ", b"\n", "ü".as_bytes(), b"100%+#?&", &[b'x'; 255]] {
            assert!(is_name(good), "{good:?}");
        }
        assert!(
            is_path(b"a/b") && !is_path(b"a//b") && !is_path(b"/a") && !is_path(b"a/") && !is_path(b"a/../b")
        );
    }

    proptest! {
        #[test]
        fn encodings_round_trip(key in proptest::collection::vec(any::<u8>(), 0..40)) {
            prop_assert_eq!(decode_form(&encode_query(&key)), key.clone());
            let url = format!("http://h/{}", encode_path(&key));
            prop_assume!(key.split(|b| *b == b'/').all(|s| !matches!(s, b"." | b"..")));
            let parsed = url::Url::parse(&url).unwrap();
            prop_assert_eq!(parsed.as_str(), url.as_str());
        }
    }
}
