use proptest::prelude::*;

use super::*;

fn names(tree: Tree<()>) -> Vec<String> {
    tree.into_dotted()
        .into_iter()
        .map(|(name, ())| name)
        .collect()
}

fn tree(names: &[&str]) -> Result<Tree<()>, Error> {
    Tree::from_dotted(names.iter().map(|&name| (name, ())))
}

#[test]
fn a_branch_comes_together_at_its_first_name() {
    let tree = tree(&["b.x", "a", "b.c.y", "d.z", "b.w"]).unwrap();
    assert_eq!(names(tree), ["b.x", "b.c.y", "b.w", "a", "d.z"]);
}

#[test]
fn conflicts_name_what_is_taken() {
    for (given, taken) in [
        (["a", "a"], "a"),
        (["a", "a.b"], "a"),
        (["a.b", "a"], "a"),
        (["a.b", "a.b"], "a.b"),
        (["a.b", "a.b.c.d"], "a.b"),
        (["a.b.c", "a.b"], "a.b"),
    ] {
        let error = tree(&given).unwrap_err();
        assert_eq!(
            error,
            Error::PathConflict { name: taken.into() },
            "{given:?}"
        );
    }
}

#[test]
fn a_refused_name_leaves_the_tree_as_it_was() {
    let mut tree = tree(&["a.b"]).unwrap();
    let before = tree.clone();
    for name in ["", ".", "a.", ".a", "c..d", "a.b", "a", "a.b.c.d"] {
        assert!(tree.insert(name, ()).is_err(), "{name:?}");
        assert_eq!(tree, before, "{name:?}");
    }
    assert!(tree.push("", Node::Leaf(())).is_err());
    assert!(tree.push("x.y", Node::Leaf(())).is_err());
    assert!(tree.push("a", Node::Branch(Tree::new())).is_err());
    assert_eq!(tree, before);
}

#[test]
fn depth_is_bounded_on_every_way_in() {
    let deepest = vec!["a"; MAX_DEPTH].join(".");
    let mut tree = tree(&[&deepest]).unwrap();
    assert_eq!(tree.leaf(&deepest), Some(&()));
    let too_deep = format!("b.{deepest}");
    assert!(matches!(
        tree.insert(&too_deep, ()),
        Err(Error::InvalidPath { .. })
    ));
    let mut outer = Tree::new();
    assert!(matches!(
        outer.push("b", Node::Branch(tree)),
        Err(Error::InvalidPath { .. })
    ));
}

#[test]
fn look_up_tells_values_from_levels() {
    let tree = tree(&["a.b.c", "d"]).unwrap();
    assert!(tree.branch("a.b").is_some() && tree.leaf("a.b").is_none());
    assert!(tree.leaf("a.b.c").is_some() && tree.branch("a.b.c").is_none());
    for absent in ["", "a.", "b", "a.b.c.d", "d.e", ".d"] {
        assert_eq!(tree.node(absent), None, "{absent:?}");
    }
}

#[test]
fn a_level_of_100_000_names_is_built_in_linear_time() {
    let tree = Tree::from_dotted((0..100_000).map(|i| (format!("experts.{i}"), i))).unwrap();
    assert_eq!(tree.branch("experts").unwrap().len(), 100_000);
    assert_eq!(tree.leaf("experts.99999"), Some(&99_999));
}

fn nested(depth: u32) -> impl Strategy<Value = Tree<u8>> {
    let level = |node: BoxedStrategy<Node<u8>>| {
        prop::collection::btree_map("[a-d]{1,2}", node, 1..4).prop_map(|entries| {
            let mut tree = Tree::new();
            for (segment, node) in entries {
                tree.push(segment, node).unwrap();
            }
            tree
        })
    };
    let leaf = any::<u8>().prop_map(Node::Leaf).boxed();
    level(leaf.clone()).prop_recursive(depth, 40, 4, move |tree| {
        level(prop_oneof![leaf.clone(), tree.prop_map(Node::Branch)].boxed())
    })
}

proptest! {
    #[test]
    fn nested_to_dotted_and_back(tree in nested(4)) {
        let dotted = tree.clone().into_dotted();
        prop_assert_eq!(tree.as_ref().into_dotted().len(), dotted.len());
        for (name, leaf) in &dotted {
            prop_assert_eq!(tree.leaf(name), Some(leaf));
        }
        prop_assert_eq!(Tree::from_dotted(dotted).unwrap(), tree);
    }

    #[test]
    fn dotted_to_nested_keeps_every_name_or_refuses(
        given in prop::collection::vec("[a-c.]{0,6}", 0..8),
    ) {
        let valid = given.iter().enumerate().all(|(i, name)| {
            !name.split('.').any(str::is_empty)
                && given[..i].iter().all(|other| {
                    other != name
                        && !name.starts_with(&format!("{other}."))
                        && !other.starts_with(&format!("{name}."))
                })
        });
        match Tree::from_dotted(given.iter().map(|name| (name, ()))) {
            Ok(tree) => {
                prop_assert!(valid);
                let mut got = names(tree);
                let mut given = given;
                got.sort();
                given.sort();
                prop_assert_eq!(got, given);
            }
            Err(_) => prop_assert!(!valid),
        }
    }
}
