//! Whom an end that connects trusts, and what it says of the others.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{WebPkiServerVerifier, verify_server_name};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{ParsedCertificate, VerifierBuilderError};
use rustls::{
    AlertDescription, CertificateError, DigitallySignedStruct, DistinguishedName, Error,
    RootCertStore, SignatureScheme,
};

use super::CertificateRole;

/// Both verifiers leave signatures to the ordinary one.
macro_rules! as_ordinary {
    () => {
        fn verify_tls12_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.ordinary
                .verify_tls12_signature(message, certificate, signature)
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            self.ordinary
                .verify_tls13_signature(message, certificate, signature)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.ordinary.supported_verify_schemes()
        }
    };
}

/// Checks a certificate as browsers do, and that its owner is of the right part.
#[derive(Debug)]
pub(super) struct OfPart {
    ordinary: Arc<WebPkiServerVerifier>,
    /// Any of these.
    parts: &'static [CertificateRole],
    /// Whether it must be for the host as well: the user knows the host, and of others the trainer
    /// has told.
    by_host: bool,
}

impl OfPart {
    pub(super) fn new(
        roots: Arc<RootCertStore>,
        provider: Arc<CryptoProvider>,
        (parts, by_host): (&'static [CertificateRole], bool),
    ) -> Result<Self, VerifierBuilderError> {
        let ordinary = WebPkiServerVerifier::builder_with_provider(roots, provider).build()?;
        Ok(Self {
            ordinary,
            parts,
            by_host,
        })
    }
}

impl ServerCertVerifier for OfPart {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        host: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let mut verified = Err(Error::General("no part is expected here".into()));
        // The last part that is tried is the one that an error names.
        for part in self.parts.iter().rev() {
            let name = ServerName::try_from(part.name())
                .map_err(|_| Error::General("a part's name is a name".into()))?;
            // The ordinary check, with the name of a part in place of a host's.
            verified = self
                .ordinary
                .verify_server_cert(certificate, between, &name, ocsp, now);
            if verified.is_ok() {
                break;
            }
        }
        let verified = verified?;
        // The chain and the part were checked above, with the part in place of the host's name.
        if self.by_host {
            verify_server_name(&ParsedCertificate::try_from(certificate)?, host)?;
        }
        Ok(verified)
    }

    as_ordinary!();
}

/// Checks of those who connect that they are of the right part.
#[derive(Debug)]
pub(super) struct FromPart {
    ordinary: Arc<dyn ClientCertVerifier>,
    part: CertificateRole,
}

impl FromPart {
    pub(super) fn new(ordinary: Arc<dyn ClientCertVerifier>, part: CertificateRole) -> Self {
        Self { ordinary, part }
    }
}

impl ClientCertVerifier for FromPart {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.ordinary.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        between: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        // The chain first: a name means nothing in a certificate that nobody signed.
        let verified = self
            .ordinary
            .verify_client_cert(certificate, between, now)?;
        let name = ServerName::try_from(self.part.name())
            .map_err(|_| Error::General("a part's name is a name".into()))?;
        verify_server_name(&ParsedCertificate::try_from(certificate)?, &name)?;
        Ok(verified)
    }

    as_ordinary!();
}

/// What the owner of a certificate is, if the certificate says it.
pub(super) fn part_of(certificate: &CertificateDer<'_>) -> Option<CertificateRole> {
    let parsed = ParsedCertificate::try_from(certificate).ok()?;
    let is_for = |part: &CertificateRole| {
        let name = ServerName::try_from(part.name());
        name.is_ok_and(|name| verify_server_name(&parsed, &name).is_ok())
    };
    CertificateRole::ALL.into_iter().find(is_for)
}

/// Whether it is an authority's own.
pub(super) fn is_self_signed(certificate: &CertificateDer<'_>) -> bool {
    let parsed = x509_parser::parse_x509_certificate(certificate);
    parsed.is_ok_and(|(_, parsed)| parsed.subject() == parsed.issuer())
}

