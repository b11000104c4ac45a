//! Whatever becomes of standard error, no thread waits for it, and nothing dies silently. Processes of their own: what
//! they do is in `main`'s roles, and this very program is run again for each.

#![allow(clippy::unwrap_used)]

use rustix::pipe::{fcntl_setpipe_size, pipe};
use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

const ROLE: &str = "MILLPOND_TEST_ROLE";
/// Nothing here takes a second.
const PATIENCE: Duration = Duration::from_secs(60);
const LINES: u64 = 20_000;

#[test]
#[ignore = "not a test: what the other processes of the tests below do"]
fn role() {
    startup::begin("role");
    let role = std::env::var(ROLE).expect("started by a test");
    let (format, role) = match role.strip_prefix("json ") {
        Some(role) => (startup::log::Format::Json, role),
        None => (startup::log::Format::Text, &*role),
    };
    let file = role.strip_prefix("file ").map(std::path::Path::new);
    if role != "panic without a log" {
        file.map_or_else(startup::log::start, startup::log::start_into).unwrap();
        startup::log::init(format, "info");
    }
    match role {
        "talk" | "talk, then fall silent" => {
            for n in 0..LINES {
                tracing::info!(
                    n,
                    "a line that is about as long as one of the agent's usually is, with some fields"
                );
            }
            say(&format!("said {LINES}, lost {}", startup::log::lost()));
            if role != "talk" {
                let _ = std::io::stdin().read(&mut [0]); // until the test has seen what is said now
            }
        }
        "panic" | "panic without a log" => {
            // The main thread would go on.
            let thread = std::thread::Builder::new().name("doomed".into());
            let _ = thread.spawn(|| panic!("on purpose")).unwrap().join();
        }
        "panic in a task" => {
            let caught = std::panic::catch_unwind(|| panic!("caught by what runs tasks"));
            say(&format!("survived: {}", caught.is_err()));
        }
        "allocate" => std::alloc::handle_alloc_error(std::alloc::Layout::new::<[u8; 4096]>()),
        "overflow" => {
            fn deeper(n: u64) -> u64 {
                if std::hint::black_box(n) == 0 { 0 } else { deeper(n + 1) + std::hint::black_box(n) }
            }
            say(&deeper(1).to_string());
        }
        "wait" => {
            say("waiting");
            loop {
                std::thread::park();
            }
        }
        "restore" => {
            startup::log::say("before");
            startup::log::restore().unwrap();
            let mut echo = Command::new("/bin/sh");
            echo.args(["-c", "echo after >&2"]);
            say(&format!("{}", std::os::unix::process::CommandExt::exec(&mut echo)));
        }
        "limits" => {
            let limit = rustix::process::getrlimit(rustix::process::Resource::Core);
            say(&format!("{:?} {:?}", limit.current, limit.maximum));
        }
        _ if file.is_some() => tracing::info!("into a file"),
        other => panic!("no role {other}"),
    }
    startup::log::end();
    std::process::exit(0); // without the words of the test harness
}

/// To the test.
fn say(text: &str) {
    println!("\nANSWER {text}");
}

fn start(role: &str, stderr: impl Into<Stdio>) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["role", "--exact", "--ignored", "--nocapture"])
        .env(ROLE, role)
        .env_remove("RUST_BACKTRACE");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(stderr).spawn().unwrap()
}

/// How it ended; it must.
fn end(child: &mut Child) -> ExitStatus {
    let begun = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if begun.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("it did not end within {PATIENCE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn answer(child: &mut Child) -> String {
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    text.lines().find_map(|line| line.strip_prefix("ANSWER ")).unwrap_or("none").to_owned()
}

fn lost(answer: &str) -> u64 {
    answer.rsplit(' ').next().unwrap().parse().unwrap_or_else(|_| panic!("{answer}"))
}

/// A pipe that is full and that nothing reads.
fn full() -> (OwnedFd, OwnedFd) {
    let (reader, writer) = pipe().unwrap();
    let size = fcntl_setpipe_size(&writer, 4096).unwrap();
    rustix::io::write(&writer, &vec![b'-'; size]).unwrap();
    (reader, writer)
}

fn closed() -> OwnedFd {
    pipe().unwrap().1
}

fn full_device() -> File {
    File::options().write(true).open("/dev/full").unwrap()
}

#[test]
fn a_log_that_is_closed_full_or_failing_holds_up_nobody_and_counts_what_it_loses() {
    let (unread, pipe) = full();
    let all: [(&str, Stdio); 3] =
        [("closed", closed().into()), ("full", pipe.into()), ("failing", full_device().into())];
    for (what, stderr) in all {
        let mut child = start("talk", stderr);
        let answer = answer(&mut child);
        assert!(end(&mut child).success(), "{what}");
        assert!(answer.starts_with("said 20000"), "{what}: {answer}");
        // Of the others some lines may still be on their way when they are counted.
        assert!(lost(&answer) > 1000, "{what}: {answer}");
    }
    drop(unread);
}

#[test]
fn a_log_that_is_read_has_every_line_in_order() {
    let mut child = start("talk, then fall silent", Stdio::piped());
    let mut stderr = child.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        text
    });
    let stdin = child.stdin.take();
    let answered = std::thread::spawn({
        let mut stdout = child.stdout.take().unwrap();
        move || {
            let mut text = String::new();
            stdout.read_to_string(&mut text).unwrap();
            text
        }
    });
    drop(stdin);
    assert!(end(&mut child).success());
    let (text, answer) = (reader.join().unwrap(), answered.join().unwrap());
    let numbers: Vec<u64> =
        text.lines().filter_map(|line| line.rsplit_once("n=").map(|(_, n)| n.parse().unwrap())).collect();
    assert!(numbers.is_sorted(), "lines change places");
    // A program that writes faster than its reader reads loses lines, and the log says how many.
    let reported: u64 = text
        .lines()
        .filter_map(|line| line.split_once("lines of this log were lost")?.1.rsplit_once("lines="))
        .map(|(_, n)| n.parse::<u64>().unwrap())
        .sum();
    assert_eq!(numbers.len() as u64 + reported, LINES, "{answer}");
}

