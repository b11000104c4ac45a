//! Where a volume's bytes live.

use std::path::{Component, Path, PathBuf};
use url::Url;

/// A parsed `source` parameter. More schemes are more variants: the compiler then finds every place that must know them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceUrl {
    /// `s3://bucket/prefix`; `prefix` is "" or ends in "/".
    S3 { bucket: String, prefix: String },
    /// `oss://bucket/prefix`, or with the endpoint in it: `oss://bucket.oss-cn-shanghai.aliyuncs.com/prefix`.
    Oss { bucket: String, host: Option<String>, prefix: String },
    /// `file:///dir`, an absolute, normalised path.
    Dir { path: PathBuf },
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SourceError {
    #[error("source {0:?} is not a URL: write s3://bucket/prefix, oss://bucket/prefix or file:///directory")]
    NotAUrl(String),
    #[error("source scheme {0:?} is not supported: use s3://, oss:// or file://")]
    Scheme(String),
    #[error("source {0:?} names no bucket: write s3://bucket/prefix or oss://bucket/prefix")]
    NoBucket(String),
    #[error(
        "source {0:?} names an endpoint that is none of OSS's: write oss://bucket.oss-REGION.aliyuncs.com/prefix, or \
         oss://bucket/prefix and set 'endpoint'"
    )]
    Host(String),
    #[error(
        "source {0:?} is in OSS-HDFS, whose protocol is not open: only Alibaba's own clients can read it. Use a bucket without \
         OSS-HDFS, or its HDFS interface"
    )]
    OssHdfs(String),
    #[error("bucket name {0:?} is not valid: 3 to 63 characters of a-z 0-9 . -")]
    Bucket(String),
    #[error("source {0:?} must be an absolute path without '..': write file:///directory")]
    Path(String),
    #[error("source prefix {0:?} has an empty, '.' or '..' segment, which no path can name")]
    Prefix(String),
    #[error(
        "source {0:?} carries a user, password, port, query or fragment: put credentials into the secret and the address into 'endpoint'"
    )]
    Extras(String),
}

impl SourceUrl {
    pub fn parse(text: &str) -> Result<Self, SourceError> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| SourceError::NotAUrl(redact(text)))?;
        match scheme {
            "s3" | "s3a" | "oss" if rest.contains(['@', '?', '#']) => Err(SourceError::Extras(redact(text))),
            "s3" | "s3a" => Self::parse_s3(text, rest),
            "oss" => Self::parse_oss(text, rest),
            "file" => Ok(Self::Dir { path: directory(text, rest)? }),
            other => Err(SourceError::Scheme(other.chars().take(80).collect())),
        }
    }

    /// The inverse of `Display`: what [`Self::join`] has appended may hold characters that mean something else in a URL
    /// that a person writes.
    pub(crate) fn parse_shown(text: &str) -> Result<Self, SourceError> {
        match text.split_once("://") {
            Some(("s3", rest)) => Self::parse_s3(text, rest),
            Some(("oss", rest)) => Self::parse_oss(text, rest),
            _ => Self::parse(text),
        }
    }

    fn parse_s3(text: &str, rest: &str) -> Result<Self, SourceError> {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(SourceError::NoBucket(text.to_owned()));
        }
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '.' | '-');
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(legal) || bucket.contains("..") {
            return Err(SourceError::Bucket(bucket.to_owned()));
        }
        Ok(Self::S3 { bucket: bucket.to_owned(), prefix: directory_prefix(prefix)? })
    }

    fn parse_oss(text: &str, rest: &str) -> Result<Self, SourceError> {
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let (bucket, host) = match authority.split_once('.') {
            Some((bucket, host)) => (bucket, Some(host)),
            None => (authority, None),
        };
        if bucket.is_empty() {
            return Err(SourceError::NoBucket(text.to_owned()));
        }
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if !(3..=63).contains(&bucket.len()) || !bucket.chars().all(plain) {
            return Err(SourceError::Bucket(bucket.to_owned()));
        }
        if let Some(host) = host {
            if host.contains("oss-dls") {
                return Err(SourceError::OssHdfs(text.to_owned()));
            }
            // One label: further down begin the hosts of other people's buckets.
            let label = host.strip_suffix(".aliyuncs.com").filter(|label| label.starts_with("oss-"));
            if !label.is_some_and(|label| label.chars().all(plain)) {
                return Err(SourceError::Host(text.to_owned()));
            }
        }
        let (bucket, host) = (bucket.to_owned(), host.map(str::to_owned));
        Ok(Self::Oss { bucket, host, prefix: directory_prefix(prefix)? })
    }

    /// The endpoint that is a part of it.
    pub fn endpoint(&self) -> Option<Url> {
        match self {
            Self::Oss { host: Some(host), .. } => Url::parse(&format!("https://{host}")).ok(),
            Self::S3 { .. } | Self::Oss { .. } | Self::Dir { .. } => None,
        }
    }

    /// As it is written before "://".
    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            Self::S3 { .. } => "s3",
            Self::Oss { .. } => "oss",
            Self::Dir { .. } => "file",
        }
    }

    /// The source of the same kind that all others of it lie in, as far as that has a name.
    pub(crate) fn top(&self) -> String {
        match self {
            Self::S3 { bucket, .. } => format!("s3://{bucket}"),
            Self::Oss { bucket, host, .. } => format!("oss://{}", authority(bucket, host.as_deref())),
            Self::Dir { .. } => "file:///".to_owned(),
        }
    }

    /// Is this `other`, or below it? Whole segments are compared: `s3://b/team-b` does not lie in `s3://b/team`.
    pub(crate) fn lies_in(&self, other: &Self) -> bool {
        match (self, other) {
            // Prefixes are empty or end in a slash.
            (Self::S3 { bucket, prefix }, Self::S3 { bucket: other, prefix: above }) => {
                bucket == other && prefix.starts_with(above.as_str())
            }
            // A bucket of the same name at another endpoint is another bucket.
            (Self::Oss { bucket, host, prefix }, Self::Oss { bucket: other, host: at, prefix: above }) => {
                (bucket, host) == (other, at) && prefix.starts_with(above.as_str())
            }
            (Self::Dir { path }, Self::Dir { path: above }) => path.starts_with(above),
            (Self::S3 { .. } | Self::Oss { .. } | Self::Dir { .. }, _) => false,
        }
    }

    /// The source one directory deeper; `relative` was checked by `template::expand_path`.
    pub fn join(&self, relative: &str) -> Result<Self, SourceError> {
        if relative.is_empty() {
            return Ok(self.clone());
        }
        let below = directory_prefix(relative)?;
        Ok(match self {
            Self::S3 { bucket, prefix } => {
                Self::S3 { bucket: bucket.clone(), prefix: format!("{prefix}{below}") }
            }
            Self::Oss { bucket, host, prefix } => {
                Self::Oss { bucket: bucket.clone(), host: host.clone(), prefix: format!("{prefix}{below}") }
            }
            Self::Dir { path } => Self::Dir { path: path.join(below.trim_end_matches('/')) },
        })
    }
}

