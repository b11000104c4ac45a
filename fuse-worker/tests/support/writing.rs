//! Large WRITEs, whose bytes go from the shared memory to a file of the world, on another thread than the one that reads
//! the device.

use super::load::{Calls, is_right, pattern, wait_for_input};
use super::mutating::Mutating;
use super::wait_for;
use fuse_abi::{InHeader, WriteIn, opcode};
use fuse_worker::reply::Sink;
use fuse_worker::transport::{Transport, Write};
use std::fs::{self, File};
use std::io::IoSlice;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::mpsc::{self, Sender};

const HEAD: usize = InHeader::BYTES + WriteIn::BYTES;
const THREADS: u64 = 4;
/// Of each thread: its part of the file.
const CHUNKS: u64 = 4;
/// More than one WRITE, so that there are long and short ones.
const CHUNK: u64 = (1 << 20) + 100;

/// Of a worker: what it sends here is written and answered.
pub fn start(transport: &Arc<Transport>, file: &Path) -> Sender<Write> {
    let (sender, writes) = mpsc::channel::<Write>();
    let (transport, file) = (transport.clone(), File::options().write(true).open(file).unwrap());
    std::thread::spawn(move || {
        for write in writes {
            failpoint::hit("writing.begun");
            // As an agent: what the worker says is compared with what the kernel has said.
            let inflight = transport.inflight();
            let mut head = [0; HEAD];
            let header = inflight.head(write.unique, &mut head).unwrap();
            let said = WriteIn::from_bytes(head.last_chunk().unwrap());
            assert_eq!((header.opcode, header.nodeid), (opcode::WRITE, write.nodeid));
            assert_eq!((said.offset, said.size), (write.offset, write.size));
            let mut request = vec![0; HEAD + write.size as usize];
            inflight.head(write.unique, &mut request).expect("nobody else answers it");
            file.write_all_at(&request[HEAD..], write.offset).unwrap();
            failpoint::hit("writing.written");
            let body = [write.size, 0].map(u32::to_ne_bytes).concat();
            transport.send(write.unique, 0, &[IoSlice::new(&body)]);
        }
    });
    sender
}

/// Waits until a worker that lives has written.
pub fn let_write(mutating: &Mutating) {
    let file = mutating.world.join("data");
    let look = || fs::metadata(&file).unwrap().modified().unwrap();
    for _ in 0..2 {
        let before = look();
        wait_for("progress of writes", || look() != before);
    }
}

/// Another process: the application. Writes until its input ends; what a call says is written must be there.
pub fn writes(root: &Path, world: &Path) {
    let books = Calls::new();
    let threads = (0..THREADS).map(|thread| {
        let (books, path, world) = (books.clone(), root.join("data"), world.join("data"));
        std::thread::spawn(move || {
            let world = File::open(world).unwrap();
            let Some(file) = books.call("open", File::options().write(true).open(path)) else { return };
            let mut buffer = vec![0; CHUNK as usize];
            for round in 0.. {
                let offset = (thread * CHUNKS + round % CHUNKS) * CHUNK;
                pattern(round, offset, &mut buffer);
                let result = books.call("write", file.write_at(&buffer, offset));
                books.check("bytes written", result.is_none_or(|bytes| bytes == buffer.len()));
                let found = world.read_exact_at(&mut buffer, offset);
                books.check("bytes", found.is_ok() && is_right(round, offset, &buffer));
                if books.stop.load(SeqCst) {
                    break;
                }
            }
        })
    });
    let threads: Vec<_> = threads.collect();
    wait_for_input();
    books.stop.store(true, SeqCst);
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    books.report();
}
