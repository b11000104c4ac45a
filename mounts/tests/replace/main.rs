//! Dead mounts are replaced in every mount namespace. Needs root and `/dev/fuse`, and says so.

#![allow(clippy::unwrap_used, unreachable_pub)]

mod bench;
#[path = "../common/mod.rs"]
mod common;
mod isolated;
mod server;

use bench::{Bench, Container, bind, propagation};
use isolated::isolated;
use mounts::{Kernel, MountOptions, Replaced};
use rustix::mount::{MountFlags, MountPropagationFlags};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

fn die_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?)
}

/// Not a test of its own: the body of the helper processes.
#[test]
fn helper_child() {
    mounts::run_if_asked();
}

/// Not a test of its own: the body of the FUSE servers.
#[test]
fn server_child() {
    server::run_if_asked();
}

fn is_dead<T>(answer: io::Result<T>) -> bool {
    answer.is_err_and(|e| e.raw_os_error() == Some(libc::ENOTCONN))
}

#[test]
fn paths_work_again_in_every_container_and_mounts_are_not_stacked() {
    isolated("paths_work_again_in_every_container_and_mounts_are_not_stacked", |dir| {
        let bench = Bench::new(dir);
        let mut volume = bench.mount("volume", "first");
        let at = bench.path("data");
        let containers = [Container::with(&bench, &volume, &at), Container::with(&bench, &volume, &at)];
        let counts = |containers: &[Container]| -> Vec<usize> {
            containers.iter().map(|c| c.table().len()).chain([bench.table().len()]).collect()
        };
        let before = counts(&containers);
        let mut held = File::open(containers[0].inside(&at.join("which"))).unwrap();
        for round in 0..20 {
            volume.die();
            assert!(is_dead(containers[1].read(&at.join("which"))));
            let label = format!("round {round}");
            let replaced = bench.renew_everywhere(&mut volume, &label);
            assert_eq!(replaced, Replaced { mounts: 2, left: vec![] });
            for container in &containers {
                assert_eq!(container.read(&at.join("which")).unwrap(), label);
            }
            assert_eq!(fs::read_to_string(volume.path().join("which")).unwrap(), label);
            assert_eq!(counts(&containers), before);
            let error = held.read(&mut [0; 8]).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ENOTCONN), "what was open stays dead");
        }
        // The guard has been there all the time.
        assert_eq!(bench.kernel.unmount(&volume.target).unwrap(), 2);
    });
}

#[test]
fn who_shares_our_mounts_has_the_new_one_in_the_place_of_the_dead_one_too() {
    isolated("who_shares_our_mounts_has_the_new_one_in_the_place_of_the_dead_one_too", |dir| {
        let bench = Bench::new(dir);
        let pods = bench.path("pods");
        fs::create_dir(&pods).unwrap();
        rustix::mount::mount("pods", &pods, "tmpfs", MountFlags::empty(), None).unwrap();
        rustix::mount::mount_change(&pods, MountPropagationFlags::SHARED).unwrap();
        let host = Container::host();
        let mut volume = bench.mount("pods/volume", "first");
        let which = volume.path().join("which");
        assert_eq!(host.read(&which).unwrap(), "first");
        let before = [host.table().len(), bench.table().len()];
        for round in 0..5 {
            volume.die();
            assert!(is_dead(host.read(&which)));
            let label = format!("round {round}");
            let replaced = bench.renew_everywhere(&mut volume, &label);
            assert_eq!(replaced, Replaced::default(), "it came by itself");
            assert_eq!(host.read(&which).unwrap(), label);
            assert_eq!([host.table().len(), bench.table().len()], before);
        }
        assert_eq!(bench.kernel.unmount(&volume.target).unwrap(), 2);
        assert_eq!(host.table().len(), before[0] - 2);
    });
}

#[test]
fn a_container_that_came_in_between_is_found_later() {
    isolated("a_container_that_came_in_between_is_found_later", |dir| {
        let bench = Bench::new(dir);
        let mut volume = bench.mount("volume", "first");
        let at = bench.path("data");
        volume.die();
        let early = Container::with(&bench, &volume, &at);
        let dead = bench.renew(&mut volume, "second");
        assert!(is_dead(early.read(&at.join("which"))));
        assert_eq!(bench.replace(&volume, &[dead]).mounts, 1);
        assert_eq!(early.read(&at.join("which")).unwrap(), "second");
        assert_eq!(bench.replace(&volume, &[dead]), Replaced::default(), "nothing is left to do");
    });
}

