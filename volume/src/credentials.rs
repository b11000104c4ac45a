//! Credentials of a volume: kept in memory, never shown, distinguished by a digest.

use crate::{Addressing, Parameters, SourceUrl};
use secrecy::{ExposeSecret, SecretBox, SecretString};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A key id, its secret and perhaps a session token, as S3 and OSS have them. `Debug` shows no secret; there is no `Serialize` on purpose, see [`Credentials::to_secrets`].
#[derive(Clone, Default)]
pub struct Credentials {
    keys: Option<Keys>,
    /// Certificates (PEM) that the store's may be signed by, instead of those that the node trusts. No secret.
    ca_bundle: Option<String>,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ca_bytes = self.ca_bundle.as_ref().map(String::len);
        f.debug_struct("Credentials").field("keys", &self.keys).field("ca_bytes", &ca_bytes).finish()
    }
}

#[derive(Clone)]
struct Keys {
    access_key_id: SecretString,
    secret_access_key: SecretString,
    session_token: Option<SecretString>,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(redacted)")
    }
}

impl PartialEq for Credentials {
    /// Also the token counts: a rotated secret is another.
    fn eq(&self, other: &Self) -> bool {
        self.to_secrets() == other.to_secrets()
    }
}

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CredentialsError {
    #[error("the secret has {have} but no {missing}: it needs both accessKeyId and secretAccessKey")]
    Incomplete { have: &'static str, missing: &'static str },
    #[error(
        "the secret has an unknown key {0:?}: it takes accessKeyId, secretAccessKey and sessionToken, or what Fluid, JuiceFS \
         and the clouds' own drivers call them (docs/stores.md)"
    )]
    Unknown(String),
    #[error("the secret says {0} twice, under two names: keep one")]
    Twice(&'static str),
    #[error(
        "the secret's caBundle is no certificate in PEM, or longer than 32 KiB: put in the certificate of the authority that \
         signed the store's, with its BEGIN and END lines"
    )]
    CaBundle,
    #[error("the secret's {0} is empty or has control characters (a trailing newline?)")]
    Malformed(&'static str),
}

/// They travel with the secret, in one message.
const CA_BYTES_MAX: usize = 32 << 10;
const CERTIFICATE: &str = "-----BEGIN CERTIFICATE-----";

impl Credentials {
    /// No signature: public buckets, local directories.
    pub fn anonymous() -> Self {
        Self::default()
    }

