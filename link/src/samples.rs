//! Every message as this version writes it: `tests/golden/agent-to-broker-<LINK>.txt` and so on, one line each.
//! The next version's build must read them, too (`cargo test -p millpond-link --features next-version`).

use crate::broker::*;
use crate::golden;
use crate::worker::{
    Ask, Assign, Counts, DisabledFeatures, FaultKind, FromWorker, InjectedFault, Mode, Reply, Show, ToWorker,
};
use crate::writable::{Done, Name, Node, Operation, Owner, SetAttributes, Wrong};
use crate::{Access, Claim, MountSpec, Pod, Subjects};
use crate::{Cause, MAX_MESSAGE, Packet, PacketError, Refusal, RefusalKind};
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::fmt::Debug;
use std::time::Duration;
use version::{LINK, STEPS, WORKER};
use volume::{VolumeId, WireSpec};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

/// The names of all variants, and that of a value: one that is added has no name before it stands here, and then needs
/// a sample.
macro_rules! variants {
    ($module:ident, $type:ty: $($variant:ident)*) => {
        mod $module {
            use super::*;
            pub(super) const ALL: &[&str] = &[$(stringify!($variant)),*];
            pub(super) fn name(value: &$type) -> &'static str {
                type T = $type;
                match value { $(T::$variant { .. } => stringify!($variant)),* }
            }
        }
    };
}

variants!(broker_request, BrokerRequest: Hello BackingOpen BackingClose Dying Waiting Abort Hold Leaving Probe Beat Confine
    Release Report);
variants!(broker_answer, BrokerAnswer: Welcome Backing Done Dying Waiting Probed Confined Released Holding);
variants!(agent_request, AgentRequest: Publish Start Adopt Holding Unpublish Usage Upload Rotate Renewed Prepare Drain
    Succeed Dismiss Resume Depart);
variants!(agent_answer, AgentAnswer: Prepared Done Holding Usage Unsent);
variants!(report, Report: Healed Degraded Recovered Poisoned SourceAway SourceBack UploadsLate UploadConflict
    UploadsDone);
variants!(refusal_kind, RefusalKind: Invalid Denied NotFound Unavailable Conflict Internal);
variants!(agent_end, AgentEnd: Asked Hung Unknown);
variants!(mode, Mode: Passthrough NoOpen Kept Writable);
variants!(to_worker, ToWorker: Assign Roots Go Answer Forget);
variants!(from_worker, FromWorker: Ready Answered Serving Failed Ask Touched Advance GivenBack Counted);
variants!(ask, Ask: Lookup List Attributes File Cached Open Read Direct Damaged BackingOpen BackingClose Dying Space
    Writable);
variants!(reply, Reply: Stored File Cached Present Gone Uncached Backing Dying Space Writable);
variants!(operation, Operation: Lookup Attributes SetAttributes Create MakeDirectory Unlink RemoveDirectory Rename Open Close
    Write Sync ReadDirectory Locate Space);
variants!(done, Done: Done Absent Node Written Names Stored Staged Space);
variants!(wrong, Wrong: Cause Exists NotEmpty IsDirectory Elsewhere Impossible NameTooLong TooLarge NotPermitted NoSpace Conflict
    ReadOnly);
variants!(cause, Cause: NotFound Denied Stale Unavailable NotADirectory Internal);
variants!(access, Access: ReadOnly ReadWrite);
variants!(deed, FaultKind: Abort Deadlock Spin Allocate);

fn ensure_all<T>(all: &[&str], samples: &[T], name: impl Fn(&T) -> &'static str) {
    let named: Vec<_> = samples.iter().map(name).collect();
    let missing: Vec<_> = all.iter().filter(|one| !named.contains(one)).collect();
    assert!(missing.is_empty(), "no sample of {missing:?}");
}

const MOUNT: MountId = MountId(7);

fn publish() -> Publish {
    let pairs = |all: &[(&str, &str)]| all.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
    Publish {
        mount: MOUNT,
        spec: MountSpec {
            volume: WireSpec {
                id: VolumeId::parse("pvc-1").unwrap(),
                source: "s3://bucket/a/".into(),
                parameters: pairs(&[("freshness", "static"), ("uid", "1000")]),
                hints: pairs(&[("later", "x")]),
            },
            sources: Vec::new(),
            access: Access::ReadOnly,
            environment: true,
            target: "/var/lib/kubelet/pods/p/volumes/kubernetes.io~csi/pvc-1/mount".into(),
            subjects: Subjects {
                pod: Some(Pod { name: "p".into(), namespace: "n".into(), uid: "u".into() }),
                claim: Some(Claim { name: "c".into(), namespace: "n".into(), uid: Some("v".into()) }),
            },
        },
        secrets: pairs(&[("accessKeyId", "AKIAEXAMPLE"), ("secretAccessKey", "example")]),
        init: vec![1, 2, 255],
    }
}

