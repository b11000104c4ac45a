//! Who reads in sequence, and how far ahead to fetch for them. Pure: offsets in, goals out.

use std::ops::Range;

/// Window of a stream that starts at offset 0: such a reader nearly always goes on.
const FIRST_WINDOW: u64 = 2 << 20;
/// Window of a stream that was recognised in the middle of a file.
const LATE_WINDOW: u64 = 512 << 10;
/// How far apart two reads may arrive and still be one stream: the kernel's readahead is not strictly ordered.
const SLACK: u64 = 1 << 20;
const STREAMS_MAX: usize = 16;

/// The sequential readers of one file.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    list: Vec<Stream>,
    clock: u64,
}

#[derive(Clone, Debug)]
struct Stream {
    /// Where the next read is expected.
    next: u64,
    /// Everything before this offset was asked for.
    ahead: u64,
    /// 0: one read seen, not yet a stream.
    window: u64,
    used: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub size: u64,
    pub window_max: u64,
    pub part: u64,
}

/// What a read asks for beyond itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Goal {
    /// Have everything up to here fetched or under way (byte offset, not rounded).
    pub ahead: u64,
    /// When the reader passes this offset, more is wanted.
    pub mark: Option<u64>,
}

impl Streams {
    pub(crate) fn note(&mut self, range: Range<u64>, limits: Limits) -> Goal {
        self.clock += 1;
        let clock = self.clock;
        if limits.window_max == 0 {
            return Goal { ahead: range.end, mark: None };
        }
        if let Some(stream) = self.list.iter_mut().find(|s| s.expects(&range)) {
            stream.used = clock;
            return stream.extend(range.end, limits);
        }
        let mut stream = Stream { next: range.end, ahead: range.end, window: 0, used: clock };
        let mut goal = Goal { ahead: range.end, mark: None };
        if range.start == 0 {
            stream.window = FIRST_WINDOW.min(limits.window_max);
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
    pub(crate) fn advance(&mut self, offset: u64, limits: Limits) -> Goal {
        match self.list.iter_mut().find(|s| s.window > 0 && s.expects(&(offset..offset))) {
            Some(stream) => stream.extend(offset, limits),
            None => Goal { ahead: offset, mark: None },
        }
    }

    /// Ranges that streams have asked for and that may still be missing.
    pub(crate) fn wanted(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.list.iter().filter(|s| s.window > 0 && s.next < s.ahead).map(|s| s.next..s.ahead)
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

    fn extend(&mut self, position: u64, limits: Limits) -> Goal {
        self.next = self.next.max(position);
        if self.window == 0 {
            self.window = LATE_WINDOW.min(limits.window_max);
        }
        if self.next + self.window >= self.ahead + self.step(limits) {
            self.window = (self.window * 2).min(limits.window_max);
            // Rounded, or every step would leave a sliver for a request of its own.
            let ahead = (self.next + self.window).next_multiple_of(self.step(limits));
            self.ahead = self.ahead.max(ahead).min(limits.size);
        }
        Goal { ahead: self.ahead, mark: self.mark(limits) }
    }

    /// How much room the window must have before another GET is worth it.
    fn step(&self, limits: Limits) -> u64 {
        (self.window / 2).clamp(1, limits.part)
    }

    fn mark(&self, limits: Limits) -> Option<u64> {
        (self.ahead < limits.size).then(|| (self.ahead + self.step(limits)).saturating_sub(self.window))
    }
}
