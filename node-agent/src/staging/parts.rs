//! Where the parts of an upload begin and end, whatever the size that the file will have: the first thousand have 8 MiB, each
//! following thousand twice as much, so that ten thousand of them hold more than the largest object.

/// Bytes of each of the first. (Histories are to have files of many parts.)
pub(super) const FIRST: u64 = if cfg!(test) { PRODUCT / SMALLER } else { PRODUCT };
const PRODUCT: u64 = 8 << 20;
const SMALLER: u64 = 1 << 10;
/// So many have the same size.
const STEP: u32 = 1000;

/// The part in which this byte lies; the first is 0.
pub(super) fn of(offset: u64) -> u32 {
    let (mut begin, mut bytes, mut number) = (0u64, FIRST, 0u32);
    loop {
        let step = bytes.saturating_mul(u64::from(STEP));
        match begin.checked_add(step) {
            Some(end) if offset >= end => (begin, bytes, number) = (end, bytes * 2, number + STEP),
            _ => return number + u32::try_from((offset - begin) / bytes).unwrap_or(STEP),
        }
    }
}

/// Of a file of so many bytes.
pub(super) fn count(bytes: u64) -> u32 {
    bytes.checked_sub(1).map_or(0, |last| of(last) + 1)
}

/// The bytes of a part, in a file without end.
pub(super) fn range(part: u32) -> std::ops::Range<u64> {
    let (doublings, within) = (part / STEP, u64::from(part % STEP));
    let bytes = FIRST << doublings;
    let begin = FIRST * u64::from(STEP) * ((1 << doublings) - 1) + within * bytes;
    begin..begin + bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_byte_lies_in_its_part(offset in 0..(5_u64 << 40) / SMALLER) {
            prop_assert!(range(of(offset)).contains(&offset));
        }

        #[test]
        fn parts_follow_each_other(part in 0..9_998_u32) {
            prop_assert_eq!(range(part).end, range(part + 1).start);
            prop_assert_eq!(of(range(part).start), part);
        }
    }

    #[test]
    fn ten_thousand_parts_hold_the_largest_object_and_none_is_too_large() {
        assert!(range(9_999).end * SMALLER > 5 << 40);
        assert!((range(9_999).end - range(9_999).start) * SMALLER <= 5 << 30);
        assert_eq!(range(0), 0..FIRST);
        assert_eq!([count(0), count(1), count(FIRST), count(FIRST + 1)], [0, 1, 1, 2]);
    }
}
