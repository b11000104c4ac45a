//! The transport between a kernel, which is the other end of a socket here, and whoever reads from it.

use super::{Transport, Write, current};
use crate::init::can_serve;
use crate::reply::Sink;
use fuse_abi::{InHeader, InitOut, OutHeader, WriteIn, opcode};
use inflight::{Blame, Inflight, Room};
use link::worker::DisabledFeatures;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use std::io::IoSlice;
use std::mem::offset_of;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

/// What fuser answers to INIT, as far as it matters here.
const FUSER: InitOut = InitOut {
    major: 7,
    minor: 40,
    max_readahead: 0,
    flags: 0,
    max_background: 128,
    congestion_threshold: 96,
    max_write: 1 << 20,
    time_gran: 1,
    max_pages: 256,
    map_alignment: 0,
    flags2: 0,
    max_stack_depth: 0,
    unused: [0; 6],
};

struct Kernel {
    socket: OwnedFd,
    inflight: Arc<Inflight>,
    transport: Arc<Transport>,
    buffer: Vec<u8>,
}

impl Kernel {
    fn new(room: Room) -> Self {
        let inflight = Arc::new(Inflight::map(Inflight::create(room).unwrap()).unwrap());
        inflight.set_init(&[7; 104]).unwrap();
        Self::with(inflight)
    }

    /// A worker that has answered INIT.
    fn with(inflight: Arc<Inflight>) -> Self {
        let (socket, device) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        let transport = Arc::new(Transport::new(inflight.clone(), device, &DisabledFeatures::default()));
        let mut buffer = vec![0; inflight.stage_bytes_max()];
        assert_eq!(transport.read(&mut buffer), Ok(104));
        let header = OutHeader::new(InitOut::BYTES, 0, 2).to_bytes();
        transport.write(&[IoSlice::new(&header), IoSlice::new(&FUSER.to_bytes())]).unwrap();
        Self { socket, inflight, transport, buffer }
    }

    fn send(&self, opcode: u32, unique: u64, body: &[u8]) {
        let len = (InHeader::BYTES + body.len()) as u32;
        let header =
            InHeader { len, opcode, unique, nodeid: 3, uid: 4, gid: 5, pid: 6, ..InHeader::default() };
        let message = [&header.to_bytes()[..], body].concat();
        assert_eq!(rustix::io::write(&self.socket, &message), Ok(message.len()));
    }

    fn send_write(&self, unique: u64, says: u32, bytes: &[u8]) {
        let write = WriteIn {
            fh: 7,
            offset: 8 << 40,
            size: says,
            write_flags: 1,
            lock_owner: 9,
            flags: 10,
            ..WriteIn::default()
        };
        self.send(opcode::WRITE, unique, &[&write.to_bytes()[..], bytes].concat());
    }

    /// What comes up to whoever reads: the unique id.
    fn read(&mut self) -> u64 {
        let len = self.transport.read(&mut self.buffer).unwrap();
        let header = InHeader::from_bytes(self.buffer.first_chunk().unwrap());
        assert_eq!(header.len as usize, len);
        header.unique
    }

    /// The next answer: its id and its error.
    fn answer(&self) -> (u64, i32) {
        let mut bytes = [0; 64];
        rustix::io::read(&self.socket, &mut bytes).unwrap();
        let header = OutHeader::from_bytes(bytes.first_chunk().unwrap());
        (header.unique, header.error)
    }

    /// Keeps what it is handed over, with the id that the thread worked on.
    fn handler(&self) -> Arc<Mutex<Vec<(Write, u64)>>> {
        let kept: Arc<Mutex<Vec<(Write, u64)>>> = Arc::default();
        let keeps = kept.clone();
        self.transport
            .set_writes(Box::new(move |write| keeps.lock().unwrap().push((write, current().unique))));
        kept
    }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i / 7) as u8).collect()
}

fn expected(unique: u64, size: u32) -> Write {
    Write {
        unique,
        nodeid: 3,
        fh: 7,
        offset: 8 << 40,
        size,
        write_flags: 1,
        flags: 10,
        uid: 4,
        gid: 5,
        pid: 6,
    }
}

