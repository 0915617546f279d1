//! Hosts on one machine: what they are used for, and that nothing of them is left.

#[cfg(target_os = "linux")]
#[path = "hosts/linux.rs"]
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
