//! Where a volume's bytes live.

use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};
use std::path::{Component, Path, PathBuf};
use url::Url;

/// A parsed `source` parameter. More schemes are more variants: the compiler then finds every place that must know them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SourceUrl {
    /// `s3://bucket/prefix`; `prefix` is "" or ends in "/".
    S3 { bucket: String, prefix: String },
    /// `oss://bucket/prefix`, or with the endpoint in it: `oss://bucket.oss-cn-shanghai.aliyuncs.com/prefix`.
    Oss { bucket: String, host: Option<String>, prefix: String },
    /// `gs://bucket/prefix`
    Gcs { bucket: String, prefix: String },
    /// `az://container/prefix`, or with the host of the account in it: `az://container@account.blob.core.windows.net/prefix`,
    /// which is also what `abfs://` and `wasb://` mean.
    Azure { container: String, host: Option<String>, prefix: String },
    /// `https://host/prefix`, a tree of files on a web server; `origin` is `https://host[:port]`, `prefix` not encoded.
    Web { origin: String, prefix: String },
    /// `hdfs://nameservice/prefix` or `hdfs://host:port/prefix`.
    Hdfs { authority: String, prefix: String },
    /// `file:///dir`, an absolute, normalised path.
    Dir { path: PathBuf },
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SourceError {
    #[error(
        "source {0:?} is not a URL: write s3://bucket/prefix, oss://bucket/prefix, gs://bucket/prefix, az://container/prefix, \
         hdfs://nameservice/directory, https://host/directory or file:///directory"
    )]
    NotAUrl(String),
    #[error(
        "source scheme {0:?} is not supported: use s3://, oss://, gs://, az://, hdfs://, https:// or file://"
    )]
    Scheme(String),
    #[error(
        "source {0:?} is a view that clients put together from several file systems: write hdfs://nameservice/directory, where the \
         directory lies that is shown there"
    )]
    ViewFs(String),
    #[error(
        "source {0:?} is HDFS over HTTP: write hdfs://NAMENODE:8020/directory, the NameNode's own protocol"
    )]
    WebHdfs(String),
    #[error(
        "source {0:?} names no NameNode: write hdfs://nameservice/directory or hdfs://host:8020/directory"
    )]
    NoNameNode(String),
    #[error(
        "source {0:?} names several NameNodes: write a name for all, as hdfs://nameservice/directory, and list them in 'nameNodes'"
    )]
    NameNodes(String),
    #[error(
        "source {0:?} names a NameNode that cannot be one: write hdfs://nameservice/directory or hdfs://host:8020/directory"
    )]
    NameNode(String),
    #[error(
        "source {0:?} carries a user, query or fragment: say the user in 'hdfsUser', and leave the others out"
    )]
    HdfsExtras(String),
    #[error(
        "source {0:?} names no bucket: write s3://bucket/prefix, and likewise for oss://, gs:// and az://"
    )]
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
    #[error("bucket name {0:?} is not valid: 3 to 222 characters of a-z 0-9 . _ -, at most 63 between dots")]
    GcsBucket(String),
    #[error("container name {0:?} is not valid: 3 to 63 characters of a-z 0-9 -, or $root or $web")]
    Container(String),
    #[error(
        "source {0:?} names a host that is none of Azure's: write az://container@ACCOUNT.blob.core.windows.net/prefix, or \
         az://container/prefix and set 'storageAccount'"
    )]
    AzureHost(String),
    #[error("source {0:?} must be an absolute path without '..': write file:///directory")]
    Path(String),
    #[error("source prefix {0:?} has an empty, '.' or '..' segment, which no path can name")]
    Prefix(String),
    #[error(
        "source {0:?} carries a user, password, port, query or fragment: put credentials into the secret and the address into 'endpoint'"
    )]
    Extras(String),
    #[error("source {0:?} names no host: write https://host[:port]/directory")]
    WebHost(String),
    #[error(
        "source {0:?} carries a user, password, query or fragment: put credentials into the secret, and leave the others out"
    )]
    WebExtras(String),
}

