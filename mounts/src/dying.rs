//! Whether a thread is being killed, read from its signal masks (`proc_pid_status(5)`).

/// Decides on the text of `/proc/<tid>/status`. Text that cannot be understood counts as alive: an EINTR given by
/// mistake would fail an application's call.
pub(crate) fn is_dying(status: &str) -> bool {
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        u64::from_str_radix(line.trim(), 16).ok()
    };
    let masks = (mask("SigPnd"), mask("ShdPnd"), mask("SigBlk"), mask("SigIgn"), mask("SigCgt"));
    let (Some(own), Some(shared), Some(blocked), Some(ignored), Some(caught)) = masks else { return false };
    let pending = own | shared;
    if pending & bit(libc::SIGKILL) != 0 {
        return true;
    }
    pending & !blocked & !ignored & !caught & !HARMLESS != 0
}

const fn bit(signal: i32) -> u64 {
    1 << (signal - 1)
}

/// Signals whose default is to be ignored, to stop or to continue: `signal(7)`.
const HARMLESS: u64 = bit(libc::SIGCHLD)
    | bit(libc::SIGURG)
    | bit(libc::SIGWINCH)
    | bit(libc::SIGCONT)
    | bit(libc::SIGSTOP)
    | bit(libc::SIGTSTP)
    | bit(libc::SIGTTIN)
    | bit(libc::SIGTTOU);

#[cfg(test)]
mod tests {
    use super::*;

    fn status(own: u64, shared: u64, blocked: u64, ignored: u64, caught: u64) -> String {
        format!(
            "Name:\tx\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\nSigBlk:\t{blocked:016x}\nSigIgn:\t{ignored:016x}\nSigCgt:\t{caught:016x}\n"
        )
    }

    #[test]
    fn only_what_kills_counts() {
        let (term, alarm, child) = (bit(libc::SIGTERM), bit(libc::SIGALRM), bit(libc::SIGCHLD));
        assert!(is_dying(&status(bit(libc::SIGKILL), 0, 0, 0, 0)));
        assert!(is_dying(&status(0, bit(libc::SIGKILL), u64::MAX, 0, 0)));
        assert!(is_dying(&status(0, term, 0, 0, 0)));
        assert!(!is_dying(&status(0, term, term, 0, 0)), "blocked");
        assert!(!is_dying(&status(0, term, 0, term, 0)), "ignored");
        assert!(!is_dying(&status(0, alarm, 0, 0, alarm)), "caught");
        assert!(!is_dying(&status(0, child, 0, 0, 0)), "harmless by default");
        assert!(!is_dying(&status(bit(libc::SIGSTOP), 0, 0, 0, 0)));
        assert!(is_dying(&status(1 << 63, 0, 0, 0, 0)), "real-time signals end a process by default");
        assert!(!is_dying("SigPnd: what"));
        assert!(!is_dying(""));
    }
}
