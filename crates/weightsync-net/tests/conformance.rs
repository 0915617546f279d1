//! The conformance suite, on the scheme of many hosts: through the trainer's own
//! memory, as on its host, and with a link for each worker, as elsewhere.

use std::process::ExitCode;

use weightsync_conformance::Subjects;
use weightsync_net::Distributed;

fn main() -> ExitCode {
    let subjects = Subjects::new(Distributed::among_schemes())
        .with("distributed")
        .with("distributed:share=none")
        .with("distributed:every=3,own-copy,share=none")
        .with("distributed:pull,share=none");
    weightsync_conformance::main(&subjects)
}
