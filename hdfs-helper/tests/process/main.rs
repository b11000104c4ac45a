//! The helper's process: what it may, what it says, how it ends. Against a NameNode in this process that does what a test
//! wants, so that no Hadoop is needed.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too; clippy only knows #[test] functions.

#[path = "../common/mod.rs"]
mod common;
mod namenode;

use common::{Asking, Killed, Log, Spawner, listed, until};
use hdfs::{
    Answer, Configure, FailureKind, Frames, FromHelper, Identity, PageStart, Question, Secret, ToHelper,
};
use namenode::{Listing, NameNode};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use store::{NoObserver, RetryCause, StoreError};

const LONG: Duration = Duration::from_secs(60);

fn hear(mut socket: &UnixStream, frames: &mut Frames<FromHelper>) -> Option<FromHelper> {
    socket.set_read_timeout(Some(LONG)).unwrap();
    let mut buffer = [0; 4096];
    loop {
        if let Some(frame) = frames.take().unwrap() {
            return Some(frame.message);
        }
        match socket.read(&mut buffer) {
            Ok(0) => return None,
            Ok(got) => frames.space().extend_from_slice(&buffer[..got]),
            Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return None,
            Err(e) => panic!("{e}"),
        }
    }
}

fn say(mut socket: &UnixStream, message: &ToHelper) {
    socket.write_all(&hdfs::encode(message).unwrap()).unwrap();
}

fn configure(authority: &str, identity: Identity) -> ToHelper {
    let authority = authority.to_owned();
    ToHelper::Configure(Box::new(Configure {
        authority,
        settings: BTreeMap::new(),
        identity,
        refused: Vec::new(),
        own: Vec::new(),
        meant: Vec::new(),
    }))
}

fn kerberos(krb5_conf: &str) -> Identity {
    Identity::Kerberos {
        principal: "alice@EXAMPLE.COM".into(),
        krb5_conf: krb5_conf.into(),
        keytab: Some(Secret(b"hunter2-keytab".to_vec())),
        ticket_cache: None,
    }
}

/// A helper that is ready, and what it has said.
fn ready(identity: Identity, authority: &str) -> (UnixStream, Killed, Frames<FromHelper>, Vec<String>) {
    configured(&configure(authority, identity))
}

fn configured(configure: &ToHelper) -> (UnixStream, Killed, Frames<FromHelper>, Vec<String>) {
    let (socket, child) = Spawner::new_kept().start_one().unwrap();
    let (child, mut frames) = (Killed(child), Frames::default());
    let hello = hear(&socket, &mut frames);
    assert!(matches!(hello, Some(FromHelper::Hello { protocol: hdfs::PROTOCOL })), "{hello:?}");
    say(&socket, configure);
    match hear(&socket, &mut frames) {
        Some(FromHelper::Ready { missing }) => (socket, child, frames, missing),
        other => panic!("{other:?}"),
    }
}

fn alice() -> Identity {
    Identity::Simple { user: "alice".into() }
}

fn proc(pid: u32, file: &str) -> Vec<u8> {
    std::fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default()
}

fn has(content: &[u8], word: &str) -> bool {
    content.windows(word.len()).any(|window| window == word.as_bytes())
}

#[test]
fn it_is_confined_and_shows_no_secret() {
    let conf = "[libdefaults]\ndefault_realm = EXAMPLE.COM\n";
    let (_socket, child, _, missing) = ready(kerberos(conf), "127.0.0.1:1");
    println!("this kernel cannot: {missing:?}");
    let pid = child.0.id();
    let status = String::from_utf8(proc(pid, "status")).unwrap();
    for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{status}");
    }
    for file in ["cmdline", "environ", "comm"] {
        assert!(!has(&proc(pid, file), "hunter2"), "{file}");
    }
    let limits = String::from_utf8(proc(pid, "limits")).unwrap();
    let data = limits.lines().find(|line| line.starts_with("Max data size")).unwrap();
    assert!(data.contains(&common::DATA_BYTES.to_string()), "{data}");
    // Its secrets have no name that a file system has.
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
    // Its standard error is the test's.
    let files = files.flatten().filter(|fd| fd.file_name() != "2");
    let files: Vec<_> = files.flat_map(|fd| std::fs::read_link(fd.path())).collect();
    assert!(files.iter().any(|file| file.to_string_lossy().contains("memfd:keytab")), "{files:?}");
    let named = files.iter().filter(|file| file.is_absolute() && !file.starts_with("/dev"));
    assert_eq!(named.filter(|file| !file.to_string_lossy().contains("memfd:")).count(), 0, "{files:?}");
}