fn publish_writable() -> Publish {
    let spec = MountSpec { access: Access::ReadWrite, ..publish().spec };
    Publish { spec, ..publish() }
}

fn resume(mode: Mode) -> Resume {
    Resume::new(mode, "0a".repeat(16))
}

fn adopt(mode: Mode, ended: AgentEnd) -> Box<Adopt> {
    let spec = MountSpec { subjects: Subjects::default(), ..publish().spec };
    let publish = Publish { spec, init: Vec::new(), ..publish() };
    Box::new(Adopt { publish, resume: resume(mode), backing: vec![1, 9], orphaned_ms: 1500, ended })
}

fn ends() -> Vec<AgentEnd> {
    vec![AgentEnd::Asked, AgentEnd::Hung, AgentEnd::Unknown]
}

fn unsent() -> Unsent {
    let why = Some("why".into());
    Unsent { files: 2, bytes: 4096, conflicts: 0, oldest_ms: 300_000, path: "a/b".into(), why }
}

fn reports() -> Vec<Report> {
    vec![
        Report::Healed { cause: "died".into(), took_us: 4200 },
        Report::Degraded { why: "why".into() },
        Report::Recovered,
        Report::Poisoned { operation: "READ".into(), deaths: 5 },
        Report::SourceAway { why: "why".into(), stale: false },
        Report::SourceBack,
        Report::UploadsLate(unsent()),
        Report::UploadConflict(Unsent { conflicts: 1, why: None, ..unsent() }),
        Report::UploadsDone,
    ]
}

fn questions_of_agent() -> Vec<BrokerRequest> {
    let mut all = vec![
        BrokerRequest::Hello(Hello {
            protocol: 1,
            agent_version: "0.1.0".into(),
            pid: 4711,
            state: 1,
            life: u64::MAX,
            successor: true,
            drained: false,
            beats: true,
        }),
        BrokerRequest::BackingOpen { mount: MOUNT },
        BrokerRequest::BackingClose { mount: MOUNT, id: 3 },
        BrokerRequest::Dying { tids: vec![1, 2] },
        BrokerRequest::Waiting { mount: MOUNT },
        BrokerRequest::Abort { mount: MOUNT, why: "why".into() },
        BrokerRequest::Hold(Box::new(Hold {
            publish: publish(),
            resume: resume(Mode::NoOpen),
            backing: vec![1, 9],
        })),
        BrokerRequest::Leaving,
        BrokerRequest::Probe { mount: MOUNT },
        BrokerRequest::Beat,
        BrokerRequest::Confine { bytes: 1 << 29 },
        BrokerRequest::Release { group: "w1".into() },
    ];
    all.extend(reports().into_iter().map(|report| BrokerRequest::Report { mount: MOUNT, report }));
    all
}

fn answers_of_broker() -> Vec<BrokerAnswer> {
    vec![
        BrokerAnswer::Welcome { protocol: 1, broker_version: "0.1.0".into() },
        BrokerAnswer::Backing { id: 3 },
        BrokerAnswer::Done,
        BrokerAnswer::Dying { tids: vec![2] },
        BrokerAnswer::Waiting { count: 9 },
        BrokerAnswer::Probed { serving: true },
        BrokerAnswer::Confined { group: "w1".into() },
        BrokerAnswer::Released { oom_kills: 1 },
        BrokerAnswer::Holding { mounts: vec![MOUNT, MountId(u64::MAX)] },
    ]
}

fn questions_of_broker() -> Vec<AgentRequest> {
    let secrets = || Secrets(publish().secrets);
    let mut all = vec![
        AgentRequest::Publish(Box::new(publish())),
        AgentRequest::Start { mount: MOUNT },
        AgentRequest::Holding,
        AgentRequest::Unpublish { mount: MOUNT },
        AgentRequest::Usage { mount: MOUNT },
        AgentRequest::Rotate { mount: MOUNT, secrets: secrets() },
        AgentRequest::Renewed { mount: MOUNT, took_us: 4200 },
        AgentRequest::Prepare(adopt(Mode::Passthrough, AgentEnd::Unknown)),
        AgentRequest::Drain,
        AgentRequest::Succeed,
        AgentRequest::Dismiss { why: "why".into() },
        AgentRequest::Resume,
        AgentRequest::Depart,
        AgentRequest::Upload { mount: MOUNT, limit_ms: 20_000 },
    ];
    all.extend(ends().into_iter().map(|ended| AgentRequest::Adopt(adopt(Mode::Kept, ended))));
    all.push(AgentRequest::Publish(Box::new(publish_writable())));
    all
}

