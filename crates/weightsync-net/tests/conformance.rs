//! The conformance suite, on the scheme of many hosts: through the trainer's own
//! memory, as on its host, with a link for each worker, as elsewhere, and with all
//! workers at one relay, as on a host that has one.

mod relayed;

use std::process::ExitCode;

use weightsync_conformance::Subjects;

fn main() -> ExitCode {
    if let Some(ended) = relayed::run() {
        return ended;
    }
    let subjects = Subjects::new()
        .with("distributed")
        .with("distributed:share=none")
        .with("distributed:every=3,own-copy,share=none")
        .with("distributed:pull,share=none")
        .with("distributed:share=none,deltas=always")
        .with("relayed")
        .with("relayed:every=3")
        .with("relayed:pull")
        .with("relayed:deltas=always")
        .beside(relayed::start);
    weightsync_conformance::main(&subjects)
}
