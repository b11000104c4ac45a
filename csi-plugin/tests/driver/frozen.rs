//! Stores that do not answer while mounts are made anew: what belongs to another store, or is not wanted any more, does
//! not wait for them. The agent's wait for a source has no end here, so a caller that waits for one fails.

use crate::common::api::Api;
use crate::common::{Agent, Driver, LIMIT, Setup, context, hello, obliging, source_away, until, waiting};
use link::broker::{AgentRequest, BrokerRequest, Hello, MountId, Report};
use mounts::{FUSE_TYPE, stack_at};
use proto::csi::v1::{NodeGetVolumeStatsRequest, NodePublishVolumeRequest, VolumeCondition};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// More than are made at the same time.
const FROZEN: usize = 20;
/// What docs/failures.md promises of an unpublish (B11).
const UNPUBLISH_LIMIT: Duration = Duration::from_secs(3);

fn endless() -> Setup {
    Setup { source_wait: Some(Duration::from_secs(3600)), ..Setup::default() }
}

fn published(driver: &Driver, volume: &str, target: &str, source: &str) -> NodePublishVolumeRequest {
    let mut request = driver.publish(volume, target);
    request.volume_context = context(&[
        ("source", source),
        ("healTimeout", "1h"),
        ("csi.storage.k8s.io/pod.name", "pod"),
        ("csi.storage.k8s.io/pod.namespace", "team"),
        ("csi.storage.k8s.io/pod.uid", "uid-pod"),
    ]);
    request
}

fn top(driver: &Driver, target: &str) -> Option<u32> {
    let state = driver.kernel.state();
    stack_at(&state.table, &driver.target(target)).last().filter(|e| e.fs_type == FUSE_TYPE).map(|e| e.minor)
}

/// Another process ends its connection.
fn abort(driver: &Driver, target: &str) -> u32 {
    let minor = top(driver, target).unwrap();
    driver.kernel.state().aborted.insert(minor);
    minor
}

/// The bucket of this name does not answer from now on; how often it was asked.
fn freeze(agent: &Agent, bucket: &'static str) -> Arc<AtomicUsize> {
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    agent.behave(move |request, fds| match request {
        AgentRequest::Publish(publish) if publish.spec.volume.source.contains(bucket) => {
            count.fetch_add(1, Ordering::Relaxed);
            None
        }
        _ => obliging(request, fds),
    });
    asked
}

