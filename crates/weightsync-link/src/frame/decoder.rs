//! Decodes frames from a stream.

use super::{FrameError, FrameHeader, FrameKind, HEADER_BYTES};

/// How many bytes of buffer a [`Decoder`] keeps between frames. There may be thousands of links.
const KEPT: usize = 4 << 10;

/// A complete and undamaged frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The kind of the frame.
    pub kind: FrameKind,
    /// The payload.
    pub payload: &'a [u8],
}

/// Frames out of bytes that come in pieces of any size.
///
/// **Guarantee.** It never holds more than one frame, and never more than twice what has come of
/// it: a peer that states a length and sends nothing costs nothing.
///
/// ```
/// use weightsync_link::frame::{Decoder, FrameKind, encode};
///
/// let mut bytes = Vec::new();
/// encode(FrameKind::Control, b"first", &mut bytes)?;
/// encode(FrameKind::Control, b"second", &mut bytes)?;
///
/// let mut decoder = Decoder::new(&[FrameKind::Control]);
/// let mut payloads = Vec::new();
/// for mut piece in bytes.chunks(7) {
///     while let Some(frame) = decoder.next(&mut piece)? {
///         payloads.push(frame.payload.to_vec());
///     }
/// }
/// assert_eq!(payloads, [&b"first"[..], b"second"]);
/// # Ok::<(), weightsync_link::frame::FrameError>(())
/// ```
#[derive(Debug)]
pub struct Decoder {
    allowed: &'static [FrameKind],
    head: [u8; HEADER_BYTES],
    /// How many bytes of the header have arrived.
    filled: usize,
    header: Option<FrameHeader>,
    payload: Vec<u8>,
    failed: Option<FrameError>,
}

impl Decoder {
    /// A decoder for a direction of a link in which these kinds are valid.
    pub fn new(allowed: &'static [FrameKind]) -> Self {
        Self {
            allowed,
            head: [0; HEADER_BYTES],
            filled: 0,
            header: None,
            payload: Vec::new(),
            failed: None,
        }
    }

    /// Takes bytes from the front of `input` up to the end of one frame, and returns that frame if
    /// it is complete. `None` means that all of `input` was taken, and more is needed.
    ///
    /// # Errors
    ///
    /// Those of [`FrameHeader::decode`] and [`FrameHeader::check`]. Later calls return the same
    /// error, because nobody knows where the next frame would begin.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Frame<'_>>, FrameError> {
        if let Some(failed) = &self.failed {
            return Err(failed.clone());
        }
        match self.advance(input) {
            Ok(None) => Ok(None),
            Ok(Some(kind)) => Ok(Some(Frame {
                kind,
                payload: &self.payload,
            })),
            Err(error) => {
                // No frame follows on this link, so its memory is of no use.
                self.payload = Vec::new();
                self.failed = Some(error.clone());
                Err(error)
            }
        }
    }

    /// Whether no frame is incomplete: a peer that hangs up now has broken nothing off.
    pub fn is_between_frames(&self) -> bool {
        self.filled == 0
    }

    fn advance(&mut self, input: &mut &[u8]) -> Result<Option<FrameKind>, FrameError> {
        if self.filled < HEADER_BYTES {
            let now = take(input, HEADER_BYTES - self.filled);
            self.head[self.filled..][..now.len()].copy_from_slice(now);
            self.filled += now.len();
        }
        if self.filled < HEADER_BYTES {
            return Ok(None);
        }
        let header = match self.header {
            Some(header) => header,
            None => {
                // The caller is done with the earlier frame.
                self.payload.clear();
                self.payload.shrink_to(KEPT);
                *self
                    .header
                    .insert(FrameHeader::decode(&self.head, self.allowed)?)
            }
        };
        let missing = header.len - self.payload.len();
        let now = take(input, missing);
        let room = self.payload.capacity() - self.payload.len();
        if room < now.len() {
            // At most twice what has arrived, and no more than is missing.
            let more = now.len().max(self.payload.len()).min(missing);
            self.payload.reserve_exact(more);
        }
        self.payload.extend_from_slice(now);
        if now.len() < missing {
            return Ok(None);
        }
        self.filled = 0;
        self.header = None;
        header.check(&self.payload)?;
        Ok(Some(header.kind))
    }
}

fn take<'a>(input: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (now, rest) = input.split_at(most.min(input.len()));
    *input = rest;
    now
}
