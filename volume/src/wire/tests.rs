use super::*;
use crate::{Access, Addressing, AttributesFrom, Freshness, Profile, WriteMode, golden};
use proptest::prelude::*;
use url::Url;

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden");

fn spec(source: &str, parameters: Parameters) -> VolumeSpec {
    VolumeSpec {
        id: VolumeId::parse("pvc-1").unwrap(),
        source: SourceUrl::parse(source).unwrap(),
        parameters,
    }
}

fn described(source: &str, pairs: &[(&str, &str)]) -> WireSpec {
    let all = pairs.iter().copied().chain([("source", source)]);
    let (source, parameters) = Parameters::parse(all, &TemplateValues::default()).unwrap();
    VolumeSpec { id: VolumeId::parse("pvc-1").unwrap(), source, parameters }.into()
}

/// Each parameter at a value of its own, and each enum at each of its values.
fn samples() -> Vec<WireSpec> {
    vec![
        described("s3://bucket", &[]),
        described("file:///data/set", &[("uid", "1000"), ("gid", "100")]),
        described(
            "s3://bucket/a/b",
            &[
                ("endpoint", "http://127.0.0.1:9000"),
                ("allowHttp", "true"),
                ("region", "eu-central-1"),
                ("addressingStyle", "virtual"),
                ("metadataTtl", "1500ms"),
                ("profile", "small"),
                ("readahead", "0"),
                ("cacheLimit", "100Gi"),
                ("fileMode", "0440"),
                ("dirMode", "0550"),
                ("healTimeout", "2m"),
                ("storeTimeout", "1h"),
            ],
        ),
        described("s3://bucket", &[("freshness", "static"), ("profile", "large"), ("path", "a?b/c=d")]),
        described("s3://bucket", &[("freshness", "strict")]),
        described("s3://bucket", &[("staleIfError", "5m"), ("part", "16Mi"), ("parallelParts", "48")]),
        described("s3://bucket", &[("requesterPays", "true")]),
        described("oss://bucket.oss-cn-shanghai-internal.aliyuncs.com/a", &[("path", "b@c/d")]),
        described("oss://bucket", &[("region", "cn-shanghai")]),
        described("gs://my_bucket/a", &[("path", "b@c/d"), ("requesterPays", "true")]),
        described(
            "az://container/a",
            &[("storageAccount", "account1"), ("path", "b@c/d"), ("staleIfError", "5m")],
        ),
        described("abfss://container@account1.dfs.core.windows.net/a", &[]),
        described("s3://bucket", &[("extraHeaders", "X-Tenant: team a\nx-route:eu\n")]),
        described("https://Data.example.com/a%20b", &[("manifest", "files.tsv"), ("path", "c d")]),
        described("http://127.0.0.1:8080", &[("allowHttp", "true")]),
        described(
            "hdfs://ns/a",
            &[("nameNodes", "a.example.com, b:9000"), ("hdfsUser", "alice"), ("path", "b@c/d")],
        ),
        described("hdfs://nn:8020", &[("hadoopConfig", "prod")]),
        described("hdfs://nn:8020", &[("attributes", "source")]),
        described("s3://bucket/a", &[("access", "readWrite")]),
        described(
            "file:///data/set",
            &[("access", "readWrite"), ("writeMode", "back"), ("fileMode", "0444"), ("dirMode", "0555")],
        ),
    ]
}

/// `digest, tab, JSON` of each sample.
#[test]
fn volumes_and_their_digests_are_those_of_the_golden_file() {
    let lines: Vec<String> = samples()
        .iter()
        .map(|s| format!("{}\t{}\n", s.digest(), serde_json::to_string(s).unwrap()))
        .collect();
    let text = golden::same(GOLDEN, "volumes-1.txt", &lines.concat());
    for (line, sample) in text.lines().zip(samples()) {
        let (digest, json) = line.split_once('\t').unwrap();
        let read: WireSpec = serde_json::from_str(json).unwrap();
        assert_eq!((read.digest().as_str(), &read), (digest, &sample));
        assert_eq!(WireSpec::from(read.understand().unwrap()), sample);
    }
}

