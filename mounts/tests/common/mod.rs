//! What more than one test program needs.

/// The reply of a server that offers nothing special: version 7.31, 128 KiB writes.
pub fn init_reply(init: &[u8]) -> Vec<u8> {
    let mut reply = vec![0; 16 + 64];
    reply[0..4].copy_from_slice(&80u32.to_ne_bytes());
    reply[8..16].copy_from_slice(&init[8..16]);
    reply[16..20].copy_from_slice(&7u32.to_ne_bytes());
    reply[20..24].copy_from_slice(&31u32.to_ne_bytes());
    reply[24..28].copy_from_slice(&(1u32 << 20).to_ne_bytes());
    reply[36..40].copy_from_slice(&(128u32 << 10).to_ne_bytes());
    reply
}
