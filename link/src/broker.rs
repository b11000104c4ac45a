//! Agent ↔ broker. The two are rolled separately, so the encoding is JSON, and a message is extended by adding to it:
//!
//! - A field that is new has a default (`#[serde(default)]`); fields that are not known are ignored. So what is added
//!   this way must be something that the build before can do without.
//! - A question that is not known, or holds a value that is not, is answered with a refusal; an answer of that kind is
//!   one for the process that asked ([`PacketError::NotUnderstood`]). Neither ends the connection.
//! - A volume travels as text ([`volume::WireSpec`]) and says itself what of it must be understood.
//!
//! `tests/golden` holds each message as this version writes it; every later build must read it.
//!
//! The broker listens; the agent connects, says [`Hello`] and both sides may then ask and answer at any time.

use crate::later::Later;
use crate::worker::Mode;
use crate::{MountSpec, Packet, PacketError, Refusal, RefusalKind};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};

/// One mounted FUSE connection, named by the broker: never reused in the life of a broker's state directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct MountId(pub u64);

impl std::fmt::Display for MountId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "m{}", self.0)
    }
}

/// One packet in either direction. `id` pairs an answer with its question, per direction.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Frame<Question, Answer> {
    Ask { id: u64, body: Question },
    Answer { id: u64, body: Result<Answer, Refusal> },
}

pub type FromAgent = Frame<BrokerRequest, AgentAnswer>;
pub type FromBroker = Frame<AgentRequest, BrokerAnswer>;

/// What the agent asks of the broker.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BrokerRequest {
    /// First message on a connection.
    Hello(Hello),
    /// Register a cache file (attached) as a passthrough backing file of this connection. The broker accepts
    /// regular files below the cache roots only. → `Backing`
    BackingOpen {
        mount: MountId,
    },
    BackingClose {
        mount: MountId,
        id: u32,
    },
    /// Which of these threads (ids in the broker's PID namespace) are being killed? → `Dying`
    Dying {
        tids: Vec<u32>,
    },
    /// Requests that the kernel holds for this connection, unanswered. → `Waiting`
    Waiting {
        mount: MountId,
    },
    /// No worker could be brought up within `healTimeout`: abort this connection, so that readers get an error
    /// instead of waiting for ever. `why` is for the broker's log line. → `Done`
    Abort {
        mount: MountId,
        why: String,
    },
    /// The agent serves this mount: said of each of its mounts to a broker that it connects to, for that one may be
    /// new. Attached: the /dev/fuse fd and the connection's shared memory. A mount that is known is left as it is.
    /// → `Done`
    Hold(Box<Hold>),
    /// The agent is about to exit and its mounts shall wait for a successor. → `Holding`: those that will.
    Leaving,
    /// Can anything be read through this mount? A process of the broker's looks, for a limited time. → `Probed`
    Probe {
        mount: MountId,
    },
    /// The agent's main loops turn. Said every second; an agent that has promised it and stops is killed. → `Done`
    Beat,
    /// Give this worker (attached: its process descriptor) at most so much memory, bytes. → `Confined`
    Confine {
        bytes: u64,
    },
    /// The worker of this group is dead. → `Released`
    Release {
        group: String,
    },
    /// Something happened to this mount that its owner should read. → `Done`
    Report {
        mount: MountId,
        report: Report,
    },
}

/// What becomes an Event on the pod and its claim. Never holds a secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Report {
    /// A successor serves the mount in place of a worker that died or hung.
    Healed {
        cause: String,
        #[serde(default)]
        took_us: u64,
    },
    /// Calls that need what is missing wait.
    Degraded {
        why: String,
    },
    /// They go on.
    Recovered,
    /// A request killed worker after worker, or agents, and was answered EIO.
    Poisoned {
        operation: String,
        deaths: u32,
    },
    /// The source did not answer for `storeTimeout`: what is not cached fails. For an Event: it may be lost, and
    /// whether it still holds is in [`Usage`].
    SourceAway {
        why: String,
        /// This volume goes on with what was known last.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        stale: bool,
    },
    SourceBack,
    /// What was written waits for the store longer than it should. For an Event: whether it still holds is in [`Usage`].
    UploadsLate(Unsent),
    /// Somebody else has changed in the store what was written here.
    UploadConflict(Unsent),
    /// Neither of both any more.
    UploadsDone,
}