fn answers_of_agent() -> Vec<AgentAnswer> {
    let modes = [Mode::Passthrough, Mode::NoOpen, Mode::Kept, Mode::Writable];
    let prepared =
        |mode| AgentAnswer::Prepared { init_reply: vec![0, 80], read_ahead_kb: 4096, resume: resume(mode) };
    let mut all: Vec<_> = modes.into_iter().map(prepared).collect();
    all.extend([
        AgentAnswer::Done,
        AgentAnswer::Holding { mounts: vec![MOUNT] },
        AgentAnswer::Usage(Usage { total_bytes: 1, total_inodes: 2, cached_bytes: 3, ..Usage::default() }),
        AgentAnswer::Usage(Usage { away: Some(Away { why: "why".into(), stale: true }), ..Usage::default() }),
        AgentAnswer::Usage(Usage { unsent: Some(unsent()), ..Usage::default() }),
        AgentAnswer::Unsent(unsent()),
    ]);
    all
}

fn refusals() -> Vec<Refusal> {
    use RefusalKind as K;
    let kinds = [K::Invalid, K::Denied, K::NotFound, K::Unavailable, K::Conflict, K::Internal];
    kinds.into_iter().map(|kind| Refusal::new(kind, "why")).collect()
}

fn operations() -> Vec<Operation> {
    let name = || b"x\xff".to_vec();
    let owner = Owner { mode: 0o640, uid: 1, gid: 2 };
    let set = SetAttributes {
        mode: Some(1),
        uid: None,
        gid: Some(2),
        size: Some(3),
        atime_ns: Some(-4),
        mtime_ns: Some(5),
    };
    vec![
        Operation::Lookup { parent: 1, name: name() },
        Operation::Attributes { ino: 2 },
        Operation::SetAttributes { ino: 2, set },
        Operation::Create { parent: 1, name: name(), owner, exclusive: true, open: true },
        Operation::MakeDirectory { parent: 1, name: name(), owner },
        Operation::Unlink { parent: 1, name: name() },
        Operation::RemoveDirectory { parent: 1, name: name() },
        Operation::Rename { parent: 1, name: vec![b'a'; 255], to: 3, to_name: vec![b'b'; 255], keep: true },
        Operation::Open { ino: 2, write: true },
        Operation::Close { ino: 2 },
        Operation::Write { ino: 2 },
        Operation::Sync { ino: 2, closing: true },
        Operation::ReadDirectory { dir: 1, offset: 1 << 62 },
        Operation::Locate { ino: 2 },
        Operation::Space,
    ]
}

fn outcomes() -> Vec<Result<Done, Wrong>> {
    let node = Node {
        ino: 2,
        size: 1 << 40,
        stored: 4,
        mode: 0o100_640,
        uid: 5,
        gid: 6,
        links: 1,
        atime_ns: -1,
        mtime_ns: 7,
        ctime_ns: 8,
    };
    let mut all: Vec<_> = done(node).into_iter().map(Ok).collect();
    all.extend(wrongs().into_iter().map(Err));
    all
}

fn done(node: Node) -> Vec<Done> {
    vec![
        Done::Done,
        Done::Absent,
        Done::Node(node),
        Done::Written { bytes: 9 },
        Done::Names(vec![Name { name: b"x".to_vec(), next: 2, node }]),
        Done::Stored { version: 3 },
        Done::Staged { size: 10 },
        Done::Space { total_bytes: 11, free_bytes: 12, total_inodes: 13 },
    ]
}

fn wrongs() -> Vec<Wrong> {
    let mut all: Vec<_> = causes().into_iter().map(Wrong::Cause).collect();
    all.extend([
        Wrong::Exists,
        Wrong::NotEmpty,
        Wrong::IsDirectory,
        Wrong::Elsewhere,
        Wrong::Impossible,
        Wrong::NameTooLong,
    ]);
    all.extend([Wrong::TooLarge, Wrong::NotPermitted, Wrong::NoSpace, Wrong::Conflict, Wrong::ReadOnly]);
    all
}

