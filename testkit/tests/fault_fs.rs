//! The faulty disk works like a disk until a test says not to. Real FUSE; needs root.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests too; clippy only knows #[test] functions.

use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use testkit::content;
use testkit::fault_fs::{Call, DiskFaults, Mounted};

struct Disk {
    mounted: Option<Mounted>,
    base: PathBuf,
}

impl Disk {
    fn new(name: &str) -> Self {
        let base = std::env::temp_dir().join(format!("testkit-fault-fs-{name}-{}", std::process::id()));
        fs::create_dir_all(base.join("below")).unwrap();
        fs::create_dir_all(base.join("mnt")).unwrap();
        let mounted = Mounted::mount(&base.join("below"), &base.join("mnt")).unwrap();
        Self { mounted: Some(mounted), base }
    }
    fn path(&self, name: &str) -> PathBuf {
        self.base.join("mnt").join(name)
    }
    fn mounted(&mut self) -> &mut Mounted {
        self.mounted.as_mut().unwrap()
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        if let Some(mounted) = self.mounted.take() {
            mounted.unmount().unwrap();
        }
        fs::remove_dir_all(&self.base).unwrap();
    }
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Option<i32> {
    result.unwrap_err().raw_os_error()
}

#[test]
fn it_is_a_file_system() {
    let disk = Disk::new("plain");
    let data = content::bytes(9, 0..3_000_000);
    fs::create_dir(disk.path("d")).unwrap();
    fs::write(disk.path("d/f"), &data).unwrap();
    fs::rename(disk.path("d/f"), disk.path("g")).unwrap();
    assert_eq!(fs::read(disk.path("g")).unwrap(), data);
    fs::remove_dir(disk.path("d")).unwrap();
    std::os::unix::fs::symlink("g", disk.path("link")).unwrap();
    assert_eq!(fs::read(disk.path("link")).unwrap(), data);
    fs::hard_link(disk.path("g"), disk.path("h")).unwrap();
    assert_eq!(fs::metadata(disk.path("h")).unwrap().nlink(), 2);

    // Open and unlinked: still readable and writable.
    let file = OpenOptions::new().read(true).write(true).open(disk.path("g")).unwrap();
    fs::remove_file(disk.path("g")).unwrap();
    fs::remove_file(disk.path("h")).unwrap();
    file.write_all_at(b"still", 0).unwrap();
    let mut start = [0; 5];
    file.read_exact_at(&mut start, 0).unwrap();
    assert_eq!(&start, b"still");
    file.set_len(10).unwrap();
    assert_eq!(file.metadata().unwrap().len(), 10);

    // Sparse.
    let sparse = File::create_new(disk.path("sparse")).unwrap();
    sparse.set_len(1 << 30).unwrap();
    sparse.write_all_at(b"x", 1 << 20).unwrap();
    assert!(sparse.metadata().unwrap().blocks() * 512 < 1 << 20);
    let data = rustix::fs::seek(&sparse, rustix::fs::SeekFrom::Data(0)).unwrap();
    assert!((1..=1 << 20).contains(&data), "{data}");

    // A shared, writable mapping.
    let mapped =
        OpenOptions::new().read(true).write(true).create_new(true).open(disk.path("mapped")).unwrap();
    mapped.set_len(8192).unwrap();
    // SAFETY: a fresh mapping of a file that stays open and 8192 bytes long, used within it and unmapped once.
    unsafe {
        let flags = libc::PROT_READ | libc::PROT_WRITE;
        let fd = std::os::fd::AsRawFd::as_raw_fd(&mapped);
        let at = libc::mmap(std::ptr::null_mut(), 8192, flags, libc::MAP_SHARED, fd, 0);
        assert_ne!(at, libc::MAP_FAILED);
        std::ptr::copy_nonoverlapping(b"mapped".as_ptr(), at.cast::<u8>().add(5000), 6);
        assert_eq!(libc::msync(at, 8192, libc::MS_SYNC), 0);
        assert_eq!(libc::munmap(at, 8192), 0);
    }
    assert_eq!(&fs::read(disk.base.join("below/mapped")).unwrap()[5000..5006], b"mapped");
}

#[test]
fn a_budget_is_a_full_disk() {
    let mut disk = Disk::new("full");
    disk.mounted().set(DiskFaults { budget: Some(1 << 20), ..DiskFaults::default() });
    fs::write(disk.path("a"), vec![1; 512 << 10]).unwrap();
    assert_eq!(errno(fs::write(disk.path("b"), vec![1; 600 << 10])), Some(libc::ENOSPC));
    // Overwriting needs no space.
    OpenOptions::new().write(true).open(disk.path("a")).unwrap().write_all_at(&[2; 4096], 0).unwrap();
    let space = rustix::fs::statvfs(disk.path("")).unwrap();
    assert!(space.f_blocks * space.f_frsize == 1 << 20 && space.f_bavail * space.f_frsize <= 512 << 10);
    // What is removed is free again, as soon as the kernel has forgotten it.
    fs::remove_file(disk.path("b")).unwrap();
    fs::remove_file(disk.path("a")).unwrap();
    let used = || disk.mounted.as_ref().unwrap().status().used;
    testkit::process::wait_until("space of removed files", std::time::Duration::from_secs(10), || {
        (used() == 0).then_some(())
    })
    .unwrap();
    fs::write(disk.path("c"), vec![1; 900 << 10]).unwrap();
}

#[test]
fn eio_and_read_only_come_and_go_at_run_time() {
    let mut disk = Disk::new("eio");
    fs::write(disk.path("f"), "content").unwrap();
    let file = File::open(disk.path("f")).unwrap();
    let mut buffer = [0; 7];
    file.read_exact_at(&mut buffer, 0).unwrap();

    let eio = |calls: &[Call]| DiskFaults { eio: calls.to_vec(), ..DiskFaults::default() };
    // Also for what the page cache had.
    disk.mounted().set(eio(&[Call::Read]));
    assert_eq!(errno(file.read_exact_at(&mut buffer, 0)), Some(libc::EIO));
    disk.mounted().set(eio(&[Call::Open, Call::Write]));
    assert_eq!(errno(File::open(disk.path("f"))), Some(libc::EIO));
    disk.mounted().set(eio(&[Call::Fsync]));
    assert_eq!(errno(file.sync_all()), Some(libc::EIO));
    disk.mounted().set(DiskFaults { readonly: true, ..DiskFaults::default() });
    assert_eq!(errno(fs::write(disk.path("g"), "")), Some(libc::EROFS));
    assert_eq!(errno(fs::remove_file(disk.path("f"))), Some(libc::EROFS));
    assert_eq!(fs::read(disk.path("f")).unwrap(), b"content");

    // The same over the socket, as a test of real processes does it.
    let socket = disk.base.join("control");
    disk.mounted().listen(&socket).unwrap();
    let mut control = UnixStream::connect(&socket).unwrap();
    let mut answers = BufReader::new(control.try_clone().unwrap()).lines();
    writeln!(control, "{{\"eio\":[\"read\"],\"every\":2}}").unwrap();
    assert!(answers.next().unwrap().unwrap().contains("\"failed\":0"));
    writeln!(control, "{{\"eoi\":[]}}").unwrap();
    assert!(answers.next().unwrap().unwrap().starts_with("error: "));
    writeln!(control, "{{}}").unwrap();
    answers.next().unwrap().unwrap();
    assert_eq!(fs::read(disk.path("f")).unwrap(), b"content");
}

#[test]
fn calls_that_hang_are_not_answered_until_the_disk_is_mended() {
    let limit = std::time::Duration::from_secs(20);
    let mut disk = Disk::new("hangs");
    fs::write(disk.path("f"), "content").unwrap();
    for (count, call) in Call::ALL.into_iter().enumerate() {
        disk.mounted().set(DiskFaults { hangs: vec![call], ..DiskFaults::default() });
        let (path, new, (sender, receiver)) = (disk.path("f"), disk.path("new"), std::sync::mpsc::channel());
        let root = disk.path("");
        std::thread::spawn(move || {
            let done = match call {
                Call::Read => fs::read(path).map(drop),
                Call::Write => {
                    OpenOptions::new().write(true).open(path).and_then(|f| f.write_all_at(b"c", 0))
                }
                Call::Open => File::open(path).map(drop),
                Call::Fsync => File::open(path).and_then(|f| f.sync_all()),
                Call::Metadata => fs::create_dir(new),
                Call::Stat => rustix::fs::statvfs(&root).map(drop).map_err(Into::into),
            };
            sender.send(done).unwrap();
        });
        let hanging = || (disk.mounted.as_ref().unwrap().status().hanging > 0).then_some(());
        testkit::process::wait_until("the call arrives", limit, hanging).unwrap();
        // The others are served meanwhile; of these, none needs the call that hangs.
        if !matches!(call, Call::Stat | Call::Metadata) {
            fs::create_dir(disk.path(&format!("meanwhile{count}"))).unwrap();
        }
        assert!(receiver.try_recv().is_err(), "{call:?} was answered");
        disk.mounted().set(DiskFaults::default());
        let done = receiver.recv_timeout(limit).unwrap_or_else(|_| panic!("{call:?} is never answered"));
        assert!(done.is_ok(), "{call:?}: {done:?}");
    }
}
