//! Standard output.

use std::io::{self, Write};

/// Writes a text, all of it now. Where the reader has closed the pipe early, as in
/// `weightsync diff … | head`, the rest is left out.
pub fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    let written = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    match written {
        // Rust and Python ignore SIGPIPE, so a closed pipe shows as an error of the write.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}
