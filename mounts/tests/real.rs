//! The real kernel: mounts, guard, probe and abort. Needs root and `/dev/fuse`, and says so.

#![allow(clippy::unwrap_used, unreachable_pub)]

mod common;

use common::init_reply;
use fuse_abi::{Attr, AttrOut, InHeader, Kstatfs, OpenOut, OutHeader, opcode};
use mounts::{
    Connection, Kernel, KernelError, Linux, LinuxPaths, MountOptions, MountSource, Target, probe, stack_at,
};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A directory of its own with a private fusectl; takes every mount away at the end, also of a failed test.
struct Bench {
    dir: tempfile::TempDir,
    kernel: Linux,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().expect("temporary directory");
        let fusectl = dir.path().join("fusectl");
        for name in ["fusectl", "pod", "cache"] {
            fs::create_dir(dir.path().join(name)).expect("directory");
        }
        mounts::fusectl::ensure(&fusectl, Path::new("/dev/fuse"))
            .expect("these tests need root and /dev/fuse");
        let paths = LinuxPaths { fusectl, ..LinuxPaths::default() };
        let helper = mounts::Helper::new(
            std::env::current_exe().expect("own path"),
            ["--exact", "probe_child", "--nocapture"].map(OsString::from),
        );
        let kernel = Linux::new(paths, vec![dir.path().join("cache")], helper);
        Self { dir, kernel }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().canonicalize().unwrap().join(name)
    }

    fn target(&self, name: &str) -> Target {
        let target = Target::resolve(&[self.dir.path().to_owned()], &self.dir.path().join(name)).unwrap();
        target.ensure_directory().unwrap();
        target
    }

    fn mount(&self, target: &Target) -> (OwnedFd, Connection) {
        let device = self.kernel.open_device().expect("these tests need /dev/fuse");
        let connection =
            self.kernel.mount(target, device.as_fd(), &source(), MountOptions::default()).unwrap();
        (device, connection)
    }

    fn mounts_at(&self, target: &Target) -> usize {
        stack_at(&self.kernel.table().unwrap(), target.path()).len()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let flags = rustix::mount::UnmountFlags::DETACH;
        let mut table = self.kernel.table().unwrap_or_default();
        table.reverse();
        for entry in table {
            if entry.mount_point.starts_with(self.dir.path()) {
                let _ = rustix::mount::unmount(&entry.mount_point, flags);
            }
        }
    }
}

fn source() -> MountSource {
    MountSource { volume: "pvc-7".into(), digest: "00ff".into() }
}

/// Not a test of its own: the body of the probe child, see `Helper`.
#[test]
fn fusectl_is_mounted_once() {
    let bench = Bench::new();
    mounts::fusectl::ensure(&bench.path("fusectl"), Path::new("/dev/fuse")).unwrap();
    assert_eq!(stack_at(&bench.kernel.table().unwrap(), &bench.path("fusectl")).len(), 1);
}

#[test]
fn probe_child() {
    mounts::run_if_asked();
}

/// Answers GETATTR of the root, OPENDIR and an empty READDIR, STATFS; ENOENT to LOOKUP; ENOSYS to the rest.
fn serve(device: OwnedFd, stop: Arc<AtomicBool>) -> std::thread::JoinHandle<()> {
    std::thread::spawn(move || {
        let mut device = File::from(device);
        let mut buffer = vec![0; 256 << 10];
        while !stop.load(Ordering::Relaxed) {
            let wait = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let ready = rustix::event::poll(
                &mut [rustix::event::PollFd::new(&device, rustix::event::PollFlags::IN)],
                Some(&wait),
            );
            if ready != Ok(1) {
                continue;
            }
            let Ok(_) = device.read(&mut buffer) else { return };
            let header = InHeader::from_bytes(buffer.first_chunk().unwrap());
            let (error, body): (i32, Vec<u8>) = match header.opcode {
                opcode::GETATTR => {
                    let attr = Attr { ino: 1, mode: 0o40555, nlink: 2, ..Attr::default() };
                    (0, AttrOut { attr, ..AttrOut::default() }.to_bytes().into())
                }
                opcode::STATFS => (0, Kstatfs::default().to_bytes().into()),
                opcode::OPENDIR => (0, OpenOut::default().to_bytes().into()),
                opcode::READDIR => (0, Vec::new()),
                opcode::LOOKUP => (-libc::ENOENT, Vec::new()),
                opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT => continue,
                _ => (-libc::ENOSYS, Vec::new()),
            };
            let mut reply = OutHeader::new(body.len(), error, header.unique).to_bytes().to_vec();
            reply.extend(body);
            let _ = device.write(&reply);
        }
    })
}

