//! Replay buffers against a plain list of frames, in memory and on disk.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use proptest::prelude::*;
use tempfile::TempDir;
use weightsync_engine::Dtype;

use super::*;

/// Bytes per frame of a column that a directory alone has.
const WIDE: usize = 20;

/// In memory where possible: a sync of a disk takes most of a case's time.
pub(super) fn scratch() -> TempDir {
    TempDir::new_in("/dev/shm")
        .or_else(|_| TempDir::new())
        .unwrap()
}

fn schema() -> Schema {
    Schema::new([
        Column::new("observation", Dtype::U8, [WIDE as u64]),
        Column::new("trajectory", Dtype::U64, []),
    ])
    .unwrap()
}

/// The bytes of a batch's columns.
type Bytes<'a> = &'a [&'a [u8]];

/// The frames of a batch: each has its number in its columns.
fn columns(numbers: impl Iterator<Item = u64> + Clone) -> [Vec<u8>; 2] {
    let observations = numbers.clone().flat_map(|it| [it as u8; WIDE]);
    let trajectories = numbers.flat_map(u64::to_le_bytes);
    [observations.collect(), trajectories.collect()]
}

fn extend(buffer: &ReplayBuffer, shape: &[usize], numbers: Range<u64>) -> Range<u64> {
    let [a, b] = columns(numbers);
    buffer.extend(shape, &[&a, &b]).unwrap()
}

/// What all frames of a buffer have, read from both columns.
fn contents(buffer: &ReplayBuffer) -> VecDeque<(u64, u64)> {
    let ids: Vec<u64> = buffer.ids().collect();
    let (mut a, mut b) = (vec![0; ids.len() * WIDE], vec![0; ids.len() * 8]);
    buffer.read_into(&ids, &mut [&mut a, &mut b]).unwrap();
    numbered(&ids, &a, &b).collect()
}

fn numbered(ids: &[u64], a: &[u8], b: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let (a, b) = (a.as_chunks::<WIDE>().0, b.as_chunks::<8>().0);
    ids.iter().zip(a).zip(b).map(|((id, a), b)| {
        let number = u64::from_le_bytes(*b);
        assert_eq!(*a, [number as u8; WIDE], "the columns of one frame");
        (*id, number)
    })
}

fn samplers() -> impl Strategy<Value = Sampler> {
    prop_oneof![
        Just(Sampler::Uniform),
        Just(Sampler::WithoutReplacement),
        Just(Prioritised::new(0.5, 0.5).into()),
        Just(Slices::of("trajectory").slice_len(1).into()),
    ]
}

#[derive(Clone, Debug)]
enum Action {
    Extend(Vec<usize>),
    Sample(usize),
    Flush,
    Reopen,
}

fn actions(ndim: usize) -> impl Strategy<Value = Vec<Action>> {
    let action = prop_oneof![
        6 => prop::collection::vec(0..4_usize, ndim).prop_map(Action::Extend),
        3 => (1..9_usize).prop_map(Action::Sample),
        1 => Just(Action::Flush),
        1 => Just(Action::Reopen),
    ];
    prop::collection::vec(action, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn buffer_matches_a_plain_list_of_frames(
        (ndim, actions) in (1..=3_usize).prop_flat_map(|ndim| (Just(ndim), actions(ndim))),
        sampler in samplers(),
        capacity in 27..40_usize,
        is_on_disk: bool,
    ) {
        let dir = scratch();
        let builder = ReplayBuffer::builder(schema());
        let builder = builder.capacity(capacity).ndim(ndim).sampler(sampler).seed(3);
        let open = || match is_on_disk {
            true => builder.clone().directory(dir.path()).unwrap(),
            false => builder.clone().in_memory().unwrap(),
        };
        let mut buffer = open();
        let mut model: VecDeque<(u64, u64)> = VecDeque::new();
        let (mut next, mut number) = (0, 1000);
        for action in actions {
            match action {
                Action::Extend(shape) => {
                    let frames = shape.iter().product::<usize>() as u64;
                    let ids = extend(&buffer, &shape, number..number + frames);
                    prop_assert_eq!(&ids, &(next..next + frames));
                    next = ids.end;
                    model.extend(ids.zip(number..));
                    number += frames;
                    model.drain(..model.len().saturating_sub(capacity));
                }
                Action::Sample(n) => {
                    let sample = buffer.sample(n);
                    prop_assert_eq!(sample.is_err(), model.is_empty());
                    let Ok(Sample { drawn, columns }) = sample else { continue };
                    prop_assert_eq!(drawn.ids.len(), n);
                    let mut found = numbered(&drawn.ids, &columns[0], &columns[1]);
                    prop_assert!(found.all(|frame| model.contains(&frame)));
                    if drawn.weights.is_some() {
                        buffer.update_priorities(&drawn.ids, &vec![0.1; n]).unwrap();
                    }
                }
                Action::Flush => buffer.flush().unwrap(),
                Action::Reopen if is_on_disk => {
                    drop(buffer);
                    buffer = open();
                }
                Action::Reopen => {}
            }
            prop_assert_eq!(buffer.len(), model.len());
            prop_assert_eq!(buffer.ids().end, next);
        }
        prop_assert_eq!(contents(&buffer), model);
    }
}

#[test]
fn batches_that_do_not_fit_are_refused_unchanged() {
    let builder = ReplayBuffer::builder(schema()).capacity(6).ndim(2);
    let buffer = builder.in_memory().unwrap();
    let [a, b] = columns(0..4);
    let cases: [(&[usize], Bytes<'_>, &str); 6] = [
        (&[4], &[&a, &b], "ndim = 2"),
        (&[2, 2], &[&a], "2 columns"),
        (&[2, 2], &[&a, &b[1..]], "`trajectory`: expected 32 bytes"),
        (&[2, 1], &[&a, &b], "`observation`: expected 40 bytes"),
        (&[7, 1], &[&a, &b], "7 frames does not fit"),
        (&[1 << 60, 1 << 60], &[&a, &b], "does not fit"),
    ];
    for (shape, columns, expected) in cases {
        let message = buffer.extend(shape, columns).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
        assert!(buffer.is_empty());
    }
    assert_eq!(buffer.extend(&[0, 5], &[&[], &[]]).unwrap(), 0..0);
    assert_eq!(buffer.extend(&[2, 2], &[&a, &b]).unwrap(), 0..4);
}

#[test]
fn builder_refuses_settings_that_cannot_be() {
    let builder = || ReplayBuffer::builder(schema());
    let cases = [
        (builder(), "capacity is 0"),
        (builder().capacity(usize::MAX), "capacity is"),
        (builder().capacity(1).ndim(4), "`ndim` is 4"),
    ];
    for (builder, expected) in cases {
        let message = builder.in_memory().unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn frames_that_are_gone_are_named() {
    let buffer = ReplayBuffer::builder(schema()).capacity(4);
    let buffer = buffer.in_memory().unwrap();
    extend(&buffer, &[4], 0..4);
    extend(&buffer, &[2], 4..6);
    let (mut a, mut b) = ([0; 2 * WIDE], [0; 16]);
    for id in [1, 6] {
        let gone = buffer.read_into(&[3, id], &mut [&mut a, &mut b]);
        let message = gone.unwrap_err().to_string();
        assert!(message.contains(&format!("frame {id} is not in")));
    }
    let expected = (2..6).map(|id| (id, id)).collect::<VecDeque<_>>();
    assert_eq!(contents(&buffer), expected);
}

#[test]
fn directory_refuses_another_buffer_by_name() {
    let dir = scratch();
    let open = |schema: Schema, capacity: usize| {
        let builder = ReplayBuffer::builder(schema).capacity(capacity);
        builder.directory(dir.path())
    };
    let first = open(schema(), 8).unwrap();
    let refused = open(schema(), 8);
    assert!(matches!(refused, Err(Error::ReplayBufferInUse { .. })));
    drop(first);

    let renamed = Schema::new([Column::new("state", Dtype::U8, [3])]).unwrap();
    let cases = [(renamed, 8, "`state` U8 [3]"), (schema(), 9, "9 frames")];
    for (schema, capacity, expected) in cases {
        let refused = open(schema, capacity).unwrap_err();
        assert!(matches!(refused, Error::OtherReplayBuffer { .. }));
        let message = refused.to_string();
        assert!(message.contains(expected), "{message}");
    }
    open(schema(), 8).unwrap();
}

#[test]
fn slices_end_where_a_buffer_was_closed() {
    let dir = scratch();
    let open = || {
        let builder = ReplayBuffer::builder(schema()).capacity(8);
        let slices = Slices::of("trajectory").slice_len(4);
        builder.sampler(slices).directory(dir.path()).unwrap()
    };
    let extend = |buffer: &ReplayBuffer, numbers: &[u64]| {
        let [a, b] = columns(numbers.iter().copied());
        buffer.extend(&[numbers.len()], &[&a, &b]).unwrap()
    };
    let buffer = open();
    extend(&buffer, &[9, 9, 5, 6]);
    extend(&buffer, &[5, 6, 5]);
    assert!(buffer.sample(4).is_err());
    drop(buffer);
    let buffer = open();
    extend(&buffer, &[5, 6]);
    assert_eq!(buffer.ids(), 1..9);
    // The number 5 is another trajectory's now.
    assert!(buffer.sample(4).is_err());
    extend(&buffer, &[5, 5, 5]);
    assert_eq!(buffer.sample(4).unwrap().drawn.ids, [7, 9, 10, 11]);
}

/// Each extend is a trajectory of its own, so that half of one would be a short
/// slice.
fn share(buffer: &ReplayBuffer, batch: u64) {
    const WRITERS: u64 = 3;
    const ROUNDS: u64 = 300;
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let readers = [(); 3].map(|()| {
            scope.spawn(|| {
                let mut is_last = false;
                while !is_last {
                    is_last = is_over.load(Ordering::Relaxed);
                    let Ok(Sample { drawn, columns }) = buffer.sample(4 * batch as usize) else {
                        continue;
                    };
                    assert!(drawn.mask.unwrap().iter().all(|is_real| *is_real));
                    let found = numbered(&drawn.ids, &columns[0], &columns[1]);
                    let found: Vec<_> = found.collect();
                    for slice in found.chunks(batch as usize) {
                        assert!(slice.iter().all(|(_, number)| *number == slice[0].1));
                    }
                }
            })
        });
        let writers = [0, 1, 2].map(|writer| {
            scope.spawn(move || {
                let mut written = Vec::new();
                for round in 0..ROUNDS {
                    let number = round * WRITERS + writer;
                    let [a, b] = columns((0..batch).map(|_| number));
                    let ids = buffer.extend(&[batch as usize], &[&a, &b]).unwrap();
                    written.extend(ids.map(|id| (id, number)));
                }
                buffer.flush().unwrap();
                written
            })
        });
        let written = writers.map(|writer| writer.join());
        is_over.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().unwrap();
        }
        let written = written.into_iter().flat_map(Result::unwrap);
        let written: BTreeMap<u64, u64> = written.collect();
        assert!(written.keys().copied().eq(0..WRITERS * ROUNDS * batch));
        let found = contents(buffer);
        assert_eq!(found.len(), buffer.capacity());
        assert!(found.iter().all(|(id, number)| written[id] == *number));
    });
}

#[test]
fn samples_never_see_half_of_an_extend() {
    let dir = scratch();
    let slices = Slices::of("trajectory").num_slices(4).strict_len(false);
    let builder = ReplayBuffer::builder(schema());
    let builder = builder.capacity(160).sampler(slices);
    share(&builder.clone().in_memory().unwrap(), 16);
    share(&builder.directory(dir.path()).unwrap(), 16);
}
