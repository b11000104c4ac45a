//! Credentials of a volume: kept in memory, never shown, distinguished by a digest.

use crate::parameters::is_hdfs_user;
use crate::{Addressing, Parameters, SourceUrl};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use secrecy::{ExposeSecret, SecretBox, SecretString};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What requests are signed with. `Debug` shows no secret; there is no `Serialize` on purpose, see [`Credentials::to_secrets`].
#[derive(Clone, Default)]
pub struct Credentials {
    identity: Identity,
    /// Certificates (PEM) that the store's may be signed by, instead of those that the node trusts. No secret.
    ca_bundle: Option<String>,
    /// Who asks, to a store that wants to know it before the first request.
    client: Option<ClientCertificate>,
    /// What objects are encrypted with where the store does not keep the key: 32 bytes, base64.
    customer_key: Option<SecretString>,
    /// Files that say where HDFS and its Kerberos are. No secret.
    hadoop: HadoopFiles,
}

/// As sites hand them out; in [`Credentials`] without what a client has no use for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HadoopFiles {
    pub core_site: Option<String>,
    pub hdfs_site: Option<String>,
    pub krb5_conf: Option<String>,
}

impl HadoopFiles {
    /// What a client has a use for, in one site file: what else changes in a site's files makes no other volume.
    fn reduced(&self) -> Result<Self, String> {
        let settings = hdfs::settings(self.core_site.as_deref(), self.hdfs_site.as_deref());
        let settings = settings.map_err(|bad| bad.to_string())?;
        let krb5_conf = self.krb5_conf.as_deref().map(hdfs::cleaned_krb5_conf).transpose();
        Ok(Self {
            core_site: None,
            hdfs_site: (!settings.is_empty()).then(|| hdfs::site_of(&settings)),
            krb5_conf: krb5_conf.map_err(|bad| bad.to_string())?,
        })
    }
}

#[derive(Clone)]
struct ClientCertificate {
    /// PEM, its own first, then those up to the authority.
    chain: String,
    key: SecretString,
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ca_bytes = self.ca_bundle.as_ref().map(String::len);
        f.debug_struct("Credentials")
            .field("kind", &self.kind())
            .field("ca_bytes", &ca_bytes)
            .field("client_certificate", &self.client.is_some())
            .field("customer_key", &self.customer_key.is_some())
            .field("hadoop_files", &(self.hadoop != HadoopFiles::default()))
            .finish()
    }
}

#[derive(Clone, Default)]
enum Identity {
    #[default]
    Anonymous,
    Keys {
        access_key_id: SecretString,
        secret_access_key: SecretString,
        session_token: Option<SecretString>,
    },
    ServiceAccount(SecretString),
    Account {
        name: Option<String>,
        key: SecretString,
    },
    Sas {
        name: Option<String>,
        token: SecretString,
    },
    Password {
        user: String,
        password: SecretString,
    },
    Bearer(SecretString),
    HdfsUser(String),
    /// A keytab, or a cache of tickets that somebody else renews, or both; base64.
    Kerberos {
        principal: String,
        keytab: Option<SecretString>,
        ticket_cache: Option<SecretString>,
    },
    /// A file of tokens, base64.
    DelegationToken(SecretString),
}

/// Who asks, and by which of a secret's keys: [`Credentials::to_secrets`] has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CredentialsKind {
    /// No signature: public buckets, local directories.
    Anonymous,
    /// `accessKeyId`, `secretAccessKey`, perhaps `sessionToken`: S3, OSS.
    Keys,
    /// `serviceAccountKey`, the JSON of a key file: GCS.
    ServiceAccount,
    /// `accountKey`, perhaps `accountName`: Azure.
    Account,
    /// `sasToken`, perhaps `accountName`: Azure.
    Sas,
    /// `username` and `password`: web servers.
    Password,
    /// `bearerToken`: web servers.
    Bearer,
    /// `hdfsUser`: an HDFS that believes whatever name it is told.
    HdfsUser,
    /// `principal`, and `keytab` or `ticketCache`: HDFS.
    Kerberos,
    /// `delegationToken`: HDFS.
    DelegationToken,
}

