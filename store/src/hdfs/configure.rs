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
    /// machine. Never where clouds keep their metadata, nor at the API server.
    pub networks: Vec<Network>,
    pub ids: super::HadoopIds,
    pub api_server: Option<Network>,
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
        let krb5_conf = files.krb5_conf.as_deref().map(hdfs::cleaned_krb5_conf).transpose();
        Ok(Self { settings, krb5_conf: krb5_conf.map_err(|bad| bad.to_string())? })
    }

    /// The NameNodes of a name service, `host:port` each. None: it is not described here.
    ///
    /// # Errors
    /// A sentence: one has no address, or none that can be one.
    fn name_nodes(&self, authority: &str) -> Result<Option<Vec<String>>, String> {
        let Some(names) = self.settings.get(&format!("{NAMENODES}{authority}")) else { return Ok(None) };
        let address = |name: &str| {
            let key = format!("{RPC_ADDRESS}{authority}.{}", name.trim());
            let address =
                self.settings.get(&key).ok_or_else(|| format!("hdfs-site.xml does not say {key}"))?;
            volume::name_node(address)
                .ok_or_else(|| format!("{key} is {address:?}, and no NameNode's address (host:port)"))
        };
        names
            .split(',')
            .filter(|name| !name.trim().is_empty())
            .map(address)
            .collect::<Result<_, _>>()
            .map(Some)
    }
}

/// What of one volume goes into it; its credentials come with each helper anew.
pub(super) struct Asking {
    authority: String,
    source: SourceUrl,
    parameters: Parameters,
    egress: Egress,
}

