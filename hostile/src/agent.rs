//! An agent under an attacker's control, against the broker: on its own, beside the one that serves, and as the
//! node's only one.

use crate::report::{Report, errno_name};
use crate::server::Server;
use anyhow::{Context, Result, bail};
use fuse_abi::{InHeader, InitOut, OutHeader};
use link::broker::{
    AgentAnswer, AgentRequest, BrokerAnswer, BrokerRequest, FromAgent, FromBroker, Hello, Hold, MountId,
    Publish, Report as Told, Resume,
};
use link::worker::Mode;
use link::{MAX_MESSAGE, Packet, Refusal, RefusalKind};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A broker that answers at all does so within this.
const ANSWER_LIMIT: Duration = Duration::from_secs(6);
const UNKNOWN: MountId = MountId(u64::MAX);

#[derive(Debug, clap::Parser)]
#[command(
    about = "Plays an agent that an attacker has taken over, and writes down what the broker lets it do"
)]
pub struct Options {
    #[arg(long)]
    socket: PathBuf,
    /// The directory of the node: `cache/`, `run/`.
    #[arg(long)]
    node: PathBuf,
    /// A line for each attempt.
    #[arg(long)]
    report: PathBuf,
    /// The broker's process.
    #[arg(long)]
    broker: i32,
    #[arg(long)]
    part: Part,
}

#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum Part {
    /// Any user of the node.
    Stranger,
    /// The agent's user, while the agent serves.
    Beside,
    /// In the agent's place.
    Alone,
}

type Answered = Result<BrokerAnswer, Refusal>;
type Waiting = Arc<Mutex<HashMap<u64, SyncSender<Answered>>>>;

/// A mount as the broker gives it.
struct Given {
    publish: Publish,
    resume: Resume,
    device: OwnedFd,
    memory: OwnedFd,
}

struct Broker {
    packet: Arc<Packet>,
    next: AtomicU64,
    waiting: Waiting,
    given: Arc<Mutex<Vec<Given>>>,
    /// Nothing is read.
    deaf: Arc<AtomicBool>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn hello() -> Hello {
    Hello {
        protocol: version::LINK,
        agent_version: "hostile".into(),
        pid: 1,
        state: version::STATE,
        life: 7,
        successor: false,
        drained: false,
        beats: false,
    }
}

fn shown(answered: &Answered) -> String {
    match answered {
        Ok(answer) => {
            let text = format!("{answer:?}");
            text.split([' ', '{']).next().unwrap_or_default().to_owned()
        }
        Err(refusal) => format!("{:?}", refusal.kind),
    }
}

impl Broker {
    /// Err: what the broker says instead of Welcome.
    fn connect(socket: &Path, hello: Hello) -> Result<Self, String> {
        let packet = Arc::new(
            Packet::connect(socket)
                .map_err(|error| error.raw_os_error().map_or_else(|| error.to_string(), errno_name))?,
        );
        let (waiting, given): (Waiting, _) = (Waiting::default(), Arc::new(Mutex::default()));
        let deaf = Arc::new(AtomicBool::new(false));
        let (welcome, welcomed) = sync_channel(1);
        lock(&waiting).insert(0, welcome);
        let (to, answers, mounts, is_deaf) = (packet.clone(), waiting.clone(), given.clone(), deaf.clone());
        std::thread::spawn(move || listen(&to, &answers, &mounts, &is_deaf));
        let me = Self { packet, next: AtomicU64::new(1), waiting, given, deaf };
        let ask = FromAgent::Ask { id: 0, body: BrokerRequest::Hello(hello) };
        link::broker::send(&me.packet, &ask, &[]).map_err(|_| "hung up".to_owned())?;
        match welcomed.recv_timeout(ANSWER_LIMIT) {
            Ok(Ok(_)) => Ok(me),
            Ok(Err(refusal)) => Err(format!("{:?}", refusal.kind)),
            Err(_) => Err("hung up".into()),
        }
    }

