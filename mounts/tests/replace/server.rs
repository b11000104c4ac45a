//! A FUSE server as a process of its own: when it is killed its connection is dead, and nobody hangs on it.
//!
//! It serves `which` and `sub/inside`, two files that hold its label.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

const LABEL: &str = "MILLPOND_TEST_LABEL";

pub struct Server(Child);

impl Server {
    pub fn start(device: OwnedFd, label: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "server_child", "--nocapture", "--test-threads=1"]);
        command.env(LABEL, label).stdin(Stdio::from(device)).stdout(Stdio::null());
        // SAFETY: one system call between fork and exec.
        unsafe { command.pre_exec(super::die_with_parent) };
        Self(command.spawn().unwrap())
    }

    /// Returns when the connection is dead.
    pub fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill(); // gone already: fine
        let _ = self.0.wait();
    }
}

/// In a server's process this serves until the connection ends.
pub fn run_if_asked() {
    let Ok(label) = std::env::var(LABEL) else { return };
    let mut device = File::from(rustix::io::dup(std::io::stdin()).unwrap());
    let mut buffer = vec![0; 256 << 10];
    loop {
        match device.read(&mut buffer) {
            Ok(_) => {}
            // The request was taken back before it was read.
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::Interrupted) => continue,
            Err(_) => return,
        }
        if let Some(reply) = answer(&buffer, label.as_bytes()) {
            let _ = device.write(&reply); // nobody waits for it any more: fine
        }
    }
}

const ROOT: u64 = 1;
const WHICH: u64 = 2;
const SUB: u64 = 3;
const INSIDE: u64 = 4;

fn word(buffer: &[u8], at: usize) -> u64 {
    u64::from_ne_bytes(buffer[at..at + 8].try_into().unwrap())
}

fn answer(request: &[u8], label: &[u8]) -> Option<Vec<u8>> {
    let opcode = u32::from_ne_bytes(request[4..8].try_into().unwrap());
    let node = word(request, 16);
    let body: Result<Vec<u8>, i32> = match opcode {
        1 => lookup(node, &request[40..], label),
        2 | 36 | 42 => return None, // FORGET, INTERRUPT, BATCH_FORGET
        3 => Ok([vec![0; 16], attributes(node, label)].concat()),
        14 | 27 => Ok(vec![0; 16]), // OPEN, OPENDIR
        15 => {
            let (offset, size) = (word(request, 48) as usize, word(request, 56) as u32 as usize);
            let rest = label.get(offset..).unwrap_or_default();
            Ok(rest[..rest.len().min(size)].to_vec())
        }
        17 => Ok(vec![0; 80]),           // STATFS
        18 | 25 | 28 | 29 => Ok(vec![]), // RELEASE, FLUSH, READDIR, RELEASEDIR
        _ => Err(libc::ENOSYS),
    };
    let (error, body) = match body {
        Ok(body) => (0, body),
        Err(errno) => (-errno, vec![]),
    };
    let mut reply = Vec::new();
    reply.extend((16 + body.len() as u32).to_ne_bytes());
    reply.extend(error.to_ne_bytes());
    reply.extend(&request[8..16]);
    reply.extend(body);
    Some(reply)
}

/// `fuse_entry_out`, valid for no time.
fn lookup(parent: u64, name: &[u8], label: &[u8]) -> Result<Vec<u8>, i32> {
    let name = name.split(|b| *b == 0).next().unwrap_or_default();
    let node = match (parent, name) {
        (ROOT, b"which") => WHICH,
        (ROOT, b"sub") => SUB,
        (SUB, b"inside") => INSIDE,
        _ => return Err(libc::ENOENT),
    };
    let mut entry = vec![0; 40];
    entry[0..8].copy_from_slice(&node.to_ne_bytes());
    entry.extend(attributes(node, label));
    Ok(entry)
}

/// `fuse_attr`.
fn attributes(node: u64, label: &[u8]) -> Vec<u8> {
    let (mode, size) = match node {
        ROOT | SUB => (0o40555u32, 0),
        _ => (0o100444, label.len() as u64),
    };
    let mut attr = vec![0; 88];
    attr[0..8].copy_from_slice(&node.to_ne_bytes());
    attr[8..16].copy_from_slice(&size.to_ne_bytes());
    attr[60..64].copy_from_slice(&mode.to_ne_bytes());
    attr[64..68].copy_from_slice(&2u32.to_ne_bytes());
    attr
}
