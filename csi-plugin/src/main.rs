//! The `csi-plugin` binary: arguments, log, signals.

#![warn(clippy::print_stdout, clippy::print_stderr)]

use anyhow::Context;
use clap::Parser;
use csi_plugin::config::{Arguments, LogFormat};
use mounts::{Helper, Kernel, Linux, LinuxPaths};
use startup::log;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

/// Exit status of wrong arguments, as clap's own.
const USAGE: u8 = 2;

/// The client library logs every failed request as an error; its caller says it better, and once.
const LOG_DEFAULT: &str = "info,kube_client::client::builder=off";

fn main() -> ExitCode {
    startup::begin("csi-plugin");
    // The disposable processes that touch a mount are this binary too. They have no log.
    mounts::run_if_asked();

    let done = run().unwrap_or_else(|error| {
        log::fail("csi-plugin", &format!("{error:#}"));
        ExitCode::FAILURE
    });
    log::end();
    done
}

fn run() -> anyhow::Result<ExitCode> {
    // Before the log begins: clap says what is wrong itself, and ends the process.
    let arguments = Arguments::parse();
    log::start()?;
    let config = match arguments.check() {
        Ok(config) => config,
        Err(error) => {
            log::fail("csi-plugin", &error.to_string());
            return Ok(ExitCode::from(USAGE));
        }
    };
    let format = match config.log_format {
        LogFormat::Json => log::Format::Json,
        LogFormat::Text => log::Format::Text,
    };
    log::init(format, LOG_DEFAULT);
    if let Some(cleanup) = &config.cleanup {
        return Ok(csi_plugin::cleanup::run(cleanup));
    }
    let kernel: Arc<dyn Kernel> = match &config.node {
        Some(node) => {
            // The mount table is read by many threads, each of which may have a heap of its own.
            startup::memory::keep_small().context("cannot start a thread")?;
            // Three for each mount.
            if let Err(error) = startup::raise_descriptor_limit() {
                tracing::warn!(%error, "the limit on open files stays low: hundreds of volumes may be too many");
            }
            let paths = LinuxPaths { fusectl: node.fusectl_dir.clone(), ..LinuxPaths::default() };
            if node.mount_fusectl {
                mounts::fusectl::ensure(&paths.fusectl, &paths.device).context("--mount-fusectl")?;
                // Without it mounts keep the kernel's readahead, which costs streaming readers a third.
                if let Err(error) = mounts::sysfs::make_writable(Path::new("/sys")) {
                    tracing::warn!(%error, "/sys stays read-only");
                }
            }
            if std::fs::metadata(&paths.fusectl).is_err() {
                tracing::warn!(
                    directory = %paths.fusectl.display(),
                    "no FUSE control directory: load the fuse module and mount fusectl there, or waiting requests cannot be counted"
                );
            }
            Arc::new(Linux::new(paths, node.cache_roots.clone(), Helper::own()))
        }
        None => Arc::new(Linux::new(LinuxPaths::default(), Vec::new(), Helper::own())),
    };

    csi_plugin::server::run_until_signal(config, kernel)?;
    Ok(ExitCode::SUCCESS)
}
