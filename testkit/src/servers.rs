//! Servers of S3 that others wrote, and their command lines: `scripts/stores` installs them.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Of each of them.
pub const REGION: &str = "us-east-1";

/// Of those that look at signatures. moto takes any.
pub const KEY_ID: &str = "key-of-tests";
pub const SECRET_KEY: &str = "secret-of-tests";

/// A program that `scripts/stores` has installed.
///
/// # Panics
///
/// If it was not that script which started this.
pub fn program(name: &str) -> PathBuf {
    let dir = std::env::var_os("MILLPOND_STORES_DIR")
        .expect("scripts/stores says where they are (MILLPOND_STORES_DIR)");
    PathBuf::from(dir).join(name)
}

/// On a port of loopback's. It keeps what it is given in memory.
pub fn moto(port: u16) -> Command {
    let mut command = Command::new("python3");
    command.env("PYTHONPATH", program("moto"));
    command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
    command
}

/// On a port of loopback's. Its files, of which it makes many, are in `dir`: those of buckets below `root`.
pub fn minio(port: u16, dir: &Path) -> Command {
    let mut command = Command::new(program("minio/minio"));
    command.args(["server", "--quiet", "--address", &format!("127.0.0.1:{port}"), "--certs-dir"]);
    command.args([dir.join("certificates"), dir.join("root")]);
    command.envs([("MINIO_ROOT_USER", KEY_ID), ("MINIO_ROOT_PASSWORD", SECRET_KEY)]);
    // It makes a folder there.
    command.env("HOME", dir);
    // As it comes it takes any region.
    command.envs([("MINIO_REGION", REGION), ("MINIO_BROWSER", "off"), ("MINIO_UPDATE", "off")]);
    command
}
