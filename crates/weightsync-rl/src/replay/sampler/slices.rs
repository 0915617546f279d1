//! Sampling slices of trajectories.

use std::collections::{HashMap, VecDeque};

use rand::RngExt;
use weightsync_engine::Dtype;

use super::{Drawn, Slices};
use crate::{Error, env::EnvRng, replay::Schema};

/// Where the steps of each trajectory are in the ring.
pub(super) struct TrajectoryIndex {
    settings: Slices,
    column: usize,
    /// A trajectory with fewer steps is not drawn.
    min_len: u64,
    by_number: HashMap<[u8; 8], usize>,
    all: Vec<Trajectory>,
    /// Entries of `all` that no trajectory uses.
    free: Vec<usize>,
    /// The trajectory and length of each run, in the order of the ring.
    runs: VecDeque<(usize, u64)>,
    /// The trajectories that are long enough, in no order.
    long_enough: Vec<usize>,
}

#[derive(Default)]
struct Trajectory {
    number: [u8; 8],
    runs: VecDeque<StepRun>,
    /// Its place in `long_enough`.
    place: Option<usize>,
}

/// Steps of one trajectory that were written one right after the other.
struct StepRun {
    first: u64,
    len: u64,
    /// How many steps of the trajectory were written before.
    step: u64,
}

impl TrajectoryIndex {
    pub fn new(settings: &Slices, schema: &Schema) -> Result<Self, Error> {
        let refuse = |reason| Err(Error::ReplaySettings { reason });
        let name = &settings.column;
        let Some(column) = schema.index(name) else {
            let names = schema.columns().iter().map(|column| column.name());
            let names: Vec<&str> = names.collect();
            return refuse(format!(
                "no column `{name}` numbers the trajectories: the columns are {names:?}"
            ));
        };
        let is_number = matches!(schema.columns()[column].dtype(), Dtype::U64 | Dtype::I64);
        // Numbers are compared as 8 bytes, so signed and unsigned ones are alike.
        if !is_number || schema.frame_bytes(column) != 8 {
            return refuse(format!(
                "column {} cannot number trajectories: it needs one U64 or I64 per frame",
                schema.columns()[column]
            ));
        }
        if settings.num_slices.is_none() && settings.slice_len.is_none() {
            return refuse("set `num_slices` or `slice_len` of its slices".to_owned());
        }
        if settings.num_slices == Some(0) || settings.slice_len == Some(0) {
            return refuse("`num_slices` and `slice_len` are at least 1".to_owned());
        }
        Ok(Self {
            settings: settings.clone(),
            column,
            min_len: 1,
            by_number: HashMap::new(),
            all: Vec::new(),
            free: Vec::new(),
            runs: VecDeque::new(),
            long_enough: Vec::new(),
        })
    }

    pub fn column(&self) -> usize {
        self.column
    }

    /// Frames behind all others, with the numbers of their trajectories.
    pub fn append(&mut self, mut first: u64, numbers: &[u8]) {
        let (numbers, _) = numbers.as_chunks::<8>();
        // Neighbours with one number are one run, and cost one entry.
        for run in numbers.chunk_by(|a, b| a == b) {
            let len = run.len() as u64;
            let which = self.trajectory(run[0]);
            let trajectory = &mut self.all[which];
            let step = trajectory.end();
            match self.runs.back_mut() {
                // The run that was written last goes on, so it only gets longer.
                Some((last, last_len)) if *last == which => {
                    *last_len += len;
                    if let Some(run) = trajectory.runs.back_mut() {
                        run.len += len;
                    }
                }
                _ => {
                    self.runs.push_back((which, len));
                    trajectory.runs.push_back(StepRun { first, len, step });
                }
            }
            first += len;
            self.settle(which);
        }
    }

    /// No frame that comes belongs to a trajectory that is here.
    pub fn end_all(&mut self) {
        self.by_number.clear();
    }

