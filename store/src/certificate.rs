//! A client's certificate and its key, as the HTTP client shows them to a store that wants to know who connects; and what
//! such a store says where it does not like them.

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{Error, InconsistentKeys};

/// Of texts in PEM. Err: why not, without anything of what they say.
pub(crate) fn identity(chain: &str, key: &str) -> Result<reqwest::Identity, String> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(chain.as_bytes()).collect();
    let certificates = certificates.ok().filter(|found| !found.is_empty());
    let certificates = certificates
        .ok_or("clientCertificate in the secret is no certificate in PEM: copy it again".to_owned())?;
    let der = PrivateKeyDer::from_pem_slice(key.as_bytes())
        .map_err(|_| "clientKey in the secret is no private key in PEM: copy it again".to_owned())?;
    // The HTTP client would find out as well, in words that do not say which of its parts is wrong.
    CertifiedKey::from_der(certificates, der, &rustls::crypto::ring::default_provider()).map_err(|error| {
        match error {
            Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => {
                "clientKey in the secret is the key of another certificate than the first of clientCertificate: put in the one \
                 that belongs to it, and the client's own certificate before its authority's"
            }
            Error::InvalidCertificate(_) => {
                "clientCertificate in the secret cannot be read: put in a certificate in X.509 version 3, as PEM"
            }
            _ => {
                "clientKey in the secret cannot be used: put in an RSA key of 2048 to 8192 bits, an ECDSA key (P-256, P-384) \
                 or an Ed25519 key"
            }
        }
        .to_owned()
    })?;
    reqwest::Identity::from_pem(format!("{chain}\n{key}").as_bytes()).map_err(|_| {
        "clientCertificate or clientKey in the secret has parts that are neither: take them out".to_owned()
    })
}

const WANTED: &str = "the store wants a client certificate: put one that it accepts into the secret as clientCertificate, and its \
                      key as clientKey";
const REFUSED: &str = "the store refuses clientCertificate in the secret: put in one of an authority that it trusts for clients, with \
                       the certificates between";

/// As the page of nginx says it that asks for a certificate before it passes requests on. None: it says something else.
pub(crate) fn page(body: &[u8]) -> Option<&'static str> {
    let says = |text: &str| body.windows(text.len()).any(|part| part == text.as_bytes());
    if says("No required SSL certificate was sent") {
        return Some(WANTED);
    }
    says("The SSL certificate error").then_some(REFUSED)
}

/// What to do about a store that ended the handshake over a certificate of ours. None: it did so for another reason.
/// `why`: rustls's words, `has_one`: it was shown one.
pub(crate) fn advice(why: &str, has_one: bool) -> Option<&'static str> {
    // An alert's name, of those that speak of a certificate that was received, or of none (RFC 8446, section 6.2).
    let alert = why.split("received fatal alert: ").nth(1)?;
    let alert = alert.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    match (alert, has_one) {
        ("CertificateRequired", _) | ("BadCertificate", false) => Some(WANTED),
        // Before TLS 1.3 no alert said that one is wanted.
        ("HandshakeFailure", false) => Some(
            "if the store wants a client certificate, put one into the secret as clientCertificate, and its key as clientKey; if not, \
             it has no cipher in common with this node",
        ),
        ("CertificateExpired", true) => {
            Some("clientCertificate in the secret has expired: renew it and its key")
        }
        ("CertificateRevoked", true) => {
            Some("clientCertificate in the secret was revoked: put in another and its key")
        }
        (
            "BadCertificate"
            | "UnsupportedCertificate"
            | "CertificateUnknown"
            | "UnknownCA"
            | "AccessDenied"
            | "DecryptError"
            | "HandshakeFailure",
            true,
        ) => Some(REFUSED),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::tls::Authority;

    #[test]
    fn a_certificate_and_a_key_that_are_no_pair_are_refused_with_what_is_wrong() {
        let authority = Authority::create().unwrap();
        let (one, other) = (authority.issue("one").unwrap(), authority.issue("other").unwrap());
        identity(&one.certificate, &one.key).unwrap();
        let chain = format!("{}{}", one.certificate, authority.pem);
        identity(&chain, &one.key).unwrap();
        let misplaced = format!("{}{}", authority.pem, one.certificate);
        let broken = |kind: &str| format!("-----BEGIN {kind}-----\n(hunter2)\n-----END {kind}-----\n");
        let empty = |kind: &str| format!("-----BEGIN {kind}-----\naGk=\n-----END {kind}-----\n");
        for (chain, key, words) in [
            (
                one.certificate.clone(),
                other.key.clone(),
                "clientKey in the secret is the key of another certificate",
            ),
            (misplaced, one.key.clone(), "before its authority's"),
            (broken("CERTIFICATE"), one.key.clone(), "clientCertificate in the secret is no certificate"),
            (empty("CERTIFICATE"), one.key.clone(), "clientCertificate in the secret cannot be read"),
            (one.certificate.clone(), broken("PRIVATE KEY"), "clientKey in the secret is no private key"),
            (one.certificate.clone(), empty("PRIVATE KEY"), "clientKey in the secret cannot be used"),
            (one.certificate.clone(), one.certificate.clone(), "clientKey in the secret is no private key"),
            (
                one.certificate.clone(),
                format!("{}{}", broken("X509 CRL").replace("(hunter2)", "aGk="), one.key),
                "take them out",
            ),
        ] {
            let why = identity(&chain, &key).err().unwrap_or_else(|| panic!("not refused: {words}"));
            assert!(why.contains(words) && !why.contains("hunter2"), "{words}: {why}");
        }
    }

    #[test]
    fn alerts_about_certificates_say_what_to_do_and_others_nothing() {
        let of = |alert: &str, has_one| {
            advice(&format!("connection error: received fatal alert: {alert}"), has_one)
        };
        for (alert, has_one, words) in [
            ("CertificateRequired", false, "wants a client certificate"),
            ("BadCertificate", false, "wants a client certificate"),
            ("HandshakeFailure", false, "if the store wants"),
            ("HandshakeFailure", true, "refuses clientCertificate"),
            ("UnknownCA", true, "refuses clientCertificate"),
            ("CertificateExpired", true, "has expired"),
            ("CertificateRevoked", true, "was revoked"),
        ] {
            assert!(of(alert, has_one).unwrap().contains(words), "{alert}");
        }
        for (alert, has_one) in [("UnknownCA", false), ("ProtocolVersion", true), ("InternalError", true)] {
            assert_eq!(of(alert, has_one), None, "{alert}");
        }
        assert_eq!(advice("invalid peer certificate: UnknownIssuer", true), None);
    }
}
