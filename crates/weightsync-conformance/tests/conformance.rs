//! Every scheme built in, put through the suite.

mod damage;

use std::process::ExitCode;

use weightsync_conformance::Subjects;

fn main() -> ExitCode {
    let subjects = Subjects::new()
        .with("shared-mem")
        .with("shared-mem:pull")
        .with("multi-process")
        .with("multi-process:own-copy")
        .with("multi-process:every=4")
        .with("none")
        .corrupt(damage::spoil);
    weightsync_conformance::main(&subjects)
}
