//! The application: a process of its own that calls and checks, because the holder of a FUSE device must not touch the
//! mount. It is this test binary again, with an environment variable.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

pub const VARIABLE: &str = "MILLPOND_TEST_APPLICATION";
/// From the end of its input to the end of a task.
const LIMIT: Duration = Duration::from_secs(60);

/// The bytes of an object at any offset.
pub fn pattern(seed: u64, offset: u64, buffer: &mut [u8]) {
    for (i, byte) in buffer.iter_mut().enumerate() {
        let at = offset + i as u64;
        let word = (seed ^ (at / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        *byte = word.to_le_bytes()[(at % 8) as usize];
    }
}

pub fn is_right(seed: u64, offset: u64, bytes: &[u8]) -> bool {
    let mut expected = vec![0; bytes.len()];
    pattern(seed, offset, &mut expected);
    expected == bytes
}

pub struct Application {
    child: Child,
}

pub struct Report {
    pub calls: u64,
    pub failures: Vec<String>,
}

impl Application {
    /// `task`: see [`main`].
    pub fn start(task: &str, args: &[&str]) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "application", "--nocapture", "--test-threads=1"])
            .env(VARIABLE, format!("{task} {}", args.join(" ")))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Self { child }
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Closes its input, which ends the task, and reads what it did. One that hangs is a failure.
    pub fn finish(mut self) -> Report {
        drop(self.child.stdin.take());
        let mut out = self.child.stdout.take().unwrap();
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut text = String::new();
            let read = out.read_to_string(&mut text);
            let _ = sender.send(read.map(|_| text)); // the test waits no more
        });
        let text =
            receiver.recv_timeout(LIMIT).expect("the application ends: is it stuck in the kernel?").unwrap();
        self.child.wait().unwrap();
        let calls =
            text.lines().find_map(|line| line.split("CALLS ").nth(1)).map(|n| n.trim().parse().unwrap());
        let failures =
            text.lines().filter_map(|line| line.split("FAILED ").nth(1)).map(str::to_owned).collect();
        Report { calls: calls.unwrap_or_else(|| panic!("no report: {text}")), failures }
    }
}

impl Drop for Application {
    /// Of a test that failed. Not waited for: it may be stuck until its mount is gone.
    fn drop(&mut self) {
        let _ = self.child.kill(); // ended: fine
    }
}

/// The other side: runs if the variable is set.
pub fn main() {
    let Ok(task) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = task.split(' ').filter(|word| !word.is_empty()).collect();
    match words[0] {
        "mixed" => mixed(Path::new(words[1]), words[2].parse().unwrap(), words.get(3) == Some(&"alarm")),
        "once" => once(Path::new(words[1]), words[2]),
        "direct" => direct(Path::new(words[1]), words[2]),
        "tour" => tour(Path::new(words[1]), words[2].parse().unwrap()),
        "whole" => whole(Path::new(words[1]), words[2]),
        "held" => held(Path::new(words[1]), words[2]),
        "calls" => super::mutating::calls(Path::new(words[1]), Path::new(words[2])),
        "writes" => super::writing::writes(Path::new(words[1]), Path::new(words[2])),
        "serve" => super::mutating::serve(Path::new(words[1]), words.get(2) == Some(&"naive")),
        "copy" => super::copying::copy(words.get(1) == Some(&"populated")),
        "across" => across(Path::new(words[1]), words[2]),
        other => panic!("no task {other}"),
    }
    std::process::exit(0); // without the test harness's own words
}

pub struct Calls {
    count: AtomicU64,
    failures: Mutex<Vec<String>>,
    pub stop: AtomicBool,
}

