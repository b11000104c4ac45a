//! INIT: what a connection gets from its first worker, and what every later one finds there.
//!
//! What the first worker answers holds for the life of the connection; the reply is kept in the shared memory. A worker of
//! another version, or with other settings, takes the connection as it is, even if it would choose otherwise for a new one.

use fuse_abi::{InHeader, InitIn, InitOut, OutHeader};
use fuser::InitFlags;
use link::worker::{DisabledFeatures, Mode};
use std::mem::offset_of;
use std::ops::Range;

/// The lower and the upper half of the flags that the kernel offers.
const OFFERED_AT: usize = InHeader::BYTES + offset_of!(InitIn, flags);
const OFFERED_HIGH_AT: usize = InHeader::BYTES + offset_of!(InitIn, flags2);
/// The same of the answer.
const AGREED_AT: usize = in_reply(offset_of!(InitOut, flags));
const AGREED_HIGH_AT: usize = in_reply(offset_of!(InitOut, flags2));
/// How much the kernel sends ahead. Any worker bears any of it.
const PACE: [Range<usize>; 3] = [
    field(offset_of!(InitOut, max_readahead), 4),
    field(offset_of!(InitOut, max_background), 2),
    field(offset_of!(InitOut, congestion_threshold), 2),
];
/// How large a request, or its answer, may be.
const MAX_WRITE: Range<usize> = field(offset_of!(InitOut, max_write), 4);
const MAX_PAGES: Range<usize> = field(offset_of!(InitOut, max_pages), 2);

const fn in_reply(at: usize) -> usize {
    OutHeader::BYTES + at
}
const fn field(at: usize, bytes: usize) -> Range<usize> {
    in_reply(at)..in_reply(at) + bytes
}

/// Flags that have a meaning for what we do, and that this build can serve. fuser sets the first four by itself.
const SERVED: InitFlags = InitFlags::FUSE_ASYNC_READ
    .union(InitFlags::FUSE_BIG_WRITES)
    .union(InitFlags::FUSE_MAX_PAGES)
    .union(InitFlags::FUSE_INIT_EXT)
    .union(WISHED)
    .union(InitFlags::FUSE_CACHE_SYMLINKS)
    .union(InitFlags::FUSE_DO_READDIRPLUS)
    .union(InitFlags::FUSE_AUTO_INVAL_DATA)
    .union(InitFlags::FUSE_PASSTHROUGH);
/// Those that every connection shall have.
const WISHED: InitFlags = InitFlags::FUSE_PARALLEL_DIROPS
    .union(InitFlags::FUSE_EXPLICIT_INVAL_DATA)
    .union(InitFlags::FUSE_NO_OPEN_SUPPORT)
    .union(InitFlags::FUSE_NO_OPENDIR_SUPPORT)
    .union(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);

/// What one that can be written to shall have: pages are good for as long as size and time stay the same, and each open and
/// close is asked for.
const WISHED_WRITABLE: InitFlags = InitFlags::FUSE_PARALLEL_DIROPS
    .union(InitFlags::FUSE_AUTO_INVAL_DATA)
    .union(InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP);

/// What the connection gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offer {
    pub mode: Mode,
    /// To be answered to INIT, besides what fuser sets by itself.
    pub flags: InitFlags,
}

impl Offer {
    /// For a new connection: what is wished for, as far as the kernel offers it. `init`: its request, header included.
    pub fn choose(init: &[u8], wished: Mode, disabled_features: &DisabledFeatures) -> Self {
        let low = u64::from(word(init, OFFERED_AT));
        let extended = low & InitFlags::FUSE_INIT_EXT.bits() != 0;
        let high = if extended { u64::from(word(init, OFFERED_HIGH_AT)) } else { 0 };
        let offered = InitFlags::from_bits_retain(low | high << 32);
        let has = |flag| offered.contains(flag);
        let mode = match wished {
            Mode::Passthrough if has(InitFlags::FUSE_PASSTHROUGH) && !disabled_features.passthrough => {
                Mode::Passthrough
            }
            Mode::NoOpen if has(InitFlags::FUSE_NO_OPEN_SUPPORT) && !disabled_features.no_open => {
                Mode::NoOpen
            }
            Mode::Writable => Mode::Writable,
            Mode::Passthrough | Mode::NoOpen | Mode::Kept => Mode::Kept,
        };
        let mut flags = if mode == Mode::Writable { WISHED_WRITABLE } else { WISHED };
        // For tests: the next version wishes for something else.
        flags.set(InitFlags::FUSE_CACHE_SYMLINKS, !version::IS_LATER);
        // Attributes that may be believed for a moment at most are not worth their place in a listing.
        let plus = !disabled_features.readdirplus && mode != Mode::Writable;
        flags.set(InitFlags::FUSE_DO_READDIRPLUS, plus);
        flags.set(InitFlags::FUSE_PASSTHROUGH, mode == Mode::Passthrough);
        Self { mode, flags: flags & offered }
    }