impl SourceUrl {
    pub fn parse(text: &str) -> Result<Self, SourceError> {
        let (scheme, rest) = text.split_once("://").ok_or_else(|| SourceError::NotAUrl(redact(text)))?;
        match scheme {
            "s3" | "s3a" | "oss" | "gs" | "gcs" if rest.contains(['@', '?', '#']) => {
                Err(SourceError::Extras(redact(text)))
            }
            _ if AZURE.contains(&scheme) && rest.contains(['?', '#']) => {
                Err(SourceError::Extras(redact(text)))
            }
            _ if AZURE.contains(&scheme) => Self::parse_azure(text, rest),
            "s3" | "s3a" => Self::parse_s3(text, rest),
            "oss" => Self::parse_oss(text, rest),
            "gs" | "gcs" => Self::parse_gcs(text, rest),
            "hdfs" if rest.contains(['@', '?', '#']) => Err(SourceError::HdfsExtras(redact(text))),
            "hdfs" => Self::parse_hdfs(text, rest),
            "viewfs" | "viewfs-overload" => Err(SourceError::ViewFs(redact(text))),
            "webhdfs" | "swebhdfs" => Err(SourceError::WebHdfs(redact(text))),
            "http" | "https" => Self::parse_web(text, scheme, rest),
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
            Some(("gs", rest)) => Self::parse_gcs(text, rest),
            Some(("az", rest)) => Self::parse_azure(text, rest),
            Some(("hdfs", rest)) => Self::parse_hdfs(text, rest),
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

    fn parse_gcs(text: &str, rest: &str) -> Result<Self, SourceError> {
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(SourceError::NoBucket(text.to_owned()));
        }
        let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '_' | '-');
        let part = |part: &str| (1..=63).contains(&part.len()) && part.chars().all(legal);
        if !(3..=222).contains(&bucket.len()) || !bucket.split('.').all(part) {
            return Err(SourceError::GcsBucket(bucket.to_owned()));
        }
        Ok(Self::Gcs { bucket: bucket.to_owned(), prefix: directory_prefix(prefix)? })
    }

    fn parse_azure(text: &str, rest: &str) -> Result<Self, SourceError> {
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let (container, host) = match authority.split_once('@') {
            Some((container, host)) => (container, Some(host)),
            None => (authority, None),
        };
        if container.is_empty() {
            return Err(SourceError::NoBucket(text.to_owned()));
        }
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        let special = matches!(container, "$root" | "$web");
        if !special && (!(3..=63).contains(&container.len()) || !container.chars().all(plain)) {
            // What stands there may be a key that somebody pasted.
            let container = if host.is_some() { "…" } else { container };
            return Err(SourceError::Container(container.to_owned()));
        }
        // Both names of an account's host lead to the same blobs.
        let blob = |host: &str| {
            let (account, cloud) = host.split_once(".blob.").or_else(|| host.split_once(".dfs."))?;
            let known = is_account(account) && CLOUDS.contains(&cloud);
            known.then(|| format!("{account}.blob.{cloud}"))
        };
        let host = host.map(|host| blob(host).ok_or_else(|| SourceError::AzureHost(redact(text))));
        let (container, host) = (container.to_owned(), host.transpose()?);
        Ok(Self::Azure { container, host, prefix: directory_prefix(prefix)? })
    }

