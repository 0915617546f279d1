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
        for path in Path::available() {
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
    fn every_path_finds_the_zeros(
        numbers in proptest::collection::vec(prop_oneof![Just(0_u16), 0_u16..9], 0..300),
    ) {
        let pairs = numbers.iter().zip(0_u16..);
        let expected: Vec<u16> = pairs.filter(|(number, _)| **number == 0).map(|(_, at)| at).collect();
        for path in Path::available() {
            let mut places = vec![9; numbers.len() + SLACK];
            let found = zeros_with(path, &numbers, &mut places);
            prop_assert_eq!(&places[..found], &expected, "{:?}", path);
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
        prop_assert_eq!(unpack_unary(&out[..bytes], &mut again), Some(bytes));
        prop_assert_eq!(&again, &numbers);
        prop_assert_eq!(scalar::unpack_unary(&out[..bytes], &mut again), Some(bytes));
        prop_assert_eq!(&again, &numbers);
        if bytes > 0 {
            prop_assert_eq!(unpack_unary(&out[..bytes - 1], &mut again), None);
        }
        // Any bytes are numbers, or too few of them.
        let taken = unpack_unary(&any, &mut again);
        prop_assert!(taken.is_none_or(|taken| taken <= any.len()));
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
