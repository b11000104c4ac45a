//! What sinks promise, kept by servers that others wrote; and what each of them does with conditions.

use super::common::BUCKET;
use super::common::sink::{ALL, Kept, keeps_its_promises, tells_of_uploads};
use super::{open, servers};
use store::Abilities;

/// As each one was when this was written: a server that does more by now is a line to change, and one that does less a reason
/// to look.
fn known(server: &str) -> Abilities {
    match server {
        "versitygw" => ALL,
        "minio" => Abilities { is_at_delete: false, ..ALL },
        "moto" => Abilities { is_in_parts: false, is_at_copy: false, ..ALL },
        // 16.2 compares If-Match with an ETag that has no quotation marks.
        "ceph-rgw" => Abilities { absent: true, confirms: true, ..Abilities::default() },
        other => panic!("nothing is known of what {other} does with conditions"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_server_takes_writes_as_the_contract_claims() {
    let mut tried = 0;
    for start in servers::chosen() {
        let real = start().await;
        let source = open(&real, &format!("{BUCKET}/written"), &real.secrets).unwrap();
        // All others are only read.
        let sink = source.sink();
        assert_eq!(sink.is_some(), real.scheme == "s3", "{}", real.name);
        let Some(sink) = sink else { continue };
        let odd = |key: &str| !real.breaks_at.contains(&key) && (real.name != "moto" || key != "new\nline");
        // Both answer with status 500 for ever.
        let knows_ended = !["moto", "ceph-rgw"].contains(&real.name);
        let kept = Kept { gives_away: true, knows_ended, odd: &odd };
        let able = keeps_its_promises(real.name, &*source, &*sink, &kept).await;
        // MinIO knows them by their whole keys alone.
        let told = tells_of_uploads(&*sink).await;
        println!("{}: {able:?}, tells of {told} of 3 uploads", real.name);
        assert_eq!(able, known(real.name), "{}", real.name);
        tried += 1;
    }
    println!("{tried} servers took writes");
}
