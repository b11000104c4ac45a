//! Programs that read the small files of one directory over a slow link: which files are fetched ahead is decided by the
//! product's own [`Ledger`], the link, the cache and the programs are simulated.
//!
//! ```text
//!  program ──read──► cached? ──yes──► next file
//!                      │ no
//!                      ├──► Ledger::missed ──► files ahead, so many at once ──┐
//!                      └──► the file itself ─────────────────────────────────►├──► slots of the link ──► cached
//! ```

use crate::queue::Queue;
use anyhow::{Result, ensure};
use node_agent::prefetch::ledger::{Ledger, at_once};
use rand::rngs::SmallRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};
use std::collections::VecDeque;
use std::time::Duration;

#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub files: usize,
    /// Of them, in a random order, each once.
    pub read: usize,
    pub programs: usize,
    /// Requests for bodies that the node may have under way.
    pub slots: usize,
    pub round_trip: Duration,
    /// What a program does with a file that is there.
    pub work: Duration,
    /// One request in so many fails; 0: none.
    pub failing: u32,
    /// How often the agent dies.
    pub deaths: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    pub took: Duration,
    /// Files that came over the link.
    pub fetched: usize,
    /// Requests that brought nothing: they failed, or their agent died.
    pub lost: usize,
    /// Requests under way at once.
    pub most: usize,
}

#[derive(Debug)]
enum Ev {
    Read { program: usize, file: usize },
    Arrives { file: usize, life: usize },
    AgentDies,
}

#[derive(Debug, Default)]
enum Content {
    #[default]
    Absent,
    /// Under way, and who waits for it.
    Asked {
        programs: Vec<usize>,
        /// One of those that are fetched ahead.
        is_ahead: bool,
    },
    Cached,
}

struct World {
    plan: Plan,
    rng: SmallRng,
    queue: Queue<Ev>,
    contents: Vec<Content>,
    /// What the programs have still to read.
    unread: Vec<usize>,
    at_work: usize,
    ledger: Ledger,
    /// Files to be fetched ahead that no slot was free for yet.
    ahead: VecDeque<usize>,
    is_paying: bool,
    ahead_now: usize,
    /// Waiting for one of the link's slots.
    waiting: VecDeque<usize>,
    under_way: usize,
    life: usize,
    summary: Summary,
}

/// Reads `plan.read` files to the end.
pub fn run(seed: u64, plan: Plan) -> Result<Summary> {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut unread: Vec<usize> = (0..plan.files).collect();
    unread.shuffle(&mut rng);
    unread.truncate(plan.read);
    let queue = Queue::new();
    let ledger = Ledger::new(queue.now());
    let mut world = World {
        plan,
        rng,
        queue,
        contents: std::iter::repeat_with(Content::default).take(plan.files).collect(),
        unread,
        at_work: 0,
        ledger,
        ahead: VecDeque::new(),
        is_paying: false,
        ahead_now: 0,
        waiting: VecDeque::new(),
        under_way: 0,
        life: 0,
        summary: Summary::default(),
    };
    world.run()?;
    Ok(world.summary)
}

impl World {
    fn run(&mut self) -> Result<()> {
        (0..self.plan.programs).for_each(|program| self.go_on(program));
        // About as long as the whole takes if nothing is fetched ahead.
        let whole = self.plan.round_trip * (self.plan.read / self.plan.programs.max(1)) as u32;
        for _ in 0..self.plan.deaths {
            let at = whole.mul_f64(self.rng.random());
            self.queue.after(at, Ev::AgentDies);
        }
        while self.at_work > 0 {
            let Some(event) = self.queue.pop() else {
                anyhow::bail!("{} programs wait for ever: {:?}", self.at_work, self.ledger);
            };
            match event {
                Ev::Read { program, file } => self.read(program, file),
                Ev::Arrives { file, life } if life == self.life => self.arrives(file),
                Ev::Arrives { .. } => {}
                Ev::AgentDies => self.agent_dies(),
            }
            ensure!(self.under_way <= self.plan.slots, "{} requests at once", self.under_way);
            ensure!(self.ahead_now <= at_once(self.plan.slots), "{} files ahead at once", self.ahead_now);
            self.summary.most = self.summary.most.max(self.under_way);
        }
        self.summary.took = self.queue.elapsed();
        Ok(())
    }

