//! Many volumes at once, each by a thread of its own, as kubelet does it: what could not be done is done again.

use super::{Mounted, Node, Volume};
use anyhow::{Context, Result, bail};
use std::time::{Duration, Instant};
use tonic::Status;

/// A volume that was published beside others.
#[derive(Clone, Debug)]
pub struct Published {
    pub mounted: Mounted,
    /// From the first try on.
    pub took: Duration,
    pub tries: usize,
}

/// It blocks in a call, and calls little else.
const STACK_BYTES: usize = 256 << 10;

/// Does it for all at once; the results are in the order of the items.
fn for_each<T: Sync, R: Send>(items: &[T], each: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    std::thread::scope(|threads| {
        let spawned: Vec<_> = items
            .iter()
            .map(|item| {
                let each = &each;
                std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(threads, move || each(item))
            })
            .collect();
        spawned
            .into_iter()
            .map(|thread| match thread.context("a thread for a call")?.join() {
                Ok(done) => done,
                Err(_) => bail!("a call ended otherwise"),
            })
            .collect()
    })
}

/// Until it is done, with a pause after each failure that another try may mend; returns how long it took, and how often
/// it was tried.
fn until_done(
    limit: Duration,
    pause: Duration,
    call: impl Fn() -> Result<(), Status>,
) -> Result<(Duration, usize)> {
    let begun = Instant::now();
    for tries in 1.. {
        match call() {
            Ok(()) => return Ok((begun.elapsed(), tries)),
            Err(status) if begun.elapsed() >= limit => {
                bail!("still not done after {tries} tries and {limit:?}: {status}")
            }
            Err(status) => match status.code() {
                tonic::Code::Unavailable
                | tonic::Code::Aborted
                | tonic::Code::DeadlineExceeded
                | tonic::Code::ResourceExhausted => std::thread::sleep(pause),
                _ => return Err(status.into()),
            },
        }
    }
    unreachable!("it is tried until it is done or fails")
}

impl Node {
    /// Each volume at the pod beside it.
    pub fn publish_all(
        &mut self,
        orders: &[(&Volume, String)],
        limit: Duration,
        pause: Duration,
    ) -> Result<Vec<Published>> {
        let node = &*self;
        let done = for_each(orders, |(volume, pod)| {
            let target = node.target(volume, pod)?;
            let publish = || node.plugin().publish(node.publish_request(volume, &target));
            let (took, tries) = until_done(limit, pause, publish).with_context(|| volume.id.clone())?;
            Ok(Published { mounted: Mounted { id: volume.id.clone(), target }, took, tries })
        })?;
        self.published.extend(done.iter().map(|published| published.mounted.clone()));
        Ok(done)
    }

    /// Returns how long each took.
    pub fn unpublish_all(
        &mut self,
        mounted: &[Mounted],
        limit: Duration,
        pause: Duration,
    ) -> Result<Vec<Duration>> {
        let node = &*self;
        let took = for_each(mounted, |mounted| {
            let unpublish = || node.plugin().unpublish(&mounted.id, &mounted.target);
            Ok(until_done(limit, pause, unpublish).with_context(|| mounted.id.clone())?.0)
        })?;
        self.published.retain(|published| !mounted.contains(published));
        Ok(took)
    }
}
