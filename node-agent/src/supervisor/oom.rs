//! Whether the kernel has killed for want of memory: one number for the whole machine, readable without rights.

/// Processes killed so far (`oom_kill` of `/proc/vmstat`, since Linux 4.13; limits of cgroups included). 0: not known.
pub(crate) fn kills() -> u64 {
    let counts = procfs::vmstat().unwrap_or_default();
    counts.get("oom_kill").and_then(|count| u64::try_from(*count).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernel_counts_them() {
        let before = procfs::vmstat().unwrap()["oom_kill"];
        assert!(kills() >= before as u64);
    }
}