/// Addresses that a helper is told.
#[derive(Clone)]
struct Egress {
    refused: Vec<hdfs::Network>,
    own: Vec<hdfs::Network>,
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
        let told = |networks: Vec<Network>| networks.into_iter().map(Into::into).collect();
        let (mut refused, own) = egress.networks();
        refused.extend(node.api_server);
        Some(Self {
            authority: authority.clone(),
            source: spec.source.clone(),
            parameters: spec.parameters.clone(),
            egress: Egress { refused: told(refused), own: told(own), meant: told(node.networks.clone()) },
        })
    }

    /// # Errors
    /// A sentence for whoever wrote the volume, its Secret or the node's configuration.
    pub(super) fn configure(
        &self,
        node: &HdfsNode,
        credentials: &Credentials,
    ) -> Result<Configure, StoreError> {
        self.told(node, credentials).map_err(|why| StoreError::Invalid { what: self.source.to_string(), why })
    }

    fn told(&self, node: &HdfsNode, credentials: &Credentials) -> Result<Configure, String> {
        let operators = self.operators(node)?;
        let secrets = HadoopConfig::of(credentials.hadoop())?;
        let name_nodes = self.name_nodes(node, operators, &secrets)?;
        // What the operator says of a name service is not the Secret's to change: neither where it is nor where its
        // Kerberos is.
        let of_both = |name: &str| {
            let says = |config: &HadoopConfig| config.settings.get(name).cloned();
            operators.and_then(says).or_else(|| says(&secrets))
        };
        let mut settings = Settings::new();
        for name in ["dfs.client.use.datanode.hostname".to_owned(), "dfs.data.transfer.protection".to_owned()]
            .into_iter()
            .chain([format!("dfs.client.failover.proxy.provider.{}", self.authority)])
        {
            settings.extend(of_both(&name).map(|value| (name, value)));
        }
        if let Some(all) = &name_nodes {
            let names: Vec<_> = (1..=all.len()).map(|number| format!("nn{number}")).collect();
            settings.insert(format!("{NAMENODES}{}", self.authority), names.join(","));
            for (name, address) in names.iter().zip(all) {
                settings.insert(format!("{RPC_ADDRESS}{}.{name}", self.authority), address.clone());
            }
        }
        let wants_kerberos = of_both("hadoop.security.authentication").as_deref() == Some("kerberos");
        let krb5_conf = operators.and_then(|config| config.krb5_conf.clone()).or(secrets.krb5_conf);
        let identity = self.identity(wants_kerberos, krb5_conf, credentials)?;
        if let Identity::Tokens { file } = &identity {
            self.is_token_for(file, name_nodes.is_some())?;
        }
        let Egress { refused, own, meant } = self.egress.clone();
        Ok(Configure { authority: self.authority.clone(), settings, identity, refused, own, meant })
    }

    fn operators<'n>(&self, node: &'n HdfsNode) -> Result<Option<&'n HadoopConfig>, String> {
        let Some(name) = &self.parameters.hadoop_config else { return Ok(None) };
        match node.configurations.get(name) {
            Some(Ok(config)) => Ok(Some(config)),
            Some(Err(why)) => Err(format!(
                "configuration {name:?} of Hadoop's cannot be used on this node ({why}): tell the platform team"
            )),
            None => {
                let known: Vec<_> = node.configurations.keys().map(String::as_str).collect();
                let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
                Err(format!(
                    "'hadoopConfig' is {name:?}, which this node does not have (it has {known}): ask the platform team to add it"
                ))
            }
        }
    }

    /// None: the authority is a host.
    fn name_nodes(
        &self,
        node: &HdfsNode,
        operators: Option<&HadoopConfig>,
        secrets: &HadoopConfig,
    ) -> Result<Option<Vec<String>>, String> {
        let authority = &self.authority;
        if let Some(all) = operators.map(|config| config.name_nodes(authority)).transpose()?.flatten() {
            if !self.parameters.name_nodes.is_empty() {
                return Err(format!(
                    "'hadoopConfig' says which NameNodes {authority} has: leave 'nameNodes' out"
                ));
            }
            return Ok(Some(all));
        }
        let listed = match self.parameters.name_nodes.is_empty() {
            false => Some(self.parameters.name_nodes.clone()),
            true => secrets.name_nodes(authority)?,
        };
        for address in listed.iter().flatten() {
            node.allow.name_node(&self.source, address).map_err(|e| e.to_string())?;
        }
        Ok(listed)
    }

    /// The library takes a token for what is asked alone, and says nothing of one that is for something else.
    fn is_token_for(&self, file: &hdfs::Secret, is_name_service: bool) -> Result<(), String> {
        let services = hdfs::services_of_tokens(&file.0).map_err(|bad| bad.to_string())?;
        let wanted = match is_name_service {
            true => format!("ha-hdfs:{}", self.authority),
            false => volume::name_node(&self.authority).unwrap_or_default(),
        };
        match services.contains(&wanted) {
            true => Ok(()),
            false => Err(format!(
                "the secret's delegationToken is for {}, and this source is {wanted}: write the source as hdfs://HOST:PORT/… with \
                 the address that the token names, or fetch one for it",
                services.join(", ")
            )),
        }
    }

    fn identity(
        &self,
        wants_kerberos: bool,
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
            Identity::Simple { .. } if wants_kerberos => Err(
                "this HDFS wants Kerberos (hadoop.security.authentication of its core-site.xml): put principal, keytab and krb5Conf \
                 into the secret"
                    .to_owned(),
            ),
            Identity::Simple { .. } => Ok(identity),
            Identity::Kerberos { .. } | Identity::Tokens { .. } if self.parameters.hdfs_user.is_some() => {
                Err("'hdfsUser' is for an HDFS without Kerberos: leave it out, the secret says who asks"
                    .to_owned())
            }
            Identity::Kerberos { .. } | Identity::Tokens { .. } => Ok(identity),
        }
    }
}

const NAMENODES: &str = "dfs.ha.namenodes.";
const RPC_ADDRESS: &str = "dfs.namenode.rpc-address.";