fn asks() -> Vec<Ask> {
    let mut all = vec![
        Ask::Lookup { parent: 1, name: b"x\xff".to_vec() },
        Ask::List { dir: 300 },
        Ask::Attributes { ino: 2, force: true },
        Ask::File { ino: 2, version: 3 },
        Ask::Cached { ino: 2, version: 3 },
        Ask::Open { ino: 2, version: 3 },
        Ask::Read { file: 4, offset: u64::MAX, len: 131_072 },
        Ask::Direct { ino: 2, version: 3, offset: 5, len: 6 },
        Ask::Damaged { file: 4 },
        Ask::BackingOpen { file: 4 },
        Ask::BackingClose { id: 7 },
        Ask::Dying { tids: vec![8, 9] },
        Ask::Space,
    ];
    all.extend(operations().into_iter().map(Ask::Writable));
    all
}

fn replies() -> Vec<Reply> {
    let mut all = vec![
        Reply::Stored,
        Reply::File { file: 4, size: 1 << 40, whole: false },
        Reply::Cached { bytes: 5 },
        Reply::Present { mark: Some(6) },
        Reply::Gone,
        Reply::Uncached { len: 7, number: 9 },
        Reply::Backing { id: 8 },
        Reply::Dying { tids: vec![9] },
        Reply::Space { total_bytes: 10, total_inodes: 11 },
    ];
    all.extend((0..).zip(outcomes()).map(|(n, done)| Reply::Writable { done, until_ms: n * 1_000_000 }));
    all
}

fn causes() -> Vec<Cause> {
    use Cause as C;
    vec![C::NotFound, C::Denied, C::Stale, C::Unavailable, C::NotADirectory, C::Internal]
}

fn deeds() -> Vec<FaultKind> {
    vec![FaultKind::Abort, FaultKind::Deadlock, FaultKind::Spin, FaultKind::Allocate]
}

fn assign() -> Assign {
    let fault = |what| InjectedFault { name: "x".into(), what, times: 2 };
    Assign {
        volume: "pvc-1".into(),
        source: "s3://bucket/a/".into(),
        metadata: "/var/lib/millpond/metadata/0a".into(),
        generation: 1,
        roots: 2,
        threads: 4,
        mode: Mode::Kept,
        show: Show {
            attributes_of_source: true,
            uid: 1000,
            gid: 100,
            file_mode: 0o444,
            dir_mode: 0o555,
            ttl: Some(Duration::new(60, 5)),
            revalidate_on_open: true,
        },
        disabled_features: DisabledFeatures {
            passthrough: true,
            no_open: false,
            readdirplus: true,
            landlock: false,
            populate_write: true,
            splice: false,
        },
        injected_faults: deeds().into_iter().map(fault).collect(),
        hang_limit: Duration::from_secs(15),
        block_bytes: 131_072,
        takeover: true,
    }
}

fn counts() -> Counts {
    Counts {
        lookups: 1,
        opens_passthrough: 2,
        opens_kept: 3,
        opens_estale: 4,
        reads_hit: 5,
        bytes_hit: 6,
        reads_spliced: 17,
        reads_miss: 7,
        bytes_miss: 8,
        reads_uncached: 9,
        readdirs: 10,
        metadata_hits: 11,
        metadata_misses: 12,
        interrupts: 13,
        interrupted: 14,
        replayed: 15,
        table_full: 16,
    }
}

fn to_worker() -> Vec<ToWorker> {
    let mut all = vec![ToWorker::Assign(Box::new(assign())), ToWorker::Roots, ToWorker::Go];
    all.extend(replies().into_iter().map(|reply| ToWorker::Answer { id: 300, body: Ok(reply) }));
    all.extend(causes().into_iter().map(|cause| ToWorker::Answer { id: 300, body: Err(cause) }));
    all.push(ToWorker::Forget { file: 4 });
    all
}

fn from_worker() -> Vec<FromWorker> {
    let mut all = vec![
        FromWorker::Ready { protocol: 1 },
        FromWorker::Answered { init_reply: vec![0, 80], mode: Mode::NoOpen },
        FromWorker::Serving,
        FromWorker::Failed { why: "why".into() },
    ];
    all.extend(asks().into_iter().map(|body| FromWorker::Ask { id: 300, unique: 1 << 40, body }));
    all.push(FromWorker::Touched { files: vec![4, 1 << 63] });
    all.push(FromWorker::Advance { file: 4, offset: 5 });
    all.push(FromWorker::GivenBack { number: 9 });
    all.push(FromWorker::Counted(counts()));
    all
}

