//! Test suites that others wrote, in volumes that can be written to: fsx, whose one file must always read as it was written,
//! fio, which knows the checksum of each block that it wrote, and pjdfstest, which knows what POSIX wants of each call.
//! scripts/posix installs and names them.

use crate::real_s3::RealS3;
use crate::seed;
use anyhow::{Context, Result, ensure};
use e2e::clock::wait_until;
use e2e::node::{AgentOptions, Mounted, Node};
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const EXCLUDED: &str = include_str!("../../posix/excluded.txt");
const FSX: &str = include_str!("../../posix/fsx.toml");

/// Where the bytes go.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Store {
    /// The testkit's.
    S3,
    Directory,
    Moto,
    Minio,
}

fn tool(name: &str) -> PathBuf {
    let dir = std::env::var_os("MILLPOND_POSIX_DIR")
        .expect("scripts/posix says where its tools are: run these tests by it");
    Path::new(&dir).join(name)
}

/// `make posix` asks for more of them.
fn operations() -> u64 {
    std::env::var("MILLPOND_FSX_OPERATIONS")
        .map_or(5_000, |text| text.parse().expect("MILLPOND_FSX_OPERATIONS is a number"))
}

/// A volume of a new node.
struct Workspace {
    node: Node,
    mounted: Mounted,
    /// Ended after its node.
    real: Option<RealS3>,
    store: Store,
}

const PREFIX: &str = "posix";

impl Workspace {
    fn new(store: Store, mode: &str) -> Result<Self> {
        let mut node = Node::start(AgentOptions::default())?;
        let mode = ("writeMode", mode);
        let real = match store {
            Store::S3 | Store::Directory => None,
            Store::Moto => Some(RealS3::moto(&node)?),
            Store::Minio => Some(RealS3::minio(&node)?),
        };
        let mounted = match &real {
            Some(real) => real.workspace(&mut node, PREFIX, PREFIX, &[mode])?,
            None if store == Store::Directory => {
                let dir = Self::directory(&node);
                fs::create_dir(&dir)?;
                let agent = node.options().uid;
                std::os::unix::fs::chown(&dir, Some(agent), Some(agent))?;
                node.directory_workspace(PREFIX, &dir, &[mode])?
            }
            None => node.workspace(PREFIX, PREFIX, &[mode])?,
        };
        Ok(Self { node, mounted, real, store })
    }

    fn directory(node: &Node) -> PathBuf {
        node.places().buckets().join("posix-directory")
    }

    /// What the store keeps of a file.
    fn stored(&self, name: &str) -> Result<Vec<u8>> {
        let key = format!("{PREFIX}/{name}");
        match &self.real {
            Some(real) => real.read(&self.node, &key),
            None if self.store == Store::Directory => Ok(fs::read(Self::directory(&self.node).join(name))?),
            None => Ok(fs::read(self.node.server.file(&key))?),
        }
    }

    fn finish(self) -> Result<()> {
        self.node.finish()
    }
}

// ---------------------------------------------------------------------- fsx

/// fsx at work on a file of a mount.
struct Exerciser {
    process: Child,
    places: PathBuf,
}

impl Exerciser {
    fn start(workspace: &Workspace, seed: u64, operations: u64) -> Result<Self> {
        let places = workspace.node.places().root().join("fsx");
        fs::create_dir(&places)?;
        fs::write(places.join("fsx.toml"), FSX)?;
        let said = File::create(places.join("said"))?;
        let process = Command::new(tool("fsx"))
            .args(["-N", &operations.to_string(), "-S", &seed.to_string(), "-f"])
            .arg(places.join("fsx.toml"))
            .arg("-P")
            .arg(&places)
            .arg(workspace.mounted.target.join("exercised"))
            .stdin(std::process::Stdio::null())
            .stdout(said.try_clone()?)
            .stderr(said)
            .spawn()
            .context("fsx")?;
        Ok(Self { process, places })
    }

    fn ended(&mut self) -> Result<Option<ExitStatus>> {
        Ok(self.process.try_wait()?)
    }

    fn finish(mut self, workspace: &Workspace, operations: u64) -> Result<()> {
        let target = &workspace.mounted.target;
        let status = self.process.wait()?;
        let said = fs::read_to_string(self.places.join("said"))?;
        if !status.success() {
            let good = fs::read(self.places.join("exercised.fsxgood")).unwrap_or_default();
            let differs = fs::read(target.join("exercised")).map(|is| first_difference(&is, &good));
            let last: Vec<&str> = said.lines().rev().take(60).collect();
            let last: Vec<&str> = last.into_iter().rev().collect();
            anyhow::bail!(
                "fsx ended with {status}; difference: {differs:?}; its last words:\n{}",
                last.join("\n")
            );
        }
        println!("fsx: {operations} operations");
        // In the store as well, sooner or later.
        let is = fs::read(target.join("exercised"))?;
        let is_stored = || workspace.stored("exercised").is_ok_and(|stored| stored == is);
        ensure!(wait_until(PATIENCE, is_stored), "the store has other bytes than the volume");
        Ok(())
    }
}

