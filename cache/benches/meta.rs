//! What a name costs a worker: looked up in the memory map, or asked of the agent over a SEQPACKET socket.
//!
//! The parent is the agent: it holds the store and answers on the socket. The child is a worker: it maps the store
//! read-only and is the end that asks. Both look up the same random names. `MILLPOND_BENCH_NAMES` sets how many there
//! are (default 1,000,000). Never passes or fails.

use cache::meta::{FIRST_INO, Incoming, InodeNumbers, Kind, Lookup, MetaError, ROOT, Store, View};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const CHILD: &str = "MILLPOND_BENCH_CHILD";
const NAMES: &str = "MILLPOND_BENCH_NAMES";

struct Numbers(AtomicU64);

impl InodeNumbers for Numbers {
    fn next(&self) -> Result<u64, MetaError> {
        Ok(self.0.fetch_add(1, Ordering::Relaxed))
    }
}

fn names() -> u64 {
    std::env::var(NAMES).ok().and_then(|n| n.parse().ok()).unwrap_or(1_000_000)
}

fn name(i: u64) -> Vec<u8> {
    format!("part-{i:010}.parquet").into_bytes()
}

fn entry(i: u64) -> Incoming {
    Incoming {
        name: name(i),
        kind: Kind::File,
        size: i,
        mtime_ns: 0,
        token: format!("{:032x}", i.wrapping_mul(0x9e37_79b9_7f4a_7c15)),
        target: Vec::new(),
        permissions: None,
    }
}

fn main() {
    match std::env::var_os(CHILD) {
        Some(dir) => worker(Path::new(&dir)),
        None => agent(),
    }
}

fn store_listing(store: &Store) {
    let mut listing = store.begin_listing(ROOT).expect("a listing begins");
    for page in 0..names().div_ceil(1_000) {
        let entries: Vec<Incoming> = (page * 1_000..((page + 1) * 1_000).min(names())).map(entry).collect();
        listing.page(&entries).expect("a page fits");
    }
    listing.finish().expect("a listing ends");
}

fn agent() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let store =
        Store::open(dir.path(), Arc::new(Numbers(AtomicU64::new(FIRST_INO)))).expect("the store opens");
    let begun = Instant::now();
    store_listing(&store);
    println!("| {} names, reader in another process | median | p99 | mean |", names());
    println!("|---|---|---|---|");
    let listed = begun.elapsed();

    let (ours, theirs) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .expect("a socket pair");
    let mut child = Command::new(std::env::current_exe().expect("our own path"))
        .env(CHILD, dir.path())
        .stdin(Stdio::from(theirs))
        .spawn()
        .expect("the worker starts");
    let writing = Arc::new(AtomicBool::new(true));
    std::thread::scope(|scope| {
        let mut buffer = [0; 512];
        let writer = writing.clone();
        let mut store_again = None;
        loop {
            let (len, _) = rustix::net::recv(ours.as_fd(), &mut buffer, RecvFlags::empty()).expect("recv");
            match &buffer[..len] {
                [] => break,
                b"write" => {
                    let (store, writer) = (&store, writer.clone());
                    store_again.get_or_insert_with(|| {
                        scope.spawn(move || {
                            while writer.load(Ordering::Relaxed) {
                                store_listing(store);
                            }
                        })
                    });
                }
                b"quiet" => writing.store(false, Ordering::Relaxed),
                name => {
                    let answer = match store.lookup(ROOT, name).expect("a lookup") {
                        Lookup::Found { attributes, .. } => attributes.ino,
                        _ => 0,
                    };
                    rustix::net::send(ours.as_fd(), &answer.to_le_bytes(), SendFlags::NOSIGNAL)
                        .expect("send");
                }
            }
        }
        writing.store(false, Ordering::Relaxed);
    });
    assert!(child.wait().expect("the worker is ours").success());
    let stats = store.stats().expect("stats");
    println!(
        "\nlisting stored in {listed:.2?} ({:.0} names/s); {} MiB of file in use",
        names() as f64 / listed.as_secs_f64(),
        stats.used_bytes >> 20
    );
}

fn worker(dir: &Path) {
    let view = View::open(dir).expect("the store is there");
    let socket: OwnedFd = std::io::stdin().as_fd().try_clone_to_owned().expect("the socket");
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut any = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        name(random % names())
    };
    let mut lookup = || {
        let name = any();
        timed(|| assert!(matches!(view.lookup(ROOT, &name), Ok(Lookup::Found { .. }))))
    };
    report("lookup in the map, first touch", (0..100_000).map(|_| lookup()));
    report("lookup in the map", (0..1_000_000).map(|_| lookup()));
    let mut ino = 0;
    report(
        "attributes in the map",
        (0..1_000_000).map(|_| {
            ino = (ino + 7_919) % names();
            timed(|| assert!(matches!(view.attributes(FIRST_INO + ino), Ok(Some(_)))))
        }),
    );
    let mut last = None;
    let mut page = || {
        let mut room = 100;
        timed(|| {
            let listed = view.read_dir(ROOT, last, &mut |_, attributes| {
                last = Some(attributes.ino);
                room -= 1;
                room > 0
            });
            assert!(matches!(listed, Ok(Some(()))));
        })
    };
    report("100 entries of readdir", (0..(names() / 100).min(10_000)).map(|_| page()));

    let tell = |what: &[u8]| rustix::net::send(&socket, what, SendFlags::NOSIGNAL).expect("send");
    let mut any = {
        let mut i = 0;
        move || {
            i = (i + 611_953) % names();
            name(i)
        }
    };
    let mut ask = || {
        let name = any();
        timed(|| {
            tell(&name);
            let mut answer = [0; 8];
            rustix::net::recv(&socket, &mut answer, RecvFlags::empty()).expect("recv");
            assert_ne!(u64::from_le_bytes(answer), 0);
        })
    };
    report("asking the agent (SEQPACKET)", (0..50_000).map(|_| ask()));
    tell(b"write");
    report("lookup in the map while a listing is stored", (0..1_000_000).map(|_| lookup()));
    tell(b"quiet");
    rustix::net::shutdown(&socket, rustix::net::Shutdown::Both).expect("shutdown");
}

fn timed(work: impl FnOnce()) -> Duration {
    let begun = Instant::now();
    work();
    begun.elapsed()
}

fn report(what: &str, times: impl Iterator<Item = Duration>) {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let mean = times.iter().sum::<Duration>() / times.len() as u32;
    let us = |d: Duration| d.as_nanos() as f64 / 1_000.0;
    println!(
        "| {what} | {:.2} µs | {:.2} µs | {:.2} µs |",
        us(times[times.len() / 2]),
        us(times[times.len() * 99 / 100]),
        us(mean)
    );
}
