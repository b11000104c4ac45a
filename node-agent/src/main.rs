//! The `node-agent` binary: reads its configuration, then is the agent until a signal stops it.

#![warn(clippy::print_stdout, clippy::print_stderr)]

use anyhow::Result;
use clap::Parser;
use node_agent::config::{Config, LogFormat};
use startup::log;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

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
    /// Tell of which volumes something waits for its store in the staging areas of this state directory, a line each, and exit.
    /// No agent may run.
    #[arg(long, value_name = "STATE_DIR")]
    waiting: Option<PathBuf>,
}

fn main() -> ExitCode {
    startup::begin("node-agent");
    let done = run(&Arguments::parse());
    if let Err(error) = &done {
        log::fail("node-agent", &format!("{error:#}"));
    }
    log::end();
    if done.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn run(arguments: &Arguments) -> Result<()> {
    if arguments.check {
        Config::load(&arguments.config)?;
        writeln!(std::io::stdout(), "{}: fine", arguments.config.display())?;
        return Ok(());
    }
    if let Some(state_dir) = &arguments.waiting {
        for line in node_agent::what_waits(state_dir).map_err(anyhow::Error::msg)? {
            writeln!(std::io::stdout(), "{line}")?;
        }
        return Ok(());
    }
    log::start()?;
    let config = Config::load(&arguments.config)?;
    let format = match config.agent.log_format {
        LogFormat::Json => log::Format::Json,
        LogFormat::Text => log::Format::Text,
    };
    log::init(format, "info");
    node_agent::run(config)
}
