//! A FUSE server as a process of its own: when it is killed its connection is dead, and nothing hangs on it.
//!
//! It serves `which` and `sub/inside`, two files that hold its label.

use fuse_abi::{Attr, AttrOut, EntryOut, InHeader, Kstatfs, OpenOut, OutHeader, ReadIn, opcode};
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
            let _ = device.write(&reply); // its caller waits no more: fine
        }
    }
}

const ROOT: u64 = 1;
const WHICH: u64 = 2;
const SUB: u64 = 3;
const INSIDE: u64 = 4;

fn answer(request: &[u8], label: &[u8]) -> Option<Vec<u8>> {
    let header = InHeader::from_bytes(request.first_chunk().unwrap());
    let (node, request) = (header.nodeid, &request[InHeader::BYTES..]);
    let body: Result<Vec<u8>, i32> = match header.opcode {
        opcode::LOOKUP => lookup(node, request, label),
        opcode::FORGET | opcode::INTERRUPT | opcode::BATCH_FORGET => return None,
        opcode::GETATTR => {
            Ok(AttrOut { attr: attributes(node, label), ..AttrOut::default() }.to_bytes().into())
        }
        opcode::OPEN | opcode::OPENDIR => Ok(OpenOut::default().to_bytes().into()),
        opcode::READ => {
            let read = ReadIn::from_bytes(request.first_chunk().unwrap());
            let rest = label.get(read.offset as usize..).unwrap_or_default();
            Ok(rest[..rest.len().min(read.size as usize)].to_vec())
        }
        opcode::STATFS => Ok(Kstatfs::default().to_bytes().into()),
        opcode::RELEASE | opcode::FLUSH | opcode::READDIR | opcode::RELEASEDIR => Ok(vec![]),
        _ => Err(libc::ENOSYS),
    };
    let (error, body) = match body {
        Ok(body) => (0, body),
        Err(errno) => (-errno, vec![]),
    };
    let mut reply = OutHeader::new(body.len(), error, header.unique).to_bytes().to_vec();
    reply.extend(body);
    Some(reply)
}

/// Valid for no time.
fn lookup(parent: u64, name: &[u8], label: &[u8]) -> Result<Vec<u8>, i32> {
    let name = name.split(|b| *b == 0).next().unwrap_or_default();
    let node = match (parent, name) {
        (ROOT, b"which") => WHICH,
        (ROOT, b"sub") => SUB,
        (SUB, b"inside") => INSIDE,
        _ => return Err(libc::ENOENT),
    };
    Ok(EntryOut { nodeid: node, attr: attributes(node, label), ..EntryOut::default() }.to_bytes().into())
}

fn attributes(node: u64, label: &[u8]) -> Attr {
    let (mode, size) = match node {
        ROOT | SUB => (0o40555u32, 0),
        _ => (0o100444, label.len() as u64),
    };
    Attr { ino: node, size, mode, nlink: 2, ..Attr::default() }
}
