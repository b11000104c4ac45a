//! Runs the benchmarks and writes what was measured, as JSON and as the Markdown table of `docs/benchmarks.md`.

use anyhow::Result;
use clap::Parser;
use e2e::bench::{Bench, Size, markdown, workloads};
use std::path::PathBuf;

#[derive(Parser)]
#[command(about = "Millpond beside the native file system and installed peers")]
struct Options {
    /// 1: 2 GiB, 20,000 files, 100,000 objects.
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Only workloads whose name contains this.
    #[arg(long)]
    only: Option<String>,
    /// Leave installed peers out.
    #[arg(long)]
    no_peers: bool,
    #[arg(long)]
    json: Option<PathBuf>,
    #[arg(long)]
    markdown: Option<PathBuf>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let size = Size::scaled(options.scale, options.rounds);
    let (present, samples) = Bench::start(size, !options.no_peers, options.only)?.run()?;
    let table = markdown(&workloads(size), &samples, &present);
    println!("{table}");
    if let Some(path) = options.json {
        std::fs::write(path, serde_json::to_string_pretty(&samples)?)?;
    }
    if let Some(path) = options.markdown {
        std::fs::write(path, table)?;
    }
    Ok(())
}
