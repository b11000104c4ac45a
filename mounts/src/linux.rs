//! The real kernel.

use crate::place::shown;
use crate::{
    Connection, Control, Detached, Helper, Kernel, KernelError, MountEntry, MountOptions, MountSource, Ours,
    Replaced, Replacement, Target, backing, device, dying, parse_mountinfo, probe, replace, stack_at,
};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A target never has more mounts of ours than this, unless something goes round in circles.
const STACK_MAX: u32 = 64;

#[derive(Debug)]
pub struct Linux {
    paths: LinuxPaths,
    cache_roots: Vec<PathBuf>,
    helper: Helper,
}

/// Where the kernel shows itself; another place in tests only.
#[derive(Clone, Debug)]
pub struct LinuxPaths {
    pub device: PathBuf,
    pub fusectl: PathBuf,
    pub bdi: PathBuf,
    pub mountinfo: PathBuf,
    pub sysctl: PathBuf,
}

impl Default for LinuxPaths {
    fn default() -> Self {
        Self {
            device: "/dev/fuse".into(),
            fusectl: "/sys/fs/fuse/connections".into(),
            bdi: "/sys/class/bdi".into(),
            mountinfo: "/proc/self/mountinfo".into(),
            sysctl: "/proc/sys/fs/fuse".into(),
        }
    }
}

impl Linux {
    /// `cache_roots`: where files must lie to be passed through.
    pub fn new(paths: LinuxPaths, cache_roots: Vec<PathBuf>, helper: Helper) -> Self {
        Self { paths, cache_roots, helper }
    }

    fn mount_both(
        &self,
        target: &Target,
        device: BorrowedFd<'_>,
        source: &MountSource,
        options: MountOptions,
    ) -> Result<Connection, KernelError> {
        let shown = || target.path().display().to_string();
        // To the directory that was checked, whatever the path names by now.
        let directory = target.open()?;
        let here = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string());
        let safe = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::RDONLY;
        rustix::mount::mount(
            source.guard_text(),
            &here,
            "tmpfs",
            safe | MountFlags::NOEXEC,
            Some(c"size=4k,nr_inodes=1,mode=0555"),
        )
        .map_err(|e| KernelError::call("mount the guard at", shown(), e))?;
        let vanished = || KernelError::Vanished(target.path().to_owned());
        let guard = target.shown()?.ok_or_else(vanished)?;
        // By its own descriptor, so that its number is known without a look at the table.
        let mount = Detached::make(device, source, options)?;
        mount.put_on(target, guard.device)?;
        match target.shown()? {
            Some(top) if top.device == mount.connection => Ok(mount.connection),
            _ => Err(vanished()),
        }
    }
}

impl Kernel for Linux {
    fn open_device(&self) -> Result<OwnedFd, KernelError> {
        rustix::fs::open(&self.paths.device, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| KernelError::call("open", self.paths.device.display().to_string(), e))
    }

    fn mount(
        &self,
        target: &Target,
        device: BorrowedFd<'_>,
        source: &MountSource,
        options: MountOptions,
    ) -> Result<Connection, KernelError> {
        self.mount_both(target, device, source, options).inspect_err(|_| {
            if let Err(error) = self.unmount(target) {
                tracing::error!(target_path = %target.path().display(), %error, "a failed mount could not be taken back");
            }
        })
    }

    fn mount_detached(
        &self,
        device: BorrowedFd<'_>,
        source: &MountSource,
        options: MountOptions,
    ) -> Result<Detached, KernelError> {
        Detached::make(device, source, options)
    }

    fn put(&self, mount: &Detached, target: &Target, dead: Connection) -> Result<(), KernelError> {
        mount.put(target, dead)
    }

    fn put_on_guard(&self, mount: &Detached, target: &Target, volume: &str) -> Result<(), KernelError> {
        match self.stack(target)?.last() {
            Some(top) if top.ours() == Some(Ours::Guard { volume: volume.to_owned() }) => {
                mount.put_on(target, top.connection())
            }
            _ => Err(KernelError::Vanished(target.path().to_owned())),
        }
    }

    fn replace(&self, replacement: &Replacement) -> Result<Replaced, KernelError> {
        replace::everywhere(&self.helper, replacement)
    }

