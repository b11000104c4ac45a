//! What the node's kernel shows of Millpond: its processes, its mounts, what kubelet keeps of a pod.

use super::machine::{Machine, in_namespace};
use super::names::{FILE_SYSTEM, KUBELET};
use crate::mountinfo::Mount;
use crate::processes;
use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use std::fs;
use std::path::PathBuf;

#[derive(Clone, Copy, Debug)]
pub struct View<'a>(pub &'a Machine);

impl View<'_> {
    /// Processes of the whole node (containers included) that run this program.
    pub fn processes(self, program: &str) -> Result<Vec<u32>> {
        let mut found = Vec::new();
        let first = fs::read_link(format!("/proc/{}/ns/pid", self.0.init()))?;
        for pid in processes::all() {
            let Ok(name) = fs::read_to_string(format!("/proc/{pid}/comm")) else { continue };
            // `comm` holds 15 bytes.
            if name.trim() == &program[..program.len().min(15)] && self.is_inside(pid, &first) {
                found.push(pid);
            }
        }
        Ok(found)
    }

    /// Containers have PID namespaces of their own, below the node's.
    fn is_inside(self, pid: u32, first: &std::path::Path) -> bool {
        let namespace = |p: u32| fs::read_link(format!("/proc/{p}/ns/pid")).ok();
        let mut at = pid;
        for _ in 0..64 {
            if namespace(at).is_some_and(|n| n == *first) {
                return true;
            }
            match processes::parent(at) {
                Some(parent) if parent > 1 => at = parent,
                _ => return false,
            }
        }
        false
    }

    /// Workers that serve a mount.
    pub fn workers(self) -> Result<Vec<u32>> {
        let agents = self.processes("node-agent")?;
        Ok(agents.into_iter().flat_map(processes::fuse_children).collect())
    }

    pub fn kill(self, pid: u32) -> Result<()> {
        self.signal(pid, Signal::KILL)
    }

    pub fn signal(self, pid: u32, signal: Signal) -> Result<()> {
        processes::signal(pid, signal)
    }

    /// Millpond's mounts, each once though kubelet and the plugin's container see them both. What other tests have mounted on the
    /// same machine is none of this node.
    pub fn volumes(self) -> Result<Vec<Mount>> {
        let is_ours = |m: &Mount| m.kind == FILE_SYSTEM && m.point.starts_with(KUBELET);
        Ok(self.0.mounts()?.into_iter().filter(is_ours).collect())
    }

    /// What is left on the node of a pod: kubelet's directory and mounts.
    pub fn leftovers(self, pod_uid: &str) -> Result<Vec<String>> {
        let mut left: Vec<_> = self
            .0
            .mounts()?
            .into_iter()
            .filter(|m| m.point.to_string_lossy().contains(pod_uid))
            .map(|m| format!("mount {}", m.point.display()))
            .collect();
        let directory = self.pod_directory(pod_uid);
        if directory.exists() {
            left.push(format!("directory /var/lib/kubelet/pods/{pod_uid}"));
        }
        Ok(left)
    }

    pub fn pod_directory(self, pod_uid: &str) -> PathBuf {
        self.0.path(&format!("/var/lib/kubelet/pods/{pod_uid}"))
    }

    /// Processes of a pod's containers, by the cgroup that kubelet gave them.
    pub fn processes_of_pod(self, pod_uid: &str) -> Vec<u32> {
        let inside = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/cgroup")).is_ok_and(|text| text.contains(pod_uid))
        };
        processes::all().into_iter().filter(inside).collect()
    }

    /// The one process of a program; more or none is an error.
    pub fn only(self, program: &str) -> Result<u32> {
        let found = self.processes(program)?;
        ensure!(found.len() == 1, "{} processes run {program}: {found:?}", found.len());
        Ok(found[0])
    }

    /// Processes in the node's own PID namespace (not in containers').
    pub fn host_processes(self) -> Result<Vec<u32>> {
        Ok(in_namespace(&fs::read_link(format!("/proc/{}/ns/pid", self.0.init()))?))
    }
}

/// A field of `/proc/<pid>/status`.
pub fn status(pid: u32, field: &str) -> Result<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':'));
    Ok(line.with_context(|| format!("/proc/{pid}/status has no {field}"))?.trim().to_owned())
}