impl Calls {
    pub fn new() -> Arc<Self> {
        Arc::new(Self { count: AtomicU64::new(0), failures: Mutex::default(), stop: AtomicBool::new(false) })
    }
    pub fn call<T>(&self, what: &str, result: std::io::Result<T>) -> Option<T> {
        self.count.fetch_add(1, SeqCst);
        result.map_err(|error| self.fail(format!("{what}: {error}"))).ok()
    }
    pub fn check(&self, what: &str, right: bool) {
        if !right {
            self.fail(format!("{what}: wrong"));
        }
    }
    pub fn fail(&self, text: String) {
        let mut failures = self.failures.lock().unwrap();
        if failures.len() < 50 {
            failures.push(text);
        }
    }
    pub fn report(&self) {
        let mut out = std::io::stdout().lock();
        for failure in self.failures.lock().unwrap().iter() {
            writeln!(out, "\nFAILED {failure}").unwrap();
        }
        writeln!(out, "\nCALLS {}", self.count.load(SeqCst)).unwrap();
    }
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

pub fn small(i: u64) -> (String, u64, u64) {
    (format!("small/s{i}"), 1000 + i, 30_000 + i * 777)
}
pub fn big(i: u64) -> (String, u64, u64) {
    (format!("big{i}"), 5000 + i, (6 << 20) + i * 4097)
}

/// Threads of every kind until the input ends.
fn mixed(root: &Path, files: u64, alarm: bool) {
    let calls = Calls::new();
    if alarm {
        start_alarm();
    }
    let threads: Vec<_> = (0..10u64)
        .map(|thread| {
            let (calls, root) = (calls.clone(), root.to_owned());
            std::thread::spawn(move || {
                let mut state = 0x1234_5678_9abc_def1 ^ thread << 40;
                while !calls.stop.load(SeqCst) {
                    let i = random(&mut state) % files;
                    match thread % 5 {
                        0 => read_all(&calls, &root, small(i)),
                        1 => read_some(&calls, &root, big(i % 4), &mut state),
                        2 => look(&calls, &root, small(i)),
                        3 => list(&calls, &root, files),
                        _ => map(&calls, &root, big(i % 4), &mut state),
                    }
                }
            })
        })
        .collect();
    block_alarm();
    wait_for_input();
    calls.stop.store(true, SeqCst);
    for thread in threads {
        thread.join().unwrap();
    }
    calls.report();
}

fn open(calls: &Calls, path: &Path) -> Option<File> {
    calls.call("open", File::open(path))
}

fn read_all(calls: &Calls, root: &Path, (name, seed, size): (String, u64, u64)) {
    let Some(file) = open(calls, &root.join(name)) else { return };
    drop_pages(&file);
    let mut bytes = vec![0; size as usize + 10];
    let mut done = 0;
    while let Some(read) = calls.call("pread", file.read_at(&mut bytes[done..], done as u64)) {
        if read == 0 {
            break;
        }
        done += read;
    }
    calls.check("small file", done as u64 == size && is_right(seed, 0, &bytes[..done]));
}

fn read_some(calls: &Calls, root: &Path, (name, seed, size): (String, u64, u64), state: &mut u64) {
    let Some(file) = open(calls, &root.join(name)) else { return };
    drop_pages(&file);
    for _ in 0..8 {
        let offset = random(state) % (size - 50_000);
        let mut bytes = vec![0; 1 + random(state) as usize % 50_000];
        if let Some(read) = calls.call("pread", file.read_at(&mut bytes, offset)) {
            calls.check("range", read == bytes.len() && is_right(seed, offset, &bytes));
        }
    }
}

fn look(calls: &Calls, root: &Path, (name, _, size): (String, u64, u64)) {
    if let Some(found) = calls.call("stat", std::fs::metadata(root.join(name))) {
        calls.check("size", found.len() == size);
    }
    let absent = std::fs::metadata(root.join("absent")).map_err(|e| e.kind());
    calls.check("absence", absent.is_err_and(|kind| kind == std::io::ErrorKind::NotFound));
}

fn list(calls: &Calls, root: &Path, files: u64) {
    let entries = std::fs::read_dir(root.join("small")).and_then(|dir| dir.collect::<Result<Vec<_>, _>>());
    if let Some(entries) = calls.call("readdir", entries) {
        calls.check("listing", entries.len() as u64 == files);
    }
}

fn map(calls: &Calls, root: &Path, (name, seed, size): (String, u64, u64), state: &mut u64) {
    let Some(file) = open(calls, &root.join(name)) else { return };
    drop_pages(&file);
    let len = 1 << 20;
    let offset = random(state) % (size - len) / 4096 * 4096;
    // SAFETY: the file does not change.
    let map = unsafe { memmap2::MmapOptions::new().offset(offset).len(len as usize).map(&file) };
    if let Some(map) = calls.call("mmap", map) {
        calls.check("mapped", is_right(seed, offset, &map));
    }
}

fn drop_pages(file: &File) {
    // SAFETY: advice on a descriptor of ours.
    unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// SIGALRM at 1 kHz with a handler without SA_RESTART: what is interrupted shows as EINTR.
fn start_alarm() {
    extern "C" fn nothing(_: i32) {}
    // SAFETY: a handler that does nothing.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut());
        let every = libc::timeval { tv_sec: 0, tv_usec: 1000 };
        let timer = libc::itimerval { it_interval: every, it_value: every };
        libc::syscall(libc::SYS_setitimer, 0, &timer, 0);
    }
}

/// This thread waits for its input and wants no signals.
fn block_alarm() {
    // SAFETY: a mask of this thread's own.
    unsafe {
        let mut mask: libc::sigset_t = std::mem::zeroed();
        libc::sigaddset(&mut mask, libc::SIGALRM);
        libc::pthread_sigmask(libc::SIG_BLOCK, &mask, std::ptr::null_mut());
    }
}

/// Reads a file whole and checks it, by its name.
fn whole(root: &Path, name: &str) {
    let calls = Calls::new();
    let i: u64 = name.trim_start_matches("big").parse().unwrap();
    let (name, seed, size) = big(i);
    if let Some(mut file) = open(&calls, &root.join(name)) {
        let mut bytes = Vec::new();
        calls.call("read", file.read_to_end(&mut bytes));
        calls.check("bytes", bytes.len() as u64 == size && is_right(seed, 0, &bytes));
    }
    calls.report();
}

/// Opens a small file and reads it, and a map of it, when the input ends.
fn held(root: &Path, name: &str) {
    let calls = Calls::new();
    let i: u64 = name.trim_start_matches("small/s").parse().unwrap();
    let (name, seed, size) = small(i);
    if let Some(mut file) = open(&calls, &root.join(name)) {
        // SAFETY: the file does not change.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        wait_for_input();
        let mut bytes = Vec::new();
        calls.call("read", file.read_to_end(&mut bytes));
        calls.check("bytes", bytes.len() as u64 == size && is_right(seed, 0, &bytes));
        calls.check("map", is_right(seed, 0, &map));
    }
    calls.report();
}

/// Reads the front of a big file; when the input ends, the rest of it: the same version, or ESTALE.
fn across(root: &Path, name: &str) {
    let calls = Calls::new();
    let i: u64 = name.trim_start_matches("big").parse().unwrap();
    let (name, seed, size) = big(i);
    let Some(file) = open(&calls, &root.join(name)) else { return calls.report() };
    let mut bytes = vec![0; 4096];
    calls.call("read", file.read_at(&mut bytes, 0));
    calls.check("front", is_right(seed, 0, &bytes));
    wait_for_input();
    if let Some(found) = calls.call("fstat", file.metadata()) {
        calls.check("size of what is open", found.len() == size);
    }
    drop_pages(&file);
    match file.read_at(&mut bytes, size - 4096) {
        Ok(read) => calls.check("end", read == 4096 && is_right(seed, size - 4096, &bytes)),
        Err(error) => calls.check("ESTALE", error.raw_os_error() == Some(libc::ESTALE)),
    }
    let found = std::fs::metadata(root.join(format!("big{i}")));
    if let Some(found) = calls.call("stat", found) {
        calls.check("size by name", found.len() == size / 2);
    }
    calls.report();
}

pub fn wait_for_input() {
    let _ = std::io::stdin().read(&mut [0]);
}

/// One read of a whole file, then the report at the end of the input.
fn once(root: &Path, name: &str) {
    let calls = Calls::new();
    if let Some(mut file) = open(&calls, &root.join(name)) {
        calls.call("read", file.read_to_end(&mut Vec::new()));
    }
    calls.report();
}

/// Past the page cache: the caller waits for the request itself, and the kernel tells of its signals.
fn direct(root: &Path, name: &str) {
    #[repr(C, align(4096))]
    struct Page([u8; 4096]);
    let mut options = std::fs::File::options();
    let file = options.read(true).custom_flags(libc::O_DIRECT).open(root.join(name)).unwrap();
    let mut page = Page([0; 4096]);
    file.read_at(&mut page.0, 0).unwrap();
}

/// Everything warm, in order: list, stat, open, read, map, close.
fn tour(root: &Path, files: u64) {
    let calls = Calls::new();
    list(&calls, root, files);
    for i in 0..files {
        let (name, seed, size) = small(i);
        let path: PathBuf = root.join(&name);
        if let Some(found) = calls.call("stat", std::fs::metadata(&path)) {
            calls.check("size", found.len() == size);
        }
        let Some(mut file) = open(&calls, &path) else { continue };
        let mut bytes = Vec::new();
        calls.call("read", file.read_to_end(&mut bytes));
        calls.check("bytes", bytes.len() as u64 == size && is_right(seed, 0, &bytes));
    }
    let absent = std::fs::metadata(root.join("absent")).map_err(|e| e.kind());
    calls.check("absence", absent.is_err_and(|kind| kind == std::io::ErrorKind::NotFound));
    calls.report();
}
