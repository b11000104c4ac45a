//! Who reads in sequence, and how far ahead to fetch for them. Pure: offsets in, goals out.
//!
//! A window doubles while its reader finds what it wants, and is at most twice what that reader has read so far. When
//! the reader had to ask, the round trip to the store is longer than the window is deep: small steps would each cost
//! another one, so it quadruples, up to eight times what has been read.

use super::config::Reading;
use std::ops::Range;

/// Window of a stream that starts at offset 0: such a reader nearly always goes on.
const FIRST_WINDOW: u64 = 4 << 20;
/// Window of a stream that was recognised in the middle of a file.
const LATE_WINDOW: u64 = 512 << 10;
/// How far apart two reads may arrive and still be one stream: the kernel's readahead is not strictly ordered.
const SLACK: u64 = 1 << 20;
const STREAMS_MAX: usize = 16;

/// The sequential readers of one file.
#[derive(Debug, Default)]
pub struct Streams {
    list: Vec<Stream>,
    clock: u64,
}

/// Why a window is looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    /// The reader asked for bytes: it waits, or nearly did.
    Waits,
    /// The reader came by without asking.
    Passes,
}

#[derive(Clone, Debug)]
struct Stream {
    /// Where it began.
    first: u64,
    /// Where the next read is expected.
    next: u64,
    /// Everything before this offset was asked for.
    ahead: u64,
    /// 0: one read seen, not yet a stream.
    window: u64,
    /// Of its last reader.
    reading: Reading,
    used: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub size: u64,
    pub reading: Reading,
}

/// What a read asks for beyond itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Goal {
    /// Have everything up to here fetched or under way (byte offset, not rounded).
    pub ahead: u64,
    /// When the reader passes this offset, more is wanted.
    pub mark: Option<u64>,
}

impl Streams {
    pub fn note(&mut self, range: Range<u64>, limits: Limits) -> Goal {
        self.clock += 1;
        let clock = self.clock;
        if limits.reading.readahead_bytes == 0 {
            return Goal { ahead: range.end, mark: None };
        }
        if let Some(stream) = self.list.iter_mut().find(|s| s.expects(&range)) {
            stream.used = clock;
            return stream.extend(range.end, Why::Waits, limits);
        }
        let mut stream = Stream {
            first: range.start,
            next: range.end,
            ahead: range.end,
            window: 0,
            reading: limits.reading,
            used: clock,
        };
        let mut goal = Goal { ahead: range.end, mark: None };
        if range.start == 0 {
            stream.window = FIRST_WINDOW.min(limits.reading.readahead_bytes);
            stream.ahead = (range.end + stream.window).min(limits.size);
            goal = Goal { ahead: stream.ahead, mark: stream.mark(limits) };
        }
        if self.list.len() == STREAMS_MAX {
            // One-read guesses go first: random readers must not push out the real streams.
            let worst = (0..STREAMS_MAX).min_by_key(|&k| (self.list[k].window > 0, self.list[k].used));
            self.list.swap_remove(worst.expect("the list is full"));
        }
        self.list.push(stream);
        goal
    }

    /// A reader has come to `offset` without asking the engine for bytes.
    pub fn advance(&mut self, offset: u64, limits: Limits) -> Goal {
        match self.list.iter_mut().find(|s| s.window > 0 && s.expects(&(offset..offset))) {
            Some(stream) => stream.extend(offset, Why::Passes, limits),
            None => Goal { ahead: offset, mark: None },
        }
    }

    /// Ranges that streams have asked for and that may still be missing, and how they are brought.
    pub fn wanted(&self) -> impl Iterator<Item = (Range<u64>, Reading)> + '_ {
        self.list.iter().filter(|s| s.window > 0 && s.next < s.ahead).map(|s| (s.next..s.ahead, s.reading))
    }

    /// How far the longest stream has come, bytes.
    pub(crate) fn longest(&self) -> u64 {
        self.list.iter().filter(|s| s.window > 0).map(|s| s.next - s.first).max().unwrap_or(0)
    }

    pub(crate) fn is_sequential(&self, offset: u64) -> bool {
        self.list.iter().any(|s| s.window > 0 && s.expects(&(offset..offset)))
    }
}