/// A panic of the test must not leave it behind in a mount that is to go.
impl Drop for Exerciser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn first_difference(is: &[u8], good: &[u8]) -> String {
    let at = is.iter().zip(good).position(|(is, good)| is != good);
    format!("{} bytes of {}, first at {at:?}", is.len(), good.len())
}

fn exercise(store: Store, mode: &str) -> Result<()> {
    let (seed, operations) = (seed(), operations());
    let workspace = Workspace::new(store, mode)?;
    let begun = Instant::now();
    Exerciser::start(&workspace, seed, operations)?.finish(&workspace, operations)?;
    println!("{:.1} s", begun.elapsed().as_secs_f64());
    workspace.finish()
}

#[test]
fn fsx_finds_nothing_on_s3_written_through() -> Result<()> {
    exercise(Store::S3, "through")
}

#[test]
fn fsx_finds_nothing_on_s3_written_back() -> Result<()> {
    exercise(Store::S3, "back")
}

#[test]
fn fsx_finds_nothing_in_a_directory_written_through() -> Result<()> {
    exercise(Store::Directory, "through")
}

#[test]
fn fsx_finds_nothing_in_a_directory_written_back() -> Result<()> {
    exercise(Store::Directory, "back")
}

#[test]
fn fsx_finds_nothing_on_moto_written_through() -> Result<()> {
    exercise(Store::Moto, "through")
}

#[test]
fn fsx_finds_nothing_on_moto_written_back() -> Result<()> {
    exercise(Store::Moto, "back")
}

#[test]
fn fsx_finds_nothing_on_minio_written_through() -> Result<()> {
    exercise(Store::Minio, "through")
}

#[test]
fn fsx_finds_nothing_on_minio_written_back() -> Result<()> {
    exercise(Store::Minio, "back")
}

/// Between two deaths: a long run is to do its operations, too.
fn deaths_every() -> Duration {
    Duration::from_secs((operations() / 20_000).clamp(1, 10))
}

/// `die` takes something down; the next time it does so [`deaths_every`] after its return.
fn exercise_under_deaths(
    store: Store,
    mode: &str,
    mut die: impl FnMut(&mut Workspace) -> Result<()>,
) -> Result<()> {
    let (seed, operations) = (seed(), operations());
    let mut workspace = Workspace::new(store, mode)?;
    let mut fsx = Exerciser::start(&workspace, seed, operations)?;
    let mut deaths = 0;
    while fsx.ended()?.is_none() {
        die(&mut workspace)?;
        deaths += 1;
        // Not to wait for what is over.
        let over = || fsx.ended().is_ok_and(|ended| ended.is_some());
        let _ = wait_until(deaths_every(), over);
    }
    fsx.finish(&workspace, operations)?;
    println!("{deaths} deaths");
    ensure!(deaths > 1, "it was over before anybody died");
    workspace.finish()
}

fn worker_dies(workspace: &mut Workspace) -> Result<()> {
    let worker = workspace.node.worker_of(&workspace.mounted.id, PATIENCE)?;
    workspace.node.signal_worker(worker, rustix::process::Signal::KILL)
}

fn agent_dies(workspace: &mut Workspace) -> Result<()> {
    workspace.node.kill_agent()?;
    workspace.node.start_agent()?;
    workspace.node.wait_served(PATIENCE)
}

#[test]
fn fsx_does_not_notice_deaths_of_workers() -> Result<()> {
    exercise_under_deaths(Store::S3, "through", worker_dies)
}

#[test]
fn fsx_does_not_notice_deaths_of_workers_when_written_back() -> Result<()> {
    exercise_under_deaths(Store::Directory, "back", worker_dies)
}

#[test]
fn fsx_does_not_notice_deaths_of_agents() -> Result<()> {
    exercise_under_deaths(Store::S3, "through", agent_dies)
}

#[test]
fn fsx_does_not_notice_deaths_of_agents_in_a_directory() -> Result<()> {
    exercise_under_deaths(Store::Directory, "through", agent_dies)
}

#[test]
fn fsx_does_not_notice_deaths_of_agents_when_written_back() -> Result<()> {
    exercise_under_deaths(Store::S3, "back", agent_dies)
}

#[test]
fn fsx_does_not_notice_deaths_of_workers_on_minio() -> Result<()> {
    exercise_under_deaths(Store::Minio, "back", worker_dies)
}

