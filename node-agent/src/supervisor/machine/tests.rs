use super::*;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;

const LIMITS: Limits = Limits { heal_timeout: Duration::from_secs(60), hang_limit: Duration::from_secs(10) };

fn signal(number: i32) -> Option<ExitStatus> {
    Some(ExitStatus::from_raw(number))
}

fn killed() -> Event {
    Event::Reaped { status: signal(libc::SIGKILL), oom: false }
}

fn left(orphans: u64) -> Event {
    Event::Collected { orphans, ended: false }
}

/// A machine at a time of its own.
struct Bench {
    machine: Machine,
    now: Instant,
}

impl Bench {
    fn published() -> Self {
        let now = Instant::now();
        let (machine, actions) = Machine::publish(LIMITS, now);
        assert_eq!(actions, [Action::Introduce { takeover: false }]);
        Self { machine, now }
    }

    fn serving() -> Self {
        let mut bench = Self::published();
        assert!(bench.on(Event::Introduced).is_empty(), "it waits for Go");
        assert_eq!(bench.on(Event::Go), [Action::SendGo]);
        assert_eq!(bench.on(Event::Serves), [Action::Confine], "a first start is no heal");
        bench
    }

    fn on(&mut self, event: Event) -> Vec<Action> {
        self.machine.on(event, self.now)
    }

    /// At its deadline.
    fn tick(&mut self) -> Vec<Action> {
        self.now = self.machine.deadline().unwrap();
        self.on(Event::Tick)
    }

    fn after(&mut self, time: Duration) -> &mut Self {
        self.now += time;
        self
    }
}

#[test]
fn a_worker_that_is_killed_has_a_successor_at_once_which_takes_over_and_proves_it() {
    let mut bench = Bench::serving();
    assert_eq!(bench.on(Event::Closed), [Action::KillAndReap]);
    assert_eq!(bench.machine.phase(), Phase::Serving, "until it is known how it ended");
    assert_eq!(bench.on(killed()), [Action::Collect { blame: Blame::Nobody, vacate: false }]);
    assert_eq!(bench.machine.phase(), Phase::Dead);
    assert_eq!(bench.on(left(7)), [Action::Introduce { takeover: true }]);
    let took = Duration::from_millis(30);
    assert_eq!(bench.after(took).on(Event::Introduced), [Action::SendGo], "it has its INIT reply");
    assert_eq!(bench.machine.phase(), Phase::Dead, "until it says that it serves");
    let proof = Action::Prove { cause: HealCause::Signal, replayed: 7, took };
    assert_eq!(bench.on(Event::Serves), [Action::Confine, proof]);
    assert!(bench.on(Event::Serves).is_empty(), "it is proved once");
}

#[test]
fn blame_follows_how_a_worker_ended() {
    let blame = |event: Event, reaped: Event| {
        let mut bench = Bench::serving();
        assert_eq!(bench.on(event), [Action::KillAndReap]);
        match &bench.on(reaped)[..] {
            [Action::Collect { blame, vacate: false }] => *blame,
            other => panic!("{other:?}"),
        }
    };
    let oom = Event::Reaped { status: signal(libc::SIGKILL), oom: true };
    assert_eq!(blame(Event::Closed, killed()), Blame::Nobody);
    assert_eq!(blame(Event::Closed, oom), Blame::Executing);
    assert_eq!(blame(Event::Failed { why: "odd".into() }, killed()), Blame::Executing);
    assert_eq!(blame(Event::Waiting(true), killed()), Blame::Executing, "it hung");
    assert_eq!(blame(Event::Closed, Event::Reaped { status: None, oom: false }), Blame::Executing);
}

#[test]
fn what_an_agent_has_left_is_collected_when_its_workers_are_gone() {
    for (cause, collect) in [
        (HealCause::Agent, Action::Collect { blame: Blame::Agent, vacate: false }),
        (HealCause::AgentHang, Action::Collect { blame: Blame::Agent, vacate: false }),
        (HealCause::Upgrade, Action::Collect { blame: Blame::Nobody, vacate: true }),
    ] {
        let now = Instant::now();
        let (machine, actions) = Machine::adopt(LIMITS, now, cause);
        assert_eq!(actions, [Action::AwaitPredecessor]);
        let mut bench = Bench { machine, now };
        assert_eq!(bench.on(Event::PredecessorGone), [collect]);
        assert_eq!(bench.on(left(2)), [Action::Introduce { takeover: true }]);
        bench.on(Event::Introduced);
        let proof = Action::Prove { cause, replayed: 2, took: Duration::ZERO };
        assert_eq!(bench.on(Event::Serves), [Action::Confine, proof]);
    }
}

