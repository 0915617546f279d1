//! What many hosts and many workers cost: the processes and the hosts are those of the
//! tests, `tests/hosts`.
//!
//! `cargo bench -p weightsync-net --bench hosts [-- --json] [NAME]` prints rows, as
//! every benchmark of the project does; `cargo xtask bench net` runs it too.

#[cfg(target_os = "linux")]
#[path = "../tests/hosts/linux/mod.rs"]
mod linux;

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    linux::main()
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    println!("hosts are network namespaces, which only Linux has");
    ExitCode::FAILURE
}