#[test]
fn what_was_lost_is_told_when_the_log_flows_again() {
    for role in ["talk, then fall silent", "json talk, then fall silent"] {
        let (reader, writer) = full();
        let mut child = start(role, writer);
        let mut stdout = std::io::BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        while !line.starts_with("ANSWER") {
            line.clear();
            std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
        }
        let lost = lost(line.trim());
        assert!(lost > 0, "{line}");
        let mut reader = std::io::BufReader::new(File::from(reader));
        let (mut reported, mut seen) = (0, 0);
        while reported < lost {
            line.clear();
            assert!(
                std::io::BufRead::read_line(&mut reader, &mut line).unwrap() > 0,
                "{reported} of {lost} reported"
            );
            let text = line.trim_start_matches('-');
            let Some((_, rest)) = text.split_once("lines of this log were lost") else {
                seen += u64::from(text.contains("a line that is"));
                continue;
            };
            if role.starts_with("json") {
                let parsed: serde_json::Value = serde_json::from_str(text).unwrap();
                reported += parsed["fields"]["lines"].as_u64().unwrap();
            } else {
                reported += rest.trim().rsplit_once("lines=").unwrap().1.parse::<u64>().unwrap();
            }
        }
        drop(child.stdin.take());
        assert!(end(&mut child).success());
        assert!(seen > 0 && reported + seen <= LINES, "{seen} lines and {reported} lost");
    }
}

#[test]
fn a_panic_in_any_thread_is_the_death_of_the_process_with_its_message_in_the_log() {
    for (role, what) in [
        ("panic", "thread \"doomed\" panicked at startup/tests/log.rs"),
        ("panic without a log", "role: thread \"doomed\" panicked at startup/tests/log.rs"),
        ("panic in a task", "caught by what runs tasks"),
        ("json panic", "thread \\\"doomed\\\" panicked at startup/tests/log.rs"),
        ("allocate", "memory allocation of 4096 bytes failed"),
        ("overflow", "has overflowed its stack"),
    ] {
        let mut child = start(role, Stdio::piped());
        let mut text = String::new();
        child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        let status = end(&mut child);
        assert_eq!(status.signal(), Some(libc::SIGABRT), "{role}: {status}, {text}");
        assert!(text.contains(what), "{role}: {text}");
        assert_eq!(answer(&mut child), "none", "{role} went on");
        if role.starts_with("json") {
            let line: serde_json::Value = serde_json::from_str(text.trim()).unwrap();
            assert_eq!(line["level"], "ERROR");
        }
    }
}

#[test]
fn a_process_that_panics_dies_whatever_became_of_its_log() {
    for role in ["panic", "panic without a log", "allocate", "overflow"] {
        let (unread, pipe) = full();
        let mut all: Vec<(&str, Stdio)> =
            vec![("closed", closed().into()), ("failing", full_device().into())];
        // What the runtime itself says goes to standard error as it is.
        all.push(("full", pipe.into()));
        for (what, stderr) in all {
            let mut child = start(role, stderr);
            let status = end(&mut child);
            assert_eq!(status.signal(), Some(libc::SIGABRT), "{role}, {what}: {status}");
        }
        drop(unread);
    }
}

#[test]
fn somebody_elses_sigabrt_still_ends_it() {
    let mut child = start("wait", Stdio::piped());
    let mut stdout = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("ANSWER") {
        line.clear();
        std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    }
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::ABORT).unwrap();
    assert_eq!(end(&mut child).signal(), Some(libc::SIGABRT));
}

#[test]
fn a_program_that_becomes_another_gives_standard_error_back() {
    let mut child = start("restore", Stdio::piped());
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert!(end(&mut child).success());
    assert_eq!(text, "before\nafter\n");
}

#[test]
fn no_program_leaves_a_core() {
    let mut child = start("limits", Stdio::null());
    let answer = answer(&mut child);
    assert!(end(&mut child).success());
    // 1 also stops handlers that core_pattern names as a pipe.
    assert_eq!(answer, "Some(1) Some(1)");
}

#[test]
fn a_log_in_a_file_goes_on_where_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mount.log");
    for times in 1..=2 {
        let mut child = start(&format!("file {}", path.display()), Stdio::null());
        assert!(end(&mut child).success());
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text.lines().filter(|line| line.ends_with("into a file")).count(), times, "{text}");
    }
}
