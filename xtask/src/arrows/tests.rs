//! The judge, on made-up graphs: it must fail when it should.

use serde_json::json;

use super::*;

/// A made-up `cargo metadata`: members, outside crates, and edges written `from -> to`, with
/// `->?` for one behind a feature, `->dev` for one of tests, `->build` for one of build scripts.
fn graph(members: &[&str], outside: &[&str], edges: &[&str]) -> Graph {
    let edges: Vec<(&str, &str, &str)> = edges
        .iter()
        .map(|edge| {
            let words: Vec<&str> = edge.split(' ').collect();
            (words[0], words[1], words[2])
        })
        .collect();
    let kind = |arrow: &str| match arrow {
        "->dev" => json!("dev"),
        "->build" => json!("build"),
        _ => json!(null),
    };
    let packages: Vec<Value> = members
        .iter()
        .chain(outside)
        .map(|name| {
            let dependencies: Vec<Value> = edges
                .iter()
                .filter(|(from, ..)| from == name)
                .map(|(_, arrow, to)| {
                    json!({"name": to, "kind": kind(arrow), "optional": *arrow == "->?"})
                })
                .collect();
            json!({"id": format!("id of {name}"), "name": name, "dependencies": dependencies})
        })
        .collect();
    let nodes: Vec<Value> = members
        .iter()
        .chain(outside)
        .map(|name| {
            let mut targets: Vec<&str> = edges
                .iter()
                .filter(|(from, ..)| from == name)
                .map(|(.., to)| *to)
                .collect();
            targets.dedup();
            let deps: Vec<Value> = targets
                .iter()
                .map(|target| {
                    let kinds: Vec<Value> = edges
                        .iter()
                        .filter(|(from, _, to)| from == name && to == target)
                        .map(|(_, arrow, _)| json!({"kind": kind(arrow), "target": null}))
                        .collect();
                    json!({"name": target, "pkg": format!("id of {target}"), "dep_kinds": kinds})
                })
                .collect();
            json!({"id": format!("id of {name}"), "deps": deps})
        })
        .collect();
    let members: Vec<String> = members.iter().map(|name| format!("id of {name}")).collect();
    let metadata = json!({
        "workspace_members": members,
        "packages": packages,
        "resolve": {"nodes": nodes},
    });
    Graph::parse(&metadata).expect("well-formed metadata")
}

fn verdict(members: &[&str], outside: &[&str], edges: &[&str]) -> Vec<String> {
    graph(members, outside, edges)
        .judge()
        .iter()
        .map(ToString::to_string)
        .collect()
}

const MEMBERS: &[&str] = &[
    "weightsync-simd",
    "weightsync-core",
    "weightsync-mem",
    "weightsync-engine",
    "weightsync-link",
    "weightsync-net",
    "weightsync-rl",
    "weightsync-cli",
    "weightsync-python",
    "weightsync-fuzz",
    "xtask",
];

const OUTSIDE: &[&str] = &[
    "axum",
    "candle-core",
    "candle-nn",
    "clap",
    "object_store",
    "pyo3",
    "rand",
    "rustls",
    "serde",
    "tokio",
    "tokio-util",
    "tower",
];

#[test]
fn the_design_s_own_graph_passes() {
    let edges = [
        "weightsync-core -> weightsync-simd",
        "weightsync-core -> serde",
        "weightsync-mem -> weightsync-core",
        "weightsync-mem -> weightsync-simd",
        "weightsync-engine -> weightsync-core",
        "weightsync-engine -> weightsync-mem",
        "weightsync-engine ->? candle-core",
        "weightsync-link -> weightsync-engine",
        "weightsync-link -> tokio",
        "weightsync-link -> rustls",
        "weightsync-net -> weightsync-engine",
        "weightsync-net -> weightsync-link",
        "weightsync-net -> tokio",
        "weightsync-rl -> weightsync-engine",
        "weightsync-rl -> rand",
        "weightsync-rl ->? weightsync-net",
        "weightsync-rl ->? candle-nn",
        "candle-nn -> candle-core",
        "weightsync-cli -> weightsync-engine",
        "weightsync-cli ->? weightsync-net",
        "weightsync-cli ->? weightsync-rl",
        "weightsync-cli -> clap",
        "weightsync-python -> weightsync-cli",
        "weightsync-python -> pyo3",
    ];
    assert_eq!(verdict(MEMBERS, OUTSIDE, &edges), [""; 0]);
}

