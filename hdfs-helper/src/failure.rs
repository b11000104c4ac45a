//! What the library's errors mean to the one who asked. Exceptions are named by their Java classes, as HDFS sends them.

use hdfs::{Failure, FailureKind, words};
use hdfs_native::HdfsError;
use std::io::ErrorKind;
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};

pub(crate) fn failure(kind: FailureKind, why: impl AsRef<str>) -> Failure {
    Failure { kind, why: words(why.as_ref()) }
}

pub(crate) fn of(error: &HdfsError) -> Failure {
    use FailureKind::*;
    let said = error.to_string();
    match error {
        HdfsError::FileNotFound(_) => failure(NotFound, "it does not exist"),
        HdfsError::IOError(error) if error.kind() == ErrorKind::PermissionDenied => {
            match crate::egress::last_refused() {
                Some(address) => failure(Invalid, refused(address)),
                // The kernel's own word, of a network.
                None => failure(Unreachable, error.to_string()),
            }
        }
        // The library keeps to itself what a NameNode says before it hangs up.
        HdfsError::IOError(error) if error.kind() == ErrorKind::ConnectionAborted => failure(
            Broken,
            "the NameNode ended the connection; so it does where it wants Kerberos and this volume has no principal",
        ),
        HdfsError::IOError(error) => failure(of_io(error.kind()), error.to_string()),
        HdfsError::RPCError(class, text) | HdfsError::FatalRPCError(class, text) => of_exception(class, text),
        HdfsError::GSSAPIError(_, _, text) | HdfsError::SASLError(text) => of_kerberos(text),
        HdfsError::NoSASLMechanism => failure(
            Denied,
            "HDFS offers no way to log in that this volume has credentials for: does it want Kerberos?",
        ),
        HdfsError::DataTransferError(_) | HdfsError::BlocksNotFound(_) | HdfsError::ChecksumError => {
            // It lists every DataNode with all that is known of it.
            let why = if said.contains("All DataNodes failed") {
                "no DataNode that has the block gave it"
            } else {
                said.as_str()
            };
            // Others may be away for a moment, and this one for ever: it is tried again, and the reason stands there.
            match crate::egress::last_refused() {
                Some(address) => failure(Broken, format!("{why}; {}", refused(address))),
                None if UNPROTECTED.load(Ordering::Relaxed) => {
                    let advice = "where HDFS protects what it transfers, its hdfs-site.xml (dfs.data.transfer.protection) is needed in the \
                                  secret, or in a hadoopConfig";
                    failure(Broken, format!("{why}; {advice}"))
                }
                None => failure(Broken, why),
            }
        }
        HdfsError::ErasureCodingError(_) => failure(Broken, said),
        HdfsError::InvalidRPCResponse(_) | HdfsError::InternalError(_) => failure(Malformed, said),
        HdfsError::UnsupportedErasureCodingPolicy(_) | HdfsError::UnsupportedFeature(_) => {
            failure(Invalid, said)
        }
        HdfsError::InvalidArgument(why) if why.contains("No NameNode") => {
            failure(Invalid, "the name service has no NameNodes: set dfs.ha.namenodes.… and dfs.namenode.rpc-address.…")
        }
        HdfsError::InvalidPath(_)
        | HdfsError::InvalidArgument(_)
        | HdfsError::UrlParseError(_)
        | HdfsError::XmlParseError(_)
        // Of writes, of which there are none.
        | HdfsError::AlreadyExists(_)
        | HdfsError::IsADirectoryError(_)
        | HdfsError::TrashNotEnabled => failure(Invalid, said),
        HdfsError::OperationFailed(_) => failure(Broken, said),
    }
}

/// Logged in, and not told how data is protected: a DataNode that wants it protected hangs up without a word.
static UNPROTECTED: AtomicBool = AtomicBool::new(false);

pub(crate) fn note_unprotected() {
    UNPROTECTED.store(true, Ordering::Relaxed);
}

fn refused(address: IpAddr) -> String {
    format!(
        "{address}, which a NameNode, DataNode or KDC has, is an address where this node's agent lets no store be asked: ask the \
         platform team to name its network in hdfs.networks"
    )
}

fn of_io(kind: ErrorKind) -> FailureKind {
    match kind {
        ErrorKind::ConnectionRefused
        | ErrorKind::HostUnreachable
        | ErrorKind::NetworkUnreachable
        | ErrorKind::AddrNotAvailable
        | ErrorKind::NotFound
        // A name that has no address comes without a kind of its own.
        | ErrorKind::Other => FailureKind::Unreachable,
        ErrorKind::TimedOut => FailureKind::Silent,
        _ => FailureKind::Broken,
    }
}

