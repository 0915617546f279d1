//! Every byte of a link, as pure functions: nothing here reads, writes or waits.
//!
//! | step | see |
//! |---|---|
//! | who is there, which protocol, and is it one of ours | [`hello`] |
//! | where one message ends, and whether it arrived as it was sent | [`frame`] |
//! | what is said | [`message`] |

pub mod frame;
pub mod hello;
pub mod message;