    /// The oldest `frames` frames go.
    pub fn evict(&mut self, mut frames: u64) {
        while frames > 0 {
            let Some((which, len)) = self.runs.front_mut() else {
                return;
            };
            // Runs are in the order of the ring, so the oldest is at the front.
            let cut = frames.min(*len);
            frames -= cut;
            *len -= cut;
            let (which, is_gone) = (*which, *len == 0);
            let trajectory = &mut self.all[which];
            if is_gone {
                self.runs.pop_front();
                trajectory.runs.pop_front();
            } else if let Some(run) = trajectory.runs.front_mut() {
                // The front of a run goes. `step` keeps the count of the whole trajectory.
                run.first += cut;
                run.step += cut;
                run.len -= cut;
            }
            if trajectory.runs.is_empty() {
                // A later trajectory may have the number.
                if self.by_number.get(&trajectory.number) == Some(&which) {
                    self.by_number.remove(&trajectory.number);
                }
                self.free.push(which);
            }
            self.settle(which);
        }
    }

    pub fn draw(&mut self, n: usize, rng: &mut EnvRng) -> Result<Drawn, Error> {
        let (slices, slice_len) = self.plan(n)?;
        let is_strict = self.settings.strict_len;
        // Without strictness a shorter trajectory will do, and is padded.
        self.require(if is_strict { slice_len as u64 } else { 1 });
        if self.long_enough.is_empty() {
            return Err(Error::NothingToSample {
                reason: format!(
                    "none of its {} trajectories has {slice_len} steps: write more frames, ask \
                     for shorter slices, or set `strict_len` to false",
                    self.all.len() - self.free.len()
                ),
            });
        }
        let mut ids = Vec::with_capacity(n);
        let mut mask = (!is_strict).then(|| vec![true; n]);
        for slice in 1..=slices {
            let which = self.long_enough[rng.random_range(0..self.long_enough.len())];
            let trajectory = &self.all[which];
            let steps = trajectory.len();
            let len = steps.min(slice_len as u64);
            let skipped = rng.random_range(0..=steps - len);
            trajectory.push_ids(skipped, len, &mut ids);
            let (real, padded) = (ids.len(), slice * slice_len);
            // Padding repeats the last step, so every id of a sample is of a frame that is there.
            if let (Some(mask), Some(&last)) = (&mut mask, ids.last()) {
                mask[real..padded].fill(false);
                ids.resize(padded, last);
            }
        }
        Ok(Drawn {
            ids,
            weights: None,
            mask,
        })
    }

    /// How many slices of how many steps `n` frames are.
    fn plan(&self, n: usize) -> Result<(usize, usize), Error> {
        let Slices {
            num_slices,
            slice_len,
            ..
        } = self.settings;
        let slices = num_slices
            .or_else(|| n.checked_div(slice_len?))
            .unwrap_or(0);
        let len = slice_len
            .or_else(|| n.checked_div(num_slices?))
            .unwrap_or(0);
        if n > 0 && slices.checked_mul(len) == Some(n) {
            Ok((slices, len))
        } else {
            Err(Error::SliceCount {
                frames: n,
                num_slices,
                slice_len,
            })
        }
    }

    /// Has only trajectories drawn that have this many steps.
    fn require(&mut self, min_len: u64) {
        // The number of steps changes only if a sample asks for other slices than the last.
        if self.min_len != min_len {
            self.min_len = min_len;
            for which in 0..self.all.len() {
                self.settle(which);
            }
        }
    }

    /// The entry of a trajectory, new if none of its frames is in the ring.
    fn trajectory(&mut self, number: [u8; 8]) -> usize {
        let (all, free) = (&mut self.all, &mut self.free);
        *self.by_number.entry(number).or_insert_with(|| {
            let which = free.pop().unwrap_or_else(|| {
                all.push(Trajectory::default());
                all.len() - 1
            });
            all[which].number = number;
            which
        })
    }

    /// Puts a trajectory among those that are long enough, or takes it out.
    fn settle(&mut self, which: usize) {
        let trajectory = &mut self.all[which];
        let is_long_enough = trajectory.len() >= self.min_len;
        match trajectory.place {
            None if is_long_enough => {
                trajectory.place = Some(self.long_enough.len());
                self.long_enough.push(which);
            }
            Some(place) if !is_long_enough => {
                trajectory.place = None;
                // The last entry moves into the gap, and is told its new place.
                self.long_enough.swap_remove(place);
                if let Some(&moved) = self.long_enough.get(place) {
                    self.all[moved].place = Some(place);
                }
            }
            _ => {}
        }
    }
}

