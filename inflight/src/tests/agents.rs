//! Agents that die: what they were executing is found out, what waited for them is not blamed.

use super::*;
use crate::collect::AGENT_DEATH;
use std::sync::{Arc, Barrier};

/// Runs `then` while the agent executes these, each on a thread of its own.
fn executing(inflight: &Arc<Inflight>, uniques: &[u64], then: &mut dyn FnMut()) {
    let Some((first, rest)) = uniques.split_first() else { return then() };
    let (seated, done) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            Behalf::of(inflight, *first).expect("a request has an id").run(|| {
                seated.wait();
                done.wait();
            });
        });
        seated.wait();
        executing(inflight, rest, then);
        done.wait();
    });
}

#[test]
fn an_agents_death_counts_against_what_it_executed_and_not_against_what_waited() {
    let inflight = Arc::new(inflight());
    let mut model = Model::default();
    let waiting: Vec<u64> = (0..50).map(|_| take(&inflight, &mut model, 80).unwrap()).collect();
    let poison = take(&inflight, &mut model, 90).unwrap();
    // Its workers were at others: they ended with their agent.
    waiting[..9].iter().for_each(|unique| inflight.resume(*unique));
    let mut left = Collected::default();
    for death in 1..=3 {
        assert!(left.poisoned.is_empty(), "not before the third death, {death}");
        executing(&inflight, &[poison], &mut || {
            left = inflight.collect_with(&mut model, Blame::Agent).unwrap();
        });
        let mut buffer = [0; STAGE_BYTES];
        let mut last = None;
        while let Some(Orphan::Request(slot, taken)) = inflight.next_orphan(&mut buffer) {
            inflight.park(slot, taken.unique);
            last = Some(taken.unique);
        }
        assert!(last == Some(poison) || death == 3, "a suspect comes after all others");
    }
    assert_eq!(left.poisoned.iter().map(|p| p.unique).collect::<Vec<_>>(), [poison]);
    assert!(waiting.iter().all(|unique| deaths_of(&inflight, *unique) == 0));
    assert_eq!(model.failed, BTreeSet::from([poison]));
}

#[test]
fn an_agent_that_was_asked_to_end_and_one_that_lives_make_no_request_a_suspect() {
    let inflight = Arc::new(inflight());
    let mut model = Model::default();
    let unique = take(&inflight, &mut model, 80).unwrap();
    for _ in 0..9 {
        executing(&inflight, &[unique], &mut || {
            // A worker that was killed, while the agent goes on.
            inflight.collect_with(&mut model, Blame::Nobody).unwrap();
            inflight.collect_with(&mut model, Blame::Executing).unwrap();
        });
        // No thread sits there any more: this one waited when its agent was killed.
        inflight.collect_with(&mut model, Blame::Agent).unwrap();
        executing(&inflight, &[unique], &mut || {
            inflight.vacate();
            inflight.collect_with(&mut model, Blame::Agent).unwrap();
        });
    }
    assert_eq!((deaths_of(&inflight, unique), model.failed.len()), (0, 0));
}

#[test]
fn of_more_threads_than_there_are_seats_each_does_its_work() {
    let inflight = Arc::new(inflight());
    let mut model = Model::default();
    let uniques: Vec<u64> = (0..40).map(|_| take(&inflight, &mut model, 80).unwrap()).collect();
    executing(&inflight, &uniques, &mut || {
        inflight.collect_with(&mut model, Blame::Agent).unwrap();
    });
    let blamed = uniques.iter().filter(|unique| deaths_of(&inflight, **unique) == AGENT_DEATH).count();
    assert_eq!(blamed, 32, "one for each seat");
    assert_eq!(inflight.take_seats(), (vec![], false), "all have left");
}

#[test]
fn a_job_is_carried_to_another_thread_on_behalf_of_the_same_request() {
    let inflight = Arc::new(inflight());
    let behalf = Behalf::of(&inflight, 8).unwrap();
    let job = behalf.run(|| carry_job(|| Behalf::current().map(|behalf| behalf.unique())));
    assert!(Behalf::current().is_none());
    assert_eq!(std::thread::spawn(job).join().unwrap(), Some(8));
    assert!(carry_job(|| Behalf::current().is_none())());
    assert!(Behalf::of(&inflight, 0).is_none());
}

/// A process of its own, which dies.
#[test]
fn an_abort_is_the_doing_of_the_request_that_its_thread_ran_for() {
    const MEMORY: &str = "MILLPOND_TEST_MEMORY";
    if let Ok(path) = std::env::var(MEMORY) {
        let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
        let inflight = Arc::new(Inflight::map(file).unwrap());
        mark_aborts();
        executing(&inflight, &[2, 4, 6], &mut || {
            Behalf::of(&inflight, 8).unwrap().run(|| std::process::abort())
        });
        unreachable!("it has died");
    }
    let fd = Inflight::create(Room::ReadOnly).unwrap();
    let inflight = Inflight::map(&fd).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), std::os::fd::AsRawFd::as_raw_fd(&fd));
    let name = "tests::agents::an_abort_is_the_doing_of_the_request_that_its_thread_ran_for";
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(MEMORY, path)
        .output()
        .unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&child.status);
    assert_eq!(signal, Some(libc::SIGABRT), "{child:?}");
    assert_eq!(inflight.take_seats(), (vec![8], true));
}

#[test]
fn two_agents_that_abort_in_a_request_are_enough() {
    let inflight = Arc::new(inflight());
    let mut model = Model::default();
    let poison = take(&inflight, &mut model, 90).unwrap();
    let alike = take(&inflight, &mut model, 90).unwrap();
    model.nodeid = 78;
    let beside = take(&inflight, &mut model, 90).unwrap();
    for death in 1..=2 {
        let mut left = Collected::default();
        executing(&inflight, &[poison, beside], &mut || {
            inflight.confess(poison);
            left = inflight.collect_with(&mut model, Blame::Agent).unwrap();
        });
        assert_eq!(left.poisoned.len(), if death == 2 { 2 } else { 0 }, "{death}");
        while let Some(Orphan::Request(slot, taken)) = inflight.next_orphan(&mut [0; STAGE_BYTES]) {
            inflight.park(slot, taken.unique);
        }
    }
    assert_eq!((model.failed, deaths_of(&inflight, beside)), (BTreeSet::from([poison, alike]), 0));
}
