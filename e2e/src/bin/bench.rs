//! Runs the benchmarks and writes what was measured, as JSON and as the Markdown table of `docs/benchmarks.md`.

use anyhow::Result;
use clap::Parser;
use e2e::bench::{Bench, Sample, Size, Who, markdown, workloads};
use std::path::PathBuf;

#[derive(Parser)]
#[command(about = "Millpond beside the native file system and installed peers")]
struct Options {
    /// 1: 2 GiB, 20,000 files, 100,000 objects.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// In how many of the rounds peers take part.
    #[arg(long, default_value_t = 1)]
    peer_rounds: usize,
    /// Only workloads whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Leave installed peers out.
    #[arg(long)]
    no_peers: bool,
    /// Rewritten after each measurement, as is the table: a run that is cut loses nothing.
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long)]
    markdown: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let size = Size::scaled(options.scale, options.rounds, options.peer_rounds);
    let (json, path) = (options.json, options.markdown);
    let keep = move |present: &[Who], samples: &[Sample]| -> Result<()> {
        if let Some(json) = &json {
            std::fs::write(json, serde_json::to_string_pretty(samples)?)?;
        }
        if let Some(path) = &path {
            std::fs::write(path, markdown(&workloads(size), samples, present))?;
        }
        Ok(())
    };
    let (present, samples) = Bench::start(size, !options.no_peers, options.only, keep)?.run()?;
    println!("{}", markdown(&workloads(size), &samples, &present));
    Ok(())
}