    /// For one that another worker has begun: what that one has agreed with the kernel. `reply`: its answer, header
    /// included; `mode`: the one it has served in, which the kernel remembers, too (an open answered with ENOSYS).
    pub fn frozen(reply: &[u8], mode: Mode) -> Result<Self, String> {
        let agreed = agreed(reply);
        let unknown = agreed.difference(SERVED);
        if !unknown.is_empty() {
            return Err(format!("the connection has INIT flags that this build does not know: {unknown:?}"));
        }
        let mode = match mode {
            Mode::Passthrough if !agreed.contains(InitFlags::FUSE_PASSTHROUGH) => Mode::Kept,
            Mode::NoOpen if !agreed.contains(InitFlags::FUSE_NO_OPEN_SUPPORT) => Mode::Kept,
            mode => mode,
        };
        Ok(Self { mode, flags: agreed & !InitFlags::FUSE_INIT_EXT })
    }

    pub(crate) fn no_opendir(&self) -> bool {
        self.flags.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT)
    }
}

/// Pages of a READ that a worker can answer: more than it asks for, and as many as workers have asked for before it.
const PAGES_SERVED: u16 = 256;

/// May a worker that would have answered `own` serve a connection whose answer was `frozen`?
pub(crate) fn can_serve(own: &[u8], frozen: &[u8]) -> Result<(), String> {
    let room = |reply: &[u8]| {
        let pages = reply.get(MAX_PAGES).and_then(|bytes| bytes.first_chunk()).copied();
        (word(reply, MAX_WRITE.start), pages.map_or(0, u16::from_ne_bytes))
    };
    let ((own_write, own_pages), (write, pages)) = (room(own), room(frozen));
    let own_pages = own_pages.max(PAGES_SERVED);
    if write > own_write || pages > own_pages {
        return Err(format!(
            "this build answers INIT with less room than the connection has: requests of {own_write} bytes and {own_pages} \
             pages, not {write} and {pages}"
        ));
    }
    // The header tells of the request, and is the same.
    let rest = |reply: &[u8]| {
        let mut reply = reply.to_vec();
        for range in PACE.into_iter().chain([MAX_WRITE, MAX_PAGES]) {
            if let Some(field) = reply.get_mut(range) {
                field.fill(0);
            }
        }
        reply
    };
    match rest(own) == rest(frozen) {
        true => Ok(()),
        false => Err(format!(
            "this build answers INIT in another way than the connection's first worker: {:?}, not {:?}",
            agreed(own),
            agreed(frozen)
        )),
    }
}

fn agreed(reply: &[u8]) -> InitFlags {
    let (low, high) = (word(reply, AGREED_AT), word(reply, AGREED_HIGH_AT));
    InitFlags::from_bits_retain(u64::from(low) | u64::from(high) << 32)
}

