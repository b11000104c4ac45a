//! The two ways in which S3 writes a time, both read to whole seconds.
//!
//! Listings may carry milliseconds where HEAD, bound to HTTP's format, cannot. Taken at face value one object would
//! have two mtimes and seem to change with every question.

use std::time::UNIX_EPOCH;

const NANOS: i64 = 1_000_000_000;

/// `2015-10-21T07:28:00.123Z`
pub(super) fn parse_iso(text: &str) -> Option<i64> {
    let time = humantime::parse_rfc3339(text.trim()).ok()?;
    i64::try_from(time.duration_since(UNIX_EPOCH).ok()?.as_secs()).ok()?.checked_mul(NANOS)
}

/// `Wed, 21 Oct 2015 07:28:00 GMT`, the one form that HTTP servers may send (RFC 9110, 5.6.7).
pub(crate) fn parse_http(text: &str) -> Option<i64> {
    let (_, rest) = text.trim().split_once(", ")?;
    let mut words = rest.split(' ');
    let (day, month, year, clock) = (words.next()?, words.next()?, words.next()?, words.next()?);
    const MONTHS: [&str; 12] =
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let month = MONTHS.iter().position(|name| *name == month)? + 1;
    parse_iso(&format!("{year:0>4}-{month:02}-{day:0>2}T{clock}Z"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_forms_give_the_same_time() {
        let seconds = 1_445_412_480;
        assert_eq!(parse_http("Wed, 21 Oct 2015 07:28:00 GMT"), Some(seconds * NANOS));
        assert_eq!(parse_iso("2015-10-21T07:28:00.987Z"), Some(seconds * NANOS));
        assert_eq!(parse_iso("2015-10-21T07:28:00Z"), Some(seconds * NANOS));
        assert_eq!(parse_http("yesterday"), None);
    }
}
