//! Crashes: what was done to the files is recorded, and a part of it is done to
//! other files, which are opened.

use std::{collections::BTreeMap, fs, fs::File, os::unix::fs::FileExt};

use proptest::{prelude::*, sample::Index};
use tempfile::TempDir;
use weightsync_engine::Dtype;

use super::{
    files::{Op, path_of},
    header::HEADER_BYTES,
    *,
};
use crate::replay::{Column, tests::scratch};

const PARTS: [FileKind; 4] = [
    FileKind::Header,
    FileKind::Stamps,
    FileKind::Column(0),
    FileKind::Column(1),
];

/// Bytes per frame of a column that is not small.
const WIDE: usize = SMALL + 3;

fn schema() -> Schema {
    Schema::new([
        Column::new("a", Dtype::U8, [WIDE as u64]),
        Column::new("b", Dtype::U64, []),
    ])
    .unwrap()
}

fn open(dir: &TempDir, capacity: usize) -> Disk {
    Disk::open(dir.path(), &schema(), capacity).unwrap()
}

/// Frames after the last one, whose columns have numbers from `number` on.
fn write(disk: &mut Disk, frames: u64, number: u64) -> Result<Range<u64>, Error> {
    let numbers = number..number + frames;
    let a: Vec<u8> = numbers.clone().flat_map(|it| [it as u8; WIDE]).collect();
    let b: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
    let ids = disk.live().end..disk.live().end + frames;
    let sums = sums(&[&a, &b], &disk.frame_bytes, frames as usize);
    disk.write(ids.clone(), &[&a, &b], &sums)?;
    Ok(ids)
}

fn flush(disk: &mut Disk) {
    let end = disk.live().end;
    disk.files.sync_frames().unwrap();
    disk.flushed(end).unwrap();
}

/// The numbers of the frames that are there.
fn contents(disk: &Disk) -> BTreeMap<u64, u64> {
    let ids = disk.live();
    let frames = (ids.end - ids.start) as usize;
    let (mut a, mut b) = (vec![0; frames * WIDE], vec![0; frames * 8]);
    disk.read(0, ids.clone(), &mut a).unwrap();
    disk.read(1, ids.clone(), &mut b).unwrap();
    let (a, b) = (a.as_chunks::<WIDE>().0, b.as_chunks::<8>().0);
    ids.zip(a.iter().zip(b))
        .map(|(id, (a, b))| {
            let number = u64::from_le_bytes(*b);
            assert_eq!(*a, [number as u8; WIDE], "the columns of frame {id}");
            (id, number)
        })
        .collect()
}

/// The bytes of all files.
#[derive(Clone, PartialEq)]
struct Image(Vec<Vec<u8>>);

impl Image {
    fn of(dir: &TempDir) -> Self {
        let read = |part| fs::read(path_of(dir.path(), part)).unwrap();
        Self(PARTS.map(read).into())
    }

    fn put(&self, from: &TempDir) -> TempDir {
        let dir = scratch();
        let schema = "schema.json";
        fs::copy(from.path().join(schema), dir.path().join(schema)).unwrap();
        for (part, bytes) in PARTS.into_iter().zip(&self.0) {
            fs::write(path_of(dir.path(), part), bytes).unwrap();
        }
        dir
    }

    fn write(&mut self, part: FileKind, offset: u64, bytes: &[u8]) {
        let file = PARTS.iter().position(|it| *it == part).unwrap();
        let place = offset as usize..offset as usize + bytes.len();
        self.0[file][place].copy_from_slice(bytes);
    }
}

/// An extend, and how many operations were recorded before and after it.
struct Write {
    ids: Range<u64>,
    number: u64,
    before: usize,
    after: usize,
}

/// The operations of a life of a buffer, and the extends and flushes among them.
struct Life {
    ops: Vec<Op>,
    writes: Vec<Write>,
    /// The end of the frames that a flush has synced, and the operations then.
    flushes: Vec<(u64, usize)>,
}