#[test]
fn every_message_has_a_sample() {
    ensure_all(broker_request::ALL, &questions_of_agent(), broker_request::name);
    ensure_all(broker_answer::ALL, &answers_of_broker(), broker_answer::name);
    ensure_all(agent_request::ALL, &questions_of_broker(), agent_request::name);
    ensure_all(agent_answer::ALL, &answers_of_agent(), agent_answer::name);
    ensure_all(report::ALL, &reports(), report::name);
    ensure_all(refusal_kind::ALL, &refusals(), |refusal| refusal_kind::name(&refusal.kind));
    ensure_all(agent_end::ALL, &ends(), agent_end::name);
    ensure_all(mode::ALL, &[Mode::Passthrough, Mode::NoOpen, Mode::Kept, Mode::Writable], mode::name);
    ensure_all(operation::ALL, &operations(), operation::name);
    ensure_all(wrong::ALL, &wrongs(), wrong::name);
    let dones: Vec<Done> = outcomes().into_iter().flatten().collect();
    ensure_all(done::ALL, &dones, done::name);
    ensure_all(to_worker::ALL, &to_worker(), to_worker::name);
    ensure_all(from_worker::ALL, &from_worker(), from_worker::name);
    ensure_all(ask::ALL, &asks(), ask::name);
    ensure_all(reply::ALL, &replies(), reply::name);
    ensure_all(cause::ALL, &causes(), cause::name);
    ensure_all(access::ALL, &[publish().spec.access, publish_writable().spec.access], access::name);
    ensure_all(deed::ALL, &deeds(), deed::name);
}

fn all_from_agent() -> Vec<FromAgent> {
    let asked = questions_of_agent().into_iter().map(|body| Frame::Ask { id: 1, body });
    let answered = answers_of_agent().into_iter().map(|answer| Frame::Answer { id: 2, body: Ok(answer) });
    let refused = refusals().into_iter().map(|refusal| Frame::Answer { id: 3, body: Err(refusal) });
    asked.chain(answered).chain(refused).collect()
}

fn all_from_broker() -> Vec<FromBroker> {
    let asked = questions_of_broker().into_iter().map(|body| Frame::Ask { id: 1, body });
    let answered = answers_of_broker().into_iter().map(|answer| Frame::Answer { id: 2, body: Ok(answer) });
    let refused = refusals().into_iter().map(|refusal| Frame::Answer { id: 3, body: Err(refusal) });
    asked.chain(answered).chain(refused).collect()
}

fn json_lines<T: Serialize>(all: &[T]) -> String {
    all.iter().map(|message| serde_json::to_string(message).unwrap() + "\n").collect()
}

/// What `said` says is said here, too.
fn says(here: &Value, said: &Value) -> bool {
    match (here, said) {
        (Value::Object(here), Value::Object(said)) => {
            said.iter().all(|(key, value)| here.get(key).is_some_and(|here| says(here, value)))
        }
        (here, said) => here == said,
    }
}

fn ensure_read<T: Serialize + DeserializeOwned>(lines: &str) {
    for line in lines.lines() {
        let read: T = serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
        let (again, said) = (serde_json::to_value(&read).unwrap(), serde_json::from_str(line).unwrap());
        assert!(says(&again, &said), "read {line}\nas   {again}");
    }
}

#[test]
fn messages_between_agent_and_broker_are_those_of_the_golden_files() {
    let (agent, broker) = match STEPS {
        0 => (
            golden::same(GOLDEN, &format!("agent-to-broker-{LINK}.txt"), &json_lines(&all_from_agent())),
            golden::same(GOLDEN, &format!("broker-to-agent-{LINK}.txt"), &json_lines(&all_from_broker())),
        ),
        // A later version says more, and understands what this one says.
        _ => (golden::read(GOLDEN, "agent-to-broker-1.txt"), golden::read(GOLDEN, "broker-to-agent-1.txt")),
    };
    ensure_read::<FromAgent>(&agent);
    ensure_read::<FromBroker>(&broker);
}

