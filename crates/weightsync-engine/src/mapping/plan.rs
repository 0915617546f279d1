//! What a mapping comes to for one layout: for each tensor that is made, the
//! pieces of the source that it is made of.

use std::collections::HashMap;

use weightsync_core::{Dtype, Layout, TensorRef};

use super::quantised::{self, Quantised};
use super::{MappingError, Pattern, Problem, Quantisation, Rule};
use crate::extract::is_float;

/// What a mapping comes to for one layout.
#[derive(Debug)]
pub(super) struct MappingPlan {
    pub(super) source: Layout,
    /// The tensors that are made, in order.
    pub(super) targets: Vec<TargetTensor>,
    /// Source tensors that are left out, each with the rule that says so.
    pub(super) dropped: Vec<(usize, usize)>,
    /// Rules that matched nothing.
    pub(super) unused: Vec<usize>,
    pub(super) problems: Vec<Problem>,
    /// How many tensors are quantised.
    pub(super) quantised: usize,
}

/// A tensor that is made.
#[derive(Clone, Debug)]
pub(super) struct TargetTensor {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    /// Where its elements come from; the pieces cover it and do not overlap.
    /// None if it is quantised.
    pub(super) pieces: Vec<SourcePiece>,
    /// What it is quantised from, or what its scales are of.
    pub(super) quantised: Option<Quantised>,
    /// The source tensors it was made of, also if they have no elements.
    pub(super) sources: Vec<usize>,
    /// The rules that were applied to it, in order.
    pub(super) rules: Vec<usize>,
}

/// A part of a source tensor and the place it takes in a target.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct SourcePiece {
    pub(super) source: usize,
    /// The source's dimension behind each dimension of the target.
    order: Vec<usize>,
    /// The first element along each dimension of the source.
    starts: Vec<u64>,
    /// Its own shape, as the target's dimensions go.
    shape: Vec<u64>,
    /// Its first element in the target.
    at: Vec<u64>,
}

impl MappingPlan {
    pub(super) fn new(rules: &[Rule], source: &Layout) -> Self {
        // Each tensor of the source is a target of its own at first. The rules change the targets.
        let tensors = source.tensors().iter().enumerate();
        let mut plan = Self {
            source: source.clone(),
            targets: tensors
                .map(|(index, spec)| TargetTensor {
                    name: spec.name.clone(),
                    dtype: spec.dtype,
                    shape: spec.shape.clone(),
                    pieces: vec![SourcePiece::whole(index, &spec.shape)],
                    quantised: None,
                    sources: vec![index],
                    rules: Vec::new(),
                })
                .collect(),
            dropped: Vec::new(),
            unused: Vec::new(),
            problems: Vec::new(),
            quantised: 0,
        };
        // In order, each on what the rule before it left. Rules count from 1 in errors and reports.
        for (index, rule) in rules.iter().enumerate() {
            if !plan.apply(index + 1, rule) {
                plan.unused.push(index + 1);
            }
        }
        plan.check_names();
        plan
    }

    /// The layout of what is made.
    pub(super) fn layout(&self) -> Result<Layout, MappingError> {
        if !self.problems.is_empty() {
            return Err(MappingError::DoesNotFit(self.problems.clone()));
        }
        let specs = self.targets.iter();
        Layout::new(specs.map(|target| (target.name.clone(), target.dtype, target.shape.clone())))
            .map_err(|error| MappingError::DoesNotFit(vec![Problem::Layout(error)]))
    }

    /// Room for the scales of each tensor that is quantised, for one pass over the source.
    pub(super) fn no_scales(&self) -> Vec<quantised::Scales> {
        vec![quantised::Scales::new(); self.quantised]
    }

    /// Whether the rule matched anything.
    fn apply(&mut self, rule: usize, what: &Rule) -> bool {
        match what {
            Rule::Rename { from, to } => self.each(from, |target, star, _| {
                target.name = to.name(star);
                target.rules.push(rule);
            }),
            Rule::Cast { tensors, to } => self.cast(rule, tensors, *to),
            Rule::Transpose { tensors, order } => self.transpose(rule, tensors, order),
            Rule::Drop { tensors } => self.leave_out(rule, tensors),
            Rule::Fuse { parts, into, dim } => self.fuse(rule, parts, into, *dim),
            Rule::Split { tensor, into, dim } => self.split(rule, tensor, into, *dim),
            Rule::Quantise { tensors, to, scale } => self.quantise(rule, tensors, *to, scale),
        }
    }

