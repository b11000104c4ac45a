//! Pods that work in volumes that can be written to while every part dies: a program in both kinds of volume, and a Jupyter server with
//! whoever sits at a notebook of it.

use super::holders::{CHOICES, Holder, delete_pods, replaced};
use super::writable::{BACK, THROUGH, object, writer};
use crate::cluster::Suite;
use crate::cluster::names::*;
use crate::cluster::objects::Pod;
use crate::cluster::waits::PATIENCE;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

const KILLS: usize = 30;
/// The program has two, the notebook one.
const VOLUMES: usize = 3;

const PROGRAM: Worker = Worker { pod: "worker", container: "main" };
const PERSON: Worker = Worker { pod: "jupyter", container: "person" };

/// What the person saves, in the notebook's volume.
pub(super) const NOTEBOOK: &str = "jupyter/work/notebook.ipynb";
/// Its home is a workspace, too, as hubs have it.
const SERVER: &str = "mkdir -p /data/jupyter/home && cd /data/jupyter && HOME=/data/jupyter/home exec python3 -m jupyter_server \
    --no-browser --ip=127.0.0.1 --port=8888 --IdentityProvider.token=of-the-suite --ServerApp.root_dir=/data/jupyter";
const AT_IT: &str = "until wget -q -O /dev/null http://127.0.0.1:8888/api; do sleep 0.2; done; \
    exec python3 /trees/jupyter.py 127.0.0.1:8888 of-the-suite";
/// Where the suite's image has Jupyter.
const JUPYTER: &str = "export PYTHONPATH=/usr/lib/jupyter JUPYTER_PATH=/usr/lib/jupyter/share/jupyter";

pub(super) fn run(suite: &Suite) -> Result<()> {
    let k = &suite.kubectl;
    k.apply(&[program()?, jupyter()])?;
    k.wait_ready(TENANT, PROGRAM.pod)?;
    k.wait_ready(TENANT, PERSON.pod)?;
    // The claim is one pod's.
    let seen = "python3 -c 'import hashlib; d = open(\"/data/work/checkpoint\", \"rb\").read(); \
        print(hashlib.sha256(d[64:]).hexdigest().encode() == d[:64])'";
    k.apply(&[writer(Pod::new(TENANT, "waits", seen).claim(THROUGH)).object()])?;
    k.wait_event(TENANT, "Pod", "waits", &["ReadWriteOncePod"])?;
    go_on(suite, 1)?;

    for kill in 0..KILLS {
        kill_one(suite)?;
        if kill == KILLS / 2 {
            let life = PROGRAM.end(suite, 1)?;
            println!("    the program's first life: {life}");
        }
    }
    println!("    {KILLS} dead workers, and a restarted container");
    for holders in CHOICES {
        replaced(suite, holders, || delete_pods(suite, holders))?;
        go_on(suite, 1)?;
        println!("    pods deleted and replaced: {holders:?}");
    }
    for holder in [Holder::Agent, Holder::Broker] {
        replaced(suite, &[holder], || {
            let pid = holder.wait(suite, None)?;
            suite.view().kill(pid)
        })?;
        go_on(suite, 1)?;
        println!("    killed: {holder:?}");
    }
    go_on(suite, 2)?;
    println!("    the program: {}", PROGRAM.end(suite, 2)?);
    println!("    the notebook: {}", PERSON.end(suite, 0)?);
    for pod in [PROGRAM.pod, PERSON.pod] {
        k.delete("pod", TENANT, pod)?;
        k.wait_gone("pod", TENANT, pod)?;
    }
    let volume = k.wait_bound(TENANT, BACK)?;
    let saved: Value = serde_json::from_slice(&object(suite, &volume, NOTEBOOK).context("no notebook")?)?;
    ensure!(saved["nbformat"] == 4, "the store has another notebook: {saved}");
    let read = k.wait_succeeded(TENANT, "waits")?;
    ensure!(read.trim() == "True", "the next pod found another checkpoint: {read}");
    println!("    ReadWriteOncePod: the second pod ran when the first had gone, and found its checkpoint");
    k.delete("pod", TENANT, "waits")?;
    k.wait_gone("pod", TENANT, "waits").map(drop)
}