    fn go_on(&mut self, program: usize) {
        if let Some(file) = self.unread.pop() {
            self.at_work += 1;
            self.queue.after(self.plan.work, Ev::Read { program, file });
        }
    }

    fn read(&mut self, program: usize, file: usize) {
        match &mut self.contents[file] {
            Content::Cached => {
                self.at_work -= 1;
                return self.go_on(program);
            }
            Content::Asked { programs, .. } => programs.push(program),
            Content::Absent => self.ask(file, vec![program], false),
        }
        if self.ledger.missed(self.queue.now()) {
            self.is_paying = true;
        }
        self.pay();
    }

    /// What is owed, as far as files may be fetched ahead at once.
    fn pay(&mut self) {
        while self.is_paying && self.ahead_now < at_once(self.plan.slots) {
            let Some(file) = self.ahead.pop_front() else {
                self.look_further();
                continue;
            };
            match &mut self.contents[file] {
                Content::Cached => {}
                // One wait for both.
                Content::Asked { is_ahead, .. } => {
                    self.ahead_now += usize::from(!std::mem::replace(is_ahead, true))
                }
                Content::Absent => {
                    self.ahead_now += 1;
                    self.ask(file, Vec::new(), true);
                }
            }
        }
    }

    fn look_further(&mut self) {
        let Some((owed, after)) = self.ledger.due(true) else {
            self.is_paying = false;
            return;
        };
        let first = after.map_or(0, |last| last as usize + 1);
        let absent = (first..self.plan.files).filter(|&k| !matches!(self.contents[k], Content::Cached));
        self.ahead = absent.take(owed as usize).collect();
        let last = self.ahead.back().map(|&k| k as u64).or(after);
        self.is_paying = self.ledger.found(self.ahead.len() as u32, last, self.queue.now());
    }

    fn ask(&mut self, file: usize, programs: Vec<usize>, is_ahead: bool) {
        self.contents[file] = Content::Asked { programs, is_ahead };
        self.waiting.push_back(file);
        self.send();
    }

    fn send(&mut self) {
        while self.under_way < self.plan.slots
            && let Some(file) = self.waiting.pop_front()
        {
            self.under_way += 1;
            self.queue.after(self.plan.round_trip, Ev::Arrives { file, life: self.life });
        }
    }

    fn arrives(&mut self, file: usize) {
        self.under_way -= 1;
        let failed = self.plan.failing > 0 && self.rng.random_range(0..self.plan.failing) == 0;
        let becomes = if failed { Content::Absent } else { Content::Cached };
        let Content::Asked { programs, is_ahead } = std::mem::replace(&mut self.contents[file], becomes)
        else {
            unreachable!("only what was asked for arrives");
        };
        self.ahead_now -= usize::from(is_ahead);
        if failed {
            self.summary.lost += 1;
            if is_ahead {
                self.ledger.failed();
            }
        } else {
            self.summary.fetched += 1;
        }
        self.send();
        for program in programs {
            self.queue.after(Duration::ZERO, Ev::Read { program, file });
        }
        self.pay();
    }

    /// What it knew of its readers is forgotten, what it had asked for is lost; workers ask its successor again.
    fn agent_dies(&mut self) {
        self.life += 1;
        self.summary.lost += self.under_way;
        (self.under_way, self.ahead_now, self.is_paying) = (0, 0, false);
        (self.waiting, self.ahead) = Default::default();
        self.ledger = Ledger::new(self.queue.now());
        for file in 0..self.contents.len() {
            if let Content::Asked { programs, .. } = &mut self.contents[file] {
                let programs = std::mem::take(programs);
                self.contents[file] = Content::Absent;
                for program in programs {
                    self.queue.after(self.plan.round_trip, Ev::Read { program, file });
                }
            }
        }
    }
}
