//! Processes that are told what to do, and what is checked when they are done.

pub(crate) mod fault;
mod follower;
mod middle;
pub(crate) mod order;
pub(crate) mod puppet;
pub mod scale;
pub(crate) mod script;
pub(crate) mod shape;
mod source;
pub(crate) mod stock;
mod trainer;
pub(crate) mod worker;