/// In both kinds of volume at once; its next life goes on with what the one before has written.
fn program() -> Result<Value> {
    let other = json!({ "name": "through", "persistentVolumeClaim": { "claimName": THROUGH } });
    let pod = Pod::new(TENANT, PROGRAM.pod, "exec python3 /trees/workspace.py /data /through").claim(BACK);
    let pod = pod.mount(json!({ "name": "through", "mountPath": "/through" }));
    let mut object = writer(pod).with("restartPolicy", "Always".into()).object();
    object["spec"]["volumes"].as_array_mut().context("a pod has volumes")?.push(other);
    Ok(object)
}

fn jupyter() -> Value {
    let pod = Pod::new(TENANT, PERSON.pod, &format!("{JUPYTER}; {SERVER}")).claim(BACK);
    writer(pod.container(PERSON.container, &format!("{JUPYTER}; {AT_IT}"))).object()
}

/// Both, for so many rounds from now.
fn go_on(suite: &Suite, rounds: u64) -> Result<()> {
    [PROGRAM, PERSON].iter().try_for_each(|worker| worker.go_on(suite, rounds))
}

/// A container that says in its last line how many rounds it has worked, and how many of its calls have failed.
#[derive(Clone, Copy)]
struct Worker {
    pod: &'static str,
    container: &'static str,
}

impl Worker {
    fn go_on(self, suite: &Suite, rounds: u64) -> Result<()> {
        let so_far = |log: &str| -> u64 {
            // The last line may be half written.
            let said = log.lines().rev().find_map(|line| serde_json::from_str::<Value>(line).ok());
            said.and_then(|said| said["rounds"].as_u64()).unwrap_or(0)
        };
        let mut first = None;
        let what = format!("more rounds of {}", self.pod);
        suite.kubectl.wait(&what, PATIENCE, |k| {
            let now = so_far(&k.logs(TENANT, self.pod, self.container)?);
            Ok((now >= *first.get_or_insert(now) + rounds).then_some(()))
        })
    }

    /// Ends it, and judges its life: its last line. `restarts`: how often its container is to have begun anew by then.
    fn end(self, suite: &Suite, restarts: u64) -> Result<String> {
        let k = &suite.kubectl;
        k.exec(TENANT, self.pod, self.container, &["kill", "-TERM", "1"])?;
        let log = k.wait("a program's last words", PATIENCE, |k| {
            let pod = k.get("pod", TENANT, self.pod)?;
            let all = pod["status"]["containerStatuses"].as_array().context("container statuses")?;
            let own = all.iter().find(|c| c["name"] == self.container).context("the container's status")?;
            let mut logs = vec!["logs", "-n", TENANT, self.pod, "-c", self.container];
            let is_over = match restarts {
                0 => own["state"]["terminated"].is_object(),
                _ => own["restartCount"].as_u64() >= Some(restarts),
            };
            if restarts > 0 {
                logs.push("--previous");
            }
            is_over.then(|| k.run(&logs)).transpose()
        })?;
        let last = log.lines().last().context("it said nothing")?;
        let said: Value = serde_json::from_str(last).with_context(|| log.clone())?;
        ensure!(said["failed"] == 0 && said["rounds"].as_u64() > Some(0), "it saw failures: {log}");
        Ok(last.to_owned())
    }
}

/// `kill -9` of one worker; returns when all of them serve again.
fn kill_one(suite: &Suite) -> Result<()> {
    let view = suite.view();
    let serving = |not: u32| {
        suite.kubectl.wait("every worker at work", PATIENCE, |_| {
            let workers = view.workers()?;
            Ok((workers.len() >= VOLUMES && !workers.contains(&not)).then_some(workers))
        })
    };
    let workers = serving(0)?;
    let pid = workers[workers.iter().map(|pid| *pid as usize).sum::<usize>() % workers.len()];
    view.kill(pid)?;
    serving(pid).map(drop)
}
