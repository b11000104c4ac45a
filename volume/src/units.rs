//! Sizes and durations as people write them.

use std::time::Duration;

/// `4096`, `64Ki`, `8Mi`, `1Gi`, `1Ti` (powers of 1024) or `k`, `M`, `G`, `T` (powers of 1000), as in Kubernetes quantities.
pub fn parse_bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (digits, unit) = text.split_at(split);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "k" | "K" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "Ki" | "KiB" => 1 << 10,
        "Mi" | "MiB" => 1 << 20,
        "Gi" | "GiB" => 1 << 30,
        "Ti" | "TiB" => 1 << 40,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

/// `30s`, `5m`, `500ms`, `1h 30m`; a bare number is refused, because its unit would be a guess.
pub fn parse_duration(text: &str) -> Option<Duration> {
    humantime::parse_duration(text.trim()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_follow_kubernetes() {
        assert_eq!(parse_bytes("64Ki"), Some(65536));
        assert_eq!(parse_bytes("1G"), Some(1_000_000_000));
        assert_eq!(parse_bytes("0"), Some(0));
        for bad in ["", "Gi", "-1", "1.5Gi", "1Xi", "99999999999Ti"] {
            assert_eq!(parse_bytes(bad), None, "{bad:?}");
        }
        assert_eq!(parse_duration("1m 30s"), Some(Duration::from_secs(90)));
        assert_eq!(parse_duration("30"), None);
    }
}