/// What was written to a volume on this node and is not in the store yet. Never holds a secret.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Unsent {
    pub files: u64,
    pub bytes: u64,
    /// Of the files, those that somebody else has changed in the store.
    #[serde(skip_serializing_if = "is_zero")]
    pub conflicts: u64,
    /// How long the oldest of it has waited.
    pub oldest_ms: u64,
    /// One of its paths, below the volume's source.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub path: String,
    /// What came of the last attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hello {
    /// [`version::LINK`] of the agent.
    pub protocol: u32,
    pub agent_version: String,
    pub pid: u32,
    /// [`version::STATE`] of the agent; 0: it is of a time before hand-overs.
    #[serde(default)]
    pub state: u32,
    /// Tells this life of the process from others: one that executes itself anew keeps its id.
    #[serde(default)]
    pub life: u64,
    /// Another agent serves this node, and this one would take its place.
    #[serde(default)]
    pub successor: bool,
    /// It is drained and does not serve: it comes to give its mounts to a broker that may not know them.
    #[serde(default, rename = "steppedBack")]
    pub drained: bool,
    /// It will say `Beat`.
    #[serde(default)]
    pub beats: bool,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BrokerAnswer {
    /// Answer to Hello. `ping` features may be added with defaults.
    Welcome {
        protocol: u32,
        broker_version: String,
    },
    Backing {
        id: u32,
    },
    Done,
    Dying {
        tids: Vec<u32>,
    },
    Waiting {
        count: u64,
    },
    Probed {
        serving: bool,
    },
    /// The name of its group.
    Confined {
        group: String,
    },
    /// How often the kernel has killed in it for want of memory.
    Released {
        oom_kills: u64,
    },
    Holding {
        mounts: Vec<MountId>,
    },
}

/// What the broker asks of the agent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AgentRequest {
    /// Serve this connection. Attached: the /dev/fuse fd. → `Prepared`, attached: the connection's shared memory
    /// (INIT, in-flight table), which the broker keeps beside its dup of the fd.
    Publish(Box<Publish>),
    /// The INIT reply has been written to the kernel and the readahead set: start reading requests. → `Done`
    Start { mount: MountId },
    /// Serve this connection, whose agent is gone. Attached: the /dev/fuse fd and the connection's shared memory.
    /// Answered as soon as the agent has taken it over, which does not wait for the source. → `Done`
    Adopt(Box<Adopt>),
    /// Which mounts does the agent hold everything of? → `Holding`
    Holding,
    /// Stop the worker, drop every fd of the connection. Unknown mounts are fine. → `Done`
    Unpublish { mount: MountId },
    /// Answered from the agent's memory. → `Usage`
    Usage { mount: MountId },
    /// This mount is about to be unpublished: bring what was written to its volume into the store, within `limit_ms`.
    /// Where another mount has the volume nothing is waited for. → `Unsent`: what will be left behind
    Upload { mount: MountId, limit_ms: u64 },
    /// The volume's secret has changed: use this one from now on, if it works. `Done`: it is in force.
    Rotate { mount: MountId, secrets: Secrets },
    /// This mount was made in the place of a dead one, which took so long, and a probe has read through it. For the
    /// agent's count of heals. → `Done`
    Renewed { mount: MountId, took_us: u64 },
    /// To a successor: could it serve this mount, which another agent serves now? Attached as for `Adopt`. Tried
    /// without touching the connection. → `Done`, or a refusal that says why not
    Prepare(Box<Adopt>),
    /// To the agent that serves: stop reading requests, let go of cache and state, keep the descriptors, answer, and
    /// wait. → `Done`
    #[serde(rename = "stepBack")]
    Drain,
    /// To a successor: cache and state are free. → `Done` when mounts can be given to it
    Succeed,
    /// To a successor: nothing comes of it, and why; for people. → `Done`
    Dismiss { why: String },
    /// To an agent that is drained: no agent took its place: serve again. → `Done`
    #[serde(rename = "stepForward")]
    Resume,
    /// To an agent that is drained: its successor serves everything. → `Done`, and it exits.
    Depart,
}

/// A mount that was published by another process of the agent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Adopt {
    pub publish: Publish,
    pub resume: Resume,
    /// Passthrough ids that the kernel holds for this connection.
    #[serde(default, with = "crate::backing_ids")]
    pub backing: Vec<u32>,
    /// How long no agent has served it, as far as the broker knows.
    #[serde(default)]
    pub orphaned_ms: u64,
    #[serde(default)]
    pub ended: AgentEnd,
}

/// What the broker knows of how the agent came to its end that served a mount.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AgentEnd {
    /// It was asked to stop, or is drained for this one.
    Asked,
    /// It hung, and was killed for that.
    Hung,
    /// Killed, crashed, out of memory; or something that only a later version knows.
    #[default]
    #[serde(other)]
    Unknown,
}

