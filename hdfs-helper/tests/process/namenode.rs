//! As much of a NameNode as a listing takes: Hadoop's RPC without a login, one answer to `getListing`. (The messages are
//! those of `RpcHeader.proto` and `ClientNamenodeProtocol.proto`, with the fields that are used.)

use prost::Message;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// What it lists.
#[derive(Clone)]
pub(crate) enum Listing {
    Names {
        names: Vec<Vec<u8>>,
        at_once: usize,
    },
    Endless,
    /// Takes the question and says nothing.
    Silent,
    /// The first so many connections.
    SilentAtFirst(usize),
    /// An answer of four gigabytes.
    Claims,
}

pub(crate) struct NameNode {
    pub(crate) authority: String,
    connections: Arc<AtomicUsize>,
}

#[derive(Clone, PartialEq, Message)]
struct RequestHeader {
    #[prost(sint32, required, tag = "3")]
    call_id: i32,
}

#[derive(Clone, PartialEq, Message)]
struct ResponseHeader {
    #[prost(uint32, required, tag = "1")]
    call_id: u32,
    #[prost(int32, required, tag = "2")]
    status: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Method {
    #[prost(string, required, tag = "1")]
    name: String,
}

#[derive(Clone, PartialEq, Message)]
struct GetListing {
    #[prost(string, required, tag = "1")]
    src: String,
    #[prost(bytes = "vec", required, tag = "2")]
    start_after: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Permission {
    #[prost(uint32, required, tag = "1")]
    perm: u32,
}

#[derive(Clone, PartialEq, Message)]
struct FileStatus {
    #[prost(int32, required, tag = "1")]
    file_type: i32,
    #[prost(bytes = "vec", required, tag = "2")]
    path: Vec<u8>,
    #[prost(uint64, required, tag = "3")]
    length: u64,
    #[prost(message, required, tag = "4")]
    permission: Permission,
    #[prost(string, required, tag = "5")]
    owner: String,
    #[prost(string, required, tag = "6")]
    group: String,
    #[prost(uint64, required, tag = "7")]
    modified: u64,
    #[prost(uint64, required, tag = "8")]
    accessed: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Directory {
    #[prost(message, repeated, tag = "1")]
    partial: Vec<FileStatus>,
    #[prost(uint32, required, tag = "2")]
    remaining: u32,
}

#[derive(Clone, PartialEq, Message)]
struct Listed {
    #[prost(message, optional, tag = "1")]
    directory: Option<Directory>,
}

impl NameNode {
    /// Its threads end with their connections, and with the test's process.
    pub(crate) fn start(listing: Listing) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let authority = listener.local_addr().unwrap().to_string();
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = connections.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(stream) = stream else { return };
                let (number, listing) = (counted.fetch_add(1, Ordering::SeqCst), listing.clone());
                std::thread::spawn(move || serve(stream, number, &listing));
            }
        });
        Self { authority, connections }
    }

    pub(crate) fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    pub(crate) fn wait_for_connections(&self, count: usize) {
        let begun = Instant::now();
        while self.connections.load(Ordering::SeqCst) < count {
            assert!(begun.elapsed() < Duration::from_secs(60), "nobody came");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// None: the other end is gone.
fn serve(mut stream: TcpStream, number: usize, listing: &Listing) -> Option<()> {
    let mut hello = [0; 7];
    stream.read_exact(&mut hello).ok()?;
    assert_eq!(&hello[..4], b"hrpc");
    loop {
        let mut length = [0; 4];
        stream.read_exact(&mut length).ok()?;
        let mut frame = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut frame).ok()?;
        let mut frame = frame.as_slice();
        let header = RequestHeader::decode_length_delimited(&mut frame).unwrap();
        if header.call_id < 0 {
            continue; // the connection's context
        }
        if matches!(listing, Listing::Silent) {
            continue; // whatever the question is
        }
        let method = Method::decode_length_delimited(&mut frame).unwrap();
        assert_eq!(method.name, "getListing");
        let asked = GetListing::decode_length_delimited(&mut frame).unwrap();
        let (names, remaining) = match listing {
            Listing::Silent => continue,
            Listing::SilentAtFirst(silent) if number < *silent => continue,
            Listing::SilentAtFirst(_) => (vec![b"a".to_vec()], 0),
            Listing::Claims => {
                stream.write_all(&u32::MAX.to_be_bytes()).ok()?;
                continue;
            }
            Listing::Endless => {
                let last: u64 = String::from_utf8(asked.start_after).unwrap().parse().unwrap_or(0);
                ((last + 1..=last + 1000).map(|k| format!("{k:019}").into_bytes()).collect(), u32::MAX)
            }
            Listing::Names { names, at_once } => {
                let behind = names.iter().position(|name| *name == asked.start_after).map_or(0, |at| at + 1);
                let page: Vec<_> = names[behind..].iter().take(*at_once).cloned().collect();
                let remaining = names.len() - behind - page.len();
                (page, remaining as u32)
            }
        };
        let status = |path: Vec<u8>| FileStatus {
            file_type: 2,
            path,
            length: 7,
            permission: Permission { perm: 0o644 },
            owner: "alice".into(),
            group: "users".into(),
            modified: 5,
            accessed: 5,
        };
        let partial = names.into_iter().map(status).collect();
        let listed = Listed { directory: Some(Directory { partial, remaining }) };
        let header = ResponseHeader { call_id: header.call_id as u32, status: 0 };
        let answer =
            [header.encode_length_delimited_to_vec(), listed.encode_length_delimited_to_vec()].concat();
        stream.write_all(&(answer.len() as u32).to_be_bytes()).ok()?;
        stream.write_all(&answer).ok()?;
    }
}