#[test]
fn fsx_does_not_notice_deaths_of_agents_on_minio() -> Result<()> {
    exercise_under_deaths(Store::Minio, "through", agent_dies)
}

// ---------------------------------------------------------------------- fio

/// One of fio's ways to write.
struct Job {
    engine: &'static str,
    rw: &'static str,
    sizes: &'static str,
}

/// Blocks of both sorts of programs, and such as are written through a mapping.
const JOBS: [Job; 3] = [
    Job { engine: "psync", rw: "randwrite", sizes: "512-64k" },
    Job { engine: "psync", rw: "write", sizes: "1m-1m" },
    Job { engine: "mmap", rw: "randwrite", sizes: "4k-4k" },
];

/// Of each of two files; more where more operations of fsx are asked for.
fn megabytes() -> u64 {
    (operations() / 600).clamp(8, 64)
}

/// Each block with its checksum. `only`: they were written before.
fn fio(mounted: &Mounted, job: &Job, seed: u64, only: bool) -> Result<Child> {
    let Job { engine, rw, sizes } = job;
    let mut command = Command::new("fio");
    command.args(["--name=verified", "--numjobs=2", "--fallocate=none", "--end_fsync=1"]);
    command.arg(format!("--size={}m", megabytes()));
    command.args(["--verify=crc32c", "--do_verify=1", "--verify_fatal=1", "--verify_backlog=100"]);
    command.args([format!("--ioengine={engine}"), format!("--rw={rw}"), format!("--bsrange={sizes}")]);
    command.arg(format!("--randseed={seed}")).arg(format!("--directory={}", mounted.target.display()));
    // Its state of a verification that was cut short, to a place of its own.
    command.current_dir("/tmp").args(only.then_some("--verify_only"));
    command.stdin(std::process::Stdio::null()).stdout(std::process::Stdio::piped());
    command.stderr(std::process::Stdio::piped()).spawn().context("fio")
}

fn ended_well(fio: Child, what: &str) -> Result<()> {
    let run = fio.wait_with_output()?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(run.status.success(), "{what}: {}\n{}\n{}", run.status, said(&run.stdout), said(&run.stderr));
    Ok(())
}

/// Workers die while it writes; then an agent, and all is read once more.
fn verified(store: Store, mode: &str) -> Result<()> {
    let seed = seed() % (1 << 31);
    let mut workspace = Workspace::new(store, mode)?;
    for job in &JOBS {
        let what = format!("{} by {}, seed {seed}", job.rw, job.engine);
        let mut writing = fio(&workspace.mounted, job, seed, false)?;
        let mut deaths = 0;
        while writing.try_wait()?.is_none() {
            worker_dies(&mut workspace)?;
            deaths += 1;
            let _ = wait_until(deaths_every(), || writing.try_wait().is_ok_and(|ended| ended.is_some()));
        }
        ended_well(writing, &what)?;
        agent_dies(&mut workspace)?;
        // Not from the kernel's pages.
        for number in 0..2 {
            let file = File::open(workspace.mounted.target.join(format!("verified.{number}.0")))?;
            file.sync_all()?;
            rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
        }
        ended_well(
            fio(&workspace.mounted, job, seed, true)?,
            &format!("{what}, read after an agent's death"),
        )?;
        println!("fio: {what}: {} MiB, {deaths} deaths of workers", 2 * megabytes());
    }
    workspace.finish()
}

#[test]
fn fio_finds_each_block_as_written_on_s3_written_through() -> Result<()> {
    verified(Store::S3, "through")
}

#[test]
fn fio_finds_each_block_as_written_on_s3_written_back() -> Result<()> {
    verified(Store::S3, "back")
}

#[test]
fn fio_finds_each_block_as_written_in_a_directory_written_back() -> Result<()> {
    verified(Store::Directory, "back")
}

#[test]
fn fio_finds_each_block_as_written_on_minio_written_through() -> Result<()> {
    verified(Store::Minio, "through")
}

// ---------------------------------------------------------------------- pjdfstest

/// Two users beside root, each with its group, as every Linux has them.
fn users() -> Result<String> {
    let mut entries = Vec::new();
    for name in ["nobody", "daemon"] {
        let group = Command::new("id").args(["-gn", name]).output()?;
        ensure!(group.status.success(), "no user {name}");
        entries.push(format!("[{name:?}, {:?}]", String::from_utf8(group.stdout)?.trim()));
    }
    Ok(format!("[{}]", entries.join(", ")))
}