impl Stream {
    fn expects(&self, range: &Range<u64>) -> bool {
        if self.window == 0 {
            return range.start == self.next;
        }
        range.start + self.window.max(SLACK) >= self.next && range.start <= self.ahead.saturating_add(SLACK)
    }

    fn extend(&mut self, position: u64, why: Why, limits: Limits) -> Goal {
        self.next = self.next.max(position);
        self.reading = limits.reading;
        if self.window == 0 {
            self.window = LATE_WINDOW.min(limits.reading.readahead_bytes);
        }
        if self.next + self.window >= self.ahead + self.step(limits) {
            let (growth, reach) = match why {
                Why::Waits => (4, 8),
                Why::Passes => (2, 2),
            };
            let earned = (self.next - self.first.min(self.next)).saturating_mul(reach).max(self.window);
            self.window = (self.window * growth).min(earned).min(limits.reading.readahead_bytes);
            // Rounded, or every step would leave a sliver for a request of its own.
            let ahead = (self.next + self.window).next_multiple_of(self.step(limits));
            self.ahead = self.ahead.max(ahead).min(limits.size);
        }
        Goal { ahead: self.ahead, mark: self.mark(limits) }
    }

    /// How much room the window must have before another GET is worth it.
    fn step(&self, limits: Limits) -> u64 {
        (self.window / 2).clamp(1, limits.reading.part_bytes)
    }

    fn mark(&self, limits: Limits) -> Option<u64> {
        (self.ahead < limits.size).then(|| (self.ahead + self.step(limits)).saturating_sub(self.window))
    }
}

/// Which blocks of a file are neither there nor under way.
pub trait Missing {
    /// The first of them in `range`.
    fn next_missing(&self, range: Range<u64>) -> Option<u64>;
    /// Where the run of them that begins with `range` ends, within it.
    fn end_of_missing(&self, range: Range<u64>) -> u64;
}

/// Missing blocks as ranges of at most `part` blocks: all that begin within `want`, and up to `slots` in all that lie
/// before `ahead`. Parts end at multiples of `part`, so that two readers' parts meet without leaving slivers.
pub fn parts(
    blocks: &impl Missing,
    want: &Range<u64>,
    ahead: u64,
    part: u64,
    slots: usize,
) -> Vec<Range<u64>> {
    let mut parts: Vec<Range<u64>> = Vec::new();
    let mut k = want.start;
    let last = ahead.max(want.end);
    while let Some(first) = blocks.next_missing(k..last) {
        if first >= want.end && parts.len() >= slots {
            break;
        }
        let limit = ((first / part + 1) * part).min(last);
        k = blocks.end_of_missing(first..limit);
        parts.push(first..k);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const READING: Reading = Reading { readahead_bytes: 256 * MIB, part_bytes: 8 * MIB, parallel_parts: 32 };
    const LIMITS: Limits = Limits { size: 4096 * MIB, reading: READING };

    #[test]
    fn a_reader_that_waits_gets_the_widest_window_after_a_few_questions() {
        let (mut streams, mut at, mut questions) = (Streams::default(), 0, 0);
        let mut ahead = 0;
        while ahead < at + LIMITS.reading.readahead_bytes {
            ahead = streams.note(at..at + MIB, LIMITS).ahead;
            at += MIB;
            questions += 1;
        }
        assert!(questions <= 40, "{questions} questions, at {} MiB", at / MIB);
    }

    #[test]
    fn a_reader_that_finds_its_bytes_is_not_fetched_further_ahead_than_it_has_come_twice_over() {
        let mut streams = Streams::default();
        let mut goal = streams.note(0..MIB, LIMITS);
        while let Some(mark) = goal.mark {
            assert!(
                goal.ahead - mark
                    <= (2 * mark + LIMITS.reading.part_bytes).min(LIMITS.reading.readahead_bytes),
                "{goal:?}"
            );
            goal = streams.advance(mark + 1, LIMITS);
        }
        assert_eq!(goal.ahead, LIMITS.size);
    }

    #[test]
    fn one_read_of_the_beginning_fetches_little() {
        assert!(Streams::default().note(0..128 << 10, LIMITS).ahead <= 5 * MIB);
    }
}