#[test]
fn workers_that_do_not_come_up_are_started_ever_more_rarely_until_the_mount_is_given_up() {
    let mut bench = Bench::serving();
    bench.on(Event::Closed);
    bench.on(killed());
    bench.on(left(0));
    let begun = bench.now;
    let (mut reported, mut tries) = (0, 0);
    let why = loop {
        tries += 1;
        let actions = bench.on(Event::NotIntroduced { why: "no".into() });
        reported += actions.iter().filter(|a| matches!(a, Action::ReportDegraded { .. })).count();
        match actions.last() {
            Some(Action::Abort { why }) => break why.clone(),
            Some(Action::Introduce { .. }) => {}
            _ => drop(bench.tick()),
        }
    };
    assert_eq!(reported, 1, "the owner gets one report");
    assert!(bench.now - begun >= LIMITS.heal_timeout && bench.now - begun < LIMITS.heal_timeout * 2);
    assert!((10..60).contains(&tries), "{tries}");
    assert!(why.contains("healTimeout") && why.contains("no"), "{why}");
    assert_eq!(bench.machine.why(), why, "status shows it");
    assert!(bench.on(Event::Aborted { is_known: true }).is_empty());
    assert_eq!(bench.machine.phase(), Phase::Failed);
}

#[test]
fn an_owner_who_was_told_that_calls_wait_is_told_that_they_go_on() {
    let mut bench = Bench::serving();
    bench.on(Event::Closed);
    bench.on(killed());
    bench.on(left(0));
    while bench.machine.state().name() == "Introducing" {
        bench.on(Event::NotIntroduced { why: "no".into() });
    }
    bench.tick();
    bench.on(Event::Introduced);
    assert_eq!(bench.on(Event::Serves).last(), Some(&Action::ReportRecovered));
}

#[test]
fn a_worker_that_stands_still_is_replaced_only_while_requests_wait() {
    let mut bench = Bench::serving();
    let mut asked = 0;
    bench.on(Event::Heartbeat(1));
    for _ in 0..40 {
        if bench.after(TICK).on(Event::Heartbeat(1)) == [Action::AskWaiting] {
            asked += 1;
            assert!(bench.on(Event::Waiting(false)).is_empty());
        }
    }
    assert_eq!(asked, 31, "from half of its limit on");
    assert!(bench.after(TICK).on(Event::Heartbeat(2)).is_empty(), "it moves");
    bench.after(LIMITS.hang_limit);
    for _ in 0..10 {
        bench.after(TICK).on(Event::Heartbeat(2));
    }
    assert_eq!(bench.on(Event::Waiting(true)), [Action::KillAndReap]);
    bench.on(killed());
    bench.on(left(0));
    bench.on(Event::Introduced);
    let proof = bench.on(Event::Serves).pop();
    assert!(matches!(proof, Some(Action::Prove { cause: HealCause::Hang, .. })), "{proof:?}");
}

#[test]
fn a_worker_that_never_serves_and_a_publish_that_nobody_completes_end_in_time() {
    let mut bench = Bench::published();
    bench.on(Event::Introduced);
    bench.on(Event::Go);
    assert_eq!(bench.tick(), [Action::KillAndReap]);
    let mut bench = Bench::published();
    bench.on(Event::Introduced);
    assert_eq!(bench.tick(), [Action::Drop, Action::KillAndReap]);
    assert!(bench.on(killed()).is_empty());
    assert_eq!(bench.machine.state(), &State::Over(Outcome::Stopped));
}

#[test]
fn a_connection_that_somebody_has_ended_has_no_successor() {
    let mut bench = Bench::serving();
    bench.on(Event::Closed);
    bench.on(killed());
    assert_eq!(bench.on(Event::Collected { orphans: 0, ended: true }), [Action::NoteEnded]);
    assert_eq!((bench.machine.phase(), bench.machine.is_over()), (Phase::Failed, true));
}

/// The world as it might be: answers to what the machine asks, and everything else at any time.
struct Walk {
    rng: SmallRng,
    bench: Bench,
    /// Actions that wait for their event.
    asked: Option<Action>,
    /// Hardly anything happens, and the worker stands still.
    is_quiet: bool,
    seen: BTreeSet<(&'static str, &'static str, &'static str)>,
    introduced: u32,
    degraded: i32,
}

impl Walk {
    fn new(seed: u64) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let now = Instant::now();
        let causes = [HealCause::Agent, HealCause::AgentHang, HealCause::Upgrade];
        let (machine, actions) = match rng.random_range(0..3) {
            0 => Machine::adopt(LIMITS, now, causes[rng.random_range(0..3)]),
            _ => Machine::publish(LIMITS, now),
        };
        let bench = Bench { machine, now };
        let introduced = u32::from(matches!(actions[..], [Action::Introduce { .. }]));
        let asked = actions.into_iter().next();
        let is_quiet = rng.random_range(0..4) == 0;
        Self { rng, bench, asked, is_quiet, seen: BTreeSet::new(), introduced, degraded: 0 }
    }

