//! What people write of volumes: StorageClass parameters with templates, sources, patterns of the allow-list, secrets, and
//! a volume's text between processes.
//!
//! An input is lines. `NAME=VALUE` is a parameter (or a key of a secret), `:NAME=VALUE` a value of the claim; and each
//! line is a source, a template, a pattern and a volume's text, too.

#![no_main]

use fuzz::Bound;
use libfuzzer_sys::fuzz_target;
use std::path::{Component, Path};
use volume::{
    AllowList, Credentials, EndpointPattern, Parameters, SourceUrl, TemplateValues, VolumeId, VolumeSpec,
    WireSpec, claim_chooses, expand, parse_bytes, parse_duration, uses_annotations,
};

/// A line is kept in a few forms at a time, and a name in a host may be written in four bytes for one. A short template
/// is filled in with a value of at most 1 KiB for each 11 bytes.
const BOUND: Bound = Bound { times: 256, besides: 256 << 10 };

fuzz_target!(|input: &[u8]| {
    let Ok(text) = std::str::from_utf8(input) else { return };
    BOUND.hold(input, || run(text));
});

fn run(text: &str) {
    let mut values = TemplateValues::default();
    let (mut pairs, mut secrets) = (Vec::new(), Vec::new());
    for line in text.lines().take(64) {
        let Some((name, value)) = line.split_once('=') else { continue };
        match name {
            ":pvc.name" => values.pvc_name = Some(value.to_owned()),
            ":pvc.namespace" => values.pvc_namespace = Some(value.to_owned()),
            ":pv.name" => values.pv_name = Some(value.to_owned()),
            "accessKeyId" | "secretAccessKey" | "sessionToken" => secrets.push((name, value)),
            _ => match name.strip_prefix(':') {
                Some(key) => drop(values.pvc_annotations.insert(key.to_owned(), value.to_owned())),
                None => pairs.push((name, value)),
            },
        }
    }
    parameters(&pairs, &values);
    credentials(&secrets);
    for line in text.lines().take(16) {
        source(line);
        template(line, &values);
        pattern(line);
        wire(line);
        let _ = (parse_bytes(line), parse_duration(line), VolumeId::parse(line));
    }
}

fn parameters(pairs: &[(&str, &str)], values: &TemplateValues) {
    let _ = uses_annotations(pairs.iter().map(|(_, value)| *value));
    let (source, parameters) = match Parameters::parse(pairs.iter().copied(), values) {
        Ok(found) => found,
        Err(error) => return drop(error.to_string()),
    };
    stays_below(&source);
    let given = |wanted: &str| pairs.iter().rev().find(|(name, _)| *name == wanted).map(|(_, value)| *value);
    if let (Some(above), Some(path)) = (given("source"), given("path"))
        && !above.contains("${")
    {
        let above = SourceUrl::parse(above).expect("it was parsed as a part of this");
        let (above, below) = (above.to_string(), source.to_string());
        let rest = below.strip_prefix(above.as_str()).expect("a path leads below the source");
        assert!(rest.is_empty() == path.trim_end_matches('/').is_empty() || path.contains("${"), "{below}");
    }
    // As another process is told of it, and as a build understands what itself has written.
    let spec = VolumeSpec { id: VolumeId::parse("v").expect("a name"), source, parameters };
    let told = WireSpec::from(&spec);
    let text = serde_json::to_string(&told).expect("text");
    let read: WireSpec = serde_json::from_str(&text).expect("it was just written");
    assert_eq!((&read, read.digest()), (&told, spec.digest()));
    assert_eq!(read.understand().as_ref(), Ok(&spec));
    let _ = AllowList::default().check(&spec.source, &spec.parameters).expect_err("nothing is allowed");
}

fn credentials(secrets: &[(&str, &str)]) {
    match Credentials::from_secrets(secrets.iter().copied()) {
        Ok(found) => {
            let again = found.to_secrets();
            assert!(again.values().all(|value| !value.is_empty() && !value.contains(char::is_control)));
            let others = Credentials::from_secrets(again.keys().map(|name| (name, "another")));
            assert_eq!(format!("{:?}", others.expect("each is a word")), format!("{found:?}"));
            assert_eq!(Credentials::from_secrets(again), Ok(found));
        }
        Err(error) => {
            let shown = error.to_string();
            // A value with spaces may be the sentence itself.
            let is_long = |value: &str| value.len() >= 80 && !value.contains(' ');
            assert!(!secrets.iter().any(|(_, value)| is_long(value) && shown.contains(value)));
        }
    }
}

