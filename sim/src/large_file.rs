//! A program that reads a large file from its beginning over a link: how far ahead is fetched, and in which parts, is decided
//! by the product's own [`Streams`] and [`parts`]; link, cache and program are simulated.
//!
//! ```text
//!  program ──read──► there? ──yes──► past the mark? ──yes──► Streams::advance ──► parts
//!                      │ no                                                         ▲
//!                      └──► Streams::note ──────────────────────────────────────────┘
//! ```

use crate::queue::Queue;
use anyhow::{Result, ensure};
use cache::data::Reading;
use cache::data::stream::{Goal, Limits, Missing, Streams, parts};
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::ops::Range;
use std::time::Duration;

const BLOCK: u64 = 256 << 10;

/// Sizes are bytes, rates bytes per second.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub size: u64,
    /// How much of it is read before the program has enough.
    pub read: u64,
    /// One read of the program.
    pub step: u64,
    pub program_rate: u64,
    pub round_trip: Duration,
    pub connection_rate: u64,
    pub reading: Reading,
    /// One request in so many breaks on its way; 0: none.
    pub breaking: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Summary {
    pub took: Duration,
    /// Bytes that came over the link.
    pub fetched: u64,
    pub requests: usize,
    /// Requests under way at once.
    pub most: usize,
    /// How often the program had to ask for bytes.
    pub waits: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Block {
    Missing,
    Claimed,
    There,
}

struct Blocks(Vec<Block>);

impl Missing for Blocks {
    fn next_missing(&self, range: Range<u64>) -> Option<u64> {
        range.into_iter().find(|&k| self.0[k as usize] == Block::Missing)
    }
    fn end_of_missing(&self, range: Range<u64>) -> u64 {
        range.clone().find(|&k| self.0[k as usize] != Block::Missing).unwrap_or(range.end)
    }
}

#[derive(Debug)]
enum Ev {
    /// The program wants what comes next.
    Read,
    Arrives(u64),
    /// A request ends; what it did not bring is missing again.
    Ends(Range<u64>),
}

struct World {
    plan: Plan,
    rng: SmallRng,
    queue: Queue<Ev>,
    blocks: Blocks,
    streams: Streams,
    flights: usize,
    /// How far the program has come.
    at: u64,
    waits: bool,
    /// As a worker keeps it: when the agent is told, and after how much more again.
    mark: u64,
    stride: u64,
    summary: Summary,
}

/// Reads to the end, or as far as the plan says.
pub fn run(seed: u64, plan: Plan) -> Result<Summary> {
    let mut world = World {
        plan,
        rng: SmallRng::seed_from_u64(seed),
        queue: Queue::new(),
        blocks: Blocks(vec![Block::Missing; plan.size.div_ceil(BLOCK) as usize]),
        streams: Streams::default(),
        flights: 0,
        at: 0,
        waits: false,
        mark: u64::MAX,
        stride: 0,
        summary: Summary::default(),
    };
    world.queue.after(Duration::ZERO, Ev::Read);
    world.run()?;
    Ok(world.summary)
}

impl World {
    fn run(&mut self) -> Result<()> {
        let (end, mut took) = (self.plan.read.min(self.plan.size), None);
        // What is under way when the program ends still comes.
        while let Some(event) = self.queue.pop() {
            match event {
                Ev::Read => self.read(end),
                Ev::Arrives(block) => {
                    let block = &mut self.blocks.0[block as usize];
                    ensure!(*block == Block::Claimed, "a block came that nobody had asked for, or twice");
                    *block = Block::There;
                    self.summary.fetched += BLOCK;
                    if self.waits && self.is_there(end) {
                        self.waits = false;
                        self.queue.after(Duration::ZERO, Ev::Read);
                    }
                }
                Ev::Ends(left) => self.ends(left, end),
            }
            self.summary.most = self.summary.most.max(self.flights);
            if self.at == end {
                took.get_or_insert(self.queue.elapsed());
            }
        }
        ensure!(self.at == end, "the program waits for ever at {} of {end}", self.at);
        ensure!(self.flights == 0, "{} requests are under way at the end", self.flights);
        self.summary.took = took.unwrap_or_default();
        Ok(())
    }

    fn limits(&self) -> Limits {
        Limits { size: self.plan.size, reading: self.plan.reading }
    }

    fn range(&self, end: u64) -> Range<u64> {
        self.at..(self.at + self.plan.step).min(end)
    }

    fn blocks_of(&self, bytes: &Range<u64>) -> Range<u64> {
        bytes.start / BLOCK..bytes.end.div_ceil(BLOCK)
    }

    fn is_there(&self, end: u64) -> bool {
        self.blocks_of(&self.range(end)).all(|k| self.blocks.0[k as usize] == Block::There)
    }

    fn read(&mut self, end: u64) {
        let range = self.range(end);
        if range.is_empty() {
            return;
        }
        if self.is_there(end) {
            let rate = self.plan.program_rate as f64;
            self.queue.after(Duration::from_secs_f64((range.end - range.start) as f64 / rate), Ev::Read);
            self.at = range.end;
            if self.at > self.mark {
                self.mark = self.mark.saturating_add(self.stride).max(self.at);
                self.streams.advance(self.at, self.limits());
                self.fetch_ahead();
            }
            return;
        }
        self.summary.waits += 1;
        self.waits = true;
        let Goal { ahead, mark } = self.streams.note(range.clone(), self.limits());
        if let Some(mark) = mark {
            (self.mark, self.stride) = (mark, mark.saturating_sub(range.end).max(1));
        }
        self.start(self.blocks_of(&range), ahead);
    }

    fn fetch_ahead(&mut self) {
        let wanted: Vec<Range<u64>> = self.streams.wanted().map(|(bytes, _)| bytes).collect();
        for bytes in wanted {
            let first = bytes.start / BLOCK;
            self.start(first..first, bytes.end);
        }
    }

    fn start(&mut self, want: Range<u64>, ahead: u64) {
        let reading = self.plan.reading;
        let ahead = ahead.div_ceil(BLOCK).clamp(want.end, self.blocks.0.len() as u64);
        let slots = reading.parallel_parts.saturating_sub(self.flights);
        for part in parts(&self.blocks, &want, ahead, (reading.part_bytes / BLOCK).max(1), slots) {
            part.clone().for_each(|k| self.blocks.0[k as usize] = Block::Claimed);
            self.flights += 1;
            self.summary.requests += 1;
            let breaks = self.plan.breaking > 0 && self.rng.random_range(0..self.plan.breaking) == 0;
            let until = if breaks { self.rng.random_range(part.clone()) } else { part.end };
            let block = Duration::from_secs_f64(BLOCK as f64 / self.plan.connection_rate as f64);
            let mut at = self.plan.round_trip;
            for k in part.start..until {
                at += block;
                self.queue.after(at, Ev::Arrives(k));
            }
            self.queue.after(at, Ev::Ends(until..part.end));
        }
    }

    fn ends(&mut self, left: Range<u64>, end: u64) {
        self.flights -= 1;
        for k in left {
            self.blocks.0[k as usize] = Block::Missing;
        }
        // Who waits looks again, as after any failure.
        if std::mem::take(&mut self.waits) {
            let missing =
                self.blocks_of(&self.range(end)).any(|k| self.blocks.0[k as usize] == Block::Missing);
            match missing {
                true => self.queue.after(Duration::ZERO, Ev::Read),
                false => self.waits = true,
            }
        }
        self.fetch_ahead();
    }
}
