use super::*;
use crate::dtype::Dtype;

fn layout() -> Layout {
    Layout::new([
        ("weight".to_owned(), Dtype::F32, vec![10, 33]),
        ("empty".to_owned(), Dtype::F32, vec![0]),
        ("step".to_owned(), Dtype::I64, vec![]),
        ("bias".to_owned(), Dtype::BF16, vec![77]),
    ])
    .unwrap()
}

/// An image whose every tensor byte is different from its neighbours, with zeros between.
fn image(layout: &Layout) -> Vec<u8> {
    let mut image = vec![0; layout.bytes() as usize];
    for tensor in layout.tensors() {
        let bytes = tensor.range.of_mut(&mut image).unwrap();
        bytes
            .iter_mut()
            .enumerate()
            .for_each(|(at, byte)| *byte = (at * 7 + 1) as u8);
    }
    image
}

#[test]
fn tensor_by_tensor_in_any_order_is_the_whole_image() {
    let layout = layout();
    let image = image(&layout);
    let whole = Digest::of(&layout, &image).unwrap();

    let mut at_once = Digester::new(layout.bytes());
    at_once.tensor(0, &image).unwrap();
    assert_eq!(at_once.finish(), Ok(whole));

    let mut halves = [Digester::new(layout.bytes()), Digester::new(layout.bytes())];
    for (index, tensor) in layout.tensors().iter().enumerate().rev() {
        let bytes = tensor.range.of(&image).unwrap();
        halves[index % 2]
            .tensor(tensor.range.offset, bytes)
            .unwrap();
    }
    let [mut left, right] = halves;
    left.merge(&right).unwrap();
    assert_eq!(left.finish(), Ok(whole));
}

#[test]
fn digest_ignores_bytes_between_tensors() {
    let layout = layout();
    let mut image = image(&layout);
    let whole = Digest::of(&layout, &image).unwrap();
    for gap in layout.padding().collect::<Vec<_>>() {
        gap.of_mut(&mut image).unwrap().fill(0xff);
    }
    assert_eq!(Digest::of(&layout, &image), Ok(whole));
}

#[test]
fn every_byte_of_every_tensor_counts() {
    let layout = layout();
    let mut image = image(&layout);
    let whole = Digest::of(&layout, &image).unwrap();
    for tensor in layout.tensors() {
        for at in tensor.range.indices().unwrap() {
            image[at] ^= 1;
            assert_ne!(Digest::of(&layout, &image), Ok(whole), "byte {at}");
            image[at] ^= 1;
        }
    }
}

#[test]
fn length_counts_also_where_the_sum_of_lines_does_not() {
    let digest = |bytes: u64| {
        let mut digester = Digester::new(bytes);
        digester.tensor(0, &vec![0; bytes as usize]).unwrap();
        digester.finish().unwrap()
    };
    // 100 and 128 zeros fill the same two lines.
    assert_ne!(digest(100), digest(128));
    assert_ne!(digest(0), digest(64));
}

/// The digest outlives a build: these never change. They were made by an implementation written
/// apart from this one, from the definition.
#[test]
fn known_answers() {
    let empty = Digester::new(0).finish().unwrap();
    assert_eq!(empty.to_string(), "d90851d5af25e77bb54948f5bb89d202");
    let layout = layout();
    let digest = Digest::of(&layout, &image(&layout)).unwrap();
    assert_eq!(digest.to_string(), "c4e726cabac296bc59214e70398fcd16");
}

#[test]
fn misuse_is_refused_with_the_facts() {
    let mut digester = Digester::new(128);
    assert_eq!(
        digester.tensor(32, &[0]),
        Err(DigestError::Unaligned { offset: 32 })
    );
    for (offset, len) in [(128, 1), (64, 65), (u64::MAX - 63, 64)] {
        let outside = DigestError::Outside {
            offset,
            len,
            image: 128,
        };
        assert_eq!(
            digester.tensor(offset, &vec![0; len as usize]),
            Err(outside)
        );
    }
    digester.tensor(0, &[1; 64]).unwrap();
    assert_eq!(
        digester.clone().finish(),
        Err(DigestError::Lines {
            expected: 2,
            got: 1
        })
    );
    assert_eq!(
        digester.merge(&Digester::new(64)),
        Err(DigestError::ImageLength {
            expected: 128,
            got: 64
        })
    );
    let layout = layout();
    let expected = layout.bytes();
    assert_eq!(
        Digest::of(&layout, &[0; 64]),
        Err(DigestError::ImageLength { expected, got: 64 })
    );
}

#[test]
fn text_and_serde_round_trip() {
    let digest = Digest(*b"0123456789abcdef");
    assert_eq!(digest.to_string(), "30313233343536373839616263646566");
    assert_eq!(digest.to_string().parse(), Ok(digest));
    let json = serde_json::to_string(&digest).unwrap();
    assert_eq!(json, format!("\"{digest}\""));
    assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), digest);
    for bad in [
        "",
        "30",
        &format!("{digest}0"),
        "zz313233343536373839616263646566",
    ] {
        assert_eq!(bad.parse::<Digest>(), Err(DigestError::NotHex));
    }
}
