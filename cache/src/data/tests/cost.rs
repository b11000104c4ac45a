//! What the engine costs per small file, and how fast a start finds many. Prints; fails only when it is absurd.

use super::*;
use std::time::Instant;

struct Fixed(Bytes);
#[async_trait]
impl Fetch for Fixed {
    async fn fetch(
        &self,
        range: Range<u64>,
    ) -> Result<BoxStream<'static, Result<Bytes, FetchError>>, FetchError> {
        let bytes = self.0.slice(range.start as usize..range.end as usize);
        Ok(futures::stream::iter([Ok(bytes)]).boxed())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_files_are_cheap_and_twenty_thousand_are_found_quickly() {
    const FILES: u64 = 20_000;
    const SIZE: u64 = 10_000;
    let dir = tempfile::tempdir().unwrap();
    let mut config = config(vec![tier(&[dir.path()])]);
    config.block_bytes = 128 << 10;
    config.memory_bytes = 32 * MIB;
    let body = Bytes::from(vec![7; SIZE as usize]);
    let started = Instant::now();
    {
        let (engine, _, _) = open(&config);
        let fetch: Arc<dyn Fetch> = Arc::new(Fixed(body));
        let readers = (0..4u64).map(|r| {
            let (engine, fetch) = (engine.clone(), fetch.clone());
            tokio::spawn(async move {
                for k in (0..FILES).filter(|k| k % 4 == r) {
                    let file = engine.file(
                        key(&format!("dir/file{k}"), SIZE),
                        fetch.clone(),
                        ReadOptions::default(),
                    );
                    file.read(0, SIZE as u32).await.unwrap();
                }
            })
        });
        for reader in readers.collect::<Vec<_>>() {
            reader.await.unwrap();
        }
        engine.shutdown().await;
    }
    let each = started.elapsed() / FILES as u32;
    let (engine, recovery, _) = open(&config);
    println!("{each:?} per cold small file; {} files found in {:?}", recovery.files, recovery.elapsed);
    assert_eq!(recovery.files, FILES);
    assert!(each < Duration::from_millis(5) && recovery.elapsed < Duration::from_secs(20));
    drop(engine);
}
