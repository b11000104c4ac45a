//! What a helper is told: from the volume, its Secret and what this node's operator says of Hadoop.

use crate::StoreError;
use crate::egress::EgressConfig;
use crate::network::Network;
use hdfs::{Configure, Identity, Settings};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use volume::{AllowList, Credentials, HadoopFiles, HdfsIdentity, Parameters, SourceUrl, VolumeSpec};

/// Who asks an HDFS without Kerberos where nobody says who: HDFS's audit log shows it.
const HDFS_USER: &str = "millpond";

/// What an HDFS takes of a node beyond the network.
#[derive(Debug)]
pub struct HdfsNode {
    pub helpers: Arc<dyn super::Helpers>,
    /// Which NameNodes a volume or its Secret may list.
    pub allow: AllowList,
    /// What the operator has put there for volumes to name (`hadoopConfig`), or why it cannot be used.
    pub configurations: BTreeMap<String, Result<HadoopConfig, String>>,
    /// Where HDFS's servers are meant to be although nothing else is asked there: the cluster's own networks, this
    /// machine.
    pub networks: Vec<Network>,
}

/// A configuration of Hadoop's, read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HadoopConfig {
    settings: Settings,
    krb5_conf: Option<String>,
}

impl HadoopConfig {
    /// # Errors
    /// A sentence: which file, and what is wrong with it.
    pub fn of(files: &HadoopFiles) -> Result<Self, String> {
        let settings = hdfs::settings(files.core_site.as_deref(), files.hdfs_site.as_deref());
        let settings = settings.map_err(|bad| bad.to_string())?;
        if let Some(text) = &files.krb5_conf {
            hdfs::check_krb5_conf(text).map_err(|bad| bad.to_string())?;
        }
        Ok(Self { settings, krb5_conf: files.krb5_conf.clone() })
    }
}

/// What of one volume goes into it; its credentials come with each helper anew.
pub(super) struct Asking {
    authority: String,
    what: String,
    parameters: Parameters,
    refused: Vec<hdfs::Network>,
    meant: Vec<hdfs::Network>,
}

