//! What an agent keeps beside an area's journal of the volume that it is of, so that what waits can be sent without a mount:
//! all but the credentials. A build that finds none, or one that it does not understand, cannot do that, and needs it for
//! nothing else.

use super::area::Area;
use link::MountSpec;
use link::writable::Wrong;
use rustix::fs::{AtFlags, Mode, OFlags};
use serde::{Deserialize, Serialize};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use volume::ScopeId;

const NAME: &str = "volume.json";
const NEW: &str = "volume.json.new";
const FORMAT: u32 = 1;
/// More than any volume has, bytes.
const MAX: u64 = 4 << 20;

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Description {
    format: u32,
    /// As it was published last.
    pub(crate) mount: MountSpec,
    /// The scope that its inode numbers are of.
    #[serde(default)]
    pub(crate) scope: String,
}

fn text(mount: &MountSpec, scope: &ScopeId) -> Result<Vec<u8>, String> {
    let description = Description { format: FORMAT, mount: mount.clone(), scope: scope.to_string() };
    serde_json::to_vec(&description).map_err(|e| e.to_string())
}

/// Blocking. None: there is none.
pub(super) fn read(dir: &Path) -> Result<Option<Description>, String> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let file = match rustix::fs::open(dir.join(NAME), flags, Mode::empty()) {
        Err(rustix::io::Errno::NOENT) => return Ok(None),
        file => file.map_err(|e| format!("{NAME}: {e}"))?,
    };
    let mut text = Vec::new();
    std::fs::File::from(file).take(MAX).read_to_end(&mut text).map_err(|e| format!("{NAME}: {e}"))?;
    let found: Description = serde_json::from_slice(&text).map_err(|e| format!("{NAME}: {e}"))?;
    match found.format {
        FORMAT => Ok(Some(found)),
        other => Err(format!("{NAME} has format {other}, and this version knows {FORMAT}")),
    }
}

/// By rename: whoever finds it finds all of it.
fn write(dir: &OwnedFd, text: &[u8]) -> Result<(), std::io::Error> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let mut new = std::fs::File::from(rustix::fs::openat(dir, NEW, flags, Mode::from_raw_mode(0o600))?);
    new.write_all(text)?;
    new.sync_all()?;
    rustix::fs::renameat(dir, NEW, dir, NAME)?;
    rustix::fs::fsync(dir)?;
    Ok(())
}

impl Area {
    /// Keeps how it was published last. An area without it is as good as any, but for `millpond staging upload`.
    pub(crate) async fn describe(self: &Arc<Self>, mount: &MountSpec) {
        let (area, mount) = (self.clone(), mount.clone());
        let _ = self.unless_silent(async move { area.note_description(&mount).await }).await; // it goes on
    }

    async fn note_description(&self, mount: &MountSpec) {
        let mut described = self.described.lock().await;
        let text = match text(mount, &self.scope.id) {
            Ok(text) if text == *described => return,
            Ok(text) => text,
            Err(error) => {
                tracing::error!(volume = %self.volume, error, "the volume of a staging area cannot be described");
                return;
            }
        };
        let (files, kept) = (self.files.clone(), text.clone());
        let written = self.change_data(move || {
            let failed = |error: std::io::Error| {
                tracing::warn!(%error, "the description beside a staging journal was not written");
                Wrong::Cause(link::Cause::Unavailable)
            };
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            let top = rustix::fs::openat(&files, "..", flags, Mode::empty()).map_err(|e| failed(e.into()))?;
            write(&top, &kept).map_err(|error| {
                let _ = rustix::fs::unlinkat(&top, NEW, AtFlags::empty()); // written anew by the next publish
                failed(error)
            })
        });
        if written.await.is_ok() {
            *described = text;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volume::{Parameters, SourceUrl, VolumeId, VolumeSpec};

    fn mount() -> MountSpec {
        let spec = VolumeSpec {
            id: VolumeId::parse("v").unwrap(),
            source: SourceUrl::parse("s3://bucket/a").unwrap(),
            parameters: Parameters::default(),
        };
        MountSpec::new(spec, "/t")
    }

    fn scope() -> ScopeId {
        ScopeId::parse(&"0a".repeat(16)).unwrap()
    }

    #[test]
    fn what_was_kept_is_read_by_this_build_and_of_a_later_one_what_can_be_ignored() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()), Ok(None));
        let top = OwnedFd::from(std::fs::File::open(dir.path()).unwrap());
        write(&top, &text(&mount(), &scope()).unwrap()).unwrap();
        let found = read(dir.path()).unwrap().unwrap();
        assert_eq!((found.mount, found.scope), (mount(), scope().to_string()));
        let later = r#"{"format":1,"later":[1],"mount":{"spec":{"id":"v","source":"s3://bucket/a/","hints":{"later":"x"}},"later":{}}}"#;
        std::fs::write(dir.path().join(NAME), later).unwrap();
        let found = read(dir.path()).unwrap().unwrap();
        assert_eq!(found.mount.volume.hints["later"], "x");
        assert!(!found.mount.environment, "nobody said so");
    }

    #[test]
    fn it_is_that_of_the_golden_file() {
        const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
        let name = format!("staging-volume-{FORMAT}.json");
        let written = String::from_utf8(text(&mount(), &scope()).unwrap()).unwrap() + "\n";
        let kept = match version::STEPS {
            0 => crate::golden::same(GOLDEN, &name, &written),
            _ => crate::golden::read(GOLDEN, &name),
        };
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(NAME), kept).unwrap();
        assert_eq!(read(dir.path()).unwrap().unwrap().mount, mount());
    }

    #[test]
    fn what_is_torn_strange_or_of_another_format_is_an_error_and_never_followed() {
        let dir = tempfile::tempdir().unwrap();
        let name = dir.path().join(NAME);
        for bad in ["", "{", "[]", r#"{"format":1}"#] {
            std::fs::write(&name, bad).unwrap();
            assert!(read(dir.path()).is_err(), "{bad}");
        }
        let other = String::from_utf8(text(&mount(), &scope()).unwrap())
            .unwrap()
            .replace("\"format\":1", "\"format\":2");
        std::fs::write(&name, other).unwrap();
        assert!(read(dir.path()).unwrap_err().contains("format 2"));
        std::fs::remove_file(&name).unwrap();
        std::os::unix::fs::symlink("/dev/zero", &name).unwrap();
        assert!(read(dir.path()).is_err());
    }
}