    fn parse_hdfs(text: &str, rest: &str) -> Result<Self, SourceError> {
        let (authority, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if authority.is_empty() {
            return Err(SourceError::NoNameNode(text.to_owned()));
        }
        if authority.contains(',') {
            return Err(SourceError::NameNodes(text.to_owned()));
        }
        if !is_host(authority.split_once(':').map_or(authority, |(host, _)| host))
            || authority.split_once(':').is_some_and(|(_, port)| !is_port(port))
        {
            return Err(SourceError::NameNode(text.to_owned()));
        }
        Ok(Self::Hdfs { authority: authority.to_owned(), prefix: directory_prefix(prefix)? })
    }

    fn parse_web(text: &str, scheme: &str, rest: &str) -> Result<Self, SourceError> {
        if rest.contains(['?', '#'])
            || rest.split('/').next().is_some_and(|authority| authority.contains('@'))
        {
            return Err(SourceError::WebExtras(redact(text)));
        }
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        // What URL parsers take for a slash would end the host elsewhere than here.
        let url = Url::parse(&format!("{scheme}://{authority}")).ok();
        let url = url.filter(|_| !authority.is_empty() && !authority.contains(['\\', '\t', '\n', '\r']));
        let url = url.ok_or_else(|| SourceError::WebHost(text.to_owned()))?;
        let path =
            percent_decode_str(path).decode_utf8().map_err(|_| SourceError::Prefix(path.to_owned()))?;
        Ok(Self::Web { origin: url.origin().ascii_serialization(), prefix: directory_prefix(&path)? })
    }

    /// Of Azure: the account whose host is a part of it.
    pub fn storage_account(&self) -> Option<&str> {
        match self {
            Self::Azure { host: Some(host), .. } => host.split('.').next(),
            _ => None,
        }
    }

    /// The endpoint that is a part of it.
    pub fn endpoint(&self) -> Option<Url> {
        match self {
            Self::Oss { host: Some(host), .. } | Self::Azure { host: Some(host), .. } => {
                Url::parse(&format!("https://{host}")).ok()
            }
            Self::Web { origin, .. } => Url::parse(origin).ok(),
            Self::S3 { .. }
            | Self::Oss { .. }
            | Self::Gcs { .. }
            | Self::Azure { .. }
            | Self::Hdfs { .. }
            | Self::Dir { .. } => None,
        }
    }

    /// As it is written before "://".
    pub(crate) fn scheme(&self) -> &'static str {
        match self {
            Self::S3 { .. } => "s3",
            Self::Oss { .. } => "oss",
            Self::Gcs { .. } => "gs",
            Self::Azure { .. } => "az",
            Self::Web { origin, .. } if origin.starts_with("http:") => "http",
            Self::Web { .. } => "https",
            Self::Hdfs { .. } => "hdfs",
            Self::Dir { .. } => "file",
        }
    }

    /// The source of the same kind that all others of it lie in, as far as that has a name.
    pub(crate) fn top(&self) -> String {
        match self {
            Self::S3 { bucket, .. } => format!("s3://{bucket}"),
            Self::Oss { bucket, host, .. } => format!("oss://{}", authority(bucket, '.', host.as_deref())),
            Self::Gcs { bucket, .. } => format!("gs://{bucket}"),
            Self::Azure { container, host, .. } => {
                format!("az://{}", authority(container, '@', host.as_deref()))
            }
            Self::Web { origin, .. } => origin.clone(),
            Self::Hdfs { authority, .. } => format!("hdfs://{authority}"),
            Self::Dir { .. } => "file:///".to_owned(),
        }
    }

    /// Is this `other`, or below it? Whole segments are compared: `s3://b/team-b` does not lie in `s3://b/team`.
    pub(crate) fn lies_in(&self, other: &Self) -> bool {
        match (self, other) {
            // Prefixes are empty or end in a slash.
            (Self::S3 { bucket, prefix }, Self::S3 { bucket: other, prefix: above })
            | (Self::Web { origin: bucket, prefix }, Self::Web { origin: other, prefix: above })
            | (Self::Hdfs { authority: bucket, prefix }, Self::Hdfs { authority: other, prefix: above })
            | (Self::Gcs { bucket, prefix }, Self::Gcs { bucket: other, prefix: above }) => {
                bucket == other && prefix.starts_with(above.as_str())
            }
            // A bucket of the same name at another endpoint is another bucket.
            (Self::Oss { bucket, host, prefix }, Self::Oss { bucket: other, host: at, prefix: above })
            | (
                Self::Azure { container: bucket, host, prefix },
                Self::Azure { container: other, host: at, prefix: above },
            ) => (bucket, host) == (other, at) && prefix.starts_with(above.as_str()),
            (Self::Dir { path }, Self::Dir { path: above }) => path.starts_with(above),
            (
                Self::S3 { .. }
                | Self::Oss { .. }
                | Self::Gcs { .. }
                | Self::Azure { .. }
                | Self::Web { .. }
                | Self::Hdfs { .. }
                | Self::Dir { .. },
                _,
            ) => false,
        }
    }

