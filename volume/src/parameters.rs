//! StorageClass parameters: parsed once, unknown names refused with the nearest known one.

use crate::allowed::AllowedSources;
use crate::headers::{self, HeaderError, Headers};
use crate::later::{self, Later};
use crate::on_delete::OnDelete;
use crate::source::{is_account, name_node};
use crate::template::{TemplateError, TemplateValues, claim_chooses, expand, expand_path, is_private};
use crate::{SourceError, SourceUrl, parse_bytes, parse_duration};
use std::time::Duration;
use url::Url;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Addressing {
    /// `https://endpoint/bucket/key`
    #[default]
    Path,
    /// `https://bucket.endpoint/key`
    Virtual,
}

/// How soon a change at the source is seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// Never revalidated.
    Static,
    /// Within this time.
    Ttl(Duration),
    /// At every open (close-to-open).
    Strict,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Profile {
    /// Chosen at publish from one listing page.
    #[default]
    Auto,
    /// Passthrough of whole files.
    Large,
    /// No-open, long TTLs.
    Small,
}

/// Whose word counts for owner and mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AttributesFrom {
    /// The volume's: each file has its `uid`, `gid` and `fileMode`.
    #[default]
    Volume,
    /// The source's, where it tells them ([`crate::Permissions`]).
    Source,
}

/// What may be done with a volume. What one mount of it may do is decided where it is mounted: never more than this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    #[default]
    ReadOnly,
    ReadWrite,
}

/// When a write is done: when `fsync` and `close` return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WriteMode {
    /// When the object is in the store, or with its error.
    #[default]
    Through,
    /// When the bytes, and that they are to be uploaded, are safe on the node's disk. The upload follows.
    Back,
}

/// Everything about a volume but its id, source and credentials. Field docs are the user's docs: keep
/// `docs/configuration.md` in step. A new field needs a default that changes nothing, its lines in
/// [`Parameters::parse`] and [`Parameters::chosen`], and a decision: see `wire::HINTS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    pub endpoint: Option<Url>,
    pub region: Option<String>,
    /// Of Azure: in which account the container is.
    pub storage_account: Option<String>,
    /// Of a web server: the list of its files, a path below the source.
    pub manifest: Option<String>,
    /// Of HDFS: the NameNodes (`host:port`) of the name service that the source names; empty: it is a host, or a
    /// configuration of Hadoop's says them.
    pub name_nodes: Vec<String>,
    /// Of HDFS: under which name this node's operator has put a configuration of Hadoop's.
    pub hadoop_config: Option<String>,
    /// Of an HDFS that believes whatever name it is told: whose name that is.
    pub hdfs_user: Option<String>,
    pub addressing: Addressing,
    pub allow_http: bool,
    /// Who asks pays for what is carried, not the bucket's owner.
    pub requester_pays: bool,
    /// What a gateway before the store wants to know: name (in small letters) and value.
    pub extra_headers: Headers,
    pub access: Access,
    /// For [`Access::ReadWrite`].
    pub write_mode: WriteMode,
    pub freshness: Freshness,
    /// For `ttl`: how long after its time has run out the last known answer goes on being used while the store gives
    /// none; zero: not at all.
    pub stale_if_error: Duration,
    pub profile: Profile,
    /// Largest readahead of a sequential reader, bytes; None: the agent's default.
    pub readahead: Option<u64>,
    /// Largest ranged GET, bytes, and how many at once for one file; None: the agent's default. The agent's limits hold.
    pub part: Option<u64>,
    pub parallel_parts: Option<u16>,
    /// Most bytes of cache that this volume's scope may hold; None: the agent's default.
    pub cache_limit: Option<u64>,
    pub attributes: AttributesFrom,
    pub uid: u32,
    pub gid: u32,
    /// What it and `dir_mode` are where the volume does not say so hangs on its access ([`Access::modes`]).
    pub file_mode: u32,
    pub dir_mode: u32,
    pub heal_timeout: Duration,
    pub store_timeout: Duration,
    /// Nothing, but in builds for tests.
    pub later: Later,
}

impl Access {
    /// Of files and of directories, where the volume names none: a default that lets nobody write would make a volume
    /// that can be written to useless. Each is as final as every other default.
    fn modes(self) -> (u32, u32) {
        match self {
            Self::ReadOnly => (0o444, 0o555),
            Self::ReadWrite => (0o644, 0o755),
        }
    }
}

/// What a volume that does not say otherwise has had since the first version that had it: a default never changes,
/// because volumes are described without it (see `wire`).
impl Default for Parameters {
    fn default() -> Self {
        let (file_mode, dir_mode) = Access::ReadOnly.modes();
        Self {
            endpoint: None,
            region: None,
            storage_account: None,
            manifest: None,
            name_nodes: Vec::new(),
            hadoop_config: None,
            hdfs_user: None,
            addressing: Addressing::Path,
            allow_http: false,
            requester_pays: false,
            extra_headers: Headers::new(),
            access: Access::ReadOnly,
            write_mode: WriteMode::Through,
            freshness: Freshness::Ttl(Duration::from_secs(60)),
            stale_if_error: an_hour(),
            profile: Profile::Auto,
            readahead: None,
            part: None,
            parallel_parts: None,
            cache_limit: None,
            attributes: AttributesFrom::Volume,
            uid: 0,
            gid: 0,
            file_mode,
            dir_mode,
            heal_timeout: Duration::from_secs(60),
            store_timeout: Duration::from_secs(300),
            later: Later::default(),
        }
    }
}

/// An outage that is mended by people who are awake. Longer, and a program would go on for a night with what its
/// owner may have withdrawn.
fn an_hour() -> Duration {
    Duration::from_secs(3600)
}

/// Smaller, and a file of some size is nothing but requests, bytes.
const PART_MIN: u64 = 64 << 10;
const PARALLEL_PARTS_MAX: u16 = 1024;
/// Of one name service. HDFS has two, or a few with observers.
const NAME_NODES_MAX: usize = 8;
const MANIFEST_BYTES_MAX: usize = 1024;

