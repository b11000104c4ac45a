//! One HDFS as one user: the client, another one in the place of one that hangs, and a limit for each question.

use crate::failure::{failure, of};
use crate::secrets::Kept;
use hdfs::{Configure, Failure, FailureKind, Identity};
use hdfs_native::{Client, ClientBuilder};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// Where a NameNode listens if nobody says otherwise.
const NAMENODE_PORT: u16 = 8020;
/// Of a DataNode: another one has the block, too. Less than a question waits (`store.stall_timeout`), so that there is time
/// for that one.
const DATANODE_SILENCE: Duration = Duration::from_secs(5);

pub(crate) struct FileSystem {
    url: String,
    settings: HashMap<String, String>,
    login: Login,
    current: Mutex<Current>,
}

enum Login {
    Simple {
        user: String,
    },
    /// The library finds them by the environment, and takes whatever name is told it for that of a token's owner.
    Tokens,
    Kerberos {
        principal: String,
        keytab: Option<String>,
        ticket_cache: Option<String>,
    },
}

struct Current {
    generation: u64,
    client: Arc<Client>,
}

/// One question's client. Should it hang, the next question gets another one.
#[derive(Clone)]
pub(crate) struct Lent {
    pub(crate) generation: u64,
    pub(crate) client: Arc<Client>,
}

impl FileSystem {
    pub(crate) fn open(configure: Configure, kept: &Kept) -> Result<Arc<Self>, Failure> {
        let Configure { authority, settings, identity, .. } = configure;
        let known = settings.into_iter().filter(|(name, _)| hdfs::is_setting(name));
        let mut settings: HashMap<_, _> = known.collect();
        let namenodes = settings.get(&format!("dfs.ha.namenodes.{authority}"));
        let namenodes = namenodes.map(|list| list.split(',').count());
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let url = match namenodes.is_some() || has_port {
            true => format!("hdfs://{authority}"),
            false => format!("hdfs://{authority}:{NAMENODE_PORT}"),
        };
        let mut set = |name: &str, value: String| settings.insert(name.to_owned(), value);
        // Attempts are counted, spaced out and reported by the caller: each NameNode once is one attempt.
        set("dfs.client.failover.max.attempts", namenodes.unwrap_or(1).saturating_sub(1).to_string());
        set("dfs.client.failover.sleep.base.millis", "50".into());
        set("dfs.client.failover.sleep.max.millis", "100".into());
        set("dfs.client.socket-timeout", DATANODE_SILENCE.as_millis().to_string());
        let login = match identity {
            Identity::Simple { user } => Login::Simple { user },
            Identity::Tokens { .. } => {
                set("hadoop.security.authentication", "kerberos".into());
                Login::Tokens
            }
            Identity::Kerberos { principal, .. } => {
                set("hadoop.security.authentication", "kerberos".into());
                let (keytab, ticket_cache) = (kept.keytab.clone(), kept.ticket_cache.clone());
                Login::Kerberos { principal, keytab, ticket_cache }
            }
        };
        if matches!(login, Login::Kerberos { .. } | Login::Tokens)
            && !settings.contains_key("dfs.data.transfer.protection")
        {
            crate::failure::note_unprotected();
        }
        let client = Arc::new(connect(&url, &settings, &login)?);
        let current = Mutex::new(Current { generation: 0, client });
        Ok(Arc::new(Self { url, settings, login, current }))
    }

    pub(crate) fn lend(&self) -> Lent {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        Lent { generation: current.generation, client: current.client.clone() }
    }

    /// This client did not answer. A connection that died without a word, or a NameNode that hangs, would take every
    /// question after this one, too: the library waits for its answer without a limit. So the next client is a new one,
    /// and asks the next NameNode first.
    pub(crate) fn doubt(&self, generation: u64) {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.generation != generation {
            return;
        }
        let mut settings = self.settings.clone();
        for (_, list) in settings.iter_mut().filter(|(name, _)| name.starts_with("dfs.ha.namenodes.")) {
            *list = rotated(list, generation + 1);
        }
        // It was possible once. Should it not be now, the one that hangs is tried again.
        if let Ok(client) = connect(&self.url, &settings, &self.login) {
            *current = Current { generation: generation + 1, client: Arc::new(client) };
        }
    }
}

fn rotated(list: &str, by: u64) -> String {
    let mut names: Vec<&str> = list.split(',').collect();
    let by = by as usize % names.len(); // split gives at least one
    names.rotate_left(by);
    names.join(",")
}

fn connect(url: &str, settings: &HashMap<String, String>, login: &Login) -> Result<Client, Failure> {
    let builder = ClientBuilder::new().with_url(url).with_config(settings.clone());
    let builder = match login {
        Login::Simple { user } => builder.with_user(user),
        Login::Tokens => builder,
        Login::Kerberos { principal, keytab, ticket_cache } => {
            let mut builder = builder.with_kerberos_principal(principal);
            if let Some(keytab) = keytab {
                builder = builder.with_kerberos_keytab(keytab);
            }
            if let Some(cache) = ticket_cache {
                builder = builder.with_kerberos_cache(cache);
            }
            builder
        }
    };
    builder.build().map_err(|e| of(&e))
}

/// Runs library code where it can panic, and block its thread, without harm to who waits for it.
pub(crate) async fn apart<T: Send + 'static>(
    patience: Duration,
    work: impl Future<Output = T> + Send + 'static,
) -> Result<T, Failure> {
    let mut running = Aborted(tokio::spawn(work));
    match tokio::time::timeout(patience, &mut running.0).await {
        Ok(Ok(done)) => Ok(done),
        Ok(Err(_)) => Err(failure(FailureKind::Panicked, "the HDFS library failed at this answer (a panic)")),
        Err(_) => Err(failure(
            FailureKind::Silent,
            format!("HDFS sent nothing for {:.1} s", patience.as_secs_f64()),
        )),
    }
}

/// A task that ends with whoever waits for it.
struct Aborted<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for Aborted<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_namenode_comes_first_in_turn() {
        assert_eq!(rotated("a,b,c", 1), "b,c,a");
        assert_eq!(rotated("a,b,c", 3), "a,b,c");
        assert_eq!(rotated("a", 7), "a");
        assert_eq!(rotated("", 1), "");
    }

    #[tokio::test]
    async fn a_panic_and_silence_are_answers() {
        let second = Duration::from_secs(60);
        assert_eq!(apart(second, async { 7 }).await, Ok(7));
        let panicked = apart(second, async { panic!("of a test") });
        assert_eq!(panicked.await.map(|(): ()| ()).unwrap_err().kind, FailureKind::Panicked);
        let silent = apart(Duration::from_millis(10), std::future::pending::<()>()).await;
        assert_eq!(silent.unwrap_err().kind, FailureKind::Silent);
    }
}