    /// Is it a part of a bucket, and not all of it?
    pub(crate) fn is_directory_of_a_bucket(&self) -> bool {
        self.bucket().is_some_and(|(_, prefix)| !prefix.is_empty())
    }

    fn bucket(&self) -> Option<(&str, &str)> {
        match self {
            Self::S3 { bucket, prefix } | Self::Oss { bucket, prefix, .. } | Self::Gcs { bucket, prefix } => {
                Some((bucket, prefix))
            }
            Self::Azure { container, prefix, .. } => Some((container, prefix)),
            Self::Web { .. } | Self::Hdfs { .. } | Self::Dir { .. } => None,
        }
    }

    /// Might there be an object in both? In doubt, yes: a bucket has many names (other endpoints, protocols, styles of its
    /// address), so that of buckets their own names alone are compared.
    pub fn may_share(&self, other: &Self) -> bool {
        match (self.bucket(), other.bucket()) {
            (Some((bucket, prefix)), Some((other, theirs))) => {
                bucket == other && (prefix.starts_with(theirs) || theirs.starts_with(prefix))
            }
            _ => self.lies_in(other) || other.lies_in(self),
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
            Self::Gcs { bucket, prefix } => {
                Self::Gcs { bucket: bucket.clone(), prefix: format!("{prefix}{below}") }
            }
            Self::Azure { container, host, prefix } => Self::Azure {
                container: container.clone(),
                host: host.clone(),
                prefix: format!("{prefix}{below}"),
            },
            Self::Web { origin, prefix } => {
                Self::Web { origin: origin.clone(), prefix: format!("{prefix}{below}") }
            }
            Self::Hdfs { authority, prefix } => {
                Self::Hdfs { authority: authority.clone(), prefix: format!("{prefix}{below}") }
            }
            Self::Dir { path } => Self::Dir { path: path.join(below.trim_end_matches('/')) },
        })
    }
}

/// What a URL's path cannot hold as it is, and the percent sign.
const IN_PATHS: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'\\')
    .add(b'^')
    .add(b'`')
    .add(b'{')
    .add(b'|')
    .add(b'}');

/// Fluid's, Hadoop's and everybody's names of the one protocol that we speak with Azure.
const AZURE: [&str; 5] = ["az", "abfs", "abfss", "wasb", "wasbs"];

/// What the hosts of Azure's accounts end in, one for each of its clouds.
const CLOUDS: [&str; 3] = ["core.windows.net", "core.chinacloudapi.cn", "core.usgovcloudapi.net"];

/// May an account of Azure be called so?
pub(crate) fn is_account(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    (3..=24).contains(&name.len()) && name.bytes().all(plain)
}

/// May a host or a name service be called so?
fn is_host(name: &str) -> bool {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=253).contains(&name.len())
        && name.chars().all(legal)
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
}

fn is_port(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit()) && text.parse::<u16>().is_ok_and(|port| port > 0)
}

/// A NameNode's address in full: `host:port`. Where no port is written it is [`NAMENODE_PORT`].
pub fn name_node(text: &str) -> Option<String> {
    match text.split_once(':') {
        Some((host, port)) => (is_host(host) && is_port(port)).then(|| text.to_owned()),
        None => is_host(text).then(|| format!("{text}:{NAMENODE_PORT}")),
    }
}

/// Where a NameNode listens if nobody says otherwise.
const NAMENODE_PORT: u16 = 8020;