#[test]
fn edges_the_table_does_not_list_fail() {
    let cases = [
        (
            "weightsync-simd -> weightsync-core",
            "weightsync-simd → weightsync-core: not in its row",
        ),
        (
            "weightsync-core -> weightsync-mem",
            "weightsync-core → weightsync-mem: not in its row",
        ),
        (
            "weightsync-engine -> weightsync-simd",
            "weightsync-engine → weightsync-simd: not in its row",
        ),
        (
            "weightsync-engine -> weightsync-rl",
            "weightsync-engine → weightsync-rl: not in its row",
        ),
        (
            "weightsync-rl -> weightsync-mem",
            "weightsync-rl → weightsync-mem: not in its row",
        ),
        (
            "weightsync-cli -> xtask",
            "weightsync-cli → xtask: not in its row",
        ),
        (
            "weightsync-cli -> weightsync-python",
            "weightsync-cli → weightsync-python: not in its row",
        ),
        (
            "weightsync-cli -> weightsync-fuzz",
            "weightsync-cli → weightsync-fuzz: not in its row",
        ),
        (
            "weightsync-engine -> tokio",
            "weightsync-engine → tokio: not in its row",
        ),
        (
            "weightsync-engine -> tokio-util",
            "weightsync-engine → tokio-util: not in its row",
        ),
        (
            "weightsync-engine ->? tokio",
            "weightsync-engine → tokio: not in its row",
        ),
        (
            "weightsync-engine ->build tokio",
            "weightsync-engine → tokio: not in its row",
        ),
        (
            "weightsync-link -> weightsync-net",
            "weightsync-link → weightsync-net: not in its row",
        ),
        (
            "weightsync-net -> axum",
            "weightsync-net → axum: not in its row",
        ),
        (
            "weightsync-core -> candle-core",
            "weightsync-core → candle-core: not in its row",
        ),
        (
            "weightsync-cli -> pyo3",
            "weightsync-cli → pyo3: not in its row",
        ),
        (
            "weightsync-engine -> rustls",
            "weightsync-engine → rustls: not in its row",
        ),
        (
            "weightsync-rl -> object_store",
            "weightsync-rl → object_store: not in its row",
        ),
    ];
    for (edge, expected) in cases {
        assert_eq!(verdict(MEMBERS, OUTSIDE, &[edge]), [expected], "{edge}");
    }
}

#[test]
fn feature_only_edges_must_be_optional() {
    let cases = [
        (
            "weightsync-engine -> candle-core",
            "weightsync-engine → candle-core: allowed behind a feature only",
        ),
        (
            "weightsync-rl -> candle-nn",
            "weightsync-rl → candle-nn: allowed behind a feature only",
        ),
        (
            "weightsync-rl -> weightsync-net",
            "weightsync-rl → weightsync-net: allowed behind a feature only",
        ),
        (
            "weightsync-cli -> weightsync-rl",
            "weightsync-cli → weightsync-rl: allowed behind a feature only",
        ),
    ];
    for (edge, expected) in cases {
        assert_eq!(verdict(MEMBERS, OUTSIDE, &[edge]), [expected], "{edge}");
    }
}

#[test]
fn a_utility_crate_does_not_hide_a_named_one() {
    let edges = [
        "weightsync-engine -> rand",
        "rand -> tower",
        "tower -> tokio",
    ];
    assert_eq!(
        verdict(MEMBERS, OUTSIDE, &edges),
        ["weightsync-engine → rand → tower → tokio: not in its row"]
    );
}

#[test]
fn feature_does_not_hide_a_crate_required_elsewhere() {
    let edges = [
        "weightsync-engine ->? candle-core",
        "weightsync-engine -> rand",
        "rand -> candle-core",
    ];
    assert_eq!(
        verdict(MEMBERS, OUTSIDE, &edges),
        ["weightsync-engine → rand → candle-core: allowed behind a feature only"]
    );
}

#[test]
fn arrows_ignore_what_members_use_internally() {
    let edges = [
        "weightsync-cli ->? weightsync-net",
        "weightsync-net -> tokio",
        "weightsync-engine ->? candle-core",
        "candle-core -> tokio",
    ];
    assert_eq!(verdict(MEMBERS, OUTSIDE, &edges), [""; 0]);
}

#[test]
fn dev_dependencies_are_free_unless_they_also_ship() {
    let dev = [
        "weightsync-core ->dev tokio",
        "weightsync-simd ->dev weightsync-engine",
    ];
    assert_eq!(verdict(MEMBERS, OUTSIDE, &dev), [""; 0]);
    let both = ["weightsync-core ->dev tokio", "weightsync-core -> tokio"];
    assert_eq!(
        verdict(MEMBERS, OUTSIDE, &both),
        ["weightsync-core → tokio: not in its row"]
    );
    let dev_and_optional = [
        "weightsync-engine ->dev candle-core",
        "weightsync-engine ->? candle-core",
    ];
    assert_eq!(verdict(MEMBERS, OUTSIDE, &dev_and_optional), [""; 0]);
}

#[test]
fn free_crates_use_what_they_like() {
    let edges = [
        "xtask -> tokio",
        "xtask -> weightsync-cli",
        "weightsync-fuzz -> candle-core",
    ];
    assert_eq!(verdict(MEMBERS, OUTSIDE, &edges), [""; 0]);
}

#[test]
fn a_crate_without_a_row_fails() {
    let verdict = verdict(&["weightsync-extra"], &[], &[]);
    assert_eq!(verdict, ["weightsync-extra: has no row in the table"]);
}

#[test]
fn a_name_that_merely_begins_alike_is_not_named() {
    assert_eq!(named("tokio-util"), Some("tokio"));
    assert_eq!(named("candle-core"), Some("candle"));
    assert_eq!(named("candlestick"), None);
    assert_eq!(named("to"), None);
}

#[test]
fn rows_name_only_crates_that_exist_in_the_design() {
    for row in TABLE {
        for (what, _) in row.may_use {
            let known = TABLE.iter().any(|row| row.name == *what) || NAMED.contains(what);
            assert!(known, "{}: {what}", row.name);
        }
    }
}

#[test]
fn metadata_of_another_shape_is_an_error() {
    for json in [
        json!(null),
        json!({}),
        json!({"workspace_members": [1], "packages": []}),
    ] {
        assert!(Graph::parse(&json).is_err(), "{json}");
    }
}
