//! Where rows play: the node that is measured, who takes part, and the record that grows with each sample.

use super::curl::Curl;
use super::machine::Machine;
use super::measure::{measure, tell};
use super::peers;
use super::record::Record;
use super::subject::Subject;
use super::who::Who;
use super::work;
use super::workload::{Delivered, Mode, Size, WITH_EACH_STORE, Workload, workloads};
use crate::node::{AgentOptions, Node, Protocol, Proxy, Server};
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};
use testkit::tls::{Authority, Front};

/// What shall be measured.
#[derive(Clone, Debug)]
pub struct Options {
    pub size: Size,
    /// What the node's store speaks; with another than S3 only the rows are measured in which that matters.
    pub store: Protocol,
    pub peers: bool,
    /// Only rows whose name contains one of these; empty: all.
    pub only: Vec<String>,
    /// Features of the agent that are turned off ([`FEATURES`]).
    pub without: Vec<&'static str>,
}

/// What `disabled_features` of the agent may name.
pub const FEATURES: [&str; 6] =
    ["passthrough", "no_open", "readdirplus", "landlock", "populate_write", "splice"];

/// Called after each sample with all so far: a run that is cut loses nothing.
type Keep = Box<dyn Fn(&Record) -> Result<()>>;

pub(super) struct Stage {
    /// What rows write to, while they play. The node's own server writes to the disk that the staging area lies on.
    memory: Option<Server>,
    node: Node,
    authority: Authority,
    options: Options,
    rows: Vec<Workload>,
    peers: Vec<Who>,
    curl: Option<PathBuf>,
    record: Record,
    keep: Keep,
    /// Hard-linked copies of the data under prefixes that no subject has read yet.
    fresh: usize,
}

/// What every peer must be able to read before anything is measured.
const TRIAL: Shape = Shape { directories: 0, files: 0, small_bytes: 0, large: 1, large_bytes: 4096 };

impl Stage {
    pub(super) fn set(options: Options, keep: impl Fn(&Record) -> Result<()> + 'static) -> Result<Self> {
        let authority = Authority::create()?;
        let of_agent = AgentOptions {
            endpoints: &["http://127.0.0.1:*", "https://127.0.0.1:*"],
            authority: Some(authority.pem.clone()),
            disabled_features: options.without.clone(),
            // Of others' signatures curl knows none.
            server_flags: if options.store == Protocol::S3 { &[] } else { &["--anonymous"] },
            ..AgentOptions::with_store(options.store)
        };
        let node = Node::start(of_agent)?;
        let machine = Machine::here(&node.places().cache())?;
        let rows = workloads(options.size);
        let record = Record::begin(machine, options.size, options.store, &rows);
        let mut stage = Self {
            memory: None,
            node,
            authority,
            options,
            rows,
            peers: Vec::new(),
            curl: peers::program("curl"),
            record,
            keep: Box::new(keep),
            fresh: 0,
        };
        stage.invite()?;
        eprintln!(
            "bench: {} with {} on {:?}",
            stage.record.subjects.keys().cloned().collect::<Vec<_>>().join(", "),
            stage.options.store,
            stage.options.size
        );
        Ok(stage)
    }

