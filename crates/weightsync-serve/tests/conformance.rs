//! The suite that every scheme passes, on this one.

use std::process::ExitCode;

use weightsync_conformance::Subjects;
use weightsync_serve::schemes;

fn main() -> ExitCode {
    weightsync_conformance::main(&Subjects::new(schemes()).with("rpc:initial=connect"))
}