/// Name of the message, tab, its bytes.
fn hex_lines<T: Serialize + Debug>(all: &[T]) -> String {
    let line = |message: &T| {
        let bytes = postcard::to_stdvec(message).unwrap();
        let shown = format!("{message:?}");
        format!(
            "{}\t{}",
            shown.chars().take_while(|c| c.is_ascii_alphanumeric()).collect::<String>(),
            golden::to_hex(&bytes)
        )
    };
    all.iter().map(line).collect()
}

fn ensure_meant<T: DeserializeOwned + Debug>(lines: &str, meant: &[T]) {
    for (line, meant) in lines.lines().zip(meant) {
        let hex = line.split_once('\t').unwrap().1;
        let read: T = postcard::from_bytes(&golden::from_hex(hex)).unwrap_or_else(|e| panic!("{e}: {line}"));
        assert_eq!(format!("{read:?}"), format!("{meant:?}"));
    }
}

/// Both ends are of one build, so there is nothing to read but what it writes. But a change that does not show in the
/// version would make two builds that meet (a laptop's package was upgraded) misunderstand each other.
#[test]
fn messages_between_agent_and_worker_are_those_of_the_golden_files() {
    let version = WORKER - STEPS;
    let to = golden::same(GOLDEN, &format!("agent-to-worker-{version}.txt"), &hex_lines(&to_worker()));
    let from = golden::same(GOLDEN, &format!("worker-to-agent-{version}.txt"), &hex_lines(&from_worker()));
    ensure_meant(&to, &to_worker());
    ensure_meant(&from, &from_worker());
}

/// Damages bytes: cut, or one byte changed.
fn damaged(mut bytes: Vec<u8>, at: prop::sample::Index, byte: u8, cut: bool) -> Vec<u8> {
    let at = at.index(bytes.len());
    if cut {
        bytes.truncate(at.max(1))
    } else {
        bytes[at] = byte
    }
    bytes
}

fn receive<T>(
    bytes: &[u8],
    recv: impl Fn(&Packet, &mut [u8]) -> Result<T, PacketError>,
) -> Result<T, PacketError> {
    let (a, b) = Packet::pair().unwrap();
    a.send(bytes, &[]).unwrap();
    recv(&b, &mut vec![0; MAX_MESSAGE])
}

proptest! {
    /// A message that came damaged, or from another program, is an error of its own or another message.
    #[test]
    fn damaged_messages_never_end_more_than_themselves(
        which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>(),
    ) {
        let usable = |error: &PacketError| matches!(error, PacketError::Malformed(_) | PacketError::NotUnderstood { .. });
        let (agent, broker, to, from) = (all_from_agent(), all_from_broker(), to_worker(), from_worker());
        let bytes = damaged(serde_json::to_vec(&agent[which.index(agent.len())]).unwrap(), at, byte, cut);
        prop_assert!(receive(&bytes, crate::broker::recv::<FromAgent>).map_or_else(|e| usable(&e), |_| true));
        let bytes = damaged(serde_json::to_vec(&broker[which.index(broker.len())]).unwrap(), at, byte, cut);
        prop_assert!(receive(&bytes, crate::broker::recv::<FromBroker>).map_or_else(|e| usable(&e), |_| true));
        let bytes = damaged(postcard::to_stdvec(&to[which.index(to.len())]).unwrap(), at, byte, cut);
        prop_assert!(receive(&bytes, crate::worker::recv::<ToWorker>).map_or_else(|e| usable(&e), |_| true));
        let bytes = damaged(postcard::to_stdvec(&from[which.index(from.len())]).unwrap(), at, byte, cut);
        prop_assert!(receive(&bytes, crate::worker::recv::<FromWorker>).map_or_else(|e| usable(&e), |_| true));
    }
}

/// A claimed length decides no allocation: serde takes at most a page ahead of what is there.
#[test]
fn a_claimed_length_of_a_list_is_an_error_and_no_allocation() {
    // `Touched` with 2^60 files, and `Ask` with a name of 2^60 bytes.
    let huge = [0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x10];
    for head in [&[5][..], &[4, 1, 0, 0, 1][..]] {
        let bytes = [head, &huge].concat();
        let error = receive(&bytes, crate::worker::recv::<FromWorker>).map(|_| ()).unwrap_err();
        assert!(matches!(error, PacketError::Malformed(_)), "{error}");
    }
    let nested = format!(r#"{{"ask":{{"id":1,"body":{}"#, "[".repeat(60_000));
    let error = receive(nested.as_bytes(), crate::broker::recv::<FromAgent>).map(|_| ()).unwrap_err();
    assert!(matches!(error, PacketError::Malformed(_)), "{error}");
}
