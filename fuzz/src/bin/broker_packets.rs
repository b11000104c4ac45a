//! Packets between agent and broker, of any version.

#![no_main]

use fuzz::Bound;
use libfuzzer_sys::fuzz_target;
use link::broker::{
    AgentRequest, BrokerRequest, Frame, FromAgent, FromBroker, Publish, not_understood, recv, send,
};
use link::{MAX_MESSAGE, MountSpec, Packet, PacketError};
use std::sync::LazyLock;
use volume::WireSpec;

/// Seven bytes (`"a":"",`) are a node of a map, and a packet is read twice.
const BOUND: Bound = Bound { times: 64, besides: 256 << 10 };

static PAIR: LazyLock<(Packet, Packet)> = LazyLock::new(|| Packet::pair().expect("a socket pair"));

fuzz_target!(|input: &[u8]| {
    if input.is_empty() || input.len() > MAX_MESSAGE {
        return;
    }
    let mut buffer = vec![0; MAX_MESSAGE];
    BOUND.hold(input, || {
        if let Some(frame) = round::<FromAgent>(input, &mut buffer)
            && let Frame::Ask { body: BrokerRequest::Hold(hold), .. } = frame
        {
            publish(&hold.publish);
        }
        match round::<FromBroker>(input, &mut buffer) {
            Some(Frame::Ask { body: AgentRequest::Publish(it), .. }) => publish(&it),
            Some(Frame::Ask { body: AgentRequest::Adopt(it) | AgentRequest::Prepare(it), .. }) => {
                publish(&it.publish);
            }
            _ => {}
        }
    });
});

/// What is understood is sent again, and reads the same; what is not says so without a word of the input.
fn round<T: serde::Serialize + for<'de> serde::Deserialize<'de>>(
    input: &[u8],
    buffer: &mut [u8],
) -> Option<T> {
    let (a, b) = &*PAIR;
    a.send(input, &[]).expect("it fits");
    let frame = match recv::<T>(b, buffer) {
        Ok((frame, _)) => frame,
        Err(PacketError::NotUnderstood { why, .. } | PacketError::Malformed(why)) => {
            assert!(why.len() < 100, "{why}");
            let refusal = FromAgent::Answer { id: 1, body: Err(not_understood("the agent", &why)) };
            send(a, &refusal, &[]).expect("a refusal fits");
            recv::<FromAgent>(b, buffer).expect("a refusal can be received");
            return None;
        }
        Err(other) => panic!("{other}"),
    };
    let text = serde_json::to_value(&frame).expect("what was received can be written");
    // Names that it did not have may make it too long, and then it is refused and not cut.
    match send(a, &frame, &[]) {
        Ok(()) => {
            let (again, _) = recv::<T>(b, buffer).expect("what was sent can be received");
            assert_eq!(serde_json::to_value(&again).expect("as above"), text);
        }
        Err(PacketError::TooLarge(..)) => {}
        Err(other) => panic!("{other}"),
    }
    Some(frame)
}

fn publish(publish: &Publish) {
    let _ = publish.spec.namespace();
    understood(&publish.spec);
}

/// What a build understands of a volume it can tell another one, which understands the same.
fn understood(spec: &MountSpec) {
    let _ = (spec.volume.digest(), spec.volume.heal_timeout());
    if let Ok(found) = spec.understand() {
        let again = WireSpec::from(&found);
        assert_eq!(again.understand().as_ref(), Ok(&found));
    }
}
