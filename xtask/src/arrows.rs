//! `cargo xtask arrows`: the crate graph, held against the design's table.
//!
//! Two kinds of edges are judged: between crates of the workspace, and from a crate of the
//! workspace to one of the [`NAMED`] outside crates, whether it names that crate itself or reaches
//! it through small utility crates. Where a path meets another crate of the workspace, or a named
//! crate, it ends: what lies behind is that crate's own business. Development dependencies are
//! free.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::time::Instant;

use serde_json::Value;

use crate::error::Error;
use crate::places::Places;
use crate::step;

use Allowed::{Always, Optional};

/// Outside crates that shape what depends on them: only the crates of [`TABLE`] that list one may
/// reach it.
const NAMED: &[&str] = &["axum", "candle", "object_store", "pyo3", "rustls", "tokio"];

/// The design's table, one row a crate.
const TABLE: &[Row] = &[
    Row {
        name: "weightsync-simd",
        may_use: &[],
    },
    Row {
        name: "weightsync-core",
        may_use: &[("weightsync-simd", Always)],
    },
    Row {
        name: "weightsync-mem",
        may_use: &[("weightsync-core", Always), ("weightsync-simd", Always)],
    },
    Row {
        name: "weightsync-engine",
        may_use: &[
            ("weightsync-core", Always),
            ("weightsync-mem", Always),
            ("candle", Optional),
        ],
    },
    Row {
        name: "weightsync-link",
        may_use: &[
            ("weightsync-simd", Always),
            ("weightsync-core", Always),
            ("weightsync-mem", Always),
            ("weightsync-engine", Always),
            ("tokio", Always),
            ("rustls", Always),
        ],
    },
    Row {
        name: "weightsync-net",
        may_use: &[
            ("weightsync-simd", Always),
            ("weightsync-core", Always),
            ("weightsync-mem", Always),
            ("weightsync-engine", Always),
            ("weightsync-link", Always),
            ("tokio", Always),
        ],
    },
    Row {
        name: "weightsync-store",
        may_use: &[
            ("weightsync-simd", Always),
            ("weightsync-core", Always),
            ("weightsync-engine", Always),
            ("object_store", Optional),
            ("tokio", Optional),
        ],
    },
    Row {
        name: "weightsync-serve",
        may_use: &[
            ("weightsync-simd", Always),
            ("weightsync-core", Always),
            ("weightsync-mem", Always),
            ("weightsync-engine", Always),
            ("weightsync-link", Always),
            // For the scheme `distributed`, by which a synchronizer sends to its explorers.
            ("weightsync-net", Always),
            ("weightsync-store", Always),
            ("tokio", Always),
            ("axum", Always),
        ],
    },
    Row {
        name: "weightsync-rl",
        may_use: &[
            ("weightsync-engine", Always),
            ("weightsync-net", Optional),
            ("candle", Optional),
        ],
    },
    Row {
        name: "weightsync-python",
        may_use: &[
            ("weightsync-simd", Always),
            ("weightsync-core", Always),
            ("weightsync-mem", Always),
            ("weightsync-engine", Always),
            ("weightsync-link", Always),
            ("weightsync-net", Always),
            ("weightsync-store", Always),
            ("weightsync-serve", Always),
            ("weightsync-rl", Always),
            // The command's subcommands are in the Python package too: decision 21.
            ("weightsync-cli", Always),
            ("pyo3", Always),
        ],
    },
    // The front door: what people depend on.
    Row {
        name: "weightsync",
        may_use: &[
            ("weightsync-engine", Always),
            ("weightsync-net", Optional),
            ("weightsync-serve", Optional),
            ("weightsync-store", Optional),
        ],
    },
    Row {
        name: "weightsync-cli",
        may_use: &[
            ("weightsync-simd", Always),
            ("weightsync-core", Always),
            ("weightsync-mem", Always),
            ("weightsync-engine", Always),
            ("weightsync-link", Optional),
            ("weightsync-net", Optional),
            ("weightsync-store", Always),
            ("weightsync-serve", Always),
            ("weightsync-rl", Optional),
        ],
    },
];

