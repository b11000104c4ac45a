//! The agent's life: from its first signal handler to its exit, or to a successor.

use crate::app::{App, prepare_process};
use crate::config::Config;
use crate::directories;
use crate::handoff::drain::{self, End};
use crate::handoff::standby;
use anyhow::{Context, Result};
use link::budget;

/// Runs until SIGTERM or SIGINT, or until a successor has taken over. Blocks: the runtime is made here, so that the
/// program itself compiles none of it again.
pub fn run(config: Config) -> Result<()> {
    startup::memory::keep_small()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let done = runtime.block_on(run_until_stopped(config));
    // Threads that wait in the kernel or for the broker end with the process.
    startup::leave_to_the_end(runtime);
    done
}

async fn run_until_stopped(config: Config) -> Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    inflight::mark_aborts();
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    tokio::pin!(stop);
    prepare_process();
    let state_dir = config.agent.state_dir.clone();
    let enter = async {
        directories::wait(&config).await?;
        standby::enter(&config).await
    };
    let entry = tokio::select! {
        entry = enter => entry?,
        () = &mut stop => return Ok(()),
    };
    let mut app = App::launch(config, None, entry).await?;
    tracing::info!(version = env!("CARGO_PKG_VERSION"), "agent is up");
    let end = tokio::select! {
        end = drain::follow(&mut app, &state_dir) => Some(end?),
        () = &mut stop => None,
    };
    match end {
        Some(End::Departed) => {
            tracing::info!("the successor serves every mount: leaving");
            return Ok(());
        }
        Some(End::Again) => {
            tracing::warn!("no successor took over: serving again");
            app.spawner.end_standby();
            app.helpers.end_all();
            return Err(drain::execute_anew()).context("the agent cannot execute itself anew");
        }
        None => {}
    }
    tracing::info!("asked to stop");
    if app.is_drained() {
        // Nothing is open. The mounts are the successor's, or wait for one: with the broker, not with us.
        app.volumes.leave().await;
        return Ok(());
    }
    app.volumes.leave().await;
    if tokio::time::timeout(budget::AGENT_SHUTS_DOWN.time, app.shutdown()).await.is_err() {
        tracing::warn!("shutdown took too long and was cut short: nothing that matters is lost");
    }
    Ok(())
}
