//! The `millpond` command: a person's hands. Owns nothing; it talks to the agent, or is one for a laptop.

#![warn(clippy::print_stdout, clippy::print_stderr)]

mod client;
mod doctor;
mod evict;
mod laptop;
mod output;
mod staging;
mod status;
mod warm;

use anyhow::Result;
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Millpond: data-lake files for pods, kept coming.
#[derive(Parser)]
#[command(version, about, arg_required_else_help = true)]
struct Arguments {
    /// Socket of the node agent's operator API.
    #[arg(long, global = true, env = "MILLPOND_API", default_value = "/run/millpond/agent/api.sock")]
    api: PathBuf,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Mount a source on a directory of this machine: agent and mount in one process (root).
    Mount(laptop::MountOptions),
    /// Unmount what `millpond mount` mounted.
    Umount(laptop::UmountOptions),
    /// Volumes, workers, cache and heals of this node.
    Status(status::Options),
    /// Bring files into the cache, with progress.
    Warm(warm::Options),
    /// Drop files from the cache.
    Evict(evict::Options),
    /// What was written on this node and is not in its store yet.
    Staging(staging::Options),
    /// Look for what is wrong on this node and say what to do.
    Doctor(doctor::Options),
}

fn main() -> ExitCode {
    startup::begin("millpond");
    // The helper process that looks through a new mount is this binary too.
    mounts::run_if_asked();
    let arguments = Arguments::parse();
    let code = match run(arguments) {
        Ok(code) => code,
        // The reader has seen enough: `millpond status | head -1`.
        Err(error) if error.is::<output::Closed>() => ExitCode::SUCCESS,
        Err(error) => {
            output::remark(format_args!("millpond: {error:#}"));
            ExitCode::FAILURE
        }
    };
    startup::log::end();
    code
}

fn run(arguments: Arguments) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let api = arguments.api;
    let done = runtime.block_on(async {
        match arguments.command {
            Command::Mount(options) => laptop::mount(options).await,
            Command::Umount(options) => laptop::umount(&options),
            Command::Status(options) => status::run(&api, options).await,
            Command::Warm(options) => warm::run(&api, options).await,
            Command::Evict(options) => evict::run(&api, options).await,
            Command::Staging(options) => staging::run(&api, options).await,
            Command::Doctor(options) => doctor::run(&api, options).await,
        }
    });
    startup::leave_to_the_end(runtime);
    done
}
