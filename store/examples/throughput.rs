//! Reads one object in parallel parts and prints MB/s and CPU-seconds per GiB: `throughput ENDPOINT KEY PARALLEL`.
//!
//! For profiling the GET path by hand, against `s3-server`; never pass or fail.

use futures::{StreamExt, TryStreamExt};
use std::sync::Arc;
use std::time::Instant;
use store::{Access, EgressConfig, Kind, Limits, LimitsConfig, NoObserver};
use volume::{Credentials, EndpointPattern, Parameters, SourceUrl, VolumeId, VolumeSpec};

const PART: u64 = 8 << 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut next = || arguments.next().ok_or("throughput ENDPOINT KEY PARALLEL");
    let (endpoint, key, parallel) = (next()?, next()?, next()?.parse::<usize>()?);
    // A user who starts this means it.
    let named = vec![EndpointPattern::parse(&endpoint)?];
    let egress = EgressConfig { named, ..EgressConfig::default() };
    let parameters =
        Parameters { endpoint: Some(endpoint.parse()?), allow_http: true, ..Parameters::default() };
    let spec = VolumeSpec { id: VolumeId::parse("v")?, source: SourceUrl::parse("s3://bucket")?, parameters };
    let credentials = Credentials::from_environment(|name| std::env::var(name).ok())?;
    let limits = Arc::new(Limits::new(LimitsConfig { egress, ..LimitsConfig::default() }));
    let source = store::open(&spec, Access::fixed(&spec, credentials), limits, Arc::new(NoObserver))?;
    let entry = source.head(key.as_bytes()).await?.ok_or("no such key")?;
    let Kind::File { size, version } = entry.kind else { return Err("not a file".into()) };

    let (started, cpu, chunks) = (Instant::now(), cpu_seconds()?, std::sync::atomic::AtomicU64::new(0));
    let parts = (0..size).step_by(PART as usize);
    futures::stream::iter(parts.map(Ok))
        .try_for_each_concurrent(parallel, |start| {
            let (source, version, key, chunks) = (&source, &version, key.as_bytes(), &chunks);
            async move {
                let mut stream = source.get(key, version, start..size.min(start + PART)).await?;
                while let Some(piece) = stream.next().await {
                    piece?;
                    chunks.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
                Ok::<_, store::StoreError>(())
            }
        })
        .await?;
    let (seconds, cpu) = (started.elapsed().as_secs_f64(), cpu_seconds()? - cpu);
    let chunk = size / chunks.into_inner().max(1);
    let gib = size as f64 / f64::from(1 << 30);
    println!(
        "{:.0} MB/s, {:.2} CPU-s/GiB, mean chunk {} KiB",
        size as f64 / 1e6 / seconds,
        cpu / gib,
        chunk >> 10
    );
    Ok(())
}

fn cpu_seconds() -> Result<f64, Box<dyn std::error::Error>> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Ok(time.tv_sec as f64 + time.tv_nsec as f64 / 1e9)
}