impl fmt::Debug for Asking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Asking").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl Asking {
    /// None: it is no HDFS.
    pub(super) fn of(spec: &VolumeSpec, node: &HdfsNode, egress: &EgressConfig) -> Option<Self> {
        let SourceUrl::Hdfs { authority, .. } = &spec.source else { return None };
        Some(Self {
            authority: authority.clone(),
            what: spec.source.to_string(),
            parameters: spec.parameters.clone(),
            refused: egress.networks().into_iter().map(Into::into).collect(),
            meant: node.networks.iter().copied().map(Into::into).collect(),
        })
    }

    /// # Errors
    /// A sentence for whoever wrote the volume, its Secret or the node's configuration.
    pub(super) fn configure(
        &self,
        node: &HdfsNode,
        credentials: &Credentials,
    ) -> Result<Configure, StoreError> {
        let invalid = |why: String| StoreError::Invalid { what: self.what.clone(), why };
        let operators = match &self.parameters.hadoop_config {
            None => None,
            Some(name) => match node.configurations.get(name) {
                Some(Ok(config)) => Some(config),
                Some(Err(why)) => {
                    return Err(invalid(format!(
                        "configuration {name:?} of Hadoop's cannot be used on this node ({why}): tell the platform team"
                    )));
                }
                None => {
                    let known: Vec<_> = node.configurations.keys().map(String::as_str).collect();
                    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                    return Err(invalid(format!(
                        "'hadoopConfig' is {name:?}, which this node does not have (it has {known}): ask the platform team to add it"
                    )));
                }
            },
        };
        let secrets = HadoopConfig::of(credentials.hadoop()).map_err(invalid)?;
        let mut settings = operators.map(|config| config.settings.clone()).unwrap_or_default();
        settings.extend(secrets.settings.clone());
        self.add_name_nodes(&mut settings);
        // Whoever wrote the Secret is not who runs the node.
        for (name, address) in &settings {
            let is_operators = operators.is_some_and(|config| config.settings.get(name) == Some(address));
            if name.starts_with(RPC_ADDRESS) && !is_operators {
                node.allow.name_node(address).map_err(|e| invalid(e.to_string()))?;
            }
        }
        let krb5_conf = secrets.krb5_conf.or_else(|| operators.and_then(|config| config.krb5_conf.clone()));
        let identity = self.identity(&settings, krb5_conf, credentials).map_err(invalid)?;
        settings.retain(|name, _| hdfs::is_setting(name));
        Ok(Configure {
            authority: self.authority.clone(),
            settings,
            identity,
            refused: self.refused.clone(),
            meant: self.meant.clone(),
        })
    }

    fn add_name_nodes(&self, settings: &mut Settings) {
        let (authority, all) = (&self.authority, &self.parameters.name_nodes);
        if all.is_empty() {
            return;
        }
        let others = format!("{RPC_ADDRESS}{authority}.");
        settings.retain(|name, _| !name.starts_with(&others));
        let names: Vec<_> = (1..=all.len()).map(|number| format!("nn{number}")).collect();
        settings.insert(format!("dfs.ha.namenodes.{authority}"), names.join(","));
        for (name, address) in names.iter().zip(all) {
            settings.insert(format!("{others}{name}"), address.clone());
        }
    }

    fn identity(
        &self,
        settings: &Settings,
        krb5_conf: Option<String>,
        credentials: &Credentials,
    ) -> Result<Identity, String> {
        let user = self.parameters.hdfs_user.clone();
        let identity = match credentials.hdfs_identity() {
            Some(HdfsIdentity::Simple { user: secrets }) => {
                let user = user.unwrap_or_else(|| secrets.clone());
                if user != secrets {
                    return Err(format!(
                        "'hdfsUser' is {user:?}, and the secret says another: keep one of them"
                    ));
                }
                Identity::Simple { user }
            }
            Some(HdfsIdentity::Kerberos { principal, keytab, ticket_cache }) => {
                let krb5_conf = krb5_conf.ok_or(
                    "Kerberos needs a krb5.conf: put krb5Conf into the secret, or name a configuration that has one in 'hadoopConfig'",
                )?;
                Identity::Kerberos { principal, krb5_conf, keytab, ticket_cache }
            }
            Some(HdfsIdentity::Token(file)) => Identity::Tokens { file },
            None if !credentials.is_empty_but_files() => {
                return Err(format!(
                    "the secret has {}, with which no HDFS is asked: it takes principal with keytab or ticketCache, delegationToken or \
                     hdfsUser",
                    credentials.kind().names()
                ));
            }
            None => Identity::Simple { user: user.clone().unwrap_or_else(|| HDFS_USER.to_owned()) },
        };
        match &identity {
            Identity::Simple { .. } => {
                let wanted = settings.get("hadoop.security.authentication").map(String::as_str);
                match wanted {
                    Some("kerberos") => Err("this HDFS wants Kerberos (hadoop.security.authentication of its core-site.xml): put principal, keytab \
                         and krb5Conf into the secret"
                        .to_owned()),
                    _ => Ok(identity),
                }
            }
            Identity::Kerberos { .. } | Identity::Tokens { .. } if self.parameters.hdfs_user.is_some() => {
                Err("'hdfsUser' is for an HDFS without Kerberos: leave it out, the secret says who asks"
                    .to_owned())
            }
            Identity::Kerberos { .. } | Identity::Tokens { .. } => Ok(identity),
        }
    }
}

const RPC_ADDRESS: &str = "dfs.namenode.rpc-address.";

#[cfg(test)]
mod tests {
    use super::*;
    use ::base64::Engine;
    use ::base64::prelude::BASE64_STANDARD;
    use volume::{EndpointPattern, TemplateValues, VolumeId};

    #[derive(Debug)]
    struct NoHelpers;

