//! What an attacker in a worker says to the agent.

use crate::report::{Report, errno_name};
use anyhow::{Result, bail};
use cache::meta::{Lookup, ROOT, View};
use link::worker::{Ask, Counts, FromWorker, Mode, READ_MAX, Reply, ToWorker};
use link::{Cause, MAX_MESSAGE, Packet};
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Numbers of cache files that are tried: the agent counts from 1 at each start.
const NUMBERS: u64 = 4096;
/// At once, so that neither end's buffer is full.
const AT_ONCE: u64 = 64;

pub type Answer = (Result<Reply, Cause>, Vec<OwnedFd>);

pub struct Link {
    socket: Arc<Packet>,
    next: AtomicU64,
}

pub fn shown(answer: &Answer) -> String {
    match &answer.0 {
        Ok(Reply::Stored) => "Stored".into(),
        Ok(Reply::Gone) => "Gone".into(),
        Ok(other) => {
            let text = format!("{other:?}");
            text.split([' ', '{']).next().unwrap_or_default().to_owned()
        }
        Err(cause) => format!("{cause:?}"),
    }
}

impl Link {
    pub fn new(socket: Arc<Packet>) -> Self {
        let _ = socket.set_recv_timeout(Some(Duration::from_secs(20)));
        Self { socket, next: AtomicU64::new(1) }
    }

    /// The number of the question.
    fn put(&self, unique: u64, body: Ask) -> Result<u64> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        link::worker::send(&self.socket, &FromWorker::Ask { id, unique, body }, &[])?;
        Ok(id)
    }

    fn hear(&self) -> Result<(u64, Answer)> {
        let mut buffer = vec![0; MAX_MESSAGE];
        loop {
            let (message, fds) = link::worker::recv::<ToWorker>(&self.socket, &mut buffer)?;
            if let ToWorker::Answer { id, body } = message {
                return Ok((id, (body, fds)));
            }
        }
    }

    pub fn ask(&self, body: Ask) -> Result<Answer> {
        let asked = self.put(0, body)?;
        loop {
            let (id, answer) = self.hear()?;
            if id == asked {
                return Ok(answer);
            }
        }
    }

    /// How often each answer came.
    fn ask_all(&self, all: impl Iterator<Item = Ask>) -> Result<String> {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        let mut all = all.peekable();
        while all.peek().is_some() {
            let mut open = 0;
            for ask in all.by_ref().take(AT_ONCE as usize) {
                self.put(u64::MAX - open, ask)?;
                open += 1;
            }
            for _ in 0..open {
                *counts.entry(shown(&self.hear()?.1)).or_default() += 1;
            }
        }
        Ok(counts.into_keys().collect::<Vec<_>>().join(" "))
    }

    fn tell(&self, message: &FromWorker) -> Result<()> {
        Ok(link::worker::send(&self.socket, message, &[])?)
    }

    pub fn raw(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        Ok(self.socket.send(bytes, fds)?)
    }

    pub fn oversized(&self, bytes: usize) -> Result<()> {
        let body = vec![0; bytes];
        rustix::net::send(&*self.socket, &body, rustix::net::SendFlags::empty())?;
        Ok(())
    }

    /// A question that nobody need answer, with so many descriptors.
    pub fn descriptors(&self, count: usize) -> Result<()> {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        let link = self.socket.as_fd();
        let fds = vec![link; count];
        let mut space = vec![std::mem::MaybeUninit::uninit(); 256];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&fds)) {
            bail!("no room for {count} descriptors");
        }
        // `GivenBack` of a number that was never lent, as postcard writes it: the variant, the number.
        let body = [7, 0xff, 0x01];
        sendmsg(&*self.socket, &[rustix::io::IoSlice::new(&body)], &mut ancillary, SendFlags::empty())?;
        Ok(())
    }
}

/// Asks until somebody puts an end to it, and takes no answer.
pub fn flood(link: &Link) -> String {
    let _ = link.socket.set_send_timeout(Some(Duration::from_secs(15)));
    for asked in 0..10_000_000u64 {
        let ask = Ask::Lookup { parent: ROOT, name: format!("name-{asked}").into_bytes() };
        if let Err(error) = link.put(asked << 4, ask) {
            return format!("{error}");
        }
    }
    "achieved: ten million questions".into()
}

/// One attempt after the other; an error ends them, and a test misses the rest.
pub fn attempt(link: &Link, view: &View, report: &Report) {
    if let Err(error) = attempt_all(link, view, report) {
        report.note("messages", format!("ended: {error:#}"));
    }
}

