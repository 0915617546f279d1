//! Random bytes for secrets, addresses and handshakes.

use crate::error::{Error, Result};

/// Random bytes of the operating system, good enough for secrets.
///
/// ```
/// let nonce: [u8; 32] = weightsync_engine::transport::random()?;
/// assert_ne!(nonce, weightsync_engine::transport::random()?);
/// # Ok::<(), weightsync_engine::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Os`] if the system has none.
pub fn random<const N: usize>() -> Result<[u8; N]> {
    let mut bytes = [0; N];
    fill(&mut bytes).map_err(Error::os("getting random bytes"))?;
    Ok(bytes)
}

#[cfg(target_os = "linux")]
fn fill(bytes: &mut [u8]) -> std::io::Result<()> {
    use rustix::io::Errno;
    use rustix::rand::{GetRandomFlags, getrandom};

    let mut filled = 0;
    // A signal may end the call early.
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(len) => filled += len,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// On macOS this file is as good as the call, which takes unsafe code there.
#[cfg(not(target_os = "linux"))]
fn fill(bytes: &mut [u8]) -> std::io::Result<()> {
    use std::io::Read;

    std::fs::File::open("/dev/urandom")?.read_exact(bytes)
}
