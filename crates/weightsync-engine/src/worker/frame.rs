//! Frames on a worker's pipe: a length, a kind, the payload. No I/O happens here.
//!
//! ```text
//! u32 little endian: payload bytes | u8: kind | payload
//! ```

use serde::{Deserialize, Serialize};

use super::error::PipeFault;

/// Bytes before every payload.
pub(super) const HEADER: usize = 5;

/// The version of the pipe's rules; both ends are normally the same program.
pub(super) const PIPE_VERSION: u8 = 1;

/// The longest greeting, in bytes.
const MAX_GREETING: usize = 64;

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PipeFrameKind {
    /// The first frame to a worker: who it is and what its limits are.
    Greeting = 1,
    /// The second frame to a worker: the init bytes.
    Init = 2,
    /// Everything else, both ways.
    User = 3,
}

impl TryFrom<u8> for PipeFrameKind {
    type Error = PipeFault;

    fn try_from(kind: u8) -> Result<Self, PipeFault> {
        match kind {
            1 => Ok(Self::Greeting),
            2 => Ok(Self::Init),
            3 => Ok(Self::User),
            kind => Err(PipeFault::UnknownKind { kind }),
        }
    }
}

/// What a worker learns about itself before its init bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Greeting {
    pub(super) version: u8,
    pub(super) index: u32,
    pub(super) count: u32,
    pub(super) max_frame: u32,
    pub(super) queue_bytes: u64,
    pub(super) grace_ms: u64,
}

impl Greeting {
    /// Parses a greeting; anything but exactly one of this version is a fault.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, PipeFault> {
        let fault = PipeFault::Greeting {
            expected: PIPE_VERSION,
        };
        match postcard::take_from_bytes::<Self>(bytes) {
            Ok((greeting, [])) if greeting.version == PIPE_VERSION => Ok(greeting),
            _ => Err(fault),
        }
    }

    /// The frame of this greeting, and the header of the init frame of `init_len` bytes after it.
    pub(super) fn frame_before_init(&self, init_len: u32) -> Vec<u8> {
        // A flat struct of integers always has a postcard form, and a short one.
        let payload = postcard::to_stdvec(self).unwrap_or_default();
        [
            &header(PipeFrameKind::Greeting, payload.len() as u32)[..],
            &payload,
            &header(PipeFrameKind::Init, init_len),
        ]
        .concat()
    }
}

/// The header of a frame whose payload has `len` bytes.
pub(super) fn header(kind: PipeFrameKind, len: u32) -> [u8; HEADER] {
    let [a, b, c, d] = len.to_le_bytes();
    [a, b, c, d, kind as u8]
}

/// Puts frames together from whatever pieces a socket delivers.
///
/// Fill (a part of) [`missing`](Self::missing), then say how much with [`advance`](Self::advance).
#[derive(Debug)]
pub(super) struct FrameAssembler {
    max_frame: usize,
    header: [u8; HEADER],
    /// Set once the header is whole; the payload is allocated then, after the length was checked.
    kind: Option<PipeFrameKind>,
    payload: Vec<u8>,
    /// Bytes present of whichever part is being filled.
    filled: usize,
}

impl FrameAssembler {
    /// An assembler that refuses payloads of more than `max_frame` bytes.
    pub(super) fn new(max_frame: usize) -> Self {
        Self {
            max_frame,
            header: [0; HEADER],
            kind: None,
            payload: Vec::new(),
            filled: 0,
        }
    }

    /// Changes the limit, from the next header on.
    pub(super) fn set_max_frame(&mut self, max_frame: usize) {
        self.max_frame = max_frame;
    }

    /// The bytes needed next; never empty.
    pub(super) fn missing(&mut self) -> &mut [u8] {
        match self.kind {
            None => &mut self.header[self.filled..],
            Some(_) => &mut self.payload[self.filled..],
        }
    }

