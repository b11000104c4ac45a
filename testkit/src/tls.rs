//! TLS in front of a server that has none: an authority made on the spot, and a relay that speaks with its certificate.

use anyhow::{Context, Result};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Runtime;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::{ALL_VERSIONS, RootCertStore, ServerConfig, SupportedProtocolVersion, version};

/// Signs one certificate for 127.0.0.1 and [`NAME`], and those of clients.
pub struct Authority {
    /// Its own certificate, for those who shall trust it.
    pub pem: String,
    own: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
    server: CertificateDer<'static>,
    key_of_server: KeyPair,
}

/// A name that no resolver knows.
pub const NAME: &str = "store.testkit.test";

/// A client's certificate and its key, PEM.
pub struct Issued {
    pub certificate: String,
    pub key: String,
}

impl Authority {
    pub fn create() -> Result<Self> {
        let key = KeyPair::generate()?;
        let mut of_authority = CertificateParams::default();
        of_authority.distinguished_name.push(DnType::CommonName, "Millpond tests");
        of_authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        of_authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let own = of_authority.self_signed(&key)?;
        let issuer = Issuer::new(of_authority, key);
        let key_of_server = KeyPair::generate()?;
        let server = CertificateParams::new(vec!["127.0.0.1".to_owned(), NAME.to_owned()])?
            .signed_by(&key_of_server, &issuer)?;
        let (own, server) = ((own.pem(), own.der().clone()), server.der().clone());
        Ok(Self { pem: own.0, own: own.1, issuer, server, key_of_server })
    }

    /// A certificate for a client of this name.
    pub fn issue(&self, name: &str) -> Result<Issued> {
        let key = KeyPair::generate()?;
        let mut of_client = CertificateParams::default();
        of_client.distinguished_name.push(DnType::CommonName, name);
        of_client.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let certificate = of_client.signed_by(&key, &self.issuer)?;
        Ok(Issued { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// `clients`: who signs the certificates of those that may connect; None: anybody may.
    fn server(
        &self,
        clients: Option<&Self>,
        versions: &[&'static SupportedProtocolVersion],
    ) -> Result<ServerConfig> {
        let provider = Arc::new(ring::default_provider());
        let builder =
            ServerConfig::builder_with_provider(provider.clone()).with_protocol_versions(versions)?;
        let builder = match clients {
            None => builder.with_no_client_auth(),
            Some(authority) => {
                let mut roots = RootCertStore::empty();
                roots.add(authority.own.clone())?;
                let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
                builder.with_client_cert_verifier(verifier.build()?)
            }
        };
        let chain = vec![self.server.clone(), self.own.clone()];
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(self.key_of_server.serialize_der()));
        Ok(builder.with_single_cert(chain, key)?)
    }
}

/// Takes TLS connections and passes them on in the clear; ends when it is dropped.
pub struct Front {
    pub address: SocketAddr,
    runtime: Option<Runtime>,
}

impl Front {
    /// `to`: host and port.
    pub fn start(authority: &Authority, to: &str) -> Result<Self> {
        Self::serve(authority.server(None, ALL_VERSIONS)?, to)
    }

    /// Takes only those that show a certificate that `clients` has signed.
    pub fn demanding(authority: &Authority, clients: &Authority, to: &str) -> Result<Self> {
        Self::serve(authority.server(Some(clients), ALL_VERSIONS)?, to)
    }

    /// Speaks TLS 1.2 and nothing later.
    pub fn old(authority: &Authority, to: &str) -> Result<Self> {
        Self::serve(authority.server(None, &[&version::TLS12])?, to)
    }

    fn serve(config: ServerConfig, to: &str) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        // Without waiting: the caller may be a runtime's own.
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0)).context("listen")?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let within = runtime.enter();
        let listener = TcpListener::from_std(listener)?;
        drop(within);
        let (acceptor, to) = (TlsAcceptor::from(Arc::new(config)), to.to_owned());
        runtime.spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((client, _)) => drop(tokio::spawn(relay(acceptor.clone(), client, to.clone()))),
                    // Out of descriptors, or the client has gone: the next one may do better.
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                }
            }
        });
        Ok(Self { address, runtime: Some(runtime) })
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

const BUFFER_BYTES: usize = 256 << 10;

/// Errors are for the two ends: they see their connection close.
async fn relay(acceptor: TlsAcceptor, client: TcpStream, to: String) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    let mut client = match acceptor.accept(client).into_fallible().await {
        Ok(client) => client,
        Err((error, mut client)) => {
            // It hears why: were it closed with something unread in it, its own end would lose the alert.
            client.shutdown().await?;
            tokio::io::copy(&mut client, &mut tokio::io::sink()).await?;
            return Err(error);
        }
    };
    let mut server = TcpStream::connect(to).await?;
    server.set_nodelay(true)?;
    tokio::io::copy_bidirectional_with_sizes(&mut client, &mut server, BUFFER_BYTES, BUFFER_BYTES).await?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::ClientConfig;
    use tokio_rustls::rustls::pki_types::ServerName;
    use tokio_rustls::rustls::pki_types::pem::PemObject;

    async fn echo(trusts: &Authority, to: SocketAddr) -> std::io::Result<String> {
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(trusts.pem.as_bytes()).unwrap()).unwrap();
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let stream = TcpStream::connect(to).await?;
        let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
        stream.write_all(b"pond").await?;
        let mut back = [0; 4];
        stream.read_exact(&mut back).await?;
        Ok(String::from_utf8_lossy(&back).into_owned())
    }

    #[test]
    fn the_front_passes_on_what_those_say_who_trust_its_authority() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let to = server.local_addr().unwrap().to_string();
        std::thread::spawn(move || {
            use std::io::{Read, Write};
            let mut stream = server.accept().unwrap().0;
            let mut said = [0; 4];
            stream.read_exact(&mut said).unwrap();
            stream.write_all(&said).unwrap();
        });
        let authority = Authority::create().unwrap();
        let front = Front::start(&authority, &to).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let other = Authority::create().unwrap();
        let refused = runtime.block_on(echo(&other, front.address)).unwrap_err();
        assert!(refused.to_string().contains("invalid peer certificate"), "{refused}");
        assert_eq!(runtime.block_on(echo(&authority, front.address)).unwrap(), "pond");
    }
}