fn authority(bucket: &str, host: Option<&str>) -> String {
    host.map_or_else(|| bucket.to_owned(), |host| format!("{bucket}.{host}"))
}

/// An absolute path, normalised.
fn directory(text: &str, rest: &str) -> Result<PathBuf, SourceError> {
    let path = Path::new(rest);
    let plain = |c: Component<'_>| matches!(c, Component::RootDir | Component::Normal(_));
    if !path.is_absolute() || !path.components().all(plain) || rest.contains('\0') {
        return Err(SourceError::Path(text.to_owned()));
    }
    Ok(path.components().collect())
}

/// "" or a prefix ending in one slash, every segment nameable as a path component.
fn directory_prefix(prefix: &str) -> Result<String, SourceError> {
    let trimmed = prefix.strip_suffix('/').unwrap_or(prefix);
    if trimmed.is_empty() {
        return Ok(String::new());
    }
    if trimmed.split('/').any(|segment| matches!(segment, "" | "." | "..") || segment.contains('\0')) {
        return Err(SourceError::Prefix(prefix.to_owned()));
    }
    Ok(format!("{trimmed}/"))
}

/// A user may have pasted a password into the URL: keep it out of the message.
fn redact(text: &str) -> String {
    match (text.find("://"), text.rfind('@')) {
        (Some(start), Some(at)) if at > start => format!("{}://…{}", &text[..start], &text[at..]),
        _ => text.split(['?', '#']).next().unwrap_or_default().to_owned(),
    }
}