/// In the order of `docs/configuration.md`.
const KNOWN_PARAMETERS: &[&str] = &[
    "source",
    "endpoint",
    "region",
    "storageAccount",
    "manifest",
    "nameNodes",
    "hadoopConfig",
    "hdfsUser",
    "addressingStyle",
    "allowHttp",
    "requesterPays",
    "extraHeaders",
    "path",
    "access",
    "writeMode",
    "onDelete",
    "freshness",
    "metadataTtl",
    "staleIfError",
    "profile",
    "readahead",
    "part",
    "parallelParts",
    "cacheLimit",
    "attributes",
    "uid",
    "gid",
    "fileMode",
    "dirMode",
    "healTimeout",
    "storeTimeout",
    "allowedSources",
];

fn known() -> impl Iterator<Item = &'static str> {
    KNOWN_PARAMETERS.iter().chain(later::PARAMETERS).copied()
}

pub(crate) fn is_known(name: &str) -> bool {
    known().any(|known| known == name)
}

/// Parameters in which templates are filled in: what the owner of a claim may reasonably choose, and nothing that
/// decides where requests go or how much of the node is used.
pub const TEMPLATED_PARAMETERS: &[&str] = &[
    "source",
    "path",
    "region",
    "hdfsUser",
    "freshness",
    "metadataTtl",
    "staleIfError",
    "profile",
    "readahead",
    "uid",
    "gid",
    "fileMode",
    "dirMode",
];

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ParameterError {
    #[error("unknown parameter {name:?}{}", .nearest.map(|n| format!(": did you mean {n:?}?")).unwrap_or_else(|| format!("; known: {}", known().collect::<Vec<_>>().join(", "))))]
    Unknown { name: String, nearest: Option<&'static str> },
    #[error(
        "parameter \"source\" is missing: set it to s3://bucket/prefix, oss://bucket/prefix, gs://bucket/prefix, az://container/prefix, \
         hdfs://nameservice/directory, https://host/directory or file:///directory"
    )]
    NoSource,
    #[error("parameter {name:?} has value {value:?}: {expected}")]
    Value { name: &'static str, value: String, expected: &'static str },
    #[error(
        "parameter \"metadataTtl\" has no meaning with freshness {0:?}: leave it out or set freshness to \"ttl\""
    )]
    TtlWithoutTtl(String),
    #[error(
        "parameter \"staleIfError\" has no meaning with freshness {0:?}: leave it out or set freshness to \"ttl\""
    )]
    StaleWithoutTtl(&'static str),
    #[error("parameter \"extraHeaders\": {0}")]
    ExtraHeaders(HeaderError),
    #[error("parameter {name:?} {endpoint:?} is plain HTTP: use https, or set \"allowHttp\" to \"true\"")]
    PlainHttp { name: &'static str, endpoint: String },
    #[error("parameter {name:?} has no meaning for {scheme}:// sources: leave it out")]
    NotForScheme { name: &'static str, scheme: &'static str },
    #[error(
        "parameter \"attributes\" is \"source\", but {scheme}:// sources tell no owner and mode: leave it out, and set uid, gid, fileMode and dirMode"
    )]
    NoAttributes { scheme: &'static str },
    #[error(
        "source {source_url} names one NameNode: leave \"nameNodes\" out, or write a name for all of them there, as hdfs://nameservice/directory"
    )]
    OneNameNode { source_url: SourceUrl },
    #[error("source {source_url} names its endpoint: leave parameter {name:?} out")]
    TwoEndpoints { source_url: SourceUrl, name: &'static str },
    #[error(
        "source {source_url} does not say in which storage account it is: set \"storageAccount\", or write \
         az://container@ACCOUNT.blob.core.windows.net/prefix"
    )]
    NoAccount { source_url: SourceUrl },
    #[error(
        "profile \"small\" cannot be used with freshness \"strict\": without OPEN requests nothing can revalidate at open; use \"ttl\" or profile \"large\""
    )]
    SmallStrict,
    #[error(
        "parameter \"access\" is \"readWrite\", but {scheme}:// sources can only be read: use an s3:// or file:// source, or leave it out"
    )]
    NotWritable { scheme: &'static str },
    #[error(
        "access \"readWrite\" cannot be used with profile \"small\": without OPEN and FLUSH requests no close can report that a write has failed; use profile \"large\" or \"auto\""
    )]
    WritableSmall,
    #[error(
        "access \"readWrite\" cannot be used with freshness \"static\": what another node writes would never be seen; use \"ttl\" or \"strict\""
    )]
    WritableStatic,
    #[error(
        "parameter \"writeMode\" has no meaning with access \"readOnly\": leave it out or set access to \"readWrite\""
    )]
    WriteModeWithoutWrites,
    #[error(
        "parameter \"onDelete\" is \"delete\", and the volume can only be read: leave it out or set access to \"readWrite\""
    )]
    DeleteWithoutWrites,
    #[error(
        "parameter \"onDelete\" is \"delete\", but a {scheme}:// source lies on nodes, where the controller does not reach: use an s3:// source, or \"retain\""
    )]
    NotDeletable { scheme: &'static str },
    #[error(
        "parameter \"onDelete\" is \"delete\", and the directory may be another volume's, too: write a path with a segment for each volume, such as ${{pv.name}}, or with two such as ${{pvc.namespace}}/${{pvc.name}}"
    )]
    NotPrivate,
    #[error(
        "parameter \"onDelete\" is \"delete\", and source {0} is a whole bucket: give volumes a directory each, by \"path\""
    )]
    WholeBucket(SourceUrl),
    #[error("parameter {name:?} takes no template: write the value itself (templates: {})", TEMPLATED_PARAMETERS.join(", "))]
    NotTemplated { name: &'static str },
    #[error(
        "the claim chooses the source of this class, so it needs parameter \"allowedSources\": set it to the prefixes that claims may choose from, such as s3://bucket/team-a"
    )]
    NoAllowedSources,
    #[error("source {source_url} is not in the class's allowedSources ({allowed}): choose one that is")]
    NotAllowed { source_url: SourceUrl, allowed: String },
    #[error(transparent)]
    Source(#[from] SourceError),
    #[error(transparent)]
    Template(#[from] TemplateError),
}

impl Parameters {
    /// Parses StorageClass parameters (or a volume context): the source with `path` expanded, and the rest.
    /// Keys under `csi.storage.k8s.io/` are accepted and left to the caller.
    pub fn parse<K: AsRef<str>, V: AsRef<str>>(
        pairs: impl IntoIterator<Item = (K, V)>,
        values: &TemplateValues,
    ) -> Result<(SourceUrl, Self), ParameterError> {
        let mut p = Self::default();
        let (mut source, mut path, mut freshness, mut ttl, mut stale) = (None, None, None, None, None);
        let (mut write_mode, mut file_mode, mut dir_mode) = (None, None, None);
        let mut special = Vec::new();
        let (mut allowed, mut source_template) = (None, None);
        let mut on_delete = OnDelete::default();
        for (name, value) in pairs {
            let (name, value) = (name.as_ref(), value.as_ref());
            if name.starts_with("csi.storage.k8s.io/") {
                continue;
            }
            let filled;
            let value = match (name, value.contains("${")) {
                ("path", _) | (_, false) => value,
                _ => {
                    // An unknown name is the worse mistake: it is reported below.
                    let known = known().find(|known| *known == name);
                    if let Some(name) = known.filter(|name| !TEMPLATED_PARAMETERS.contains(name)) {
                        return Err(ParameterError::NotTemplated { name });
                    }
                    if name == "source" {
                        source_template = Some(value.to_owned());
                    }
                    filled = if known.is_some() { expand(value, values)? } else { value.to_owned() };
                    &filled
                }
            };
            let bad = |name, expected| ParameterError::Value { name, value: value.to_owned(), expected };
            let Some(value) = p.later.value(name, value) else { continue };
            match name {
                "source" => source = Some(SourceUrl::parse(&p.later.source(value))?),
                "allowedSources" => {
                    let parsed = AllowedSources::parse(value).map_err(|expected| ParameterError::Value {
                        name: "allowedSources",
                        value: value.to_owned(),
                        expected,
                    });
                    allowed = Some(parsed?);
                }
                "path" => path = Some(value.to_owned()),
                "endpoint" => {
                    let text = "write https://host[:port], without user, path, query or fragment";
                    let url = Url::parse(value).map_err(|_| bad("endpoint", text))?;
                    let plain = matches!(url.scheme(), "http" | "https")
                        && url.host_str().is_some()
                        && url.username().is_empty()
                        && url.password().is_none()
                        && matches!(url.path(), "" | "/")
                        && url.query().is_none()
                        && url.fragment().is_none();
                    if !plain {
                        // The value may hold a password: do not repeat it.
                        return Err(ParameterError::Value {
                            name: "endpoint",
                            value: url.host_str().unwrap_or_default().to_owned(),
                            expected: text,
                        });
                    }
                    p.endpoint = Some(url);
                    special.push("endpoint");
                }
                "region" => {
                    let legal = |c: char| c.is_ascii_alphanumeric() || c == '-';
                    if value.is_empty() || value.len() > 64 || !value.chars().all(legal) {
                        return Err(bad("region", "write a region name such as eu-central-1"));
                    }
                    p.region = Some(value.to_owned());
                    special.push("region");
                }
                "storageAccount" => {
                    if !is_account(value) {
                        let expected =
                            "write the name of an Azure storage account: 3 to 24 characters of a-z 0-9";
                        return Err(bad("storageAccount", expected));
                    }
                    p.storage_account = Some(value.to_owned());
                    special.push("storageAccount");
                }
                "manifest" => {
                    let plain =
                        |name: &str| !matches!(name, "" | "." | "..") && !name.contains(char::is_control);
                    if value.len() > MANIFEST_BYTES_MAX || !value.split('/').all(plain) {
                        let expected =
                            "write the path of a list of files below the source, such as files.tsv";
                        return Err(bad("manifest", expected));
                    }
                    p.manifest = Some(value.to_owned());
                    special.push("manifest");
                }
                "nameNodes" => {
                    let expected =
                        "write the NameNodes of the name service, host:port, separated by commas (8 at most)";
                    let all: Option<Vec<_>> = value.split(',').map(|one| name_node(one.trim())).collect();
                    let all = all.filter(|all| all.len() <= NAME_NODES_MAX);
                    p.name_nodes = all.ok_or_else(|| bad("nameNodes", expected))?;
                    special.push("nameNodes");
                }
                "hadoopConfig" => {
                    let legal =
                        |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
                    let is_one = (1..=63).contains(&value.len())
                        && value.chars().all(legal)
                        && !value.starts_with('.');
                    if !is_one {
                        let expected = "write the name that this cluster's operator gave a configuration of Hadoop's: a-z 0-9 - .";
                        return Err(bad("hadoopConfig", expected));
                    }
                    p.hadoop_config = Some(value.to_owned());
                    special.push("hadoopConfig");
                }
                "hdfsUser" => {
                    if !is_hdfs_user(value) {
                        let expected = "write a user's name: at most 64 characters of a-z A-Z 0-9 . _ -";
                        return Err(bad("hdfsUser", expected));
                    }
                    p.hdfs_user = Some(value.to_owned());
                    special.push("hdfsUser");
                }
                "addressingStyle" => {
                    p.addressing = match value {
                        "path" => Addressing::Path,
                        "virtual" => Addressing::Virtual,
                        _ => return Err(bad("addressingStyle", "use \"path\" or \"virtual\"")),
                    };
                    special.push("addressingStyle");
                }
                "allowHttp" => {
                    p.allow_http = match value {
                        "true" => true,
                        "false" => false,
                        _ => return Err(bad("allowHttp", "use \"true\" or \"false\"")),
                    };
                    special.push("allowHttp");
                }
                "requesterPays" => {
                    p.requester_pays = match value {
                        "true" => true,
                        "false" => false,
                        _ => return Err(bad("requesterPays", "use \"true\" or \"false\"")),
                    };
                    special.push("requesterPays");
                }
                "extraHeaders" => {
                    p.extra_headers = headers::parse(value).map_err(ParameterError::ExtraHeaders)?;
                    special.push("extraHeaders");
                }
                "access" => {
                    p.access = match value {
                        "readOnly" => Access::ReadOnly,
                        "readWrite" => Access::ReadWrite,
                        _ => return Err(bad("access", "use \"readOnly\" or \"readWrite\"")),
                    };
                }
                "writeMode" => {
                    write_mode = match value {
                        "through" => Some(WriteMode::Through),
                        "back" => Some(WriteMode::Back),
                        _ => return Err(bad("writeMode", "use \"through\" or \"back\"")),
                    };
                }
                "onDelete" => {
                    on_delete =
                        OnDelete::of(value).ok_or_else(|| bad("onDelete", "use \"retain\" or \"delete\""))?;
                }
                "freshness" => freshness = Some(value.to_owned()),
                "metadataTtl" => {
                    let parsed = parse_duration(value).filter(|d| *d <= Duration::from_secs(365 * 86_400));
                    ttl =
                        Some(parsed.ok_or_else(|| bad("metadataTtl", "write a duration such as 60s or 5m"))?);
                }
                "staleIfError" => {
                    let longest = Duration::from_secs(365 * 86_400);
                    let parsed = match value {
                        "0" => Some(Duration::ZERO),
                        _ => parse_duration(value).filter(|d| *d <= longest),
                    };
                    let expected = "write a duration such as 1h, or 0 for none";
                    stale = Some(parsed.ok_or_else(|| bad("staleIfError", expected))?);
                }
                "profile" => {
                    p.profile = match value {
                        "auto" => Profile::Auto,
                        "large" => Profile::Large,
                        "small" => Profile::Small,
                        _ => return Err(bad("profile", "use \"auto\", \"large\" or \"small\"")),
                    }
                }
                "readahead" => {
                    let parsed = parse_bytes(value).filter(|b| *b <= 1 << 30);
                    p.readahead =
                        Some(parsed.ok_or_else(|| {
                            bad("readahead", "write a size up to 1Gi such as 64Mi; 0 is off")
                        })?);
                }
                "part" => {
                    let parsed = parse_bytes(value).filter(|b| (PART_MIN..=1 << 30).contains(b));
                    p.part =
                        Some(parsed.ok_or_else(|| bad("part", "write a size from 64Ki to 1Gi such as 8Mi"))?);
                }
                "parallelParts" => {
                    let parsed = value.parse().ok().filter(|parts| (1..=PARALLEL_PARTS_MAX).contains(parts));
                    p.parallel_parts =
                        Some(parsed.ok_or_else(|| bad("parallelParts", "write a number from 1 to 1024"))?);
                }
                "cacheLimit" => {
                    let parsed = parse_bytes(value).filter(|b| *b > 0);
                    p.cache_limit =
                        Some(parsed.ok_or_else(|| bad("cacheLimit", "write a size such as 100Gi"))?);
                }
                "attributes" => {
                    p.attributes = match value {
                        "volume" => AttributesFrom::Volume,
                        "source" => AttributesFrom::Source,
                        _ => return Err(bad("attributes", "use \"volume\" or \"source\"")),
                    }
                }
                "uid" => p.uid = id(value).ok_or_else(|| bad("uid", "write a numeric user id"))?,
                "gid" => p.gid = id(value).ok_or_else(|| bad("gid", "write a numeric group id"))?,
                "fileMode" => {
                    let parsed = mode(value).ok_or_else(|| bad("fileMode", "write octal such as 0444"))?;
                    file_mode = Some(parsed);
                }
                "dirMode" => {
                    let parsed = mode(value).ok_or_else(|| bad("dirMode", "write octal such as 0555"))?;
                    dir_mode = Some(parsed);
                }
                "healTimeout" => {
                    p.heal_timeout = Self::heal_timeout_of(value)
                        .ok_or_else(|| bad("healTimeout", "write a duration from 1s to 1h"))?;
                }
                "storeTimeout" => {
                    let parsed = limit(value, Duration::from_secs(1), Duration::from_secs(86_400));
                    p.store_timeout =
                        parsed.ok_or_else(|| bad("storeTimeout", "write a duration from 1s to 24h"))?;
                }
                other => return Err(unknown(other)),
            }
        }
        p.freshness = match (freshness.as_deref(), ttl) {
            (None, None) => p.freshness,
            (None | Some("ttl"), Some(ttl)) => Freshness::Ttl(ttl),
            (Some("ttl"), None) => Self::default().freshness,
            (Some("static"), None) => Freshness::Static,
            (Some("strict"), None) => Freshness::Strict,
            (Some(other @ ("static" | "strict")), Some(_)) => {
                return Err(ParameterError::TtlWithoutTtl(other.to_owned()));
            }
            (Some(other), _) => {
                let expected = "use \"static\", \"ttl\" or \"strict\"";
                return Err(ParameterError::Value { name: "freshness", value: other.to_owned(), expected });
            }
        };
        p.stale_if_error = match (p.freshness, stale) {
            (Freshness::Ttl(_), Some(stale)) => stale,
            (_, None | Some(Duration::ZERO)) => p.stale_if_error,
            (Freshness::Static, Some(_)) => return Err(ParameterError::StaleWithoutTtl("static")),
            (Freshness::Strict, Some(_)) => return Err(ParameterError::StaleWithoutTtl("strict")),
        };
        if p.profile == Profile::Small && p.freshness == Freshness::Strict {
            return Err(ParameterError::SmallStrict);
        }
        // Spelled out, the default is refused, too: who names one believes that the volume can be written to.
        p.write_mode = match (p.access, write_mode) {
            (Access::ReadOnly, Some(_)) => return Err(ParameterError::WriteModeWithoutWrites),
            (_, write_mode) => write_mode.unwrap_or_default(),
        };
        if p.access == Access::ReadWrite && p.profile == Profile::Small {
            return Err(ParameterError::WritableSmall);
        }
        if p.access == Access::ReadWrite && p.freshness == Freshness::Static {
            return Err(ParameterError::WritableStatic);
        }
        let modes = p.access.modes();
        (p.file_mode, p.dir_mode) = (file_mode.unwrap_or(modes.0), dir_mode.unwrap_or(modes.1));
        let source = source.ok_or(ParameterError::NoSource)?;
        // Those that not every store has a use for. (OSS takes buckets in one style only.)
        let meant: &[&str] = match &source {
            SourceUrl::S3 { .. } => {
                &["endpoint", "region", "addressingStyle", "allowHttp", "requesterPays", "extraHeaders"]
            }
            SourceUrl::Oss { .. } => &["endpoint", "region", "allowHttp", "requesterPays", "extraHeaders"],
            SourceUrl::Gcs { .. } => &["endpoint", "allowHttp", "requesterPays", "extraHeaders"],
            SourceUrl::Azure { .. } => &["endpoint", "storageAccount", "allowHttp", "extraHeaders"],
            SourceUrl::Web { .. } => &["manifest", "allowHttp", "extraHeaders"],
            SourceUrl::Hdfs { .. } => &["nameNodes", "hadoopConfig", "hdfsUser"],
            SourceUrl::Dir { .. } => &[],
        };
        if let Some(name) = special.iter().find(|name| !meant.contains(name)) {
            return Err(ParameterError::NotForScheme { name, scheme: source.scheme() });
        }
        // Said of any other it would be a promise that nobody keeps. (`volume` is what all do anyway.)
        if p.attributes == AttributesFrom::Source
            && !matches!(source, SourceUrl::Hdfs { .. } | SourceUrl::Dir { .. })
        {
            return Err(ParameterError::NoAttributes { scheme: source.scheme() });
        }
        if p.access == Access::ReadWrite && !matches!(source, SourceUrl::S3 { .. } | SourceUrl::Dir { .. }) {
            return Err(ParameterError::NotWritable { scheme: source.scheme() });
        }
        if source.endpoint().is_some() {
            let account = p.storage_account.is_some().then_some("storageAccount");
            if let Some(name) = p.endpoint.is_some().then_some("endpoint").or(account) {
                return Err(ParameterError::TwoEndpoints { source_url: source, name });
            }
        }
        if matches!(&source, SourceUrl::Hdfs { authority, .. } if authority.contains(':'))
            && !p.name_nodes.is_empty()
        {
            return Err(ParameterError::OneNameNode { source_url: source });
        }
        if matches!(&source, SourceUrl::Azure { host: None, .. }) && p.storage_account.is_none() {
            return Err(ParameterError::NoAccount { source_url: source });
        }
        if let Some(endpoint) = p.endpoint.clone().or_else(|| source.endpoint())
            && endpoint.scheme() == "http"
            && !p.allow_http
        {
            let name = if p.endpoint.is_some() { "endpoint" } else { "source" };
            return Err(ParameterError::PlainHttp { name, endpoint: endpoint.to_string() });
        }
        if on_delete == OnDelete::Delete {
            if p.access != Access::ReadWrite {
                return Err(ParameterError::DeleteWithoutWrites);
            }
            if !matches!(source, SourceUrl::S3 { .. }) {
                return Err(ParameterError::NotDeletable { scheme: source.scheme() });
            }
            if !is_private(
                source_template.as_deref().unwrap_or_default(),
                path.as_deref().unwrap_or_default(),
            )? {
                return Err(ParameterError::NotPrivate);
            }
        }
        if allowed.is_none() && claim_chooses(source_template.as_deref(), path.as_deref())? {
            return Err(ParameterError::NoAllowedSources);
        }
        let source = match path {
            None => source,
            Some(path) => source.join(&expand_path(&path, values)?)?,
        };
        if let Some(allowed) = allowed
            && !allowed.covers(&source)
        {
            return Err(ParameterError::NotAllowed { source_url: source, allowed: allowed.to_string() });
        }
        if on_delete == OnDelete::Delete && !source.is_directory_of_a_bucket() {
            return Err(ParameterError::WholeBucket(source));
        }
        Ok((source, p))
    }

    pub(crate) fn heal_timeout_of(value: &str) -> Option<Duration> {
        limit(value, Duration::from_secs(1), Duration::from_secs(3600))
    }

    /// The text of a source that was parsed beside these parameters.
    pub fn shown(&self, source: &SourceUrl) -> String {
        self.later.shown(source.to_string())
    }

    /// What differs from the default: name and value as [`Parameters::parse`] reads them, each value in the one spelling
    /// that it always has, for the identity of mounts hangs on it.
    pub(crate) fn chosen(&self) -> Vec<(&'static str, String)> {
        // Every field by name: one that is added and not written here does not compile.
        let Self {
            endpoint,
            region,
            storage_account,
            manifest,
            name_nodes,
            hadoop_config,
            hdfs_user,
            addressing,
            allow_http,
            requester_pays,
            extra_headers,
            access,
            write_mode,
            freshness,
            stale_if_error,
            profile,
            readahead,
            part,
            parallel_parts,
            cache_limit,
            attributes,
            uid,
            gid,
            file_mode,
            dir_mode,
            heal_timeout,
            store_timeout,
            later,
        } = self;
        let default = Self::default();
        let default_modes = access.modes();
        let word = |chosen: bool, text: &str| chosen.then(|| text.to_owned());
        let octal = |mode: u32| format!("{mode:04o}");
        let (fresh, ttl) = match freshness {
            Freshness::Static => (Some("static".to_owned()), None),
            Freshness::Strict => (Some("strict".to_owned()), None),
            Freshness::Ttl(ttl) => (None, (*freshness != default.freshness).then(|| duration_text(*ttl))),
        };
        // Without a `ttl` it has no meaning, and is not written.
        let stale = match (freshness, stale_if_error) {
            (Freshness::Ttl(_), stale) if stale.is_zero() => Some("0".to_owned()),
            (Freshness::Ttl(_), stale) => (*stale != default.stale_if_error).then(|| duration_text(*stale)),
            (Freshness::Static | Freshness::Strict, _) => None,
        };
        let all = [
            ("endpoint", endpoint.as_ref().map(Url::to_string)),
            ("region", region.clone()),
            ("storageAccount", storage_account.clone()),
            ("manifest", manifest.clone()),
            ("nameNodes", (!name_nodes.is_empty()).then(|| name_nodes.join(","))),
            ("hadoopConfig", hadoop_config.clone()),
            ("hdfsUser", hdfs_user.clone()),
            ("addressingStyle", word(*addressing == Addressing::Virtual, "virtual")),
            ("allowHttp", word(*allow_http, "true")),
            ("requesterPays", word(*requester_pays, "true")),
            ("extraHeaders", headers::text(extra_headers)),
            ("access", word(*access == Access::ReadWrite, "readWrite")),
            ("writeMode", word(*write_mode == WriteMode::Back, "back")),
            ("freshness", fresh),
            ("metadataTtl", ttl),
            ("staleIfError", stale),
            (
                "profile",
                match profile {
                    Profile::Auto => None,
                    Profile::Large => Some("large".to_owned()),
                    Profile::Small => Some("small".to_owned()),
                },
            ),
            ("readahead", readahead.map(|bytes| bytes.to_string())),
            ("part", part.map(|bytes| bytes.to_string())),
            ("parallelParts", parallel_parts.map(|parts| parts.to_string())),
            ("cacheLimit", cache_limit.map(|bytes| bytes.to_string())),
            ("attributes", word(*attributes == AttributesFrom::Source, "source")),
            ("uid", (*uid != default.uid).then(|| uid.to_string())),
            ("gid", (*gid != default.gid).then(|| gid.to_string())),
            ("fileMode", (*file_mode != default_modes.0).then(|| octal(*file_mode))),
            ("dirMode", (*dir_mode != default_modes.1).then(|| octal(*dir_mode))),
            ("healTimeout", (*heal_timeout != default.heal_timeout).then(|| duration_text(*heal_timeout))),
            (
                "storeTimeout",
                (*store_timeout != default.store_timeout).then(|| duration_text(*store_timeout)),
            ),
        ];
        later.say(all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect())
    }
}

/// In the largest of s, ms and ns that leaves nothing out.
fn duration_text(duration: Duration) -> String {
    match duration.subsec_nanos() {
        0 => format!("{}s", duration.as_secs()),
        nanos if nanos % 1_000_000 == 0 => format!("{}ms", duration.as_millis()),
        _ => format!("{}ns", duration.as_nanos()),
    }
}

/// Of a name that is not known, characters.
const NAME_SHOWN: usize = 80;

fn unknown(name: &str) -> ParameterError {
    let distance = |known: &&str| strsim::damerau_levenshtein(&known.to_lowercase(), &name.to_lowercase());
    // Comparing takes memory and time by the length of both, and a name may be as long as a request.
    let comparable = known().filter(|_| name.len() <= NAME_SHOWN);
    let nearest = comparable.min_by_key(distance).filter(|known| distance(known) <= 3);
    ParameterError::Unknown { name: name.chars().take(NAME_SHOWN).collect(), nearest }
}

/// HDFS takes any; a slash or an at sign would be a part of a principal.
pub(crate) fn is_hdfs_user(name: &str) -> bool {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    (1..=64).contains(&name.len()) && name.chars().all(legal)
}

fn id(value: &str) -> Option<u32> {
    value.parse().ok().filter(|id| *id != u32::MAX)
}

/// Permission bits only: no volume carries a setuid, setgid or sticky bit.
fn mode(value: &str) -> Option<u32> {
    u32::from_str_radix(value.strip_prefix("0o").unwrap_or(value), 8).ok().filter(|m| *m <= 0o777)
}

fn limit(value: &str, least: Duration, most: Duration) -> Option<Duration> {
    parse_duration(value).filter(|d| (least..=most).contains(d))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<(SourceUrl, Parameters), ParameterError> {
        Parameters::parse(pairs.iter().copied(), &TemplateValues::default())
    }

    #[test]
    fn an_unknown_parameter_names_the_nearest_known_one() {
        let error = parse(&[("source", "s3://bucket"), ("freshnes", "ttl")]).unwrap_err();
        assert_eq!(error.to_string(), "unknown parameter \"freshnes\": did you mean \"freshness\"?");
        let long = "freshnes".repeat(1 << 20);
        let error = parse(&[("source", "s3://bucket"), (&long, "ttl")]).unwrap_err();
        assert!(matches!(error, ParameterError::Unknown { nearest: None, name } if name.len() == 80));
        let error = parse(&[("colour", "blue")]).unwrap_err().to_string();
        assert!(error.contains("known: source"), "{error}");
    }

    #[test]
    fn values_are_checked() {
        for (name, value) in [
            ("endpoint", "localhost:9000"),
            ("endpoint", "https://user:pw@host"),
            ("endpoint", "https://host/path"),
            ("region", "eu central"),
            ("addressingStyle", "host"),
            ("allowHttp", "yes"),
            ("access", "rw"),
            ("access", "readonly"),
            ("writeMode", "async"),
            ("onDelete", "wipe"),
            ("freshness", "fresh"),
            ("metadataTtl", "60"),
            ("staleIfError", "60"),
            ("staleIfError", "400d"),
            ("profile", "huge"),
            ("nameNodes", ""),
            ("nameNodes", "a,,b"),
            ("nameNodes", "hdfs://a:8020"),
            ("nameNodes", "a,a,a,a,a,a,a,a,a"),
            ("hadoopConfig", "../prod"),
            ("hadoopConfig", ".."),
            ("hdfsUser", "alice@REALM"),
            ("hdfsUser", ""),
            ("readahead", "2Gi"),
            ("part", "4Ki"),
            ("part", "2Gi"),
            ("parallelParts", "0"),
            ("parallelParts", "1025"),
            ("parallelParts", "many"),
            ("cacheLimit", "0"),
            ("attributes", "both"),
            ("uid", "-1"),
            ("gid", "4294967295"),
            ("fileMode", "4755"),
            ("dirMode", "rwx"),
            ("healTimeout", "0s"),
            ("storeTimeout", "forever"),
        ] {
            let error = parse(&[("source", "s3://bucket"), (name, value)]).unwrap_err();
            assert!(
                matches!(&error, ParameterError::Value { name: n, .. } if *n == name),
                "{name}={value}: {error}"
            );
            assert!(!error.to_string().contains("pw@"), "{error}");
        }
    }

    #[test]
    fn combinations_that_mean_nothing_are_refused() {
        let s3 = ("source", "s3://bucket");
        assert!(matches!(
            parse(&[s3, ("freshness", "static"), ("metadataTtl", "5s")]),
            Err(ParameterError::TtlWithoutTtl(_))
        ));
        assert!(matches!(parse(&[s3, ("endpoint", "http://h:1")]), Err(ParameterError::PlainHttp { .. })));
        let of_source = ("attributes", "source");
        let error = parse(&[s3, of_source]).unwrap_err();
        assert_eq!(error, ParameterError::NoAttributes { scheme: "s3" });
        assert!(parse(&[("source", "hdfs://h:8020/x"), of_source]).is_ok());
        assert!(parse(&[s3, ("attributes", "volume")]).is_ok());
        let web = [("source", "http://h/x")];
        assert!(matches!(parse(&web), Err(ParameterError::PlainHttp { name: "source", .. })));
        assert!(parse(&[web[0], ("allowHttp", "true"), ("manifest", "lists/files.tsv")]).is_ok());
        assert!(matches!(
            parse(&[("source", "https://h/x"), ("endpoint", "https://h")]),
            Err(ParameterError::NotForScheme { name: "endpoint", scheme: "https" })
        ));
        for manifest in ["", "/files", "a/../b", "a//b", "a\n"] {
            assert!(parse(&[("source", "https://h/x"), ("manifest", manifest)]).is_err(), "{manifest:?}");
        }
        let hdfs = ("source", "hdfs://ns/x");
        let (_, p) = parse(&[hdfs, ("nameNodes", "a, b:9000"), ("hdfsUser", "alice")]).unwrap();
        assert_eq!(
            (p.name_nodes, p.hdfs_user.as_deref()),
            (vec!["a:8020".into(), "b:9000".into()], Some("alice"))
        );
        assert!(matches!(
            parse(&[("source", "hdfs://nn:8020/x"), ("nameNodes", "a,b")]),
            Err(ParameterError::OneNameNode { .. })
        ));
        assert!(matches!(
            parse(&[hdfs, ("endpoint", "https://h")]),
            Err(ParameterError::NotForScheme { name: "endpoint", scheme: "hdfs" })
        ));
        assert!(matches!(
            parse(&[s3, ("hdfsUser", "alice")]),
            Err(ParameterError::NotForScheme { name: "hdfsUser", scheme: "s3" })
        ));
        assert!(parse(&[s3, ("endpoint", "http://h:1"), ("allowHttp", "true")]).is_ok());
        assert_eq!(
            parse(&[s3, ("profile", "small"), ("freshness", "strict")]),
            Err(ParameterError::SmallStrict)
        );
        assert!(matches!(
            parse(&[("source", "file:///d"), ("region", "x")]),
            Err(ParameterError::NotForScheme { name: "region", scheme: "file" })
        ));
        assert!(matches!(
            parse(&[("source", "file:///d"), ("extraHeaders", "x-a: b")]),
            Err(ParameterError::NotForScheme { name: "extraHeaders", scheme: "file" })
        ));
        assert_eq!(
            parse(&[s3, ("extraHeaders", "Host: h")]),
            Err(ParameterError::ExtraHeaders(HeaderError::Owned("host".into())))
        );
        assert_eq!(parse(&[]), Err(ParameterError::NoSource));
    }

    #[test]
    fn what_can_be_written_to_is_an_s3_bucket_or_a_directory_that_is_looked_at_again() {
        let (s3, write) = (("source", "s3://bucket"), ("access", "readWrite"));
        for source in ["s3://bucket/a", "s3a://bucket/a", "file:///data"] {
            let (_, p) = parse(&[("source", source), write]).unwrap();
            assert_eq!((p.access, p.write_mode), (Access::ReadWrite, WriteMode::Through), "{source}");
        }
        let (_, back) = parse(&[s3, write, ("writeMode", "back"), ("freshness", "strict")]).unwrap();
        assert_eq!(back.write_mode, WriteMode::Back);
        for (source, scheme) in [
            ("oss://bucket.oss-cn-shanghai.aliyuncs.com", "oss"),
            ("gs://bucket", "gs"),
            ("abfss://container@account1.dfs.core.windows.net", "az"),
            ("https://h/x", "https"),
            ("hdfs://h:8020/x", "hdfs"),
        ] {
            let error = parse(&[("source", source), write]).unwrap_err();
            assert_eq!(error, ParameterError::NotWritable { scheme });
            assert!(error.to_string().contains("s3:// or file://"), "{error}");
            assert!(parse(&[("source", source), ("access", "readOnly")]).is_ok());
        }
        assert_eq!(parse(&[s3, write, ("profile", "small")]), Err(ParameterError::WritableSmall));
        assert_eq!(parse(&[s3, write, ("freshness", "static")]), Err(ParameterError::WritableStatic));
        for mode in ["through", "back"] {
            for access in [None, Some(("access", "readOnly"))] {
                let pairs: Vec<_> = [s3, ("writeMode", mode)].into_iter().chain(access).collect();
                assert_eq!(parse(&pairs), Err(ParameterError::WriteModeWithoutWrites));
            }
        }
    }

    #[test]
    fn only_a_directory_of_ones_own_in_a_bucket_is_deleted_with_its_volume() {
        let values = TemplateValues {
            pvc_name: Some("claim".into()),
            pvc_namespace: Some("team".into()),
            pv_name: Some("pvc-1".into()),
            pvc_annotations: [("a".to_owned(), "x/y".to_owned())].into(),
        };
        let class = |source, path, access, on_delete| {
            let pairs = [("source", source), ("path", path), ("access", access), ("onDelete", on_delete)];
            let allowed = ("allowedSources", "s3://*");
            Parameters::parse(pairs.into_iter().chain([allowed]), &values)
        };
        let s3 = "s3://bucket/work";
        for path in [
            "${pv.name}",
            "${pvc.namespace}/${pvc.name}",
            "x-${pvc.name}/in/${pvc.namespace}-y",
            "${pvc.annotations['a']}/${pv.name}",
        ] {
            let (_, p) = class(s3, path, "readWrite", "delete").unwrap();
            // Nodes need not know of it.
            assert_eq!(p.chosen(), [("access", "readWrite".to_owned())], "{path}");
        }
        assert!(class("s3://bucket/${pvc.namespace}", "${pvc.name}", "readWrite", "delete").is_ok());
        for path in [
            "",
            "all",
            "${pvc.name}",
            "${pvc.namespace}",
            // team-a and b, or team and a-b.
            "${pvc.namespace}-${pvc.name}",
            "${pvc.namespace}${pv.name}",
            "${pvc.annotations['a']}",
            "${pvc.annotations['a']}/${pvc.name}",
        ] {
            let error = class(s3, path, "readWrite", "delete").unwrap_err();
            assert_eq!(error, ParameterError::NotPrivate, "{path}");
            assert!(error.to_string().contains("${pvc.namespace}/${pvc.name}"), "{error}");
            assert!(class(s3, path, "readWrite", "retain").is_ok(), "{path}");
        }
        let whole = class("s3://bucket-${pv.name}", "", "readWrite", "delete").unwrap_err();
        assert!(matches!(whole, ParameterError::WholeBucket(_)), "{whole}");
        let path = "${pv.name}";
        assert_eq!(class(s3, path, "readOnly", "delete"), Err(ParameterError::DeleteWithoutWrites));
        assert!(class(s3, path, "readOnly", "retain").is_ok());
        let pairs =
            [("source", "file:///data"), ("path", path), ("access", "readWrite"), ("onDelete", "delete")];
        let error = Parameters::parse(pairs, &values).unwrap_err();
        assert_eq!(error, ParameterError::NotDeletable { scheme: "file" });
        for value in ["Delete", "", "yes", "${pvc.annotations['a']}"] {
            assert!(class(s3, path, "readWrite", value).is_err(), "{value}");
        }
    }

    #[test]
    fn modes_that_are_not_said_let_the_owner_write_where_a_volume_can_be_written_to() {
        let s3 = ("source", "s3://bucket");
        for (pairs, modes) in [
            (&[s3][..], (0o444, 0o555)),
            (&[s3, ("access", "readOnly")], (0o444, 0o555)),
            (&[s3, ("access", "readWrite")], (0o644, 0o755)),
            // In whichever order they are said.
            (&[("fileMode", "0444"), s3, ("access", "readWrite")], (0o444, 0o755)),
            (&[s3, ("access", "readWrite"), ("dirMode", "0555")], (0o644, 0o555)),
            (&[s3, ("fileMode", "0644")], (0o644, 0o555)),
        ] {
            let (_, p) = parse(pairs).unwrap();
            assert_eq!((p.file_mode, p.dir_mode), modes, "{pairs:?}");
            // What is left out is what it is where it is left out.
            let chosen = p.chosen();
            let again: Vec<_> = chosen.iter().map(|(n, v)| (*n, v.as_str())).chain([s3]).collect();
            assert_eq!(parse(&again).unwrap().1, p, "{chosen:?}");
        }
    }

    #[test]
    fn kubernetes_own_keys_are_accepted_and_a_ttl_implies_freshness_ttl() {
        let (source, p) = parse(&[
            ("source", "s3://bucket/x"),
            ("csi.storage.k8s.io/pvc/name", "claim"),
            ("metadataTtl", "5s"),
        ])
        .unwrap();
        assert_eq!(source.to_string(), "s3://bucket/x/");
        assert_eq!(p.freshness, Freshness::Ttl(Duration::from_secs(5)));
    }

    #[test]
    fn the_last_known_is_used_for_an_hour_unless_said_otherwise_and_only_where_there_is_a_ttl() {
        let of = |pairs: &[(&str, &str)]| {
            let all: Vec<_> = [("source", "s3://bucket")].iter().chain(pairs).copied().collect();
            parse(&all).map(|(_, p)| p.stale_if_error)
        };
        assert_eq!(of(&[]), Ok(Duration::from_secs(3600)));
        assert_eq!(of(&[("staleIfError", "5m")]), Ok(Duration::from_secs(300)));
        assert_eq!(of(&[("staleIfError", "0")]), Ok(Duration::ZERO));
        for freshness in ["static", "strict"] {
            let freshness = ("freshness", freshness);
            assert!(of(&[freshness]).is_ok() && of(&[freshness, ("staleIfError", "0")]).is_ok());
            assert_eq!(
                of(&[freshness, ("staleIfError", "1h")]),
                Err(ParameterError::StaleWithoutTtl(freshness.1))
            );
        }
        // What is left out, as by a build that did not know it, is the default.
        let written = |stale| Parameters { stale_if_error: stale, ..Parameters::default() }.chosen();
        assert_eq!(written(Duration::from_secs(3600)), []);
        assert_eq!(written(Duration::ZERO), [("staleIfError", "0".to_owned())]);
        assert_eq!(written(Duration::from_secs(60)), [("staleIfError", "60s".to_owned())]);
    }

    #[test]
    fn templates_are_filled_in_where_a_claim_may_choose_and_refused_elsewhere() {
        let values = TemplateValues {
            pvc_name: Some("claim".into()),
            pvc_annotations: [("uid".to_owned(), "1000".to_owned())].into(),
            ..TemplateValues::default()
        };
        let with = |name, value| Parameters::parse([("source", "s3://bucket"), (name, value)], &values);
        assert_eq!(with("uid", "${pvc.annotations['uid']}").unwrap().1.uid, 1000);
        for name in [
            "endpoint",
            "allowHttp",
            "extraHeaders",
            "access",
            "writeMode",
            "onDelete",
            "part",
            "parallelParts",
            "cacheLimit",
            "healTimeout",
            "storeTimeout",
            "allowedSources",
        ] {
            let error = with(name, "${pvc.annotations['uid']}").unwrap_err();
            assert!(matches!(error, ParameterError::NotTemplated { name: n } if n == name), "{error}");
        }
        let error = with("uidd", "${pvc.annotations['uid']}").unwrap_err();
        assert!(matches!(error, ParameterError::Unknown { nearest: Some("uid"), .. }), "{error}");
    }
}
