//! How long kubelet waits for a volume whose source the node knows: NodePublishVolume, alone and with others.

use crate::bench::numbers::median;
use crate::bench::stage::Stage;
use crate::bench::subject::Subject;
use crate::bench::who::Who;
use crate::bench::workload::{PUBLISH, PUBLISH_MANY};
use crate::node::{Node, Volume};
use crate::tree::{Shape, Tree};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::Instant;

const PREFIX: &str = "known";
const AT_ONCE: usize = 20;

pub(in crate::bench) fn play(stage: &mut Stage) -> Result<()> {
    if !stage.wants_any([PUBLISH, PUBLISH_MANY]) {
        return Ok(());
    }
    let node = stage.node();
    node.server.add(&Tree::generated("", Shape::LITTLE), PREFIX)?;
    // Its source is known from here on.
    let first = node.volume("known", PREFIX, &[])?;
    let mut volumes = Vec::new();
    for k in 0..AT_ONCE {
        let volume = node.create(&format!("known{k}"), PREFIX, &[])?;
        let target = node.target(&volume, &format!("pod-known{k}"))?;
        volumes.push((volume, target));
    }
    let subject = Subject::bare(Who::Millpond, &first.target);
    for round in 0..stage.size().rounds {
        stage.sample_of_node(&subject, PUBLISH, round, |node| {
            let took: Result<Vec<f64>> = volumes.iter().map(|one| there_and_back(node, one)).collect();
            Ok(median(took?))
        })?;
        stage.sample_of_node(&subject, PUBLISH_MANY, round, |node| Ok(median(at_once(node, &volumes)?)))?;
    }
    let node = stage.node();
    node.unpublish(&first)?;
    Ok(volumes.iter().try_for_each(|(volume, _)| node.delete(volume))?)
}

/// Milliseconds.
fn there_and_back(node: &Node, (volume, target): &(Volume, PathBuf)) -> Result<f64> {
    let request = node.publish_request(volume, target);
    let begun = Instant::now();
    node.plugin().publish(request)?;
    let took = begun.elapsed().as_secs_f64() * 1e3;
    node.plugin().unpublish(&volume.id, target)?;
    Ok(took)
}

/// Milliseconds of each.
fn at_once(node: &Node, volumes: &[(Volume, PathBuf)]) -> Result<Vec<f64>> {
    let publish = |(volume, target): &(Volume, PathBuf)| -> Result<f64> {
        let request = node.publish_request(volume, target);
        let begun = Instant::now();
        node.plugin().publish(request)?;
        Ok(begun.elapsed().as_secs_f64() * 1e3)
    };
    let took = std::thread::scope(|threads| {
        let calls: Vec<_> = volumes.iter().map(|one| threads.spawn(|| publish(one))).collect();
        let ended = calls.into_iter().map(|call| call.join().expect("a call does not panic"));
        ended.collect::<Vec<Result<f64>>>()
    });
    for (volume, target) in volumes {
        node.plugin().unpublish(&volume.id, target).with_context(|| volume.id.clone())?;
    }
    took.into_iter().collect()
}
