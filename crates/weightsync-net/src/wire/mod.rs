//! Every byte of a link, as pure functions: nothing here reads, writes or waits.
//!
//! | step | see |
//! |---|---|
//! | agree on a protocol, and prove that both ends have the key | [`hello`] |
//! | find the end of a message, and check that it arrived unchanged | [`frame`] |
//! | encode and decode messages | [`message`] |

pub mod frame;
pub mod hello;
pub mod message;
