//! The node's allow-list: which sources and endpoints may be used at all.

use crate::{EndpointPattern, Parameters, SourceUrl};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Sources are matched by prefix after normalisation; an entry ending in `*` matches any continuation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct AllowList {
    /// `s3://*`, `s3://team-a-*`, `oss://bucket/prefix/`, `hdfs://nameservice/team-a`, `https://data.example.com/sets`. Empty: no source but directories is allowed.
    pub sources: Vec<String>,
    /// `https://*.example.com`, `http://127.0.0.1:9000`. A volume without `endpoint` uses the cloud's own and needs no entry.
    pub endpoints: Vec<EndpointPattern>,
    /// Directories below which `file://` sources may lie. Empty: none.
    pub roots: Vec<PathBuf>,
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NotAllowed {
    #[error("source {0} is not in this node's allow-list: ask the platform team to add it to allow.sources")]
    Source(String),
    #[error(
        "directory {0} is not below a root that this node allows: ask the platform team to add it to allow.roots"
    )]
    Root(String),
    #[error(
        "endpoint {0} is not in this node's allow-list: ask the platform team to add it to allow.endpoints"
    )]
    Endpoint(String),
}

impl AllowList {
    pub fn check(&self, source: &SourceUrl, parameters: &Parameters) -> Result<(), NotAllowed> {
        match source {
            SourceUrl::S3 { .. }
            | SourceUrl::Oss { .. }
            | SourceUrl::Gcs { .. }
            | SourceUrl::Azure { .. } => {
                let text = source.to_string();
                if !self.sources.iter().any(|entry| covers(entry, &text)) {
                    return Err(NotAllowed::Source(text));
                }
                match &parameters.endpoint {
                    Some(endpoint) if !self.endpoints.iter().any(|entry| entry.covers(endpoint)) => {
                        Err(NotAllowed::Endpoint(endpoint.to_string()))
                    }
                    _ => Ok(()),
                }
            }
            SourceUrl::Hdfs { .. } => {
                if parameters.name_nodes.is_empty() {
                    return self.hdfs(&source.to_string());
                }
                parameters.name_nodes.iter().try_for_each(|address| self.name_node(source, address))
            }
            SourceUrl::Web { .. } => {
                let text = source.to_string();
                match self.sources.iter().any(|entry| covers_web(entry, &text)) {
                    true => Ok(()),
                    false => Err(NotAllowed::Source(text)),
                }
            }
            // Path::starts_with compares whole components: /data does not cover /database.
            SourceUrl::Dir { path } => match self.roots.iter().any(|root| path.starts_with(root)) {
                true => Ok(()),
                false => Err(NotAllowed::Root(path.display().to_string())),
            },
        }
    }

    /// May a volume read this source of this NameNode (`host:port`), which it lists itself, or its Secret does? What they call
    /// the name service says nothing then: it could be any other's.
    pub fn name_node(&self, source: &SourceUrl, address: &str) -> Result<(), NotAllowed> {
        match source {
            SourceUrl::Hdfs { prefix, .. } => self.hdfs(&format!("hdfs://{address}/{prefix}")),
            other => Err(NotAllowed::Source(other.to_string())),
        }
    }

    fn hdfs(&self, source: &str) -> Result<(), NotAllowed> {
        match self.sources.iter().any(|entry| covers_web(entry, source)) {
            true => Ok(()),
            false => Err(NotAllowed::Source(source.to_owned())),
        }
    }
}

/// `s3://b` covers `s3://b/x/` but not `s3://bb/`; `s3://b*` covers both.
fn covers(entry: &str, text: &str) -> bool {
    match entry.strip_suffix('*') {
        Some(prefix) => text.starts_with(prefix),
        None => {
            let entry = entry.trim_end_matches('/');
            text.strip_prefix(entry).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        }
    }
}