fn source(text: &str) {
    let Ok(source) = SourceUrl::parse(text) else { return };
    stays_below(&source);
    assert_eq!(SourceUrl::parse(&source.to_string()).as_ref(), Ok(&source));
    for below in ["", "a", "a/b/", text] {
        let Ok(joined) = source.join(below) else { continue };
        stays_below(&joined);
        assert!(joined.to_string().starts_with(&source.to_string()));
    }
}

/// No segment leads out of it, and none is left to a store's or a kernel's guess.
fn stays_below(source: &SourceUrl) {
    match source {
        SourceUrl::Web { origin, prefix } => {
            let url = source.endpoint().expect("it is an origin");
            assert!(url.origin().ascii_serialization() == *origin && url.path() == "/");
            assert!(stays(prefix));
        }
        SourceUrl::S3 { bucket, prefix }
        | SourceUrl::Oss { bucket, prefix, .. }
        | SourceUrl::Gcs { bucket, prefix }
        | SourceUrl::Azure { container: bucket, prefix, .. } => {
            let host = source.endpoint().and_then(|url| url.host_str().map(str::to_owned));
            let clouds =
                [".aliyuncs.com", ".core.windows.net", ".core.chinacloudapi.cn", ".core.usgovcloudapi.net"];
            assert!(host.is_none_or(|host| clouds.iter().any(|cloud| host.ends_with(cloud))));
            assert!(!bucket.contains(['/', '@', '?', '#', '\0']) && stays(prefix));
        }
        SourceUrl::Hdfs { authority, prefix } => {
            assert!(source.endpoint().is_none() && stays(prefix));
            let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | ':');
            assert!(!authority.is_empty() && authority.chars().all(legal));
        }
        SourceUrl::Dir { path } => {
            assert!(path.is_absolute() && !path.as_os_str().as_encoded_bytes().contains(&0));
            let plain = |c: Component<'_>| matches!(c, Component::RootDir | Component::Normal(_));
            assert!(Path::new(path).components().all(plain));
        }
    }
}

fn stays(prefix: &str) -> bool {
    let mut segments = prefix.strip_suffix('/').unwrap_or(prefix).split('/');
    let plain = segments.all(|segment| !matches!(segment, "" | "." | "..") && !segment.contains('\0'));
    prefix.is_empty() || (prefix.ends_with('/') && plain)
}

fn template(text: &str, values: &TemplateValues) {
    let Ok(filled) = expand(text, values) else { return };
    assert!(claim_chooses(Some(text), Some(text)).is_ok());
    if !text.contains("${") {
        assert_eq!(filled, text);
    }
}

fn pattern(text: &str) {
    let Ok(pattern) = EndpointPattern::parse(text) else { return };
    assert_eq!(pattern.to_string(), text);
    assert_eq!(EndpointPattern::parse(&pattern.to_string()).as_ref(), Ok(&pattern));
    // What it names as an endpoint is covered, and no other host than one below it.
    let values = TemplateValues::default();
    let bucket = ("source", "s3://bucket");
    for endpoint in [text, "https://evil.example.org"] {
        let pairs = [bucket, ("endpoint", endpoint), ("allowHttp", "true")];
        let Ok((source, parameters)) = Parameters::parse(pairs, &values) else { continue };
        let allow = AllowList {
            sources: vec!["s3://*".to_owned()],
            endpoints: vec![pattern.clone()],
            roots: Vec::new(),
        };
        let allowed = allow.check(&source, &parameters).is_ok();
        assert!(allowed || endpoint != text || !pattern.is_named());
        assert!(!allowed || endpoint == text || text.contains('*') || text.contains("evil"));
    }
}

fn wire(text: &str) {
    let Ok(told) = serde_json::from_str::<WireSpec>(text) else { return };
    let _ = told.heal_timeout();
    let again = serde_json::to_string(&told).expect("text");
    assert_eq!(serde_json::from_str::<WireSpec>(&again).expect("it was just written"), told);
    match told.understand() {
        Ok(spec) => {
            stays_below(&spec.source);
            assert_eq!(WireSpec::from(&spec).understand().as_ref(), Ok(&spec));
        }
        Err(error) => drop(error.to_string()),
    }
}
