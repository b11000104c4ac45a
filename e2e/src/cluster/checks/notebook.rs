//! A notebook that keeps reading while its worker dies, its container restarts, kubelet and containerd restart.

use crate::cluster::Suite;
use crate::cluster::notebook::Notebook;
use anyhow::Result;
use std::time::Duration;

const KILLS: usize = 100;

pub(super) fn run(suite: &mut Suite) -> Result<()> {
    let mut notebook = Notebook::start(suite, "notebook")?;
    let mut moments = Vec::new();
    for kill in 0..KILLS {
        if kill == KILLS * 3 / 10 {
            notebook.restart_container(suite)?;
            println!("    {kill} deaths; container restarted");
        }
        if kill == KILLS / 2 {
            restart(suite, &notebook, "kubelet")?;
            println!("    {kill} deaths; kubelet restarted");
        }
        if kill == KILLS * 7 / 10 {
            restart(suite, &notebook, "containerd")?;
            println!("    {kill} deaths; containerd restarted");
        }
        moments.push(crate::clock::monotonic_ns());
        kill_worker(suite)?;
    }
    println!("    {KILLS} deaths");

    let report = notebook.end(suite)?;
    let stalls = report.stalls(&moments, 50_000_000);
    println!("    a death was felt for {:.1} ms (p50), {:.1} ms (max)", stalls.p50_ms, stalls.max_ms);
    notebook.ensure_told(suite, "MountHealed", 1)?;
    notebook.delete(suite)
}

pub(super) fn restart(suite: &Suite, notebook: &Notebook, part: &str) -> Result<()> {
    suite.machine().stop_part(part, "TERM")?;
    suite.machine().start_part(part)?;
    suite.machine().wait_for_node(&suite.kubectl)?;
    notebook.wait_exec(suite)
}

/// `kill -9` of the one worker at work; returns when a successor serves.
pub(super) fn kill_worker(suite: &Suite) -> Result<()> {
    let view = suite.view();
    let pid = another_worker(suite, 0)?;
    view.kill(pid)?;
    another_worker(suite, pid).map(drop)
}

/// The worker at work, once it is not this one.
pub(super) fn another_worker(suite: &Suite, not: u32) -> Result<u32> {
    let view = suite.view();
    suite.kubectl.wait("a worker at work", Duration::from_secs(30), |_| {
        Ok(view.workers()?.into_iter().find(|&pid| pid != not))
    })
}