/// Cases that an object store cannot pass, or that this machine cannot run.
fn excluded(store: Store) -> BTreeMap<&'static str, &'static str> {
    let lines = EXCLUDED.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let entries = lines.filter_map(|line| {
        let mut words = line.splitn(3, ' ');
        let parts = (words.next(), words.next(), words.next().map(str::trim));
        let (Some(of), Some(name), Some(reason)) = parts else {
            panic!("excluded.txt: STORE CASE REASON, not {line:?}")
        };
        let applies = match of {
            "all" => true,
            "s3" => store != Store::Directory,
            "file" => store == Store::Directory,
            _ => panic!("excluded.txt: all, s3 or file, not {line:?}"),
        };
        applies.then_some((name, reason))
    });
    entries.collect()
}

fn conform(store: Store, mode: &str) -> Result<()> {
    let workspace = Workspace::new(store, mode)?;
    let target = &workspace.mounted.target;
    // Its other users make names in it.
    fs::set_permissions(target, fs::Permissions::from_mode(0o777))?;
    let places = workspace.node.places().root().join("pjdfstest");
    fs::create_dir(&places)?;
    let config = format!(
        "[features]\nposix_fallocate = {{}}\nrename_ctime = {{}}\nutime_now = {{}}\nutimensat = {{}}\n\
         [settings]\nnaptime = 0.01\n[dummy_auth]\nentries = {}\n",
        users()?
    );
    fs::write(places.join("pjdfstest.toml"), config)?;
    let begun = Instant::now();
    let run = Command::new(tool("pjdfstest"))
        .arg("-c")
        .arg(places.join("pjdfstest.toml"))
        // By a short name, so that a socket's fits into its address.
        .current_dir(target)
        .args(["-p", "/proc/self/cwd"])
        .arg("-s") // another file system, for EXDEV
        .arg(&places)
        .args(std::env::var("MILLPOND_PJDFSTEST").ok())
        .env("NO_COLOR", "1")
        .stdin(std::process::Stdio::null())
        .output()
        .context("pjdfstest")?;
    let said = String::from_utf8_lossy(&run.stdout);
    let (mut passed, mut other) = (BTreeSet::new(), BTreeMap::<&str, String>::new());
    let mut last = None;
    for line in said.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [name, "ok"] => _ = passed.insert(name),
            [name, verdict @ ("FAILED" | "skipped")] => {
                other.insert(name, verdict.to_owned());
                last = Some(name);
            }
            // Why.
            _ if line.starts_with('\t') => {
                if let Some(why) = last.and_then(|name| other.get_mut(name)) {
                    why.push_str(": ");
                    why.push_str(line.trim());
                }
            }
            _ => {}
        }
    }
    println!(
        "pjdfstest: {} cases pass, {} do not, {:.1} s",
        passed.len(),
        other.len(),
        begun.elapsed().as_secs_f64()
    );
    ensure!(
        said.contains("Summary: ") && !passed.is_empty(),
        "pjdfstest did not come to its end: {}\n{said}\n{}",
        run.status,
        String::from_utf8_lossy(&run.stderr)
    );
    let excluded = excluded(store);
    let unexpected = other.iter().filter(|(name, _)| !excluded.contains_key(*name));
    let mut wrong: Vec<String> = unexpected.map(|(name, why)| format!("{name} {why}")).collect();
    let too_many = excluded.keys().filter(|name| passed.contains(*name));
    wrong.extend(too_many.map(|name| format!("{name} passes: take it out of e2e/posix/excluded.txt")));
    if std::env::var_os("MILLPOND_PJDFSTEST").is_none() {
        let unknown = excluded.keys().filter(|name| !passed.contains(*name) && !other.contains_key(*name));
        wrong.extend(
            unknown.map(|name| {
                format!("{name} is no case of pjdfstest's: take it out of e2e/posix/excluded.txt")
            }),
        );
    }
    ensure!(wrong.is_empty(), "{} cases:\n{}", wrong.len(), wrong.join("\n"));
    workspace.finish()
}

#[test]
fn pjdfstest_passes_on_s3_written_through() -> Result<()> {
    conform(Store::S3, "through")
}

#[test]
fn pjdfstest_passes_on_s3_written_back() -> Result<()> {
    conform(Store::S3, "back")
}

#[test]
fn pjdfstest_passes_in_a_directory_written_through() -> Result<()> {
    conform(Store::Directory, "through")
}

#[test]
fn pjdfstest_passes_in_a_directory_written_back() -> Result<()> {
    conform(Store::Directory, "back")
}

#[test]
fn pjdfstest_passes_on_moto_written_through() -> Result<()> {
    conform(Store::Moto, "through")
}

#[test]
fn pjdfstest_passes_on_moto_written_back() -> Result<()> {
    conform(Store::Moto, "back")
}

#[test]
fn pjdfstest_passes_on_minio_written_through() -> Result<()> {
    conform(Store::Minio, "through")
}

#[test]
fn pjdfstest_passes_on_minio_written_back() -> Result<()> {
    conform(Store::Minio, "back")
}
