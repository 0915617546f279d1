//! Placeholder of the first commit.

pub mod worker;
