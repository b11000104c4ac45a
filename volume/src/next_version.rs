//! For tests of upgrades: what only the next version knows of a volume, one thing of each kind. A parameter that may be
//! ignored (`nextHint`) and one that may not (`nextRule`), a value (profile `next`, served as `large`) and a scheme
//! (`next:///dir`, served as a directory).

use std::borrow::Cow;

pub(crate) const PARAMETERS: &[&str] = &["nextHint", "nextRule"];
/// Of those.
pub(crate) const HINTS: &[&str] = &["nextHint"];

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Later {
    hint: Option<String>,
    rule: Option<String>,
    has_profile: bool,
    has_scheme: bool,
}

impl Later {
    /// What a parameter's value is to the version before. None: nothing.
    pub(crate) fn value<'t>(&mut self, name: &str, value: &'t str) -> Option<&'t str> {
        match (name, value) {
            ("nextHint", _) => self.hint = Some(value.to_owned()),
            ("nextRule", _) => self.rule = Some(value.to_owned()),
            ("profile", "next") => {
                self.has_profile = true;
                return Some("large");
            }
            _ => return Some(value),
        }
        None
    }

    /// Adds to `Parameters::chosen`.
    pub(crate) fn say(&self, mut chosen: Vec<(&'static str, String)>) -> Vec<(&'static str, String)> {
        if self.has_profile {
            chosen.retain(|(name, _)| *name != "profile");
            chosen.push(("profile", "next".to_owned()));
        }
        chosen.extend(self.hint.clone().map(|hint| ("nextHint", hint)));
        chosen.extend(self.rule.clone().map(|rule| ("nextRule", rule)));
        chosen
    }

    /// What the text of a source is to the version before.
    pub(crate) fn source<'t>(&mut self, text: &'t str) -> Cow<'t, str> {
        match text.strip_prefix("next://") {
            Some(rest) => {
                self.has_scheme = true;
                format!("file://{rest}").into()
            }
            None => text.into(),
        }
    }

    /// The inverse.
    pub(crate) fn shown(&self, source: String) -> String {
        match source.strip_prefix("file://") {
            Some(rest) if self.has_scheme => format!("next://{rest}"),
            _ => source,
        }
    }
}
