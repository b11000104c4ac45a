//! Sizes and ETags, as headers and listings have them.

use crate::Version;

/// Longer than any store's; it goes into requests, records and file headers.
const ETAG_BYTES_MAX: usize = 1024;

/// A number of bytes, as it is claimed; one too large for the type is as good as the largest.
pub(super) fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().unwrap_or(u64::MAX))
}

/// `"abc"` → `abc`, `W/"abc"` → `W/abc`. None: no request could name it, for no header carries it; so also a strong one
/// that reads like a weak one.
pub(crate) fn unquoted(etag: &str) -> Option<Version> {
    let (weak, rest) = match etag.strip_prefix("W/") {
        Some(rest) => ("W/", rest),
        None => ("", etag),
    };
    let token = rest.trim_matches('"');
    let is_plain = (!weak.is_empty() || !token.starts_with("W/"))
        && token.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ');
    (is_plain && (1..=ETAG_BYTES_MAX).contains(&token.len())).then(|| Version(format!("{weak}{token}")))
}

pub(super) fn quoted(version: &Version) -> String {
    match version.0.strip_prefix("W/") {
        Some(token) => format!("W/\"{token}\""),
        None => format!("\"{}\"", version.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_lose_their_quotes_and_get_them_back() {
        for (etag, token) in [("\"abc-2\"", "abc-2"), ("W/\"abc\"", "W/abc")] {
            let version = unquoted(etag).unwrap();
            assert_eq!(version.as_str(), token);
            assert_eq!(quoted(&version), etag);
        }
        for none in ["\"\"", "W/\"\"", "\"W/abc\"", "\"W/\"", "\"a\nb\"", "\"a\tb\"", "\"é\""] {
            assert_eq!(unquoted(none), None, "{none}");
        }
    }
}
