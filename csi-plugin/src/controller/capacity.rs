//! The size of a volume that has none: recorded and echoed, so that a repeated request can be compared.

use crate::status::Failure;
use proto::csi::v1::CapacityRange;

/// A checked range; 0 means unset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    required: i64,
    limit: i64,
}

impl Range {
    pub fn parse(range: Option<&CapacityRange>) -> Result<Self, Failure> {
        let Some(range) = range else { return Ok(Self::default()) };
        let (required, limit) = (range.required_bytes, range.limit_bytes);
        if required < 0 || limit < 0 {
            return Err(Failure::OutOfRange("capacity_range must not be negative".into()));
        }
        if limit > 0 && required > limit {
            return Err(Failure::OutOfRange(format!(
                "capacity_range asks for at least {required} and at most {limit} bytes"
            )));
        }
        Ok(Self { required, limit })
    }

    /// What a new volume of this range gets.
    pub fn chosen(self) -> i64 {
        self.required
    }

    /// Does a volume of this size satisfy the range?
    pub fn accepts(self, bytes: i64) -> bool {
        bytes >= self.required && (self.limit == 0 || bytes <= self.limit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(required_bytes: i64, limit_bytes: i64) -> Result<Range, Failure> {
        Range::parse(Some(&CapacityRange { required_bytes, limit_bytes }))
    }

    #[test]
    fn ranges_accept_what_they_chose() {
        for r in [range(0, 0), range(10, 0), range(10, 20), range(0, 20), Range::parse(None)] {
            let r = r.unwrap();
            assert!(r.accepts(r.chosen()), "{r:?}");
        }
        assert!(!range(20, 0).unwrap().accepts(10));
        assert!(!range(0, 5).unwrap().accepts(10));
        assert!(matches!(range(-1, 0), Err(Failure::OutOfRange(_))));
        assert!(matches!(range(30, 20), Err(Failure::OutOfRange(_))));
    }
}
