//! The suite that every scheme passes, on this one.

use std::process::ExitCode;

use weightsync_conformance::Subjects;
use weightsync_serve as _;

fn main() -> ExitCode {
    weightsync_conformance::main(&Subjects::new().with("rpc:initial=connect"))
}
