//! Golden files: what a released build writes, byte for byte, kept so that every later build must read it.
//!
//! Tests of the crates that own a format include this file by its path: it needs nothing, and they need not build an S3
//! server for it.

use std::path::Path;

/// Says that what differs is to be written: only for what was never released.
const BLESS: &str = "MILLPOND_BLESS";

/// The file of that name below `directory`, which holds `encoded`; panics if it holds anything else.
pub(crate) fn same(directory: &str, name: &str, encoded: &str) -> String {
    let path = Path::new(directory).join(name);
    let found = std::fs::read_to_string(&path).unwrap_or_default();
    if found == encoded {
        return found;
    }
    if std::env::var_os(BLESS).is_some() {
        std::fs::create_dir_all(path.parent().expect("a file has a directory")).unwrap();
        std::fs::write(&path, encoded).unwrap();
        return encoded.to_owned();
    }
    let differs = found.lines().zip(encoded.lines()).find(|(old, new)| old != new);
    let (old, new) = differs.unwrap_or(("(all that is there)", "(more, or less, than that)"));
    panic!(
        "{} is not what this build writes:\n  file:  {old}\n  build: {new}\nBuilds that are out there read and write \
         what the file says. Leave that as it is and add to it, or raise the version (version/src/lib.rs) and name a \
         new file after it; the old one stays, and must be read. If no release has written it yet: {BLESS}=1 writes it.",
        path.display()
    );
}

/// The file of that name below `directory`, which some build has written.
pub(crate) fn read(directory: &str, name: &str) -> String {
    let path = Path::new(directory).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// One line.
pub(crate) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n"
}

pub(crate) fn from_hex(line: &str) -> Vec<u8> {
    let line = line.trim_end();
    (0..line.len()).step_by(2).map(|at| u8::from_str_radix(&line[at..at + 2], 16).unwrap()).collect()
}
