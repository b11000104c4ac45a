//! Runs the benchmarks and keeps what was measured, as a record (JSON) and as the tables of `docs/benchmarks.md`; says
//! what moved between two records.

use anyhow::Result;
use clap::{Args, Parser, Subcommand};
use e2e::bench::{FEATURES, Options, Record, Size, compare, markdown, replace, run, workloads};
use e2e::node::Protocol;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

#[derive(Parser)]
#[command(about = "Millpond beside native reads, curl and installed peers")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure.
    Run(Run),
    /// Say which rows moved beyond their spread from record A to record B. Ends with 0 whatever moved, with 2 where a
    /// record cannot be read.
    Compare { a: PathBuf, b: PathBuf },
}

#[derive(Args)]
struct Run {
    /// 1: 2 GiB, 20,000 files, 100,000 objects, a model of 1 GB; written: 4 GiB, 2,000 files.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// In how many of the rounds peers take part; one that an aim names takes part in every round of that row.
    #[arg(long, default_value_t = 1)]
    peer_rounds: usize,
    /// Only rows whose name contains this, or one of several.
    #[arg(long)]
    only: Vec<String>,
    /// What the store speaks. With another than s3 only the cold rows on loopback are measured, beside curl.
    #[arg(long, value_enum, default_value_t)]
    store: Protocol,
    /// Turn a feature of the agent off, to see what it is worth.
    #[arg(long, value_name = "FEATURE", value_parser = feature)]
    without: Vec<&'static str>,
    /// Leave installed peers out.
    #[arg(long)]
    no_peers: bool,
    /// Rewritten after each measurement, as are the tables: a run that is cut loses nothing.
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long)]
    markdown: Option<PathBuf>,
}

fn main() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Run(options) => measure(options).map(|()| ExitCode::SUCCESS),
        Command::Compare { a, b } => Ok(say(&a, &b)),
    }
}

fn measure(options: Run) -> Result<()> {
    let size = Size::scaled(options.scale, options.rounds, options.peer_rounds);
    let table = move |record: &Record| markdown(record, &workloads(size));
    let (json, path) = (options.json, options.markdown);
    let keep = move |record: &Record| -> Result<()> {
        if let Some(json) = &json {
            record.write(json)?;
        }
        if let Some(path) = &path {
            replace(path, &table(record))?;
        }
        Ok(())
    };
    let (peers, only, without) = (!options.no_peers, options.only, options.without);
    let record = run(Options { size, store: options.store, peers, only, without }, keep)?;
    println!("{}", table(&record));
    Ok(())
}

fn feature(name: &str) -> Result<&'static str, String> {
    let known = FEATURES.into_iter().find(|feature| *feature == name);
    known.ok_or_else(|| format!("the agent has {}", FEATURES.join(", ")))
}

fn say(a: &Path, b: &Path) -> ExitCode {
    match Record::read(a).and_then(|a| Ok((a, Record::read(b)?))) {
        Ok((a, b)) => {
            print!("{}", compare(&a, &b));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::from(2)
        }
    }
}
