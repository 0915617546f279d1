use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn packed_numbers_come_back_by_every_path(
        bits in 0_u32..=16,
        numbers in proptest::collection::vec(any::<u16>(), 0..300),
    ) {
        let limit = (1_u32 << bits) - 1;
        let numbers: Vec<u16> = numbers.iter().map(|number| number & limit as u16).collect();
        let mut first = None;
        for path in DeltaPath::available() {
            let mut out = vec![0xaa; numbers.len() * 2 + PACK_SLACK];
            let bytes = pack_with(path, &numbers, bits, &mut out);
            prop_assert_eq!(bytes, (numbers.len() * bits as usize).div_ceil(8));
            out.truncate(bytes);
            prop_assert_eq!(first.get_or_insert_with(|| out.clone()), &out, "{:?}", path);
            let mut again = vec![1; numbers.len()];
            unpack_with(path, &out, bits, &mut again);
            prop_assert_eq!(&again, &numbers, "{:?}", path);
        }
    }

    #[test]
    fn every_path_finds_the_same_numbers(
        numbers in proptest::collection::vec(prop_oneof![Just(0_u16), 0_u16..9], 0..300),
        wanted in prop_oneof![Just((u16::MAX, 0)), Just((4, 4)), Just((5, 1))],
    ) {
        let pairs = numbers.iter().zip(0_u16..);
        let expected = pairs.filter(|(number, _)| **number & wanted.0 == wanted.1);
        let expected: Vec<u16> = expected.map(|(_, at)| at).collect();
        for path in DeltaPath::available() {
            let mut places = vec![9; numbers.len() + SLACK];
            let found = find_with(path, &numbers, wanted, &mut places);
            prop_assert_eq!(&places[..found], &expected, "{:?}", path);
        }
    }

    #[test]
    fn every_path_adds_the_same_gaps_up(
        gaps in proptest::collection::vec((any::<u16>(), prop_oneof![0_u16..3, any::<u16>()]), 0..200),
        low in 0_u32..=14,
        from in 0_u64..100_000,
    ) {
        let (parts, highs): (Vec<u16>, Vec<u16>) = gaps.into_iter().unzip();
        let gaps = parts.iter().zip(&highs);
        let gaps = gaps.map(|(part, high)| {
            u64::from(*high) * (1 << low) + u64::from(*part) % (1 << low)
        });
        let mut sum = from;
        let expected = gaps.map(|gap| {
            sum += gap + 1;
            ((sum + 65_535) % 65_536) as u16
        });
        let expected: Vec<u16> = expected.collect();
        for path in DeltaPath::available() {
            let mut places = vec![9; parts.len()];
            let got = add_up_with(path, (&parts, &highs), low, from, &mut places);
            prop_assert_eq!(got, sum, "{:?}", path);
            prop_assert_eq!(&places, &expected, "{:?}", path);
        }
    }

    #[test]
    fn unary_numbers_come_back(
        numbers in proptest::collection::vec(prop_oneof![0_u16..4, any::<u16>()], 0..200),
        any in proptest::collection::vec(any::<u8>(), 0..100),
    ) {
        let bits: usize = numbers.iter().map(|number| usize::from(*number) + 1).sum();
        let mut out = vec![0xaa; bits.div_ceil(8) + PACK_SLACK];
        let bytes = pack_unary(&numbers, &mut out);
        prop_assert_eq!(bytes, bits.div_ceil(8));
        let mut again = vec![1; numbers.len()];
        for path in DeltaPath::available() {
            let read = |bytes: &[u8], from, numbers: &mut [u16]| {
                unpack_unary_with(path, bytes, from, numbers)
            };
            prop_assert_eq!(read(&out[..bytes], 0, &mut again), Some(bits));
            prop_assert_eq!(&again, &numbers);
            if bytes > 0 {
                prop_assert_eq!(read(&out[..bytes - 1], 0, &mut again), None);
            }
            // Part by part they are the same.
            let mut from = 0;
            for (part, expected) in again.chunks_mut(7).zip(numbers.chunks(7)) {
                part.fill(1);
                from = read(&out[..bytes], from, part).expect("they suffice");
                prop_assert_eq!(&*part, expected);
            }
            prop_assert_eq!(from, bits);
            // Any bytes are numbers, or too few of them; also from behind their end.
            for from in [0, 5, any.len() * 8, any.len() * 8 + 100] {
                let mut plain = again.clone();
                let taken = read(&any, from, &mut again);
                prop_assert_eq!(taken, scalar::unpack_unary(&any, from, &mut plain));
                if taken.is_some() {
                    prop_assert_eq!(&again, &plain);
                }
            }
        }
    }

    #[test]
    fn steps_that_fit_come_back(
        steps in proptest::collection::vec(prop_oneof![any::<u64>(), 0_u64..9, u64::MAX - 9..=u64::MAX], 0..100),
        limit in 2_u16..=u16::MAX,
    ) {
        fn check<W: Word + std::fmt::Debug>(steps: &[u64], limit: u16) {
            let steps: Vec<W> = steps.iter().map(|step| W::narrow(*step)).collect();
            let (mut codes, mut plain) = (vec![9; steps.len()], vec![9; steps.len()]);
            let zeros = zigzag(&steps, limit, &mut codes);
            assert_eq!(zeros, scalar::zigzag(&steps, limit, &mut plain));
            assert_eq!(codes, plain);
            assert_eq!(zeros, codes.iter().filter(|code| **code == 0).count());
            let mut again = vec![W::default(); steps.len()];
            unzigzag(&codes, &mut again);
            for ((step, code), again) in steps.iter().zip(&codes).zip(&again) {
                assert_eq!(*again, if *code == 0 { W::default() } else { *step });
                assert!(*code < limit);
            }
        }
        check::<u8>(&steps, limit.min(256));
        check::<u16>(&steps, limit);
        check::<u32>(&steps, limit);
        check::<u64>(&steps, limit);
    }
}