    /// Finds who takes part. A peer that cannot talk to the server is found in seconds, not after an hour of measuring.
    fn invite(&mut self) -> Result<()> {
        self.node.server.add(&Tree::generated("", TRIAL), "trial")?;
        let without = match &self.options.without[..] {
            [] => String::new(),
            some => format!("without {}", some.join(", ")),
        };
        self.record.subjects.insert(Who::Millpond.name().to_owned(), without);
        self.record.subjects.insert(Who::Native.name().to_owned(), String::new());
        match &self.curl {
            Some(program) => drop(self.record.subjects.insert("curl".into(), peers::version(program))),
            None => self.leave_out("every row's curl: curl is not installed".into()),
        }
        if self.options.store != Protocol::S3 {
            let (store, rows) = (self.options.store, WITH_EACH_STORE.map(|row| format!("\"{row}\"")));
            self.leave_out(format!(
                "every row but {}: they are measured with s3, not with {store}",
                rows.join(" and ")
            ));
            self.leave_out("peers: they are started for s3 only".into());
        }
        let wanted =
            if self.options.peers && self.options.store == Protocol::S3 { &Who::PEERS[..] } else { &[] };
        for &who in wanted {
            let Some(program) = peers::program(who.name()) else { continue };
            match self.try_out(who) {
                Ok(()) => {
                    self.record.subjects.insert(who.name().to_owned(), peers::version(&program));
                    self.peers.push(who);
                }
                Err(error) => self.leave_out(format!(
                    "{}: it cannot read from the server here: {}",
                    who.name(),
                    // The chain's first line: the rest are logs.
                    format!("{error:#}").lines().next().unwrap_or_default()
                )),
            }
        }
        Ok(())
    }

    fn try_out(&mut self, who: Who) -> Result<()> {
        let endpoint = self.node.server.endpoint();
        let subject = Subject::mount(&mut self.node, who, "trial", &endpoint, "large")?;
        let read = std::fs::read(subject.root.join("large0"));
        subject.unmount(&mut self.node)?;
        let bytes = read?.len();
        ensure!(bytes as u64 == TRIAL.large_bytes, "a file of {} bytes has {bytes}", TRIAL.large_bytes);
        Ok(())
    }

    /// Ends the node, and gives what was measured.
    pub(super) fn strike(mut self) -> Result<Record> {
        self.memory = None;
        self.node.finish()?;
        Ok(self.record)
    }

    pub(super) fn node(&mut self) -> &mut Node {
        &mut self.node
    }
    pub(super) fn size(&self) -> Size {
        self.options.size
    }