    #[async_trait::async_trait]
    impl super::super::Helpers for NoHelpers {
        async fn start(&self) -> std::io::Result<super::super::Helper> {
            Err(std::io::ErrorKind::NotFound.into())
        }
        fn told_missing(&self, _: &[String]) {}
    }

    const KRB5_CONF: &str = "[libdefaults]\n default_realm = EXAMPLE.COM\n";

    fn site(properties: &[(&str, &str)]) -> String {
        let property = |(name, value): &(&str, &str)| {
            format!("<property><name>{name}</name><value>{value}</value></property>")
        };
        format!("<configuration>{}</configuration>", properties.iter().map(property).collect::<String>())
    }

    fn name_service(name: &str, hosts: &[&str]) -> String {
        let names: Vec<_> = (0..hosts.len()).map(|k| format!("n{k}")).collect();
        let mut all = vec![(format!("dfs.ha.namenodes.{name}"), names.join(","))];
        all.extend(
            names.iter().zip(hosts).map(|(n, host)| (format!("{RPC_ADDRESS}{name}.{n}"), (*host).to_owned())),
        );
        site(&all.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect::<Vec<_>>())
    }

    /// With a configuration "prod" of the operator's, which wants Kerberos, and one that cannot be used.
    fn node() -> HdfsNode {
        let core_site = Some(site(&[("hadoop.security.authentication", "kerberos")]));
        let hdfs_site = Some(name_service("prod", &["one.corp:8020", "two.corp:8020"]));
        let files = HadoopFiles { core_site, hdfs_site, krb5_conf: Some(KRB5_CONF.to_owned()) };
        HdfsNode {
            helpers: Arc::new(NoHelpers),
            allow: AllowList {
                endpoints: vec![EndpointPattern::parse("hdfs://*.team.corp").unwrap()],
                ..AllowList::default()
            },
            configurations: [
                ("prod".to_owned(), HadoopConfig::of(&files)),
                ("wrong".to_owned(), Err("core-site.xml ends in the middle".to_owned())),
            ]
            .into(),
            networks: vec!["10.1.0.0/16".parse().unwrap()],
        }
    }

    fn told(parameters: &[(&str, &str)], secrets: &[(&str, &str)]) -> Result<Configure, String> {
        let parsed = Parameters::parse(parameters.iter().copied(), &TemplateValues::default());
        let (source, parameters) = parsed.unwrap();
        let spec = VolumeSpec { id: VolumeId::parse("v").unwrap(), source, parameters };
        let credentials = Credentials::from_secrets(secrets.iter().copied()).unwrap();
        let egress =
            EgressConfig { forbidden: vec!["10.96.0.0/12".parse().unwrap()], ..EgressConfig::default() };
        let asking = Asking::of(&spec, &node(), &egress).unwrap();
        asking.configure(&node(), &credentials).map_err(|e| match e {
            StoreError::Invalid { why, .. } => why,
            other => panic!("{other}"),
        })
    }

    fn keytab() -> String {
        BASE64_STANDARD.encode(b"\x05\x02")
    }

    #[test]
    fn what_a_volume_its_secret_and_the_operator_say_comes_together() {
        let simple = told(&[("source", "hdfs://nn:9000/d")], &[]).unwrap();
        assert_eq!((simple.authority.as_str(), simple.settings.len()), ("nn:9000", 0));
        assert!(matches!(simple.identity, Identity::Simple { user } if user == HDFS_USER));
        let refused = |address: &str| {
            let address = address.parse().unwrap();
            let within = |all: &[hdfs::Network]| all.iter().any(|network| network.contains(address));
            within(&simple.refused) && !within(&simple.meant)
        };
        assert!(refused("127.0.0.1") && refused("169.254.169.254") && refused("10.97.0.1") && refused("::1"));
        assert!(!refused("10.1.2.3") && !refused("192.168.0.1"));

        let keytab = keytab();
        let secrets = [("principal", "alice@EXAMPLE.COM"), ("keytab", keytab.as_str())];
        let prod = told(&[("source", "hdfs://prod/d"), ("hadoopConfig", "prod")], &secrets).unwrap();
        assert_eq!(prod.settings["dfs.namenode.rpc-address.prod.n1"], "two.corp:8020");
        assert!(!prod.settings.contains_key("hadoop.security.authentication"));
        let Identity::Kerberos { principal, krb5_conf, keytab: Some(file), ticket_cache: None } =
            prod.identity
        else {
            panic!("another identity")
        };
        assert_eq!((principal.as_str(), krb5_conf.as_str()), ("alice@EXAMPLE.COM", KRB5_CONF));
        assert_eq!(file.0, b"\x05\x02");
    }