    fn each(
        &mut self,
        pattern: &Pattern,
        mut apply: impl FnMut(&mut TargetTensor, &str, &mut Vec<Problem>),
    ) -> bool {
        let mut matched = false;
        for target in &mut self.targets {
            if let Some(star) = pattern.matches(&target.name).map(str::to_owned) {
                matched = true;
                apply(target, &star, &mut self.problems);
            }
        }
        matched
    }

    /// Casts floating-point tensors. Like each of the following, it says whether the rule matched
    /// anything.
    fn cast(&mut self, rule: usize, tensors: &Pattern, to: Dtype) -> bool {
        // A star takes what it can. A tensor that is named in full must be castable.
        let exact = !tensors.has_star();
        self.each(tensors, |target, _, problems| {
            if let Some(problem) = target.after_quantising(rule) {
                problems.extend(exact.then_some(problem));
            } else if is_float(target.dtype) {
                target.dtype = to;
                target.rules.push(rule);
            } else if exact {
                problems.push(Problem::Cast {
                    rule,
                    tensor: target.name.clone(),
                    from: target.dtype,
                    to,
                });
            }
        })
    }

    /// Puts the dimensions of tensors into another order.
    fn transpose(&mut self, rule: usize, tensors: &Pattern, order: &[usize]) -> bool {
        self.each(tensors, |target, _, problems| {
            let (tensor, shape) = (target.name.clone(), target.shape.clone());
            if let Some(problem) = target.after_quantising(rule) {
                problems.push(problem);
            } else if order.len() != shape.len() {
                let order = order.to_vec();
                problems.push(Problem::Rank {
                    rule,
                    tensor,
                    shape,
                    order,
                });
            } else if let Some(problem) = target.packed(rule) {
                problems.push(problem);
            } else {
                target.transpose(order);
                target.rules.push(rule);
            }
        })
    }

    /// Leaves tensors out.
    fn leave_out(&mut self, rule: usize, tensors: &Pattern) -> bool {
        let before = self.targets.len();
        let dropped = &mut self.dropped;
        self.targets.retain(|target| {
            let stays = tensors.matches(&target.name).is_none();
            if !stays {
                dropped.extend(target.sources.iter().map(|&source| (source, rule)));
            }
            stays
        });
        self.targets.len() != before
    }

    fn fuse(&mut self, rule: usize, parts: &[Pattern], into: &Pattern, dim: usize) -> bool {
        // The parts of each whole, by what the stars stand for, in the order of the first found.
        let mut stars: Vec<String> = Vec::new();
        let mut wholes: HashMap<String, Vec<Option<usize>>> = HashMap::new();
        for (index, target) in self.targets.iter().enumerate() {
            for (part, pattern) in parts.iter().enumerate() {
                if let Some(star) = pattern.matches(&target.name) {
                    let whole = wholes.entry(star.to_owned()).or_insert_with(|| {
                        stars.push(star.to_owned());
                        vec![None; parts.len()]
                    });
                    whole[part] = Some(index);
                }
            }
        }
        // A whole takes the place of its first part, so that names keep their order.
        let mut placed: HashMap<usize, TargetTensor> = HashMap::new();
        // The parts that a whole was made of are no targets any more.
        let mut gone = vec![false; self.targets.len()];
        for star in &stars {
            let found = &wholes[star];
            let into = into.name(star);
            let missing: Vec<_> = (found.iter().zip(parts))
                .filter(|(found, _)| found.is_none())
                .map(|(_, pattern)| pattern.name(star))
                .collect();
            if !missing.is_empty() {
                self.problems.push(Problem::PartsMissing {
                    rule,
                    into,
                    missing,
                });
                continue;
            }
            let found: Vec<usize> = found.iter().flatten().copied().collect();
            let fused = fused(rule, into, found.iter().map(|&at| &self.targets[at]), dim);
            match fused {
                Err(problem) => self.problems.push(problem),
                Ok(fused) => {
                    found.iter().for_each(|&at| gone[at] = true);
                    placed.extend(found.iter().min().map(|&first| (first, fused)));
                }
            }
        }
        let old = std::mem::take(&mut self.targets).into_iter().enumerate();
        self.targets = old
            .filter_map(|(at, target)| match gone[at] {
                true => placed.remove(&at),
                false => Some(target),
            })
            .collect();
        !stars.is_empty()
    }