/// What a broker needs to be as if it had mounted this itself.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hold {
    pub publish: Publish,
    pub resume: Resume,
    #[serde(default, with = "crate::backing_ids")]
    pub backing: Vec<u32>,
}

/// What was decided when the volume was published, and must not be decided anew.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Resume {
    /// As the first worker answered INIT.
    pub mode: Mode,
    /// The agent's name of the names and files that this connection's node ids speak of: derived from the credentials
    /// of the publish, which may have been rotated since.
    pub scope: String,
    /// Nothing, but in builds for tests.
    #[serde(flatten)]
    pub later: Later,
}

impl Resume {
    pub fn new(mode: Mode, scope: String) -> Self {
        Self { mode, scope, later: Later::default() }
    }
}

/// Keys and values in clear, for the one message that carries them.
#[derive(Clone, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secrets(pub BTreeMap<String, String>);

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets(..)")
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Publish {
    pub mount: MountId,
    #[serde(flatten)]
    pub spec: MountSpec,
    /// In clear, in memory only; see `Credentials::to_secrets`.
    #[serde(default)]
    pub secrets: BTreeMap<String, String>,
    /// The kernel's INIT request, header included.
    pub init: Vec<u8>,
}

impl std::fmt::Debug for Publish {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Secrets stay out of every log.
        f.debug_struct("Publish")
            .field("mount", &self.mount)
            .field("volume", &self.spec.volume.id)
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AgentAnswer {
    /// The INIT reply for the kernel, header included; the bdi readahead to set, KiB; and how to prime the mount.
    Prepared {
        init_reply: Vec<u8>,
        read_ahead_kb: u32,
        resume: Resume,
    },
    Done,
    Holding {
        mounts: Vec<MountId>,
    },
    Usage(Usage),
    Unsent(Unsent),
}

/// What `NodeGetVolumeStats` and statfs report; totals are of what is known of the source so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Usage {
    pub total_bytes: u64,
    pub total_inodes: u64,
    pub cached_bytes: u64,
    /// Its source does not answer, as far as this agent knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub away: Option<Away>,
    /// What was written waits for the store longer than it should, or is in conflict with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unsent: Option<Unsent>,
}

/// As in [`Report::SourceAway`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Away {
    pub why: String,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub stale: bool,
}