#[cfg(test)]
mod tests {
    use super::*;
    use ::base64::Engine;
    use ::base64::prelude::BASE64_STANDARD;
    use volume::{TemplateValues, VolumeId};

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
                sources: ["a", "b", "c", "d", "e"]
                    .map(|host| format!("hdfs://{host}.team.corp:8020"))
                    .to_vec(),
                ..AllowList::default()
            },
            configurations: [
                ("prod".to_owned(), HadoopConfig::of(&files)),
                ("wrong".to_owned(), Err("core-site.xml ends in the middle".to_owned())),
            ]
            .into(),
            networks: ["10.1.0.0/16", "10.96.0.0/12", "0.0.0.0/0"].map(|text| text.parse().unwrap()).to_vec(),
            ids: super::super::HadoopIds::default(),
            api_server: Some("10.96.0.1".parse().unwrap()),
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
            within(&simple.refused) || within(&simple.own) && !within(&simple.meant)
        };
        // Whatever the operator means, clouds' metadata and the API server are no HDFS.
        assert!(refused("169.254.169.254") && refused("100.100.100.200") && refused("10.96.0.1"));
        assert!(refused("::1") && refused("224.0.0.1"));
        assert!(
            !refused("10.1.2.3") && !refused("192.168.0.1") && !refused("10.97.0.1") && !refused("127.0.0.1")
        );

        let keytab = keytab();
        let secrets = [("principal", "alice@EXAMPLE.COM"), ("keytab", keytab.as_str())];
        let prod = told(&[("source", "hdfs://prod/d"), ("hadoopConfig", "prod")], &secrets).unwrap();
        assert_eq!(prod.settings["dfs.namenode.rpc-address.prod.nn2"], "two.corp:8020");
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
        assert_eq!(alone["dfs.namenode.rpc-address.ns.nn3"], "e.team.corp:8020");
        // Of other name services in the same file nothing is passed on, and nothing is wrong with them.
        let other = told(&[("source", "hdfs://a.team.corp")], &[("hdfsSite", &secret)]).unwrap();
        assert!(other.settings.is_empty());

        // A name service that the operator has described is not led elsewhere, by whatever a Secret says.
        let keytab = keytab();
        let elsewhere = name_service("prod", &["a.team.corp:8020"]);
        let evil_conf = KRB5_CONF.replace("EXAMPLE.COM", "EVIL.ORG");
        let secrets = [
            ("principal", "alice"),
            ("keytab", keytab.as_str()),
            ("hdfsSite", elsewhere.as_str()),
            ("krb5Conf", evil_conf.as_str()),
        ];
        let prod = [("source", "hdfs://prod/d"), ("hadoopConfig", "prod")];
        let told_of_it = told(&prod, &secrets).unwrap();
        assert_eq!(told_of_it.settings["dfs.namenode.rpc-address.prod.nn1"], "one.corp:8020");
        assert!(
            matches!(told_of_it.identity, Identity::Kerberos { krb5_conf, .. } if krb5_conf == KRB5_CONF)
        );
        let listed_too = [&prod[..], &[("nameNodes", "a.team.corp")]].concat();
        assert!(told(&listed_too, &secrets).unwrap_err().contains("leave 'nameNodes' out"));
        // What is called as something that is allowed is not that.
        for (name_nodes, site) in [
            ("one.corp", None),
            ("a.team.corp,one.corp", None),
            ("", Some(name_service("ns", &["one.corp"]))),
        ] {
            let parameters = [("source", "hdfs://ns"), ("nameNodes", name_nodes)];
            let parameters = if name_nodes.is_empty() { &parameters[..1] } else { &parameters[..] };
            let site = site.unwrap_or_else(|| super::tests::site(&[]));
            let why = told(parameters, &[("hdfsSite", &site)]).unwrap_err();
            assert!(why.contains("hdfs://one.corp:8020/") && why.contains("allow.sources"), "{why}");
        }
        for wrong in ["a.team.corp:8020/.evil.org:9000", "a.team.corp:80:80", "x@a.team.corp", "a b"] {
            let why = told(&listed[..1], &[("hdfsSite", &name_service("ns", &[wrong]))]).unwrap_err();
            assert!(why.contains("no NameNode's address"), "{wrong}: {why}");
        }
        let missing =
            site(&[("dfs.ha.namenodes.ns", "n0,n1"), ("dfs.namenode.rpc-address.ns.n0", "a.team.corp")]);
        let why = told(&listed[..1], &[("hdfsSite", &missing)]).unwrap_err();
        assert!(why.contains("does not say dfs.namenode.rpc-address.ns.n1"), "{why}");
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