/// These may use anything, and no crate of the table may use them.
const FREE: &[&str] = &[
    "weightsync-bench",
    "weightsync-conformance",
    "weightsync-fuzz",
    "xtask",
];

/// What one crate may use of the workspace and of [`NAMED`].
struct Row {
    name: &'static str,
    may_use: &'static [(&'static str, Allowed)],
}

/// In which form an edge is allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Allowed {
    Always,
    /// Behind a feature.
    Optional,
}

/// An edge, or the lack of a row, that the table does not allow.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Violation {
    /// The crate has no row.
    NoRow {
        /// The crate.
        package: String,
    },
    /// The crate reaches what its row does not list.
    NotAllowed {
        /// From the crate to what it reaches, with the crates between.
        path: Vec<String>,
    },
    /// The crate reaches, without a feature, what its row allows behind one.
    NotOptional {
        /// From the crate to what it reaches, with the crates between.
        path: Vec<String>,
    },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::NoRow { package } => write!(f, "{package}: has no row in the table"),
            Violation::NotAllowed { path } => write!(f, "{}: not in its row", path.join(" → ")),
            Violation::NotOptional { path } => {
                write!(f, "{}: allowed behind a feature only", path.join(" → "))
            }
        }
    }
}

/// Reads `cargo metadata` with every feature on and judges its edges.
pub fn run(places: &Places) -> Result<std::time::Duration, Error> {
    let begun = Instant::now();
    let mut metadata = places.cargo();
    metadata.args([
        "metadata",
        "--format-version=1",
        "--all-features",
        "--locked",
        "--quiet",
    ]);
    let text = step::output(&mut metadata, "cargo metadata")?;
    let json = serde_json::from_str(&text).map_err(|_| unreadable("it is not JSON"))?;
    let graph = Graph::parse(&json)?;
    let violations = graph.judge();
    if !violations.is_empty() {
        return Err(Error::Arrows(violations));
    }
    let took = begun.elapsed();
    let crates = graph.members.len();
    eprintln!("── arrows: {crates} crates: ok, {}", step::seconds(took));
    Ok(took)
}

/// The part of `cargo metadata` the table speaks of. Packages are told apart by id, since one name
/// may stand for several versions.
struct Graph {
    members: BTreeSet<String>,
    names: BTreeMap<String, String>,
    edges: BTreeMap<String, Vec<Edge>>,
}

/// A dependency that is not for development only.
struct Edge {
    to: String,
    optional: bool,
}

impl Graph {
    fn parse(json: &Value) -> Result<Self, Error> {
        let members = list(json, "workspace_members")?
            .iter()
            .map(|id| {
                id.as_str()
                    .map(str::to_owned)
                    .ok_or_else(|| unreadable("workspace_members"))
            })
            .collect::<Result<BTreeSet<_>, _>>()?;

        let mut names = BTreeMap::new();
        let mut declared = BTreeMap::new();
        for package in list(json, "packages")? {
            let id = text(package, "id")?;
            names.insert(id.clone(), text(package, "name")?);
            declared.insert(id, list(package, "dependencies")?);
        }

        let resolve = json.get("resolve").ok_or_else(|| unreadable("resolve"))?;
        let mut edges = BTreeMap::new();
        for node in list(resolve, "nodes")? {
            let id = text(node, "id")?;
            let mut out = Vec::new();
            for dep in list(node, "deps")? {
                let ships = list(dep, "dep_kinds")?
                    .iter()
                    .any(|kind| kind["kind"].as_str() != Some("dev"));
                if !ships {
                    continue;
                }
                let to = text(dep, "pkg")?;
                let name = names
                    .get(&to)
                    .ok_or_else(|| unreadable("a package without a name"))?;
                let optional = is_optional(declared.get(&id).copied().unwrap_or_default(), name);
                out.push(Edge { to, optional });
            }
            edges.insert(id, out);
        }
        Ok(Self {
            members,
            names,
            edges,
        })
    }