    fn unmount(&self, target: &Target) -> Result<u32, KernelError> {
        let mut stack = Vec::new();
        for gone in 0..STACK_MAX {
            let Some(shown) = target.shown()? else { return Ok(gone) };
            // The kernel gives the number of a mount away again only when that is gone.
            if stack.last().is_none_or(|top: &MountEntry| top.id != shown.mount_id) {
                stack = self.stack(target)?;
            }
            let Some(top) = stack.last() else { return Ok(gone) };
            if top.ours().is_none() {
                if stack.iter().all(|e| e.ours().is_none()) {
                    return Ok(gone);
                }
                return Err(KernelError::Foreign {
                    target: target.path().to_owned(),
                    kind: top.fs_type.clone(),
                    source_text: top.source.clone(),
                });
            }
            match rustix::mount::unmount(target.pinned_path(), UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
            {
                // EINVAL: not a mount point any more; another process was faster.
                Ok(()) | Err(Errno::INVAL) => drop(stack.pop()),
                Err(e) => return Err(KernelError::call("unmount", target.path().display().to_string(), e)),
            }
        }
        Err(KernelError::call(
            "unmount everything at",
            target.path().display().to_string(),
            std::io::Error::from(std::io::ErrorKind::ResourceBusy),
        ))
    }

    fn stack(&self, target: &Target) -> Result<Vec<MountEntry>, KernelError> {
        match target.shown()? {
            None => Ok(Vec::new()),
            Some(_) => Ok(stack_at(&self.table()?, target.path()).into_iter().cloned().collect()),
        }
    }

    fn table(&self) -> Result<Vec<MountEntry>, KernelError> {
        let text = std::fs::read(&self.paths.mountinfo)
            .map_err(|e| KernelError::call("read", self.paths.mountinfo.display().to_string(), e))?;
        Ok(parse_mountinfo(&text))
    }

    fn read_init(&self, device: BorrowedFd<'_>, limit: Duration) -> Result<Vec<u8>, KernelError> {
        device::read_init(device, limit)
    }

    fn write_init_reply(&self, device: BorrowedFd<'_>, reply: &[u8]) -> Result<(), KernelError> {
        device::write_init_reply(device, reply)
    }

    fn set_read_ahead_kb(&self, connection: Connection, kb: u32) -> Result<(), KernelError> {
        connection.set_read_ahead_kb(&self.paths.bdi, kb)
    }

    fn backing_open(&self, device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> Result<u32, KernelError> {
        backing::check(file, &self.cache_roots)?;
        device::backing_open(device, file)
    }

    fn backing_close(&self, device: BorrowedFd<'_>, id: u32) -> Result<(), KernelError> {
        device::backing_close(device, id)
    }

    fn control(&self, connection: Connection, device: BorrowedFd<'_>) -> Result<Control, KernelError> {
        Control::open(&self.paths.fusectl, connection, device)
    }

    fn waiting(&self, control: &Control) -> Result<u64, KernelError> {
        control.waiting()
    }

    fn has_ended(&self, device: BorrowedFd<'_>) -> bool {
        device::has_ended(device)
    }

    fn have_ended(&self, devices: &[BorrowedFd<'_>]) -> Vec<bool> {
        device::have_ended(devices)
    }

    fn have_requests(&self, devices: &[BorrowedFd<'_>]) -> Vec<bool> {
        device::have_requests(devices)
    }

    fn remains(&self, connection: Connection) -> bool {
        connection.directory(&self.paths.bdi).exists()
    }

    fn mounted_anywhere(&self, of: &[(Connection, &str)]) -> Result<Vec<bool>, KernelError> {
        replace::are_anywhere(of)
    }

    fn abort(&self, control: &Control) -> Result<(), KernelError> {
        control.abort()
    }

    fn abort_at(&self, target: &Target, connection: Connection) -> Result<(), KernelError> {
        let failed = |e: Errno| KernelError::call("abort", target.path().display().to_string(), e);
        // As long as this is open the mount cannot go, and no other mount has its number.
        let held = target.open()?;
        if shown(&held).map_err(failed)?.device != connection {
            return Err(KernelError::Vanished(target.path().to_owned()));
        }
        match Control::open_pinned(&self.paths.fusectl, connection) {
            Ok(control) => control.abort(),
            // No fusectl on this host. A forced unmount ends the connection first (`umount_begin`); the mount itself is
            // busy, because we hold it, and stays.
            Err(KernelError::NoFusectl { .. }) => {
                let here = Path::new("/proc/self/fd").join(held.as_raw_fd().to_string());
                match rustix::mount::unmount(here, UnmountFlags::FORCE) {
                    Ok(()) | Err(Errno::BUSY) => Ok(()),
                    Err(e) => Err(failed(e)),
                }
            }
            Err(error) => Err(error),
        }
    }

    fn fuse_sysctl(&self, name: &str) -> std::io::Result<String> {
        std::fs::read_to_string(self.paths.sysctl.join(name))
    }

    fn dying(&self, tid: u32) -> bool {
        std::fs::read_to_string(format!("/proc/{tid}/status")).is_ok_and(|text| dying::is_dying(&text))
    }

    fn probe(
        &self,
        target: &Target,
        what: probe::What,
        limit: Duration,
    ) -> Result<probe::Outcome, KernelError> {
        self.helper.probe(target.path(), what, limit)
    }
}
