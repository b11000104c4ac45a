//! What a `core-site.xml` and an `hdfs-site.xml` say to a client, as Hadoop reads it.
//!
//! Sites hand these files out whole: most of what is in them concerns servers, and is left out. What a client needs is
//! in [`is_setting`]. Files that name other files (`include`, entities) are refused: nothing else is read.

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};
use std::collections::BTreeMap;

/// Longer than any that a site hands out.
const SITE_BYTES_MAX: usize = 256 << 10;
const DEPTH_MAX: usize = 4;
const PROPERTIES_MAX: usize = 4096;
/// As many as Hadoop follows.
const SUBSTITUTIONS_MAX: usize = 20;
const VALUE_BYTES_MAX: usize = 4096;

/// What of a user's configuration helpers are given; each is a property of `core-site.xml` or `hdfs-site.xml`, or with a
/// dot at the end the beginning of some, behind which the name service stands. The library knows more, of writes, mount
/// tables and files; they are not a user's to say. (`resolve-needed` would have it look up names where it can wait.)
const SETTINGS: &[&str] = &[
    "dfs.ha.namenodes.",
    "dfs.namenode.rpc-address.",
    "dfs.client.failover.proxy.provider.",
    "dfs.client.use.datanode.hostname",
    "dfs.data.transfer.protection",
];
/// What is looked at before a helper is started.
const OURS: &[&str] = &["hadoop.security.authentication"];

/// Is it one that helpers are given?
pub fn is_setting(name: &str) -> bool {
    SETTINGS.iter().any(|known| known.ends_with('.') && name.starts_with(known) || name == *known)
}

/// Properties of a client.
pub type Settings = BTreeMap<String, String>;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{file} {why}")]
pub struct BadSite {
    /// `core-site.xml` or `hdfs-site.xml`.
    pub file: &'static str,
    pub why: String,
}

/// What both files say to a client; the second one's word counts, but for what the first one calls final.
///
/// # Errors
/// A file that is not one of Hadoop's, or that names other files.
pub fn settings(core: Option<&str>, hdfs: Option<&str>) -> Result<Settings, BadSite> {
    let mut all = BTreeMap::<String, Property>::new();
    for (file, text) in [("core-site.xml", core), ("hdfs-site.xml", hdfs)] {
        let Some(text) = text else { continue };
        let found = properties(text, file).map_err(|why| BadSite { file, why })?;
        for property in found {
            match all.get(&property.name) {
                Some(before) if before.is_final => {}
                _ => drop(all.insert(property.name.clone(), property)),
            }
        }
    }
    let mut wanted = Settings::new();
    for (name, property) in &all {
        if is_setting(name) || OURS.contains(&name.as_str()) {
            let bad = |why| BadSite { file: property.file, why };
            let value = expanded(&property.value, &all).map_err(bad)?;
            // XML has some that a file can carry, and no setting means.
            if value.chars().any(char::is_control) {
                return Err(bad(format!("has a control character in {name}")));
            }
            wanted.insert(name.clone(), value);
        }
    }
    Ok(wanted)
}

/// A file that says this and nothing else.
pub fn site_of(settings: &Settings) -> String {
    let escaped = |text: &str| quick_xml::escape::escape(text).into_owned();
    let property = |(name, value): (&String, &String)| {
        format!("<property><name>{}</name><value>{}</value></property>", escaped(name), escaped(value))
    };
    format!("<configuration>{}</configuration>", settings.iter().map(property).collect::<String>())
}

#[derive(Default)]
struct Property {
    name: String,
    value: String,
    is_final: bool,
    file: &'static str,
}

impl Property {
    /// Hadoop 3 takes them as attributes, too.
    fn of(tag: &BytesStart<'_>, file: &'static str) -> Result<Self, String> {
        let mut property = Self { file, ..Self::default() };
        for attribute in tag.attributes() {
            let attribute = attribute.map_err(|e| format!("is not XML: {e}"))?;
            let value = attribute
                .normalized_value(XmlVersion::Implicit1_0)
                .map_err(|e| format!("is not XML: {e}"))?;
            match attribute.key.as_ref() {
                "name" => property.name = value.trim().to_owned(),
                "value" => property.value = value.trim().to_owned(),
                "final" => property.is_final = value.trim() == "true",
                _ => {}
            }
        }
        Ok(property)
    }
}

