//! Versions are told apart by their bytes.

use std::time::Instant;

use weightsync_engine::{Digest, DigestPolicy, SenderSetup, Snapshot, Tensors};

use crate::{pair, pair_by, send_to, soon, weights};

/// The digest that the sender makes next to its work.
pub fn published(snapshot: &Snapshot) -> Digest {
    let until = Instant::now() + soon();
    loop {
        if let Some(digest) = snapshot.published_digest() {
            return digest;
        }
        assert!(Instant::now() < until, "no digest was published");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// The tensors as they lie in a version: each at its offset, zeros between.
fn image(weights: &Tensors, snapshot: &Snapshot) -> Vec<u8> {
    let layout = snapshot.layout();
    let mut image = vec![0; layout.bytes() as usize];
    for tensor in layout.tensors() {
        let bytes = weights.tensor(&tensor.name).unwrap();
        tensor
            .range
            .of_mut(&mut image)
            .unwrap()
            .copy_from_slice(bytes.bytes());
    }
    image
}

#[test]
fn a_digest_is_made_on_request_and_found_by_workers() {
    let source = weights();
    let (sender, mut receiver) = pair(&source);
    let snapshot = receiver.latest().unwrap().unwrap();
    assert_eq!(snapshot.published_digest(), None);
    let digest = sender.digest().unwrap();
    assert_eq!(snapshot.published_digest(), Some(digest));
    assert_eq!(snapshot.digest(), digest);
    assert_eq!(sender.snapshot().unwrap().digest(), digest);
    assert_eq!(
        Digest::of(snapshot.layout(), &image(&source, &snapshot)),
        Ok(digest)
    );
}

#[test]
fn a_digest_is_of_the_bytes_and_of_nothing_else() {
    let mut source = weights();
    let (mut sender, mut receiver) = pair(&source);
    let first = sender.digest().unwrap();
    // The same bytes as another version, from a slot used before.
    let zeros = Tensors::zeros(sender.layout().unwrap());
    send_to(&mut sender, &zeros, &mut receiver);
    let again = send_to(&mut sender, &source, &mut receiver);
    assert_eq!(
        again.published_digest(),
        None,
        "a digest of an older version is not this one's"
    );
    assert_eq!(again.digest(), first);
    drop(again);
    source.slice_mut::<f32>("layer.weight").unwrap()[5] = -0.0;
    let minus = send_to(&mut sender, &source, &mut receiver).digest();
    source.slice_mut::<f32>("layer.weight").unwrap()[5] = 0.0;
    let plus = send_to(&mut sender, &source, &mut receiver).digest();
    assert_ne!(minus, plus, "bits count, not values");
}

#[test]
fn a_digest_made_in_the_background_appears() {
    let mut source = weights();
    let setup = SenderSetup::new("policy", &source)
        .unwrap()
        .digest(DigestPolicy::Background);
    let (mut sender, mut receiver) = pair_by(setup, &source);
    for step in 0..20 {
        source.slice_mut::<i64>("step").unwrap()[0] = step;
        let snapshot = send_to(&mut sender, &source, &mut receiver);
        assert_eq!(published(&snapshot), snapshot.digest());
        assert_eq!(
            Digest::of(snapshot.layout(), &image(&source, &snapshot)),
            Ok(snapshot.digest())
        );
    }
}

#[test]
fn checksums_made_in_the_copy_hold() {
    let mut source = weights();
    // Two blocks and a bit, so that the copy is cut between threads.
    source
        .insert("large", [600_000], vec![7_u8; 600_000])
        .unwrap();
    for threads in [1, 3] {
        let setup = SenderSetup::new("policy", &source).unwrap();
        let (mut sender, mut receiver) =
            pair_by(setup.checksums(true).copy_threads(threads), &source);
        for step in 0..4 {
            source.slice_mut::<u8>("large").unwrap()[step * 1000] = step as u8;
            let snapshot = send_to(&mut sender, &source, &mut receiver);
            assert!(snapshot.verify_checksums().unwrap());
        }
    }
    let (_sender, mut receiver) = pair(&source);
    assert!(
        !receiver
            .latest()
            .unwrap()
            .unwrap()
            .verify_checksums()
            .unwrap(),
        "none were asked for"
    );
}