async fn condition(driver: &Driver, volume: &str, target: &str) -> VolumeCondition {
    let request = NodeGetVolumeStatsRequest {
        volume_id: volume.into(),
        volume_path: driver.target(target).display().to_string(),
        ..Default::default()
    };
    let answer = driver.node().node_get_volume_stats(request).await.unwrap().into_inner();
    answer.volume_condition.expect("a condition")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_does_not_answer_holds_up_the_renewal_of_no_other_mount() {
    let driver = Driver::with(endless()).await;
    let agent = driver.agent();
    let frozen: Vec<String> = (0..FROZEN).map(|n| format!("frozen-{n}")).collect();
    let healthy = ["healthy-0", "healthy-1", "unmounted"];
    for name in &frozen {
        driver.node().node_publish_volume(published(&driver, name, name, "s3://frozen/x")).await.unwrap();
    }
    for name in healthy {
        driver.node().node_publish_volume(published(&driver, name, name, "s3://healthy/x")).await.unwrap();
    }
    let asked = freeze(&agent, "frozen");
    let dead: Vec<u32> = frozen.iter().map(|name| abort(&driver, name)).collect();
    until("the frozen store is asked for them", || asked.load(Ordering::Relaxed) > 0).await;
    let mut ended: Vec<u32> = healthy[..2].iter().map(|name| abort(&driver, name)).collect();
    // `umount -f`, with a container that has it.
    let unmounted = abort(&driver, "unmounted");
    driver.kernel.state().elsewhere.push(unmounted);
    driver.kernel.state().unmount_top(&driver.target("unmounted"));
    ended.push(unmounted);
    until("the healthy ones are made anew", || {
        healthy.iter().zip(&ended).all(|(name, dead)| top(&driver, name).is_some_and(|new| new != *dead))
    })
    .await;
    until("and in the container", || !driver.kernel.state().elsewhere.contains(&unmounted)).await;
    until("each of the others is waited for", || asked.load(Ordering::Relaxed) == FROZEN).await;
    for (name, dead) in frozen.iter().zip(&dead) {
        assert_eq!(top(&driver, name), Some(*dead), "{name}");
    }

    // The store answers again.
    agent.behave(obliging);
    agent.answer_late();
    until("all are made anew", || {
        frozen.iter().zip(&dead).all(|(name, dead)| top(&driver, name).is_some_and(|new| new != *dead))
    })
    .await;
    let _ = driver.stop().await;
}

/// What is known of a mount that is being deleted is no reason to make it wait for the mount of another pod.
#[tokio::test(flavor = "multi_thread")]
async fn the_renewal_at_one_target_holds_up_no_unpublish_of_the_same_volume_at_another() {
    let driver = Driver::with(endless()).await;
    let agent = driver.agent();
    for target in ["a", "b"] {
        driver.node().node_publish_volume(published(&driver, "v", target, "s3://frozen/x")).await.unwrap();
    }
    let asked = freeze(&agent, "frozen");
    abort(&driver, "a");
    until("it is being made anew", || asked.load(Ordering::Relaxed) == 1).await;
    let begun = Instant::now();
    driver.node().node_unpublish_volume(driver.unpublish("v", "b")).await.unwrap();
    assert!(begun.elapsed() < UNPUBLISH_LIMIT, "{:?}", begun.elapsed());
    assert_eq!((driver.mounts(), asked.load(Ordering::Relaxed)), (2, 1));
    let _ = driver.stop().await;
}

/// The agent may be one that does not answer its goodbyes either.
#[tokio::test(flavor = "multi_thread")]
async fn an_unpublish_ends_in_time_while_its_mount_is_made_anew_whatever_the_agent_answers() {
    for silent in [false, true] {
        let driver = Driver::with(endless()).await;
        let agent = driver.agent();
        driver.node().node_publish_volume(published(&driver, "v", "a", "s3://frozen/x")).await.unwrap();
        match silent {
            true => agent.behave(|_, _| None),
            false => agent.behave(waiting),
        }
        abort(&driver, "a");
        until("it is being made anew", || agent.saw("Publish") == 2).await;
        let begun = Instant::now();
        let mut answer = driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await;
        while silent && answer.is_err() && begun.elapsed() < UNPUBLISH_LIMIT {
            answer = driver.node().node_unpublish_volume(driver.unpublish("v", "a")).await;
        }
        answer.expect("at the first call");
        assert!(begun.elapsed() < UNPUBLISH_LIMIT, "{:?}", begun.elapsed());
        assert_eq!((driver.mounts(), driver.target("a").exists(), agent.saw("Publish")), (0, false, 2));
        let _ = driver.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_condition_of_a_source_is_what_the_agent_that_serves_says_now() {
    let api = Api::start().await;
    let driver = Driver::with(Setup { events: Some(api.address.clone()), ..Setup::default() }).await;
    let agent = driver.agent();
    driver.node().node_publish_volume(published(&driver, "v", "a", "s3://bucket/x")).await.unwrap();
    let away = Report::SourceAway { why: "503".into(), stale: false };
    // The second has overtaken the first: they are for Events alone.
    for report in [Report::SourceBack, away.clone()] {
        agent.ask(BrokerRequest::Report { mount: MountId(1), report }, &[]).unwrap();
    }
    until("it is posted", || !api.events("Pod", "MountDegraded").is_empty()).await;
    let now = condition(&driver, "v", "a").await;
    assert!(!now.abnormal, "its agent says nothing of it: {now:?}");
    // The store comes back while no agent is there, and the next one never knew that it was away.
    agent.ask(BrokerRequest::Report { mount: MountId(1), report: away }, &[]).unwrap();
    drop(agent);
    let socket = driver.dir.path().join("broker.sock");
    let mut next = None;
    until("the agent's place is free", || {
        next = Agent::introduce_with(&socket, Hello { life: 2, ..hello() }, obliging).ok();
        next.is_some()
    })
    .await;
    let end = Instant::now() + LIMIT;
    loop {
        let now = condition(&driver, "v", "a").await;
        if !now.abnormal {
            break;
        }
        assert!(Instant::now() < end, "still abnormal: {now:?}");
    }
    // Nothing is reported of a second volume of a store that has been failing, nor to another broker.
    let agent = next.expect("it is there");
    agent.behave(source_away);
    driver.node().node_publish_volume(published(&driver, "w", "b", "s3://bucket/x")).await.unwrap();
    for (volume, target) in [("v", "a"), ("w", "b")] {
        let now = condition(&driver, volume, target).await;
        assert!(now.abnormal && now.message.contains("its source does not answer (503)"), "{now:?}");
    }
    agent.behave(obliging);
    assert!(!condition(&driver, "w", "b").await.abnormal);
    let _ = driver.stop().await;
}

/// Without an agent nothing is made anew, and the containers that have them are looked for to report it, alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_that_end_at_once_are_looked_for_once() {
    let driver = Driver::start().await;
    let agent = driver.agent();
    let names: Vec<String> = (0..100).map(|n| format!("v{n}")).collect();
    for name in &names {
        driver.node().node_publish_volume(published(&driver, name, name, "s3://bucket/x")).await.unwrap();
    }
    drop(agent);
    let end = Instant::now() + LIMIT;
    while !condition(&driver, "v0", "v0").await.message.contains("no worker serves") {
        assert!(Instant::now() < end, "the agent is still there");
    }
    // `umount -f`; containers have them.
    let tops: Vec<u32> = names.iter().map(|name| top(&driver, name).unwrap()).collect();
    {
        let mut state = driver.kernel.state();
        state.aborted.extend(&tops);
        state.elsewhere = tops;
        names.iter().for_each(|name| state.unmount_top(&driver.target(name)));
    }
    until("it is noticed", || driver.kernel.state().scans > 0).await;
    for name in &names {
        while !condition(&driver, name, name)
            .await
            .message
            .contains("a process on node node-1 that is not Millpond's")
        {
            assert!(Instant::now() < end, "{name} is not reported");
        }
    }
    let scans = driver.kernel.state().scans;
    assert!(scans <= 2, "{scans}: they may have ended in the middle of a look");
    let _ = driver.stop().await;
}

/// Its owner learns when it is over, and until then what is wrong is said as it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_was_left_behind_gets_the_mount_when_it_can_and_the_condition_says_both() {
    for container_goes in [false, true] {
        let api = Api::start().await;
        let driver = Driver::with(Setup { events: Some(api.address.clone()), ..Setup::default() }).await;
        let _agent = driver.agent();
        driver.node().node_publish_volume(published(&driver, "v", "a", "s3://bucket/x")).await.unwrap();
        let old = top(&driver, "a").unwrap();
        {
            let mut state = driver.kernel.state();
            state.elsewhere = vec![old];
            state.stuck.insert(old);
            state.aborted.insert(old);
        }
        until("it is posted", || {
            let events = api.events("Pod", "MountDegraded");
            events
                .iter()
                .any(|e| e["message"].as_str().unwrap().contains("a container still has the dead one"))
        })
        .await;
        let now = condition(&driver, "v", "a").await;
        assert!(now.abnormal && now.message.contains("a container still has the dead one"), "{now:?}");
        match container_goes {
            true => driver.kernel.state().elsewhere.clear(),
            false => driver.kernel.state().stuck.clear(),
        }
        let end = Instant::now() + LIMIT;
        loop {
            let now = condition(&driver, "v", "a").await;
            if !now.abnormal {
                break;
            }
            assert!(now.message.contains("a container still has the dead one"), "{now:?}");
            assert!(Instant::now() < end, "still abnormal: {now:?}");
        }
        let has = if container_goes { vec![] } else { vec![top(&driver, "a").unwrap()] };
        assert_eq!(driver.kernel.state().elsewhere, has);
        let recovered = || api.events("Pod", "MountRecovered");
        until("its owner learns it", || {
            recovered()
                .iter()
                .any(|e| e["message"].as_str().unwrap().contains("no container has the dead one"))
        })
        .await;
        let _ = driver.stop().await;
    }
}