/// As they lie on the disks and in the memory of nodes where a build of before the first release runs.
#[test]
fn volumes_of_before_the_first_release_are_read() {
    let text = golden::read(GOLDEN, "volumes-0.txt");
    let expected = [
        described("s3://bucket", &[]),
        described("file:///data/set", &[("freshness", "strict"), ("uid", "7"), ("fileMode", "0400")]),
        described(
            "s3://bucket/a",
            &[("endpoint", "https://h:1"), ("metadataTtl", "5s"), ("readahead", "1Mi")],
        ),
    ];
    let read: Vec<WireSpec> = text.lines().map(|json| serde_json::from_str(json).unwrap()).collect();
    assert_eq!(read, expected);
}

#[test]
fn a_default_is_not_said_and_does_not_change() {
    let spelled_out = [
        ("freshness", "ttl"),
        ("metadataTtl", "1m"),
        ("access", "readOnly"),
        ("profile", "auto"),
        ("addressingStyle", "path"),
        ("allowHttp", "false"),
        ("uid", "0"),
        ("gid", "0"),
        ("fileMode", "444"),
        ("dirMode", "0o555"),
        ("healTimeout", "60s"),
        ("storeTimeout", "5m"),
    ];
    let (said, unsaid) = (described("s3://bucket", &spelled_out), described("s3://bucket", &[]));
    assert_eq!((&said, said.digest()), (&unsaid, unsaid.digest()));
    assert!(said.parameters.is_empty() && said.hints.is_empty());
    let write = ("access", "readWrite");
    let spelled_out = [write, ("writeMode", "through"), ("fileMode", "0644"), ("dirMode", "0755")];
    let (said, unsaid) = (described("s3://bucket", &spelled_out), described("s3://bucket", &[write]));
    assert_eq!((&said, said.digest()), (&unsaid, unsaid.digest()));
    assert_eq!(said.parameters.len(), 1);
}

