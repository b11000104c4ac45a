//! Owner and mode of a file, as its source tells them.

/// Who owns a file at its source, and what its mode lets whom do there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Permissions {
    /// The lowest nine bits of st_mode.
    pub mode: u16,
    /// None: the source has a name for the owner that stands for no number here.
    pub uid: Option<u32>,
    pub gid: Option<u32>,
}

impl Permissions {
    /// What no id is, for chown(2).
    pub const NO_ID: u32 = u32::MAX;

    /// Setuid, setgid, sticky and the kind of file are left out, for no source may bring a program to more rights; so is an
    /// id that no user has.
    pub fn of(mode: u32, uid: Option<u32>, gid: Option<u32>) -> Self {
        let id = |id: Option<u32>| id.filter(|id| *id != Self::NO_ID);
        Self { mode: (mode & 0o777) as u16, uid: id(uid), gid: id(gid) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_taken_over_that_gives_rights() {
        let odd = Permissions::of(0o107_4755, Some(u32::MAX), Some(0));
        assert_eq!(odd, Permissions { mode: 0o755, uid: None, gid: Some(0) });
    }
}