/// What went wrong in a handshake of TLS, and what to do.
pub(crate) fn explain(error: &Error) -> String {
    use CertificateError::{
        BadSignature, Expired, ExpiredContext, NotValidForName, NotValidForNameContext,
        NotValidYet, NotValidYetContext, UnknownIssuer,
    };
    match error {
        Error::InvalidCertificate(NotValidYet | NotValidYetContext { .. }) => {
            "the other end's certificate is not valid yet: set the clocks".into()
        }
        Error::InvalidCertificate(Expired | ExpiredContext { .. }) => {
            "the other end's certificate has expired: make it a new one".into()
        }
        Error::InvalidCertificate(UnknownIssuer | BadSignature) => {
            "the other end's certificate is of another authority: give both ends certificates of one \
             `weightsync certs new`"
                .into()
        }
        Error::InvalidCertificate(NotValidForNameContext {
            expected,
            presented,
        }) => explain_names(expected, presented),
        Error::InvalidCertificate(NotValidForName) => {
            "the other end's certificate is for another name".into()
        }
        Error::InvalidCertificate(other) => {
            format!("the other end's certificate is not accepted: {other}")
        }
        Error::NoCertificatesPresented => "the other end has shown no certificate".into(),
        Error::AlertReceived(alert) => explain_alert(*alert),
        Error::InvalidMessage(_) => {
            "the other end does not speak TLS: give it certificates too (tls=, or WEIGHTSYNC_TLS_DIR)"
                .into()
        }
        other => format!("the TLS handshake failed: {other}"),
    }
}

/// Why a certificate for these names is not the expected one, and what to do.
fn explain_names(expected: &ServerName<'_>, presented: &[String]) -> String {
    let expected = expected.to_str();
    let names: Vec<_> = presented.iter().map(|name| bare(name)).collect();
    let part_of = |name: &str| {
        CertificateRole::ALL
            .into_iter()
            .find(|part| part.name() == name)
    };
    if let Some(part) = part_of(&expected) {
        let names = names.join(", ");
        return format!(
            "the other end's certificate is of no {part}, which was expected there: it is \
             for {names}"
        );
    }
    let hosts: Vec<_> = names
        .into_iter()
        .filter(|name| part_of(name).is_none())
        .collect();
    if hosts.is_empty() {
        return format!(
            "the other end's certificate is for no host: give that end one for {expected} \
             (`weightsync certs new --hosts {expected}`)"
        );
    }
    format!(
        "the other end's certificate is not for {expected}, but for {}: connect to one of \
         these names, or give that end a certificate for {expected} (`weightsync certs new \
         --hosts {expected}`)",
        hosts.join(", ")
    )
}

/// What the other end says of this end's handshake, and what to do.
fn explain_alert(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateExpired => {
            "the other end says that this end's certificate has expired, or is not valid yet: \
             make a new one, or set the clocks"
                .into()
        }
        AlertDescription::UnknownCA => {
            "the other end says that this end's certificate is of another authority: give both \
             ends certificates of one `weightsync certs new`"
                .into()
        }
        AlertDescription::BadCertificate => {
            "the other end does not take this end's certificate, which is for another host or \
             part than it expects here"
                .into()
        }
        AlertDescription::UnsupportedCertificate => {
            "the other end does not take this end's certificate for what it is used for here: ends \
             connect both ways, so give it the usages `server auth` and `client auth`"
                .into()
        }
        AlertDescription::CertificateRequired => {
            "the other end wants a certificate of this end".into()
        }
        other => format!("the other end refused this end's TLS handshake: {other:?}"),
    }
}

/// A name of a certificate, which rustls gives as `DnsName("trainer")`.
fn bare(name: &str) -> &str {
    let inner = name
        .split_once('(')
        .and_then(|(_, inner)| inner.strip_suffix(')'));
    inner.map_or(name, |inner| inner.trim_matches('"'))
}