    #[test]
    fn name_nodes_of_a_volume_take_the_place_of_others_and_those_of_a_secret_must_be_allowed() {
        let listed = [("source", "hdfs://ns"), ("nameNodes", "a.team.corp,b.team.corp:8020")];
        let secret = name_service("ns", &["c.team.corp:8020", "d.team.corp:8020", "e.team.corp:8020"]);
        let settings = told(&listed, &[("hdfsSite", &secret)]).unwrap().settings;
        assert_eq!(settings["dfs.ha.namenodes.ns"], "nn1,nn2");
        assert_eq!(settings["dfs.namenode.rpc-address.ns.nn1"], "a.team.corp:8020");
        assert_eq!(settings.len(), 3);
        let alone = told(&listed[..1], &[("hdfsSite", &secret)]).unwrap().settings;
        assert_eq!(alone["dfs.namenode.rpc-address.ns.n2"], "e.team.corp:8020");

        // A name service that the operator has described cannot be led elsewhere.
        let other = name_service("prod", &["one.corp:8020", "evil.org:8020"]);
        let keytab = keytab();
        let secrets = [("principal", "alice"), ("keytab", keytab.as_str()), ("hdfsSite", other.as_str())];
        let why = told(&[("source", "hdfs://prod/d"), ("hadoopConfig", "prod")], &secrets).unwrap_err();
        assert!(why.contains("hdfs://evil.org:8020") && why.contains("allow.endpoints"), "{why}");
        let why = told(&[("source", "hdfs://ns"), ("nameNodes", "a.corp")], &[]).unwrap_err();
        assert!(why.contains("hdfs://a.corp:8020"), "{why}");
    }

    #[test]
    fn what_does_not_fit_together_is_said_with_what_to_do() {
        let keytab = keytab();
        let kerberos = [("principal", "alice"), ("keytab", keytab.as_str())];
        let plain = ("source", "hdfs://nn");
        for (parameters, secrets, expected) in [
            (vec![plain, ("hadoopConfig", "test")], vec![], "this node does not have (it has prod, wrong)"),
            (vec![plain, ("hadoopConfig", "wrong")], vec![], "core-site.xml ends in the middle"),
            (vec![plain, ("hadoopConfig", "prod")], vec![], "this HDFS wants Kerberos"),
            (vec![plain, ("hadoopConfig", "prod")], vec![("hdfsUser", "alice")], "this HDFS wants Kerberos"),
            (vec![plain], kerberos.to_vec(), "put krb5Conf into the secret"),
            (
                vec![plain, ("hdfsUser", "bob")],
                [&kerberos[..], &[("krb5Conf", KRB5_CONF)]].concat(),
                "is for an HDFS without Kerberos",
            ),
            (vec![plain, ("hdfsUser", "bob")], vec![("hdfsUser", "alice")], "the secret says another"),
            (
                vec![plain],
                vec![("accessKeyId", "a"), ("secretAccessKey", "b")],
                "has accessKeyId and secretAccessKey",
            ),
        ] {
            let why = told(&parameters, &secrets).unwrap_err();
            assert!(why.contains(expected), "{expected}: {why}");
        }
        let both = told(&[plain, ("hdfsUser", "alice")], &[("hdfsUser", "alice")]).unwrap();
        assert!(matches!(both.identity, Identity::Simple { user } if user == "alice"));
    }
}
