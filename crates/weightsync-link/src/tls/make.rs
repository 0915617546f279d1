//! Makes a private authority, and a certificate for each part.

use std::fs::{DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::ServerName;
use time::{Duration, OffsetDateTime};

use super::{CertificateRole, TlsError};

/// What to make.
#[derive(Clone, Debug)]
pub struct CertificateRequest {
    /// The folder, which must not have any of the files.
    pub out: PathBuf,
    /// The names and addresses at which ends are connected to.
    pub hosts: Vec<String>,
    /// How long the certificates hold, in days.
    pub days: u32,
}

/// What was made.
#[derive(Clone, Debug)]
pub struct MadeFiles {
    /// The authority's certificate, then that of each part.
    pub files: Vec<PathBuf>,
}

/// Makes the authority's certificate (`ca.pem`), and a file for each part with its certificate, its
/// key and the authority's certificate.
///
/// The authority's key is thrown away: nobody can add an end to these, and to renew is to make all
/// of them again.
///
/// # Errors
///
/// [`TlsError::Make`], for a host that is no name and no address, and a file that is there already.
pub fn make(request: &CertificateRequest) -> Result<MadeFiles, TlsError> {
    make_at(request, OffsetDateTime::now_utc())
}

/// The same at another time.
pub(super) fn make_at(
    request: &CertificateRequest,
    begin: OffsetDateTime,
) -> Result<MadeFiles, TlsError> {
    let CertificateRequest { out, hosts, days } = request;
    check_hosts(hosts)?;
    // A clock that is a little late must not make it invalid.
    let from = begin - Duration::hours(1);
    let until = begin.checked_add(Duration::days((*days).into()));
    let until = until.ok_or_else(|| failed(format!("{days} days are longer than time is")))?;
    let authority = new_authority(from, until)?;

    let mut made = vec![("ca.pem".to_owned(), authority.pem(), 0o644)];
    for part in CertificateRole::ALL {
        let text = certificate_text(part, hosts, (from, until), &authority)?;
        made.push((format!("{part}.pem"), text, 0o600));
    }
    write(out, &made).map(|files| MadeFiles { files })
}

/// Checks that there are hosts, and that each can be in a certificate.
fn check_hosts(hosts: &[String]) -> Result<(), TlsError> {
    if hosts.is_empty() {
        return Err(failed("name the hosts that ends are connected to"));
    }
    if let Some(wrong) = hosts
        .iter()
        .find(|host| ServerName::try_from(host.as_str()).is_err())
    {
        return Err(failed(format!(
            "--hosts: {wrong:?} is no name and no address of a host"
        )));
    }
    let of_part = |host: &&String| {
        CertificateRole::ALL
            .iter()
            .any(|part| part.name().eq_ignore_ascii_case(host.trim_end_matches('.')))
    };
    if let Some(wrong) = hosts.iter().find(of_part) {
        return Err(failed(format!(
            "--hosts: {wrong:?} says what an end is, and no host can have this name"
        )));
    }
    Ok(())
}

/// A new authority, which holds for this time.
fn new_authority(
    from: OffsetDateTime,
    until: OffsetDateTime,
) -> Result<CertifiedIssuer<'static, KeyPair>, TlsError> {
    let mut authority = CertificateParams::default();
    // It signs ends, and no other authority.
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    (authority.not_before, authority.not_after) = (from, until);
    let key = KeyPair::generate().map_err(|error| failed(error.to_string()))?;
    // A name of its own: an end can then say that a certificate is of another authority.
    let own = blake3::hash(key.public_key_raw()).to_hex();
    authority.distinguished_name = named(&format!("weightsync authority {}", &own[..16]));
    CertifiedIssuer::self_signed(authority, key).map_err(|error| failed(error.to_string()))
}

/// A new certificate of a part, with its key and the authority's certificate.
fn certificate_text(
    part: CertificateRole,
    hosts: &[String],
    (from, until): (OffsetDateTime, OffsetDateTime),
    authority: &CertifiedIssuer<'_, KeyPair>,
) -> Result<String, TlsError> {
    let mut names = vec![part.name().to_owned()];
    // Only the trainer is checked by where it is.
    if part == CertificateRole::Trainer {
        names.extend(hosts.iter().cloned());
    }
    let params = CertificateParams::new(names);
    let mut params = params.map_err(|error| failed(format!("--hosts: {error}")))?;
    params.distinguished_name = named(part.name());
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Ends connect to each other in both directions.
    params.extended_key_usages = vec![
        ExtendedKeyUsagePurpose::ServerAuth,
        ExtendedKeyUsagePurpose::ClientAuth,
    ];
    params.use_authority_key_identifier_extension = true;
    (params.not_before, params.not_after) = (from, until);
    let key = KeyPair::generate().map_err(|error| failed(error.to_string()))?;
    let signed = params.signed_by(&key, authority);
    let signed = signed.map_err(|error| failed(error.to_string()))?;
    Ok(format!(
        "{}{}{}",
        signed.pem(),
        key.serialize_pem(),
        authority.pem()
    ))
}

fn named(name: &str) -> DistinguishedName {
    let mut all = DistinguishedName::new();
    all.push(DnType::CommonName, name);
    all
}

fn write(out: &Path, files: &[(String, String, u32)]) -> Result<Vec<PathBuf>, TlsError> {
    let paths: Vec<PathBuf> = files.iter().map(|(name, ..)| out.join(name)).collect();
    // Before anything is written, because old and new files do not fit together.
    if let Some(known) = paths.iter().find(|path| path.exists()) {
        return Err(failed(format!(
            "{} is there already: choose another folder, or remove the old certificates",
            known.display()
        )));
    }
    let at = |path: &Path, error: io::Error| failed(format!("{}: {error}", path.display()));
    let mut folder = DirBuilder::new();
    folder.recursive(true).mode(0o700);
    folder.create(out).map_err(|error| at(out, error))?;
    for (path, (_, text, mode)) in paths.iter().zip(files) {
        let mut options = OpenOptions::new();
        // A link at this place is not followed, and no file is overwritten.
        options.write(true).create_new(true).mode(*mode);
        let written = options
            .open(path)
            .and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| at(path, error))?;
    }
    Ok(paths)
}

fn failed(what: impl Into<String>) -> TlsError {
    TlsError::Make { what: what.into() }
}