/// Writes batches of these lengths; 0 is a flush.
fn live_on(disk: &mut Disk, batches: &[u64], mut number: u64) -> Life {
    let ops = |disk: &Disk| disk.files.log.lock().unwrap().len();
    disk.files.log.lock().unwrap().clear();
    let mut life = Life {
        ops: Vec::new(),
        writes: Vec::new(),
        flushes: Vec::new(),
    };
    for &frames in batches {
        let before = ops(disk);
        if frames == 0 {
            flush(disk);
            life.flushes.push((disk.live().end, ops(disk)));
            continue;
        }
        let ids = write(disk, frames, number).unwrap();
        life.writes.push(Write {
            ids,
            number,
            before,
            after: ops(disk),
        });
        number += frames;
    }
    life.ops = disk.files.log.lock().unwrap().clone();
    life
}

impl Life {
    /// The end of the frames that were claimed, and of those that were
    /// committed, by the first operations.
    fn ends(&self, done: usize, start: u64) -> (u64, u64) {
        let claimed = self.writes.iter().filter(|write| write.before < done);
        let committed = self.writes.iter().filter(|write| write.after <= done);
        let end = |write: &Write| write.ids.end;
        (
            claimed.map(end).max().unwrap_or(start),
            committed.map(end).max().unwrap_or(start),
        )
    }
}

