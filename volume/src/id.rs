//! Volume ids: what CSI calls `volume_id`, restricted to what is safe as a file name and in a mount table.

use serde::{Deserialize, Serialize};

/// 1 to 128 characters of `[A-Za-z0-9._-]`, not starting with a dot.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VolumeId(String);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("volume id {0:?} is not valid: use 1 to 128 characters of A-Z a-z 0-9 . _ - and no leading dot")]
pub struct BadVolumeId(String);

impl VolumeId {
    pub fn parse(text: &str) -> Result<Self, BadVolumeId> {
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if text.is_empty() || text.len() > 128 || text.starts_with('.') || !text.chars().all(legal) {
            return Err(BadVolumeId(text.chars().take(160).collect()));
        }
        Ok(Self(text.to_owned()))
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for VolumeId {
    type Error = BadVolumeId;
    fn try_from(text: String) -> Result<Self, BadVolumeId> {
        Self::parse(&text)
    }
}
impl From<VolumeId> for String {
    fn from(id: VolumeId) -> String {
        id.0
    }
}
impl std::fmt::Display for VolumeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_that_are_unsafe_as_file_names_are_refused() {
        for bad in ["", ".", "..", ".x", "a/b", "a b", "a\n", &"x".repeat(129)] {
            assert!(VolumeId::parse(bad).is_err(), "{bad:?}");
        }
        for good in ["pvc-1", "a.b_c", &"x".repeat(128)] {
            assert!(VolumeId::parse(good).is_ok(), "{good:?}");
        }
    }
}