/// The same, but that no star stands for a part of a host: `https://data.example.com*` would cover
/// `https://data.example.com.elsewhere.net`.
fn covers_web(entry: &str, text: &str) -> bool {
    let is_whole = |(_, rest): (&str, &str)| rest == "*" || rest.contains('/') || !rest.contains('*');
    entry.split_once("://").is_some_and(is_whole) && covers(entry, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_star_of_an_entry_is_a_part_of_a_host() {
        let host = "https://data.example.com/sets/";
        for entry in [
            "https://data.example.com",
            "https://data.example.com/",
            "https://data.example.com/s*",
            "https://*",
        ] {
            assert!(covers_web(entry, host), "{entry}");
        }
        for entry in
            ["https://data*", "https://data.example.com*", "https://data.example.com/set", "http://*", "*"]
        {
            assert!(!covers_web(entry, host), "{entry}");
        }
    }

    #[test]
    fn entries_match_whole_segments_unless_starred() {
        assert!(covers("s3://b", "s3://b/x/"));
        assert!(!covers("s3://b", "s3://bb/x/"));
        assert!(covers("s3://b*", "s3://bb/x/"));
    }

    #[test]
    fn endpoints_are_allowed_by_pattern() {
        let list = |entries: &[&str]| AllowList {
            sources: vec!["s3://*".into()],
            endpoints: entries.iter().map(|entry| EndpointPattern::parse(entry).unwrap()).collect(),
            roots: Vec::new(),
        };
        let source = SourceUrl::parse("s3://bucket").unwrap();
        let at = |endpoint: &str| Parameters {
            endpoint: Some(url::Url::parse(endpoint).unwrap()),
            ..Parameters::default()
        };
        let domain = list(&["https://*.example.com"]);
        assert!(domain.check(&source, &at("https://s3.example.com")).is_ok());
        assert!(domain.check(&source, &at("https://example.com")).is_err());
        assert!(domain.check(&source, &Parameters::default()).is_ok());
    }

    #[test]
    fn name_nodes_that_a_volume_lists_are_what_is_allowed_and_not_its_name_for_them() {
        let of = |sources: &[&str]| AllowList {
            sources: sources.iter().map(|&one| one.to_owned()).collect(),
            ..AllowList::default()
        };
        let list = of(&[
            "hdfs://prod/public",
            "hdfs://a.corp:8020/public",
            "hdfs://b.corp:8020/public",
            "hdfs://nn*",
        ]);
        let check = |list: &AllowList, source: &str, name_nodes: &[&str]| {
            let name_nodes = name_nodes.iter().map(|&one| one.to_owned()).collect();
            let parameters = Parameters { name_nodes, ..Parameters::default() };
            list.check(&SourceUrl::parse(source).unwrap(), &parameters)
        };
        assert_eq!(check(&list, "hdfs://prod/public/a", &[]), Ok(()));
        assert_eq!(check(&list, "hdfs://any/public/a", &["a.corp:8020", "b.corp:8020"]), Ok(()));
        for (source, name_nodes) in [
            ("hdfs://prod/publics", &[][..]),
            ("hdfs://prod", &[]),
            ("hdfs://nn1/x", &[]),
            ("hdfs://prod/public", &["c.corp:8020"]),
            ("hdfs://prod/public", &["a.corp:8020", "c.corp:8020"]),
            ("hdfs://prod/public", &["a.corp:8021"]),
            ("hdfs://prod/public", &["a.corp.evil.org:8020"]),
            ("hdfs://prod/secret", &["a.corp:8020"]),
        ] {
            check(&list, source, name_nodes).expect_err(source);
        }
        assert_eq!(check(&of(&["hdfs://*"]), "hdfs://any/x", &["a.corp:1"]), Ok(()));
    }

    #[test]
    fn empty_list_allows_nothing() {
        let none = AllowList::default();
        for source in ["s3://bucket", "https://host/x", "hdfs://host/x", "file:///data"] {
            let source = SourceUrl::parse(source).unwrap();
            assert!(none.check(&source, &Parameters::default()).is_err());
        }
        let roots = AllowList { roots: vec!["/data".into()], ..none };
        let check = |s: &str| roots.check(&SourceUrl::parse(s).unwrap(), &Parameters::default());
        assert!(check("file:///data/x").is_ok());
        assert!(check("file:///database").is_err());
    }
}
