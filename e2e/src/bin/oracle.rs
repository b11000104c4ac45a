//! The application under test as a process of its own: see `e2e::oracle`.

use anyhow::Result;
use clap::Parser;
use e2e::oracle::{self, Plan};
use e2e::scenario::torture::writers;
use e2e::tree::Tree;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Parser)]
enum Command {
    /// Work until stdin closes, then print a report.
    Run(Plan),
    /// Read everything once, compare, print what was found.
    Verify {
        #[arg(long)]
        root: PathBuf,
        #[arg(long)]
        tree: PathBuf,
        #[arg(long, default_value_t = 1)]
        threads: usize,
        /// Shuffles the order; 0: as listed.
        #[arg(long, default_value_t = 0)]
        seed: u64,
        /// Files only: do not compare directory listings.
        #[arg(long)]
        no_names: bool,
    },
    /// Wait with very many reads of one file at once, from when stdin closes until they are answered.
    Crowd {
        #[arg(long)]
        root: PathBuf,
        #[arg(long)]
        tree: PathBuf,
        #[arg(long)]
        threads: usize,
    },
    /// List, open and read everything, all the time, whatever comes of it, until stdin closes.
    Abuse {
        #[arg(long)]
        root: PathBuf,
        #[arg(long, default_value_t = 1)]
        threads: usize,
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Between two calls of one thread, milliseconds.
        #[arg(long, default_value_t = 5)]
        pause_ms: u64,
    },
    /// Writes the files of a generated tree.
    Write {
        #[arg(long)]
        tree: PathBuf,
        #[arg(long)]
        to: PathBuf,
    },
    /// Programs that change files and know what must come of it, until standard input ends.
    Writers(writers::Work),
    /// A short one, always the same.
    Writes {
        #[arg(long)]
        root: PathBuf,
    },
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Run(plan) => oracle::run(&plan),
        Command::Verify { root, tree, threads, seed, no_names } => {
            let verified = oracle::verify(&root, &Tree::load(&tree)?, threads, seed, !no_names)?;
            println!("{}", serde_json::to_string(&verified)?);
            Ok(())
        }
        Command::Crowd { root, tree, threads } => {
            let crowd = oracle::crowd(&root, &Tree::load(&tree)?, threads)?;
            println!("{}", serde_json::to_string(&crowd)?);
            Ok(())
        }
        Command::Abuse { root, threads, seed, pause_ms } => {
            oracle::abuse(&root, threads, seed, Duration::from_millis(pause_ms))
        }
        Command::Writers(work) => writers::work(&work),
        Command::Writes { root } => {
            let failed: Vec<String> =
                writers::program(&root).err().map(|e| format!("{e:#}")).into_iter().collect();
            println!("{}", serde_json::to_string(&failed)?);
            Ok(())
        }
        Command::Write { tree, to } => Tree::load(&tree)?.write(&to),
    }
}
