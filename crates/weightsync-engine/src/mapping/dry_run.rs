//! What a mapping would do, tensor by tensor, without doing it.

use std::collections::HashMap;
use std::fmt;

use weightsync_core::Layout;
use weightsync_core::layout::{DtypeDifference, ShapeDifference};

use super::plan::MappingPlan;
use super::{Problem, Rule};

/// What a mapping would do. The lists are complete.
#[non_exhaustive]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DryRun {
    /// What happens to every tensor of the source, in its order.
    pub tensors: Vec<TensorOutcome>,
    /// What would be made and has no place in the target.
    pub unmatched: Vec<String>,
    /// What the target has room for and would not get.
    pub missing: Vec<String>,
    /// What would have another shape than the target's.
    pub shapes: Vec<ShapeDifference>,
    /// What would have another dtype than the target's.
    pub dtypes: Vec<DtypeDifference>,
    /// Rules that do not fit the tensors they match.
    pub problems: Vec<Problem>,
    /// Rules that match no tensor, counted from 1, in their own words.
    pub unused: Vec<(usize, String)>,
}

/// What happens to one tensor of the source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorOutcome {
    /// The tensor.
    pub name: String,
    /// What it would be, or be a part of; nothing if it is dropped.
    pub becomes: Vec<String>,
    /// The rules that would be applied to it, counted from 1.
    pub rules: Vec<usize>,
}

impl DryRun {
    pub(super) fn new(rules: &[Rule], source: &Layout, target: &Layout) -> Self {
        let plan = MappingPlan::new(rules, source);
        let mut run = Self {
            tensors: outcomes(&plan),
            problems: plan.problems.clone(),
            ..Self::default()
        };
        let unused = plan.unused.iter();
        run.unused = unused
            .map(|&rule| (rule, rules[rule - 1].to_string()))
            .collect();

        // Every target with the room that the model has for it, by name.
        let mut made = HashMap::with_capacity(plan.targets.len());
        for tensor in &plan.targets {
            made.insert(tensor.name.as_str(), ());
            let Some(room) = target.tensor(&tensor.name) else {
                run.unmatched.push(tensor.name.clone());
                continue;
            };
            if room.shape != tensor.shape {
                run.shapes.push(ShapeDifference {
                    name: tensor.name.clone(),
                    expected: room.shape.clone(),
                    got: tensor.shape.clone(),
                });
            }
            if room.dtype != tensor.dtype {
                run.dtypes.push(DtypeDifference {
                    name: tensor.name.clone(),
                    expected: room.dtype,
                    got: tensor.dtype,
                });
            }
        }
        // Room that nothing is made for.
        let names = target.tensors().iter().map(|room| &room.name);
        let missing = names.filter(|name| !made.contains_key(name.as_str()));
        run.missing = missing.cloned().collect();
        run
    }

    /// Whether every tensor that is made has its place, and every place its
    /// tensor. Unused rules do not count.
    pub fn is_complete(&self) -> bool {
        self.unmatched.is_empty()
            && self.missing.is_empty()
            && self.shapes.is_empty()
            && self.dtypes.is_empty()
            && self.problems.is_empty()
    }
}

fn outcomes(plan: &MappingPlan) -> Vec<TensorOutcome> {
    let tensors = plan.source.tensors().iter();
    let mut outcomes: Vec<_> = tensors
        .map(|spec| TensorOutcome {
            name: spec.name.clone(),
            becomes: Vec::new(),
            rules: Vec::new(),
        })
        .collect();
    for target in &plan.targets {
        for &source in &target.sources {
            outcomes[source].becomes.push(target.name.clone());
            outcomes[source].rules.extend(&target.rules);
        }
    }
    // The rule that drops a tensor is part of what happens to it.
    for &(source, rule) in &plan.dropped {
        outcomes[source].rules.push(rule);
    }
    for outcome in &mut outcomes {
        outcome.rules.sort_unstable();
        // A rule that makes several tensors of one is named once.
        outcome.rules.dedup();
    }
    outcomes
}

impl DryRun {
    /// A line for each difference, and for each rule that matches nothing.
    pub(super) fn write_differences(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for name in &self.unmatched {
            writeln!(f, "! {name:?} has no place in the target")?;
        }
        for name in &self.missing {
            writeln!(f, "! {name:?} of the target gets nothing")?;
        }
        for ShapeDifference {
            name,
            expected,
            got,
        } in &self.shapes
        {
            writeln!(
                f,
                "! {name:?} would be {got:?}, the target has {expected:?}"
            )?;
        }
        for DtypeDifference {
            name,
            expected,
            got,
        } in &self.dtypes
        {
            writeln!(f, "! {name:?} would be {got}, the target has {expected}")?;
        }
        for problem in &self.problems {
            writeln!(f, "! {problem}")?;
        }
        for (number, rule) in &self.unused {
            writeln!(f, "? rule {number} ({rule}) matches nothing")?;
        }
        Ok(())
    }
}

impl fmt::Display for DryRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for outcome in &self.tensors {
            writeln!(f, "{outcome}")?;
        }
        self.write_differences(f)?;
        match self.is_complete() {
            true => f.write_str("complete: every tensor has its place"),
            false => f.write_str("not complete"),
        }
    }
}

impl fmt::Display for TensorOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rules: Vec<_> = self.rules.iter().map(ToString::to_string).collect();
        let by = match &rules[..] {
            [] => String::new(),
            [one] => format!(" (rule {one})"),
            _ => format!(" (rules {})", rules.join(", ")),
        };
        match &self.becomes[..] {
            [] => write!(f, "  {:?} is dropped{by}", self.name),
            [same] if *same == self.name => write!(f, "  {same:?}{by}"),
            names => write!(f, "  {:?} -> {}{by}", self.name, names.join(", ")),
        }
    }
}
