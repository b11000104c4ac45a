//! The agent's state directory: what must survive although the cache may be thrown away at any doubt.
//!
//! Today that is the inode high-water mark, of which a block of numbers is reserved on disk before any of it is given out,
//! so that a number is never given out twice, whenever the agent dies; and the key that makes the names of scopes this
//! node's own. A key that is lost costs the cache: what lies under the old names is found no more, and is collected.
//!
//! ```text
//! version    "millpond-state 1": who wrote here last; its direct neighbours read and write what it wrote
//! inodes     the high-water mark; what follows it on the line is a later version's
//! scope-key  64 hex digits, readable by the agent alone
//! owner      locked by the agent that works here, see `owner`
//! ```

use crate::lock::lock;
use cache::meta::{FIRST_INO, INO_LIMIT, InodeNumbers, MetaError};
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use volume::ScopeKey;

/// First word of the file that names the version.
const MARK: &str = "millpond-state";
/// How many inode numbers one write of the file reserves.
const RESERVE: u64 = 1 << 20;

pub(crate) struct StateDir {
    dir: PathBuf,
    key: ScopeKey,
    numbers: Mutex<Numbers>,
}

struct Numbers {
    next: u64,
    reserved_until: u64,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    #[error("state directory {dir}: {source}: it must exist and be writable by the agent's user")]
    Directory { dir: PathBuf, source: io::Error },
    #[error(
        "state file {path} cannot be understood ({text:?}): restore it, or remove it together with the metadata directory"
    )]
    Corrupt { path: PathBuf, text: String },
    #[error(
        "the state directory {dir} is of version {found}, this build reads {} and its direct neighbours: install a version between them first",
        version::STATE
    )]
    Version { dir: PathBuf, found: u32 },
}

impl StateDir {
    pub(crate) fn open(dir: &Path) -> Result<Self, StateError> {
        let failed = |source| StateError::Directory { dir: dir.to_owned(), source };
        fs::create_dir_all(dir).map_err(failed)?;
        if Self::check_version(dir)? != Some(version::STATE) {
            replace(dir, "version", &format!("{MARK} {}", version::STATE)).map_err(failed)?;
        }
        let path = dir.join("inodes");
        let next = match fs::read_to_string(&path) {
            Ok(text) => match text.split_whitespace().next().and_then(|word| word.parse::<u64>().ok()) {
                Some(n) if n >= FIRST_INO => n,
                _ => return Err(StateError::Corrupt { path, text: text.chars().take(40).collect() }),
            },
            Err(e) if e.kind() == io::ErrorKind::NotFound => FIRST_INO,
            Err(e) => return Err(failed(e)),
        };
        let key = scope_key(dir).map_err(failed)?;
        Ok(Self { dir: dir.to_owned(), key, numbers: Mutex::new(Numbers { next, reserved_until: next }) })
    }

    pub(crate) fn scope_key(&self) -> &ScopeKey {
        &self.key
    }

    /// Which version wrote here last, if any did; an error if this build must not touch it.
    pub(crate) fn check_version(dir: &Path) -> Result<Option<u32>, StateError> {
        let path = dir.join("version");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(StateError::Directory { dir: dir.to_owned(), source }),
        };
        let words: Vec<&str> = text.split_whitespace().collect();
        let found = match words[..] {
            [MARK, number, ..] => number.parse().ok(),
            _ => None,
        };
        match found {
            Some(found) if version::neighbours(found, version::STATE) => Ok(Some(found)),
            Some(found) => Err(StateError::Version { dir: dir.to_owned(), found }),
            None => Err(StateError::Corrupt { path, text: text.chars().take(40).collect() }),
        }
    }

    /// Intent before effect: the file says that numbers below `until` may be in use.
    fn reserve(&self, until: u64) -> io::Result<()> {
        // For tests: a later version says more.
        let more = if version::IS_LATER { format!(" {}", version::STATE) } else { String::new() };
        replace(&self.dir, "inodes", &format!("{until}{more}"))
    }

    /// A number that tells this run of the agent from every other, also across reboots.
    pub(crate) fn generation() -> u64 {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        (now.as_nanos() as u64) ^ u64::from(std::process::id()).rotate_left(48)
    }
}

/// A file of one line, whole at every moment.
fn replace(dir: &Path, name: &str, line: &str) -> io::Result<()> {
    let temporary = dir.join(format!("{name}.new"));
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    writeln!(file, "{line}")?;
    file.sync_all()?;
    fs::rename(&temporary, dir.join(name))?;
    File::open(dir)?.sync_all()
}