#[test]
fn a_part_of_the_volume_is_replaced_by_the_same_part() {
    isolated("a_part_of_the_volume_is_replaced_by_the_same_part", |dir| {
        let bench = Bench::new(dir);
        let mut volume = bench.mount("volume", "first");
        let (sub, file) = (bench.path("sub"), bench.path("file"));
        fs::create_dir(&sub).unwrap();
        fs::write(&file, b"").unwrap();
        let flags = MountFlags::RDONLY;
        // kubelet's own bind of a subPath lies beside the target, in our namespace.
        let beside = bench.path("beside");
        fs::create_dir(&beside).unwrap();
        rustix::mount::mount_bind(volume.path().join("sub"), &beside).unwrap();
        let container = Container::start(
            &bench,
            vec![bind(&beside, &sub, flags), bind(&volume.path().join("sub/inside"), &file, flags)],
        );
        volume.die();
        assert!(is_dead(container.read(&sub.join("inside"))) && is_dead(container.read(&file)));
        let replaced = bench.renew_everywhere(&mut volume, "second");
        assert_eq!((replaced.mounts, &replaced.left[..]), (3, &[][..]));
        for path in [sub.join("inside"), file] {
            assert_eq!(container.read(&path).unwrap(), "second", "{}", path.display());
        }
        assert_eq!(fs::read_to_string(beside.join("inside")).unwrap(), "second");
    });
}

#[test]
fn flags_and_propagation_of_a_mount_are_those_of_its_predecessor() {
    isolated("flags_and_propagation_of_a_mount_are_those_of_its_predecessor", |dir| {
        let bench = Bench::new(dir);
        let mut volume = bench.mount("volume", "first");
        let (private, slave, shared) = (bench.path("private"), bench.path("slave"), bench.path("shared"));
        for at in [&private, &slave, &shared] {
            fs::create_dir(at).unwrap();
        }
        rustix::mount::mount_change(volume.path(), MountPropagationFlags::SHARED).unwrap();
        let strict = MountFlags::RDONLY | MountFlags::NOEXEC | MountFlags::NODEV | MountFlags::NOATIME;
        let container = Container::start(
            &bench,
            vec![
                bind(volume.path(), &private, strict),
                propagation(&private, MountPropagationFlags::PRIVATE),
                bind(volume.path(), &slave, MountFlags::RELATIME),
                propagation(&slave, MountPropagationFlags::SHARED),
                propagation(&slave, MountPropagationFlags::DOWNSTREAM),
                bind(volume.path(), &shared, MountFlags::NOSUID),
                propagation(&shared, MountPropagationFlags::SHARED),
            ],
        );
        let attributes = |container: &Container| {
            [&private, &slave, &shared].map(|at| {
                let line = container.line(at);
                let fields: Vec<&str> = line.split(' ').collect();
                let kind = fields[6].split(':').next().unwrap().to_owned();
                (fields[5].to_owned(), kind)
            })
        };
        let before = attributes(&container);
        assert!(before[0].0.contains("noexec") && before[0].0.contains("noatime"), "{before:?}");
        volume.die();
        let replaced = bench.renew_everywhere(&mut volume, "second");
        assert_eq!((replaced.mounts, &replaced.left[..]), (3, &[][..]));
        assert_eq!(attributes(&container), before);
    });
}

#[test]
fn what_a_container_may_only_read_stays_so_when_a_volume_that_is_written_to_is_made_anew() {
    isolated(
        "what_a_container_may_only_read_stays_so_when_a_volume_that_is_written_to_is_made_anew",
        |dir| {
            let bench = Bench::new(dir);
            let options = MountOptions { writable: true, ..MountOptions::default() };
            let mut volume = bench.mount_with("volume", "first", options);
            let (reads, writes) = (bench.path("reads"), bench.path("writes"));
            for at in [&reads, &writes] {
                fs::create_dir(at).unwrap();
            }
            let container = Container::start(
                &bench,
                vec![
                    bind(volume.path(), &reads, MountFlags::RDONLY),
                    bind(volume.path(), &writes, MountFlags::empty()),
                ],
            );
            let first = |at: &Path| {
                let line = container.line(at);
                line.split(' ').nth(5).unwrap().split(',').next().unwrap().to_owned()
            };
            assert_eq!([first(&reads), first(&writes)], ["ro", "rw"]);
            volume.die();
            let replaced = bench.renew_everywhere(&mut volume, "second");
            assert_eq!((replaced.mounts, &replaced.left[..]), (2, &[][..]));
            assert_eq!([first(&reads), first(&writes)], ["ro", "rw"]);
            let refused = File::create(container.inside(&reads.join("new"))).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        },
    );
}

