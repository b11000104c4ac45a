//! `fault-fs`: a pass-through file system whose disk fails on command; see `testkit::fault_fs` for the commands.

use anyhow::{Context, Result};
use clap::Parser;
use std::path::PathBuf;
use testkit::fault_fs::Mounted;

#[derive(Debug, Parser)]
#[command(about = "Shows a directory through FUSE, with faults set over a unix socket")]
struct Options {
    /// The directory that really holds the files.
    #[arg(long)]
    dir: PathBuf,
    /// Where to mount; an existing directory.
    #[arg(long)]
    mountpoint: PathBuf,
    /// Unix socket that takes faults as JSON lines.
    #[arg(long)]
    control: PathBuf,
    /// Written once the file system is mounted and the socket listens.
    #[arg(long)]
    ready_file: Option<PathBuf>,
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let options = Options::parse();
    let mut mounted = Mounted::mount(&options.dir, &options.mountpoint)?;
    mounted.listen(&options.control)?;
    let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    if let Some(path) = &options.ready_file {
        testkit::process::write_ready_file(path, &options.mountpoint.display().to_string())
            .context("--ready-file")?;
    }
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    mounted.unmount()
}
