//! Packets between agent and worker. A worker may have been taken over by what it serves: the agent trusts no byte.

#![no_main]

use fuzz::Bound;
use libfuzzer_sys::fuzz_target;
use link::worker::{FromWorker, ToWorker, recv, send};
use link::{MAX_MESSAGE, Packet};
use std::sync::LazyLock;

/// Of a vector serde takes as much ahead as its length says, but at most 1 MiB; what comes is a number of eight bytes for
/// each of one, and the packet's text.
const BOUND: Bound = Bound { times: 64, besides: 3 << 20 };

static PAIR: LazyLock<(Packet, Packet)> = LazyLock::new(|| Packet::pair().expect("a socket pair"));

fuzz_target!(|input: &[u8]| {
    if input.is_empty() || input.len() > MAX_MESSAGE {
        return;
    }
    let (a, b) = &*PAIR;
    let mut buffer = vec![0; MAX_MESSAGE];
    BOUND.hold(input, || {
        a.send(input, &[]).expect("it fits");
        if let Ok((message, _)) = recv::<FromWorker>(b, &mut buffer) {
            // It may be shorter than it came (a number may have leading zeros), and never longer.
            send(a, &message, &[]).expect("what was received can be sent");
            let (again, _) = recv::<FromWorker>(b, &mut buffer).expect("what was sent can be received");
            assert_eq!(format!("{again:?}"), format!("{message:?}"));
        }
        a.send(input, &[]).expect("it fits");
        if let Ok((message, _)) = recv::<ToWorker>(b, &mut buffer) {
            send(a, &message, &[]).expect("what was received can be sent");
            let (again, _) = recv::<ToWorker>(b, &mut buffer).expect("what was sent can be received");
            assert_eq!(format!("{again:?}"), format!("{message:?}"));
        }
    });
});