#[test]
fn only_what_is_dead_and_of_this_volume_is_touched() {
    isolated("only_what_is_dead_and_of_this_volume_is_touched", |dir| {
        let bench = Bench::new(dir);
        let mut volume = bench.mount("volume", "first");
        let mut other = bench.mount("other", "other");
        // The same volume for another pod: a device number that was used again would name it.
        let twin = bench.mount("twin", "twin");
        let at = ["a", "b", "c"].map(|name| bench.path(name));
        let dead_other = Container::with(&bench, &other, &at[0]);
        let alive = Container::with(&bench, &twin, &at[1]);
        let container = Container::with(&bench, &volume, &at[2]);
        other.die();
        volume.die();
        let dead = bench.renew(&mut volume, "second");
        let all = [dead, other.connection, twin.connection];
        assert_eq!(bench.replace(&volume, &all), Replaced { mounts: 1, left: vec![] });
        assert_eq!(container.read(&at[2].join("which")).unwrap(), "second");
        assert!(is_dead(dead_other.read(&at[0].join("which"))));
        volume.source.volume = "twin".into();
        assert_eq!(bench.replace(&volume, &all), Replaced::default());
        assert_eq!(alive.read(&at[1].join("which")).unwrap(), "twin");
    });
}

#[test]
fn what_cannot_be_replaced_is_told_and_left_alone() {
    isolated("what_cannot_be_replaced_is_told_and_left_alone", |dir| {
        let bench = Bench::new(dir);
        let mut volume = bench.mount("volume", "first");
        let at = bench.path("data");
        fs::create_dir(&at).unwrap();
        let nothing = bench.path("nothing");
        fs::create_dir(&nothing).unwrap();
        let whole = || bind(volume.path(), &at, MountFlags::RDONLY);
        let below =
            Container::start(&bench, vec![whole(), bind(&nothing, &at.join("sub"), MountFlags::RDONLY)]);
        let covered = Container::start(&bench, vec![whole(), bind(&nothing, &at, MountFlags::RDONLY)]);
        let counts = [below.table().len(), covered.table().len()];
        volume.die();
        let dead = bench.renew(&mut volume, "second");
        for _ in 0..2 {
            let replaced = bench.replace(&volume, &[dead]);
            assert_eq!(replaced.mounts, 0);
            let left = replaced.left.join("\n");
            assert_eq!(replaced.left.len(), 2, "{left}");
            assert!(left.contains("other mounts lie on it") && left.contains("mounted over it"), "{left}");
        }
        assert_eq!([below.table().len(), covered.table().len()], counts);
    });
}

#[test]
fn a_container_that_puts_a_link_in_the_way_does_not_choose_what_is_mounted_where() {
    isolated("a_container_that_puts_a_link_in_the_way_does_not_choose_what_is_mounted_where", |dir| {
        let bench = Bench::new(dir);
        let mut volume = bench.mount("volume", "first");
        let (place, victim) = (bench.path("place"), bench.path("victim"));
        for at in [&place, &victim] {
            fs::create_dir_all(at.join("data")).unwrap();
        }
        let container = Container::with(&bench, &volume, &place.join("data"));
        let before = container.table().len();
        fs::rename(&place, bench.path("moved")).unwrap();
        std::os::unix::fs::symlink(&victim, &place).unwrap();
        volume.die();
        let replaced = bench.renew_everywhere(&mut volume, "second");
        // It is found where it has gone, through no link.
        assert_eq!((replaced.mounts, &replaced.left[..]), (1, &[][..]));
        let moved = Path::new("moved/data/which");
        assert_eq!(container.read(&bench.dir.join(moved)).unwrap(), "second");
        assert_eq!(fs::read_dir(container.inside(&victim.join("data"))).unwrap().count(), 0);
        assert_eq!(container.table().len(), before);
    });
}