    fn answer(&mut self, action: &Action) -> Option<Event> {
        let dice = self.rng.random_range(0..100);
        let time = Duration::from_millis(self.rng.random_range(0..2000));
        self.bench.now += if dice < 10 { time * 20 } else { time / 20 };
        Some(match action {
            Action::AwaitPredecessor => Event::PredecessorGone,
            Action::Introduce { .. } if dice < 30 => Event::NotIntroduced { why: "no".into() },
            Action::Introduce { .. } if dice < 35 => Event::Suspended,
            Action::Introduce { .. } => Event::Introduced,
            Action::SendGo if dice < 10 => Event::Closed,
            Action::AskWaiting => Event::Waiting(dice < 50),
            Action::KillAndReap => {
                let status = [signal(libc::SIGKILL), signal(libc::SIGABRT), None][dice % 3];
                Event::Reaped { status, oom: dice < 20 }
            }
            Action::Collect { .. } => Event::Collected { orphans: dice as u64, ended: dice < 5 },
            Action::Abort { .. } => Event::Aborted { is_known: dice % 2 == 0 },
            _ => return None,
        })
    }

    fn chance(&mut self) -> Event {
        let dice = self.rng.random_range(0..100);
        self.bench.now += Duration::from_millis(self.rng.random_range(0..700));
        if self.is_quiet && dice < 98 && self.bench.machine.phase() != Phase::Answered {
            return if dice < 2 { Event::Serves } else { Event::Heartbeat(7) };
        }
        match dice {
            0..15 => Event::Serves,
            15..30 => Event::Go,
            30..40 => Event::Closed,
            40..45 => Event::Failed { why: "odd".into() },
            45..65 => Event::Heartbeat(self.rng.random_range(0..2)),
            65..70 => Event::Resumed,
            70..72 => Event::Stop,
            _ => {
                let due = self.bench.machine.deadline().filter(|_| dice < 90);
                self.bench.now = self.bench.now.max(due.unwrap_or(self.bench.now));
                Event::Tick
            }
        }
    }

    fn step(&mut self) {
        let asked = self.asked.take();
        // A stop comes at any time, also before the answer to what is under way.
        let event = match asked {
            Some(action) if self.rng.random_range(0..50) == 0 => {
                self.asked = Some(action);
                Event::Stop
            }
            Some(action) => match self.answer(&action) {
                Some(event) => event,
                None => self.chance(),
            },
            None => self.chance(),
        };
        let (before, name) = (self.bench.machine.state().clone(), event.name());
        let was_go = self.bench.machine.go;
        let stopped = self.bench.machine.is_stopping();
        let actions = self.bench.on(event);
        let after = self.bench.machine.state().clone();
        if before != after || !actions.is_empty() {
            self.seen.insert((before.name(), name, after.name()));
        }
        if matches!(name, "NotIntroduced" | "Suspended") {
            self.introduced = 0;
        }
        for action in &actions {
            match action {
                Action::Introduce { takeover } => {
                    assert!(!stopped, "nothing is started after a stop");
                    assert_eq!(*takeover, was_go, "INIT is answered once");
                    assert_eq!(self.introduced, 0, "one worker at a time");
                    self.introduced = 1;
                }
                Action::SendGo => assert!(self.bench.machine.go && !stopped),
                Action::KillAndReap => assert!(matches!(after, State::Reaping { .. })),
                Action::Collect { .. } => self.introduced = 0,
                Action::Prove { .. } => {
                    assert_eq!((before.name(), after.name()), ("Starting", "Serving"));
                }
                Action::ReportDegraded { .. } => self.degraded += 1,
                Action::ReportRecovered => self.degraded -= 1,
                _ => {}
            }
        }
        assert!((0..=1).contains(&self.degraded), "reported once, and taken back once");
        let mut asks = actions.into_iter().filter(|a| {
            !matches!(
                a,
                Action::Prove { .. }
                    | Action::Confine
                    | Action::ReportDegraded { .. }
                    | Action::ReportRecovered
                    | Action::Drop
                    | Action::NoteEnded
            )
        });
        if let Some(action) = asks.next_back() {
            self.asked = Some(action);
        }
        let waits = self.bench.machine.deadline().is_some() || self.asked.is_some();
        let hears = matches!(after, State::Serving | State::Suspended | State::Over(_));
        assert!(waits || hears, "it waits for something: {after:?}");
    }
}

/// Every transition of the table is taken, and no other; whatever comes when.
#[test]
fn the_table_of_transitions_is_what_the_machine_does() {
    let mut seen = BTreeSet::new();
    let first: u64 =
        std::env::var("MILLPOND_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(rand::random());
    for seed in (0..3000).map(|n| first.wrapping_add(n)) {
        let mut walk = Walk::new(seed);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            for _ in 0..200 {
                walk.step();
            }
        }));
        if let Err(panic) = result {
            eprintln!("MILLPOND_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
        seen.extend(walk.seen);
    }
    let table: BTreeSet<_> = TRANSITIONS.iter().copied().collect();
    let (missing, surplus): (Vec<_>, Vec<_>) =
        (table.difference(&seen).collect(), seen.difference(&table).collect());
    assert!(
        missing.is_empty() && surplus.is_empty(),
        "not taken: {missing:?}; not in the table: {surplus:?}"
    );
}
