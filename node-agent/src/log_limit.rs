//! What a tenant can bring about as often as it likes is not logged as often.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// So many lines in so long a time.
const LINES: u32 = 10;
const TIME: Duration = Duration::from_secs(60);

/// One for each kind of line of each source.
#[derive(Debug, Default)]
pub(crate) struct Seldom(Mutex<Said>);

#[derive(Debug, Default)]
struct Said {
    since: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Seldom {
    /// None: the line is left out. Some: it is said, and of how many were left out before it, if any.
    pub(crate) fn say(&self) -> Option<Option<u64>> {
        self.say_at(Instant::now())
    }

    fn say_at(&self, now: Instant) -> Option<Option<u64>> {
        let mut said = self.0.lock().unwrap_or_else(PoisonError::into_inner); // numbers
        if said.since.is_none_or(|since| now.saturating_duration_since(since) >= TIME) {
            *said = Said { since: Some(now), lines: 0, left_out: said.left_out };
        }
        if said.lines == LINES {
            said.left_out += 1;
            return None;
        }
        said.lines += 1;
        let left_out = std::mem::take(&mut said.left_out);
        Some((left_out > 0).then_some(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_lines_are_said_and_of_the_others_how_many_there_were() {
        let (seldom, begun) = (Seldom::default(), Instant::now());
        for line in 0..1000 {
            let said = seldom.say_at(begun + TIME / 2000 * line);
            assert_eq!(said, (line < LINES).then_some(None), "{line}");
        }
        assert_eq!(seldom.say_at(begun + TIME), Some(Some(1000 - u64::from(LINES))));
        assert_eq!(seldom.say_at(begun + TIME), Some(None));
    }
}