/// Encodes and sends one frame.
pub fn send<T: Serialize>(socket: &Packet, frame: &T, fds: &[BorrowedFd<'_>]) -> Result<(), PacketError> {
    socket.send(&encode(frame)?, fds)
}

/// As [`send`], but a full buffer is `TimedOut` at once: for threads that must not block.
pub fn try_send<T: Serialize>(socket: &Packet, frame: &T, fds: &[BorrowedFd<'_>]) -> Result<(), PacketError> {
    socket.try_send(&encode(frame)?, fds)
}

fn encode<T: Serialize>(frame: &T) -> Result<Vec<u8>, PacketError> {
    serde_json::to_vec(frame).map_err(|e| PacketError::Malformed(e.to_string()))
}

/// As much of a frame as every version understands.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Envelope {
    Ask { id: u64 },
    Answer { id: u64 },
}

/// Receives and decodes one frame. One that cannot be understood is `NotUnderstood` if it can be answered, or else
/// `Malformed`; the connection stays usable after both.
pub fn recv<T: for<'de> Deserialize<'de>>(
    socket: &Packet,
    buffer: &mut [u8],
) -> Result<(T, Vec<OwnedFd>), PacketError> {
    let (body, fds) = socket.recv(buffer)?;
    // serde's message can quote the input, which may hold a secret: give the position only.
    let why = match serde_json::from_slice(body) {
        Ok(frame) => return Ok((frame, fds)),
        Err(e) => format!("{:?} at column {}", e.classify(), e.column()),
    };
    Err(match serde_json::from_slice(body) {
        Ok(Envelope::Ask { id }) => PacketError::NotUnderstood { id, question: true, why },
        Ok(Envelope::Answer { id }) => PacketError::NotUnderstood { id, question: false, why },
        Err(_) => PacketError::Malformed(why),
    })
}

/// What a question that was not understood is answered with, and what becomes of an answer of that kind.
pub fn not_understood(who: &str, why: &str) -> Refusal {
    let message = format!(
        "{who} does not understand this message ({why}): it is of another version; upgrade agent and csi-plugin to \
         the same one"
    );
    Refusal::new(RefusalKind::Internal, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RefusalKind as Kind;
    use volume::{Credentials, Parameters, SourceUrl, VolumeId, VolumeSpec};

    fn publish() -> Publish {
        Publish {
            mount: MountId(7),
            spec: MountSpec::new(
                VolumeSpec {
                    id: VolumeId::parse("v").unwrap(),
                    source: SourceUrl::parse("s3://bucket").unwrap(),
                    parameters: Parameters::default(),
                },
                "/t",
            ),
            secrets: Credentials::from_secrets([("accessKeyId", "a"), ("secretAccessKey", "hunter2")])
                .unwrap()
                .to_secrets(),
            init: vec![1, 2, 3],
        }
    }

    #[test]
    fn publish_survives_the_wire_and_debug_hides_its_secrets() {
        let (a, b) = Packet::pair().unwrap();
        let frame: FromBroker = Frame::Ask { id: 1, body: AgentRequest::Publish(Box::new(publish())) };
        assert!(!format!("{frame:?}").contains("hunter2"));
        send(&a, &frame, &[]).unwrap();
        let mut buffer = vec![0; crate::MAX_MESSAGE];
        let (frame, _) = recv::<FromBroker>(&b, &mut buffer).unwrap();
        let Frame::Ask { id: 1, body: AgentRequest::Publish(p) } = frame else { panic!() };
        assert_eq!(p.secrets["secretAccessKey"], "hunter2");
        let rotate = AgentRequest::Rotate { mount: p.mount, secrets: Secrets(p.secrets) };
        assert!(!format!("{rotate:?}").contains("hunter2"));
    }

    #[test]
    fn an_agent_whose_broker_says_nothing_of_its_environment_does_not_use_it() {
        let mut text = serde_json::to_value(publish()).unwrap();
        text.as_object_mut().unwrap().remove("environment").unwrap();
        assert!(!serde_json::from_value::<Publish>(text).unwrap().spec.environment);
    }

    /// Each is of a later version in one thing.
    #[test]
    fn what_a_later_version_says_can_be_answered_and_is_not_quoted() {
        let (a, b) = Packet::pair().unwrap();
        let mut buffer = vec![0; crate::MAX_MESSAGE];
        for (text, asks) in [
            (r#"{"ask":{"id":7,"body":{"nextWish":{"secret":"hunter2"}}}}"#, true),
            (r#"{"ask":{"id":7,"body":"nextWish"}}"#, true),
            (r#"{"ask":{"id":7,"body":{"probe":{"mount":"hunter2"}},"next":1}}"#, true),
            (r#"{"ask":{"id":7,"body":{"report":{"mount":1,"report":{"nextReport":{}}}}}}"#, true),
            (r#"{"answer":{"id":7,"body":{"Ok":{"nextAnswer":{}}}}}"#, false),
        ] {
            a.send(text.as_bytes(), &[]).unwrap();
            let error = recv::<FromAgent>(&b, &mut buffer).unwrap_err();
            let shown = error.to_string();
            assert!(!shown.contains("hunter2") && !shown.contains("nextWish"), "{shown}");
            assert!(
                matches!(error, PacketError::NotUnderstood { id: 7, question, .. } if question == asks),
                "{text}: {error}"
            );
        }
        // A reason to refuse that is not known is a refusal all the same.
        let refusal = br#"{"answer":{"id":8,"body":{"Err":{"kind":"NextKind","message":"no"}}}}"#;
        a.send(refusal, &[]).unwrap();
        assert!(matches!(
            recv::<FromAgent>(&b, &mut buffer).unwrap().0,
            Frame::Answer { id: 8, body: Err(Refusal { kind: Kind::Internal, message }) } if message == "no"
        ));
        let end: AgentEnd = serde_json::from_str(r#""nextEnd""#).unwrap();
        assert_eq!(end, AgentEnd::Unknown);
    }

    #[test]
    fn garbage_is_malformed_and_is_not_quoted() {
        let (a, b) = Packet::pair().unwrap();
        let mut buffer = vec![0; crate::MAX_MESSAGE];
        for garbage in [r#"{"ask":{"id":-1,"body":"hunter2"}}"#, r#"{"tell":"hunter2"}"#, "hunter2"] {
            a.send(garbage.as_bytes(), &[]).unwrap();
            let error = recv::<FromAgent>(&b, &mut buffer).unwrap_err();
            assert!(matches!(&error, PacketError::Malformed(text) if !text.contains("hunter2")), "{error}");
        }
        send(&a, &FromAgent::Answer { id: 2, body: Err(Refusal::new(Kind::Invalid, "no")) }, &[]).unwrap();
        assert!(matches!(
            recv::<FromAgent>(&b, &mut buffer).unwrap().0,
            Frame::Answer { id: 2, body: Err(Refusal { kind: Kind::Invalid, .. }) }
        ));
    }
}
