//! The text that marks a mount as ours: enough to recognise volume and parameters in the mount table after a restart.

/// `mount -t` name of our FUSE mounts, as `/proc/self/mountinfo` shows it.
pub const FUSE_TYPE: &str = "fuse.millpond";
const FUSE_SCHEME: &str = "millpond:";
const GUARD_SCHEME: &str = "millpond-guard:";

use crate::MountOptions;

/// `millpond:<volume id>:<spec digest>[+option…]`. Volume ids hold no colon, so the text splits in one way only.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MountSource {
    pub volume: String,
    pub digest: String,
}

/// What a mount of ours is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ours {
    Fuse(MountSource),
    /// The empty read-only file system below the FUSE mount.
    Guard {
        volume: String,
    },
}

impl MountSource {
    pub fn new(volume: &str, spec_digest: &str, options: MountOptions) -> Self {
        let mut digest = spec_digest.to_owned();
        // Read-only is not said: so are all mounts of before there were others.
        for (chosen, text) in
            [(options.no_exec, "+noexec"), (options.no_atime, "+noatime"), (options.writable, "+rw")]
        {
            digest.push_str(if chosen { text } else { "" });
        }
        Self { volume: volume.to_owned(), digest }
    }

    /// What it was mounted with.
    pub fn options(&self) -> MountOptions {
        let chosen = |text| self.digest.split('+').skip(1).any(|option| option == text);
        MountOptions { no_exec: chosen("noexec"), no_atime: chosen("noatime"), writable: chosen("rw") }
    }

    /// Of this volume and specification, as far as its text can tell, and whatever its options?
    pub fn may_be_of(&self, volume: &str, spec_digest: &str) -> bool {
        let own = self.digest.split('+').next().unwrap_or_default();
        self.volume == volume && (own == spec_digest || !comparable(own, spec_digest))
    }

    /// Is its digest computed as that one's? If not, the two are different whatever they were made from.
    pub fn is_comparable(&self, other: &Self) -> bool {
        comparable(&self.digest, &other.digest)
    }

    pub(crate) fn fuse_text(&self) -> String {
        format!("{FUSE_SCHEME}{}:{}", self.volume, self.digest)
    }

    pub(crate) fn guard_text(&self) -> String {
        format!("{GUARD_SCHEME}{}", self.volume)
    }
}

/// Digests begin with the way in which they are computed (`v1-…`, see `volume::WireSpec::digest`); those of before the
/// first release do not.
fn comparable(one: &str, other: &str) -> bool {
    let way = |digest: &str| digest.split_once('-').map(|(way, _)| way.to_owned());
    way(one) == way(other)
}

impl Ours {
    /// None: another program's mount. A file system type of another program with our text is not ours.
    pub(crate) fn recognise(fs_type: &str, source: &str) -> Option<Self> {
        if fs_type == FUSE_TYPE {
            let (volume, digest) = source.strip_prefix(FUSE_SCHEME)?.split_once(':')?;
            return Some(Self::Fuse(MountSource { volume: volume.into(), digest: digest.into() }));
        }
        if fs_type == "tmpfs" {
            let volume = source.strip_prefix(GUARD_SCHEME)?;
            return Some(Self::Guard { volume: volume.into() });
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_make_another_mount_of_the_same_volume() {
        let plain = MountSource::new("v", "0123", MountOptions::default());
        let options = MountOptions { no_exec: true, no_atime: true, writable: true };
        let chosen = MountSource::new("v", "0123", options);
        let written =
            MountSource::new("v", "0123", MountOptions { writable: true, ..MountOptions::default() });
        assert_eq!((plain.digest.as_str(), written.digest.as_str()), ("0123", "0123+rw"));
        assert!(plain != chosen && plain != written && written != chosen);
        assert_eq!((plain.options(), chosen.options()), (MountOptions::default(), options));
        assert_eq!(Ours::recognise(FUSE_TYPE, &chosen.fuse_text()), Some(Ours::Fuse(chosen.clone())));
        for source in [plain, chosen, written] {
            assert!(source.may_be_of("v", "0123"));
            assert!(!source.may_be_of("w", "0123") && !source.may_be_of("v", "01"));
        }
    }

    #[test]
    fn digests_that_are_computed_in_another_way_tell_nothing() {
        let no_exec = MountOptions { no_exec: true, ..MountOptions::default() };
        let of = |digest: &str| MountSource::new("v", digest, no_exec);
        let (first, now, later) = (of("0123"), of("v1-0123"), of("v2-0123"));
        for (one, other) in [(&first, &now), (&now, &later), (&later, &first)] {
            assert!(!one.is_comparable(other) && !other.is_comparable(one) && one.is_comparable(one));
        }
        assert!(
            first.may_be_of("v", "v1-9") && later.may_be_of("v", "v1-9") && !later.may_be_of("w", "v1-9")
        );
        assert!(!now.may_be_of("v", "v1-9") && now.may_be_of("v", "v1-0123"));
        assert_eq!(later.options(), no_exec);
    }

    #[test]
    fn sources_are_recognised_and_strangers_are_not() {
        let source = MountSource { volume: "pvc-1.a_b".into(), digest: "0123".into() };
        assert_eq!(Ours::recognise(FUSE_TYPE, &source.fuse_text()), Some(Ours::Fuse(source.clone())));
        assert_eq!(
            Ours::recognise("tmpfs", &source.guard_text()),
            Some(Ours::Guard { volume: "pvc-1.a_b".into() })
        );
        for (kind, text) in [
            ("fuse.s3fs", "millpond:a:b"),
            ("tmpfs", "millpond:a:b"),
            (FUSE_TYPE, "millpond:a"),
            (FUSE_TYPE, "x"),
        ] {
            assert_eq!(Ours::recognise(kind, text), None, "{kind} {text}");
        }
    }
}