    /// Is the row measured at all?
    pub(super) fn wants(&self, workload: &str) -> bool {
        let only = &self.options.only;
        let is_of_store = self.options.store == Protocol::S3 || WITH_EACH_STORE.contains(&workload);
        is_of_store && (only.is_empty() || only.iter().any(|part| workload.contains(part.as_str())))
    }
    pub(super) fn wants_any<'a>(&self, workloads: impl IntoIterator<Item = &'a str>) -> bool {
        workloads.into_iter().any(|workload| self.wants(workload))
    }

    /// Is it measured of this one in this round? A peer takes part in few rounds, but for rows whose aims name it.
    pub(super) fn plays(&self, workload: &str, who: Who, round: usize) -> bool {
        let is_named =
            |w: &Workload| w.name == workload && w.aims.iter().any(|aim| aim.others().contains(&who));
        let today = !who.is_peer() || round < self.options.size.peer_rounds || self.rows.iter().any(is_named);
        self.wants(workload) && today
    }

    /// Millpond and the peers, of whom one of these is measured in this round.
    pub(super) fn mounted<'a>(
        &self,
        workloads: impl IntoIterator<Item = &'a str> + Clone,
        round: usize,
    ) -> Vec<Who> {
        let all = std::iter::once(Who::Millpond).chain(self.peers.iter().copied());
        all.filter(|who| workloads.clone().into_iter().any(|w| self.plays(w, *who, round))).collect()
    }

    /// A prefix with the same files (hard links) that no cache knows, and whose files the server need not read from its
    /// disk, whoever asks.
    pub(super) fn fresh(&mut self, of: &str) -> Result<String> {
        self.fresh += 1;
        let prefix = format!("fresh{}", self.fresh);
        let root = self.node.server.dir();
        link_tree(&root.join(of), &root.join(&prefix))?;
        self.node.server.rescan()?;
        // What earlier rows wrote is on the disk: no row pays for another's dirty pages.
        rustix::fs::sync();
        work::heat(&root.join(of), self.options.size.huge_bytes)?;
        Ok(prefix)
    }

    /// A prefix that nothing was written below yet.
    pub(super) fn empty(&mut self) -> String {
        self.fresh += 1;
        format!("written{}", self.fresh)
    }

    /// From here on it is this server's requests that count, which has nothing in it.
    pub(super) fn write_to_memory(&mut self) -> Result<()> {
        if self.memory.is_none() {
            self.memory = Some(Server::in_memory(self.node.places(), "memory")?);
        }
        Ok(())
    }

    pub(super) fn write_no_more(&mut self) {
        self.memory = None;
    }

    /// What is asked by those who are measured.
    pub(super) fn server(&self) -> &Server {
        self.memory.as_ref().unwrap_or(&self.node.server)
    }

    /// With an empty prefix to write to.
    pub(super) fn mount_writable(
        &mut self,
        who: Who,
        prefix: &str,
        endpoint: &str,
        mode: Mode,
    ) -> Result<Subject> {
        Subject::mount_writable(&mut self.node, who, prefix, endpoint, mode)
    }

    /// Takes down a subject that was written to.
    pub(super) fn end(&mut self, subject: Subject) -> Result<()> {
        subject.unmount(&mut self.node)
    }

    pub(super) fn mount(&mut self, who: Who, prefix: &str, endpoint: &str, profile: &str) -> Result<Subject> {
        Subject::mount(&mut self.node, who, prefix, endpoint, profile)
    }

    /// Takes a subject down together with what its rows left in the bucket and in the cache.
    pub(super) fn done(&mut self, subject: Subject, prefix: &str) -> Result<()> {
        let who = subject.who;
        subject.unmount(&mut self.node)?;
        if who == Who::Millpond {
            self.node.agent().evict_all()?;
        }
        Ok(std::fs::remove_dir_all(self.node.server.dir().join(prefix))?)
    }

    /// An empty directory on the cache's disk, for a baseline.
    pub(super) fn scratch(&self) -> Result<PathBuf> {
        let dir = self.node.places().root().join("baseline");
        match std::fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
            _ => std::fs::create_dir(&dir)?,
        }
        rustix::fs::sync();
        Ok(dir)
    }

    /// None: it is not installed.
    pub(super) fn curl(&self, endpoint: &str) -> Result<Option<Curl>> {
        let Some(program) = self.curl.clone() else { return Ok(None) };
        let authority =
            endpoint.starts_with("https:").then(|| self.node.places().root().join("authority.pem"));
        if let Some(path) = &authority {
            std::fs::write(path, &self.authority.pem)?;
        }
        Ok(Some(Curl { program, store: self.options.store, endpoint: endpoint.to_owned(), authority }))
    }

    pub(super) fn front(&self) -> Result<Front> {
        Front::start(&self.authority, self.node.server.address())
    }

    pub(super) fn link(&self, rtt_ms: u64, megabytes_per_s: u64) -> Result<Proxy> {
        Proxy::start(self.node.places(), self.server().address(), rtt_ms, megabytes_per_s)
    }

    /// Measures a workload on one of those who play, and keeps the result.
    pub(super) fn sample(
        &mut self,
        subject: &Subject,
        workload: &'static str,
        round: usize,
        work: impl FnOnce() -> Result<f64>,
    ) -> Result<()> {
        let delivered = self.delivered(workload);
        self.take(subject, [(workload, delivered)], round, |_| Ok([work()?]))
    }

    /// The same of one that is given less to do than the others.
    pub(super) fn sample_part(
        &mut self,
        subject: &Subject,
        workload: &'static str,
        round: usize,
        delivered: Delivered,
        work: impl FnOnce() -> Result<f64>,
    ) -> Result<()> {
        self.take(subject, [(workload, delivered)], round, |_| Ok([work()?]))
    }

    /// The same of work that asks something of the node.
    pub(super) fn sample_of_node(
        &mut self,
        subject: &Subject,
        workload: &'static str,
        round: usize,
        work: impl FnOnce(&Node) -> Result<f64>,
    ) -> Result<()> {
        let delivered = self.delivered(workload);
        self.take(subject, [(workload, delivered)], round, |node| Ok([work(node)?]))
    }

    /// The same of work that gives a value for each of several rows, of which those are kept that are wanted.
    pub(super) fn sample_rows<const ROWS: usize>(
        &mut self,
        subject: &Subject,
        workloads: [&'static str; ROWS],
        round: usize,
        work: impl FnOnce(&Node) -> Result<[f64; ROWS]>,
    ) -> Result<()> {
        let rows = workloads.map(|workload| (workload, self.delivered(workload)));
        self.take(subject, rows, round, work)
    }

    fn delivered(&self, workload: &str) -> Delivered {
        self.rows.iter().find(|row| row.name == workload).map(|row| row.delivers).unwrap_or_default()
    }

    fn take<const ROWS: usize>(
        &mut self,
        subject: &Subject,
        rows: [(&'static str, Delivered); ROWS],
        round: usize,
        work: impl FnOnce(&Node) -> Result<[f64; ROWS]>,
    ) -> Result<()> {
        let plays = rows.map(|(workload, _)| self.plays(workload, subject.who, round));
        if !plays.contains(&true) {
            return Ok(());
        }
        let most = rows.iter().map(|(_, delivered)| delivered.bytes).max().unwrap_or_default();
        work::touch_free_memory(2 * self.options.size.file_bytes.max(most));
        let samples = measure(&self.node, self.server(), subject, rows, round, work)?;
        for (sample, _) in samples.into_iter().zip(plays).filter(|(_, plays)| *plays) {
            tell(&sample);
            self.record.subjects.entry(sample.who.clone()).or_default();
            self.record.samples.push(sample);
        }
        (self.keep)(&self.record)
    }

    /// A peer that fails in one row costs that row, not the hours of the others.
    pub(super) fn forgive(&mut self, who: Who, workload: &str, result: Result<()>) -> Result<()> {
        match result {
            Err(error) if who.is_peer() => {
                let first = format!("{error:#}");
                let first = first.lines().next().unwrap_or_default();
                self.leave_out(format!("{} in \"{workload}\": {first}", who.name()));
                Ok(())
            }
            other => other.with_context(|| format!("{}, {workload}", who.name())),
        }
    }

    pub(super) fn leave_out(&mut self, why: String) {
        eprintln!("bench: left out: {why}");
        if !self.record.left_out.contains(&why) {
            self.record.left_out.push(why);
        }
    }

    /// Small files below `prefix` of the bucket; their names.
    pub(super) fn write_small(
        &self,
        prefix: &str,
        directories: usize,
        files: usize,
        bytes: u64,
    ) -> Result<Vec<String>> {
        let mut names = Vec::with_capacity(directories * files);
        for d in 0..directories {
            let dir = self.node.server.dir().join(prefix).join(format!("d{d:03}"));
            std::fs::create_dir_all(&dir)?;
            for f in 0..files {
                let name = format!("d{d:03}/f{f:05}");
                let content = testkit::content::bytes(testkit::content::id(&name), 0..bytes);
                std::fs::write(self.node.server.dir().join(prefix).join(&name), content)?;
                names.push(name);
            }
        }
        rustix::fs::sync();
        Ok(names)
    }
}

fn link_tree(from: &Path, to: &Path) -> Result<()> {
    let mut open = vec![(from.to_owned(), to.to_owned())];
    while let Some((from, to)) = open.pop() {
        std::fs::create_dir_all(&to)?;
        for entry in std::fs::read_dir(&from).with_context(|| from.display().to_string())? {
            let entry = entry?;
            let target: PathBuf = to.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                open.push((entry.path(), target));
            } else {
                std::fs::hard_link(entry.path(), target)?;
            }
        }
    }
    Ok(())
}
