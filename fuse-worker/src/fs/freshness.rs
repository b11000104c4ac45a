//! How long an answer may be trusted. Pure.

use std::time::Duration;

/// What "for ever" means to the kernel.
pub(super) const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// What is left of `ttl` (None: for ever) for something seen at `seen_ms`; None: nothing.
pub(super) fn remaining(ttl: Option<Duration>, seen_ms: u64, now_ms: u64) -> Option<Duration> {
    let Some(ttl) = ttl else { return Some(FOR_EVER) };
    let age = Duration::from_millis(cache::meta::age_ms(seen_ms, now_ms)?);
    ttl.checked_sub(age).filter(|left| !left.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_trusted_longer_than_its_ttl() {
        let ttl = Some(Duration::from_secs(10));
        assert_eq!(remaining(ttl, 1000, 4000), Some(Duration::from_secs(7)));
        assert_eq!(remaining(ttl, 1000, 11_000), None);
        assert_eq!(remaining(ttl, 1000, 99_000), None);
        assert_eq!(remaining(ttl, 5001, 5000), None, "its age is not known");
        assert_eq!(remaining(ttl, cache::meta::ALWAYS_MS, 5), ttl);
        assert_eq!(remaining(None, 0, u64::MAX), Some(FOR_EVER));
        assert_eq!(remaining(Some(Duration::ZERO), 5, 5), None);
    }
}