    fn begin(&self, body: BrokerRequest, fds: &[BorrowedFd<'_>]) -> Result<Receiver<Answered>> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = sync_channel(1);
        lock(&self.waiting).insert(id, sender);
        link::broker::send(&self.packet, &FromAgent::Ask { id, body }, fds)?;
        Ok(receiver)
    }

    fn ask(&self, body: BrokerRequest, fds: &[BorrowedFd<'_>]) -> Result<Answered> {
        Ok(self.begin(body, fds)?.recv_timeout(ANSWER_LIMIT)?)
    }

    fn try_it(&self, report: &Report, attempt: &str, body: BrokerRequest, fds: &[BorrowedFd<'_>]) {
        let result = self.ask(body, fds).map_or_else(|_| "no answer".to_owned(), |answered| shown(&answered));
        report.note(attempt, result);
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.packet.shutdown(); // its listener holds the socket, too
    }
}

/// Until the broker hangs up.
fn listen(packet: &Packet, waiting: &Waiting, given: &Mutex<Vec<Given>>, deaf: &AtomicBool) {
    let mut buffer = vec![0; MAX_MESSAGE];
    let mut publishes = 0;
    loop {
        while deaf.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(10));
        }
        let Ok((frame, mut fds)) = link::broker::recv::<FromBroker>(packet, &mut buffer) else {
            lock(waiting).clear();
            return;
        };
        match frame {
            FromBroker::Answer { id, body } => {
                if let Some(sender) = lock(waiting).remove(&id) {
                    let _ = sender.try_send(body); // its asker waits no longer
                }
            }
            FromBroker::Ask { id, body } => {
                let (body, attached) = match body {
                    AgentRequest::Adopt(adopt) if fds.len() == 2 => {
                        if let (Some(memory), Some(device)) = (fds.pop(), fds.pop()) {
                            let (publish, resume) = (adopt.publish, adopt.resume);
                            lock(given).push(Given { publish, resume, device, memory });
                        }
                        (Ok(AgentAnswer::Done), None)
                    }
                    AgentRequest::Publish(publish) => {
                        publishes += 1;
                        publish_answer(publishes, &publish, fds.pop())
                    }
                    AgentRequest::Start { .. } | AgentRequest::Unpublish { .. } => {
                        (Ok(AgentAnswer::Done), None)
                    }
                    // Whatever else it is asked is answered with something else.
                    AgentRequest::Holding | AgentRequest::Usage { .. } => (Ok(AgentAnswer::Done), None),
                    _ => (Ok(AgentAnswer::Holding { mounts: vec![UNKNOWN] }), None),
                };
                let fds: Vec<BorrowedFd<'_>> = attached.iter().map(AsFd::as_fd).collect();
                let _ = link::broker::send(packet, &FromAgent::Answer { id, body }, &fds); // it has hung up
            }
        }
    }
}

type PublishAnswer = (Result<AgentAnswer, Refusal>, Option<OwnedFd>);

/// Another one for each publish; the last makes a mount.
fn publish_answer(publishes: u32, publish: &Publish, device: Option<OwnedFd>) -> PublishAnswer {
    let null = || File::open("/dev/null").ok().map(OwnedFd::from);
    let prepared = |init_reply: Vec<u8>| {
        Ok(AgentAnswer::Prepared {
            init_reply,
            read_ahead_kb: u32::MAX,
            resume: Resume::new(Mode::Kept, "../../etc".into()),
        })
    };
    match publishes {
        1 => (Ok(AgentAnswer::Done), null()),
        2 => (prepared(vec![0; 80]), None),
        3 => (prepared(Vec::new()), null()),
        4 => (prepared(vec![7; 12_000]), null()),
        5 => (prepared(vec![0xff; 80]), null()),
        6 => (prepared(OutHeader::new(0, 3, 0).to_bytes().to_vec()), null()),
        7 => (Err(Refusal::new(RefusalKind::Invalid, "\u{1b}x".repeat(5000))), null()),
        _ => {
            let unique = publish.init.first_chunk().map_or(0, |header| InHeader::from_bytes(header).unique);
            let out = InitOut { major: 7, minor: 31, max_write: 4096, time_gran: 1, ..InitOut::default() };
            let mut reply = OutHeader::new(InitOut::BYTES, 0, unique).to_bytes().to_vec();
            reply.extend(out.to_bytes());
            if let Some(device) = device {
                std::thread::spawn(move || Arc::new(Server::default()).run(&device));
            }
            (prepared(reply), null())
        }
    }
}

/// # Errors
/// The attacker cannot play its part.
pub fn run(options: &Options) -> Result<()> {
    let report = Report::open(&options.report)?;
    match options.part {
        Part::Stranger => {
            report.note("connect as another user", connected(Broker::connect(&options.socket, hello())));
        }
        Part::Beside => beside(options, &report)?,
        Part::Alone => alone(options, &report)?,
    }
    report.note("over", format!("{:?}", options.part));
    Ok(())
}

fn connected(result: Result<Broker, String>) -> String {
    result.map_or_else(|why| why, |_| "achieved: Welcome".into())
}

fn beside(options: &Options, report: &Report) -> Result<()> {
    let greet = |attempt: &str, hello: Hello| {
        report.note(attempt, connected(Broker::connect(&options.socket, hello)));
    };
    greet("be a second agent", hello());
    greet("a Hello of another protocol", Hello { protocol: 99, ..hello() });
    greet("a Hello at length", Hello { agent_version: "x".repeat(60_000), ..hello() });
    greet("succeed with another state", Hello { successor: true, state: 99, ..hello() });
    // No Hello at all.
    let mute = Packet::connect(&options.socket)?;
    link::broker::send(&mute, &FromAgent::Ask { id: 1, body: BrokerRequest::Beat }, &[])?;
    mute.set_recv_timeout(Some(ANSWER_LIMIT))?;
    let answer = link::broker::recv::<FromBroker>(&mute, &mut vec![0; MAX_MESSAGE]);
    report.note("ask before Hello", answer.map_or_else(|_| "hung up".to_owned(), |_| "answered".into()));
    // One that says that it has nothing to do with the mounts of the other.
    let drained =
        Broker::connect(&options.socket, Hello { drained: true, ..hello() }).map_err(anyhow::Error::msg)?;
    for mount in (1..200).map(MountId) {
        let why = "hostile".to_owned();
        let answers = [
            drained.ask(BrokerRequest::Abort { mount, why: why.clone() }, &[])?,
            drained.ask(BrokerRequest::Report { mount, report: Told::Degraded { why } }, &[])?,
            drained.ask(BrokerRequest::Waiting { mount }, &[])?,
            drained.ask(BrokerRequest::Probe { mount }, &[])?,
            drained.ask(BrokerRequest::BackingClose { mount, id: 1 }, &[])?,
        ];
        if answers.iter().any(|answered| shown(answered) != "NotFound") {
            bail!("{mount}: {answers:?}");
        }
    }
    report.note("speak of another agent's mounts", "NotFound");
    drop(drained);
    // A successor that answers nonsense to what it is asked: nothing comes of it.
    let successor = Broker::connect(&options.socket, Hello { successor: true, ..hello() });
    std::thread::sleep(Duration::from_secs(2));
    report.note("claim to be the successor, and answer nonsense", connected(successor));
    // Connections that say nothing take places for as long as a Hello may take.
    let silent: Vec<_> = (0..64).filter_map(|_| Packet::connect(&options.socket).ok()).collect();
    std::thread::sleep(Duration::from_millis(500));
    report.note("connections that say nothing", connected(Broker::connect(&options.socket, hello())));
    drop(silent);
    let free = (0..50).any(|_| {
        std::thread::sleep(Duration::from_millis(200));
        connected(Broker::connect(&options.socket, hello())) == "Conflict"
    });
    report.note("afterwards", if free { "Conflict" } else { "hung up" });
    Ok(())
}

fn alone(options: &Options, report: &Report) -> Result<()> {
    let broker = Broker::connect(&options.socket, hello()).map_err(anyhow::Error::msg)?;
    let end = Instant::now() + Duration::from_secs(10);
    while lock(&broker.given).len() < 2 && Instant::now() < end {
        std::thread::sleep(Duration::from_millis(20));
    }
    let mounts: Vec<MountId> = lock(&broker.given).iter().map(|given| given.publish.mount).collect();
    let [first, _, ..] = mounts[..] else { bail!("two mounts are adopted: {mounts:?}") };
    report.note("be given the mounts without an agent", "achieved: as any agent");
    broker.try_it(report, "a second Hello", BrokerRequest::Hello(hello()), &[]);
    passthrough(&broker, options, first, report)?;
    holds(&broker, report)?;
    groups(&broker, options, report)?;
    for (attempt, body) in [
        ("abort what is not there", BrokerRequest::Abort { mount: UNKNOWN, why: String::new() }),
        ("report what is not there", BrokerRequest::Report { mount: UNKNOWN, report: Told::Recovered }),
        ("count requests of what is not there", BrokerRequest::Waiting { mount: UNKNOWN }),
        ("look through what is not there", BrokerRequest::Probe { mount: UNKNOWN }),
        ("which threads of the node are being killed", BrokerRequest::Dying { tids: (0..9000).collect() }),
        ("take leave", BrokerRequest::Leaving),
        ("stay nevertheless", BrokerRequest::Beat),
    ] {
        broker.try_it(report, attempt, body, &[]);
    }
    nonsense(&broker, report)?;
    let why = || "\u{1b}[2J\n".repeat(4000);
    let begun = Instant::now();
    for _ in 0..2000 {
        let told = Told::SourceAway { why: why(), stale: false };
        let _ = broker.ask(BrokerRequest::Report { mount: first, report: told }, &[])?;
    }
    report.note(
        "events without end",
        if begun.elapsed() < Duration::from_secs(30) { "Done" } else { "held up" },
    );
    // Questions that take a thread each, and no answer is read.
    broker.deaf.store(true, Ordering::SeqCst);
    let end = Instant::now() + Duration::from_secs(4);
    let mut asked = 0u64;
    while Instant::now() < end {
        let ask = FromAgent::Ask { id: 1 << 40, body: BrokerRequest::Probe { mount: first } };
        match link::broker::try_send(&broker.packet, &ask, &[]) {
            Ok(()) => asked += 1,
            Err(_) => std::thread::sleep(Duration::from_micros(200)),
        }
    }
    broker.deaf.store(false, Ordering::SeqCst);
    report.note("ask without reading", if asked > 100 { "asked" } else { "held up at once" });
    std::thread::sleep(Duration::from_secs(3));
    // As long as the test publishes: each time another answer.
    report.note("waits for publishes", "now");
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end && !options.node.join("run/agent/hostile-over").exists() {
        let _ = broker.ask(BrokerRequest::Beat, &[])?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

fn cached_file(directory: &Path) -> Option<PathBuf> {
    for entry in std::fs::read_dir(directory).ok()?.flatten() {
        let path = entry.path();
        let below = directory.components().count();
        match entry.file_type().ok()? {
            kind if kind.is_dir() => match cached_file(&path) {
                None => {}
                found => return found,
            },
            kind if kind.is_file() && below > 3 && entry.metadata().ok()?.len() > 4096 => return Some(path),
            _ => {}
        }
    }
    None
}

fn passthrough(broker: &Broker, options: &Options, mount: MountId, report: &Report) -> Result<()> {
    let tier = options.node.join("cache/ssd");
    let cached = cached_file(&tier).context("a cached file")?;
    let scope = cached.parent().context("it lies in a directory")?;
    let link = scope.join("hostile-link");
    let _ = std::os::unix::fs::symlink("/etc/passwd", &link);
    let (gone, other) = (scope.join("hostile-gone"), scope.join("hostile-other"));
    std::fs::write(&gone, vec![1; 8192])?;
    std::fs::write(&other, vec![2; 8192])?;
    let replaced = File::open(&gone)?;
    std::fs::rename(&other, &gone)?;
    let unlinked = File::open(&gone)?;
    std::fs::remove_file(&gone)?;
    let path_only = rustix::fs::open(&cached, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty())?;
    let (pipe, _writer) = rustix::pipe::pipe()?;
    let open = |path: &Path| Ok::<OwnedFd, std::io::Error>(File::open(path)?.into());
    let tries: [(&str, OwnedFd); 9] = [
        ("a file of the host", open(Path::new("/etc/passwd"))?),
        ("a link to a file of the host", open(&link)?),
        ("a directory of the cache", open(&tier)?),
        ("a device", open(Path::new("/dev/null"))?),
        ("a pipe", pipe),
        ("a cache file to write", File::options().read(true).write(true).open(&cached)?.into()),
        ("a path alone", path_only),
        ("a cache file that was replaced", replaced.into()),
        ("a cache file that was unlinked", unlinked.into()),
    ];
    for (what, file) in &tries {
        let body = BrokerRequest::BackingOpen { mount };
        broker.try_it(report, &format!("pass through {what}"), body, &[file.as_fd()]);
    }
    let file = open(&cached)?;
    let ask = |mount| BrokerRequest::BackingOpen { mount };
    broker.try_it(report, "pass through nothing", ask(mount), &[]);
    broker.try_it(report, "pass through two files", ask(mount), &[file.as_fd(), file.as_fd()]);
    broker.try_it(report, "pass a file through an unknown mount", ask(UNKNOWN), &[file.as_fd()]);
    // Those that were opened are its mount's, and so its own to close.
    for id in 1_000_000..1_000_300 {
        let closed = broker.ask(BrokerRequest::BackingClose { mount, id }, &[])?;
        if shown(&closed) != "Done" {
            bail!("close {id}: {closed:?}");
        }
    }
    report.note("close passthrough files that were never opened", "Done");
    let _ = std::fs::remove_file(&link);
    Ok(())
}

fn holds(broker: &Broker, report: &Report) -> Result<()> {
    let given = std::mem::take(&mut *lock(&broker.given));
    let [first, second, ..] = &given[..] else { bail!("two mounts") };
    let hold = |publish: &Publish, target: Option<&str>| {
        let mut spec = publish.spec.clone();
        if let Some(target) = target {
            target.clone_into(&mut spec.target);
        }
        let publish = Publish {
            mount: MountId(1 << 50),
            spec,
            secrets: publish.secrets.clone(),
            init: publish.init.clone(),
        };
        BrokerRequest::Hold(Box::new(Hold { publish, resume: first.resume.clone(), backing: vec![1, 2, 3] }))
    };
    let null: OwnedFd = File::open("/dev/null")?.into();
    let (ended, writer) = rustix::pipe::pipe()?;
    drop(writer); // to poll it looks like a device whose connection has ended
    let unsealed = rustix::fs::memfd_create("hostile", rustix::fs::MemfdFlags::CLOEXEC)?;
    let (device, memory) = (first.device.as_fd(), first.memory.as_fd());
    let above = format!("{}/../../../../../../../../etc", first.publish.spec.target);
    let own = &first.publish;
    for (attempt, body, fds) in [
        ("hold a mount without descriptors", hold(own, None), vec![]),
        ("hold /etc", hold(own, Some("/etc")), vec![device, memory]),
        ("hold a target that leads upwards", hold(own, Some(&above)), vec![device, memory]),
        ("hold a target without a path", hold(own, Some("")), vec![device, memory]),
        ("hold a mount with another mount's device", hold(&second.publish, None), vec![device, memory]),
        ("hold a mount a second time", hold(own, None), vec![device, memory]),
        ("hold a mount with no device", hold(own, None), vec![null.as_fd(), memory]),
        ("hold a mount that lives as one that has ended", hold(own, None), vec![ended.as_fd(), memory]),
        ("hold with memory that can be cut", hold(own, None), vec![device, unsealed.as_fd()]),
    ] {
        broker.try_it(report, attempt, body, &fds);
    }
    lock(&broker.given).extend(given);
    Ok(())
}

fn groups(broker: &Broker, options: &Options, report: &Report) -> Result<()> {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    let process =
        |pid: i32| pidfd_open(Pid::from_raw(pid).context("a process")?, PidfdFlags::empty()).context("pidfd");
    let mut child = std::process::Command::new("sleep").arg("60").spawn()?;
    let own = process(i32::try_from(child.id())?)?;
    let me = process(i32::try_from(std::process::id())?)?;
    let null: OwnedFd = File::open("/dev/null")?.into();
    let confine = |bytes| BrokerRequest::Confine { bytes };
    for (attempt, body, fds) in [
        ("limit the broker", confine(1 << 20), vec![process(options.broker)?]),
        ("limit init", confine(1 << 20), vec![process(1)?]),
        ("limit itself", confine(1 << 20), vec![me]),
        ("limit no process", confine(1 << 20), vec![null]),
        ("limit nothing", confine(1 << 20), vec![]),
        ("limit its child to nothing", confine(0), vec![own.try_clone()?]),
        ("limit its child to everything", confine(u64::MAX), vec![own]),
    ] {
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        let refused =
            |kind: &str| matches!(kind, "Invalid" | "Denied" | "Internal" | "Unavailable" | "NotFound");
        let result =
            broker.ask(body, &fds).map_or_else(|_| "no answer".to_owned(), |answered| shown(&answered));
        report.note(attempt, if refused(&result) { "refused".to_owned() } else { result });
    }
    let _ = child.kill();
    let _ = child.wait();
    let release = |group: &str| BrokerRequest::Release { group: group.to_owned() };
    let own = format!("millpond-worker-{}", child.id());
    for group in ["", "/", "..", "../..", "millpond-worker-", "millpond-worker-1/../..", "millpond-agent"] {
        let answered = broker.ask(release(group), &[])?;
        if answered.is_ok() {
            bail!("{group:?} was released");
        }
    }
    report.note("remove groups that are no worker's", "refused");
    let _ = broker.ask(release(&own), &[])?;
    Ok(())
}

fn nonsense(broker: &Broker, report: &Report) -> Result<()> {
    let socket = &*broker.packet;
    let no_flags = rustix::net::SendFlags::empty();
    for text in ["", "{", "{\"ask\":{\"id\":1,\"body\":{\"hello\"", "[[[[[[[[[", "\u{0}\u{1}", "null"] {
        if !text.is_empty() {
            socket.send(text.as_bytes(), &[])?;
        }
    }
    let deep = "[".repeat(60_000);
    socket.send(deep.as_bytes(), &[])?;
    for _ in 0..200 {
        rustix::net::send(socket, &vec![b'x'; 120_000], no_flags)?;
    }
    broker.try_it(report, "messages that are none, or too long", BrokerRequest::Beat, &[]);
    let null: OwnedFd = File::open("/dev/null")?.into();
    for _ in 0..300 {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, sendmsg};
        let fds = vec![null.as_fd(); 250];
        let mut space = vec![std::mem::MaybeUninit::uninit(); 2048];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            bail!("no room for descriptors");
        }
        match sendmsg(socket, &[rustix::io::IoSlice::new(b"{}")], &mut ancillary, no_flags) {
            // The kernel lets a user have so many under way as it may have open.
            Err(rustix::io::Errno::TOOMANYREFS) => std::thread::sleep(Duration::from_millis(5)),
            sent => _ = sent?,
        }
    }
    broker.try_it(report, "descriptors without end", BrokerRequest::Beat, &[]);
    for id in 0..2000 {
        let answer =
            FromAgent::Answer { id: id << 20, body: Ok(AgentAnswer::Holding { mounts: vec![UNKNOWN; 100] }) };
        match link::broker::send(socket, &answer, &[null.as_fd()]) {
            Err(link::PacketError::Io(_)) => std::thread::sleep(Duration::from_millis(5)), // as above
            sent => sent?,
        }
    }
    broker.try_it(report, "answers that nobody asked for", BrokerRequest::Beat, &[]);
    Ok(())
}
