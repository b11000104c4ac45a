//! What becomes of a volume's directory when the volume is deleted.

/// Said by a class, for the controller. It is no field of [`crate::Parameters`]: no node has a use for it, and no mount is
/// another one with it. [`crate::Parameters::parse`] has checked that the volume may have it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDelete {
    #[default]
    Retain,
    /// All that is below it goes.
    Delete,
}

impl OnDelete {
    /// As a class writes it.
    pub fn of(value: &str) -> Option<Self> {
        match value {
            "retain" => Some(Self::Retain),
            "delete" => Some(Self::Delete),
            _ => None,
        }
    }
}