impl CredentialsKind {
    /// What the secret has, for messages.
    pub fn names(self) -> &'static str {
        match self {
            Self::Anonymous => "no keys",
            Self::Keys => "accessKeyId and secretAccessKey",
            Self::ServiceAccount => "serviceAccountKey",
            Self::Account => "accountKey",
            Self::Sas => "sasToken",
            Self::Password => "username and password",
            Self::Bearer => "bearerToken",
            Self::HdfsUser => "hdfsUser",
            Self::Kerberos => "principal and keytab",
            Self::DelegationToken => "delegationToken",
        }
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
    #[error("the secret has {have} but no {missing}: it needs both")]
    Incomplete { have: &'static str, missing: &'static str },
    #[error(
        "the secret has an unknown key {0:?}: it takes accessKeyId, secretAccessKey and sessionToken (S3, OSS), serviceAccountKey \
         (GCS), accountName with accountKey or sasToken (Azure), username and password or bearerToken (web servers), hdfsUser, principal \
         with keytab or ticketCache, delegationToken, krb5Conf, coreSite and hdfsSite (HDFS), customerKey, caBundle, clientCertificate and clientKey, or what Fluid, JuiceFS and the clouds' own drivers call them (docs/stores.md)"
    )]
    Unknown(String),
    #[error("the secret has {0} and {1}, which are for different stores: keep what this one takes")]
    Mixed(&'static str, &'static str),
    #[error("the secret says {0} twice, under two names: keep one")]
    Twice(&'static str),
    #[error(
        "the secret's caBundle is no certificate in PEM, or longer than 32 KiB: put in the certificate of the authority that \
         signed the store's, with its BEGIN and END lines"
    )]
    CaBundle,
    #[error(
        "the secret's clientCertificate is no certificate in PEM, or longer than 16 KiB: put in the client's certificate and those \
         between it and its authority, with their BEGIN and END lines"
    )]
    ClientCertificate,
    #[error(
        "the secret's clientKey is no private key in PEM, or longer than 8 KiB: put in the key of clientCertificate, with its BEGIN \
         and END lines"
    )]
    ClientKey,
    #[error(
        "the secret's clientKey is locked with a passphrase, for which there is no place: put it in without one"
    )]
    LockedKey,
    #[error(
        "the secret's customerKey is not 32 bytes in base64 (44 characters, with the = at their end): put in the key that the objects \
         were written with"
    )]
    CustomerKey,
    #[error(
        "the secret's {0} is not base64, empty, or longer than {1} KiB: Kubernetes takes text alone, so put in what `base64 -w0 FILE` \
         prints"
    )]
    Binary(&'static str, usize),
    #[error("the secret's hdfsUser cannot be one: at most 64 characters of a-z A-Z 0-9 . _ -")]
    HdfsUser,
    #[error("the secret's principal cannot be one: write user@REALM or user/host@REALM")]
    Principal,
    #[error("the secret's principal needs a keytab or a ticketCache beside it")]
    NoKeytab,
    #[error("the secret's delegationToken is no file of tokens: take the one that `hdfs fetchdt` writes")]
    DelegationToken,
    #[error("in the secret, {0}")]
    Hadoop(String),
    #[error(
        "the secret is longer than 48 KiB in all: leave certificates out that the store does not need, and servers out of its krb5Conf"
    )]
    TooLong,
    #[error("the secret's {0} is empty or has control characters (a trailing newline?)")]
    Malformed(&'static str),
    #[error(
        "the secret's serviceAccountKey is empty or longer than 8 KiB: put in the JSON key file of a service account"
    )]
    ServiceAccountKey,
}

