//! Which addresses are asked: HDFS names its DataNodes by address, and a user's `krb5.conf` its KDCs, so that both could
//! send this process anywhere. The agent says which networks are not for stores.
//!
//! Every connection of this process, the library's and those of Kerberos' C code, is made by one function of the C
//! library's, which is replaced here. (That is no border for code that somebody has taken over; it is one for what
//! servers and users say.) The C library's own resolver does not come by.

use hdfs::Network;
use libc::{c_int, sockaddr, sockaddr_in, sockaddr_in6, socklen_t};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Mutex, OnceLock, PoisonError};

static RULES: OnceLock<Rules> = OnceLock::new();
/// The last address that was refused since somebody asked.
static LAST: Mutex<Option<IpAddr>> = Mutex::new(None);

/// See [`hdfs::Configure`].
pub(crate) struct Rules {
    pub(crate) refused: Vec<Network>,
    pub(crate) own: Vec<Network>,
    pub(crate) meant: Vec<Network>,
}

/// Once, before anything is connected.
pub(crate) fn enforce(rules: Rules) {
    let _ = RULES.set(rules); // there is one configuration
    // SAFETY: nothing is called; the symbol's object must be part of the link.
    std::hint::black_box(connect as *const ());
}

/// What was refused since the last look; another question may have asked for it.
pub(crate) fn last_refused() -> Option<IpAddr> {
    LAST.lock().unwrap_or_else(PoisonError::into_inner).take()
}

fn is_refused(address: IpAddr) -> bool {
    // IPv4 in IPv6's clothes is what it is to the kernel.
    let address = address.to_canonical();
    let in_one = |networks: &[Network]| networks.iter().any(|network| network.contains(address));
    RULES.get().is_none_or(|rules| in_one(&rules.refused) || in_one(&rules.own) && !in_one(&rules.meant))
}

/// None: no address of IP's.
///
/// # Safety
/// `length` bytes at `address` can be read.
unsafe fn ip(address: *const sockaddr, length: socklen_t) -> Option<IpAddr> {
    let length = length as usize;
    if address.is_null() || length < size_of::<libc::sa_family_t>() {
        return None;
    }
    // SAFETY: it is long enough for what every address begins with; nothing is assumed of its alignment.
    let family = c_int::from(unsafe { (&raw const (*address).sa_family).read_unaligned() });
    match family {
        libc::AF_INET if length >= size_of::<sockaddr_in>() => {
            // SAFETY: it is long enough.
            let address = unsafe { address.cast::<sockaddr_in>().read_unaligned() };
            Some(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)).into())
        }
        libc::AF_INET6 if length >= size_of::<sockaddr_in6>() => {
            // SAFETY: it is long enough.
            let address = unsafe { address.cast::<sockaddr_in6>().read_unaligned() };
            Some(Ipv6Addr::from(address.sin6_addr.s6_addr).into())
        }
        _ => None,
    }
}

/// libc's `connect`, but for addresses that are refused.
///
/// # Safety
/// As for libc's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn connect(socket: c_int, address: *const sockaddr, length: socklen_t) -> c_int {
    // SAFETY: as this function's caller says.
    if let Some(refused) = unsafe { ip(address, length) }.filter(|address| is_refused(*address)) {
        *LAST.lock().unwrap_or_else(PoisonError::into_inner) = Some(refused);
        // SAFETY: errno is this thread's.
        unsafe { *libc::__errno_location() = libc::EACCES };
        return -1;
    }
    // SAFETY: forwarded as it came.
    unsafe { libc::syscall(libc::SYS_connect, socket, address, length) as c_int }
}
