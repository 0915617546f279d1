//! Manifests, as JSON.

use weightsync_core::digest::Digest;
use weightsync_core::manifest::Part;
use weightsync_core::{Epoch, Layout, Manifest, Run, Version, WriterId};
use weightsync_fuzz::fuzz;

#[test]
fn manifest() {
    let seeds = samples().map(|manifest| serde_json::to_vec(&manifest).expect("plain data"));
    fuzz!("manifest", seeds, |bytes: &[u8]| {
        let Ok(manifest) = serde_json::from_slice::<Manifest>(bytes) else {
            return;
        };
        assert!(
            !manifest.version().is_none(),
            "version 0 is never published"
        );
        let layout = manifest.layout();
        let written: u64 = manifest.parts().iter().map(Part::bytes).sum();
        assert!(
            (layout.payload_bytes()..=layout.bytes()).contains(&written),
            "{written} bytes"
        );
        let again = serde_json::to_vec(&manifest).expect("plain data");
        assert_eq!(
            serde_json::from_slice::<Manifest>(&again).ok(),
            Some(manifest)
        );
    });
}

fn samples() -> impl Iterator<Item = Manifest> {
    let run = Run {
        epoch: Epoch(3),
        id: [0xa5; 16],
    };
    crate::layout::samples().flat_map(move |layout| {
        let digest = digest(&layout);
        let one = Manifest::single_writer(layout.clone(), run, Version(9), digest);
        let two = (0..2).map(|writer| {
            let tensors = (0..layout.len()).filter(|index| index % 2 == writer as usize);
            Part::of_tensors(WriterId(writer), &layout, tensors).expect("tensors of the layout")
        });
        let two = Manifest::new(layout.clone(), run, Version::FIRST, None, two.collect());
        [
            one.expect("one writer writes all"),
            two.expect("two writers share the tensors"),
        ]
    })
}

/// The digest of an image of zeros; unknown where the image would be large.
fn digest(layout: &Layout) -> Option<Digest> {
    let bytes = usize::try_from(layout.bytes())
        .ok()
        .filter(|bytes| *bytes <= 1 << 20)?;
    Some(Digest::of(layout, &vec![0; bytes]).expect("an image of the layout's length"))
}
