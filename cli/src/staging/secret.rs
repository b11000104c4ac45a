//! Credentials from a file or standard input: never from the command line or the environment, which others can see.

use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::Value;
use std::collections::HashMap;
use std::io::Read;
use std::path::Path;

/// Larger than any secret of Kubernetes, bytes.
const MAX: u64 = 2 << 20;

/// By the names that the volume's Kubernetes secret has.
#[derive(Default, PartialEq, Eq)]
pub(super) struct Secrets(pub(super) HashMap<String, String>);

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secrets(..)")
    }
}

pub(super) fn read(path: &Path) -> Result<Secrets> {
    let mut text = Vec::new();
    let read = match path.as_os_str() == "-" {
        true => std::io::stdin().lock().take(MAX + 1).read_to_end(&mut text),
        false => std::fs::File::open(path).and_then(|file| file.take(MAX + 1).read_to_end(&mut text)),
    };
    read.with_context(|| format!("secret file {}", path.display()))?;
    ensure!(text.len() as u64 <= MAX, "secret file {}: it has more than {MAX} bytes", path.display());
    parse(&text).with_context(|| format!("secret file {}", path.display()))
}

/// No message quotes what is in it.
fn parse(text: &[u8]) -> Result<Secrets> {
    const WANTED: &str = r#"it must be a JSON object of names and texts, such as {"accessKeyId": "…", "secretAccessKey": "…"}, or a Kubernetes Secret as JSON"#;
    let value: Value = serde_json::from_slice(text).map_err(|e| {
        anyhow::anyhow!("{WANTED}: it is no JSON from line {}, column {} on", e.line(), e.column())
    })?;
    let Value::Object(mut object) = value else { bail!("{WANTED}") };
    let mut secrets = HashMap::new();
    if object.get("kind").is_some_and(|kind| kind == "Secret") {
        for (part, is_encoded) in [("data", true), ("stringData", false)] {
            let Some(Value::Object(entries)) = object.remove(part) else { continue };
            for (name, value) in entries {
                let Value::String(text) = value else { bail!("{WANTED}: {name:?} is no text") };
                let text = match is_encoded {
                    true => {
                        let bytes = BASE64_STANDARD.decode(text).ok();
                        bytes.and_then(|bytes| String::from_utf8(bytes).ok())
                    }
                    false => Some(text),
                };
                secrets
                    .insert(name.clone(), text.with_context(|| format!("{name:?} is not text in base64"))?);
            }
        }
        ensure!(!secrets.is_empty(), "the Kubernetes Secret has no data");
        return Ok(Secrets(secrets));
    }
    for (name, value) in object {
        let Value::String(text) = value else { bail!("{WANTED}: {name:?} is no text") };
        secrets.insert(name, text);
    }
    Ok(Secrets(secrets))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_names_and_whole_secrets_are_read() {
        let plain = parse(br#"{"accessKeyId":"a","secretAccessKey":"b"}"#).unwrap();
        let whole =
            br#"{"kind":"Secret","data":{"accessKeyId":"YQ=="},"stringData":{"secretAccessKey":"b"}}"#;
        assert_eq!(plain, parse(whole).unwrap());
        assert_eq!(plain.0["secretAccessKey"], "b");
    }

    #[test]
    fn what_is_no_secret_is_refused_and_never_quoted() {
        for bad in [
            r#""hunter2""#,
            r#"["hunter2"]"#,
            r#"{"a":{"b":"hunter2"}}"#,
            r#"{"a":"hunter2""#,
            "accessKeyId=hunter2",
            r#"{"kind":"Secret","data":{"a":"hunter2!"}}"#,
            r#"{"kind":"Secret"}"#,
            "",
        ] {
            let error = format!("{:#}", parse(bad.as_bytes()).unwrap_err());
            assert!(!error.contains("hunter2"), "{error}");
        }
        assert!(!format!("{:?}", parse(br#"{"a":"hunter2"}"#).unwrap()).contains("hunter2"));
    }
}