#[test]
fn what_must_be_understood_and_is_not_is_refused_by_name_and_concerns_one_volume() {
    let refused = |json: &str| {
        let spec: WireSpec = serde_json::from_str(json).expect("it can be passed on");
        spec.understand().unwrap_err().to_string()
    };
    let later = refused(r#"{"id":"v","source":"s3://bucket","parameters":{"rule":"x","uid":"1"}}"#);
    assert!(later.contains(r#"volume v needs "rule""#) && later.contains("upgrade"), "{later}");
    let scheme = refused(r#"{"id":"v","source":"later://x","parameters":{}}"#);
    assert!(scheme.contains(r#""later" is not supported"#) && scheme.contains("upgrade"), "{scheme}");
    let value = refused(r#"{"id":"v","source":"s3://bucket","parameters":{"freshness":"lease"}}"#);
    assert!(value.contains("freshness") && value.contains("upgrade"), "{value}");
    let twice = refused(r#"{"id":"v","source":"s3://bucket","parameters":{"uid":"1"},"hints":{"uid":"2"}}"#);
    assert!(twice.contains("twice"), "{twice}");
    // A peer cannot bring in by another name what the source decides, nor a template.
    for name in ["source", "path", "allowedSources", "onDelete", "csi.storage.k8s.io/ephemeral", "", "a\0b"] {
        let spec = WireSpec {
            parameters: [(name.to_owned(), "x".to_owned())].into(),
            ..described("s3://bucket", &[])
        };
        assert!(matches!(spec.understand(), Err(NotUnderstood::Parameters { .. })), "{name:?}");
    }
    let template = WireSpec {
        parameters: [("region".to_owned(), "${pvc.name}".to_owned())].into(),
        ..described("s3://bucket", &[])
    };
    assert!(template.understand().is_err());
}

#[test]
fn hints_that_are_not_known_are_ignored_passed_on_and_part_of_the_identity() {
    let plain = described("s3://bucket", &[("uid", "7")]);
    let hint = |name: &str, value: &str| WireSpec {
        hints: [(name.to_owned(), value.to_owned())].into(),
        ..plain.clone()
    };
    for hinted in [hint("later", "x"), hint("profile", "later")] {
        assert_eq!(hinted.understand().unwrap(), plain.understand().unwrap());
        let passed_on: WireSpec = serde_json::from_str(&serde_json::to_string(&hinted).unwrap()).unwrap();
        assert_eq!((&passed_on, passed_on.digest()), (&hinted, hinted.digest()));
        assert_ne!(hinted.digest(), plain.digest());
    }
    // One that is known counts, whatever it was called by the build that sent it.
    assert_eq!(hint("profile", "small").understand().unwrap().parameters.profile, Profile::Small);
    let must =
        WireSpec { parameters: hint("gid", "8").hints, hints: plain.parameters.clone(), ..plain.clone() };
    let may = WireSpec { parameters: plain.parameters.clone(), hints: hint("gid", "8").hints, ..plain };
    assert_eq!(must.digest(), may.digest());
}

#[test]
fn the_time_to_heal_is_known_to_those_who_understand_nothing_else() {
    let later = |timeout: &str| WireSpec {
        source: "later://x".into(),
        parameters: [("healTimeout", timeout), ("rule", "x")]
            .map(|(n, v)| (n.to_owned(), v.to_owned()))
            .into(),
        ..described("s3://bucket", &[])
    };
    assert_eq!(later("90s").heal_timeout(), Duration::from_secs(90));
    for strange in ["", "soon", "10years"] {
        assert_eq!(later(strange).heal_timeout(), Parameters::default().heal_timeout);
    }
}

#[test]
fn what_is_no_volume_is_an_error() {
    for text in [
        "",
        "{}",
        "null",
        r#"{"id":"v"}"#,
        r#"{"id":"../v","source":"s3://bucket"}"#,
        r#"{"id":"v","source":7}"#,
        r#"{"id":"v","source":"s3://bucket","parameters":{"uid":7}}"#,
        r#"{"id":"v","source":"s3://bucket","parameters":["uid"]}"#,
    ] {
        assert!(serde_json::from_str::<WireSpec>(text).is_err(), "{text}");
    }
}

#[allow(clippy::needless_update, reason = "parameters of the next version")]
fn parameters() -> impl Strategy<Value = Parameters> {
    let seconds = |most: u64| (1..=most).prop_map(Duration::from_secs);
    let freshness = prop_oneof![
        Just(Freshness::Static),
        Just(Freshness::Strict),
        (0..400_000_000_u64).prop_map(|ms| Freshness::Ttl(Duration::from_millis(ms))),
        (0..365 * 86_400_000_000_000_u64).prop_map(|ns| Freshness::Ttl(Duration::from_nanos(ns))),
    ];
    let profile = prop_oneof![Just(Profile::Auto), Just(Profile::Large), Just(Profile::Small)];
    let endpoint = prop_oneof![Just("https://h:1"), Just("http://127.0.0.1:9000"), Just("https://[::1]")];
    let headers = prop_oneof![Just(None), Just(Some("x-a: b")), Just(Some("x-a: b, c\nx-b: d"))];
    (
        (
            headers,
            prop::option::of(endpoint),
            prop::option::of("[a-z0-9-]{1,64}"),
            any::<bool>(),
            freshness,
            profile,
        ),
        (prop::option::of(0..=1_u64 << 30), prop::option::of(1..=u64::MAX), 0..u32::MAX, 0..u32::MAX),
        (0..=0o777_u32, 0..=0o777_u32, seconds(3600), seconds(86_400), any::<bool>()),
    )
        .prop_map(
            |(
                (headers, endpoint, region, virtual_, freshness, profile),
                (readahead, cache_limit, uid, gid),
                rest,
            )| {
                let (file_mode, dir_mode, heal_timeout, store_timeout, writable) = rest;
                let writable = writable && freshness != Freshness::Static && profile != Profile::Small;
                let strict = freshness == Freshness::Strict && profile == Profile::Small;
                Parameters {
                    allow_http: endpoint.is_some_and(|text| text.starts_with("http:")),
                    endpoint: endpoint.map(|text| Url::parse(text).unwrap()),
                    region,
                    extra_headers: crate::headers::parse(headers.unwrap_or_default()).unwrap(),
                    access: if writable { Access::ReadWrite } else { Access::ReadOnly },
                    write_mode: match writable && uid.is_multiple_of(3) {
                        true => WriteMode::Back,
                        false => WriteMode::Through,
                    },
                    addressing: if virtual_ { Addressing::Virtual } else { Addressing::Path },
                    freshness,
                    stale_if_error: match freshness {
                        Freshness::Ttl(_) => Duration::from_millis(u64::from(gid) % 4_000_000),
                        _ => Parameters::default().stale_if_error,
                    },
                    profile: if strict { Profile::Auto } else { profile },
                    readahead,
                    cache_limit,
                    attributes: if uid.is_multiple_of(2) {
                        AttributesFrom::Source
                    } else {
                        AttributesFrom::Volume
                    },
                    uid,
                    gid,
                    file_mode,
                    dir_mode,
                    heal_timeout,
                    store_timeout,
                    ..Parameters::default()
                }
            },
        )
}

/// Without what has no meaning for this source.
fn meant_for(source: &SourceUrl, mut parameters: Parameters) -> Parameters {
    if !matches!(source, SourceUrl::S3 { .. }) {
        parameters.addressing = Addressing::Path;
    }
    if matches!(source, SourceUrl::Gcs { .. } | SourceUrl::Azure { .. } | SourceUrl::Web { .. }) {
        parameters.region = None;
    }
    if !matches!(source, SourceUrl::Hdfs { .. } | SourceUrl::Dir { .. }) {
        parameters.attributes = AttributesFrom::Volume;
    }
    if !matches!(source, SourceUrl::S3 { .. } | SourceUrl::Dir { .. }) {
        (parameters.access, parameters.write_mode) = (Access::ReadOnly, WriteMode::Through);
    }
    let web = matches!(source, SourceUrl::Web { .. });
    parameters.manifest = (web && parameters.gid.is_multiple_of(2)).then(|| "lists/files.tsv".to_owned());
    if matches!(source, SourceUrl::Azure { .. } | SourceUrl::Web { .. }) {
        parameters.requester_pays = false;
    }
    let here = matches!(source, SourceUrl::Azure { host: None, .. });
    parameters.storage_account = here.then(|| "account1".to_owned());
    if source.endpoint().is_some() {
        parameters.endpoint = None;
    }
    parameters
}

fn sources() -> impl Strategy<Value = SourceUrl> {
    // What a path may append to a source, which is more than a URL may hold.
    let segment = "[^/\0.][^/\0]{0,8}";
    (
        prop::sample::select(vec![
            "s3://bucket",
            "s3://bucket/a",
            "oss://bucket/a",
            "oss://bucket.oss-r.aliyuncs.com",
            "gs://bucket/a",
            "az://container/a",
            "az://container@account1.blob.core.windows.net",
            "https://data.example.com",
            "https://127.0.0.1:8443/a%20b",
        ]),
        prop::collection::vec(segment, 0..3),
    )
        .prop_map(|(source, path)| SourceUrl::parse(source).unwrap().join(&path.join("/")).unwrap())
}

/// What a digest is of: a hint counts like a parameter.
fn identity(volume: &WireSpec) -> (&str, Vec<(&String, &String)>) {
    let mut all: Vec<_> = volume.parameters.iter().chain(&volume.hints).collect();
    all.sort();
    (&volume.source, all)
}

proptest! {
    #[test]
    fn every_volume_is_understood_as_it_was_meant(source in sources(), parameters in parameters()) {
        let parameters = meant_for(&source, parameters);
        let meant = VolumeSpec { source, parameters, ..spec("s3://bucket", Parameters::default()) };
        let text = serde_json::to_string(&WireSpec::from(&meant)).unwrap();
        let read: WireSpec = serde_json::from_str(&text).unwrap();
        prop_assert_eq!(read.understand().unwrap(), meant.clone());
        prop_assert_eq!(read.digest(), meant.digest());
        prop_assert_eq!(read.heal_timeout(), meant.parameters.heal_timeout);
    }

    #[test]
    fn digests_are_equal_where_volumes_are(
        source in sources(), one in parameters(), other in parameters(), field in 0..7,
    ) {
        // Mostly the same, so that they are equal now and then.
        let other = match field {
            0 => one.clone(),
            1 => Parameters { uid: other.uid % 2, ..one.clone() },
            2 => Parameters { freshness: other.freshness, profile: Profile::Auto, ..one.clone() },
            5 => Parameters { access: other.access, write_mode: other.write_mode, ..one.clone() },
            3 => Parameters { readahead: other.readahead, ..one.clone() },
            4 => Parameters { store_timeout: other.store_timeout, ..one.clone() },
            _ => other,
        };
        let volume = |parameters| VolumeSpec { source: source.clone(), parameters, ..spec("s3://bucket", Parameters::default()) };
        prop_assert_eq!(volume(one.clone()).digest() == volume(other.clone()).digest(), one == other);
    }

    /// Whatever a value holds, it does not look like another name, nor like the source.
    #[test]
    fn no_value_is_taken_for_another_name(
        source in "[ab=\n\0:,\"]{0,4}", other_source in "[ab=\n\0:,\"]{0,4}",
        one in prop::collection::btree_map("[ab=\n\0:,\"]{0,3}", "[ab=\n\0:,\"]{0,3}", 0..3),
        other in prop::collection::btree_map("[ab=\n\0:,\"]{0,3}", "[ab=\n\0:,\"]{0,3}", 0..3),
    ) {
        let volume = |source: &str, parameters: &BTreeMap<String, String>| WireSpec {
            source: source.to_owned(), parameters: parameters.clone(), ..described("s3://bucket", &[])
        };
        let (one, other) = (volume(&source, &one), volume(&other_source, &other));
        prop_assert_eq!(one.digest() == other.digest(), one == other);
    }

    #[test]
    fn damaged_text_is_an_error_or_another_volume_and_never_a_panic(
        sample in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>(),
    ) {
        let samples = samples();
        let sample = &samples[sample.index(samples.len())];
        let mut text = serde_json::to_vec(sample).unwrap();
        let at = at.index(text.len());
        if cut { text.truncate(at) } else { text[at] = byte }
        if let Ok(read) = serde_json::from_slice::<WireSpec>(&text) {
            let _ = read.understand(); // an error is as good
            prop_assert_eq!(read.digest() == sample.digest(), identity(&read) == identity(sample));
        }
    }
}

/// What the next version adds, with a feature that only its builds have.
#[cfg(feature = "next-version")]
#[test]
fn the_next_version_says_what_may_be_ignored() {
    let next = described("next:///data", &[("nextHint", "h"), ("nextRule", "r"), ("profile", "next")]);
    assert_eq!(next.source, "next:///data");
    assert_eq!(next.hints, [("nextHint".to_owned(), "h".to_owned())].into());
    assert_eq!(next.parameters.keys().collect::<Vec<_>>(), ["nextRule", "profile"]);
    assert_eq!(WireSpec::from(next.understand().unwrap()), next);
}