    fn split(
        &mut self,
        rule: usize,
        tensor: &Pattern,
        into: &[(Pattern, u64)],
        dim: usize,
    ) -> bool {
        let mut matched = false;
        // Rebuilt in order, so that the parts take the place of the tensor.
        let mut targets = Vec::with_capacity(self.targets.len());
        for target in std::mem::take(&mut self.targets) {
            let Some(star) = tensor.matches(&target.name) else {
                targets.push(target);
                continue;
            };
            matched = true;
            match split(rule, &target, star, into, dim) {
                Ok(parts) => targets.extend(parts),
                Err(problem) => {
                    self.problems.push(problem);
                    targets.push(target);
                }
            }
        }
        self.targets = targets;
        matched
    }

    fn quantise(&mut self, rule: usize, tensors: &Pattern, to: Quantisation, scale: &str) -> bool {
        let mut matched = false;
        let mut targets = Vec::with_capacity(self.targets.len());
        for target in std::mem::take(&mut self.targets) {
            if tensors.matches(&target.name).is_none() {
                targets.push(target);
                continue;
            }
            match quantised::pair(rule, &target, to, scale, self.quantised) {
                Ok(pair) => {
                    targets.extend(pair);
                    self.quantised += 1;
                    matched = true;
                }
                Err(problem) => {
                    // Under a star, what cannot be quantised stays.
                    if !tensors.has_star() {
                        self.problems.push(problem);
                        matched = true;
                    }
                    targets.push(target);
                }
            }
        }
        self.targets = targets;
        matched
    }

    fn check_names(&mut self) {
        // Only at the end: a later rule may rename one of two targets with one name.
        let mut by_name: HashMap<&str, Vec<&TargetTensor>> = HashMap::new();
        for target in &self.targets {
            by_name.entry(&target.name).or_default().push(target);
        }
        let same: Vec<_> = by_name
            .into_values()
            .filter(|targets| targets.len() > 1)
            .collect();
        let name_of = |&index: &usize| self.source.tensors()[index].name.clone();
        let mut problems: Vec<_> = same
            .into_iter()
            .map(|targets| {
                let sources = targets.iter().flat_map(|target| &target.sources);
                let sources = sources.map(name_of).collect();
                let name = targets[0].name.clone();
                Problem::SameName { name, sources }
            })
            .collect();
        // A map has no order, and errors are to be the same each time.
        problems.sort_by_key(ToString::to_string);
        self.problems.extend(problems);
    }
}

impl TargetTensor {
    /// The source tensor of which it is the whole or the first part, dtype aside.
    pub(super) fn as_it_is(&self) -> Option<usize> {
        let piece = self.whole()?;
        piece.is_as_it_is().then_some(piece.source)
    }

    /// The piece, if there is only one.
    pub(super) fn whole(&self) -> Option<&SourcePiece> {
        match &self.pieces[..] {
            [piece] if piece.shape == self.shape => Some(piece),
            _ => None,
        }
    }

    /// What is wrong with a rule for it that is neither a rename nor a drop, if it is quantised.
    pub(super) fn after_quantising(&self, rule: usize) -> Option<Problem> {
        let by = self.quantised.as_ref()?.rule;
        let tensor = self.name.clone();
        Some(Problem::Quantised { rule, tensor, by })
    }

