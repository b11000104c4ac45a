//! A real Jupyter server whose directory, and whose home, are in a volume that is written to, and a person at a notebook there, while
//! workers, agents and brokers die. scripts/posix says where Jupyter is.

use anyhow::{Context, Result, bail, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Mounted, Node};
use serde_json::Value;
use std::fs::{self, File};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use testkit::process::Process;

const PATIENCE: Duration = Duration::from_secs(90);
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/jupyter/notebook.py");
const TOKEN: &str = "of-this-test";
/// What dies in turn.
const DEATHS: [Death; 4] = [Death::Worker, Death::Agent, Death::Broker, Death::Worker];

#[derive(Clone, Copy, Debug)]
enum Death {
    Worker,
    Agent,
    Broker,
}

fn die(node: &mut Node, mounted: &Mounted, death: Death) -> Result<()> {
    match death {
        Death::Worker => {
            let worker = node.worker_of(&mounted.id, PATIENCE)?;
            node.signal_worker(worker, rustix::process::Signal::KILL)
        }
        Death::Agent => {
            node.kill_agent()?;
            node.start_agent()?;
            node.wait_served(PATIENCE)
        }
        Death::Broker => {
            node.kill_plugin()?;
            node.start_plugin()?;
            node.wait_served(PATIENCE)
        }
    }
}

/// Python with what Jupyter needs.
fn python() -> Command {
    let at = std::env::var_os("MILLPOND_JUPYTER")
        .expect("scripts/posix says where Jupyter is: run this test by it");
    let at = PathBuf::from(at);
    // The one that it was installed for.
    let mut command = Command::new("/usr/bin/python3");
    command
        .env("PYTHONPATH", &at)
        .env("JUPYTER_PATH", at.join("share/jupyter"))
        .env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// A server and a person.
struct Work {
    server: Process,
    person: Process,
    said: PathBuf,
}

impl Work {
    fn begin(node: &Node, root: &Path) -> Result<Self> {
        let (logs, home) = (node.places().root().join("logs"), root.join("home"));
        fs::create_dir(&home)?;
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let address = format!("127.0.0.1:{port}");
        let log = File::create(logs.join("jupyter.log"))?;
        let mut server = python();
        server.args(["-m", "jupyter_server", "--allow-root", "--no-browser", "--ip=127.0.0.1"]);
        server.args([format!("--port={port}"), format!("--IdentityProvider.token={TOKEN}")]);
        server.arg(format!("--ServerApp.root_dir={}", root.display()));
        server.current_dir(root).env("HOME", &home).stdin(Stdio::null());
        let server = Process::spawn(server.stdout(log.try_clone()?).stderr(log))?;
        let is_up = wait_until(PATIENCE, || TcpStream::connect(&address).is_ok());
        ensure!(is_up, "Jupyter does not listen: {}", node.places().logs());
        let said = logs.join("notebook.log");
        let log = File::create(&said)?;
        let mut person = python();
        person.arg(SCRIPT).args([&address, TOKEN]).stdin(Stdio::null());
        let person = Process::spawn(person.stdout(log.try_clone()?).stderr(log))?;
        Ok(Self { server, person, said })
    }

    /// The last round.
    fn round(&mut self) -> Result<Option<Value>> {
        let said = fs::read_to_string(&self.said)?;
        ensure!(self.person.child().try_wait()?.is_none(), "the person has left: {said}");
        // The last line may be half written.
        let mut lines = said.lines().rev().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        Ok(lines.next())
    }

    fn rounds(&mut self) -> Result<u64> {
        Ok(self.round()?.and_then(|round| round["rounds"].as_u64()).unwrap_or(0))
    }

    /// In order: the server ends the kernel, which works in the volume.
    fn end(mut self) -> Result<()> {
        ensure!(self.person.terminate(PATIENCE)?.success(), "the person did not end well");
        self.server.terminate(PATIENCE)?;
        Ok(())
    }

    fn wait_rounds(&mut self, more: u64) -> Result<()> {
        let (wanted, end) = (self.rounds()? + more, Instant::now() + PATIENCE);
        while self.rounds()? < wanted {
            if Instant::now() >= end {
                bail!("{PATIENCE:?} without {more} rounds: {:?}", self.round()?);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}

fn works(mode: &str, deaths: usize) -> Result<()> {
    let mut node = Node::start(AgentOptions::default())?;
    let mounted = node.workspace("notebooks", "notebooks", &[("writeMode", mode)])?;
    let mut work = Work::begin(&node, &mounted.target)?;
    work.wait_rounds(2)?;
    for death in DEATHS.iter().cycle().take(deaths) {
        die(&mut node, &mounted, *death).with_context(|| format!("{death:?}"))?;
        work.wait_rounds(1)?;
    }
    work.wait_rounds(2)?;
    let last = work.round()?.context("it has had rounds")?;
    println!("{mode}, {deaths} deaths: {last}");
    ensure!(last["failed"] == 0, "{mode}: {last}");
    work.end()?;
    // What the person saved last is in the store.
    let notebook = mounted.target.join("work/notebook.ipynb");
    let stored = node.server.file("notebooks/work/notebook.ipynb");
    let is_there = || fs::read(&stored).is_ok_and(|stored| fs::read(&notebook).is_ok_and(|is| is == stored));
    ensure!(wait_until(PATIENCE, is_there), "{mode}: the store's notebook is another one");
    let saved: Value = serde_json::from_slice(&fs::read(&stored)?)?;
    ensure!(saved["nbformat"] == 4, "{mode}: {saved}");
    node.finish()
}

#[test]
fn a_notebook_in_a_workspace_written_back_notices_no_death() -> Result<()> {
    works("back", deaths())
}

#[test]
fn a_notebook_in_a_workspace_written_through_notices_no_death() -> Result<()> {
    works("through", deaths())
}

/// `make posix` asks for more of them.
fn deaths() -> usize {
    std::env::var("MILLPOND_JUPYTER_DEATHS")
        .map_or(12, |text| text.parse().expect("MILLPOND_JUPYTER_DEATHS is a number"))
}
