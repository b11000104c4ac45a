//! Whether the kernel has killed for want of memory: one number of the whole machine, which nobody has to be asked for.

/// Processes killed so far (`oom_kill` of `/proc/vmstat`, since Linux 4.13; limits of cgroups included). 0: not known.
pub(crate) fn kills() -> u64 {
    std::fs::read_to_string("/proc/vmstat").map_or(0, |text| parse(&text))
}

fn parse(vmstat: &str) -> u64 {
    let line = vmstat.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_count_is_found_among_others() {
        assert_eq!(parse("pgfault 7\noom_kill 3\noom_kill_other 9\n"), 3);
        assert_eq!(parse("pgfault 7\n"), 0);
    }
}