fn of_exception(class: &str, text: &str) -> Failure {
    use FailureKind::*;
    let short = class.rsplit(['.', '$']).next().unwrap_or(class);
    let kind = match short {
        "FileNotFoundException" | "ParentNotDirectoryException" | "PathIsNotDirectoryException" => NotFound,
        // Of a path that goes on below a file; a NameNode says it so.
        "AccessControlException" if text.contains("(is not a directory)") => NotFound,
        "AccessControlException" | "AuthorizationException" | "UnresolvedPathException" => Denied,
        "InvalidToken" => Expired,
        "SaslException" | "GSSException" => return of_kerberos(text),
        "StandbyException"
        | "SafeModeException"
        | "RetriableException"
        | "RetryStartFileException"
        | "ObserverRetryOnActiveException"
        | "ServerException"
        | "NoNamenodesAvailableException"
        | "SubClusterUnavailableException" => Refused,
        "RpcNoSuchMethodException" | "RpcNoSuchProtocolException" | "VersionMismatch" => Invalid,
        "InvalidPathException" => NotFound,
        _ => Refused,
    };
    let text = words(text);
    match text.is_empty() {
        true => failure(kind, class),
        // It says which exception it is by itself, or does not.
        false if text.contains(short) => failure(kind, text),
        false => failure(kind, format!("{text} ({short})")),
    }
}

/// Kerberos says with the same error that a password is wrong and that nobody could be asked.
fn of_kerberos(said: &str) -> Failure {
    let lower = said.to_ascii_lowercase();
    let has = |words: &[&str]| words.iter().any(|word| lower.contains(word));
    let (kind, advice) = if has(&["cannot contact any kdc", "cannot resolve", "unable to reach any kdc"]) {
        (FailureKind::Unreachable, "no KDC answers: check krb5.conf, and the network of this node")
    } else if has(&["clock skew"]) {
        (FailureKind::Denied, "the clocks of this node and of the KDC differ: set them by NTP")
    } else if has(&["expired"]) {
        (FailureKind::Expired, "the tickets are over: renew the ticket cache in the Secret")
    } else if has(&[
        "preauthentication failed",
        "integrity check failed",
        "keytab contains no suitable",
        "key table entry not found",
    ]) {
        (FailureKind::Denied, "the KDC does not take this keytab for this principal: export it again")
    } else if has(&["not found in kerberos database"]) {
        (FailureKind::Denied, "the KDC does not know this principal, or not the one of HDFS's servers")
    } else if has(&["no credentials", "no kerberos credentials", "no_cred", "can't find client principal"]) {
        (FailureKind::Denied, "the ticket cache or keytab has nothing for this principal")
    } else {
        (FailureKind::Denied, "")
    };
    match advice {
        "" => failure(kind, said),
        advice => failure(kind, format!("{advice} ({})", words(said))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rpc(class: &str, text: &str) -> Failure {
        of(&HdfsError::RPCError(class.into(), text.into()))
    }

    #[test]
    fn exceptions_are_told_by_their_class() {
        for (class, kind) in [
            ("java.io.FileNotFoundException", FailureKind::NotFound),
            ("org.apache.hadoop.security.AccessControlException", FailureKind::Denied),
            ("org.apache.hadoop.ipc.StandbyException", FailureKind::Refused),
            ("org.apache.hadoop.hdfs.server.namenode.SafeModeException", FailureKind::Refused),
            ("org.apache.hadoop.security.token.SecretManager$InvalidToken", FailureKind::Expired),
            ("org.example.NobodyKnows", FailureKind::Refused),
        ] {
            assert_eq!(rpc(class, "x").kind, kind, "{class}");
        }
        let below = rpc("a.AccessControlException", "/a/file (is not a directory)");
        assert_eq!(below.kind, FailureKind::NotFound);
    }

    #[test]
    fn no_stack_trace_and_no_list_of_servers_is_shown() {
        let said = rpc(
            "a.AccessControlException",
            "Permission denied: user=x\n\tat java.lang.Thread.run(Thread.java:1)",
        );
        assert_eq!(said.why, "Permission denied: user=x (AccessControlException)");
        let all = format!("All DataNodes failed: [{}]", "DatanodeInfoProto { id: … }".repeat(100));
        assert_eq!(of(&HdfsError::DataTransferError(all)).why, "no DataNode that has the block gave it");
    }

    #[test]
    fn a_kdc_that_is_away_is_not_a_wrong_password() {
        let kind = |said: &str| of(&HdfsError::SASLError(said.into())).kind;
        assert_eq!(kind("Cannot contact any KDC for realm 'A'"), FailureKind::Unreachable);
        // The general words come with the cause behind them.
        let why =
            of(&HdfsError::SASLError("No credentials were supplied: Decrypt integrity check failed".into()))
                .why;
        assert!(why.contains("export it again"), "{why}");
        assert_eq!(kind("Preauthentication failed"), FailureKind::Denied);
        assert_eq!(kind("Ticket expired"), FailureKind::Expired);
        assert_eq!(kind("whatever"), FailureKind::Denied);
    }

    #[test]
    fn who_is_not_there_is_told_from_who_hangs_up() {
        let io = |kind: ErrorKind| of(&HdfsError::IOError(kind.into())).kind;
        assert_eq!(io(ErrorKind::ConnectionRefused), FailureKind::Unreachable);
        assert_eq!(io(ErrorKind::TimedOut), FailureKind::Silent);
        assert_eq!(io(ErrorKind::ConnectionReset), FailureKind::Broken);
        assert_eq!(io(ErrorKind::UnexpectedEof), FailureKind::Broken);
    }
}
