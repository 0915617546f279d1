//! Random bytes for secrets, addresses and handshakes.

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

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
    let mut filled = 0;
    while filled < N {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(len) => filled += len,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("getting random bytes")(errno.into())),
        }
    }
    Ok(bytes)
}
