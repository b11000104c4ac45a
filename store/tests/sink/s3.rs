//! A bucket as a sink: an honest server, servers that lie, and answers that do not come.

use crate::common::sink::{
    ALL, Kept, body, conflict, holds, keeps_its_promises, of, tells_of_uploads, version, write,
};
use crate::common::{BUCKET, Log, keys, open, quick, spec};
use futures::StreamExt;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Duration;
use store::{
    Abilities, Access, Condition, Limits, LimitsConfig, NoObserver, Part, RetryCause, Sink, Source,
    StoreError, Written,
};
use testkit::content::mix;
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::{Config, Key, Lies, Memory, Rights, Server};

/// All but what POSIX has no name for.
const KEPT: Kept<'_> = Kept { gives_away: true, knows_ended: true, odd: &|_| true };

/// A busy machine is not taken for a store that stalls.
fn patient() -> LimitsConfig {
    LimitsConfig { stall_timeout: Duration::from_secs(20), ..quick() }
}

async fn server(config: Config) -> (Server, Arc<dyn Source>, Arc<dyn Sink>) {
    let server = Server::start(config.bucket(BUCKET, Memory::default())).await.unwrap();
    let source = open(&spec(&server, "s3://bucket"), patient(), Arc::new(NoObserver));
    let sink = source.sink().unwrap();
    (server, source, sink)
}

