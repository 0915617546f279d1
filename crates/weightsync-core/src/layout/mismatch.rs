//! The difference between two layouts, in sentences that a person can act on.

use std::fmt;

use super::Layout;
use crate::dtype::Dtype;

/// How many names of each kind a message lists before it counts the rest.
const NAMES_SHOWN: usize = 8;

/// Every way in which a layout differs from the one that was expected.
///
/// The lists are complete and in layout order; the message shows the first few of each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LayoutMismatch {
    /// Names that were expected and are absent.
    pub missing: Vec<String>,
    /// Names that are there and were not expected.
    pub unknown: Vec<String>,
    /// Tensors of the expected name and another shape.
    pub shapes: Vec<ShapeDifference>,
    /// Tensors of the expected name and another dtype.
    pub dtypes: Vec<DtypeDifference>,
    /// The first place where the order differs, if both have the same names.
    pub order: Option<Box<OrderDifference>>,
}

/// A tensor whose shape is not the expected one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShapeDifference {
    /// The tensor.
    pub name: String,
    /// The shape it should have.
    pub expected: Vec<u64>,
    /// The shape it has.
    pub got: Vec<u64>,
}

/// A tensor whose dtype is not the expected one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DtypeDifference {
    /// The tensor.
    pub name: String,
    /// The dtype it should have.
    pub expected: Dtype,
    /// The dtype it has.
    pub got: Dtype,
}

/// The first position at which two orders of the same names differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OrderDifference {
    /// The position, from 0.
    pub position: usize,
    /// The name that should be there.
    pub expected: String,
    /// The name that is there.
    pub got: String,
}

impl Layout {
    /// Compares what came with what was expected.
    ///
    /// ```
    /// use weightsync_core::{Dtype, Layout};
    ///
    /// let expected = Layout::new([("bias".to_owned(), Dtype::F32, vec![8])])?;
    /// let got = Layout::new([("bias".to_owned(), Dtype::F32, vec![9])])?;
    /// let mismatch = Layout::compare(&expected, &got).unwrap_err();
    /// assert_eq!(
    ///     mismatch.to_string(),
    ///     "layouts differ: 1 with another shape: \"bias\" (expected [8], got [9])",
    /// );
    /// # Ok::<(), weightsync_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// A [`LayoutMismatch`] unless the two are equal.
    pub fn compare(expected: &Layout, got: &Layout) -> Result<(), LayoutMismatch> {
        if expected == got {
            return Ok(());
        }
        let mut mismatch = LayoutMismatch::default();
        for tensor in expected.tensors() {
            let name = || tensor.name.clone();
            // By name, not by position: one tensor too many would otherwise make all after it
            // differ.
            let Some(other) = got.tensor(&tensor.name) else {
                mismatch.missing.push(name());
                continue;
            };
            if other.shape != tensor.shape {
                mismatch.shapes.push(ShapeDifference {
                    name: name(),
                    expected: tensor.shape.clone(),
                    got: other.shape.clone(),
                });
            }
            if other.dtype != tensor.dtype {
                mismatch.dtypes.push(DtypeDifference {
                    name: name(),
                    expected: tensor.dtype,
                    got: other.dtype,
                });
            }
        }
        mismatch.unknown = got
            .tensors()
            .iter()
            .filter(|tensor| expected.index_of(&tensor.name).is_none())
            .map(|tensor| tensor.name.clone())
            .collect();
        // With different names an order says nothing.
        if mismatch.missing.is_empty() && mismatch.unknown.is_empty() {
            mismatch.order = first_order_difference(expected, got);
        }
        Err(mismatch)
    }
}

fn first_order_difference(expected: &Layout, got: &Layout) -> Option<Box<OrderDifference>> {
    let pairs = expected.tensors().iter().zip(got.tensors());
    pairs
        .enumerate()
        .find(|(_, (expected, got))| expected.name != got.name)
        .map(|(position, (expected, got))| {
            Box::new(OrderDifference {
                position,
                expected: expected.name.clone(),
                got: got.name.clone(),
            })
        })
}

/// The parts of names that a module gets which PyTorch has wrapped, and what wraps so.
const WRAPPERS: &[(&str, &str)] = &[
    ("_orig_mod", "torch.compile"),
    ("module", "DistributedDataParallel"),
    ("_fsdp_wrapped_module", "FullyShardedDataParallel"),
    ("_checkpoint_wrapped_module", "checkpoint_wrapper"),
];

/// Names with parts of wrappers which the names of the other side do not have.
struct Wrapped {
    /// Whether these are the names that were expected.
    is_expected: bool,
    /// Those parts and what adds each, in the order of the names.
    parts: Vec<(&'static str, &'static str)>,
    /// Where the module inside is, if all of the names begin with that.
    inside: Option<String>,
}

impl LayoutMismatch {
    /// The floating-point dtype that all tensors of another dtype were expected to have: what a
    /// cast would make right. None where that is not all that differs.
    pub fn wanted_float(&self) -> Option<Dtype> {
        let float = |dtype| matches!(dtype, Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16);
        let wanted = self.dtypes.first()?.expected;
        let fits = |one: &DtypeDifference| one.expected == wanted && float(one.got);
        let alone = self.missing.is_empty() && self.unknown.is_empty() && self.shapes.is_empty();
        (alone && float(wanted) && self.dtypes.iter().all(fits)).then_some(wanted)
    }