#[test]
fn a_mount_is_recognised_guarded_and_leaves_nothing_behind() {
    let bench = Bench::new();
    let target = bench.target("pod/mount");
    let (device, connection) = bench.mount(&target);
    let init = bench.kernel.read_init(device.as_fd(), Duration::from_secs(5)).unwrap();
    assert!(init.len() > 40);

    let table = bench.kernel.table().unwrap();
    let stack = stack_at(&table, target.path());
    assert_eq!(stack.len(), 2);
    assert!(stack.iter().all(|e| e.attributes.is_read_only()));
    assert_eq!(stack[1].ours(), Some(mounts::Ours::Fuse(source())));
    assert_eq!((stack[1].major, stack[1].minor), (connection.major, connection.minor));
    drop(stack);

    // The FUSE mount vanishes: what shows is empty and cannot be written, even by root.
    rustix::mount::unmount(target.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    let mode = fs::metadata(target.path()).unwrap().mode();
    assert_eq!(mode & 0o7777, 0o555);
    assert_eq!(fs::read_dir(target.path()).unwrap().count(), 0);
    let refused = File::create(target.path().join("x")).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ReadOnlyFilesystem);

    assert_eq!(bench.kernel.unmount(&target).unwrap(), 1);
    assert_eq!(bench.mounts_at(&target), 0);
    target.remove().unwrap();
    assert!(!bench.path("pod/mount").exists());
}

