//! `cargo xtask test | ci | bench | arrows`.
fn main() {}