fn properties(text: &str, file: &'static str) -> Result<Vec<Property>, String> {
    if text.len() > SITE_BYTES_MAX {
        return Err("is longer than 256 KiB".into());
    }
    let mut reader = Reader::from_str(text.strip_prefix('\u{feff}').unwrap_or(text));
    let (mut depth, mut piece, mut ended) = (0_usize, String::new(), false);
    let (mut property, mut all) = (Property::default(), Vec::new());
    loop {
        match reader.read_event().map_err(|e| format!("is not XML: {e}"))? {
            Event::Start(start) => {
                depth += 1;
                piece.clear();
                match (depth, start.name().as_ref()) {
                    (1, "configuration") if !ended => {}
                    (1, _) => {
                        return Err(NOT_HADOOPS.into());
                    }
                    (2, "property") => property = Property::of(&start, file)?,
                    (2.., name) if name.ends_with("include") => return Err(INCLUDES.into()),
                    (depth, _) if depth > DEPTH_MAX => return Err("has tags within tags".into()),
                    _ => {}
                }
            }
            Event::Empty(tag) if tag.name().as_ref().ends_with("include") => return Err(INCLUDES.into()),
            Event::Empty(tag) if depth == 0 => match tag.name().as_ref() {
                "configuration" => ended = true,
                _ => return Err(NOT_HADOOPS.into()),
            },
            Event::Empty(tag) if depth == 1 && tag.name().as_ref() == "property" => {
                let property = Property::of(&tag, file)?;
                if !property.name.is_empty() {
                    all.push(property);
                }
            }
            Event::DocType(_) => {
                return Err("has a DOCTYPE: leave it out, nothing that it names is read".into());
            }
            Event::Text(text) => piece.push_str(&text),
            Event::CData(text) => piece.push_str(&text),
            Event::GeneralRef(reference) => piece.push(character(&reference)?),
            Event::End(end) => {
                match (depth, end.name().as_ref()) {
                    (1, _) => ended = true,
                    (2, "property") if !property.name.is_empty() => {
                        all.push(std::mem::take(&mut property));
                    }
                    (3, "name") => property.name = piece.trim().to_owned(),
                    (3, "value") => property.value = piece.trim().to_owned(),
                    (3, "final") => property.is_final = piece.trim() == "true",
                    _ => {}
                }
                piece.clear();
                depth = depth.saturating_sub(1);
            }
            Event::Eof => break,
            _ => {}
        }
        if all.len() > PROPERTIES_MAX {
            return Err(format!("has more than {PROPERTIES_MAX} properties"));
        }
    }
    match ended && depth == 0 {
        true => Ok(all),
        false => Err("ends in the middle".into()),
    }
}

const NOT_HADOOPS: &str = "is not one of Hadoop's: its outermost tag is <configuration>";
const INCLUDES: &str = "includes another file: put that file's properties in its place";

fn character(reference: &quick_xml::events::BytesRef<'_>) -> Result<char, String> {
    match reference.resolve_char_ref() {
        Ok(Some(character)) => Ok(character),
        Ok(None) => match AsRef::<str>::as_ref(reference) {
            "amp" => Ok('&'),
            "lt" => Ok('<'),
            "gt" => Ok('>'),
            "quot" => Ok('"'),
            "apos" => Ok('\''),
            other => Err(format!("has the entity {:?}, which XML does not know", crate::words(other))),
        },
        Err(e) => Err(format!("has a bad character reference: {e}")),
    }
}