    /// Writes the elements as `dtype` into a place of exactly their length, given
    /// the source tensors behind the pieces.
    pub(super) fn write(
        &self,
        place: &mut [u8],
        piece: &SourcePiece,
        source: &TensorRef<'_>,
    ) -> Result<(), weightsync_mem::BoxedError> {
        if piece.shape.contains(&0) {
            return Ok(());
        }
        // The usual piece is a whole tensor, and is written in one.
        if self.whole().is_some() && piece.is_as_it_is() && source.shape() == self.shape {
            return Ok(source.write_into(place, self.dtype)?);
        }
        // From here inwards the piece takes all of the target, so it lies there in one.
        let differs = piece
            .shape
            .iter()
            .zip(&self.shape)
            .rposition(|(own, all)| own != all);
        // Dimensions before this one are counted through one index at a time.
        let inner = differs.unwrap_or(0);
        let size = self
            .dtype
            .bytes()
            .ok_or("packed elements can only stay as they are")?;
        let row = self.shape[inner.min(self.shape.len())..]
            .iter()
            .skip(1)
            .product::<u64>();
        let lens = &piece.shape[inner..];
        // What one turn of the loop writes.
        let bytes = lens.iter().product::<u64>() * u64::from(size);
        let mut outer = vec![0; inner];
        loop {
            // Each turn writes one run of bytes: the inner dimensions at one index of the outer
            // ones.
            let (starts, at) = self.run_of(piece, &outer, row);
            let start = (at * u64::from(size)) as usize;
            let place = place
                .get_mut(start..start + bytes as usize)
                .ok_or("the place is shorter than the tensor")?;
            source
                .view(&piece.order[inner..], &starts, lens)?
                .write_into(place, self.dtype)?;
            // The next index, as an odometer counts.
            let Some(dim) = (0..inner).rfind(|&dim| outer[dim] + 1 < piece.shape[dim]) else {
                return Ok(());
            };
            outer[dim] += 1;
            outer[dim + 1..].fill(0);
        }
    }

    /// Where the run of a piece at this index of the outer dimensions begins in the source, and in
    /// the target. `row` is the number of elements behind the first inner dimension.
    fn run_of(&self, piece: &SourcePiece, outer: &[u64], row: u64) -> (Vec<u64>, u64) {
        let inner = outer.len();
        let mut starts = piece.starts.clone();
        let mut at = 0;
        for dim in 0..inner {
            starts[piece.order[dim]] += outer[dim];
            at = at * self.shape[dim] + piece.at[dim] + outer[dim];
        }
        // Counted in elements: the row-major place of the run's first element.
        if let Some(&len) = self.shape.get(inner) {
            at = (at * len + piece.at[inner]) * row;
        }
        (starts, at)
    }

    /// Why nothing can be added to it along this dimension.
    fn cannot_grow(&self, rule: usize, dim: usize) -> Option<Problem> {
        match self.length(rule, dim) {
            Ok(_) => self.packed(rule),
            Err(problem) => Some(problem),
        }
    }

    /// Its length along this dimension, if it has that dimension.
    fn length(&self, rule: usize, dim: usize) -> Result<u64, Problem> {
        let length = self.shape.get(dim).copied();
        length.ok_or_else(|| Problem::Dim {
            rule,
            tensor: self.name.clone(),
            shape: self.shape.clone(),
            dim,
        })
    }

    /// Why it has no parts: several of its elements lie in one byte.
    fn packed(&self, rule: usize) -> Option<Problem> {
        let dtype = self.dtype;
        dtype.bytes().is_none().then(|| Problem::Packed {
            rule,
            tensor: self.name.clone(),
            dtype,
        })
    }

    /// Adds a part along this dimension.
    fn append(&mut self, part: &Self, dim: usize) {
        // The next part begins where the tensor ends so far.
        let start = self.shape[dim];
        self.shape[dim] = start.saturating_add(part.shape[dim]);
        self.pieces
            .extend(part.pieces.iter().cloned().map(|mut piece| {
                piece.at[dim] = piece.at[dim].saturating_add(start);
                piece
            }));
        self.sources.extend(&part.sources);
        self.rules.extend(&part.rules);
    }

    fn transpose(&mut self, order: &[usize]) {
        // Nothing is moved here: the pieces note in which order they are read.
        self.shape = permuted(&self.shape, order);
        for piece in &mut self.pieces {
            piece.order = permuted(&piece.order, order);
            piece.shape = permuted(&piece.shape, order);
            piece.at = permuted(&piece.at, order);
        }
    }

