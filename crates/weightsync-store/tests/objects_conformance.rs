//! The suite, on the scheme `store` over S3.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};
use weightsync_conformance::Subjects;
use weightsync_store::StoreScheme;

#[path = "objects/server.rs"]
mod server;

fn main() -> ExitCode {
    match server::provide(false) {
        Ok(server::Role::Ended(code)) => code,
        Ok(server::Role::Test(ends)) => {
            // No proxy is asked for.
            drop(ends);
            suite()
        }
        Err(missing) => {
            // A test that fails, so that none is passed over.
            let fails = move || Err(Failed::from(missing));
            let trial = Trial::test("server_is_there", fails);
            libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit_code()
        }
    }
}

fn suite() -> ExitCode {
    let text = format!("s3://{}/conformance", server::BUCKET);
    let scheme = match StoreScheme::new(&text) {
        Ok(scheme) => scheme,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let subjects = Subjects::new()
        .with(&format!("store:{text},keep=1,temporary"))
        // A send is some hundred requests.
        .slow()
        .residue(move || {
            scheme
                .sweep()
                .unwrap_or_else(|error| vec![error.to_string()])
        });
    weightsync_conformance::main(&subjects)
}