/// They travel with the secret, in one message.
const CA_BYTES_MAX: usize = 32 << 10;
const SERVICE_ACCOUNT_BYTES_MAX: usize = 8 << 10;
const CLIENT_CERTIFICATE_BYTES_MAX: usize = 16 << 10;
/// An RSA key of 8,192 bits, the longest that is in use, has 6.3 KiB.
const CLIENT_KEY_BYTES_MAX: usize = 8 << 10;
/// Of all values. A message between our processes has 64 KiB, the volume's description in it.
const SECRET_BYTES_MAX: usize = 48 << 10;
const KEYTAB_KIB_MAX: usize = 16;
const TICKET_CACHE_KIB_MAX: usize = 24;
const DELEGATION_TOKEN_KIB_MAX: usize = 8;
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
        let mut found: BTreeMap<&'static str, String> = BTreeMap::new();
        let mut bytes = 0_usize;
        for (name, value) in secrets {
            let (name, value) = (name.as_ref(), value.as_ref());
            let name = ours(name).ok_or_else(|| CredentialsError::Unknown(name.to_owned()))?;
            // Site files are read, and what is left of them counts.
            if !matches!(name, "coreSite" | "hdfsSite") {
                bytes = bytes.saturating_add(value.len());
            }
            match name {
                "caBundle" if value.len() <= CA_BYTES_MAX && value.contains(CERTIFICATE) => {}
                "caBundle" => return Err(CredentialsError::CaBundle),
                "clientCertificate" => check_client_certificate(value)?,
                "clientKey" => check_client_key(value)?,
                // A file, and files have lines.
                "serviceAccountKey" if (1..=SERVICE_ACCOUNT_BYTES_MAX).contains(&value.len()) => {}
                "serviceAccountKey" => return Err(CredentialsError::ServiceAccountKey),
                "keytab" => check_binary("keytab", value, KEYTAB_KIB_MAX).map(drop)?,
                "ticketCache" => check_binary("ticketCache", value, TICKET_CACHE_KIB_MAX).map(drop)?,
                "delegationToken" => {
                    let file = check_binary("delegationToken", value, DELEGATION_TOKEN_KIB_MAX)?;
                    hdfs::services_of_tokens(&file).map_err(|_| CredentialsError::DelegationToken)?;
                }
                "principal" if is_principal(value) => {}
                "principal" => return Err(CredentialsError::Principal),
                "hdfsUser" if is_hdfs_user(value) => {}
                "hdfsUser" => return Err(CredentialsError::HdfsUser),
                // Read below, where it is reduced to what is passed on.
                "krb5Conf" | "coreSite" | "hdfsSite" => {}
                _ if value.is_empty() || value.chars().any(char::is_control) => {
                    return Err(CredentialsError::Malformed(name));
                }
                _ => {}
            }
            if found.insert(name, value.to_owned()).is_some() {
                return Err(CredentialsError::Twice(name));
            }
        }
        let ca_bundle = found.remove("caBundle");
        let mut take = |name| found.remove(name);
        let files = HadoopFiles {
            core_site: take("coreSite"),
            hdfs_site: take("hdfsSite"),
            krb5_conf: take("krb5Conf"),
        };
        let hadoop = files.reduced().map_err(CredentialsError::Hadoop)?;
        if bytes.saturating_add(hadoop.hdfs_site.as_ref().map_or(0, String::len)) > SECRET_BYTES_MAX {
            return Err(CredentialsError::TooLong);
        }
        let customer_key = take("customerKey").map(customer_key).transpose()?;
        let client = match (take("clientCertificate"), take("clientKey")) {
            (Some(chain), Some(key)) => Some(ClientCertificate { chain, key: key.into() }),
            (None, None) => None,
            (Some(_), None) => {
                return Err(CredentialsError::Incomplete { have: "clientCertificate", missing: "clientKey" });
            }
            (None, Some(_)) => {
                return Err(CredentialsError::Incomplete { have: "clientKey", missing: "clientCertificate" });
            }
        };
        let keys = [take("accessKeyId"), take("secretAccessKey"), take("sessionToken")];
        let (file, account, sas, name) =
            (take("serviceAccountKey"), take("accountKey"), take("sasToken"), take("accountName"));
        let (login, bearer) = ([take("username"), take("password")], take("bearerToken"));
        let (user, token) = (take("hdfsUser"), take("delegationToken"));
        let kerberos = [take("principal"), take("keytab"), take("ticketCache")];
        let kinds = [
            (keys.iter().any(Option::is_some), "accessKeyId"),
            (file.is_some(), "serviceAccountKey"),
            (account.is_some(), "accountKey"),
            (sas.is_some(), "sasToken"),
            (login.iter().any(Option::is_some), "username"),
            (bearer.is_some(), "bearerToken"),
            (user.is_some(), "hdfsUser"),
            (kerberos.iter().any(Option::is_some), "principal"),
            (token.is_some(), "delegationToken"),
        ];
        let mut kinds = kinds.into_iter().filter_map(|(is, name)| is.then_some(name));
        match (kinds.next(), kinds.next(), &name) {
            (Some(one), Some(other), _) => return Err(CredentialsError::Mixed(one, other)),
            (
                Some(
                    one @ ("accessKeyId" | "serviceAccountKey" | "username" | "bearerToken" | "hdfsUser"
                    | "principal" | "delegationToken"),
                ),
                None,
                Some(_),
            ) => {
                return Err(CredentialsError::Mixed(one, "accountName"));
            }
            _ => {}
        }
        let secret = SecretString::from;
        let incomplete = |have, missing| Err(CredentialsError::Incomplete { have, missing });
        let identity = match (keys, file, account, sas) {
            ([Some(id), Some(key), token], ..) => Identity::Keys {
                access_key_id: secret(id),
                secret_access_key: secret(key),
                session_token: token.map(secret),
            },
            ([Some(_), None, _], ..) => return incomplete("accessKeyId", "secretAccessKey"),
            ([None, Some(_), _], ..) => return incomplete("secretAccessKey", "accessKeyId"),
            ([None, None, Some(_)], ..) => return incomplete("sessionToken", "accessKeyId"),
            (_, Some(file), ..) => Identity::ServiceAccount(secret(file)),
            (_, _, Some(key), _) => Identity::Account { name, key: secret(key) },
            (_, _, _, Some(token)) => Identity::Sas { name, token: secret(token) },
            _ if name.is_some() => return incomplete("accountName", "accountKey"),
            _ => match (login, bearer) {
                ([Some(user), Some(password)], _) => Identity::Password { user, password: secret(password) },
                ([Some(_), None], _) => return incomplete("username", "password"),
                ([None, Some(_)], _) => return incomplete("password", "username"),
                ([None, None], Some(token)) => Identity::Bearer(secret(token)),
                ([None, None], None) => match (kerberos, user, token) {
                    ([Some(_), None, None], ..) => return Err(CredentialsError::NoKeytab),
                    ([Some(principal), keytab, ticket_cache], ..) => Identity::Kerberos {
                        principal,
                        keytab: keytab.map(secret),
                        ticket_cache: ticket_cache.map(secret),
                    },
                    ([None, Some(_), _], ..) => return incomplete("keytab", "principal"),
                    ([None, None, Some(_)], ..) => return incomplete("ticketCache", "principal"),
                    (_, Some(user), _) => Identity::HdfsUser(user),
                    (_, _, Some(token)) => Identity::DelegationToken(secret(token)),
                    _ => Identity::Anonymous,
                },
            },
        };
        Ok(Self { identity, ca_bundle, client, customer_key, hadoop })
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
        let mut put = |name: &str, value: &str| drop(map.insert(name.to_owned(), value.to_owned()));
        match &self.identity {
            Identity::Anonymous => {}
            Identity::Keys { access_key_id, secret_access_key, session_token } => {
                put("accessKeyId", access_key_id.expose_secret());
                put("secretAccessKey", secret_access_key.expose_secret());
                session_token.iter().for_each(|token| put("sessionToken", token.expose_secret()));
            }
            Identity::ServiceAccount(file) => put("serviceAccountKey", file.expose_secret()),
            Identity::Account { name, key } => {
                name.iter().for_each(|name| put("accountName", name));
                put("accountKey", key.expose_secret());
            }
            Identity::Sas { name, token } => {
                name.iter().for_each(|name| put("accountName", name));
                put("sasToken", token.expose_secret());
            }
            Identity::Password { user, password } => {
                put("username", user);
                put("password", password.expose_secret());
            }
            Identity::Bearer(token) => put("bearerToken", token.expose_secret()),
            Identity::HdfsUser(user) => put("hdfsUser", user),
            Identity::Kerberos { principal, keytab, ticket_cache } => {
                put("principal", principal);
                keytab.iter().for_each(|file| put("keytab", file.expose_secret()));
                ticket_cache.iter().for_each(|file| put("ticketCache", file.expose_secret()));
            }
            Identity::DelegationToken(file) => put("delegationToken", file.expose_secret()),
        }
        let HadoopFiles { core_site, hdfs_site, krb5_conf } = &self.hadoop;
        core_site.iter().for_each(|xml| put("coreSite", xml));
        hdfs_site.iter().for_each(|xml| put("hdfsSite", xml));
        krb5_conf.iter().for_each(|text| put("krb5Conf", text));
        self.ca_bundle.iter().for_each(|pem| put("caBundle", pem));
        if let Some(ClientCertificate { chain, key }) = &self.client {
            put("clientCertificate", chain);
            put("clientKey", key.expose_secret());
        }
        self.customer_key.iter().for_each(|key| put("customerKey", key.expose_secret()));
        map
    }

    /// PEM.
    pub fn ca_bundle(&self) -> Option<&str> {
        self.ca_bundle.as_deref()
    }

    /// PEM: the certificate that a store may want to see with those up to its authority, and its private key, in clear.
    /// Never log the second.
    pub fn client_certificate(&self) -> Option<(&str, &str)> {
        self.client.as_ref().map(|client| (client.chain.as_str(), client.key.expose_secret()))
    }

    /// What objects are encrypted with where the store does not keep the key: 32 bytes in base64, in clear. Never log it.
    pub fn customer_key(&self) -> Option<&str> {
        self.customer_key.as_ref().map(ExposeSecret::expose_secret)
    }

    /// Files that say where HDFS and its Kerberos are.
    pub fn hadoop(&self) -> &HadoopFiles {
        &self.hadoop
    }

    /// As whom an HDFS is asked, in clear; None: the secret says nothing of it. Never log it.
    pub fn hdfs_identity(&self) -> Option<HdfsIdentity> {
        let file = |base64: &SecretString| {
            let bytes = BASE64_STANDARD.decode(base64.expose_secret()).unwrap_or_default(); // was checked
            hdfs::Secret(bytes)
        };
        Some(match &self.identity {
            Identity::HdfsUser(user) => HdfsIdentity::Simple { user: user.clone() },
            Identity::Kerberos { principal, keytab, ticket_cache } => HdfsIdentity::Kerberos {
                principal: principal.clone(),
                keytab: keytab.as_ref().map(file),
                ticket_cache: ticket_cache.as_ref().map(file),
            },
            Identity::DelegationToken(token) => HdfsIdentity::Token(file(token)),
            _ => return None,
        })
    }

    pub fn kind(&self) -> CredentialsKind {
        match self.identity {
            Identity::Anonymous => CredentialsKind::Anonymous,
            Identity::Keys { .. } => CredentialsKind::Keys,
            Identity::ServiceAccount(_) => CredentialsKind::ServiceAccount,
            Identity::Account { .. } => CredentialsKind::Account,
            Identity::Sas { .. } => CredentialsKind::Sas,
            Identity::Password { .. } => CredentialsKind::Password,
            Identity::Bearer(_) => CredentialsKind::Bearer,
            Identity::HdfsUser(_) => CredentialsKind::HdfsUser,
            Identity::Kerberos { .. } => CredentialsKind::Kerberos,
            Identity::DelegationToken(_) => CredentialsKind::DelegationToken,
        }
    }

    /// Is there nothing in the secret but Hadoop's files, or none?
    pub fn is_empty_but_files(&self) -> bool {
        Self { hadoop: HadoopFiles::default(), ..self.clone() }.is_empty()
    }

    /// Is there nothing in the secret, or none?
    pub fn is_empty(&self) -> bool {
        let Self { identity, ca_bundle, client, customer_key, hadoop } = self;
        matches!((identity, ca_bundle, client, customer_key), (Identity::Anonymous, None, None, None))
            && *hadoop == HadoopFiles::default()
    }
}

