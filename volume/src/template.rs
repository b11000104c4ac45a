//! Templates in parameters: values of the claim filled in, so that one StorageClass serves many claims.
//!
//! `${pvc.name}`, `${pvc.namespace}`, `${pv.name}` and `${pvc.annotations['KEY']}`. Values are filled in once: what a
//! value holds is never a template itself.

use std::collections::BTreeMap;

/// What is known of the claim (`--extra-create-metadata`; annotations from the API server).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TemplateValues {
    pub pvc_name: Option<String>,
    pub pvc_namespace: Option<String>,
    pub pv_name: Option<String>,
    pub pvc_annotations: BTreeMap<String, String>,
}

/// Longest value that is filled in, bytes: S3 keys end at 1,024.
const VALUE_BYTES_MAX: usize = 1024;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TemplateError {
    #[error(
        "template has an unknown variable ${{{0}}}: use ${{pvc.name}}, ${{pvc.namespace}}, ${{pv.name}} or ${{pvc.annotations['KEY']}}"
    )]
    Unknown(String),
    #[error("template has '${{' without '}}': {0:?}")]
    Unclosed(String),
    #[error(
        "template needs ${{{0}}}, which is empty or was not passed on: run the provisioner with --extra-create-metadata"
    )]
    Empty(&'static str),
    #[error(
        "template needs annotation {key:?} of PersistentVolumeClaim {claim}, which is missing or empty: set it (kubectl annotate pvc) and the claim is tried again"
    )]
    NoAnnotation { key: String, claim: String },
    #[error(
        "template needs annotation {0:?} of a PersistentVolumeClaim, and there is none: static and inline volumes write the value itself"
    )]
    NoClaim(String),
    #[error("value {value:?} of ${{{variable}}} {why}")]
    Value { variable: String, value: String, why: &'static str },
    #[error(
        "value {value:?} of ${{{variable}}} would leave the source: it must be one path segment, not '', '.' or '..', without '/'"
    )]
    Escapes { variable: String, value: String },
    #[error("path {0:?} would leave the source: it must be relative, without empty, '.' or '..' segments")]
    Path(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Variable<'t> {
    PvcName,
    PvcNamespace,
    PvName,
    Annotation(&'t str),
}

impl<'t> Variable<'t> {
    fn parse(text: &'t str) -> Result<Self, TemplateError> {
        let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/');
        match text {
            "pvc.name" => Ok(Self::PvcName),
            "pvc.namespace" => Ok(Self::PvcNamespace),
            "pv.name" => Ok(Self::PvName),
            other => {
                let key = other.strip_prefix("pvc.annotations['").and_then(|rest| rest.strip_suffix("']"));
                let key = key.filter(|key| !key.is_empty() && key.chars().all(legal));
                key.map(Self::Annotation).ok_or_else(|| TemplateError::Unknown(other.to_owned()))
            }
        }
    }

    fn name(self) -> String {
        match self {
            Self::PvcName => "pvc.name".into(),
            Self::PvcNamespace => "pvc.namespace".into(),
            Self::PvName => "pv.name".into(),
            Self::Annotation(key) => format!("pvc.annotations['{key}']"),
        }
    }

    fn value(self, values: &TemplateValues) -> Result<&str, TemplateError> {
        let (value, missing) = match self {
            Self::PvcName => (values.pvc_name.as_ref(), TemplateError::Empty("pvc.name")),
            Self::PvcNamespace => (values.pvc_namespace.as_ref(), TemplateError::Empty("pvc.namespace")),
            Self::PvName => (values.pv_name.as_ref(), TemplateError::Empty("pv.name")),
            Self::Annotation(key) => (
                values.pvc_annotations.get(key),
                match &values.pvc_name {
                    None => TemplateError::NoClaim(key.to_owned()),
                    Some(name) => TemplateError::NoAnnotation {
                        key: key.to_owned(),
                        claim: format!("{}/{name}", values.pvc_namespace.as_deref().unwrap_or_default()),
                    },
                },
            ),
        };
        let value = value.filter(|v| !v.is_empty()).ok_or(missing)?;
        let wrong = |why| {
            let shown = value.chars().take(160).collect();
            Err(TemplateError::Value { variable: self.name(), value: shown, why })
        };
        if value.len() > VALUE_BYTES_MAX {
            return wrong("is longer than 1,024 bytes");
        }
        if value.chars().any(char::is_control) {
            return wrong("has control characters (a trailing newline?)");
        }
        if value.trim() != value {
            return wrong("begins or ends with a space");
        }
        if value.contains("${") {
            return wrong("is a template itself, which is not filled in: write the value");
        }
        Ok(value)
    }
}

enum Piece<'t> {
    Text(&'t str),
    Variable(Variable<'t>),
}

fn pieces(template: &str) -> Result<Vec<Piece<'_>>, TemplateError> {
    let mut pieces = Vec::new();
    let mut rest = template;
    while let Some(start) = rest.find("${") {
        pieces.push(Piece::Text(&rest[..start]));
        let after = &rest[start + 2..];
        let end = after.find('}').ok_or_else(|| TemplateError::Unclosed(template.to_owned()))?;
        pieces.push(Piece::Variable(Variable::parse(&after[..end])?));
        rest = &after[end + 1..];
    }
    pieces.push(Piece::Text(rest));
    Ok(pieces)
}

/// A parameter's value with everything filled in. What it then means is for the parameter's own parser to judge.
pub fn expand(template: &str, values: &TemplateValues) -> Result<String, TemplateError> {
    let mut text = String::new();
    for piece in pieces(template)? {
        text.push_str(match piece {
            Piece::Text(plain) => plain,
            Piece::Variable(variable) => variable.value(values)?,
        });
    }
    Ok(text)
}

/// `team/${pvc.namespace}/${pvc.name}` with values filled in: a relative path that stays below the source. Names are
/// one segment each; an annotation may be several.
pub(crate) fn expand_path(template: &str, values: &TemplateValues) -> Result<String, TemplateError> {
    for piece in pieces(template)? {
        let Piece::Variable(variable) = piece else { continue };
        let value = variable.value(values)?;
        let one_segment = !matches!(variable, Variable::Annotation(_));
        if matches!(value, "." | "..") || value.contains('\0') || (one_segment && value.contains('/')) {
            return Err(TemplateError::Escapes { variable: variable.name(), value: value.to_owned() });
        }
    }
    let path = expand(template, values)?;
    let path = path.strip_suffix('/').unwrap_or(&path);
    if path.split('/').any(|s| matches!(s, "" | "." | "..")) && !path.is_empty() || path.contains('\0') {
        return Err(TemplateError::Path(path.to_owned()));
    }
    Ok(path.to_owned())
}

/// Does any parameter use an annotation, so that the claim must be looked at?
pub fn uses_annotations<'p>(values: impl IntoIterator<Item = &'p str>) -> Result<bool, TemplateError> {
    for value in values {
        if has(value, |v| matches!(v, Variable::Annotation(_)))? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Does the author of the claim choose what is mounted? An annotation in source or path does that, and so does the
/// claim's name in the source. (A name in the path is one segment below a source that the class chose.)
pub fn claim_chooses(source: Option<&str>, path: Option<&str>) -> Result<bool, TemplateError> {
    let by_source = |v: Variable<'_>| matches!(v, Variable::Annotation(_) | Variable::PvcName);
    let by_path = |v: Variable<'_>| matches!(v, Variable::Annotation(_));
    Ok(has(source.unwrap_or_default(), by_source)? || has(path.unwrap_or_default(), by_path)?)
}

/// Has each volume a directory that no other one has? Of one cluster, a claim's namespace and name together name it, and so
/// does a PersistentVolume's name alone; each in a segment without another variable, for two values may be put together
/// to the same text in two ways.
pub(crate) fn is_private(source: &str, path: &str) -> Result<bool, TemplateError> {
    let (mut by_volume, mut by_namespace, mut by_name) = (false, false, false);
    let mut close = |segment: &mut Vec<Variable<'_>>| {
        match segment[..] {
            [Variable::PvName] => by_volume = true,
            [Variable::PvcNamespace] => by_namespace = true,
            [Variable::PvcName] => by_name = true,
            _ => {}
        }
        segment.clear();
    };
    for template in [source, path] {
        let mut segment = Vec::new();
        for piece in pieces(template)? {
            match piece {
                Piece::Text(text) => text.matches('/').for_each(|_| close(&mut segment)),
                Piece::Variable(variable) => segment.push(variable),
            }
        }
        close(&mut segment);
    }
    Ok(by_volume || by_namespace && by_name)
}

fn has(template: &str, what: impl Fn(Variable<'_>) -> bool) -> Result<bool, TemplateError> {
    Ok(pieces(template)?.iter().any(|piece| matches!(piece, Piece::Variable(v) if what(*v))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values(name: &str) -> TemplateValues {
        TemplateValues {
            pvc_name: Some(name.into()),
            pvc_namespace: Some("team".into()),
            ..TemplateValues::default()
        }
    }

    fn annotated(key: &str, value: &str) -> TemplateValues {
        TemplateValues { pvc_annotations: BTreeMap::from([(key.into(), value.into())]), ..values("claim") }
    }

    #[test]
    fn templates_fill_in_and_refuse() {
        assert_eq!(expand_path("d/${pvc.namespace}/${pvc.name}/", &values("x")), Ok("d/team/x".into()));
        assert_eq!(expand_path("", &values("x")), Ok("".into()));
        assert!(matches!(expand_path("${pvc.nam}", &values("x")), Err(TemplateError::Unknown(_))));
        assert!(matches!(expand_path("${pvc.name", &values("x")), Err(TemplateError::Unclosed(_))));
        assert!(matches!(expand_path("${pv.name}", &values("x")), Err(TemplateError::Empty("pv.name"))));
        assert!(matches!(expand_path("a/${pvc.name}", &values("..")), Err(TemplateError::Escapes { .. })));
        for path in ["/abs", "a//b", "../x", "a/../b", "a/."] {
            assert!(matches!(expand_path(path, &values("x")), Err(TemplateError::Path(_))), "{path}");
        }
        // Two harmless halves must not meet as "..".
        assert!(expand_path("a/.${pvc.name}", &values(".")).is_err());
    }

    #[test]
    fn annotations_are_filled_in_and_a_missing_one_names_itself_and_the_claim() {
        let template = "s3://data/${pvc.annotations['millpond.io/set']}";
        assert!(uses_annotations([template]).unwrap());
        assert_eq!(expand(template, &annotated("millpond.io/set", "a/b")), Ok("s3://data/a/b".into()));
        for missing in [annotated("other", "x"), annotated("millpond.io/set", "")] {
            let error = expand(template, &missing).unwrap_err().to_string();
            assert!(error.contains("\"millpond.io/set\"") && error.contains("team/claim"), "{error}");
        }
        assert!(matches!(expand(template, &TemplateValues::default()), Err(TemplateError::NoClaim(_))));
        for value in ["a\n", " a", "${pvc.name}", &"x".repeat(1025)] {
            let found = expand(template, &annotated("millpond.io/set", value));
            assert!(matches!(found, Err(TemplateError::Value { .. })), "{value:?}");
        }
        for wrong in ["${pvc.annotations[k]}", "${pvc.annotations['']}", "${pvc.annotations['a b']}"] {
            assert!(matches!(expand(wrong, &values("x")), Err(TemplateError::Unknown(_))), "{wrong}");
        }
        let path = "d/${pvc.annotations['p']}";
        assert_eq!(expand_path(path, &annotated("p", "a/b")), Ok("d/a/b".into()));
        for value in ["..", "../x", "a/../../x", "/a", "a//b", "./a"] {
            assert!(expand_path(path, &annotated("p", value)).is_err(), "{value}");
        }
    }

    #[test]
    fn what_the_claim_chooses_is_known() {
        let chooses = |source, path| claim_chooses(Some(source), path).unwrap();
        assert!(chooses("${pvc.annotations['x']}", None));
        assert!(chooses("s3://b/${pvc.name}", None));
        assert!(chooses("s3://b", Some("${pvc.annotations['x']}")));
        assert!(!chooses("s3://b/${pvc.namespace}", Some("${pvc.name}")));
    }

    #[test]
    fn a_directory_of_ones_own_is_known_by_its_template() {
        for path in [
            "${pv.name}",
            "a/x-${pv.name}/b",
            "${pvc.annotations['a/b']}/${pv.name}",
            "${pvc.name}/a/${pvc.namespace}",
        ] {
            assert!(is_private("s3://b/a", path).unwrap(), "{path}");
        }
        assert!(is_private("s3://${pvc.namespace}", "${pvc.name}").unwrap());
        for path in [
            "",
            "pv.name",
            "${pvc.namespace}/${pvc.namespace}",
            "${pvc.annotations['a/b']}${pv.name}",
            "${pvc.annotations['${pv.name}']}",
            "${pvc.namespace}-${pvc.name}",
            "${pvc.namespace}/${pvc.name}-${pvc.namespace}",
        ] {
            assert!(!matches!(is_private("s3://b/a", path), Ok(true)), "{path}");
        }
    }

    proptest! {
        /// Two claims never have one directory, nor one that lies in the other's.
        #[test]
        fn private_directories_are_apart(
            template in "(\\$\\{pvc\\.name\\}|\\$\\{pvc\\.namespace\\}|\\$\\{pv\\.name\\}|[a/-]){1,6}",
            names in ("[a-b-]{1,3}", "[a-b-]{1,3}"), others in ("[a-b-]{1,3}", "[a-b-]{1,3}"),
        ) {
            let of = |(namespace, name): &(String, String), volume: &str| TemplateValues {
                pvc_name: Some(name.clone()), pvc_namespace: Some(namespace.clone()),
                pv_name: Some(volume.into()), pvc_annotations: BTreeMap::new(),
            };
            let expand = |values: &TemplateValues| expand_path(&template, values).map(|path| format!("{path}/"));
            if names != others
                && is_private("s3://b", &template).unwrap()
                && let (Ok(one), Ok(other)) = (expand(&of(&names, "pvc-1")), expand(&of(&others, "pvc-2")))
            {
                prop_assert!(!one.starts_with(&other) && !other.starts_with(&one), "{one} {other}");
            }
        }

        #[test]
        fn no_value_escapes_the_source(
            template in "[a./$-]{0,12}(\\$\\{pvc.name\\}|\\$\\{pvc.annotations\\['k'\\]\\})?[a./]{0,6}",
            name in ".{0,8}",
            annotation in "[a./%\\\\]{0,8}",
        ) {
            let values = TemplateValues { pvc_name: Some(name), ..annotated("k", &annotation) };
            if let Ok(path) = expand_path(&template, &values) {
                prop_assert!(!path.starts_with('/'));
                prop_assert!(path.is_empty() || path.split('/').all(|s| !matches!(s, "" | "." | "..")));
            }
        }
    }
}
