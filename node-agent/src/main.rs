//! The `node-agent` binary: reads its configuration, then is the agent until it is told to stop.

use anyhow::Result;
use clap::Parser;
use node_agent::config::{Config, LogFormat};
use std::path::PathBuf;
use tracing_subscriber::EnvFilter;

/// Millpond's node agent: the cache of a node and the supervisor of its FUSE workers.
#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    /// Configuration file (TOML); see docs/configuration.md.
    #[arg(long, env = "MILLPOND_AGENT_CONFIG", default_value = "/etc/millpond/agent.toml")]
    config: PathBuf,
    /// Check the configuration and exit.
    #[arg(long)]
    check: bool,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let config = Config::load(&arguments.config)?;
    if arguments.check {
        println!("{}: fine", arguments.config.display());
        return Ok(());
    }
    let filter = EnvFilter::try_from_env("MILLPOND_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match config.agent.log_format {
        LogFormat::Json => log.json().init(),
        LogFormat::Text => log.with_ansi(false).init(),
    }
    node_agent::app::run(config)
}