    /// From CSI secrets; an empty map is anonymous.
    pub fn from_secrets<K: AsRef<str>, V: AsRef<str>>(
        secrets: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, CredentialsError> {
        let (mut id, mut key, mut token, mut ca_bundle) = (None, None, None, None);
        for (name, value) in secrets {
            let name =
                ours(name.as_ref()).ok_or_else(|| CredentialsError::Unknown(name.as_ref().to_owned()))?;
            if name == "caBundle" {
                let is_ca = value.as_ref().len() <= CA_BYTES_MAX && value.as_ref().contains(CERTIFICATE);
                match ca_bundle.replace(value.as_ref().to_owned()) {
                    Some(_) => return Err(CredentialsError::Twice(name)),
                    None if !is_ca => return Err(CredentialsError::CaBundle),
                    None => continue,
                }
            }
            let slot = match name {
                "accessKeyId" => &mut id,
                "secretAccessKey" => &mut key,
                _ => &mut token,
            };
            if slot.is_some() {
                return Err(CredentialsError::Twice(name));
            }
            let value = value.as_ref();
            if value.is_empty() || value.chars().any(char::is_control) {
                return Err(CredentialsError::Malformed(name));
            }
            *slot = Some(SecretString::from(value.to_owned()));
        }
        match (id, key) {
            (Some(access_key_id), Some(secret_access_key)) => {
                let keys = Some(Keys { access_key_id, secret_access_key, session_token: token });
                Ok(Self { keys, ca_bundle })
            }
            (None, None) if token.is_none() => Ok(Self { keys: None, ca_bundle }),
            (Some(_), None) => {
                Err(CredentialsError::Incomplete { have: "accessKeyId", missing: "secretAccessKey" })
            }
            (None, Some(_)) => {
                Err(CredentialsError::Incomplete { have: "secretAccessKey", missing: "accessKeyId" })
            }
            (None, None) => {
                Err(CredentialsError::Incomplete { have: "sessionToken", missing: "accessKeyId" })
            }
        }
    }

    /// From `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`; absent means anonymous.
    pub fn from_environment(get: impl Fn(&str) -> Option<String>) -> Result<Self, CredentialsError> {
        let pairs = [
            ("accessKeyId", "AWS_ACCESS_KEY_ID"),
            ("secretAccessKey", "AWS_SECRET_ACCESS_KEY"),
            ("sessionToken", "AWS_SESSION_TOKEN"),
        ];
        Self::from_secrets(pairs.into_iter().filter_map(|(name, var)| Some((name, get(var)?))))
    }

    /// In clear, for the one message that carries them between our own processes. Never log the result.
    pub fn to_secrets(&self) -> BTreeMap<String, String> {
        let mut map = BTreeMap::new();
        if let Some(k) = &self.keys {
            map.insert("accessKeyId".into(), k.access_key_id.expose_secret().to_owned());
            map.insert("secretAccessKey".into(), k.secret_access_key.expose_secret().to_owned());
            if let Some(t) = &k.session_token {
                map.insert("sessionToken".into(), t.expose_secret().to_owned());
            }
        }
        map.extend(self.ca_bundle.iter().map(|pem| ("caBundle".to_owned(), pem.clone())));
        map
    }

    /// PEM.
    pub fn ca_bundle(&self) -> Option<&str> {
        self.ca_bundle.as_deref()
    }

    pub fn is_anonymous(&self) -> bool {
        self.keys.is_none()
    }
}

/// Our name of a secret's key. Others': a Secret that works with what people have used before works as it is.
fn ours(name: &str) -> Option<&'static str> {
    const NAMES: [(&str, &[&str]); 4] = [
        (
            "accessKeyId",
            &[
                "AWS_ACCESS_KEY_ID",
                "fs.oss.accessKeyId", // Fluid with JindoCache
                "aws.accessKeyId",    // Fluid with Alluxio
                "fs.s3a.access.key",  // Hadoop
                "access-key",         // JuiceFS
                "akId",               // Alibaba Cloud's CSI driver for OSS
                "key_id",             // Mountpoint for S3's CSI driver
                "accessKeyID",        // csi-s3
            ],
        ),
        (
            "secretAccessKey",
            &[
                "AWS_SECRET_ACCESS_KEY",
                "fs.oss.accessKeySecret",
                "aws.secretKey",
                "fs.s3a.secret.key",
                "secret-key",
                "akSecret",
                "access_key",
            ],
        ),
        (
            "sessionToken",
            &["AWS_SESSION_TOKEN", "fs.oss.securityToken", "fs.s3a.session.token", "session-token"],
        ),
        ("caBundle", &["ca.crt"]), // as in every Secret of an authority in Kubernetes
    ];
    let of =
        |(ours, others): &(&'static str, &[&str])| (*ours == name || others.contains(&name)).then_some(*ours);
    NAMES.iter().find_map(of)
}

/// Makes the names of scopes those of one node: a reader of one cannot test guesses of a secret against it, and
/// learns nothing from the names of another node.
pub struct ScopeKey(SecretBox<[u8; ScopeKey::BYTES]>);

impl ScopeKey {
    pub const BYTES: usize = 32;

    /// From so many random bytes.
    pub fn new(bytes: [u8; Self::BYTES]) -> Self {
        Self(SecretBox::new(Box::new(bytes)))
    }
}

impl std::fmt::Debug for ScopeKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ScopeKey(redacted)")
    }
}

/// Names what may share cached bytes: one source seen with one set of credentials. 32 hex digits, safe as a file name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ScopeId(String);

impl ScopeId {
    /// HMAC-SHA-256 of what identifies the bytes, its first half.
    pub(crate) fn of(
        key: &ScopeKey,
        source: &SourceUrl,
        parameters: &Parameters,
        credentials: &Credentials,
    ) -> Self {
        use hmac::{KeyInit, Mac};
        let mac = hmac::Hmac::<sha2::Sha256>::new_from_slice(key.0.expose_secret());
        let mut mac = mac.expect("HMAC takes keys of any length");
        identity(source, parameters, credentials, &mut |bytes| mac.update(bytes));
        Self(hex::encode(&mac.finalize().into_bytes()[..16]))
    }

