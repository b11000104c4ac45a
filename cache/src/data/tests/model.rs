//! Random reads, evictions, damage and restarts against the reference bytes.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Read { object: usize, offset: u64, len: u32 },
    ReadMany { object: usize, readers: u64, len: u32 },
    EvictAll,
    Damage { object: usize },
    Refuse { object: usize },
    LetGo,
    Restart,
}

const SIZES: [u64; 5] = [1, BLOCK, 20 * BLOCK + 9, 40 * BLOCK, 300 * BLOCK + 1];

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (0..SIZES.len(), 0..310 * BLOCK, 1u32..200_000)
            .prop_map(|(object, offset, len)| Step::Read { object, offset, len }),
        3 => (0..SIZES.len(), 2u64..6, 1u32..100_000)
            .prop_map(|(object, readers, len)| Step::ReadMany { object, readers, len }),
        1 => Just(Step::EvictAll),
        1 => (0..SIZES.len()).prop_map(|object| Step::Damage { object }),
        1 => (0..SIZES.len()).prop_map(|object| Step::Refuse { object }),
        1 => Just(Step::LetGo),
        1 => Just(Step::Restart),
    ]
}

async fn run(steps: Vec<Step>) {
    let dir = tempfile::tempdir().unwrap();
    // Room for about half of it all: eviction happens by itself as well.
    let config = config(vec![Tier { quota_bytes: 900 << 10, ..tier(&[dir.path()]) }]);
    let objects: Vec<_> = SIZES.iter().map(|&size| Object::new(size, size)).collect();
    let (mut engine, _, _) = open(&config);
    let mut held: Vec<Arc<File>> = Vec::new();
    let name = |k: usize| format!("object{k}");
    for step in steps {
        match step {
            Step::Read { object, offset, len } => {
                let (file, object) = (file(&engine, &name(object), &objects[object]), &objects[object]);
                let offset = offset % object.size;
                let end = (offset + u64::from(len)).min(object.size);
                match get(&file, offset, len).await {
                    Ok(bytes) => assert!(bytes == object.content(offset..end), "wrong bytes"),
                    Err(error) => assert_eq!(error.cause, Cause::Unavailable),
                }
                held.push(file);
            }
            Step::ReadMany { object: k, readers, len } => {
                let readers = (0..readers).map(|r| {
                    let (file, object) = (file(&engine, &name(k), &objects[k]), objects[k].clone());
                    async move {
                        let offset = r * u64::from(len) / 2 % object.size;
                        let end = (offset + u64::from(len)).min(object.size);
                        if let Ok(bytes) = get(&file, offset, len).await {
                            assert!(bytes == object.content(offset..end), "wrong bytes");
                        }
                    }
                });
                futures::future::join_all(readers).await;
            }
            Step::EvictAll => drop(engine.evict(None, b"").await),
            Step::Damage { object } => engine.damaged(file(&engine, &name(object), &objects[object]).id()),
            Step::Refuse { object } => {
                objects[object].script.lock().unwrap().push_back(Fault::Refuse(Cause::Unavailable));
            }
            Step::LetGo => held.clear(),
            Step::Restart => {
                held.clear();
                engine.shutdown().await;
                engine = open(&config).0;
            }
        }
    }
    held.clear();
    // One may go between the listing and the look at it.
    let length = |p: &PathBuf| p.metadata().map_or(0, |found| found.len());
    let on_disk = || data_files(dir.path()).iter().map(length).sum::<u64>();
    engine.evict(None, b"").await;
    until("nothing is left of what was evicted", || on_disk() == 0 && used(&engine) == 0).await;
    engine.shutdown().await;
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]
    #[test]
    fn whatever_happens_reads_give_the_bytes_of_the_source(steps in prop::collection::vec(step(), 1..40)) {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(run(steps));
    }
}