/// Made once. One that cannot be understood is as good as lost: it names nothing that could not be fetched again.
fn scope_key(dir: &Path) -> io::Result<ScopeKey> {
    const NAME: &str = "scope-key";
    let mut bytes = [0; ScopeKey::BYTES];
    match fs::read(dir.join(NAME)) {
        Ok(text) if hex::decode_to_slice(text.trim_ascii(), &mut bytes).is_ok() => {
            return Ok(ScopeKey::new(bytes));
        }
        Ok(_) => tracing::warn!(
            dir = %dir.display(),
            "the file {NAME} cannot be understood and is made anew: what is cached under the old names is found no more"
        ),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    replace(dir, NAME, &hex::encode(bytes))?;
    Ok(ScopeKey::new(bytes))
}

impl InodeNumbers for StateDir {
    fn next(&self) -> Result<u64, MetaError> {
        let mut numbers = lock(&self.numbers);
        if numbers.next >= INO_LIMIT {
            return Err(MetaError::InodesExhausted);
        }
        if numbers.next == numbers.reserved_until {
            let until = (numbers.next + RESERVE).min(INO_LIMIT);
            self.reserve(until).map_err(|e| MetaError::Numbers(e.to_string()))?;
            numbers.reserved_until = until;
        }
        numbers.next += 1;
        Ok(numbers.next - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_never_given_out_twice_across_restarts() {
        let dir = tempfile::tempdir().unwrap();
        let first = StateDir::open(dir.path()).unwrap();
        let given: Vec<u64> = (0..3).map(|_| first.next().unwrap()).collect();
        assert_eq!(given, [FIRST_INO, FIRST_INO + 1, FIRST_INO + 2]);
        drop(first); // as by kill -9: nothing is written at the end
        let again = StateDir::open(dir.path()).unwrap().next().unwrap();
        assert!(again > given[2], "{again}");
    }

    #[test]
    fn state_of_a_neighbour_is_taken_over_and_of_a_far_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let says =
            |number: u32| fs::write(dir.path().join("version"), format!("{MARK} {number} more\n")).unwrap();
        drop(StateDir::open(dir.path()).unwrap());
        assert_eq!(StateDir::check_version(dir.path()).unwrap(), Some(version::STATE));
        for neighbour in [version::STATE - 1, version::STATE + 1] {
            says(neighbour);
            fs::write(dir.path().join("inodes"), "4711 added by a later version\n").unwrap();
            assert_eq!(StateDir::open(dir.path()).unwrap().next().unwrap(), 4711);
            assert_eq!(StateDir::check_version(dir.path()).unwrap(), Some(version::STATE));
        }
        says(version::STATE + 2);
        let far = StateDir::open(dir.path()).err().unwrap().to_string();
        assert!(far.contains("install a version between"), "{far}");
        let left = fs::read_to_string(dir.path().join("version")).unwrap();
        assert!(left.ends_with("more\n"), "{left}");
    }

    #[test]
    fn state_is_that_of_the_golden_file() {
        const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");
        let dir = tempfile::tempdir().unwrap();
        StateDir::open(dir.path()).unwrap().next().unwrap();
        let written = ["version", "inodes"].map(|name| fs::read_to_string(dir.path().join(name)).unwrap());
        let name = format!("state-{}.txt", version::STATE - version::STEPS);
        let text = match version::STEPS {
            0 => crate::golden::same(GOLDEN, &name, &written.concat()),
            _ => crate::golden::read(GOLDEN, &name),
        };
        let (version, inodes) = text.split_once('\n').unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("version"), version).unwrap();
        fs::write(dir.path().join("inodes"), inodes).unwrap();
        assert_eq!(StateDir::open(dir.path()).unwrap().next().unwrap(), FIRST_INO + RESERVE);
    }

    #[test]
    fn the_key_of_scope_names_is_made_once_and_is_the_agents_alone() {
        use std::os::unix::fs::PermissionsExt;
        let spec = volume::VolumeSpec {
            id: volume::VolumeId::parse("v").unwrap(),
            source: volume::SourceUrl::parse("s3://bucket/a").unwrap(),
            parameters: volume::Parameters::default(),
        };
        let name = |dir: &Path| {
            let state = StateDir::open(dir).unwrap();
            spec.scope(&volume::Credentials::anonymous(), state.scope_key())
        };
        let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let first = name(here.path());
        assert_eq!(name(here.path()), first);
        assert_ne!(name(there.path()), first, "two nodes have one name for it");
        let key = here.path().join("scope-key");
        assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
        // Torn, or another program's: a new one, and the agent starts.
        for text in ["", "12ab", &"zz".repeat(32)] {
            fs::write(&key, text).unwrap();
            let anew = name(here.path());
            assert_ne!(anew, first);
            assert_eq!(name(here.path()), anew);
        }
    }

    #[test]
    fn a_corrupt_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("inodes"), "x").unwrap();
        assert!(matches!(StateDir::open(dir.path()), Err(StateError::Corrupt { .. })));
    }
}