fn attempt_all(link: &Link, view: &View, report: &Report) -> Result<()> {
    let each = || 1..NUMBERS;
    let note = |attempt: &str, all: &mut dyn Iterator<Item = Ask>| -> Result<()> {
        report.note(attempt, link.ask_all(all)?);
        Ok(())
    };
    let absurd = [0, 1 << 40, i64::MAX as u64, u64::MAX];
    note(
        "read every cache file of the agent",
        &mut each().map(|file| Ask::Read { file, offset: 0, len: 1 }),
    )?;
    note("pass every cache file through", &mut each().map(|file| Ask::BackingOpen { file }))?;
    note("have every cache file dropped", &mut each().map(|file| Ask::Damaged { file }))?;
    note("close every passthrough file", &mut (0..NUMBERS as u32).map(|id| Ask::BackingClose { id }))?;
    for some in each().collect::<Vec<_>>().chunks(1024) {
        link.tell(&FromWorker::Touched { files: some.to_vec() })?;
    }
    for file in each() {
        link.tell(&FromWorker::Advance { file, offset: u64::MAX })?;
        link.tell(&FromWorker::GivenBack { number: file })?;
    }
    let versions = [0, 1, u32::MAX];
    let of_each = |ask: &dyn Fn(u64, u32) -> Ask| -> Vec<Ask> {
        absurd.iter().flat_map(|ino| versions.map(|version| ask(*ino, version))).collect()
    };
    note(
        "files of nodes that are not its own",
        &mut of_each(&|ino, version| Ask::File { ino, version }).into_iter(),
    )?;
    note(
        "how much of them is cached",
        &mut of_each(&|ino, version| Ask::Cached { ino, version }).into_iter(),
    )?;
    note("open them", &mut of_each(&|ino, version| Ask::Open { ino, version }).into_iter())?;
    let direct = |ino, version| Ask::Direct { ino, version, offset: u64::MAX, len: u32::MAX };
    note("read them past the cache", &mut of_each(&direct).into_iter())?;
    note(
        "attributes of nodes that do not exist",
        &mut absurd.map(|ino| Ask::Attributes { ino, force: true }).into_iter(),
    )?;
    note("list what does not exist", &mut absurd.map(|dir| Ask::List { dir }).into_iter())?;
    note(
        "names of a directory that does not exist",
        &mut absurd.map(|parent| Ask::Lookup { parent, name: b"x".to_vec() }).into_iter(),
    )?;
    let names: [(&str, &[u8]); 7] = [
        ("no", b""),
        ("its own", b"."),
        ("its parent's", b".."),
        ("another directory's", b"../set/large1"),
        ("a broken", b"a\0b"),
        ("a strange", b"\xff\xfe"),
        ("a very long", &[b'x'; 60_000]),
    ];
    for (which, name) in names {
        let ask = Ask::Lookup { parent: ROOT, name: name.to_vec() };
        note(&format!("look {which} name up"), &mut std::iter::once(ask))?;
    }
    note(
        "which threads of the node are being killed",
        &mut std::iter::once(Ask::Dying { tids: (0..20_000).collect() }),
    )?;
    let most = Counts {
        lookups: u64::MAX,
        opens_passthrough: u64::MAX,
        bytes_hit: u64::MAX,
        reads_miss: u64::MAX,
        ..Counts::default()
    };
    for _ in 0..3 {
        link.tell(&FromWorker::Counted(most))?;
    }
    link.tell(&FromWorker::Ready { protocol: u32::MAX })?;
    link.tell(&FromWorker::Answered { init_reply: vec![7; 1000], mode: Mode::NoOpen })?;
    link.tell(&FromWorker::Serving)?;
    own_file(link, view, report)?;
    note("it is answered after all this", &mut std::iter::once(Ask::Space))
}

/// What it is given of its own scope, and what can be done to that.
fn own_file(link: &Link, view: &View, report: &Report) -> Result<()> {
    let _ = link.ask(Ask::List { dir: ROOT })?.0; // what it knows is looked up
    let (ino, version) = match view.lookup(ROOT, b"large1")? {
        Lookup::Found { attributes, .. } => (attributes.ino, attributes.version),
        other => bail!("its own file: {other:?}"),
    };
    let answer = link.ask(Ask::File { ino, version })?;
    let (Ok(Reply::File { file, .. }), fds) = &answer else { bail!("its own file: {}", shown(&answer)) };
    let file = *file;
    let ends = [(u64::MAX, u32::MAX), (0, u32::MAX), (u64::MAX - 1, 1), (i64::MAX as u64, 1 << 20), (0, 0)];
    let reads = ends.map(|(offset, len)| Ask::Read { file, offset, len });
    report.note("absurd places of its own file", link.ask_all(reads.into_iter())?);
    for _ in 0..12 {
        link.put(0, Ask::Direct { ino, version, offset: 0, len: READ_MAX })?;
    }
    link.socket.set_recv_timeout(Some(Duration::from_secs(2)))?;
    let mut lent = Vec::new();
    while let Ok((_, answer)) = link.hear() {
        lent.push(answer);
    }
    let bytes: u64 = lent
        .iter()
        .map(|(answer, _)| if let Ok(Reply::Uncached { len, .. }) = answer { u64::from(*len) } else { 0 })
        .sum();
    let result = if bytes <= 16 << 20 { "at most 16 MiB" } else { "achieved: more" };
    report.note("more past the cache than it gives back", result);
    // Nothing of it is the agent's any more when it is given back; then the rest comes.
    let mut left = 12 - lent.len();
    link.socket.set_recv_timeout(Some(Duration::from_secs(10)))?;
    while let Some((answer, _)) = lent.pop() {
        if let Ok(Reply::Uncached { number, .. }) = answer {
            link.tell(&FromWorker::GivenBack { number })?;
        }
        if left > 0 {
            lent.insert(0, link.hear()?.1);
            left -= 1;
        }
    }
    for (what, fd) in ["its own data file", "its own bitmap"].iter().zip(fds) {
        let shared = libc::MAP_SHARED as u64;
        let writable = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let number = fd.as_raw_fd() as u64;
        let mapped = crate::calls::call(libc::SYS_mmap, [0, 4096, writable, shared, number, 0]);
        let shown = |result: Result<i64, i32>| match result {
            Ok(_) => "achieved".to_owned(),
            Err(errno) => errno_name(errno),
        };
        report.note(&format!("write to {what} through a map"), shown(mapped));
        let written = crate::calls::call(libc::SYS_write, [number, c"x".as_ptr() as u64, 1, 0, 0, 0]);
        report.note(&format!("write to {what}"), shown(written));
    }
    Ok(())
}
