//! `allowedSources` of a class: where claims that choose their source may choose from.

use crate::SourceUrl;

const EXPECTED: &str = "write source prefixes such as s3://bucket/team-a, separated by commas, or s3://* (oss://*, gs://*, az://*) for any bucket, hdfs://* for any HDFS, https://* for any web server; no other '*'";

/// Comma-separated; each entry is a whole source, so that only whole path segments can match.
pub(crate) struct AllowedSources {
    text: String,
    entries: Vec<Entry>,
}

enum Entry {
    /// `s3://*` and the like: the one pattern, elsewhere a star would match the half of a name. A source that has its host in
    /// it counts: a bucket's is always one of the cloud's own.
    AnyBucket(&'static str),
    Below(SourceUrl),
}

impl AllowedSources {
    /// The error says what is expected.
    pub(crate) fn parse(value: &str) -> Result<Self, &'static str> {
        let entry = |text: &str| match text {
            "s3://*" => Ok(Entry::AnyBucket("s3")),
            "oss://*" => Ok(Entry::AnyBucket("oss")),
            "gs://*" => Ok(Entry::AnyBucket("gs")),
            "az://*" => Ok(Entry::AnyBucket("az")),
            "hdfs://*" => Ok(Entry::AnyBucket("hdfs")),
            "https://*" => Ok(Entry::AnyBucket("https")),
            "http://*" => Ok(Entry::AnyBucket("http")),
            text if text.contains('*') => Err(EXPECTED),
            text => SourceUrl::parse(text).map(Entry::Below).map_err(|_| EXPECTED),
        };
        let entries = value.split(',').map(|text| entry(text.trim())).collect::<Result<_, _>>()?;
        Ok(Self { text: value.to_owned(), entries })
    }

    pub(crate) fn covers(&self, source: &SourceUrl) -> bool {
        self.entries.iter().any(|entry| match entry {
            Entry::AnyBucket(scheme) => source.scheme() == *scheme,
            Entry::Below(prefix) => source.lies_in(prefix),
        })
    }
}

impl std::fmt::Display for AllowedSources {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use crate::{ParameterError, Parameters, TemplateError, TemplateValues};

    fn claim(source: &str) -> TemplateValues {
        TemplateValues {
            pvc_name: Some("claim".into()),
            pvc_namespace: Some("team".into()),
            pvc_annotations: [("millpond.io/source".to_owned(), source.to_owned())].into(),
            ..TemplateValues::default()
        }
    }

    const CHOSEN: (&str, &str) = ("source", "${pvc.annotations['millpond.io/source']}");

    #[test]
    fn a_claim_chooses_among_the_allowed_sources_and_nothing_else() {
        let allowed = ("allowedSources", "s3://bucket/team, s3://public");
        let choose = |source: &str| Parameters::parse([CHOSEN, allowed], &claim(source));
        for (source, found) in [
            ("s3://bucket/team", "s3://bucket/team/"),
            ("s3://bucket/team/a/b", "s3://bucket/team/a/b/"),
            ("s3://public/x", "s3://public/x/"),
            // Not decoded: a directory of this odd name, below the prefix.
            ("s3://bucket/team/%2e%2e/other", "s3://bucket/team/%2e%2e/other/"),
            ("s3://bucket/team/..%2fother", "s3://bucket/team/..%2fother/"),
            ("s3://bucket/team/\\..\\other", "s3://bucket/team/\\..\\other/"),
        ] {
            assert_eq!(choose(source).unwrap().0.to_string(), found);
        }
        for source in [
            "s3://bucket/team-b",
            "s3://bucket/teams/a",
            "s3://bucket",
            "s3://bucket/",
            "s3://bucket/Team/a",
            "s3://bucket/%74eam/a",
            "s3://publics/x",
            "s3://bucket-b/team",
            "file:///bucket/team",
        ] {
            let error = choose(source).unwrap_err();
            assert!(matches!(error, ParameterError::NotAllowed { .. }), "{source}: {error}");
            let text = error.to_string();
            assert!(text.contains("s3://bucket/team, s3://public"), "{text}");
        }
        for source in [
            "s3://bucket/team/../other",
            "s3://bucket/team/..",
            "s3://bucket/team//x",
            "s3://bucket/team/./x",
            "s3://bucket@other/team",
            "s3://bucket/team?x",
            "s3://bucket/team#x",
            "S3://bucket/team",
            "s3:/bucket/team",
            "bucket/team",
        ] {
            assert!(matches!(choose(source), Err(ParameterError::Source(_))), "{source}");
        }
        let missing = choose("").unwrap_err();
        assert!(matches!(missing, ParameterError::Template(TemplateError::NoAnnotation { .. })), "{missing}");
    }

    #[test]
    fn a_path_of_the_claims_is_held_to_the_allowed_sources_too() {
        let path = ("path", "${pvc.annotations['millpond.io/source']}");
        let class = [("source", "s3://bucket/team"), path, ("allowedSources", "s3://bucket/team/open")];
        let choose = |value: &str| Parameters::parse(class, &claim(value));
        assert_eq!(choose("open/a").unwrap().0.to_string(), "s3://bucket/team/open/a/");
        assert!(matches!(choose("closed"), Err(ParameterError::NotAllowed { .. })));
        assert!(matches!(choose("open-b"), Err(ParameterError::NotAllowed { .. })));
        assert!(choose("open/../closed").is_err());
    }

    #[test]
    fn a_class_whose_claims_choose_must_say_from_what() {
        let some = claim("s3://bucket/x");
        assert_eq!(Parameters::parse([CHOSEN], &some).unwrap_err(), ParameterError::NoAllowedSources);
        let named = [("source", "s3://bucket/${pvc.name}")];
        assert_eq!(Parameters::parse(named, &some).unwrap_err(), ParameterError::NoAllowedSources);
        let path = [("source", "s3://bucket"), ("path", CHOSEN.1)];
        assert_eq!(Parameters::parse(path, &some).unwrap_err(), ParameterError::NoAllowedSources);
        let any = [CHOSEN, ("allowedSources", "s3://*")];
        assert!(Parameters::parse(any, &some).is_ok());
        let clouds = [CHOSEN, ("allowedSources", "oss://*, gs://*, az://*")];
        for source in [
            "oss://bucket.oss-cn-shanghai.aliyuncs.com/x",
            "gs://bucket/x",
            "abfss://container@account.dfs.core.windows.net/x",
        ] {
            assert!(Parameters::parse(clouds, &claim(source)).is_ok(), "{source}");
        }
        assert!(matches!(
            Parameters::parse(clouds, &claim("s3://bucket/x")),
            Err(ParameterError::NotAllowed { .. })
        ));
        assert!(matches!(
            Parameters::parse(any, &claim("file:///x")),
            Err(ParameterError::NotAllowed { .. })
        ));
        let web = [CHOSEN, ("allowedSources", "https://*")];
        assert!(Parameters::parse(web, &claim("https://data.example.com/x")).is_ok());
        assert!(matches!(
            Parameters::parse(
                [CHOSEN, ("allowedSources", "https://*"), ("allowHttp", "true")],
                &claim("http://h/x")
            ),
            Err(ParameterError::NotAllowed { .. })
        ));
        for wrong in [
            "",
            "https://data.example.com*",
            "s3://bucket/*",
            "s3://b*",
            "file://*",
            "*",
            "s3://bucket,",
            "bucket",
        ] {
            let error = Parameters::parse([CHOSEN, ("allowedSources", wrong)], &some).unwrap_err();
            assert!(
                matches!(error, ParameterError::Value { name: "allowedSources", .. }),
                "{wrong}: {error}"
            );
        }
    }
}