    fn judge(&self) -> Vec<Violation> {
        let mut violations = Vec::new();
        for id in &self.members {
            let name = self.name(id);
            if FREE.contains(&name) {
                continue;
            }
            match TABLE.iter().find(|row| row.name == name) {
                None => violations.push(Violation::NoRow {
                    package: name.into(),
                }),
                Some(row) => violations.extend(
                    self.reach(id)
                        .into_iter()
                        .filter_map(|reached| judge(row, reached)),
                ),
            }
        }
        violations.sort_by_key(ToString::to_string);
        violations
    }

    /// What `from` reaches of the workspace and of the named crates, each by a shortest path.
    ///
    /// A required and an optional first edge are walked apart: a path behind a feature must not
    /// hide one that is always there.
    fn reach(&self, from: &str) -> Vec<Reached> {
        let mut reached = Vec::new();
        for optional in [false, true] {
            let first = self
                .edges(from)
                .iter()
                .filter(|edge| edge.optional == optional);
            let mut queue: VecDeque<(&str, Vec<&str>)> =
                first.map(|edge| (edge.to.as_str(), vec![from])).collect();
            let mut seen = BTreeSet::from([from]);
            while let Some((id, mut path)) = queue.pop_front() {
                if !seen.insert(id) {
                    continue;
                }
                path.push(id);
                let name = self.name(id);
                let is_member = self.members.contains(id);
                match named(name).or(is_member.then_some(name)) {
                    Some(what) => reached.push(Reached {
                        what: what.into(),
                        path: path.iter().map(|id| self.name(id).into()).collect(),
                        optional,
                    }),
                    None => queue.extend(
                        self.edges(id)
                            .iter()
                            .map(|edge| (edge.to.as_str(), path.clone())),
                    ),
                }
            }
        }
        reached
    }

    fn name<'a>(&'a self, id: &'a str) -> &'a str {
        self.names.get(id).map_or(id, String::as_str)
    }

    fn edges(&self, id: &str) -> &[Edge] {
        self.edges.get(id).map_or(&[], Vec::as_slice)
    }
}

/// Something the table speaks of, and how a crate comes to it.
struct Reached {
    /// As the table spells it: all of candle's crates are `candle`.
    what: String,
    path: Vec<String>,
    optional: bool,
}

fn judge(row: &Row, reached: Reached) -> Option<Violation> {
    let allowed = row.may_use.iter().find(|(what, _)| *what == reached.what);
    match allowed {
        None => Some(Violation::NotAllowed { path: reached.path }),
        Some((_, Optional)) if !reached.optional => {
            Some(Violation::NotOptional { path: reached.path })
        }
        Some(_) => None,
    }
}

/// The named crate that a package is, or is a part of, as `candle-core` is of candle.
fn named(package: &str) -> Option<&'static str> {
    NAMED.iter().copied().find(|name| {
        package
            .strip_prefix(name)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
    })
}

/// Whether every declaration of a dependency that ships puts it behind a feature.
fn is_optional(declared: &[Value], name: &str) -> bool {
    let mut ships = declared
        .iter()
        .filter(|dep| dep["name"].as_str() == Some(name) && dep["kind"].as_str() != Some("dev"))
        .peekable();
    ships.peek().is_some() && ships.all(|dep| dep["optional"].as_bool() == Some(true))
}

fn list<'a>(value: &'a Value, key: &str) -> Result<&'a [Value], Error> {
    value
        .get(key)
        .and_then(Value::as_array)
        .map(Vec::as_slice)
        .ok_or_else(|| unreadable(key))
}

fn text(value: &Value, key: &str) -> Result<String, Error> {
    value
        .get(key)
        .and_then(Value::as_str)
        .map(str::to_owned)
        .ok_or_else(|| unreadable(key))
}

fn unreadable(what: &str) -> Error {
    Error::Unreadable {
        what: format!("`cargo metadata`: {what}"),
    }
}

#[cfg(test)]
mod tests;