#[test]
fn it_ends_with_its_socket_also_in_the_middle_of_a_question() {
    let silent = NameNode::start(Listing::Silent);
    let (socket, mut child, ..) = ready(alice(), &silent.authority);
    let question = Question::Stat { path: "/x".into() };
    say(&socket, &ToHelper::Ask { id: 1, patience_ms: 600_000, question });
    silent.wait_for_connections(1);
    drop(socket);
    let begun = Instant::now();
    while child.0.try_wait().unwrap().is_none() {
        assert!(begun.elapsed() < LONG, "it is still there");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn what_is_no_question_ends_it() {
    for bytes in
        [&[0xff; 32][..], &hdfs::encode(&configure("a:1", alice())).unwrap(), b"\x01\0\0\0\0\0\0\0\x63"]
    {
        let (mut socket, mut child, mut frames, _) = ready(alice(), "127.0.0.1:1");
        socket.write_all(bytes).unwrap();
        assert!(hear(&socket, &mut frames).is_none());
        assert!(!child.0.wait().unwrap().success());
    }
}

#[test]
fn a_krb5_conf_that_names_files_is_refused_by_the_helper_too() {
    let (socket, child) = Spawner::new_kept().start_one().unwrap();
    let (_child, mut frames) = (Killed(child), Frames::default());
    hear(&socket, &mut frames).unwrap();
    say(&socket, &configure("127.0.0.1:1", kerberos("include /etc/shadow\n")));
    let Some(FromHelper::Unusable { why }) = hear(&socket, &mut frames) else { panic!("it was taken") };
    assert!(why.contains("line 1 of krb5.conf"), "{why}");
    assert!(hear(&socket, &mut frames).is_none());
}

#[test]
fn a_name_service_without_namenodes_is_a_mistake_that_is_said() {
    let (socket, child) = Spawner::new_kept().start_one().unwrap();
    let (_child, mut frames) = (Killed(child), Frames::default());
    hear(&socket, &mut frames).unwrap();
    let settings = BTreeMap::from([("dfs.ha.namenodes.ns".to_owned(), "nn1,nn2".to_owned())]);
    let configure = Configure {
        authority: "ns".into(),
        settings,
        identity: alice(),
        refused: Vec::new(),
        own: Vec::new(),
        meant: Vec::new(),
    };
    say(&socket, &ToHelper::Configure(Box::new(configure)));
    let Some(FromHelper::Unusable { why }) = hear(&socket, &mut frames) else { panic!("it was taken") };
    assert!(why.contains("dfs.namenode.rpc-address"), "{why}");
}

#[tokio::test(flavor = "multi_thread")]
async fn names_that_are_not_utf_8_are_counted_and_hide_no_other() {
    // Every third name.
    let names: Vec<Vec<u8>> = (0..2500_u32)
        .map(|k| {
            if k % 3 == 1 {
                format!("{k:05}\u{e9}").chars().map(|c| c as u8).collect()
            } else {
                format!("{k:05}").into()
            }
        })
        .collect();
    let namenode = NameNode::start(Listing::Names { names, at_once: 700 });
    let source =
        Asking::simple(&namenode.authority, "/d", "alice").open(Spawner::new(), Arc::new(NoObserver));
    let (found, hidden) = listed(&*source, b"").await.unwrap();
    assert_eq!((found.len(), hidden), (1667, 833));
    // Nothing but such names, more than fit a page.
    let names = (0..1500_u32).map(|k| [&[0xff, 0xfe][..], format!("{k:05}").as_bytes()].concat()).collect();
    let namenode = NameNode::start(Listing::Names { names, at_once: 1000 });
    let source =
        Asking::simple(&namenode.authority, "/d", "alice").open(Spawner::new(), Arc::new(NoObserver));
    let (found, hidden) = listed(&*source, b"").await.unwrap();
    assert_eq!((found.len(), hidden), (0, 1500));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_goes_on_with_another_helper() {
    let names = (0..2500_u32)
        .map(|k| if k == 999 { vec![b'0', b'0', b'9', b'9', b'9', 0xff] } else { format!("{k:05}").into() });
    let namenode = NameNode::start(Listing::Names { names: names.collect(), at_once: 300 });
    let spawner = Spawner::new();
    let source =
        Asking::simple(&namenode.authority, "/d", "alice").open(spawner.clone(), Arc::new(NoObserver));
    let first = source.list(b"", None).await.unwrap();
    assert_eq!((first.entries.len(), first.unnameable.len()), (999, 1));
    kill(spawner.last(), rustix::process::Signal::KILL);
    let permissions = volume::Permissions { mode: 0o644, uid: Some(1000), gid: None };
    assert!(first.entries.iter().all(|entry| entry.permissions == Some(permissions)));
    let second = source.list(b"", first.next.as_deref()).await.unwrap();
    assert_eq!(second.entries[0].name, b"01000");
    assert_eq!((second.entries.len(), second.unnameable.len()), (1000, 0));
    assert_eq!(spawner.count(), 2);
}

fn kill(pid: u32, signal: rustix::process::Signal) {
    let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(pid, signal).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_endless_directory_is_pages_and_no_memory() {
    let namenode = NameNode::start(Listing::Endless);
    let spawner = Spawner::with_memory(256 << 20);
    let source =
        Asking::simple(&namenode.authority, "/d", "alice").open(spawner.clone(), Arc::new(NoObserver));
    let mut token = None::<String>;
    for _ in 0..100 {
        let page = source.list(b"", token.as_deref()).await.unwrap();
        assert_eq!(page.entries.len(), 1000);
        token = page.next;
    }
    assert_eq!(spawner.count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namenode_that_claims_gigabytes_costs_a_helper_and_an_error() {
    let namenode = NameNode::start(Listing::Claims);
    let spawner = Spawner::with_memory(256 << 20);
    let asking = Asking {
        stall_timeout: Duration::from_millis(500),
        ..Asking::simple(&namenode.authority, "/d", "alice")
    }
    .within(Duration::from_secs(2));
    let error = asking.open(spawner, Arc::new(NoObserver)).list(b"", None).await.unwrap_err();
    assert!(matches!(error, StoreError::Unavailable { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_namenode_that_is_silent_is_asked_over_another_connection() {
    let namenode = NameNode::start(Listing::SilentAtFirst(2));
    let (log, spawner) = (Arc::new(Log::default()), Spawner::new());
    let asking = Asking {
        stall_timeout: Duration::from_millis(300),
        ..Asking::simple(&namenode.authority, "/d", "alice")
    };
    let source = asking.open(spawner.clone(), log.clone());
    assert_eq!(listed(&*source, b"").await.unwrap().0.len(), 1);
    assert_eq!(*log.retries.lock().unwrap(), [("list", RetryCause::Stalled); 2]);
    assert_eq!(spawner.count(), 1, "its helper is not to blame");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_helper_that_is_stopped_is_replaced() {
    let namenode = NameNode::start(Listing::Names { names: vec![b"a".to_vec()], at_once: 1 });
    let spawner = Spawner::new();
    let asking = Asking {
        stall_timeout: Duration::from_millis(300),
        ..Asking::simple(&namenode.authority, "/d", "alice")
    };
    let source = asking.open(spawner.clone(), Arc::new(NoObserver));
    assert_eq!(listed(&*source, b"").await.unwrap().0.len(), 1);
    let stopped = spawner.last();
    kill(stopped, rustix::process::Signal::STOP);
    assert_eq!(listed(&*source, b"").await.unwrap().0.len(), 1);
    assert_eq!(spawner.count(), 2);
    until("the stopped one is gone", || !std::path::Path::new(&format!("/proc/{stopped}")).exists()).await;
    drop(source);
    let last = spawner.last();
    until("it ends with its source", || !std::path::Path::new(&format!("/proc/{last}")).exists()).await;
}

#[test]
fn a_question_that_is_taken_back_is_not_answered() {
    let namenode = NameNode::start(Listing::SilentAtFirst(1));
    let (socket, _child, mut frames, _) = ready(alice(), &namenode.authority);
    let list = || Question::List { path: "/d".into(), start: PageStart::default() };
    say(&socket, &ToHelper::Ask { id: 1, patience_ms: 600_000, question: list() });
    namenode.wait_for_connections(1);
    say(&socket, &ToHelper::Cancel { id: 1 });
    say(&socket, &ToHelper::Ask { id: 2, patience_ms: 300, question: list() });
    // The connection is the one that is silent: the second question finds that out, and the third has another.
    let Some(FromHelper::Answer { id: 2, answer: Err(failure) }) = hear(&socket, &mut frames) else {
        panic!("another answer")
    };
    assert_eq!(failure.kind, FailureKind::Silent);
    say(&socket, &ToHelper::Ask { id: 3, patience_ms: 60_000, question: list() });
    let Some(FromHelper::Answer { id: 3, answer: Ok(Answer::Page(page)) }) = hear(&socket, &mut frames)
    else {
        panic!("another answer")
    };
    assert_eq!(page.entries.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_is_refused_is_not_asked_and_the_error_says_so() {
    let namenode = NameNode::start(Listing::Names { names: vec![b"a".to_vec()], at_once: 1 });
    let port = namenode.authority.rsplit(':').next().unwrap();
    for authority in [namenode.authority.clone(), format!("localhost:{port}")] {
        let mut asking = Asking::simple(&authority, "/d", "alice");
        asking.networks = vec!["127.0.0.2", "127.1.0.0/16"];
        let error = asking.open(Spawner::new(), Arc::new(NoObserver)).list(b"", None).await.unwrap_err();
        assert!(
            matches!(&error, StoreError::Invalid { why, .. } if why.contains("address")),
            "{authority}: {error}"
        );
    }
    // IPv4 in IPv6's clothes.
    let configure = ToHelper::Configure(Box::new(Configure {
        authority: format!("[::ffff:127.0.0.1]:{port}"),
        settings: BTreeMap::new(),
        identity: alice(),
        refused: Vec::new(),
        own: vec![hdfs::Network { base: "127.0.0.0".parse().unwrap(), bits: 8 }],
        meant: Vec::new(),
    }));
    let (socket, _child, mut frames, _) = configured(&configure);
    let question = Question::List { path: "/d".into(), start: PageStart::default() };
    say(&socket, &ToHelper::Ask { id: 1, patience_ms: 60_000, question });
    let Some(FromHelper::Answer { answer: Err(failure), .. }) = hear(&socket, &mut frames) else {
        panic!("another answer")
    };
    assert!(failure.kind == FailureKind::Invalid && failure.why.contains("address"), "{failure:?}");
    assert_eq!(namenode.connections(), 0);
    let mut asking = Asking::simple(&namenode.authority, "/d", "alice");
    asking.networks = vec!["127.0.0.1"];
    let source = asking.open(Spawner::new(), Arc::new(NoObserver));
    assert_eq!(listed(&*source, b"").await.unwrap().0.len(), 1);
}

/// Kerberos' library is loaded later, and must find the same function.
#[test]
fn the_function_that_connects_is_replaced_for_libraries_too() {
    let program = std::fs::read(env!("CARGO_BIN_EXE_hdfs-helper")).unwrap();
    // Among the names that the loader sees: those are whole strings between zeros, near that of another such function.
    assert!(has(&program, "\0connect\0"));
}
