//! Millpond in a real Kubernetes: starts a cluster in namespaces, installs from the manifests, checks, takes all down.

use anyhow::{Context, Result, bail};
use clap::Parser;
use e2e::cluster::Suite;
use e2e::cluster::checks::{ALL, Check};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

#[derive(Parser)]
#[command(
    about = "Runs Millpond in a real Kubernetes, on this machine or (KUBECONFIG) in a cluster of yours"
)]
struct Options {
    /// Only these checks (after an install, where one of them needs it).
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Names and claims of all checks.
    #[arg(long)]
    list: bool,
    /// No checks: a cluster without Millpond, for --keep.
    #[arg(long, conflicts_with = "only")]
    bare: bool,
    /// Leave the cluster running after the checks, until Enter is pressed.
    #[arg(long)]
    keep: bool,
    /// The checkout with e2e/cluster and deploy/.
    #[arg(long, default_value = ".")]
    source: PathBuf,
    /// Built programs are kept here between runs.
    #[arg(long, env = "MILLPOND_E2E_CACHE")]
    cache: Option<PathBuf>,
    /// Millpond's image as a docker-archive tar, instead of what scripts/image makes.
    #[arg(long)]
    image: Option<PathBuf>,
    /// Where logs go when a check fails.
    #[arg(long, default_value = "target/e2e-logs")]
    logs: PathBuf,
}

fn main() -> Result<ExitCode> {
    let options = Options::parse();
    if options.list {
        for check in ALL {
            println!("{:12} {}", check.name, check.claim);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let chosen = if options.bare { Vec::new() } else { chosen(&options.only)? };
    let cache = match &options.cache {
        Some(cache) => cache.clone(),
        None => PathBuf::from(std::env::var_os("HOME").context("HOME is not set: set MILLPOND_E2E_CACHE")?)
            .join(".cache/millpond-e2e"),
    };
    let begun = Instant::now();
    let mut suite = match std::env::var_os("KUBECONFIG").filter(|path| !path.is_empty()) {
        Some(kubeconfig) => Suite::attach(&options.source, kubeconfig.into())?,
        None => Suite::start(&options.source, &cache, options.image.clone(), &options.logs)?,
    };
    println!("cluster ready in {:.0} s", begun.elapsed().as_secs_f64());
    let (mut passed, mut not_run) = (0, 0);
    let mut failed = Vec::new();
    for check in chosen {
        if let (false, Some(why)) = (suite.is_ours(), check.own_cluster) {
            not_run += 1;
            println!("{} ... not run in a cluster of yours: {why}", check.name);
            continue;
        }
        println!("{}: {}", check.name, check.claim);
        let begun = Instant::now();
        match (check.run)(&mut suite) {
            Ok(()) => {
                passed += 1;
                println!("{} ... ok ({:.0} s)", check.name, begun.elapsed().as_secs_f64());
            }
            Err(e) => {
                println!("{} ... FAILED ({:.0} s)", check.name, begun.elapsed().as_secs_f64());
                // Without a backtrace: the causes say what was seen.
                e.chain().for_each(|cause| println!("    {cause}"));
                print!("{}", suite.node_state());
                failed.push(format!("{}: {e:#}", check.name));
                let logs = options.logs.join(check.name);
                match suite.collect_logs(&logs) {
                    Ok(()) => println!("logs of all parts: {}", logs.display()),
                    Err(e) => println!("logs could not be collected: {e:#}"),
                }
                if let Err(e) = suite.clear() {
                    println!("what it left could not be removed: {e:#}");
                }
            }
        }
        std::io::stdout().flush()?;
    }
    if options.keep && suite.is_ours() {
        keep(&suite)?;
    }
    if let Err(e) = suite.finish() {
        failed.push(format!("the end: {e:#}"));
    }
    failed.iter().for_each(|why| println!("FAILED {why}"));
    if not_run > 0 {
        println!("{not_run} not run (named above)");
    }
    println!("{passed} passed, {} failed ({:.0} s)", failed.len(), begun.elapsed().as_secs_f64());
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chosen(only: &[String]) -> Result<Vec<&'static Check>> {
    for name in only {
        if !ALL.iter().any(|c| c.name == name) {
            let names: Vec<_> = ALL.iter().map(|c| c.name).collect();
            bail!("no check is called {name}; there are: {}", names.join(", "));
        }
    }
    // Every check but the first needs what the first leaves installed.
    let wanted = |c: &&Check| only.is_empty() || c.name == ALL[0].name || only.iter().any(|n| n == c.name);
    Ok(ALL.iter().filter(wanted).collect())
}

fn keep(suite: &Suite) -> Result<()> {
    let machine = suite.machine();
    println!(
        "the cluster stays until Enter is pressed:\n  nsenter -t {} -m -n -p -- env KUBECONFIG={} PATH=$PATH:{} bash",
        machine.init(),
        machine.places().kubeconfig().display(),
        machine.places().path()?,
    );
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}
