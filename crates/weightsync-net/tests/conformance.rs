//! The conformance suite, on the scheme of many hosts: through the trainer's own
//! memory, through one relay for all workers, and with a link for each worker.

use std::process::ExitCode;

use weightsync_conformance::Subjects;
use weightsync_net::Distributed;

fn main() -> ExitCode {
    let subjects = Subjects::new(Distributed::among_schemes())
        .with("distributed")
        .with("distributed:share=workers")
        .with("distributed:share=workers,every=3")
        .with("distributed:share=workers,pull")
        .with("distributed:share=none")
        .with("distributed:own-copy,share=none");
    weightsync_conformance::main(&subjects)
}
