//! Programs that people use, at work in a directory: git, tar, and Python's libraries for checkpoints.

use crate::random::Random;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Instant;

/// Files of the tree that git and tar work on, for each of its directories.
const FILES: usize = 25;
/// Of each, bytes at most: sources are small.
const SOURCE_BYTES: u64 = 16 << 10;
const COMMITS: usize = 20;
/// Of that many files a commit changes one.
const EVERY: usize = 10;
/// The script's exit status where Python has no such library.
const NO_LIBRARY: i32 = 3;
const SCRIPT: &str = include_str!("tools.py");

/// What git and tar are given, on a disk of its own.
pub(super) struct Material {
    repository: PathBuf,
    archive: PathBuf,
}

impl Material {
    /// A tree of about so many files with a history, and an archive of it.
    pub(super) fn make(dir: &Path, files: usize) -> Result<Self> {
        let (repository, archive) = (dir.join("repository"), dir.join("archive.tar"));
        fs::create_dir_all(&repository)?;
        git(&repository, &["init", "--quiet", "--initial-branch", "main"])?;
        let mut random = Random(11);
        let paths: Vec<PathBuf> = (0..files)
            .map(|n| repository.join(format!("d{:03}", n / FILES)).join(format!("f{n}.txt")))
            .collect();
        for commit in 0..COMMITS {
            for path in paths.iter().skip(commit % EVERY).step_by(if commit == 0 { 1 } else { EVERY }) {
                fs::create_dir_all(path.parent().context("a file has a directory")?)?;
                fs::write(path, text(&mut random))?;
            }
            commit_all(&repository)?;
        }
        run(Command::new("tar")
            .arg("-cf")
            .arg(&archive)
            .arg("-C")
            .arg(&repository)
            .arg("--exclude=.git")
            .arg("."))?;
        Ok(Self { repository, archive })
    }
}

fn text(random: &mut Random) -> String {
    let bytes = random.below(SOURCE_BYTES);
    let mut text = String::new();
    while (text.len() as u64) < bytes {
        text.push_str(&format!("let value_{} = {};\n", random.below(1000), random.below(1_000_000)));
    }
    text
}

/// What one program's work took, seconds. In the order in which they follow on each other.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    pub(super) clone: f64,
    pub(super) commit: f64,
    pub(super) gc: f64,
    pub(super) unpack: f64,
    pub(super) pack: f64,
}

/// A clone, a commit of a tenth of its files, and a gc, in a directory that is made here; then an archive unpacked and packed again.
pub(super) fn work(dir: &Path, material: &Material) -> Result<Times> {
    let clone = dir.join("clone");
    let source = format!("file://{}", material.repository.display());
    let mut times = Times::default();
    let target = clone.to_str().context("a path of ours is UTF-8")?;
    times.clone = timed(|| git(dir, &["clone", "--quiet", &source, target]).map(drop))?;
    let mut random = Random(12);
    let paths = git(&clone, &["ls-files"])?;
    let paths = String::from_utf8(paths.stdout)?;
    let changed: Vec<&str> = paths.lines().step_by(EVERY).collect();
    times.commit = timed(|| {
        for path in &changed {
            fs::write(clone.join(path), text(&mut random))?;
        }
        commit_all(&clone)
    })?;
    times.gc = timed(|| git(&clone, &["gc", "--quiet"]).map(drop))?;
    git(&clone, &["fsck", "--strict"])?;
    let status = git(&clone, &["status", "--porcelain"])?;
    ensure!(status.stdout.is_empty(), "after its commit a clone is not clean");
    let tree = dir.join("tree");
    fs::create_dir(&tree)?;
    let tar = |arguments: &[&str]| {
        let mut command = Command::new("tar");
        command.args(arguments).arg(&material.archive).arg("-C").arg(&tree);
        command
    };
    times.unpack = timed(|| run(&mut tar(&["-xf"])).map(drop))?;
    times.pack = timed(|| {
        let packed = dir.join("packed.tar");
        run(Command::new("tar").arg("-cf").arg(packed).arg("-C").arg(&tree).arg(".")).map(drop)
    })?;
    run(&mut tar(&["--compare", "-f"]))?;
    Ok(times)
}

/// Seconds to save a checkpoint, with fsync and a rename to its place, and to load it again. None: Python has no such library.
pub(super) fn checkpoint(dir: &Path, library: &str, bytes: u64) -> Result<Option<[f64; 2]>> {
    let mut command = Command::new("/usr/bin/python3"); // Debian's, for which Debian has torch
    command.args(["-c", SCRIPT, library]).arg(dir).arg(bytes.to_string());
    let output = command.output().context("python3")?;
    if output.status.code() == Some(NO_LIBRARY) {
        return Ok(None);
    }
    let output = succeeded(&command, output)?;
    let text = String::from_utf8(output.stdout)?;
    let times: Vec<f64> = text.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    match times[..] {
        [save, load] => Ok(Some([save, load])),
        _ => bail!("the script printed {text:?}"),
    }
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn commit_all(repository: &Path) -> Result<()> {
    git(repository, &["add", "--all"])?;
    git(repository, &["commit", "--quiet", "--message", "As it is now"]).map(drop)
}

/// Without what a machine's or a person's configuration says.
fn git(dir: &Path, arguments: &[&str]) -> Result<Output> {
    let mut command = Command::new("git");
    command.arg("-C").arg(dir).args(["-c", "safe.directory=*", "-c", "gc.auto=0"]).args(arguments);
    command.env("GIT_CONFIG_NOSYSTEM", "1").env("GIT_CONFIG_GLOBAL", "/dev/null");
    for who in ["AUTHOR", "COMMITTER"] {
        command.env(format!("GIT_{who}_NAME"), "bench").env(format!("GIT_{who}_EMAIL"), "bench@localhost");
    }
    run(&mut command)
}

fn run(command: &mut Command) -> Result<Output> {
    let output = command.output().with_context(|| format!("{:?} is not installed", command.get_program()))?;
    succeeded(command, output)
}

fn succeeded(command: &Command, output: Output) -> Result<Output> {
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} ended with {}: {said}", output.status);
    Ok(output)
}
