//! How a worker begins: with an agent that is its parent, or not at all.

use link::Packet;
use link::worker::{FromWorker, arguments, recv};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::Duration;

const DATA_BYTES: u64 = 1 << 30;

fn worker() -> Command {
    Command::new(env!("CARGO_BIN_EXE_fuse-worker"))
}

#[test]
fn what_is_started_by_hand_says_so() {
    let (_ours, theirs) = Packet::pair().unwrap();
    let mut without_arguments = worker();
    without_arguments.stdin(OwnedFd::from(theirs));
    let mut without_socket = worker();
    without_socket.args(arguments(DATA_BYTES)).stdin(Stdio::null());
    for mut command in [without_arguments, without_socket] {
        let output = command.output().unwrap();
        let words = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{words}");
        assert!(words.contains("started by hand?"), "{words}");
    }
}

#[test]
fn a_worker_whose_agent_is_gone_does_not_begin() {
    let (ours, theirs) = Packet::pair().unwrap();
    // Process 1, which is what a process has for a parent whose own is gone.
    let arguments = ["1".to_owned(), DATA_BYTES.to_string()];
    let output = worker().args(arguments).stdin(OwnedFd::from(theirs)).output().unwrap();
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{words}");
    assert!(words.contains("is gone"), "{words}");
    drop(ours);
}

#[test]
fn a_worker_is_expendable_and_has_the_memory_that_it_is_allowed() {
    let (ours, theirs) = Packet::pair().unwrap();
    let mut child = worker().args(arguments(DATA_BYTES)).stdin(OwnedFd::from(theirs)).spawn().unwrap();
    ours.set_recv_timeout(Some(Duration::from_secs(20))).unwrap();
    let (first, _) = recv::<FromWorker>(&ours, &mut vec![0; link::MAX_MESSAGE]).unwrap();
    assert!(matches!(first, FromWorker::Ready { .. }), "{first:?}");
    let of = |file: &str| std::fs::read_to_string(format!("/proc/{}/{file}", child.id())).unwrap();
    assert_eq!(of("oom_score_adj").trim(), "1000");
    let limits = of("limits");
    let data = limits.lines().find(|line| line.starts_with("Max data size")).unwrap();
    let words: Vec<&str> = data.split_whitespace().collect();
    assert_eq!(words[3..5], [DATA_BYTES.to_string(), DATA_BYTES.to_string()], "{data}");
    assert!(of("status").lines().any(|line| line == "NoNewPrivs:\t1"));
    child.kill().unwrap();
    child.wait().unwrap();
}
