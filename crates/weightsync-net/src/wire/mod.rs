//! What the links of this crate carry, as pure functions: nothing here reads, writes or waits.
//!
//! | step | see |
//! |---|---|
//! | send an image in blocks and deltas | [`image`] |
//! | encode and decode messages | [`message`] |
//!
//! The handshake and the frames are [`weightsync_link`]'s.

pub mod image;
pub mod message;