fn authority(bucket: &str, between: char, host: Option<&str>) -> String {
    host.map_or_else(|| bucket.to_owned(), |host| format!("{bucket}{between}{host}"))
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
                write!(f, "oss://{}/{prefix}", authority(bucket, '.', host.as_deref()))
            }
            Self::Gcs { bucket, prefix } => write!(f, "gs://{bucket}/{prefix}"),
            Self::Azure { container, host, prefix } => {
                write!(f, "az://{}/{prefix}", authority(container, '@', host.as_deref()))
            }
            Self::Web { origin, prefix } => write!(f, "{origin}/{}", utf8_percent_encode(prefix, IN_PATHS)),
            Self::Hdfs { authority, prefix } => write!(f, "hdfs://{authority}/{prefix}"),
            Self::Dir { path } => write!(f, "file://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_one_bucket_share_objects_where_one_lies_in_the_other() {
        let share = |one: &str, other: &str| {
            let (one, other) = (SourceUrl::parse(one).unwrap(), SourceUrl::parse(other).unwrap());
            assert_eq!(one.may_share(&other), other.may_share(&one));
            one.may_share(&other)
        };
        for other in [
            "s3://bucket/a/b",
            "s3://bucket/a/b/c",
            "s3://bucket/a",
            "s3a://bucket",
            "gs://bucket/a",
            "oss://bucket/a/b",
        ] {
            assert!(share("s3://bucket/a/b", other), "{other}");
        }
        for other in [
            "s3://bucket/a/bb",
            "s3://bucket/b",
            "s3://bucket-a/a/b",
            "file:///bucket/a/b",
            "https://bucket/a/b",
        ] {
            assert!(!share("s3://bucket/a/b", other), "{other}");
        }
        assert!(share("file:///data", "file:///data/x") && !share("file:///data", "file:///database"));
    }

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
            ("gs://bucket/a/b", "gs://bucket/a/b/"),
            ("gcs://my_bucket.example.com", "gs://my_bucket.example.com/"),
            ("az://container/a", "az://container/a/"),
            ("az://$web", "az://$web/"),
            ("abfss://set-1@account1.dfs.core.windows.net/a", "az://set-1@account1.blob.core.windows.net/a/"),
            ("abfs://set@acc.dfs.core.usgovcloudapi.net", "az://set@acc.blob.core.usgovcloudapi.net/"),
            ("wasbs://set@acc.blob.core.chinacloudapi.cn/", "az://set@acc.blob.core.chinacloudapi.cn/"),
            ("az://set@acc.blob.core.windows.net/x", "az://set@acc.blob.core.windows.net/x/"),
            ("https://Data.example.com", "https://data.example.com/"),
            ("https://data.example.com:443/sets", "https://data.example.com/sets/"),
            ("http://127.0.0.1:8080/a%20b/%25/é", "http://127.0.0.1:8080/a%20b/%25/%C3%A9/"),
            ("https://h/a@b/c~d/", "https://h/a@b/c~d/"),
            ("https://bücher.example/x", "https://xn--bcher-kva.example/x/"),
            ("hdfs://NS1", "hdfs://NS1/"),
            ("hdfs://nn.example.com:8020/a b/c", "hdfs://nn.example.com:8020/a b/c/"),
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
        assert!(matches!(SourceUrl::parse("gs:///x"), Err(SourceError::NoBucket(_))));
        assert!(matches!(SourceUrl::parse("gs://key@bucket/x"), Err(SourceError::Extras(_))));
        for bucket in ["ab", "Upper", "a..b", ".abc", "abc.", &"a".repeat(64), &["abc"; 60].join(".")] {
            let source = format!("gs://{bucket}/x");
            assert!(matches!(SourceUrl::parse(&source), Err(SourceError::GcsBucket(_))), "{source}");
        }
        assert!(matches!(SourceUrl::parse("az:///x"), Err(SourceError::NoBucket(_))));
        assert!(matches!(SourceUrl::parse("az://@acc.blob.core.windows.net"), Err(SourceError::NoBucket(_))));
        assert!(matches!(SourceUrl::parse("az://c_c/x"), Err(SourceError::Container(_))));
        assert!(matches!(
            SourceUrl::parse("abfs://set@a.dfs.core.windows.net/x?sig=1"),
            Err(SourceError::Extras(_))
        ));
        for host in [
            "evil.example",
            "acc.blob.core.windows.net.evil.example",
            "evil.example/.blob.core.windows.net",
            "acc.file.core.windows.net",
            "a.b.blob.core.windows.net",
            "acc.blob.core.windows.net:81",
            "acc.blob.evil.example",
            "ACC.blob.core.windows.net",
            "evil.example@acc.blob.core.windows.net",
        ] {
            let source = format!("abfs://set@{host}/x");
            assert!(matches!(SourceUrl::parse(&source), Err(SourceError::AzureHost(_))), "{source}");
        }
        for host in
            ["https://", "https:///x", "https://a b/x", "http://:80/x", "https://h:port/x", "https://h\\x/y"]
        {
            assert!(matches!(SourceUrl::parse(host), Err(SourceError::WebHost(_))), "{host}");
        }
        for extras in ["https://u@h/x", "https://h/x?signature=1", "https://h/x#y", "https://h?x"] {
            assert!(matches!(SourceUrl::parse(extras), Err(SourceError::WebExtras(_))), "{extras}");
        }
        for prefix in
            ["https://h/a//b", "https://h/%2e%2e/x", "https://h/./x", "https://h/a%00", "https://h/%ff"]
        {
            assert!(matches!(SourceUrl::parse(prefix), Err(SourceError::Prefix(_))), "{prefix}");
        }
        for (source, expected) in [
            ("hdfs:///data", SourceError::NoNameNode("hdfs:///data".into())),
            ("hdfs://", SourceError::NoNameNode("hdfs://".into())),
            ("hdfs://a:1,b:1/x", SourceError::NameNodes("hdfs://a:1,b:1/x".into())),
            ("hdfs://a:b/x", SourceError::NameNode("hdfs://a:b/x".into())),
            ("hdfs://a:0/x", SourceError::NameNode("hdfs://a:0/x".into())),
            ("hdfs://a:/x", SourceError::NameNode("hdfs://a:/x".into())),
            ("hdfs://a:+1/x", SourceError::NameNode("hdfs://a:+1/x".into())),
            ("hdfs://[::1]:8020/x", SourceError::NameNode("hdfs://[::1]:8020/x".into())),
            ("hdfs://a b/x", SourceError::NameNode("hdfs://a b/x".into())),
            ("hdfs://-a/x", SourceError::NameNode("hdfs://-a/x".into())),
            ("hdfs://root@nn/x", SourceError::HdfsExtras("hdfs://…@nn/x".into())),
            ("hdfs://nn/x?user.name=root", SourceError::HdfsExtras("hdfs://nn/x".into())),
            ("viewfs://cluster/x", SourceError::ViewFs("viewfs://cluster/x".into())),
            ("webhdfs://nn:9870/x", SourceError::WebHdfs("webhdfs://nn:9870/x".into())),
            ("hdfs://nn/a/../b", SourceError::Prefix("a/../b".into())),
        ] {
            assert_eq!(SourceUrl::parse(source), Err(expected), "{source}");
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
            ("gs://bucket/team/a", "gs://bucket/team"),
            ("az://bucket/team/a", "az://bucket"),
            ("https://h/team/%61", "https://h/team"),
            ("https://h/team", "https://h:443"),
            ("hdfs://ns/team/a", "hdfs://ns/team"),
            ("abfs://set@acc.dfs.core.windows.net/team/a", "wasb://set@acc.blob.core.windows.net/team"),
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
            ("gs://bucket/team", "s3://bucket/team"),
            ("gs://bucket/team-b", "gs://bucket/team"),
            ("https://h/team-b", "https://h/team"),
            ("hdfs://ns/team-b", "hdfs://ns/team"),
            ("hdfs://nn:8020/team", "hdfs://nn/team"),
            ("https://h/team", "http://h/team"),
            ("https://h:8443/team", "https://h/team"),
            ("https://h.evil.example/team", "https://h"),
            ("az://set/team", "az://set@acc.blob.core.windows.net/team"),
            ("az://set@acc.blob.core.windows.net/team", "az://set"),
            ("az://set@acc.blob.core.windows.net/team", "az://set@other.blob.core.windows.net/team"),
        ] {
            assert!(!lies(inner, outer), "{inner} in {outer}");
        }
    }

    #[test]
    fn a_password_in_the_url_is_not_repeated() {
        for source in [
            "s3://key:hunter2@bucket/x",
            "az://hunter2@bucket/x",
            "abfs://HUNTER2:hunter2@acc.dfs.core.windows.net/x",
            "az://set/x?sig=hunter2",
            "https://user:hunter2@host/x",
            "https://host/x?token=hunter2",
        ] {
            let error = SourceUrl::parse(source).expect_err("has a user").to_string();
            assert!(!error.contains("hunter2"), "{error}");
        }
    }
}