#[test]
fn a_write_goes_to_its_handler_and_the_next_request_to_fuser() {
    let mut kernel = Kernel::new(Room::ReadWrite);
    let kept = kernel.handler();
    let data = bytes(70_000);
    kernel.send_write(4, 0, &[]);
    kernel.send_write(6, data.len() as u32, &data);
    kernel.send(opcode::GETATTR, 8, &[0; 16]);
    assert_eq!(kernel.read(), 8);
    assert_eq!(current().unique, 8);
    assert_eq!(*kept.lock().unwrap(), [(expected(4, 0), 4), (expected(6, 70_000), 6)]);
    let mut found = vec![0; 80 + data.len()];
    kernel.inflight.head(6, &mut found).unwrap();
    assert!(found[80..] == data);
    kernel.transport.send(6, 0, &[]);
    assert_eq!(kernel.answer(), (6, 0));
    assert!(kernel.inflight.head(6, &mut []).is_none(), "it has been answered");
}

#[test]
fn a_write_without_a_handler_is_answered_erofs_and_a_malformed_one_eio() {
    let mut kernel = Kernel::new(Room::ReadOnly);
    kernel.send_write(4, 5, b"bytes");
    kernel.send(opcode::GETATTR, 6, &[0; 16]);
    assert_eq!((kernel.read(), kernel.answer()), (6, (4, -libc::EROFS)));
    let kept = kernel.handler();
    for (nth, says) in [4, 6, 0, u32::MAX].into_iter().enumerate() {
        let unique = 100 + 4 * nth as u64;
        kernel.send_write(unique, says, b"bytes");
        kernel.send(opcode::GETATTR, unique + 2, &[0; 16]);
        assert_eq!((kernel.read(), kernel.answer()), (unique + 2, (unique, -libc::EIO)));
    }
    // Behind one that was longer: what is left of it is no part of this one.
    kernel.send(opcode::WRITE, 200, &[0; 39]);
    kernel.send(opcode::GETATTR, 202, &[0; 16]);
    assert_eq!((kernel.read(), kernel.answer()), (202, (200, -libc::EIO)));
    assert!(kept.lock().unwrap().is_empty());
}

#[test]
fn the_writes_that_a_dead_worker_left_go_to_its_successors_handler() {
    let data = bytes(60_000);
    let mut dead = Kernel::new(Room::ReadWrite);
    let _unanswered = dead.handler();
    dead.send_write(4, data.len() as u32, &data);
    dead.send(opcode::GETATTR, 6, &[0; 16]);
    dead.send_write(8, 3, b"end");
    dead.send(opcode::STATFS, 10, &[]);
    assert_eq!((dead.read(), dead.read()), (6, 10));
    // A socket takes whatever is written: all wait.
    let collected = dead.inflight.collect(&dead.socket, Blame::Nobody).unwrap();
    assert_eq!((collected.orphans, collected.lost), (4, 0));

    let mut kernel = Kernel::with(dead.inflight.clone());
    let kept = kernel.handler();
    assert_eq!((kernel.read(), kernel.read()), (6, 10));
    assert_eq!(*kept.lock().unwrap(), [(expected(4, 60_000), 4), (expected(8, 3), 8)]);
    let mut found = vec![0; 80 + 60_000];
    kernel.inflight.head(4, &mut found).unwrap();
    assert!(found[80..] == data);
}

#[test]
fn init_asks_for_writes_as_large_as_there_is_room_for_and_a_successor_serves_them() {
    let reply = |room| Kernel::new(room).transport.init_reply().unwrap();
    let (read_only, read_write) = (reply(Room::ReadOnly), reply(Room::ReadWrite));
    let field =
        |reply: &[u8], at: usize| u32::from_ne_bytes(*reply[OutHeader::BYTES + at..].first_chunk().unwrap());
    let writes = [&read_only, &read_write].map(|reply| field(reply, offset_of!(InitOut, max_write)));
    assert_eq!(writes, [4096, 255 * 4096]);
    for reply in [&read_only, &read_write] {
        assert_eq!(field(reply, offset_of!(InitOut, max_pages)) & 0xffff, 255);
        assert_eq!(can_serve(reply, reply), Ok(()));
    }
    // The header, and what the kernel demands of a read (fuse_dev_do_read).
    let room = Inflight::map(Inflight::create(Room::ReadWrite).unwrap()).unwrap().stage_bytes_max();
    assert!(room >= 80 + writes[1] as usize);
    assert!(can_serve(&read_only, &read_write).unwrap_err().contains("less room"));
}
