//! The long runs, without Cargo: the same program on this machine and in a guest with another kernel.

use anyhow::{Context, Result, ensure};
use clap::Parser;
use e2e::node::{AgentOptions, Node, Protocol};
use e2e::scenario::handovers::{self, HandoverPlan};
use e2e::scenario::kills::{self, KillPlan};
use e2e::scenario::resets::ResetsPlan;
use e2e::scenario::torture::writers::{self, WritersPlan};
use e2e::scenario::torture::{self, Class, Length, Plan, SoakPlan, TortureReport};
use e2e::scenario::{
    away, burst, cycles, faults, frozen, hadoop, listing, memory, noisy, renewals, resets, scale, scopes,
};
use e2e::supervised::supervised;
use e2e::tree::{Shape, Tree};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

#[derive(Parser)]
#[command(about = "Runs a Millpond node through what it promises")]
enum Command {
    /// Workers die at random moments while applications judge every call.
    Kills {
        #[arg(long, default_value_t = 1000)]
        kills: usize,
        #[arg(long, default_value_t = 20)]
        volumes: usize,
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Epochs over many files through a store that misbehaves.
    Faults {
        #[arg(long, default_value_t = 20_000)]
        files: usize,
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Agents of two versions hand over to each other while applications judge every call.
    Handovers {
        #[arg(long, default_value_t = 50)]
        rounds: usize,
        #[arg(long, default_value_t = 4)]
        volumes: usize,
        #[arg(long)]
        seed: Option<u64>,
        /// Fails if more than one in a hundred pauses is longer.
        #[arg(long, value_parser = humantime::parse_duration)]
        pause_p99: Option<Duration>,
    },
    /// One directory of very many objects: times and memory.
    Listing {
        #[arg(long, default_value_t = 1_000_000)]
        objects: u64,
    },
    /// Cold reads of an HDFS beside Hadoop's own client: scripts/stores run hdfs node-suite hadoop.
    Hadoop {
        #[arg(long, default_value = "1Gi")]
        large: String,
        #[arg(long, default_value_t = 10_000)]
        files: usize,
        #[arg(long, default_value_t = 3)]
        rounds: usize,
    },
    /// Runs over an HDFS whose connections break: scripts/stores run hdfs node-suite resets.
    Resets {
        #[arg(long, default_value_t = 100)]
        runs: usize,
        /// Of one run.
        #[arg(long, default_value_t = 6000)]
        reads: usize,
        /// Of so many receives from the network one fails.
        #[arg(long, default_value_t = 36_000)]
        one_in: u64,
        /// How long HDFS does not answer, in the middle.
        #[arg(long, value_parser = humantime::parse_duration, default_value = "2m")]
        outage: Duration,
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Agent and broker are killed at once, again and again, under pods with mount namespaces of their own.
    Renewals {
        #[arg(long, default_value_t = 100)]
        rounds: usize,
    },
    /// The store does not answer for a while: no process is taken for hung, and all is read afterwards.
    Frozen {
        #[arg(long, value_parser = humantime::parse_duration, default_value = "60s")]
        time: Duration,
    },
    /// The store is away, in two ways, under warm epochs of volumes whose names run out all the time.
    Away {
        /// Of each of two outages.
        #[arg(long, value_parser = humantime::parse_duration, default_value = "60s")]
        time: Duration,
    },
    /// Sources are used once and left: disk, descriptors and memory stay as they were.
    Scopes {
        #[arg(long, default_value_t = 1000)]
        scopes: usize,
    },
    /// Very many volumes at once: published, read, handed over, unpublished.
    Scale {
        /// One after the other.
        #[arg(long, value_delimiter = ',', default_value = "10,100,1000")]
        volumes: Vec<usize>,
        /// Also writes the report here.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Pods come and go at a steady rate: what the node has at the end it had in the beginning.
    Burst {
        /// Publishes.
        #[arg(long, default_value_t = 200)]
        per_minute: u32,
        #[arg(long, value_parser = humantime::parse_duration, default_value = "1h")]
        time: Duration,
    },
    /// One application with very many files open at once.
    OpenFiles {
        #[arg(long, default_value_t = 100_000)]
        files: usize,
        #[arg(long, default_value_t = 4)]
        volumes: usize,
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Workers that take more memory than they may.
    Memory {
        #[arg(long, default_value_t = 20)]
        times: usize,
    },
    /// Fifteen volumes beside five whose stores and pods mean harm: throughput, failed calls, memory.
    Noisy {
        /// Two epochs alone and two beside the hostile ones, which do all they can do in each round.
        #[arg(long, default_value_t = 5)]
        rounds: usize,
        /// In each of ten volumes that are read from the store.
        #[arg(long, default_value_t = 1000)]
        files: usize,
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Workers, agent and broker die at random, alone and together, while applications judge every call.
    Torture {
        #[arg(long, value_parser = humantime::parse_duration, default_value = "60s")]
        duration: Duration,
        #[arg(long, default_value_t = 20)]
        volumes: usize,
        #[arg(long)]
        seed: Option<u64>,
        /// Only these classes; repeat it for more.
        #[arg(long = "class")]
        classes: Vec<Class>,
        /// What stands still for so long is replaced; with it, hangs are among the faults.
        #[arg(long, value_parser = humantime::parse_duration)]
        hang_limit: Option<Duration>,
        /// What the store speaks.
        #[arg(long, value_enum, default_value_t)]
        store: Protocol,
        /// Also writes the report here, for `torture-sum`.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// The same under programs that write: each call succeeds, each operation happens once, and the store has in the end what
    /// was written.
    Writers {
        #[arg(long, value_parser = humantime::parse_duration, default_value = "4m")]
        duration: Duration,
        /// After so much time all is compared, and begun anew in the other mode.
        #[arg(long, value_parser = humantime::parse_duration, default_value = "60s")]
        leg: Duration,
        #[arg(long)]
        seed: Option<u64>,
        /// Only these classes; repeat it for more.
        #[arg(long = "class")]
        classes: Vec<Class>,
        /// What stands still for so long is replaced; with it, hangs are among the faults.
        #[arg(long, value_parser = humantime::parse_duration)]
        hang_limit: Option<Duration>,
    },
    /// The same faults, seldom, while pods come and go: what each process has more in an hour.
    Soak {
        #[arg(long, value_parser = humantime::parse_duration, default_value = "4h")]
        time: Duration,
        /// A fault.
        #[arg(long, value_parser = humantime::parse_duration, default_value = "10s")]
        every: Duration,
        /// An end of the agent or of the broker: memory says something of a process that has lived for a while.
        #[arg(long, value_parser = humantime::parse_duration, default_value = "1h")]
        rest: Duration,
        #[arg(long)]
        seed: Option<u64>,
        /// Also writes the report here.
        #[arg(long)]
        json: Option<PathBuf>,
    },
    /// Adds up the reports of several runs.
    TortureSum {
        #[arg(required = true)]
        reports: Vec<PathBuf>,
    },
    /// Volumes are published, used, hurt and unpublished: nothing may be left, nothing may grow.
    Cycles {
        #[arg(long, default_value_t = 1000)]
        rounds: usize,
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Everything that can differ between kernels, sized for a slow machine.
    Guest {
        #[arg(long, default_value_t = 200)]
        kills: usize,
        /// Deaths of agents, alone and with a worker, and a fifth as many faults of most other classes.
        #[arg(long, default_value_t = 50)]
        agents: usize,
        /// Workers that take more memory than they may.
        #[arg(long, default_value_t = 20)]
        greedy: usize,
    },
}

fn main() -> Result<ExitCode> {
    supervised(run)
}

fn run() -> Result<()> {
    let seed = |given: Option<u64>| given.unwrap_or_else(|| e2e::clock::monotonic_ns() % 1_000_000);
    match Command::parse() {
        Command::Kills { kills, volumes, seed: given } => {
            let mut node = Node::start(AgentOptions::default())?;
            let plan = KillPlan { volumes, ..KillPlan::long(seed(given), kills) };
            let report = kills::run(&mut node, &plan)?;
            println!("{report}");
            report.report.ensure_clean()?;
            node.finish()
        }
        Command::Faults { files, seed: given } => {
            let mut node = Node::start(AgentOptions::default())?;
            for profile in ["small", "large"] {
                let report = faults::run(&mut node, files, profile, seed(given))?;
                let v = &report.verified;
                println!(
                    "profile {profile}: {} files, {:.1} MB right in {:.1} s; server: {:?}",
                    v.files,
                    v.bytes as f64 / 1e6,
                    v.seconds,
                    report.server
                );
            }
            node.finish()
        }
        Command::Handovers { rounds, volumes, seed: given, pause_p99 } => {
            let mut node = Node::start(AgentOptions::default())?;
            let KillPlan { shape, .. } = KillPlan::long(0, 0);
            let plan = HandoverPlan { rounds, volumes, shape, alarm: true, seed: seed(given) };
            let report = handovers::run(&mut node, &plan)?;
            println!("{report}");
            report.report.ensure_clean()?;
            if let Some(limit) = pause_p99 {
                let p99 = report.pauses.p99_ms;
                ensure!(p99 <= limit.as_secs_f64() * 1e3, "pause p99 {p99:.1} ms, above {limit:?}");
            }
            node.finish()
        }
        Command::Listing { objects } => {
            let mut node = Node::start(AgentOptions::default())?;
            println!("{}", listing::run(&mut node, objects)?);
            node.finish()
        }
        Command::Hadoop { large, files, rounds } => {
            let large = volume::parse_bytes(&large).context("--large: write a size such as 1Gi")?;
            let mut node = Node::start(AgentOptions::with_store(Protocol::Hdfs))?;
            println!("{}", hadoop::run(&mut node, large, files, rounds)?);
            node.finish()
        }
        Command::Resets { runs, reads, one_in, outage, seed: given } => {
            let plan = ResetsPlan { runs, reads, one_in, outage, seed: seed(given) };
            let report = resets::run(&plan)?;
            println!("{report}");
            let right = (report.runs - report.failed) as f64 / report.runs.max(1) as f64;
            ensure!(right >= 0.983, "{:.1} % without a failure", 100.0 * right);
            Ok(())
        }
        Command::Renewals { rounds } => {
            let mut node = renewals::node()?;
            println!("{}", renewals::run(&mut node, rounds)?);
            node.finish()
        }
        Command::Frozen { time } => {
            let mut node = Node::start(AgentOptions::default())?;
            println!("{}", frozen::run(&mut node, time)?);
            let beside = frozen::beside(&mut node, 8000)?;
            println!("{beside}");
            node.finish()?;
            anyhow::ensure!(beside.ratio() >= 0.8, "a frozen endpoint takes from another one: {beside}");
            Ok(())
        }
        Command::Away { time } => {
            let mut node = Node::start(AgentOptions::default())?;
            print!("{}", away::run(&mut node, time)?);
            node.finish()
        }
        Command::Scopes { scopes: count } => {
            let mut node = Node::start(scopes::options())?;
            println!("{}", scopes::run(&mut node, count)?);
            node.finish()
        }
        Command::Scale { volumes, json } => {
            let mut node = Node::start(AgentOptions::default())?;
            let report = scale::run(&mut node, &volumes)?;
            println!("{report}");
            if let Some(path) = json {
                std::fs::write(&path, serde_json::to_vec(&report)?)
                    .with_context(|| path.display().to_string())?;
            }
            node.finish()?;
            report.ensure_flat(3.0)
        }
        Command::Burst { per_minute, time } => {
            let mut node = Node::start(AgentOptions::default())?;
            println!("{}", burst::run(&mut node, per_minute, time)?);
            node.finish()
        }
        Command::OpenFiles { files, volumes, seed: given } => {
            let mut node = Node::start(AgentOptions::default())?;
            println!("{}", scale::open_files(&mut node, files, volumes, seed(given))?);
            node.finish()
        }
        Command::Memory { times } => {
            println!("{}", memory::run(times, memory::PATIENCE)?);
            Ok(())
        }
        Command::Noisy { rounds, files, seed: given } => {
            let mut node = Node::start(AgentOptions::default())?;
            let report = noisy::run(&mut node, rounds, files, seed(given))?;
            println!("{report}");
            node.finish()?;
            report.ensure_memory()?;
            report.ensure_kept()
        }
        Command::Torture { duration, volumes, seed: given, classes, hang_limit, store, json } => {
            let options = AgentOptions { hang_limit, ..AgentOptions::with_store(store) };
            let mut node = Node::start(options)?;
            let classes = if classes.is_empty() { Plan::classes(hang_limit, store)? } else { classes };
            let plan = Plan { volumes, classes, ..Plan::long(seed(given), Length::Time(duration))? };
            let report = torture::run(&mut node, &plan)?;
            println!("{report}");
            if let Some(path) = json {
                std::fs::write(&path, serde_json::to_vec(&report)?)
                    .with_context(|| path.display().to_string())?;
            }
            report.ensure_clean(&[])?;
            node.finish()
        }
        Command::Writers { duration, leg, seed: given, classes, hang_limit } => {
            let classes = if classes.is_empty() { WritersPlan::classes(hang_limit)? } else { classes };
            println!("{}", writers::run_for(duration, leg, seed(given), &classes, hang_limit)?);
            Ok(())
        }
        Command::Soak { time, every, rest, seed: given, json } => {
            let mut node = Node::start(AgentOptions::default())?;
            let soak = Some(SoakPlan { every, rest });
            // As many calls as of a pod at work, not as many as there can be: it is for hours.
            let plan = Plan { soak, pause_us: 20_000, ..Plan::long(seed(given), Length::Time(time))? };
            let report = torture::run(&mut node, &plan)?;
            println!("{report}");
            let soaked = report.soak.clone().context("it was measured")?;
            println!("{soaked}");
            if let Some(path) = json {
                std::fs::write(&path, serde_json::to_vec(&report)?)
                    .with_context(|| path.display().to_string())?;
            }
            report.ensure_clean(&[])?;
            node.finish()?;
            soaked.ensure_flat(f64::from(1 << 20))
        }
        Command::TortureSum { reports } => {
            let mut total = TortureReport::default();
            for path in reports {
                let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
                total.add(serde_json::from_slice(&text).with_context(|| path.display().to_string())?);
            }
            println!("{total}");
            total.ensure_clean(&[])
        }
        Command::Cycles { rounds, seed: given } => {
            let mut node = Node::start(AgentOptions::default())?;
            println!("{}", cycles::run(&mut node, rounds, seed(given))?);
            node.finish()
        }
        Command::Guest { kills, agents, greedy } => guest(kills, agents, greedy),
    }
}

fn guest(kills: usize, agents: usize, greedy: usize) -> Result<()> {
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").context("the kernel's release")?;
    let kernel = kernel.trim();
    let mut node = Node::start(AgentOptions::default())?;
    let shape = Shape { directories: 3, files: 20, small_bytes: 30_000, large: 2, large_bytes: 3 << 20 };
    let tree = Tree::generated("", shape);
    node.server.add(&tree, "set")?;
    let mut modes = Vec::new();
    for profile in ["large", "small"] {
        let mounted = node.volume(profile, "set", &[("profile", profile)])?;
        let pod = node.pod(&mounted)?;
        for _ in 0..2 {
            pod.verify(&tree, 2)?.ensure_all(&tree)?;
        }
        let volume = node.agent().volumes()?.into_iter().find(|v| v.volume_id == mounted.id);
        modes.push(format!("{profile} as {}", volume.context("a published volume is listed")?.mode));
        pod.end()?;
        node.unpublish(&mounted)?;
        eprintln!("guest: profile {profile} reads right");
    }
    let plan = KillPlan {
        volumes: 4,
        applications: 2,
        shape,
        pause_us: 3000,
        patience: Duration::from_secs(120),
        ..KillPlan::long(1, kills)
    };
    let report = kills::run(&mut node, &plan)?;
    report.report.ensure_clean()?;
    ensure!(report.kills >= kills, "only {} deaths", report.kills);
    eprintln!("guest: {report}");
    let fifth = agents.div_ceil(5);
    let plan = Plan::slow(
        1,
        4,
        &[
            (Class::Agent, agents - fifth),
            (Class::AgentAndWorker, fifth),
            (Class::Workers, fifth),
            (Class::Broker, fifth),
            (Class::BrokerAndWorker, fifth),
            (Class::AgentTerm, fifth),
            (Class::BothTerm, fifth),
        ],
    )?;
    let tortured = torture::run(&mut node, &plan)?;
    eprintln!("{tortured}");
    tortured.ensure_clean(&plan.classes)?;
    node.finish()?;
    let memory = memory::run(greedy, plan.patience)?;
    println!(
        "kernel {kernel}: {}; checksums right; {report}; {} faults of every part, {} calls, {} failed; {memory}; \
         unpublished, nothing left",
        modes.join(", "),
        tortured.faults(),
        tortured.calls,
        tortured.failed
    );
    Ok(())
}
