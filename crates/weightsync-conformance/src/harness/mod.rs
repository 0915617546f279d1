//! Processes that are told what to do, and what is checked when they are done.

mod cascade;
pub(crate) mod command;
pub(crate) mod fault;
mod follower;
mod patience;
pub(crate) mod process;
pub(crate) mod resource_census;
pub mod scale;
pub(crate) mod script;
pub(crate) mod shape;
mod source;
mod trainer;
pub(crate) mod worker;