fn word(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |bytes| u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use InitFlags as F;

    fn init(flags: InitFlags) -> Vec<u8> {
        let flags = (flags | F::FUSE_INIT_EXT).bits();
        let init = InitIn { flags: flags as u32, flags2: (flags >> 32) as u32, ..InitIn::default() };
        [&[0; InHeader::BYTES][..], &init.to_bytes()].concat()
    }

    fn reply(flags: InitFlags, ahead: u16, pages: u16) -> Vec<u8> {
        let flags = flags.bits();
        let reply = InitOut {
            flags: flags as u32,
            flags2: (flags >> 32) as u32,
            max_background: ahead,
            max_write: 4096,
            max_pages: pages,
            ..InitOut::default()
        };
        [&[0; OutHeader::BYTES][..], &reply.to_bytes()].concat()
    }

    #[test]
    fn a_mode_is_what_was_wished_for_as_far_as_the_kernel_offers_it() {
        let all = init(F::FUSE_PASSTHROUGH | F::FUSE_NO_OPEN_SUPPORT | F::FUSE_DO_READDIRPLUS);
        let choose = |init: &[u8], mode, disabled_features| Offer::choose(init, mode, &disabled_features);
        let nothing = DisabledFeatures::default();
        assert_eq!(choose(&all, Mode::Passthrough, nothing).mode, Mode::Passthrough);
        assert_eq!(choose(&all, Mode::NoOpen, nothing).mode, Mode::NoOpen);
        assert_eq!(choose(&all, Mode::Kept, nothing).mode, Mode::Kept);
        assert_eq!(choose(&init(F::empty()), Mode::Passthrough, nothing).mode, Mode::Kept);
        assert_eq!(choose(&init(F::empty()), Mode::NoOpen, nothing).mode, Mode::Kept);
        let disabled_features = DisabledFeatures { passthrough: true, readdirplus: true, ..nothing };
        let offer = choose(&all, Mode::Passthrough, disabled_features);
        assert_eq!(offer, Offer { mode: Mode::Kept, flags: F::FUSE_NO_OPEN_SUPPORT });
        assert_eq!(
            choose(&[0; 10], Mode::Passthrough, nothing).mode,
            Mode::Kept,
            "a truncated INIT offers nothing"
        );
    }

    #[test]
    fn a_successor_takes_what_was_agreed_whatever_it_would_choose() {
        let agreed = F::FUSE_ASYNC_READ | F::FUSE_PASSTHROUGH | F::FUSE_DO_READDIRPLUS;
        let offer = Offer::frozen(&reply(agreed | F::FUSE_INIT_EXT, 128, 256), Mode::Passthrough).unwrap();
        assert_eq!(offer, Offer { mode: Mode::Passthrough, flags: agreed });
        assert!(!offer.no_opendir());
        // The mount's first worker was given no passthrough.
        let offer = Offer::frozen(&reply(F::FUSE_NO_OPENDIR_SUPPORT, 128, 256), Mode::Passthrough).unwrap();
        assert_eq!((offer.mode, offer.no_opendir()), (Mode::Kept, true));
        // The kernel has learnt that opens are not answered, and sends none.
        let offer = Offer::frozen(&reply(F::FUSE_NO_OPEN_SUPPORT, 128, 256), Mode::NoOpen).unwrap();
        assert_eq!(offer.mode, Mode::NoOpen);
    }

    #[test]
    fn flags_that_a_build_does_not_know_are_refused_by_their_names() {
        let why = Offer::frozen(&reply(F::FUSE_WRITEBACK_CACHE | F::FUSE_ASYNC_READ, 128, 256), Mode::Kept);
        let why = why.unwrap_err();
        assert!(why.contains("FUSE_WRITEBACK_CACHE") && !why.contains("FUSE_ASYNC_READ"), "{why}");
    }

    #[test]
    fn a_connection_may_ask_for_less_than_a_build_can_do_but_not_for_more() {
        let flags = F::FUSE_ASYNC_READ | F::FUSE_PASSTHROUGH;
        let own = reply(flags, 128, 256);
        assert_eq!(can_serve(&own, &own), Ok(()));
        assert_eq!(can_serve(&own, &reply(flags, 12, 256)), Ok(()), "another pace");
        assert_eq!(can_serve(&own, &reply(flags, 128, 32)), Ok(()), "smaller requests");
        assert_eq!(can_serve(&reply(flags, 128, 255), &own), Ok(()), "as much as workers once asked for");
        assert!(can_serve(&own, &reply(flags, 128, 512)).unwrap_err().contains("less room"));
        assert!(can_serve(&own, &reply(F::FUSE_ASYNC_READ, 128, 256)).unwrap_err().contains("another way"));
    }
}