/// A capacity, and lengths of batches that fit.
fn lives(count: usize) -> impl Strategy<Value = (usize, Vec<Vec<u64>>)> {
    (1..48_u64).prop_flat_map(move |capacity| {
        let batch = prop_oneof![
            6 => 1..=capacity.min(4),
            2 => 1..=capacity,
            1 => Just(0),
        ];
        let batches = prop::collection::vec(batch, 1..24);
        let lives = prop::collection::vec(batches, count);
        (Just(capacity as usize), lives)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn killed_writer_leaves_every_committed_frame(
        (capacity, lives) in lives(1),
        ends in prop::collection::vec((any::<Index>(), any::<Index>()), 6),
    ) {
        let dir = scratch();
        let mut disk = open(&dir, capacity);
        let start = Image::of(&dir);
        let life = live_on(&mut disk, &lives[0], 7);
        for (end, torn) in ends {
            let mut done = end.index(life.ops.len() + 1);
            let mut image = start.clone();
            for op in &life.ops[..done] {
                if let Op::Write(part, offset, bytes) = op {
                    image.write(*part, *offset, bytes);
                }
            }
            if let Some(Op::Write(part, offset, bytes)) = life.ops.get(done) {
                let mut whole = image.clone();
                whole.write(*part, *offset, bytes);
                image.write(*part, *offset, &bytes[..torn.index(bytes.len())]);
                // The bytes that are missing may be there already.
                done += usize::from(image == whole);
            }
            let crashed = image.put(&dir);
            let found = open(&crashed, capacity);
            let (claimed, committed) = life.ends(done, 0);
            let expected = claimed.saturating_sub(capacity as u64)..committed;
            prop_assert_eq!(found.live(), expected.start.min(committed)..committed);
            let numbers = life.writes.iter().flat_map(|it| it.ids.clone().zip(it.number..));
            let numbers = numbers.filter(|(id, _)| expected.contains(id));
            prop_assert_eq!(contents(&found), numbers.collect::<BTreeMap<_, _>>());
        }
    }

    #[test]
    fn power_cut_loses_no_flushed_frame_and_makes_none_up(
        (capacity, lives) in lives(4),
        ends in prop::collection::vec(any::<Index>(), 4),
        seed: u64,
    ) {
        use rand::{RngExt, SeedableRng};
        let mut rng = crate::env::EnvRng::seed_from_u64(seed);
        let mut dir = scratch();
        let (mut known, mut flushed) = (BTreeMap::new(), 0);
        for (round, (batches, end)) in lives.iter().zip(ends).enumerate() {
            let mut disk = open(&dir, capacity);
            let before = disk.live();
            let mut image = Image::of(&dir);
            let life = live_on(&mut disk, batches, 1 + 90 * round as u64);
            let done = end.index(life.ops.len() + 1);
            let mut unsynced: Vec<(FileKind, u64, &[u8])> = Vec::new();
            for op in &life.ops[..done] {
                match op {
                    Op::Write(part, offset, bytes) => unsynced.push((*part, *offset, bytes)),
                    Op::Sync(synced) => unsynced.retain(|(part, offset, bytes)| {
                        if part == synced {
                            image.write(*part, *offset, bytes);
                        }
                        part != synced
                    }),
                }
            }
            for (part, offset, bytes) in unsynced {
                let kept = match rng.random_range(0..3) {
                    0 => 0,
                    1 => rng.random_range(0..=bytes.len()),
                    _ => bytes.len(),
                };
                image.write(part, offset, &bytes[..kept]);
            }
            dir = image.put(&dir);
            let found = open(&dir, capacity);
            for write in &life.writes {
                known.extend(write.ids.clone().zip(write.number..));
            }
            let (claimed, committed) = life.ends(done, before.end);
            let live = found.live();
            prop_assert!(live.end <= committed, "{live:?} {committed}");
            for (id, number) in contents(&found) {
                prop_assert_eq!(known[&id], number, "frame {}", id);
            }
            let synced = life.flushes.iter().filter(|(_, ops)| *ops <= done);
            flushed = synced.map(|(end, _)| *end).fold(flushed, u64::max);
            let oldest = claimed.saturating_sub(capacity as u64).max(before.start);
            prop_assert!(
                flushed <= oldest || (live.start <= oldest && live.end >= flushed),
                "{live:?} lacks {oldest}..{flushed}"
            );
            flushed = flushed.min(live.end);
        }
    }

    #[test]
    fn cut_file_loses_only_frames_from_the_cut_on(
        (capacity, lives) in lives(1),
        part in 1..4_usize,
        len: Index,
    ) {
        let dir = scratch();
        let mut disk = open(&dir, capacity);
        live_on(&mut disk, &lives[0], 7);
        flush(&mut disk);
        let whole = contents(&disk);
        drop(disk);
        let file = File::options().write(true).open(path_of(dir.path(), PARTS[part])).unwrap();
        let len = len.index(file.metadata().unwrap().len() as usize);
        file.set_len(len as u64).unwrap();

        let found = open(&dir, capacity);
        let rows = (len / [8, WIDE, 8][part - 1]) as u64;
        let is_lost = |id: u64| id % capacity as u64 >= rows;
        let left = contents(&found);
        prop_assert!(left.iter().all(|(id, number)| whole[id] == *number && !is_lost(*id)));
        let ids: Vec<u64> = whole.keys().copied().filter(|id| !is_lost(*id)).collect();
        let run = ids.chunk_by(|a, b| a + 1 == *b).next().unwrap_or(&[]);
        prop_assert_eq!(left.into_keys().collect::<Vec<_>>(), run);
        drop(found);

        // What is written next is kept.
        let mut found = open(&dir, capacity);
        let next = write(&mut found, 1, 200).unwrap();
        drop(found);
        prop_assert_eq!(contents(&open(&dir, capacity))[&next.start], 200);
    }
}

#[test]
fn damaged_frame_after_the_flush_cuts_the_tail() {
    for part in PARTS.into_iter().skip(1) {
        for id in 12..18_u64 {
            let dir = scratch();
            let mut disk = open(&dir, 16);
            write(&mut disk, 12, 0).unwrap();
            flush(&mut disk);
            write(&mut disk, 6, 12).unwrap();
            drop(disk);
            let path = path_of(dir.path(), part);
            let file = File::options().read(true).write(true).open(path).unwrap();
            let row = if part == FileKind::Column(0) {
                WIDE as u64
            } else {
                8
            };
            let mut byte = [0];
            file.read_exact_at(&mut byte, id % 16 * row).unwrap();
            file.write_all_at(&[byte[0] ^ 4], id % 16 * row).unwrap();
            assert_eq!(open(&dir, 16).live(), 2..id, "{part:?}");
        }
    }
}

#[test]
fn damaged_header_is_refused_by_its_path() {
    let dir = scratch();
    drop(open(&dir, 4));
    let path = path_of(dir.path(), FileKind::Header);
    for (bytes, expected) in [
        (vec![7_u8; 100], "it is cut"),
        (vec![7; 1 << 14], "no whole"),
    ] {
        fs::write(&path, bytes).unwrap();
        let refused = Disk::open(dir.path(), &schema(), 4).err().unwrap();
        assert!(matches!(refused, Error::ReplayBufferDamaged { .. }));
        let message = refused.to_string();
        assert!(message.contains("header"), "{message}");
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn directory_begins_again_where_making_it_stopped() {
    let dir = scratch();
    drop(open(&dir, 4));
    fs::remove_file(dir.path().join("schema.json")).unwrap();
    let disk = open(&dir, 4);
    assert!(disk.live().is_empty());
    drop(disk);
    assert!(open(&dir, 4).live().is_empty());
}

/// They may be of another program, which has such names too.
#[test]
fn files_with_data_are_kept_where_there_is_no_schema() {
    let years = "collected for years".repeat(HEADER_BYTES)[..HEADER_BYTES].to_owned();
    for name in ["stamps", "header", "column-0"] {
        let dir = scratch();
        // Another program may have files without data, too.
        fs::write(dir.path().join("column-1"), "").unwrap();
        fs::write(dir.path().join(name), &years).unwrap();
        let refused = Disk::open(dir.path(), &schema(), 4).err().unwrap();
        let refused = refused.to_string();
        assert!(refused.contains("it has data"), "{refused}");
        assert_eq!(fs::read_to_string(dir.path().join(name)).unwrap(), years);
    }
}

#[test]
fn failed_write_loses_what_it_was_to_replace_alone() {
    let dir = scratch();
    let mut disk = open(&dir, 4);
    write(&mut disk, 4, 0).unwrap();
    let swap = |disk: &mut Disk, file: File| {
        let files = Arc::get_mut(&mut disk.files).unwrap();
        std::mem::replace(&mut files.columns[1], file)
    };
    let unwritable = File::open(path_of(dir.path(), FileKind::Column(1))).unwrap();
    let file = swap(&mut disk, unwritable);
    for _ in 0..2 {
        let refused = write(&mut disk, 2, 50).unwrap_err();
        assert!(matches!(refused, Error::ReplayBufferFile { .. }));
        assert_eq!(disk.live(), 2..4);
    }
    let image = Image::of(&dir);
    assert_eq!(open(&image.put(&dir), 4).live(), 2..4);

    swap(&mut disk, file);
    write(&mut disk, 1, 70).unwrap();
    assert_eq!(contents(&disk), [(2, 2), (3, 3), (4, 70)].into());
    drop(disk);
    assert_eq!(contents(&open(&dir, 4)), [(2, 2), (3, 3), (4, 70)].into());
}

#[test]
fn rows_of_a_failed_write_are_wiped_before_the_next() {
    let dir = scratch();
    let mut disk = open(&dir, 4);
    write(&mut disk, 4, 0).unwrap();
    let before = disk.header;
    write(&mut disk, 3, 50).unwrap();
    // As it is where the rows were written, and the commit was not.
    disk.header = RingHeader {
        committed: before.committed,
        ..disk.header
    };
    write(&mut disk, 1, 70).unwrap();
    let mut stamps = [0; 32];
    disk.files.read(FileKind::Stamps, 0, &mut stamps).unwrap();
    assert_eq!(stamps[8..24], [0; 16], "rows 1 and 2, of ids 5 and 6");
    assert_eq!(contents(&disk), [(3, 3), (4, 70)].into());
}
