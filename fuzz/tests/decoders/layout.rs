//! Layouts: the canonical binary form, and JSON.

use weightsync_core::{Dtype, Layout};
use weightsync_fuzz::fuzz;

#[test]
fn layout() {
    fuzz!(
        "layout",
        samples().map(|layout| layout.encode()),
        |bytes: &[u8]| {
            if let Ok(layout) = Layout::decode(bytes) {
                holds_together(&layout);
                assert_eq!(layout.encode(), bytes, "a layout has one encoding");
            }
        }
    );
}

#[test]
fn layout_json() {
    let seeds =
        samples().map(|layout| serde_json::to_vec(&layout).expect("a layout is plain data"));
    fuzz!("layout_json", seeds, |bytes: &[u8]| {
        if let Ok(layout) = serde_json::from_slice::<Layout>(bytes) {
            holds_together(&layout);
        }
    });
}

/// What is true of every layout, however it came about.
fn holds_together(layout: &Layout) {
    let mut end = 0;
    for tensor in layout.tensors() {
        assert_eq!(tensor.range.offset % 64, 0, "{}", tensor.name);
        assert!(
            tensor.range.offset >= end,
            "{} begins inside its predecessor",
            tensor.name
        );
        end = tensor.range.end();
        let found = layout.tensor(&tensor.name).map(|found| &found.range);
        assert_eq!(found, Some(&tensor.range), "{}", tensor.name);
    }
    assert!(end <= layout.bytes());
    assert_eq!(layout.bytes() % 64, 0);
    assert_eq!(
        Layout::decode(&layout.encode()).as_ref().map(Layout::id),
        Ok(layout.id())
    );
}

/// Valid layouts, from empty to every dtype.
pub fn samples() -> impl Iterator<Item = Layout> {
    let tensor = |name: &str, dtype, shape: &[u64]| (name.to_owned(), dtype, shape.to_vec());
    let every = Dtype::ALL
        .iter()
        .map(|dtype| tensor(dtype.name(), *dtype, &[2, 8]));
    [
        Layout::new([]),
        Layout::new([
            tensor("w", Dtype::BF16, &[2, 3]),
            tensor("b", Dtype::F32, &[3]),
        ]),
        Layout::new([
            tensor("step", Dtype::I64, &[]),
            tensor("none", Dtype::U8, &[0, 1 << 40]),
        ]),
        Layout::new(
            (0..40).map(|i| tensor(&format!("layers.{i}.mlp.weight"), Dtype::F16, &[i, 300])),
        ),
        Layout::new(every),
    ]
    .into_iter()
    .map(|layout| layout.expect("a valid layout"))
}
