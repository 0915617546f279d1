//! The `weightsync` command.
fn main() {}
