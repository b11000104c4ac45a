//! A directory that is deleted from servers that others wrote.

use super::common::sink::write;
use super::common::{BUCKET, ODD_KEYS, listed};
use super::servers::{self, Kept, REGION};
use super::{asking, open};
use std::sync::Arc;
use store::{Erased, NoObserver};

#[tokio::test(flavor = "multi_thread")]
async fn each_server_loses_the_directory_and_nothing_else() {
    let mut tried = 0;
    for start in servers::chosen() {
        let real = start().await;
        if real.scheme != "s3" {
            continue;
        }
        let place = format!("{BUCKET}/team/claim");
        // More than a page; and whatever it takes of odd keys.
        let mut kept = 0;
        for number in 0..1_100 {
            let put = real.put(&format!("team/claim/d/{number}"), vec![7; 10]).await;
            kept += u64::from(matches!(put, Kept::Yes));
        }
        for key in ODD_KEYS.iter().filter(|key| !real.breaks_at.contains(key)) {
            let put = real.put(&format!("team/claim/odd/{key}"), vec![7; 10]).await;
            kept += u64::from(matches!(put, Kept::Yes));
        }
        assert!(matches!(real.put("team/claim-2/x", vec![7; 10]).await, Kept::Yes));
        let source = open(&real, &place, &real.secrets).unwrap();
        let sink = source.sink().expect("S3 can be written to");
        sink.make_dir(b"empty", &write()).await.unwrap();
        sink.begin(b"big", &write()).await.unwrap();

        let (spec, access, limits) = asking(REGION, &real, &place, &real.secrets);
        let eraser = store::open_eraser(&spec, access, limits, Arc::new(NoObserver)).unwrap();
        let erased = Erased::default();
        let done = eraser.erase(&erased, &|| Box::pin(async { true })).await;
        assert!(done.unwrap_or_else(|error| panic!("{}: {error}", real.name)));
        println!("{}: {} objects, {} uploads", real.name, erased.objects(), erased.uploads());
        assert!(erased.objects() > kept && !erased.keeps_versions(), "{}: {erased:?} of {kept}", real.name);
        assert!(listed(&*source, "").await.is_empty(), "{}", real.name);
        let neighbour = open(&real, &format!("{BUCKET}/team/claim-2"), &real.secrets).unwrap();
        assert_eq!(listed(&*neighbour, "").await.len(), 1, "{}", real.name);
        tried += 1;
    }
    println!("{tried} servers lost it");
}