impl Trajectory {
    /// Steps ever written.
    fn end(&self) -> u64 {
        self.runs.back().map_or(0, |run| run.step + run.len)
    }

    /// Steps in the ring.
    fn len(&self) -> u64 {
        self.end() - self.runs.front().map_or(0, |run| run.step)
    }

    /// The ids of `len` steps, after `skipped` ones.
    fn push_ids(&self, skipped: u64, mut len: u64, ids: &mut Vec<u64>) {
        let mut step = self.runs.front().map_or(0, |run| run.step) + skipped;
        // The runs are in the order of steps, so a binary search finds the first that matters.
        let run = self.runs.partition_point(|run| run.step + run.len <= step);
        for run in self.runs.range(run..) {
            let first = run.first + (step - run.step);
            // A slice may go on in the next run, where frames of other workers lie between.
            let taken = len.min(run.first + run.len - first);
            ids.extend(first..first + taken);
            step += taken;
            len -= taken;
            if len == 0 {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use rand::SeedableRng;

    use super::*;
    use crate::replay::Column;

    proptest! {
        #[test]
        fn index_matches_a_list_of_frames(
            batches in prop::collection::vec(prop::collection::vec(0..5_u64, 1..9), 1..40),
            capacity in 9..20_usize,
            slice_len in 1..6_usize,
            is_strict: bool,
        ) {
            let schema = Schema::new([Column::new("t", Dtype::U64, [])]).unwrap();
            let settings = Slices::of("t").slice_len(slice_len).strict_len(is_strict);
            let mut index = TrajectoryIndex::new(&settings, &schema).unwrap();
            let mut rng = EnvRng::seed_from_u64(1);
            let mut frames: VecDeque<(u64, u64)> = VecDeque::new();
            let mut next = 0;
            for batch in batches {
                let gone = (frames.len() + batch.len()).saturating_sub(capacity);
                index.evict(gone as u64);
                frames.drain(..gone);
                let bytes: Vec<u8> = batch.iter().flat_map(|it| it.to_le_bytes()).collect();
                index.append(next, &bytes);
                for number in batch {
                    frames.push_back((next, number));
                    next += 1;
                }

                let mut model: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
                for (id, number) in &frames {
                    model.entry(*number).or_default().push(*id);
                }
                prop_assert_eq!(index.by_number.len(), model.len());
                for (number, ids) in &model {
                    let trajectory = &index.all[index.by_number[&number.to_le_bytes()]];
                    let mut found = Vec::new();
                    trajectory.push_ids(0, trajectory.len(), &mut found);
                    prop_assert_eq!(&found, ids);
                }

                let min_len = if is_strict { slice_len } else { 1 };
                model.retain(|_, ids| ids.len() >= min_len);
                let drawn = index.draw(8 * slice_len, &mut rng);
                prop_assert_eq!(drawn.is_ok(), !model.is_empty());
                prop_assert_eq!(index.long_enough.len(), model.len());
                let Ok(drawn) = drawn else { continue };
                for (slice, ids) in drawn.ids.chunks(slice_len).enumerate() {
                    let real = match &drawn.mask {
                        None => slice_len,
                        Some(mask) => {
                            let mask = &mask[slice * slice_len..][..slice_len];
                            let real = mask.iter().filter(|is_real| **is_real).count();
                            prop_assert!(mask[..real].iter().all(|is_real| *is_real));
                            real
                        }
                    };
                    let steps = model.values().find(|steps| steps.contains(&ids[0])).unwrap();
                    prop_assert_eq!(real, slice_len.min(steps.len()));
                    let mut windows = steps.windows(real);
                    prop_assert!(windows.any(|window| window == &ids[..real]));
                    prop_assert!(ids[real..].iter().all(|id| *id == ids[real - 1]));
                }
            }
        }
    }
}