fn script(server: &Server, rules: Vec<Rule>) {
    server.faults().set(Script { seed: 18, rules });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_keeps_what_every_sink_promises() {
    let (server, source, sink) = server(Config::default()).await;
    assert_eq!(keeps_its_promises("s3", &*source, &*sink, &KEPT).await, ALL);
    assert_eq!(server.stats().uploads_open, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_keeps_them_too() {
    let server = Server::start(Config::default().bucket(BUCKET, Memory::default())).await.unwrap();
    let source = open(&spec(&server, "s3://bucket/a/b c"), patient(), Arc::new(NoObserver));
    let sink = source.sink().unwrap();
    assert_eq!(keeps_its_promises("a prefix", &*source, &*sink, &KEPT).await, ALL);
    assert_eq!(tells_of_uploads(&*sink).await, 3);
}

type Change<T> = fn(&mut T);

#[tokio::test(flavor = "multi_thread")]
async fn what_a_server_lies_about_is_found_out_and_the_rest_holds() {
    let lies: [(Change<Lies>, Change<Abilities>); 5] = [
        (|lies| lies.ignores_if_match_on_put = true, |able| able.is = false),
        (
            |lies| lies.ignores_if_none_match = true,
            |able| (able.absent, able.absent_in_parts) = (false, false),
        ),
        (|lies| lies.ignores_if_match_on_delete = true, |able| able.is_at_delete = false),
        (
            |lies| lies.ignores_conditions_on_complete = true,
            |able| (able.absent_in_parts, able.is_in_parts) = (false, false),
        ),
        (|lies| lies.no_checksums = true, |able| able.confirms = false),
    ];
    for (lie, costs) in lies {
        let (mut lies, mut able) = (Lies::default(), ALL);
        lie(&mut lies);
        costs(&mut able);
        let (server, source, sink) = server(Config { lies, ..Config::default() }).await;
        assert_eq!(keeps_its_promises("a liar", &*source, &*sink, &KEPT).await, able, "{lies:?}");
        assert_eq!(server.stats().uploads_open, 0, "{lies:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_is_found_by_looking_and_nothing_is_sent_again() {
    let (server, source, sink) = server(Config::default()).await;
    let bytes = of("lost", 300_000);
    for (op, condition) in [("PutObject", Condition::Absent), ("PutObject", Condition::Any)] {
        let _ = sink.delete(b"f", &Condition::Any).await;
        server.reset_stats();
        script(&server, vec![Rule::always(Fault::LostAnswer).op(op).times(1)]);
        let written = sink.put(b"f", &body(&bytes), &write(), &condition).await.unwrap();
        assert_eq!((server.stats().of(op), server.stats().bytes_put), (1, 300_000), "{condition:?}");
        assert!(written.confirmed);
        holds(&*source, "f", &written, &bytes).await;
    }
    let (_, seen) = version(&*source, "f").await.unwrap();

    script(&server, vec![Rule::always(Fault::LostAnswer).op("CopyObject").times(1)]);
    let copied = sink.copy(b"f", &seen, 300_000, b"g", &write(), &Condition::Absent).await.unwrap();
    assert_eq!(server.stats().of("CopyObject"), 1);
    holds(&*source, "g", &copied, &bytes).await;

    let begun = write();
    script(&server, vec![Rule::always(Fault::LostAnswer).op("CompleteMultipartUpload").times(1)]);
    let upload = sink.begin(b"h", &begun).await.unwrap();
    let part = sink.part(&upload, 1, &body(&bytes)).await.unwrap();
    let written = sink.complete(&upload, &[part], &Condition::Absent).await.unwrap();
    assert_eq!(server.stats().of("CompleteMultipartUpload"), 1);
    assert!(written.confirmed);
    holds(&*source, "h", &written, &bytes).await;

    script(&server, vec![Rule::always(Fault::LostAnswer).op("DeleteObject").times(1)]);
    sink.delete(b"h", &Condition::Is(written.version)).await.unwrap();
    assert_eq!(version(&*source, "h").await, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_writes_after_a_lost_answer_is_not_overwritten() {
    let (server, source, sink) = server(Config::default()).await;
    let first = sink.put(b"f", &body(b"first"), &write(), &Condition::Absent).await.unwrap();
    // Executed; and before this writer can look, somebody else has read it and written the next version.
    script(
        &server,
        vec![
            Rule::always(Fault::LostAnswer).op("PutObject").times(1),
            Rule::always(Fault::Stall { ms: None }).op("HeadObject").times(1),
        ],
    );
    let (second, is) = (write(), Condition::Is(first.version));
    let ours = tokio::spawn({
        let sink = sink.clone();
        async move { sink.put(b"f", &body(b"second"), &second, &is).await }
    });
    while server.faults().hits() < 2 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let theirs = server.put(BUCKET, "f", "theirs").unwrap();
    server.faults().release();
    assert_eq!(conflict(ours.await.unwrap()).unwrap().0, theirs.etag);
    assert_eq!(version(&*source, "f").await.unwrap().1.0, theirs.etag);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_that_comes_late_changes_nothing_any_more() {
    let (server, source, sink) = server(Config::default()).await;
    let first = sink.put(b"f", &body(b"first"), &write(), &Condition::Absent).await.unwrap();
    script(&server, vec![Rule::always(Fault::LateEffect { ms: 300 }).op("PutObject").times(1)]);
    let second = sink.put(b"f", &body(b"second"), &write(), &Condition::Is(first.version)).await.unwrap();
    let third = sink.put(b"f", &body(b"third"), &write(), &Condition::Is(second.version)).await.unwrap();
    while server.late() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(server.stats().of("PutObject"), 4, "two of the second, of which one came late");
    holds(&*source, "f", &third, b"third").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_that_are_not_what_was_sent_are_no_object() {
    let (server, source, sink) = server(Config::default()).await;
    let upload = sink.begin(b"f", &write()).await.unwrap();
    let part = sink.part(&upload, 1, &body(b"sent")).await.unwrap();
    sink.part(&upload, 1, &body(b"late")).await.unwrap();
    let done = sink.complete(&upload, std::slice::from_ref(&part), &Condition::Absent).await;
    assert!(matches!(done, Err(StoreError::NotFound { .. })), "{done:?}");
    let done = sink.complete(&upload, &[Part { number: 2, ..part }], &Condition::Absent).await;
    assert!(matches!(done, Err(StoreError::NotFound { .. })), "{done:?}");
    assert_eq!((version(&*source, "f").await, server.stats().of("CompleteMultipartUpload")), (None, 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_breaks_on_the_way_is_sent_again_and_for_its_reason() {
    let faults = [
        (Fault::ResetUpload, "PutObject", RetryCause::Reset),
        (Fault::StallUpload { ms: None }, "PutObject", RetryCause::Stalled),
        (Fault::Stall { ms: None }, "PutObject", RetryCause::Stalled),
        (Fault::Reset, "PutObject", RetryCause::Reset),
        (Fault::Status { code: 503, retry_after_s: None }, "PutObject", RetryCause::Throttled),
        (Fault::Status { code: 500, retry_after_s: None }, "PutObject", RetryCause::ServerError),
        (Fault::CompleteError, "CompleteMultipartUpload", RetryCause::ServerError),
        (Fault::CompleteError, "CopyObject", RetryCause::ServerError),
        (Fault::ResetUpload, "UploadPart", RetryCause::Reset),
        (Fault::Status { code: 503, retry_after_s: None }, "CreateMultipartUpload", RetryCause::Throttled),
    ];
    let bytes = of("broken", 6_000_000);
    for (fault, op, cause) in faults {
        let (server, source, _) = server(Config::default()).await;
        let log = Arc::new(Log::default());
        let limits = if cause == RetryCause::Stalled { quick() } else { patient() };
        let sink = open(&spec(&server, "s3://bucket"), limits, log.clone()).sink().unwrap();
        script(&server, vec![Rule::always(fault.clone()).op(op).times(1)]);
        let put = sink.put(b"f", &body(&bytes), &write(), &Condition::Absent).await.unwrap();
        holds(&*source, "f", &put, &bytes).await;
        let size = bytes.len() as u64;
        let copied = sink.copy(b"f", &put.version, size, b"g", &write(), &Condition::Absent).await.unwrap();
        holds(&*source, "g", &copied, &bytes).await;
        let upload = sink.begin(b"h", &write()).await.unwrap();
        let part = sink.part(&upload, 1, &body(&bytes)).await.unwrap();
        let written = sink.complete(&upload, &[part], &Condition::Absent).await.unwrap();
        holds(&*source, "h", &written, &bytes).await;
        let retries: Vec<_> = log.retries.lock().unwrap().iter().map(|(_, cause)| *cause).collect();
        // A machine that is too busy for a short patience stalls more often than once.
        let as_often = retries.len() == 1 || retries.len() > 1 && cause == RetryCause::Stalled;
        assert!(as_often && retries.iter().all(|seen| *seen == cause), "{fault:?} of {op}: {retries:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_completion_that_takes_long_is_waited_for() {
    let (server, source, sink) = server(Config::default()).await;
    script(&server, vec![Rule::always(Fault::SlowComplete { ms: 1500 }).op("CompleteMultipartUpload")]);
    let upload = sink.begin(b"f", &write()).await.unwrap();
    let part = sink.part(&upload, 1, &body(b"part")).await.unwrap();
    let written = sink.complete(&upload, &[part], &Condition::Absent).await.unwrap();
    holds(&*source, "f", &written, b"part").await;
}

#[tokio::test]
async fn the_reason_for_which_nothing_is_written_is_told() {
    let (full, _, sink) = server(Config { bytes_max: Some(1000), ..Config::default() }).await;
    let put = sink.put(b"f", &body(&of("f", 1001)), &write(), &Condition::Absent).await;
    assert!(matches!(put, Err(StoreError::Full { .. })), "{put:?}");
    sink.put(b"f", &body(&of("f", 1000)), &write(), &Condition::Absent).await.unwrap();
    let upload = sink.begin(b"g", &write()).await.unwrap();
    let part = sink.part(&upload, 1, &body(b"x")).await;
    assert!(matches!(part, Err(StoreError::Full { .. })), "{part:?}");
    assert_eq!(full.stats().of("PutObject"), 2, "a full store is not asked again and again");

    let reads = Key::new("reads", "secret", Rights::NoWrite);
    let (server, _, _) = server(Config { keys: vec![reads], ..Config::default() }).await;
    let spec_ = spec(&server, "s3://bucket");
    let sink_of = |id: &str, spec: &volume::VolumeSpec| {
        let access = Access::fixed(spec, keys(id, "secret"));
        let limits = Arc::new(Limits::new(patient()));
        store::open(spec, access, limits, Arc::new(NoObserver)).unwrap().sink().unwrap()
    };
    let sink = sink_of("reads", &spec_);
    for error in [
        sink.put(b"f", &body(b"x"), &write(), &Condition::Absent).await.unwrap_err(),
        sink.begin(b"f", &write()).await.unwrap_err(),
        sink.delete(b"f", &Condition::Any).await.unwrap_err(),
        sink.make_dir(b"d", &write()).await.unwrap_err(),
    ] {
        let StoreError::Denied { why, .. } = &error else { panic!("{error:?}") };
        assert!(why.contains("s3:"), "the right that is missing: {why}");
    }
    let nowhere = spec(&server, "s3://other");
    let put = sink_of("reads", &nowhere).put(b"f", &body(b"x"), &write(), &Condition::Any).await;
    assert!(matches!(put, Err(StoreError::NotFound { .. } | StoreError::Denied { .. })), "{put:?}");
    for path in [vec![b'x'; 256], vec![0xff], [&[b'a'; 200][..]; 6].join(&b'/')] {
        let put = sink.put(&path, &body(b"x"), &write(), &Condition::Any).await;
        assert!(matches!(put, Err(StoreError::Unsupported { .. })), "{put:?}");
    }
}

#[tokio::test]
async fn a_bucket_that_goes_meanwhile_is_not_found() {
    let (server, source, _) = server(Config::default()).await;
    let spec = spec(&server, "s3://gone");
    let sink = open(&spec, patient(), Arc::new(NoObserver)).sink().unwrap();
    let put = sink.put(b"f", &body(b"x"), &write(), &Condition::Absent).await;
    assert!(matches!(put, Err(StoreError::NotFound { .. })), "{put:?}");
    drop(source);
}

#[tokio::test]
async fn what_the_disk_does_not_give_back_is_not_written() {
    let (server, source, sink) = server(Config::default()).await;
    let mut wrong = body(&of("f", 700_000));
    wrong.crc32c ^= 1;
    let put = sink.put(b"f", &wrong, &write(), &Condition::Absent).await;
    assert!(matches!(put, Err(StoreError::Damaged { .. })), "{put:?}");
    let mut short = body(&of("f", 700_000));
    short.range.end += 1;
    let put = sink.put(b"f", &short, &write(), &Condition::Absent).await;
    assert!(matches!(put, Err(StoreError::Damaged { .. })), "{put:?}");
    assert_eq!(version(&*source, "f").await, None);
    assert_eq!(server.stats().of("PutObject"), 2, "it would be wrong again");
}

/// Each task writes its own file again and again; nobody else does. Whatever is lost, broken or late, no write is refused
/// for a conflict, and each is there as soon as it is acknowledged.
#[tokio::test(flavor = "multi_thread")]
async fn whatever_goes_wrong_each_write_takes_place_once() {
    let (server, ..) = server(Config::default()).await;
    let source = open(&spec(&server, "s3://bucket"), quick(), Arc::new(NoObserver));
    let sink = source.sink().unwrap();
    let seed = random_seed();
    let kinds = [
        (Fault::LostAnswer, 0.05),
        (Fault::LateEffect { ms: 60 }, 0.03),
        (Fault::ResetUpload, 0.02),
        (Fault::Reset, 0.02),
        (Fault::StallUpload { ms: None }, 0.005),
        (Fault::Stall { ms: None }, 0.005),
        (Fault::Status { code: 503, retry_after_s: None }, 0.02),
        (Fault::Status { code: 500, retry_after_s: None }, 0.01),
        (Fault::CompleteError, 0.05),
        (Fault::Latency { ms: 10 }, 0.1),
    ];
    let rules = kinds.into_iter().map(|(fault, often)| Rule::with_probability(fault, often)).collect();
    server.faults().set(Script { seed, rules });
    let tasks = futures::stream::iter(0..16_u64).map(|task| {
        let (source, sink) = (source.clone(), sink.clone());
        async move {
            let path = format!("dir/f{task}");
            let mut now: Option<Written> = None;
            for step in 0..12_u64 {
                let drawn = mix(seed ^ mix(task << 8 | step));
                let bytes = of(&format!("{seed}-{task}-{step}"), drawn % 200_000);
                let condition = now.as_ref().map_or(Condition::Absent, |w| Condition::Is(w.version.clone()));
                let written = match drawn >> 32 & 3 {
                    0 | 1 => sink.put(path.as_bytes(), &body(&bytes), &write(), &condition).await,
                    2 => loop {
                        let upload = sink.begin(path.as_bytes(), &write()).await.unwrap();
                        let part = sink.part(&upload, 1, &body(&bytes)).await.unwrap();
                        match sink.complete(&upload, &[part], &condition).await {
                            // A part that came late has another tag here, whatever its bytes.
                            Err(StoreError::NotFound { .. }) => sink.abandon(&upload).await.unwrap(),
                            done => break done,
                        }
                    },
                    _ => {
                        let from = format!("from/f{task}-{step}");
                        let put = sink
                            .put(from.as_bytes(), &body(&bytes), &write(), &Condition::Absent)
                            .await
                            .unwrap();
                        let size = bytes.len() as u64;
                        let to = path.as_bytes();
                        sink.copy(from.as_bytes(), &put.version, size, to, &write(), &condition).await
                    }
                };
                let written =
                    written.unwrap_or_else(|e| panic!("seed {seed}, task {task}, step {step}: {e}"));
                holds(&*source, &path, &written, &bytes).await;
                now = Some(written);
            }
        }
    });
    tasks.buffer_unordered(16).for_each(async |()| ()).await;
    assert!(server.faults().hits() > 100, "seed {seed}: {} faults", server.faults().hits());
}

fn random_seed() -> u64 {
    let seed = RandomState::new().build_hasher().finish();
    eprintln!("seed {seed}");
    seed
}
