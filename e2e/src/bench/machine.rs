//! What the machine is: numbers of another one say something else.

use crate::mountinfo;
use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    pub kernel: String,
    /// The processor's name.
    pub processor: String,
    pub processors: usize,
    pub memory_bytes: u64,
    /// Of the cache directory.
    pub cache_file_system: String,
    pub cache_device: String,
    /// How a virtual machine gives memory back to its host (docs/benchmarks.md says why that matters); empty: not known.
    pub page_reporting: BTreeMap<String, String>,
}

impl Machine {
    pub(super) fn here(cache: &Path) -> Result<Self> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let (file_system, device) = disk_of(cache)?;
        Ok(Self {
            kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
            processor: field(&read("/proc/cpuinfo"), "model name").unwrap_or_else(|| "unknown".into()),
            processors: std::thread::available_parallelism()?.get(),
            memory_bytes: memory(&read("/proc/meminfo")),
            cache_file_system: file_system,
            cache_device: device,
            page_reporting: settings(Path::new("/sys/module/page_reporting/parameters")),
        })
    }

    /// What the other one has otherwise: name, here, there.
    pub(super) fn differences(&self, other: &Self) -> Vec<(String, String, String)> {
        let facts = |machine: &Self| {
            let mut facts = BTreeMap::from([
                ("kernel".to_owned(), machine.kernel.clone()),
                ("processor".to_owned(), machine.processor.clone()),
                ("processors".to_owned(), machine.processors.to_string()),
                // The kernel keeps some for itself, not always as much.
                ("memory".to_owned(), format!("{:.0} GiB", machine.memory_bytes as f64 / f64::from(1 << 30))),
                ("cache file system".to_owned(), machine.cache_file_system.clone()),
                ("cache device".to_owned(), machine.cache_device.clone()),
            ]);
            for name in SETTINGS {
                let value = machine.page_reporting.get(*name).cloned();
                facts.insert((*name).to_owned(), value.unwrap_or_else(|| "not known".into()));
            }
            facts
        };
        let (here, there) = (facts(self), facts(other));
        let pairs = here.into_iter().zip(there.into_values());
        pairs.filter(|((_, a), b)| a != b).map(|((name, a), b)| (name, a, b)).collect()
    }
}

/// Those of page reporting that are chosen, not counted.
const SETTINGS: &[&str] = &["page_reporting_order", "min_free_ms"];

fn settings(dir: &Path) -> BTreeMap<String, String> {
    let of = |name: &&str| {
        let value = std::fs::read_to_string(dir.join(name)).ok()?;
        Some(((*name).to_owned(), value.trim().to_owned()))
    };
    SETTINGS.iter().filter_map(of).collect()
}

/// "name : value" of the first line with that name.
fn field(text: &str, name: &str) -> Option<String> {
    text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    })
}

fn memory(meminfo: &str) -> u64 {
    let kib =
        field(meminfo, "MemTotal").and_then(|text| text.trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Kind of the file system, and the device below it.
fn disk_of(dir: &Path) -> Result<(String, String)> {
    let dir = dir.canonicalize()?;
    let mounts = mountinfo::read("self")?;
    // Of several at one place the last is on top.
    let mount = mounts.into_iter().filter(|mount| dir.starts_with(&mount.point));
    let mount =
        mount.max_by_key(|mount| mount.point.components().count()).context("nothing is mounted at /")?;
    let device = std::fs::read_link(Path::new("/sys/dev/block").join(&mount.device));
    let name = device.ok().and_then(|path| Some(path.file_name()?.to_string_lossy().into_owned()));
    Ok((mount.kind, name.unwrap_or(mount.device)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_has_a_kernel_processors_memory_and_a_disk() {
        let machine = Machine::here(&std::env::temp_dir()).unwrap();
        assert!(!machine.kernel.is_empty() && machine.processors > 0 && machine.memory_bytes > 1 << 20);
        assert!(!machine.cache_file_system.is_empty() && !machine.cache_device.is_empty());
        assert!(machine.differences(&machine.clone()).is_empty());
    }

    #[test]
    fn differences_name_what_differs() {
        let a = super::super::example::record().machine;
        let mut b = a.clone();
        b.kernel = "6.12".into();
        b.page_reporting.clear();
        b.memory_bytes -= 4096;
        let names: Vec<_> = a.differences(&b).into_iter().map(|(name, ..)| name).collect();
        assert_eq!(names, ["kernel", "page_reporting_order"]);
    }

    #[test]
    fn fields_of_proc_are_found() {
        assert_eq!(
            field("model name\t: Some CPU @ 2GHz\n", "model name").as_deref(),
            Some("Some CPU @ 2GHz")
        );
        assert_eq!(memory("MemTotal:       16384 kB\nMemFree: 1 kB\n"), 16384 * 1024);
        assert_eq!(memory(""), 0);
    }
}