#[test]
fn stacked_mounts_all_go_and_a_stranger_on_top_stays() {
    let bench = Bench::new();
    let target = bench.target("pod/stack");
    let devices: Vec<_> = (0..3).map(|_| bench.mount(&target)).collect();
    assert_eq!(bench.mounts_at(&target), 6);
    rustix::mount::mount("stranger", target.path(), "tmpfs", rustix::mount::MountFlags::empty(), None)
        .unwrap();
    assert!(matches!(bench.kernel.unmount(&target), Err(KernelError::Foreign { .. })));
    rustix::mount::unmount(target.path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(bench.kernel.unmount(&target).unwrap(), 6);
    assert_eq!(bench.kernel.unmount(&target).unwrap(), 0);
    drop(devices);
}

#[test]
fn a_target_that_becomes_a_symlink_is_not_followed() {
    let bench = Bench::new();
    let target = bench.target("pod/link");
    fs::remove_dir(bench.path("pod/link")).unwrap();
    fs::create_dir(bench.path("elsewhere")).unwrap();
    symlink(bench.path("elsewhere"), bench.path("pod/link")).unwrap();
    let device = bench.kernel.open_device().unwrap();
    assert!(bench.kernel.mount(&target, device.as_fd(), &source(), MountOptions::default()).is_err());
    assert!(
        !bench
            .kernel
            .table()
            .unwrap()
            .iter()
            .any(|e| e.mount_point.starts_with(bench.path("")) && e.ours().is_some())
    );
}

#[test]
fn a_failed_mount_leaves_no_guard() {
    let bench = Bench::new();
    let target = bench.target("pod/bad");
    let not_a_device = File::open("/dev/null").unwrap();
    assert!(bench.kernel.mount(&target, not_a_device.as_fd(), &source(), MountOptions::default()).is_err());
    assert_eq!(bench.mounts_at(&target), 0);
}

#[test]
fn a_silent_device_times_out() {
    let bench = Bench::new();
    let device = bench.kernel.open_device().unwrap();
    let result = bench.kernel.read_init(device.as_fd(), Duration::from_millis(50));
    // A device without a mount answers EPERM at once on this kernel; others wait.
    assert!(matches!(result, Err(KernelError::NoInit(_) | KernelError::Call { .. })), "{result:?}");
}

#[test]
fn a_served_mount_is_probed_and_an_aborted_one_is_dead() {
    let bench = Bench::new();
    let target = bench.target("pod/served");
    let (device, connection) = bench.mount(&target);
    let init = bench.kernel.read_init(device.as_fd(), Duration::from_secs(5)).unwrap();
    bench.kernel.write_init_reply(device.as_fd(), &init_reply(&init)).unwrap();
    bench.kernel.set_read_ahead_kb(connection, 2048).unwrap();
    let shown = fs::read_to_string(format!("/sys/class/bdi/0:{}/read_ahead_kb", connection.minor)).unwrap();
    assert_eq!(shown.trim(), "2048");

    let stop = Arc::new(AtomicBool::new(false));
    let server = serve(device.try_clone().unwrap(), stop.clone());
    let limit = Duration::from_secs(20);
    for what in [probe::What::Large, probe::What::Small, probe::What::Alive] {
        assert_eq!(bench.kernel.probe(&target, what, limit).unwrap(), probe::Outcome::Primed, "{what:?}");
    }
    stop.store(true, Ordering::Relaxed);
    server.join().unwrap();

    // No process serves: the probe gives up in time, and the abort frees its child.
    let started = Instant::now();
    let result = bench.kernel.probe(&target, probe::What::Alive, Duration::from_millis(300));
    assert!(matches!(result, Err(KernelError::ProbeTimedOut { .. })), "{result:?}");
    assert!(started.elapsed() < Duration::from_secs(5));

    // A caller waits: it is counted, and the abort lets it go.
    let mut caller = std::process::Command::new("stat").arg("-f").arg(target.path()).spawn().unwrap();
    let deadline = Instant::now() + limit;
    let control = bench.kernel.control(connection, device.as_fd()).unwrap();
    while bench.kernel.waiting(&control).unwrap() == 0 {
        assert!(Instant::now() < deadline, "the waiting request was never counted");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(!bench.kernel.has_ended(device.as_fd()));
    bench.kernel.abort(&control).unwrap();
    assert!(bench.kernel.has_ended(device.as_fd()));
    assert!(!caller.wait().unwrap().success());
    assert_eq!(bench.kernel.probe(&target, probe::What::Alive, limit).unwrap(), probe::Outcome::Dead);

    assert_eq!(bench.kernel.unmount(&target).unwrap(), 2);
    assert!(matches!(bench.kernel.control(connection, device.as_fd()), Err(KernelError::NoFusectl { .. })));
    drop(device);
    bench.kernel.abort(&control).unwrap();
    assert_eq!(bench.kernel.waiting(&control).unwrap(), 0);
}

/// Numbers are given out anew at once: the mount that has one now is another volume's.
#[test]
fn what_is_held_of_a_connection_reaches_no_other_that_has_its_number_by_now() {
    let bench = Bench::new();
    let (first, second) = (bench.target("pod/first"), bench.target("pod/second"));
    for _ in 0..200 {
        let (device, gone) = bench.mount(&first);
        let control = bench.kernel.control(gone, device.as_fd()).unwrap();
        assert_eq!(bench.kernel.unmount(&first).unwrap(), 2);
        assert!(bench.kernel.has_ended(device.as_fd()));
        let (other, connection) = bench.mount(&second);
        if connection == gone {
            bench.kernel.abort(&control).unwrap();
            assert_eq!(bench.kernel.waiting(&control).unwrap(), 0, "the other one's INIT waits");
            // A device of another mount is no proof, where the kernel tells.
            let mixed = bench.kernel.control(connection, bench.mount(&bench.target("pod/third")).0.as_fd());
            assert!(matches!(mixed, Err(KernelError::OtherConnection)) || !tells(&other), "{mixed:?}");
            // A caller with nothing but the device of one that has ended gets nothing by its number.
            assert!(matches!(bench.kernel.control(gone, device.as_fd()), Err(KernelError::Ended)));
            // And what is at a target is looked at while it is held.
            assert!(matches!(bench.kernel.abort_at(&first, gone), Err(KernelError::Vanished(_))));
            assert!(!bench.kernel.has_ended(other.as_fd()), "another mount was ended");
            bench.kernel.abort_at(&second, connection).unwrap();
            assert!(bench.kernel.has_ended(other.as_fd()));
            return;
        }
        bench.kernel.unmount(&second).unwrap();
    }
    panic!("the kernel has never given the number again");
}

#[test]
fn many_devices_are_looked_at_at_once() {
    let bench = Bench::new();
    let targets: Vec<Target> = (0..3).map(|n| bench.target(&format!("pod/{n}"))).collect();
    let devices: Vec<_> = targets.iter().map(|target| bench.mount(target).0).collect();
    let ended = || bench.kernel.have_ended(&devices.iter().map(AsFd::as_fd).collect::<Vec<_>>());
    assert_eq!(ended(), [false; 3]);
    rustix::mount::unmount(targets[1].path(), rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(ended(), [false, true, false]);
}

/// Does this kernel say which connection a device serves?
fn tells(device: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    let text = fs::read_to_string(format!("/proc/self/fdinfo/{}", device.as_raw_fd())).unwrap();
    text.contains("fuse_connection:")
}

/// As after `umount -f`: the guard is open, and a mount that is nowhere yet is put on it.
#[test]
fn a_new_mount_is_put_on_the_guard_of_the_same_volume_and_on_nothing_else() {
    let bench = Bench::new();
    let target = bench.target("pod/guarded");
    // Other tests run beside this one, and numbers are given out again.
    let source = MountSource { volume: "pvc-guarded".into(), digest: "00ff".into() };
    let device = bench.kernel.open_device().unwrap();
    let before = bench.kernel.mount(&target, device.as_fd(), &source, MountOptions::default()).unwrap();
    let anywhere = |volume: &str| {
        let of = [(Connection { major: 0, minor: u32::MAX }, volume), (before, volume)];
        let found = bench.kernel.mounted_anywhere(&of).unwrap();
        assert!(found.len() == 2 && !found[0]);
        found[1]
    };
    assert!(anywhere("pvc-guarded"));
    assert!(!anywhere("pvc-8"));
    let new = bench.kernel.open_device().unwrap();
    let mount =
        bench.kernel.mount_detached(new.as_fd(), &source, MountOptions::default()).expect("a detached mount");
    let covered = bench.kernel.put_on_guard(&mount, &target, "pvc-guarded");
    assert!(matches!(covered, Err(KernelError::Vanished(_))), "{covered:?}");
    rustix::mount::unmount(target.path(), rustix::mount::UnmountFlags::FORCE).unwrap();
    assert!(bench.kernel.has_ended(device.as_fd()));
    assert!(!anywhere("pvc-guarded"));
    let foreign = bench.kernel.put_on_guard(&mount, &target, "pvc-8");
    assert!(matches!(foreign, Err(KernelError::Vanished(_))), "{foreign:?}");
    bench.kernel.put_on_guard(&mount, &target, "pvc-guarded").unwrap();
    let table = bench.kernel.table().unwrap();
    let top = *stack_at(&table, target.path()).last().unwrap();
    assert_eq!((top.connection(), top.ours()), (mount.connection, Some(mounts::Ours::Fuse(source))));
    assert_eq!(bench.kernel.unmount(&target).unwrap(), 2);
    let bare = bench.kernel.put_on_guard(&mount, &target, "pvc-guarded");
    assert!(matches!(bare, Err(KernelError::Vanished(_))), "{bare:?}");
}

#[test]
fn without_fusectl_a_forced_unmount_ends_the_connection() {
    let bench = Bench::new();
    let target = bench.target("pod/forced");
    let empty = bench.path("empty");
    fs::create_dir(&empty).unwrap();
    let helper = mounts::Helper::new("/bin/false", []);
    let blind = Linux::new(LinuxPaths { fusectl: empty, ..LinuxPaths::default() }, Vec::new(), helper);
    let (device, connection) = bench.mount(&target);
    bench.kernel.read_init(device.as_fd(), Duration::from_secs(5)).unwrap();
    let refused = blind.control(connection, device.as_fd()).unwrap_err();
    assert!(refused.to_string().contains("mount -t fusectl"), "{refused}");
    blind.abort_at(&target, connection).unwrap();
    assert_eq!(bench.mounts_at(&target), 2, "the mount itself stays");
    let dead = rustix::io::read(device.as_fd(), &mut vec![0; 1 << 16]).unwrap_err();
    assert!(matches!(dead, rustix::io::Errno::NODEV | rustix::io::Errno::CONNABORTED), "{dead}");
    bench.kernel.unmount(&target).unwrap();
}

#[test]
fn a_thread_that_sleeps_is_not_dying() {
    let bench = Bench::new();
    assert!(!bench.kernel.dying(std::process::id()));
    assert!(!bench.kernel.dying(u32::MAX));
    assert!(Path::new("/proc/self/status").exists());
}

#[test]
fn what_a_user_chooses_of_a_mount_is_set_on_it() {
    let bench = Bench::new();
    for (options, wanted) in [
        (MountOptions::default(), &["ro"][..]),
        (MountOptions { no_exec: true, no_atime: true, writable: false }, &["ro", "noexec", "noatime"]),
        (MountOptions { writable: true, ..MountOptions::default() }, &["rw"]),
    ] {
        let target = bench.target("pod/volume");
        let device = bench.kernel.open_device().unwrap();
        bench.kernel.mount(&target, device.as_fd(), &source(), options).unwrap();
        let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let at = format!(" {} ", target.path().display());
        let line = table.lines().find(|l| l.contains(&at) && l.contains("fuse.millpond")).unwrap();
        let options = |field: &str| field.split(',').map(str::to_owned).collect::<Vec<_>>();
        let is_in = |set: &[String], flag: &str| set.iter().any(|one| one == flag);
        let set = options(line.split_whitespace().nth(5).unwrap());
        for always in ["nosuid", "nodev"] {
            assert!(is_in(&set, always), "{line}");
        }
        for flag in ["ro", "rw", "noexec", "noatime"] {
            assert_eq!(is_in(&set, flag), wanted.contains(&flag), "{line}");
        }
        // The superblock's own: no remount of a container makes it writable; and the kernel checks modes.
        let superblock = options(line.split_whitespace().last().unwrap());
        assert_eq!(is_in(&superblock, "ro"), wanted.contains(&"ro"), "{line}");
        for always in ["default_permissions", "allow_other"] {
            assert!(is_in(&superblock, always), "{line}");
        }
        let guard = table.lines().find(|l| l.contains(&at) && l.contains("millpond-guard:")).unwrap();
        assert!(is_in(&options(guard.split_whitespace().nth(5).unwrap()), "ro"), "{guard}");
        bench.kernel.unmount(&target).unwrap();
    }
}
