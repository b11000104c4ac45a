//! Questions outlive what they are asked with: a token expires, a volume comes that waits longer.

use crate::common::*;
use futures::StreamExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use store::{Access, ExpiryObserver, Limits, NoObserver, Source, StoreError};
use testkit::content;
use testkit::faults::{Fault, Rule, Script};
use testkit::s3::{Config, Key, Memory, Rights, SECRET_KEY, Server};
use volume::Credentials;

const SIZE: u64 = 3 << 20;
const LONG: Duration = Duration::from_secs(60);

#[derive(Clone, Default)]
struct Waiting(Arc<AtomicU32>);

impl ExpiryObserver for Waiting {
    fn expired(&self, _: &StoreError) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
    fn works_again(&self) {}
}

impl Waiting {
    async fn begin(&self) {
        let waits = async {
            while self.0.load(Ordering::SeqCst) == 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(LONG, waits).await.expect("no question waits for a renewed secret");
    }
}

fn token(token: &str) -> Credentials {
    let secrets = [("accessKeyId", "session"), ("secretAccessKey", SECRET_KEY), ("sessionToken", token)];
    Credentials::from_secrets(secrets).unwrap()
}

/// A server that takes the token "good".
async fn opened(patience: Duration) -> (Server, store::Version, Arc<Access>, Arc<dyn Source>, Waiting) {
    let mut config = Config::default();
    config.keys.push(Key::new("session", SECRET_KEY, Rights::All).with_token("good"));
    let server = Server::start(config.bucket(BUCKET, Memory::default())).await.unwrap();
    let meta = server.put(BUCKET, "o", content::bytes(1, 0..SIZE)).unwrap();
    let waiting = Waiting::default();
    let access = Access::renewable(token("good"), patience, Box::new(waiting.clone()));
    let limits = Arc::new(Limits::new(quick()));
    let source =
        store::open(&spec(&server, "s3://bucket"), access.clone(), limits, Arc::new(NoObserver)).unwrap();
    (server, version(&meta), access, source, waiting)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_question_waits_for_the_next_token() {
    let (_server, version, access, source, waiting) = opened(LONG).await;
    access.replace(token("expired"));
    let all = async {
        tokio::join!(source.list(b"", None), source.head(b"o"), read(&*source, b"o", &version, 0..10))
    };
    let renewing = async {
        waiting.begin().await;
        access.replace(token("good"));
    };
    let ((listed, found, bytes), ()) = tokio::join!(all, renewing);
    assert_eq!(listed.unwrap().entries.len(), 1);
    assert!(found.unwrap().is_some());
    assert_eq!(content::first_wrong_byte(1, 0, &bytes.unwrap()), None);
    // A check says so at once.
    access.replace(token("expired"));
    assert!(matches!(source.check(LONG).await, Err(StoreError::Expired { .. })));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_goes_on_from_where_its_token_expired() {
    let (server, version, access, source, waiting) = opened(LONG).await;
    server.faults().set(Script { seed: 3, rules: vec![Rule::nth(Fault::ResetBody, &[1])] });
    let mut body = source.get(b"o", &version, 0..SIZE).await.unwrap();
    let mut bytes = body.next().await.unwrap().unwrap().to_vec();
    access.replace(token("expired"));
    let rest = async {
        while let Some(piece) = body.next().await {
            bytes.extend_from_slice(&piece.unwrap());
        }
    };
    let renewing = async {
        waiting.begin().await;
        access.replace(token("good"));
    };
    tokio::join!(rest, renewing);
    assert_eq!((bytes.len() as u64, content::first_wrong_byte(1, 0, &bytes)), (SIZE, None));
    let stats = server.stats();
    assert!(stats.bytes_get < 2 * SIZE, "{} bytes sent for {SIZE}", stats.bytes_get);
}

#[tokio::test(flavor = "multi_thread")]
async fn half_a_body_goes_on_for_a_volume_that_waits_longer() {
    // Far longer than the server needs for the first piece, however busy the machine is; then it is silent for that long.
    let patience = Duration::from_secs(10);
    let (server, version, access, source, _) = opened(patience).await;
    server.faults().set(Script { seed: 3, rules: vec![Rule::always(Fault::StallBody { ms: None })] });
    let begun = std::time::Instant::now();
    let mut body = source.get(b"o", &version, 0..SIZE).await.unwrap();
    let mut bytes = body.next().await.unwrap().unwrap().to_vec();
    access.wait_for(LONG);
    let heals = async {
        tokio::time::sleep_until((begun + patience + Duration::from_millis(200)).into()).await;
        server.faults().clear();
    };
    let rest = async {
        while let Some(piece) = body.next().await {
            bytes.extend_from_slice(&piece.unwrap());
        }
    };
    tokio::join!(rest, heals);
    assert_eq!((bytes.len() as u64, content::first_wrong_byte(1, 0, &bytes)), (SIZE, None));
    assert!(begun.elapsed() > patience);
}
