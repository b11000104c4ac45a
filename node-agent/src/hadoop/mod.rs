//! What this node has for volumes on HDFS: helper processes, and the configurations of Hadoop's that its operator put
//! there.

mod helpers;

use crate::config::Config;
use crate::privileged::Privileged;
pub(crate) use helpers::HelperSpawner;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use store::{HadoopConfig, HadoopIds, HdfsNode};
use volume::HadoopFiles;

/// What is read of one file: more than any is long.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Starts no helper yet: nodes without a volume on HDFS have none.
pub(crate) fn node(
    config: &Config,
    privileged: Arc<dyn Privileged>,
) -> io::Result<(HelperSpawner, Arc<HdfsNode>)> {
    let helpers = HelperSpawner::new(&config.hdfs, privileged, tokio::runtime::Handle::current())?;
    let configurations = match &config.hdfs.configurations {
        Some(dir) => configurations(dir),
        None => BTreeMap::new(),
    };
    for (name, config) in &configurations {
        if let Err(why) = config {
            tracing::error!(name, why, "a configuration of Hadoop's cannot be used");
        }
    }
    let node = HdfsNode {
        helpers: Arc::new(helpers.clone()),
        allow: config.allow.clone(),
        configurations,
        networks: config.hdfs.networks.clone(),
        ids: HadoopIds { users: config.hdfs.users.clone(), groups: config.hdfs.groups.clone() },
        api_server: config.store.api_server,
    };
    Ok((helpers, Arc::new(node)))
}

/// Each directory in `dir` is one, under its name: a ConfigMap or Secret that is mounted there.
fn configurations(dir: &Path) -> BTreeMap<String, Result<HadoopConfig, String>> {
    let entries = match std::fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) => {
            tracing::error!(dir = %dir.display(), %error, "the configurations of Hadoop's (hdfs.configurations) cannot be read");
            return BTreeMap::new();
        }
    };
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    // A mounted ConfigMap's own entries begin with dots.
    let names = names.filter(|name| !name.starts_with('.') && dir.join(name).is_dir());
    names.map(|name| (name.clone(), configuration(&dir.join(&name)))).collect()
}

fn configuration(dir: &Path) -> Result<HadoopConfig, String> {
    let read = |name: &str| {
        let path = dir.join(name);
        match std::fs::metadata(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Ok(found) if found.len() > FILE_BYTES_MAX => {
                Err(format!("{} is longer than 1 MiB", path.display()))
            }
            _ => std::fs::read_to_string(&path).map(Some).map_err(|e| format!("{}: {e}", path.display())),
        }
    };
    let files = HadoopFiles {
        core_site: read("core-site.xml")?,
        hdfs_site: read("hdfs-site.xml")?,
        krb5_conf: read("krb5.conf")?,
    };
    if files == HadoopFiles::default() {
        return Err(format!("{} has none of core-site.xml, hdfs-site.xml and krb5.conf", dir.display()));
    }
    HadoopConfig::of(&files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_directory_is_a_configuration_or_says_why_it_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        put("prod/hdfs-site.xml", "<configuration/>");
        put("wrong/core-site.xml", "<html/>");
        put("krb/krb5.conf", "include /etc/passwd\n");
        put("empty/readme", "");
        put("..data/core-site.xml", "<html/>");
        put("file", "");
        let all = configurations(dir.path());
        let of = |name: &str| all[name].as_ref().unwrap_err().as_str();
        assert_eq!(all.len(), 4, "{all:?}");
        assert_eq!(all["prod"], Ok(HadoopConfig::default()));
        assert!(of("wrong").contains("core-site.xml is not one of Hadoop's"), "{}", of("wrong"));
        assert!(of("krb").contains("line 1 of krb5.conf"), "{}", of("krb"));
        assert!(of("empty").contains("none of core-site.xml"), "{}", of("empty"));
        assert!(configurations(&dir.path().join("nowhere")).is_empty());
    }
}
