//! What only a later version knows of a volume: nothing.
//!
//! A build for tests of upgrades has `next_version.rs` in this module's place, and differs from this one in nothing else
//! that this crate holds.

use std::borrow::Cow;

pub(crate) const PARAMETERS: &[&str] = &[];
/// Of those.
pub(crate) const HINTS: &[&str] = &[];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Later {}

impl Later {
    /// What a parameter's value is to the version before. None: nothing.
    pub(crate) fn value<'t>(&mut self, _name: &str, value: &'t str) -> Option<&'t str> {
        Some(value)
    }

    /// Adds to `Parameters::chosen`.
    pub(crate) fn say(&self, chosen: Vec<(&'static str, String)>) -> Vec<(&'static str, String)> {
        chosen
    }

    /// What the text of a source is to the version before.
    pub(crate) fn source<'t>(&mut self, text: &'t str) -> Cow<'t, str> {
        Cow::Borrowed(text)
    }

    /// The inverse.
    pub(crate) fn shown(&self, source: String) -> String {
        source
    }
}