/// See [`Credentials::hdfs_identity`].
pub enum HdfsIdentity {
    Simple { user: String },
    Kerberos { principal: String, keytab: Option<hdfs::Secret>, ticket_cache: Option<hdfs::Secret> },
    Token(hdfs::Secret),
}

/// What was a file before a Secret had to be text.
fn check_binary(name: &'static str, value: &str, kib_max: usize) -> Result<Vec<u8>, CredentialsError> {
    let bytes = (value.len() <= kib_max << 10).then(|| BASE64_STANDARD.decode(value).ok()).flatten();
    bytes.filter(|bytes| !bytes.is_empty()).ok_or(CredentialsError::Binary(name, kib_max))
}

/// `user@REALM`, `user/host@REALM`; without a realm it is the default one of krb5.conf.
fn is_principal(text: &str) -> bool {
    let legal = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-' | '/' | '@' | '$');
    let (user, realm) = text.split_once('@').map_or((text, None), |(user, realm)| (user, Some(realm)));
    text.len() <= 256
        && text.chars().all(legal)
        && (1..=2).contains(&user.split('/').count())
        && user.split('/').all(|part| !part.is_empty())
        && realm.is_none_or(|realm| !realm.is_empty() && !realm.contains(['@', '/']))
}

fn is_pem(text: &str, bytes_max: usize) -> bool {
    text.len() <= bytes_max && text.bytes().all(|byte| byte.is_ascii_graphic() || b" \t\r\n".contains(&byte))
}

