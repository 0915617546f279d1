//! Element types, exactly those of safetensors 0.8.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::{Serialize, Serializer};

use crate::error::Error;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $bits:literal;)*) => {
        /// The type of one element of a tensor, spelled as safetensors spells it.
        ///
        /// ```
        /// use weightsync_core::Dtype;
        ///
        /// let dtype: Dtype = "BF16".parse()?;
        /// assert_eq!(dtype, Dtype::BF16);
        /// assert_eq!(dtype.bits(), 16);
        /// assert_eq!(dtype.to_string(), "BF16");
        /// # Ok::<(), weightsync_core::Error>(())
        /// ```
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[non_exhaustive]
        #[allow(non_camel_case_types)]
        #[repr(u8)]
        pub enum Dtype {
            $($(#[$doc])* $variant = $code,)*
        }

        impl Dtype {
            /// Every dtype there is.
            pub const ALL: &'static [Dtype] = &[$(Dtype::$variant),*];

            /// Size of one element in bits; below 8 for the packed formats.
            pub const fn bits(self) -> u32 {
                match self {
                    $(Dtype::$variant => $bits,)*
                }
            }

            /// The name in a safetensors header.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Dtype::$variant => stringify!($variant),)*
                }
            }

            /// The number that stands for this dtype in binary encodings; it never changes.
            pub const fn code(self) -> u8 {
                self as u8
            }

            /// The dtype of a [code](Self::code), if there is one.
            pub const fn from_code(code: u8) -> Option<Dtype> {
                match code {
                    $($code => Some(Dtype::$variant),)*
                    _ => None,
                }
            }

            fn from_name(name: &str) -> Option<Dtype> {
                match name {
                    $(stringify!($variant) => Some(Dtype::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

// The codes are part of the layout's encoding and of its id: add at the end, never renumber.
dtypes! {
    /// Boolean, one byte each.
    BOOL = 0, 8;
    /// OCP MX FP4, two to a byte.
    F4 = 1, 4;
    /// OCP MX FP6 with 2 exponent and 3 mantissa bits.
    F6_E2M3 = 2, 6;
    /// OCP MX FP6 with 3 exponent and 2 mantissa bits.
    F6_E3M2 = 3, 6;
    /// Unsigned byte.
    U8 = 4, 8;
    /// Signed byte.
    I8 = 5, 8;
    /// FP8 with 5 exponent and 2 mantissa bits.
    F8_E5M2 = 6, 8;
    /// FP8 with 4 exponent and 3 mantissa bits.
    F8_E4M3 = 7, 8;
    /// OCP MX scale: 8 exponent bits, no mantissa.
    F8_E8M0 = 8, 8;
    /// FP8 E4M3, finite, unsigned zero.
    F8_E4M3FNUZ = 9, 8;
    /// FP8 E5M2, finite, unsigned zero.
    F8_E5M2FNUZ = 10, 8;
    /// Signed 16-bit integer.
    I16 = 11, 16;
    /// Unsigned 16-bit integer.
    U16 = 12, 16;
    /// IEEE half precision.
    F16 = 13, 16;
    /// bfloat16.
    BF16 = 14, 16;
    /// Signed 32-bit integer.
    I32 = 15, 32;
    /// Unsigned 32-bit integer.
    U32 = 16, 32;
    /// IEEE single precision.
    F32 = 17, 32;
    /// Complex number of two `F32`.
    C64 = 18, 64;
    /// IEEE double precision.
    F64 = 19, 64;
    /// Signed 64-bit integer.
    I64 = 20, 64;
    /// Unsigned 64-bit integer.
    U64 = 21, 64;
}

impl Dtype {
    /// Size of one element in whole bytes, or `None` for a sub-byte dtype.
    pub const fn bytes(self) -> Option<u32> {
        match self.bits() {
            bits if bits % 8 == 0 => Some(bits / 8),
            _ => None,
        }
    }

    /// Size in bits of a tensor of this dtype and shape, or `None` if that overflows 64 bits.
    ///
    /// A 0-d tensor (empty shape) has one element; a tensor with a dimension of 0 has none.
    pub fn bits_of(self, shape: &[u64]) -> Option<u64> {
        // Zero first: [2^40, 2^40, 0] is an empty tensor, not an overflow.
        if shape.contains(&0) {
            return Some(0);
        }
        shape
            .iter()
            .try_fold(u64::from(self.bits()), |bits, &dim| bits.checked_mul(dim))
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Dtype {
    type Err = Error;

    /// Reads a safetensors name; case counts.
    fn from_str(name: &str) -> Result<Self, Error> {
        Dtype::from_name(name).ok_or_else(|| Error::UnknownDtype {
            // Cut: the name comes from outside, and the error is shown to people.
            name: name.chars().take(32).collect(),
        })
    }
}

impl Serialize for Dtype {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for Dtype {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl Visitor<'_> for Name {
            type Value = Dtype;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the safetensors name of a dtype")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Dtype, E> {
                name.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_str(Name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_codes_and_serde_round_trip() {
        for (index, &dtype) in Dtype::ALL.iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), index);
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.name().parse::<Dtype>(), Ok(dtype));
            let json = serde_json::to_string(&dtype).unwrap();
            assert_eq!(json, format!("\"{}\"", dtype.name()));
            assert_eq!(serde_json::from_str::<Dtype>(&json).unwrap(), dtype);
        }
        assert_eq!(Dtype::from_code(Dtype::ALL.len() as u8), None);
    }

    /// The list and the spelling are those of the safetensors crate itself.
    #[test]
    fn agrees_with_safetensors() {
        for &dtype in Dtype::ALL {
            let theirs: safetensors::Dtype =
                serde_json::from_str(&format!("\"{dtype}\"")).expect("safetensors knows the name");
            assert_eq!(theirs.bitsize(), dtype.bits() as usize, "{dtype}");
        }
        assert_eq!(Dtype::ALL.len(), 22);
    }

    #[test]
    fn sizes_of_shapes() {
        assert_eq!(Dtype::F32.bits_of(&[]), Some(32));
        assert_eq!(Dtype::F4.bits_of(&[3]), Some(12));
        assert_eq!(Dtype::F32.bits_of(&[1 << 40, 1 << 40, 0]), Some(0));
        assert_eq!(Dtype::F32.bits_of(&[1 << 40, 1 << 40]), None);
        assert_eq!(Dtype::F6_E2M3.bytes(), None);
        assert_eq!(Dtype::C64.bytes(), Some(8));
    }

    #[test]
    fn refuses_other_names() {
        for name in ["", "bf16", "F33", "BF16 "] {
            let error = name.parse::<Dtype>().unwrap_err();
            assert!(matches!(error, Error::UnknownDtype { name: got } if got == name));
        }
    }
}
