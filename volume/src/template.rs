//! The `path` parameter: a directory below the source, with values of the claim filled in.

/// What the provisioner knows of the claim (`--extra-create-metadata`).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TemplateValues {
    pub pvc_name: Option<String>,
    pub pvc_namespace: Option<String>,
    pub pv_name: Option<String>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TemplateError {
    #[error(
        "path template has an unknown variable ${{{0}}}: use ${{pvc.name}}, ${{pvc.namespace}} or ${{pv.name}}"
    )]
    Unknown(String),
    #[error("path template has '${{' without '}}': {0:?}")]
    Unclosed(String),
    #[error(
        "path template needs ${{{0}}}, which is empty or was not passed on: run the provisioner with --extra-create-metadata"
    )]
    Empty(&'static str),
    #[error(
        "value {value:?} of ${{{variable}}} would leave the source: it must be one path segment, not '', '.' or '..', without '/'"
    )]
    Escapes { variable: &'static str, value: String },
    #[error("path {0:?} would leave the source: it must be relative, without empty, '.' or '..' segments")]
    Path(String),
}

/// `team/${pvc.namespace}/${pvc.name}` with values filled in: a relative path that stays below the source.
pub fn expand_path(template: &str, values: &TemplateValues) -> Result<String, TemplateError> {
    let mut path = String::new();
    let mut rest = template;
    while let Some(start) = rest.find("${") {
        path.push_str(&rest[..start]);
        let after = &rest[start + 2..];
        let end = after.find('}').ok_or_else(|| TemplateError::Unclosed(template.to_owned()))?;
        let (variable, value): (&'static str, _) = match &after[..end] {
            "pvc.name" => ("pvc.name", &values.pvc_name),
            "pvc.namespace" => ("pvc.namespace", &values.pvc_namespace),
            "pv.name" => ("pv.name", &values.pv_name),
            other => return Err(TemplateError::Unknown(other.to_owned())),
        };
        let value = value.as_deref().filter(|v| !v.is_empty()).ok_or(TemplateError::Empty(variable))?;
        if matches!(value, "." | "..") || value.contains(['/', '\0']) {
            return Err(TemplateError::Escapes { variable, value: value.to_owned() });
        }
        path.push_str(value);
        rest = &after[end + 1..];
    }
    path.push_str(rest);
    let path = path.strip_suffix('/').unwrap_or(&path);
    if path.split('/').any(|s| matches!(s, "" | "." | "..")) && !path.is_empty() || path.contains('\0') {
        return Err(TemplateError::Path(path.to_owned()));
    }
    Ok(path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values(name: &str) -> TemplateValues {
        TemplateValues { pvc_name: Some(name.into()), pvc_namespace: Some("team".into()), pv_name: None }
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

    proptest! {
        #[test]
        fn no_value_escapes_the_source(template in "[a./$-]{0,12}(\\$\\{pvc.name\\})?[a./]{0,6}", name in ".{0,8}") {
            if let Ok(path) = expand_path(&template, &values(&name)) {
                prop_assert!(!path.starts_with('/'));
                prop_assert!(path.is_empty() || path.split('/').all(|s| !matches!(s, "" | "." | "..")));
            }
        }
    }
}
