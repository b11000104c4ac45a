//! Names that nobody has drawn before.

use std::io::Read;

/// From the kernel's generator, which never waits.
pub(super) fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut random = [0; N];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random)
}
