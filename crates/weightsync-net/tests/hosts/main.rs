//! Faults over real hosts: trainers, relays and workers are this binary, run again in
//! network namespaces, and are killed, cut off, slowed down and lied to.
//!
//! `WEIGHTSYNC_SOAK` scales how many random schedules are tried (`full`: thirty), and
//! `WEIGHTSYNC_SOAK_SEED` repeats those of an earlier run. A wait that nothing ends
//! fails the test with what was said until then.

#[cfg(target_os = "linux")]
mod linux;

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    linux::main()
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    println!("hosts are network namespaces, which only Linux has");
    ExitCode::SUCCESS
}