    /// The part of it from `start` on, `len` long, along a dimension.
    pub(super) fn narrowed(&self, dim: usize, start: u64, len: u64) -> Self {
        let mut part = self.clone();
        part.shape[dim] = len;
        // Pieces outside the range are left out; those that cross its ends are cut.
        part.pieces.retain_mut(|piece| {
            // What of the piece lies within the range, by its place in the tensor.
            let first = piece.at[dim].max(start);
            let end = piece.at[dim]
                .saturating_add(piece.shape[dim])
                .min(start.saturating_add(len));
            piece.starts[piece.order[dim]] += first.saturating_sub(piece.at[dim]);
            piece.shape[dim] = end.saturating_sub(first);
            piece.at[dim] = first.saturating_sub(start);
            first < end
        });
        part
    }
}

impl SourcePiece {
    fn whole(source: usize, shape: &[u64]) -> Self {
        Self {
            source,
            order: (0..shape.len()).collect(),
            starts: vec![0; shape.len()],
            shape: shape.to_vec(),
            at: vec![0; shape.len()],
        }
    }

    /// Whether it begins where its source does, with the dimensions in order. If
    /// it is all of a target, it is then all of the source or its first part.
    fn is_as_it_is(&self) -> bool {
        self.starts.iter().all(|&start| start == 0)
            && self.order.iter().copied().eq(0..self.order.len())
    }

    /// The part of a source tensor that it is.
    pub(super) fn view<'b>(
        &'b self,
        source: &TensorRef<'b>,
    ) -> Result<TensorRef<'b>, weightsync_core::extract::ExtractError> {
        source.view(&self.order, &self.starts, &self.shape)
    }
}

fn fused<'a>(
    rule: usize,
    name: String,
    parts: impl Iterator<Item = &'a TargetTensor> + Clone,
    dim: usize,
) -> Result<TargetTensor, Problem> {
    if let Some(problem) = parts.clone().find_map(|part| part.after_quantising(rule)) {
        return Err(problem);
    }
    let mut all = parts;
    // The first part grows into the whole.
    let first = all.clone().next().cloned();
    let mut whole = first.unwrap_or_else(|| unreachable!("a fuse has parts"));
    let without = |shape: &[u64]| {
        let mut shape = shape.to_vec();
        shape[dim] = 0;
        shape
    };
    if let Some(problem) = whole.cannot_grow(rule, dim) {
        return Err(problem);
    }
    let (first_name, first_shape) = (whole.name.clone(), whole.shape.clone());
    all.next();
    for part in all {
        let same_rank = part.shape.len() == whole.shape.len();
        if part.dtype != whole.dtype || !same_rank || without(&part.shape) != without(&first_shape)
        {
            return Err(Problem::PartsDiffer {
                rule,
                first: first_name,
                first_kind: Box::new((whole.dtype, first_shape)),
                second: part.name.clone(),
                second_kind: Box::new((part.dtype, part.shape.clone())),
            });
        }
        whole.append(part, dim);
    }
    // Each rule is named once, and this one last.
    whole.rules.sort_unstable();
    whole.rules.dedup();
    whole.rules.push(rule);
    // What has no elements takes no place; a whole made of nothing stays one.
    if !whole.shape.contains(&0) {
        whole.pieces.retain(|piece| !piece.shape.contains(&0));
    }
    whole.name = name;
    Ok(whole)
}

fn split(
    rule: usize,
    target: &TargetTensor,
    star: &str,
    into: &[(Pattern, u64)],
    dim: usize,
) -> Result<Vec<TargetTensor>, Problem> {
    let tensor = target.name.clone();
    if let Some(problem) = target.after_quantising(rule) {
        return Err(problem);
    }
    if let Some(problem) = target.packed(rule) {
        return Err(problem);
    }
    let expected = target.length(rule, dim)?;
    let got = into
        .iter()
        .fold(0_u64, |sum, (_, len)| sum.saturating_add(*len));
    if got != expected {
        return Err(Problem::Lengths {
            rule,
            tensor,
            expected,
            got,
        });
    }
    let mut start = 0;
    let parts = into.iter().map(|(name, len)| {
        let mut part = target.narrowed(dim, start, *len);
        start = start.saturating_add(*len);
        part.name = name.name(star);
        part.rules.push(rule);
        part
    });
    Ok(parts.collect())
}

fn permuted<T: Copy>(values: &[T], order: &[usize]) -> Vec<T> {
    order.iter().map(|&from| values[from]).collect()
}