fn check_client_certificate(pem: &str) -> Result<(), CredentialsError> {
    let is_one = is_pem(pem, CLIENT_CERTIFICATE_BYTES_MAX) && pem.contains(CERTIFICATE);
    if is_one { Ok(()) } else { Err(CredentialsError::ClientCertificate) }
}

fn check_client_key(pem: &str) -> Result<(), CredentialsError> {
    // PKCS #8's, and the one of before.
    if pem.contains("-----BEGIN ENCRYPTED PRIVATE KEY-----") || pem.contains("Proc-Type: 4,ENCRYPTED") {
        return Err(CredentialsError::LockedKey);
    }
    let is_one =
        is_pem(pem, CLIENT_KEY_BYTES_MAX) && pem.contains("-----BEGIN ") && pem.contains("PRIVATE KEY-----");
    if is_one { Ok(()) } else { Err(CredentialsError::ClientKey) }
}

fn customer_key(text: String) -> Result<SecretString, CredentialsError> {
    match BASE64_STANDARD.decode(&text).is_ok_and(|key| key.len() == 32) {
        true => Ok(text.into()),
        false => Err(CredentialsError::CustomerKey),
    }
}

/// Our name of a secret's key. Others': a Secret that works with what people have used before works as it is.
fn ours(name: &str) -> Option<&'static str> {
    const NAMES: &[(&str, &[&str])] = &[
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
        ("serviceAccountKey", &["key.json", "credentials.json", "service-account.json"]), // as files of a Secret
        ("accountName", &["azurestorageaccountname"]), // Azure's CSI driver for blobs, as the next two
        ("accountKey", &["azurestorageaccountkey"]),
        ("sasToken", &["azurestorageaccountsastoken"]),
        // As a Secret of the type kubernetes.io/basic-auth has them.
        ("username", &[]),
        ("password", &[]),
        ("bearerToken", &[]),
        ("caBundle", &["ca.crt"]), // as in every Secret of an authority in Kubernetes
        ("clientCertificate", &["tls.crt"]), // as in every Secret of type kubernetes.io/tls
        ("clientKey", &["tls.key"]),
        ("customerKey", &[]),
        ("hdfsUser", &["HADOOP_USER_NAME"]), // JuiceFS, as the next two; Hadoop
        ("principal", &["KRB5PRINCIPAL"]),
        ("keytab", &["KRB5KEYTAB_BASE64"]),
        ("ticketCache", &[]),
        ("delegationToken", &[]),
        ("krb5Conf", &["krb5.conf"]), // as files of a Secret
        ("coreSite", &["core-site.xml"]),
        ("hdfsSite", &["hdfs-site.xml"]),
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
    // The secret belongs to the scope: knowing someone's key id must not open their cache.
    match &credentials.identity {
        Identity::Anonymous => field(b"anonymous"),
        // A session token does not: it changes every hour for the same identity.
        Identity::Keys { access_key_id, secret_access_key, session_token: _ } => {
            field(b"keys");
            field(access_key_id.expose_secret().as_bytes());
            field(secret_access_key.expose_secret().as_bytes());
        }
        Identity::ServiceAccount(file) => {
            field(b"service account");
            field(file.expose_secret().as_bytes());
        }
        // In which account it is, source and parameters say.
        Identity::Account { name: _, key } => {
            field(b"account key");
            field(key.expose_secret().as_bytes());
        }
        Identity::Sas { name: _, token } => {
            field(b"sas token");
            field(token.expose_secret().as_bytes());
        }
        Identity::Password { user, password } => {
            field(b"password");
            field(user.as_bytes());
            field(password.expose_secret().as_bytes());
        }
        Identity::Bearer(token) => {
            field(b"bearer token");
            field(token.expose_secret().as_bytes());
        }
        Identity::HdfsUser(user) => {
            field(b"hdfs user");
            field(user.as_bytes());
        }
        // A keytab is as good as its password. Tickets change every day, and whose they are is not checked here: who has
        // some gets a cache of its own with each of them.
        Identity::Kerberos { principal, keytab, ticket_cache } => {
            field(b"kerberos");
            field(principal.as_bytes());
            for file in [keytab, ticket_cache] {
                field(file.as_ref().map(ExposeSecret::expose_secret).unwrap_or_default().as_bytes());
            }
        }
        Identity::DelegationToken(file) => {
            field(b"delegation token");
            field(file.expose_secret().as_bytes());
        }
    }
    // Who else says where an HDFS is may be answered by somebody else.
    let HadoopFiles { core_site, hdfs_site, krb5_conf } = &credentials.hadoop;
    for (name, file) in [("core-site", core_site), ("hdfs-site", hdfs_site), ("krb5.conf", krb5_conf)] {
        if let Some(file) = file {
            field(name.as_bytes());
            field(file.as_bytes());
        }
    }
    if !parameters.name_nodes.is_empty() {
        field(b"name nodes");
        field(parameters.name_nodes.join(",").as_bytes());
    }
    if let Some(name) = &parameters.hadoop_config {
        field(b"hadoop config");
        field(name.as_bytes());
    }
    if let Some(user) = &parameters.hdfs_user {
        field(b"hdfs user");
        field(user.as_bytes());
    }
    // Which files there are, and how their versions are told.
    if let Some(manifest) = &parameters.manifest {
        field(b"manifest");
        field(manifest.as_bytes());
    }
    if let Some(account) = &parameters.storage_account {
        field(b"storage account");
        field(account.as_bytes());
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
    // Whom it names may see other objects than others may. The key, too: a certificate is no secret.
    if let Some(ClientCertificate { chain, key }) = &credentials.client {
        field(b"client certificate");
        field(chain.as_bytes());
        field(key.expose_secret().as_bytes());
    }
    // Who does not have it must not read what was read with it.
    if let Some(key) = &credentials.customer_key {
        field(b"customer key");
        field(key.expose_secret().as_bytes());
    }
    // Volumes of one scope ask alike, and who has not said so does not pay.
    if parameters.requester_pays {
        field(b"requester pays");
    }
    // Whoever reads them may answer otherwise for them.
    for (name, value) in &parameters.extra_headers {
        field(b"header");
        field(name.as_bytes());
        field(value.as_bytes());
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
        assert!(matches!(Credentials::from_secrets([("passwort", "x")]), Err(CredentialsError::Unknown(_))));
        assert!(matches!(
            Credentials::from_secrets([("accessKeyId", "x\n"), ("secretAccessKey", "y")]),
            Err(CredentialsError::Malformed("accessKeyId"))
        ));
        assert!(Credentials::from_secrets::<&str, &str>([]).unwrap().is_empty());
    }

    #[test]
    fn an_hdfs_is_asked_with_a_keytab_tickets_a_token_or_a_name() {
        let binary = BASE64_STANDARD.encode(b"\x05\x02");
        let of = |pairs: &[(&str, &str)]| Credentials::from_secrets(pairs.iter().copied());
        let principal = ("principal", "hdfs/nn.example.com@EXAMPLE.COM");
        let site = "<configuration><property><name>dfs.ha.namenodes.a</name><value>b</value></property>\n\
                    <property><name>dfs.blocksize</name><value>1</value></property></configuration>";
        let conf = ("krb5.conf", "[libdefaults]\n default_realm = EXAMPLE.COM\n");
        for (pairs, kind) in [
            (vec![principal, ("keytab", &binary), conf], CredentialsKind::Kerberos),
            (vec![("KRB5PRINCIPAL", "alice"), ("KRB5KEYTAB_BASE64", &binary)], CredentialsKind::Kerberos),
            (vec![principal, ("ticketCache", &binary)], CredentialsKind::Kerberos),
            (
                vec![("HADOOP_USER_NAME", "alice"), ("core-site.xml", "<configuration/>")],
                CredentialsKind::HdfsUser,
            ),
            (vec![("hdfs-site.xml", site)], CredentialsKind::Anonymous),
        ] {
            let credentials = of(&pairs).unwrap();
            assert!(credentials.kind() == kind && !credentials.is_empty(), "{kind:?}");
            assert_eq!(Credentials::from_secrets(credentials.to_secrets()), Ok(credentials.clone()));
            assert_eq!(credentials.hdfs_identity().is_some(), kind != CredentialsKind::Anonymous);
            assert!(!format!("{credentials:?}").contains(&binary));
            let source = SourceUrl::parse("hdfs://ns").unwrap();
            let scope = |of: &Credentials| ScopeId::of(&key(1), &source, &Parameters::default(), of);
            assert_ne!(scope(&credentials), scope(&Credentials::anonymous()), "{kind:?}");
        }
        // What is no client's makes no other volume, however much it is.
        let more =
            site.replace("<configuration>", &format!("<configuration><!-- {} -->", " ".repeat(200 << 10)));
        assert_eq!(of(&[("hdfsSite", site)]), of(&[("hdfsSite", &more)]));
        assert!(of(&[("coreSite", "<configuration/>")]).unwrap().is_empty());
        let long = BASE64_STANDARD.encode(vec![0; 16 << 10]);
        for (pairs, expected) in [
            (vec![principal], CredentialsError::NoKeytab),
            (
                vec![("keytab", binary.as_str())],
                CredentialsError::Incomplete { have: "keytab", missing: "principal" },
            ),
            (vec![principal, ("keytab", "\u{5}\u{2}")], CredentialsError::Binary("keytab", 16)),
            (vec![principal, ("keytab", "")], CredentialsError::Binary("keytab", 16)),
            (vec![principal, ("keytab", &long)], CredentialsError::Binary("keytab", 16)),
            (vec![("principal", "a@b@c"), ("keytab", &binary)], CredentialsError::Principal),
            (vec![("principal", "a b"), ("keytab", &binary)], CredentialsError::Principal),
            (vec![("hdfsUser", "a/b")], CredentialsError::HdfsUser),
            (vec![("delegationToken", &binary)], CredentialsError::DelegationToken),
            (
                vec![("hdfsUser", "a"), principal, ("keytab", &binary)],
                CredentialsError::Mixed("hdfsUser", "principal"),
            ),
            (
                vec![("accessKeyId", "a"), ("hdfsUser", "a")],
                CredentialsError::Mixed("accessKeyId", "hdfsUser"),
            ),
        ] {
            assert_eq!(of(&pairs), Err(expected));
        }
        let file = |name: &str, text: &str| of(&[(name, text)]).unwrap_err().to_string();
        assert!(file("krb5.conf", "include /etc/passwd\n").contains("line 1 of krb5.conf"));
        assert!(file("coreSite", "<html/>").contains("core-site.xml is not one of Hadoop's"));
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
        assert!(alone.kind() == CredentialsKind::Anonymous && !alone.is_empty());
        let source = SourceUrl::parse("s3://bucket").unwrap();
        let scope = |of: &Credentials| ScopeId::of(&key(1), &source, &Parameters::default(), of);
        assert_ne!(scope(&credentials), scope(&keys("id", "s")));
        let long = format!("{pem}{}", "x".repeat(CA_BYTES_MAX));
        for wrong in ["", "/etc/ssl/ca.pem", &long] {
            assert_eq!(with("caBundle", wrong), Err(CredentialsError::CaBundle));
        }
    }

    #[test]
    fn a_client_certificate_comes_with_its_key_beside_other_credentials_or_alone() {
        let pem = |kind: &str, text: &str| format!("-----BEGIN {kind}-----\n{text}\n-----END {kind}-----\n");
        let (chain, secret) = (pem("CERTIFICATE", "MIIB"), pem("PRIVATE KEY", "hunter2"));
        let of = |pairs: &[(&str, &str)]| Credentials::from_secrets(pairs.iter().copied());
        let (certificate, private) = (("clientCertificate", chain.as_str()), ("clientKey", secret.as_str()));
        let alone = of(&[certificate, private]).unwrap();
        // As Kubernetes has them in its own type of Secret.
        assert_eq!(alone, of(&[("tls.crt", &chain), ("tls.key", &secret)]).unwrap());
        assert!(alone.kind() == CredentialsKind::Anonymous && !alone.is_empty());
        let beside = of(&[("accessKeyId", "id"), ("secretAccessKey", "s"), certificate, private]).unwrap();
        for credentials in [&alone, &beside] {
            assert_eq!(Credentials::from_secrets(credentials.to_secrets()).as_ref(), Ok(credentials));
            let shown = format!("{credentials:?}");
            assert!(!shown.contains("hunter2") && !shown.contains("MIIB"), "{shown}");
        }
        let source = SourceUrl::parse("s3://bucket").unwrap();
        let scope = |of: &Credentials| ScopeId::of(&key(1), &source, &Parameters::default(), of);
        assert_ne!(scope(&alone), scope(&Credentials::anonymous()));
        assert_ne!(scope(&beside), scope(&keys("id", "s")));
        let another = pem("PRIVATE KEY", "another");
        let guessed = of(&[certificate, ("clientKey", &another)]).unwrap();
        assert_ne!(
            scope(&alone),
            scope(&guessed),
            "the certificate, which anybody may have, opens the scope"
        );
        for key in ["RSA PRIVATE KEY", "EC PRIVATE KEY"] {
            of(&[certificate, ("clientKey", &pem(key, "x"))]).unwrap();
        }
        let (old, long) = ("Proc-Type: 4,ENCRYPTED\n", "x".repeat(16 << 10));
        for (pairs, error) in [
            (
                vec![certificate],
                CredentialsError::Incomplete { have: "clientCertificate", missing: "clientKey" },
            ),
            (vec![private], CredentialsError::Incomplete { have: "clientKey", missing: "clientCertificate" }),
            (vec![("clientCertificate", secret.as_str())], CredentialsError::ClientCertificate),
            (vec![("clientCertificate", "")], CredentialsError::ClientCertificate),
            (vec![("clientCertificate", &pem("CERTIFICATE", &long))], CredentialsError::ClientCertificate),
            (vec![("clientCertificate", &pem("CERTIFICATE", "\0"))], CredentialsError::ClientCertificate),
            (vec![("clientKey", &chain)], CredentialsError::ClientKey),
            (vec![("clientKey", "/etc/tls.key")], CredentialsError::ClientKey),
            (vec![("clientKey", &pem("PRIVATE KEY", &long))], CredentialsError::ClientKey),
            (vec![("clientKey", &pem("ENCRYPTED PRIVATE KEY", "x"))], CredentialsError::LockedKey),
            (vec![("clientKey", &pem("RSA PRIVATE KEY", old))], CredentialsError::LockedKey),
        ] {
            let found = of(&pairs).unwrap_err();
            assert!(found == error && !found.to_string().contains("hunter2"), "{found}");
        }
    }

    #[test]
    fn the_key_that_objects_are_encrypted_with_is_whole_and_opens_a_scope_of_its_own() {
        const KEY: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
        let of = |key: &str| {
            Credentials::from_secrets([("accessKeyId", "id"), ("secretAccessKey", "s"), ("customerKey", key)])
        };
        let credentials = of(KEY).unwrap();
        assert_eq!(credentials.customer_key(), Some(KEY));
        assert_eq!(Credentials::from_secrets(credentials.to_secrets()), Ok(credentials.clone()));
        assert!(!format!("{credentials:?}").contains(KEY));
        assert!(!Credentials::from_secrets([("customerKey", KEY)]).unwrap().is_empty());
        let source = SourceUrl::parse("s3://bucket").unwrap();
        let scope = |of: &Credentials| ScopeId::of(&key(1), &source, &Parameters::default(), of);
        let other = of(&KEY.replace("AAEC", "BBEC")).unwrap();
        assert!(scope(&credentials) != scope(&keys("id", "s")) && scope(&credentials) != scope(&other));
        for wrong in [
            "hunter2",
            "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8", // no padding
            "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh9=", // bits beyond the end
            "AAECAwQFBgcICQoLDA0ODw==",                    // 16 bytes
            "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
            &"AAEC".repeat(1000),
        ] {
            let error = of(wrong).unwrap_err();
            assert!(error == CredentialsError::CustomerKey && !error.to_string().contains(wrong), "{error}");
        }
        for broken in ["", &format!("{KEY}\n"), &format!("{KEY}\r\nx-other: 1")] {
            assert_eq!(of(broken), Err(CredentialsError::Malformed("customerKey")));
        }
    }

    #[test]
    fn a_secret_that_no_message_could_carry_is_refused() {
        let authority = format!("{CERTIFICATE}{}", "x".repeat(20 << 10));
        let of = |token: usize| {
            let token = "x".repeat(token);
            let keys = [("accessKeyId", "id"), ("secretAccessKey", "s"), ("sessionToken", &token)];
            Credentials::from_secrets(keys.into_iter().chain([("caBundle", authority.as_str())]))
        };
        of(20 << 10).unwrap();
        assert_eq!(of(30 << 10), Err(CredentialsError::TooLong));
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

    #[test]
    fn each_store_has_its_kind_of_secret_and_none_of_another() {
        let file = r#"{"type": "service_account"}"#.replace(' ', "\n");
        let of = |pairs: &[(&str, &str)]| Credentials::from_secrets(pairs.iter().copied());
        for (pairs, kind) in [
            (&[("serviceAccountKey", file.as_str())][..], CredentialsKind::ServiceAccount),
            (&[("key.json", &file)], CredentialsKind::ServiceAccount),
            (&[("accountKey", "a2V5")], CredentialsKind::Account),
            (&[("username", "someone"), ("password", "hunter2")], CredentialsKind::Password),
            (&[("bearerToken", "hunter2")], CredentialsKind::Bearer),
            (
                &[("azurestorageaccountname", "acc"), ("azurestorageaccountkey", "a2V5")],
                CredentialsKind::Account,
            ),
            (
                &[("azurestorageaccountname", "acc"), ("azurestorageaccountsastoken", "?sig=x")],
                CredentialsKind::Sas,
            ),
        ] {
            let credentials = of(pairs).unwrap();
            assert_eq!(credentials.kind(), kind);
            assert_eq!(Credentials::from_secrets(credentials.to_secrets()), Ok(credentials.clone()));
            let shown = format!("{credentials:?}");
            assert!(pairs.iter().all(|(_, value)| !shown.contains(value)), "{shown}");
            let source = SourceUrl::parse("gs://bucket").unwrap();
            let scope = |of: &Credentials| ScopeId::of(&key(1), &source, &Parameters::default(), of);
            assert_ne!(scope(&credentials), scope(&Credentials::anonymous()));
            assert_ne!(scope(&credentials), scope(&keys("id", "secret")));
        }
        let long = "x".repeat(SERVICE_ACCOUNT_BYTES_MAX + 1);
        for (pairs, error) in [
            (&[("serviceAccountKey", "")][..], CredentialsError::ServiceAccountKey),
            (&[("serviceAccountKey", &long)], CredentialsError::ServiceAccountKey),
            (&[("accountKey", "x\n")], CredentialsError::Malformed("accountKey")),
            (&[("accountKey", "x"), ("sasToken", "y")], CredentialsError::Mixed("accountKey", "sasToken")),
            (&[("sessionToken", "x"), ("sasToken", "y")], CredentialsError::Mixed("accessKeyId", "sasToken")),
            (
                &[("serviceAccountKey", "x"), ("accountName", "y")],
                CredentialsError::Mixed("serviceAccountKey", "accountName"),
            ),
            (
                &[("accountName", "x")],
                CredentialsError::Incomplete { have: "accountName", missing: "accountKey" },
            ),
        ] {
            assert_eq!(of(pairs), Err(error));
        }
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
        assert_ne!(base, with(&|p| p.extra_headers = [("x-a".to_owned(), "b".to_owned())].into()));
        assert_ne!(base, with(&|p| p.storage_account = Some("account".into())));
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