    /// The sides whose names have parts of wrappers, if nothing else differs in the names.
    fn wrapped(&self) -> Vec<Wrapped> {
        // Sorted by what is left without the parts of wrappers, the names of both sides pair up.
        let by_bare = |names: &'_ [String]| {
            let mut names: Vec<_> = names
                .iter()
                .map(|name| (bare(name), name.clone()))
                .collect();
            names.sort_unstable();
            names
        };
        let (expected, got) = (by_bare(&self.missing), by_bare(&self.unknown));
        let same = expected.iter().map(|(bare, _)| bare);
        // Something else differs as well, so a hint about wrappers would lead astray.
        if !same.eq(got.iter().map(|(bare, _)| bare)) {
            return Vec::new();
        }
        let sides = [(true, &expected, &got), (false, &got, &expected)];
        let sides = sides.map(|(is_expected, own, others)| {
            let pairs = own.iter().zip(others);
            let pairs = pairs.map(|((_, own), (_, other))| (own.as_str(), other.as_str()));
            Wrapped::of(is_expected, &pairs.collect::<Vec<_>>())
        });
        sides.into_iter().flatten().collect()
    }

    /// Whether the tensors are the same and only their order differs.
    pub fn is_order_alone(&self) -> bool {
        self.missing.is_empty()
            && self.unknown.is_empty()
            && self.shapes.is_empty()
            && self.dtypes.is_empty()
    }
}

impl std::error::Error for LayoutMismatch {}

impl fmt::Display for LayoutMismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("layouts differ")?;
        let mut separator = ": ";
        let mut section = |f: &mut fmt::Formatter<'_>| {
            f.write_str(separator)?;
            separator = "; ";
            Ok(())
        };
        if !self.missing.is_empty() {
            section(f)?;
            write_list(f, "missing", &self.missing, |f, name| write!(f, "{name:?}"))?;
        }
        if !self.unknown.is_empty() {
            section(f)?;
            write_list(f, "unknown", &self.unknown, |f, name| write!(f, "{name:?}"))?;
        }
        if !self.shapes.is_empty() {
            section(f)?;
            write_list(f, "with another shape", &self.shapes, |f, difference| {
                let ShapeDifference {
                    name,
                    expected,
                    got,
                } = difference;
                write!(f, "{name:?} (expected {expected:?}, got {got:?})")
            })?;
        }
        if !self.dtypes.is_empty() {
            section(f)?;
            write_list(f, "with another dtype", &self.dtypes, |f, difference| {
                let DtypeDifference {
                    name,
                    expected,
                    got,
                } = difference;
                write!(f, "{name:?} (expected {expected}, got {got})")
            })?;
        }
        if let Some(OrderDifference {
            position,
            expected,
            got,
        }) = self.order.as_deref()
        {
            section(f)?;
            write!(
                f,
                "in another order: tensor {position} should be {expected:?}, is {got:?}"
            )?;
        }
        for wrapped in self.wrapped() {
            section(f)?;
            write!(f, "{wrapped}")?;
        }
        Ok(())
    }
}

impl Wrapped {
    /// What one side's names have, each with its name on the other side. None, if they have no part
    /// of a wrapper more often than that.
    fn of(is_expected: bool, pairs: &[(&str, &str)]) -> Option<Self> {
        let count = |name: &str, part| name.split('.').filter(|one| *one == part).count();
        let added = |part| {
            let mut pairs = pairs.iter();
            pairs.any(|(own, other)| count(own, part) > count(other, part))
        };
        let mut parts: Vec<_> = WRAPPERS.iter().filter(|(part, _)| added(*part)).collect();
        let is_of = |part: &&str| parts.iter().any(|(one, _)| one == part);
        let inside = |name: &'_ str| {
            let all: Vec<_> = name.split('.').collect();
            // The module inside begins behind the last part of a wrapper.
            let last = all.iter().rposition(&is_of)?;
            Some(all[..=last].join("."))
        };
        let (first, _) = pairs.first()?;
        // A hint at one module is right only if every name is inside of it.
        let same = inside(first).filter(|first| {
            let mut names = pairs.iter().map(|(own, _)| inside(own));
            names.all(|one| one.as_ref() == Some(first))
        });
        parts.sort_by_key(|(part, _)| first.split('.').position(|one| one == *part));
        let parts: Vec<_> = parts.into_iter().copied().collect();
        (!parts.is_empty()).then_some(Self {
            is_expected,
            parts,
            inside: same,
        })
    }
}

impl fmt::Display for Wrapped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whose = if self.is_expected { "expected" } else { "got" };
        write!(f, "the names {whose} have ")?;
        for (position, (part, adds)) in self.parts.iter().enumerate() {
            let separator = if position > 0 { " and " } else { "" };
            write!(f, "{separator}{part:?} (of {adds})")?;
        }
        f.write_str(" in them, as those of a wrapped module: ")?;
        match &self.inside {
            Some(inside) => write!(
                f,
                "pass the module inside (model.{inside}), or rename by a mapping"
            ),
            None => f.write_str("rename by a mapping"),
        }
    }
}

/// A dotted name without the parts of wrappers.
fn bare(name: &str) -> String {
    let is_own = |part: &&str| WRAPPERS.iter().all(|(one, _)| one != part);
    let parts: Vec<_> = name.split('.').filter(is_own).collect();
    parts.join(".")
}

/// Writes `2 missing: "a", "b"`, or `9 missing: …, … and 1 more`.
fn write_list<T>(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    items: &[T],
    write_item: impl Fn(&mut fmt::Formatter<'_>, &T) -> fmt::Result,
) -> fmt::Result {
    write!(f, "{} {what}: ", items.len())?;
    for (position, item) in items.iter().take(NAMES_SHOWN).enumerate() {
        if position > 0 {
            f.write_str(", ")?;
        }
        write_item(f, item)?;
    }
    match items.len().saturating_sub(NAMES_SHOWN) {
        0 => Ok(()),
        more => write!(f, " … and {more} more"),
    }
}
