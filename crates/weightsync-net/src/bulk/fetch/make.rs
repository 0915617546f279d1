//! Makes a version from its base and the changes that a parent sent.

use weightsync_core::Version;

use super::*;
use crate::bulk::delta::IN_PLACE;

/// What a version can be made from: an older one that is whole here.
#[derive(Clone, Debug)]
pub(crate) struct Base {
    pub(crate) snapshot: Snapshot,
    /// Where what comes is kept: for the next version, and to be passed on.
    pub(crate) recorded: Arc<Delta>,
    /// Whether there are relays below; for oneself only few bytes are worth being kept.
    pub(crate) passes_on: bool,
    /// What leads to it from the still older version that the free slot holds, if that is
    /// known.
    pub(crate) earlier: Option<Arc<Delta>>,
}

/// As [`IN_PLACE`], where one of them is thin: that takes so much longer to be read that
/// reading one more seldom pays.
const IN_PLACE_THIN: u64 = 512;

/// A delta came as it was sent, and nothing can be made of it.
#[derive(Debug, thiserror::Error)]
#[error("the delta of span {index} from {base} to {version} cannot be applied here: {source}")]
struct Unfit {
    index: usize,
    base: Version,
    version: Version,
    source: DeltaError,
}

impl Shared {
    /// Reads one delta, and makes its span of it.
    pub(super) fn make(
        &self,
        socket: &mut TcpStream,
        head: &DeltaHead,
        scratch: &mut Scratch,
    ) -> io::Result<()> {
        let wrong = || invalid(FrameError::Delta { head: *head });
        let base = self.base.as_ref().ok_or_else(wrong)?;
        let of_this = usize::from(head.model) == self.item.model
            && head.version == self.item.version
            && head.base == base.snapshot.version()
            && head.image_bytes == self.room.layout().bytes();
        let first = head.index as usize * SPAN_CHUNKS;
        let chunks = first..self.room.pieces().min(first + SPAN_CHUNKS);
        let piece = self.room.take_all(chunks).filter(|_| of_this);
        let mut piece = piece.ok_or_else(wrong)?;

        // Less than the span has: the head says so.
        let mut bytes = vec![0; head.bytes as usize];
        read_exact(socket, &mut bytes)?;
        head.check(&bytes).map_err(invalid)?;
        let came = (HEADER_BYTES + DELTA_HEAD_BYTES + bytes.len()) as u64;
        self.coded.fetch_add(came, Ordering::Relaxed);

        let index = head.index as usize;
        let coded = Coded::new(bytes, head.crc);
        if base.passes_on || are_few([&coded], piece.len()) {
            base.recorded.note(index, Span::Coded(coded.clone()));
            // Relays below need not wait until it is put in here.
            self.store.notify();
        }
        let made = self.put(&mut piece, base, index, &coded, scratch);
        let Err(source) = made else {
            if base.passes_on && coded.is_thin() {
                self.keep_foldable(&piece, base, index, scratch);
            }
            piece.keep();
            return Ok(());
        };
        match source {
            // What came is as it was made: it may be of use to others.
            DeltaError::Base { .. } => self.unfit.store(true, Ordering::Release),
            // It is useless, whichever end made it.
            _ => base.recorded.spoil(),
        }
        Err(invalid(Unfit {
            index,
            base: head.base,
            version: head.version,
            source,
        }))
    }

    /// Keeps what changed in a span as it can be folded, for relays below that are some
    /// versions behind: of a thin delta that cannot be done later, as it takes the base.
    fn keep_foldable(&self, piece: &ChunkWrite, base: &Base, index: usize, scratch: &mut Scratch) {
        let layout = self.room.layout();
        let range = piece.range();
        let pattern = Pattern::of_span(layout, range.start as u64);
        let old = &base.snapshot.bytes()[range];
        let mut bytes = Vec::new();
        match encode(pattern, Codec::Fast, old, piece, &mut bytes, scratch) {
            Ok(_) => base.recorded.note_foldable(index, bytes, layout),
            Err(error) => unreachable!("both are versions of one layout: {error}"),
        }
    }

    /// Makes a span of its delta and what is here.
    fn put(
        &self,
        piece: &mut ChunkWrite,
        base: &Base,
        index: usize,
        coded: &Coded,
        scratch: &mut Scratch,
    ) -> Result<(), DeltaError> {
        let range = piece.range();
        let pattern = Pattern::of_span(self.room.layout(), range.start as u64);
        let Some(first) = self.few(piece, base, index, coded) else {
            let old = &base.snapshot.bytes()[range];
            return apply_onto(pattern, coded.sent(), old, piece, scratch).map(drop);
        };
        [first, coded]
            .into_iter()
            .try_for_each(|delta| apply(pattern, delta.sent(), piece, None, scratch).map(drop))
    }

    /// What leads from the bytes of this place to the base, if it and what comes on top
    /// of it are so few that both are put in here.
    fn few<'a>(
        &self,
        piece: &ChunkWrite,
        base: &'a Base,
        index: usize,
        coded: &Coded,
    ) -> Option<&'a Coded> {
        let earlier = base.earlier.as_ref()?;
        if piece.base() != Some(earlier.base()) {
            return None;
        }
        let Some(Span::Coded(first)) = earlier.known(index) else {
            return None;
        };
        are_few([first, coded], piece.len()).then_some(first)
    }
}

/// Whether deltas of a span of so many bytes are so few that it does not take longer to put
/// them in than to copy it.
fn are_few<const N: usize>(deltas: [&Coded; N], span: usize) -> bool {
    let bytes: usize = deltas.iter().map(|one| one.sent().len()).sum();
    let few = match deltas.iter().any(|one| one.is_thin()) {
        true => IN_PLACE_THIN,
        false => IN_PLACE,
    };
    bytes as u64 * few <= span as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One of a codec that begins like this.
    fn coded(tag: u8, bytes: usize) -> Coded {
        Coded::new([vec![tag], vec![0; bytes - 1]].concat(), 0)
    }

    #[test]
    fn thin_deltas_are_few_where_they_take_less() {
        const FAST: u8 = 0x11;
        const THIN: u8 = 0x21;
        let span = 4 << 20;
        // (codecs, bytes of each, few)
        let cases = [
            ((FAST, FAST), (32 << 10, 32 << 10), true),
            ((FAST, FAST), (32 << 10, (32 << 10) + 1), false),
            ((THIN, FAST), (1, 8191), true),
            ((THIN, FAST), (1, 8192), false),
            ((FAST, THIN), (8191, 1), true),
            ((FAST, THIN), (8192, 1), false),
            ((THIN, THIN), (4096, 4096), true),
            ((THIN, THIN), (4096, 4097), false),
        ];
        for ((first, second), (one, two), expected) in cases {
            let few = are_few([&coded(first, one), &coded(second, two)], span);
            assert_eq!(few, expected, "{first:#x} {one}, {second:#x} {two}");
        }
    }
}