impl std::fmt::Display for SourceUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::S3 { bucket, prefix } => write!(f, "s3://{bucket}/{prefix}"),
            Self::Oss { bucket, host, prefix } => {
                write!(f, "oss://{}/{prefix}", authority(bucket, host.as_deref()))
            }
            Self::Dir { path } => write!(f, "file://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_round_trip_and_normalise() {
        for (text, shown) in [
            ("s3://bucket", "s3://bucket/"),
            ("s3://bucket/a/b", "s3://bucket/a/b/"),
            ("s3://bucket/a/", "s3://bucket/a/"),
            ("s3a://bucket/a", "s3://bucket/a/"),
            ("oss://bucket", "oss://bucket/"),
            ("oss://bucket/a/b", "oss://bucket/a/b/"),
            (
                "oss://a-b.oss-cn-shanghai-internal.aliyuncs.com/k8s_c1",
                "oss://a-b.oss-cn-shanghai-internal.aliyuncs.com/k8s_c1/",
            ),
            ("file:///data/set/", "file:///data/set"),
        ] {
            assert_eq!(SourceUrl::parse(text).map(|s| s.to_string()), Ok(shown.to_owned()));
        }
    }

    #[test]
    fn bad_sources_say_why() {
        assert!(matches!(SourceUrl::parse("bucket"), Err(SourceError::NotAUrl(_))));
        assert!(matches!(SourceUrl::parse("ftp://x/y"), Err(SourceError::Scheme(_))));
        assert!(matches!(SourceUrl::parse("s3:///x"), Err(SourceError::NoBucket(_))));
        assert!(matches!(SourceUrl::parse("s3://UPPER/x"), Err(SourceError::Bucket(_))));
        assert!(matches!(SourceUrl::parse("s3://bucket/a//b"), Err(SourceError::Prefix(_))));
        assert!(matches!(SourceUrl::parse("s3://bucket/../b"), Err(SourceError::Prefix(_))));
        assert!(matches!(SourceUrl::parse("oss:///x"), Err(SourceError::NoBucket(_))));
        assert!(matches!(SourceUrl::parse("oss://b_b/x"), Err(SourceError::Bucket(_))));
        assert!(matches!(SourceUrl::parse("oss://key@bucket/x"), Err(SourceError::Extras(_))));
        for dls in ["oss://b-1.cn-shanghai.oss-dls.aliyuncs.com/", "oss://b-1.oss-dls.aliyuncs.com/x"] {
            assert!(matches!(SourceUrl::parse(dls), Err(SourceError::OssHdfs(_))), "{dls}");
        }
        for host in [
            "evil.example",
            "other.oss-cn-beijing.aliyuncs.com",
            "oss-cn-beijing.aliyuncs.com.evil.example",
            "oss-x",
            "OSS-x.aliyuncs.com",
            "oss-x.aliyuncs.com:81",
            "oss-.aliyuncs.com.",
            "rds.aliyuncs.com",
        ] {
            let source = format!("oss://bucket.{host}/x");
            assert!(matches!(SourceUrl::parse(&source), Err(SourceError::Host(_))), "{source}");
        }
        assert!(matches!(SourceUrl::parse("file://data"), Err(SourceError::Path(_))));
        assert!(matches!(SourceUrl::parse("file:///data/../etc"), Err(SourceError::Path(_))));
    }

    #[test]
    fn a_source_lies_in_whole_segments_only() {
        let lies = |inner: &str, outer: &str| {
            SourceUrl::parse(inner).unwrap().lies_in(&SourceUrl::parse(outer).unwrap())
        };
        for (inner, outer) in [
            ("s3://bucket/team/a", "s3://bucket/team"),
            ("s3://bucket/team", "s3://bucket/team/"),
            ("s3://bucket/team/", "s3://bucket"),
            ("file:///data/set", "file:///data"),
            ("oss://bucket/team/a", "oss://bucket/team"),
            ("oss://bucket.oss-r.aliyuncs.com/team/a", "oss://bucket.oss-r.aliyuncs.com/team"),
        ] {
            assert!(lies(inner, outer), "{inner} in {outer}");
        }
        for (inner, outer) in [
            ("s3://bucket/team-b", "s3://bucket/team"),
            ("s3://bucket", "s3://bucket/team"),
            ("s3://bucket-b/team", "s3://bucket"),
            ("s3://other/team", "s3://bucket/team"),
            ("s3://bucket/%74eam/a", "s3://bucket/team"),
            ("file:///database", "file:///data"),
            ("file:///bucket", "s3://bucket"),
            ("oss://bucket/team/a", "s3://bucket/team"),
            ("oss://bucket/team-b", "oss://bucket/team"),
            ("oss://bucket.oss-r.aliyuncs.com/team", "oss://bucket/team"),
            ("oss://bucket/team", "oss://bucket.oss-r.aliyuncs.com/team"),
            ("oss://bucket.oss-r.aliyuncs.com/team", "oss://bucket.oss-q.aliyuncs.com/team"),
        ] {
            assert!(!lies(inner, outer), "{inner} in {outer}");
        }
    }

    #[test]
    fn a_password_in_the_url_is_not_repeated() {
        let error = SourceUrl::parse("s3://key:hunter2@bucket/x").expect_err("has a user").to_string();
        assert!(!error.contains("hunter2"), "{error}");
    }
}