    /// Takes note that the first `read` bytes of [`missing`](Self::missing) are there, and returns
    /// the frame they complete, if any.
    pub(super) fn advance(
        &mut self,
        read: usize,
    ) -> Result<Option<(PipeFrameKind, Vec<u8>)>, PipeFault> {
        self.filled += read;
        if self.kind.is_none() {
            if self.filled < HEADER {
                return Ok(None);
            }
            let [a, b, c, d, kind] = self.header;
            let kind = PipeFrameKind::try_from(kind)?;
            let len = u32::from_le_bytes([a, b, c, d]) as usize;
            // The greeting is what says how long the others may be.
            let max = match kind {
                PipeFrameKind::Greeting => MAX_GREETING,
                PipeFrameKind::Init | PipeFrameKind::User => self.max_frame,
            };
            // Before the memory is taken: the length is a peer's word.
            if len > max {
                return Err(PipeFault::FrameTooLong { len, max });
            }
            self.kind = Some(kind);
            self.payload = vec![0; len];
            self.filled = 0;
        }
        if self.filled < self.payload.len() {
            return Ok(None);
        }
        self.filled = 0;
        Ok(self
            .kind
            .take()
            .map(|kind| (kind, std::mem::take(&mut self.payload))))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Feeds `bytes` in pieces of at most `step` and returns the frames and the fault, if any.
    fn assemble(
        bytes: &[u8],
        step: usize,
        max_frame: usize,
    ) -> (Vec<(PipeFrameKind, Vec<u8>)>, Option<PipeFault>) {
        let mut assembler = FrameAssembler::new(max_frame);
        let (mut frames, mut rest) = (Vec::new(), bytes);
        while !rest.is_empty() {
            let missing = assembler.missing();
            assert!(!missing.is_empty());
            let take = missing.len().min(step).min(rest.len());
            missing[..take].copy_from_slice(&rest[..take]);
            rest = &rest[take..];
            match assembler.advance(take) {
                Ok(frame) => frames.extend(frame),
                Err(fault) => return (frames, Some(fault)),
            }
        }
        (frames, None)
    }

    fn frame(kind: PipeFrameKind, payload: &[u8]) -> Vec<u8> {
        let mut bytes = header(kind, payload.len() as u32).to_vec();
        bytes.extend_from_slice(payload);
        bytes
    }

    #[test]
    fn frames_come_out_whole_however_they_were_cut() {
        let sent = [
            (PipeFrameKind::Greeting, vec![7; 10]),
            (PipeFrameKind::Init, vec![]),
            (PipeFrameKind::User, vec![1; 1000]),
            (PipeFrameKind::User, vec![]),
            (PipeFrameKind::User, vec![2; 3]),
        ];
        let bytes: Vec<u8> = sent
            .iter()
            .flat_map(|(kind, payload)| frame(*kind, payload))
            .collect();
        for step in [1, 2, 4, 5, 6, 7, 999, 5000] {
            let (frames, fault) = assemble(&bytes, step, 1000);
            assert_eq!(fault, None);
            assert_eq!(frames, sent);
        }
    }

    #[test]
    fn long_frame_is_refused_before_allocation() {
        let mut assembler = FrameAssembler::new(10);
        assembler
            .missing()
            .copy_from_slice(&header(PipeFrameKind::User, u32::MAX));
        let fault = PipeFault::FrameTooLong {
            len: u32::MAX as usize,
            max: 10,
        };
        assert_eq!(assembler.advance(HEADER), Err(fault));
        assert_eq!(assembler.payload.capacity(), 0);

        let greeting = frame(PipeFrameKind::Greeting, &[0; MAX_GREETING + 1]);
        let (frames, fault) = assemble(&greeting, 100, usize::MAX);
        assert_eq!(frames, []);
        assert!(matches!(
            fault,
            Some(PipeFault::FrameTooLong {
                max: MAX_GREETING,
                ..
            })
        ));
    }

    proptest! {
        #[test]
        fn any_bytes_are_frames_or_a_fault(
            bytes in prop::collection::vec(prop_oneof![0..4_u8, any::<u8>()], 0..200),
            step in 1..50_usize,
            max_frame in 0..100_usize,
        ) {
            let (frames, fault) = assemble(&bytes, step, max_frame);
            let mut again = Vec::new();
            for (kind, payload) in &frames {
                prop_assert!(payload.len() <= max_frame.max(MAX_GREETING));
                again.extend(frame(*kind, payload));
            }
            prop_assert!(bytes.starts_with(&again));
            // However it is cut, the same comes out.
            prop_assert_eq!(assemble(&bytes, bytes.len().max(1), max_frame), (frames, fault));
            // A greeting is parsed or refused, never a panic.
            let _ = Greeting::parse(&bytes);
        }
    }

    #[test]
    fn an_unknown_kind_is_refused() {
        for kind in [0, 4, 255] {
            let (_, fault) = assemble(&[0, 0, 0, 0, kind], 5, 10);
            assert_eq!(fault, Some(PipeFault::UnknownKind { kind }));
        }
    }

    #[test]
    fn a_greeting_is_read_exactly_or_not_at_all() {
        let greeting = Greeting {
            version: PIPE_VERSION,
            index: 3,
            count: 4,
            max_frame: u32::MAX,
            queue_bytes: u64::MAX,
            grace_ms: u64::MAX,
        };
        let bytes = postcard::to_stdvec(&greeting).expect("a greeting can be written");
        assert!(bytes.len() <= MAX_GREETING);
        assert_eq!(Greeting::parse(&bytes), Ok(greeting));

        let fault = Err(PipeFault::Greeting {
            expected: PIPE_VERSION,
        });
        for end in 0..bytes.len() {
            assert_eq!(Greeting::parse(&bytes[..end]), fault);
        }
        let longer = [bytes.as_slice(), &[0]].concat();
        assert_eq!(Greeting::parse(&longer), fault);
        let mut other = bytes.clone();
        other[0] = PIPE_VERSION + 1;
        assert_eq!(Greeting::parse(&other), fault);
    }
}
