//! The kernel's own limit for a request, which an administrator may set (`fs.fuse.default_request_timeout` and
//! `max_request_timeout`, Linux 6.14): a request that takes longer ends the whole connection. Our own waits end before.

use crate::{Parameters, VolumeSpec};
use std::time::Duration;

/// Where the kernel shows it.
pub const FUSE_SYSCTL: &str = "/proc/sys/fs/fuse";
/// `FUSE_TIMEOUT_TIMER_FREQ` of `fs/fuse/dev.c`: less is rounded up to it.
const LEAST: Duration = Duration::from_secs(15);
/// Of the whole limit, which is not less than [`LEAST`].
const MARGIN: Duration = Duration::from_secs(3);

/// What connections that are made now get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestTimeout(Duration);

impl RequestTimeout {
    /// `read` reads a file of [`FUSE_SYSCTL`]. None: no limit is set, or the kernel knows none.
    pub fn of_sysctl(read: impl Fn(&str) -> std::io::Result<String>) -> Option<Self> {
        let seconds = |name: &str| -> u64 { read(name).unwrap_or_default().trim().parse().unwrap_or(0) };
        Self::of(seconds("default_request_timeout"), seconds("max_request_timeout"))
    }

    /// As `init_server_timeout` (`fs/fuse/inode.c`) decides for a server that asks for nothing. 0: not set.
    fn of(default: u64, max: u64) -> Option<Self> {
        let seconds = match (default, max) {
            (0, 0) => return None,
            (0, limit) | (limit, 0) => limit,
            (default, max) => default.min(max),
        };
        Some(Self(Duration::from_secs(seconds).max(LEAST)))
    }

    pub fn limit(self) -> Duration {
        self.0
    }

    /// One request may wait for both, for a worker to serve it and then for the store: half of the time for each. The
    /// one that answers at the end of both waits needs a moment, too, before the kernel loses its patience.
    pub fn cap(self, wait: Duration) -> Duration {
        wait.min((self.0 - MARGIN) / 2)
    }

    /// Does the limit leave this volume less time than its parameters say?
    pub fn shortens(self, parameters: &Parameters) -> bool {
        let is_capped = |wait| self.cap(wait) < wait;
        is_capped(parameters.heal_timeout) || is_capped(parameters.store_timeout)
    }
}

/// A volume whose waits end before the kernel ends its connection. For those that wait: what the volume is called by,
/// and what others see of it, is as published.
pub fn within(spec: &VolumeSpec, limit: Option<RequestTimeout>) -> VolumeSpec {
    let mut spec = spec.clone();
    if let Some(limit) = limit {
        let parameters = &mut spec.parameters;
        parameters.heal_timeout = limit.cap(parameters.heal_timeout);
        parameters.store_timeout = limit.cap(parameters.store_timeout);
    }
    spec
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SourceUrl, VolumeId};

    fn spec() -> VolumeSpec {
        VolumeSpec {
            id: VolumeId::parse("v").unwrap(),
            source: SourceUrl::parse("s3://bucket").unwrap(),
            parameters: Parameters::default(),
        }
    }

    #[test]
    fn the_kernels_rule_is_ours() {
        let of = |default, max| RequestTimeout::of(default, max).map(|limit| limit.limit().as_secs());
        for (default, max, limit) in [
            (0, 0, None),
            (60, 0, Some(60)),
            (0, 60, Some(60)),
            (120, 60, Some(60)),
            (60, 120, Some(60)),
            (1, 0, Some(15)),
            (65_535, 65_535, Some(65_535)),
        ] {
            assert_eq!(of(default, max), limit, "default {default}, max {max}");
        }
    }

    #[test]
    fn what_is_not_there_or_no_number_is_no_limit() {
        let absent = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let max = |text: &'static str| {
            RequestTimeout::of_sysctl(|name| match name {
                "max_request_timeout" => Ok(text.to_owned()),
                _ => Err(absent()),
            })
        };
        assert_eq!(RequestTimeout::of_sysctl(|_| Err(absent())), None);
        assert_eq!((max("x\n"), max("0\n"), max("40\n")), (None, None, RequestTimeout::of(0, 40)));
    }

    #[test]
    fn both_waits_of_a_request_end_before_the_connection() {
        let spec = spec();
        for seconds in [1, 15, 60] {
            let limit = RequestTimeout::of(0, seconds).unwrap();
            let capped = within(&spec, Some(limit)).parameters;
            assert_eq!(capped.heal_timeout, capped.store_timeout);
            assert_eq!(capped.heal_timeout + capped.store_timeout, limit.limit() - Duration::from_secs(3));
            assert!(limit.shortens(&spec.parameters) && !limit.shortens(&capped));
        }
        assert_eq!(within(&spec, None), spec);
        let long = RequestTimeout::of(0, 3600).unwrap();
        assert!(!long.shortens(&spec.parameters));
        assert_eq!(within(&spec, Some(long)), spec);
    }
}
