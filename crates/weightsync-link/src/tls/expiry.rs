//! When a certificate expires, and the warnings of that.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use weightsync_mem::threads::LockExt as _;

/// A certificate that expires sooner is warned of.
const SOON: Duration = Duration::from_secs(7 * 24 * 3600);

/// How often that is said.
const A_DAY: Duration = Duration::from_secs(24 * 3600);

/// The last warning of each certificate's file. The process has one list, because a worker that looks
/// for its trainer reads its files for each attempt.
static WARNED: Mutex<BTreeMap<PathBuf, Warned>> = Mutex::new(BTreeMap::new());

/// A warning that a certificate expires.
struct Warned {
    expires: SystemTime,
    has_expired: bool,
    at: SystemTime,
}

/// When a certificate expires.
pub(super) fn expires(certificate: &CertificateDer<'_>) -> Result<SystemTime, String> {
    let (_, parsed) =
        x509_parser::parse_x509_certificate(certificate).map_err(|error| error.to_string())?;
    let seconds = parsed.validity().not_after.timestamp();
    Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds.max(0) as u64))
}

/// Says once a day that the certificate in this file expires, and once more when it has expired.
pub(super) fn warn(file: &Path, expires: SystemTime) {
    let now = SystemTime::now();
    if now + SOON < expires {
        return;
    }
    let left = expires.duration_since(now);
    let new = Warned {
        expires,
        has_expired: left.is_err(),
        at: now,
    };
    let mut warned = WARNED.locked();
    // A new certificate, and the moment of expiry, are worth a line at once. So is any time that
    // the clock was set back.
    let was_said = warned.get(file).is_some_and(|last| {
        let age = now.duration_since(last.at);
        (last.expires, last.has_expired) == (expires, new.has_expired)
            && age.is_ok_and(|age| age < A_DAY)
    });
    if was_said {
        return;
    }
    warned.insert(file.to_owned(), new);
    drop(warned);
    let file = file.display();
    match left {
        Ok(left) => tracing::warn!(
            "the certificate in {file} expires in {} hours: make a new one",
            left.as_secs() / 3600
        ),
        Err(_) => tracing::error!(
            "the certificate in {file} has expired, and no link is made with it: make a new one"
        ),
    }
}