/// Properties within a value, written `${name}`, the innermost first; what no property is called stays.
fn expanded(value: &str, all: &BTreeMap<String, Property>) -> Result<String, String> {
    let mut value = value.to_owned();
    let mut from = 0;
    for _ in 0..=SUBSTITUTIONS_MAX {
        if value.len() > VALUE_BYTES_MAX {
            return Err("has a value of more than 4 KiB".into());
        }
        let end = value[from..].find('}').map(|at| from + at);
        let Some(end) = end.filter(|_| value.contains("${")) else { return Ok(value) };
        let Some(start) = value[..end].rfind("${") else {
            from = end + 1;
            continue;
        };
        let name = &value[start + 2..end];
        if name.starts_with("env.") {
            return Err(format!(
                "asks for the environment in {:?}: write the value itself",
                crate::words(&value)
            ));
        }
        match all.get(name) {
            Some(property) => {
                value.replace_range(start..=end, &property.value);
                from = 0;
            }
            None => from = end + 1,
        }
    }
    Err(format!("goes in circles in {:?}", crate::words(&value)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn site(properties: &[(&str, &str)]) -> String {
        let all = properties.iter().map(|(name, value)| {
            format!("<property><name>{name}</name>\n  <value> {value} </value></property>\n")
        });
        format!(
            "<?xml version=\"1.0\"?>\n<!-- ours -->\n<configuration>\n{}</configuration>\n",
            all.collect::<String>()
        )
    }

    #[test]
    fn what_a_client_needs_is_found_among_what_servers_need() {
        let hdfs = site(&[
            ("dfs.nameservices", "ns"),
            ("dfs.ha.namenodes.ns", "nn1,nn2"),
            ("dfs.namenode.rpc-address.ns.nn1", "one.example.com:8020"),
            ("dfs.namenode.rpc-address.ns.nn2", "${${k}}:8020"),
            ("dfs.datanode.data.dir", "/disk1,/disk2"),
            ("dfs.data.transfer.protection", "a &amp; b &#x41;<![CDATA[<c>]]>"),
            ("two", "two.example.com"),
        ]);
        let core = site(&[("fs.defaultFS", "hdfs://ns"), ("hadoop.security.authentication", "kerberos")]);
        let core = core.replace(
            "</configuration>",
            "<property name='dfs.client.use.datanode.hostname' value='true'/>\
             <property name=\"k\"><value>two</value></property></configuration>",
        );
        let settings = settings(Some(&core), Some(&hdfs)).unwrap();
        let of = |name: &str| settings.get(name).map(String::as_str);
        assert_eq!(of("dfs.namenode.rpc-address.ns.nn2"), Some("two.example.com:8020"));
        assert_eq!(of("dfs.data.transfer.protection"), Some("a & b A<c>"));
        assert_eq!(of("hadoop.security.authentication"), Some("kerberos"));
        assert_eq!(of("dfs.client.use.datanode.hostname"), Some("true"));
        assert_eq!(settings.len(), 6, "{settings:?}");
        assert_eq!(super::settings(None, Some(&site_of(&settings))), Ok(settings.clone()));
        assert!(!is_setting("hadoop.security.authentication"));
    }

    #[test]
    fn the_later_file_counts_but_for_what_is_final() {
        let name = "dfs.data.transfer.protection";
        let of = |core: &str, hdfs: &str| settings(Some(core), Some(hdfs)).unwrap().remove(name);
        let (privacy, integrity) = (site(&[(name, "privacy")]), site(&[(name, "integrity")]));
        assert_eq!(of(&privacy, &integrity).as_deref(), Some("integrity"));
        let last = privacy.replace("</property>", "<final>true</final></property>");
        assert_eq!(of(&last, &integrity).as_deref(), Some("privacy"));
        assert_eq!(of(&site(&[]), &site(&[])), None);
        assert_eq!(settings(None, None), Ok(Settings::new()));
        assert!(settings(Some("<configuration/>"), None).unwrap().is_empty());
    }

    #[test]
    fn what_names_other_files_or_is_none_of_hadoops_is_refused_with_its_name() {
        let xi = "<configuration xmlns:xi=\"x\"><xi:include href=\"/etc/passwd\"/></configuration>";
        let entity = "<!DOCTYPE c [<!ENTITY e SYSTEM \"file:///etc/passwd\">]><configuration/>";
        let circle = site(&[("dfs.data.transfer.protection", "${dfs.data.transfer.protection}x")]);
        let wide = site(&[("a", &"b".repeat(3000)), ("dfs.data.transfer.protection", "${a}${a}")]);
        let deep = format!("<configuration>{}", "<a>".repeat(1000));
        for (text, expected) in [
            (xi, "includes another file"),
            (&xi.replace("/></c", "></xi:include></c"), "includes another file"),
            (entity, "DOCTYPE"),
            ("<configuration>&e;</configuration>", "entity"),
            ("<html></html>", "outermost tag"),
            ("<html/>", "outermost tag"),
            ("", "ends in the middle"),
            ("<configuration>", "ends in the middle"),
            ("<configuration><property><name>a</name>", "ends in the middle"),
            ("<configuration></property>", "not XML"),
            (&deep, "tags within tags"),
            (&circle, "goes in circles"),
            (&wide, "4 KiB"),
            (&site(&[("dfs.data.transfer.protection", &"b".repeat(5000))]), "4 KiB"),
            (&site(&[("dfs.data.transfer.protection", "a&#10;b")]), "control character"),
            (&site(&[("dfs.data.transfer.protection", "${env.HOME}")]), "environment"),
            (&" ".repeat(SITE_BYTES_MAX + 1), "256 KiB"),
        ] {
            let error = settings(None, Some(text)).unwrap_err().to_string();
            assert!(error.starts_with("hdfs-site.xml ") && error.contains(expected), "{expected}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_is_too_odd(text in "(<|>|/|\\$\\{|\\}|&|configuration|property|name|value|dfs.ha.namenodes.a|[a-z;!\\[\\] -]){0,60}") {
            let _ = settings(Some(&text), None);
            let within = format!("<configuration><property><name>dfs.ha.namenodes.a</name><value>{text}</value></property></configuration>");
            let _ = settings(None, Some(&within));
        }
    }
}