    /// The name that the version before gave: mounts that are taken over from it still have it.
    pub(crate) fn without_key(
        source: &SourceUrl,
        parameters: &Parameters,
        credentials: &Credentials,
    ) -> Self {
        use sha2::Digest;
        let mut digest = sha2::Sha256::new();
        identity(source, parameters, credentials, &mut |bytes| digest.update(bytes));
        Self(hex::encode(&digest.finalize()[..16]))
    }

    /// From a directory name written by an earlier run.
    pub fn parse(text: &str) -> Option<Self> {
        (text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase()))
            .then(|| Self(text.to_owned()))
    }
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Display for ScopeId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// Everything that decides which bytes are seen, field by field. How they are asked for (timeouts, freshness, limits) is
/// each volume's own.
fn identity(
    source: &SourceUrl,
    parameters: &Parameters,
    credentials: &Credentials,
    update: &mut dyn FnMut(&[u8]),
) {
    let mut field = |bytes: &[u8]| {
        update(&(bytes.len() as u64).to_le_bytes());
        update(bytes);
    };
    field(source.to_string().as_bytes());
    field(parameters.endpoint.as_ref().map(|e| e.as_str()).unwrap_or_default().as_bytes());
    field(parameters.region.as_deref().unwrap_or_default().as_bytes());
    match &credentials.keys {
        None => field(b"anonymous"),
        Some(k) => {
            field(b"keys");
            field(k.access_key_id.expose_secret().as_bytes());
            // The secret belongs to the scope: knowing someone's key id must not open their cache.
            // A session token does not: it changes every hour for the same identity.
            field(k.secret_access_key.expose_secret().as_bytes());
        }
    }
    // Another host: what it answers need not be what the endpoint does, and one that cannot be reached is no other
    // source's trouble.
    if parameters.addressing == Addressing::Virtual {
        field(b"virtual");
    }
    // Who trusts another authority may be answered by somebody else.
    if let Some(ca_bundle) = &credentials.ca_bundle {
        field(b"ca");
        field(ca_bundle.as_bytes());
    }
    // Volumes of one scope ask alike, and who has not said so does not pay.
    if parameters.requester_pays {
        field(b"requester pays");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(id: &str, secret: &str) -> Credentials {
        Credentials::from_secrets([("accessKeyId", id), ("secretAccessKey", secret)]).unwrap()
    }

    #[test]
    fn debug_shows_no_secret() {
        let text = format!("{:?}", keys("AKIAEXAMPLE", "hunter2"));
        assert!(!text.contains("hunter2") && !text.contains("AKIAEXAMPLE"), "{text}");
    }

    #[test]
    fn incomplete_or_unknown_secrets_say_what_is_missing() {
        assert!(matches!(
            Credentials::from_secrets([("accessKeyId", "x")]),
            Err(CredentialsError::Incomplete { missing: "secretAccessKey", .. })
        ));
        assert!(matches!(Credentials::from_secrets([("password", "x")]), Err(CredentialsError::Unknown(_))));
        assert!(matches!(
            Credentials::from_secrets([("accessKeyId", "x\n"), ("secretAccessKey", "y")]),
            Err(CredentialsError::Malformed("accessKeyId"))
        ));
        assert!(Credentials::from_secrets::<&str, &str>([]).unwrap().is_anonymous());
    }

    #[test]
    fn an_authority_of_the_stores_own_comes_with_the_secret() {
        let pem = format!("{CERTIFICATE}\nMIIB\n-----END CERTIFICATE-----\n");
        let with = |name: &str, pem: &str| {
            Credentials::from_secrets([("accessKeyId", "id"), ("secretAccessKey", "s"), (name, pem)])
        };
        let credentials = with("caBundle", &pem).unwrap();
        assert_eq!(
            (credentials.ca_bundle(), &with("ca.crt", &pem).unwrap()),
            (Some(pem.as_str()), &credentials)
        );
        assert_eq!(Credentials::from_secrets(credentials.to_secrets()), Ok(credentials.clone()));
        assert!(!format!("{credentials:?}").contains("MIIB"));
        let alone = Credentials::from_secrets([("caBundle", &pem)]).unwrap();
        assert!(alone.is_anonymous() && alone.ca_bundle().is_some());
        let source = SourceUrl::parse("s3://bucket").unwrap();
        let scope = |of: &Credentials| ScopeId::of(&key(1), &source, &Parameters::default(), of);
        assert_ne!(scope(&credentials), scope(&keys("id", "s")));
        let long = format!("{pem}{}", "x".repeat(CA_BYTES_MAX));
        for wrong in ["", "/etc/ssl/ca.pem", &long] {
            assert_eq!(with("caBundle", wrong), Err(CredentialsError::CaBundle));
        }
    }

    #[test]
    fn a_secret_as_other_drivers_want_it_is_the_same_credentials() {
        let ours = keys("id", "hunter2");
        for (id, secret) in [
            ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
            ("fs.oss.accessKeyId", "fs.oss.accessKeySecret"),
            ("aws.accessKeyId", "aws.secretKey"),
            ("fs.s3a.access.key", "fs.s3a.secret.key"),
            ("access-key", "secret-key"),
            ("akId", "akSecret"),
            ("key_id", "access_key"),
            ("accessKeyID", "secretAccessKey"),
        ] {
            let theirs = Credentials::from_secrets([(id, "id"), (secret, "hunter2")]).unwrap();
            assert_eq!(theirs, ours, "{id}");
        }
        let twice = [("akId", "id"), ("accessKeyId", "id"), ("akSecret", "s")];
        assert_eq!(Credentials::from_secrets(twice), Err(CredentialsError::Twice("accessKeyId")));
    }

    fn key(byte: u8) -> ScopeKey {
        ScopeKey::new([byte; ScopeKey::BYTES])
    }

    #[test]
    fn scopes_differ_by_source_endpoint_and_secret_but_not_by_token() {
        let source = SourceUrl::parse("s3://bucket/a").unwrap();
        let params = Parameters::default();
        let of = |params: &Parameters, credentials: &Credentials| {
            ScopeId::of(&key(1), &source, params, credentials)
        };
        let base = of(&params, &keys("id", "secret"));
        assert_ne!(base, of(&params, &keys("id", "other")));
        assert_ne!(base, of(&params, &Credentials::anonymous()));
        let token = Credentials::from_secrets([
            ("accessKeyId", "id"),
            ("secretAccessKey", "secret"),
            ("sessionToken", "t"),
        ])
        .unwrap();
        assert_eq!(base, of(&params, &token));
        assert_eq!(ScopeId::parse(base.as_str()), Some(base));
    }

    #[test]
    fn what_names_another_host_is_another_scope_and_how_it_is_asked_is_not() {
        let source = SourceUrl::parse("s3://bucket/a").unwrap();
        let with = |change: &dyn Fn(&mut Parameters)| {
            let mut params = Parameters::default();
            change(&mut params);
            ScopeId::of(&key(1), &source, &params, &keys("id", "secret"))
        };
        let base = with(&|_| {});
        assert_ne!(base, with(&|p| p.addressing = Addressing::Virtual));
        assert_ne!(base, with(&|p| p.endpoint = Some("https://h".parse().unwrap())));
        assert_ne!(base, with(&|p| p.region = Some("r".into())));
        assert_ne!(base, with(&|p| p.requester_pays = true));
        let minute = std::time::Duration::from_secs(60);
        assert_eq!(base, with(&|p| p.store_timeout = minute));
        assert_eq!(
            base,
            with(&|p| (p.heal_timeout, p.cache_limit, p.readahead) = (minute, Some(1), Some(1)))
        );
        assert_eq!(base, with(&|p| (p.part, p.parallel_parts) = (Some(1 << 20), Some(3))));
        assert_eq!(base, with(&|p| (p.uid, p.file_mode, p.allow_http) = (7, 0o400, true)));
    }

    #[test]
    fn a_name_tells_nothing_without_the_nodes_key() {
        let source = SourceUrl::parse("s3://bucket/a").unwrap();
        let params = Parameters::default();
        let secret = keys("id", "secret");
        let here = ScopeId::of(&key(1), &source, &params, &secret);
        assert_ne!(here, ScopeId::of(&key(2), &source, &params, &secret), "two nodes have one name for it");
        assert_ne!(here, ScopeId::without_key(&source, &params, &secret), "a guess can be tested");
        assert!(!format!("{:?}", key(0xab)).contains("ab"));
    }

    /// What the version before wrote, so that its mounts are found in their scope.
    #[test]
    fn the_name_of_the_version_before_is_known() {
        let source = SourceUrl::parse("s3://bucket/a").unwrap();
        let found = ScopeId::without_key(&source, &Parameters::default(), &keys("id", "secret"));
        assert_eq!(found.as_str(), "e32d2fd29931b259c9b8497366d032ea");
    }
}
