//! What the user's Secret holds, where Kerberos' library finds it and nobody else does: in memory files without a name.

use hdfs::{Identity, Secret};
use rustix::fs::MemfdFlags;
use std::os::fd::{AsRawFd, OwnedFd};

/// Keeps the files open as long as this process runs.
#[derive(Default)]
pub(crate) struct Kept {
    files: Vec<OwnedFd>,
    pub(crate) keytab: Option<String>,
    pub(crate) ticket_cache: Option<String>,
}

impl Kept {
    fn file(&mut self, name: &str, content: &[u8]) -> Result<String, String> {
        let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC).map_err(|e| format!("memfd: {e}"))?;
        let mut rest = content;
        while !rest.is_empty() {
            let written = rustix::io::write(&file, rest).map_err(|e| format!("memfd: {e}"))?;
            rest = &rest[written..];
        }
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        self.files.push(file);
        Ok(path)
    }
}

/// Before any other thread: it sets the environment that the library reads.
///
/// # Errors
/// A sentence for whoever wrote the Secret.
pub(crate) fn keep(identity: &Identity) -> Result<Kept, String> {
    let mut kept = Kept::default();
    let (krb5_conf, keytab, ticket_cache) = match identity {
        Identity::Simple { .. } => return Ok(kept),
        Identity::Tokens { file: Secret(content) } => {
            hdfs::services_of_tokens(content).map_err(|bad| format!("delegationToken: {bad}"))?;
            let path = kept.file("tokens", content)?;
            for (name, value) in [
                ("HADOOP_TOKEN_FILE_LOCATION", path.as_str()),
                // The library looks for tickets, too: there are none.
                ("KRB5_CONFIG", "/dev/null"),
                ("KRB5CCNAME", "MEMORY:none"),
            ] {
                // SAFETY: before any other thread.
                unsafe { std::env::set_var(name, value) };
            }
            return Ok(kept);
        }
        Identity::Kerberos { krb5_conf, keytab, ticket_cache, .. } => (krb5_conf, keytab, ticket_cache),
    };
    // The caller has checked it, too. Here is where it would do harm.
    let krb5_conf = hdfs::cleaned_krb5_conf(krb5_conf).map_err(|bad| bad.to_string())?;
    let config = kept.file("krb5.conf", krb5_conf.as_bytes())?;
    let mut put = |name, secret: &Option<Secret>| {
        secret.as_ref().map(|Secret(content)| kept.file(name, content)).transpose()
    };
    let keytab = put("keytab", keytab)?.map(|path| format!("FILE:{path}"));
    let ticket_cache = put("ticket-cache", ticket_cache)?.map(|path| format!("FILE:{path}"));
    let environment = [
        ("KRB5_CONFIG", Some(config.as_str())),
        // What is not given is nowhere: the library's defaults are files of the node's.
        ("KRB5_KTNAME", Some(keytab.as_deref().unwrap_or("MEMORY:none"))),
        ("KRB5_CLIENT_KTNAME", Some(keytab.as_deref().unwrap_or("MEMORY:none"))),
        ("KRB5CCNAME", Some(ticket_cache.as_deref().unwrap_or("MEMORY:none"))),
        ("KRB5RCACHENAME", Some("none:")),
    ];
    for (name, value) in environment.into_iter().filter_map(|(name, value)| Some((name, value?))) {
        // SAFETY: before any other thread.
        unsafe { std::env::set_var(name, value) };
    }
    Ok(Kept { keytab, ticket_cache, ..kept })
}
