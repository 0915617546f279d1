//! Pictures, as SVG documents.

#[cfg(feature = "demo")]
mod learning;
mod spreads;

use plotters::style::RGBColor;

#[cfg(feature = "demo")]
pub use self::learning::{Learning, learning};
pub use self::spreads::{Spread, SpreadBar, spreads};

const SIZE: (u32, u32) = (960, 540);
const STRONG: RGBColor = RGBColor(31, 119, 180);
