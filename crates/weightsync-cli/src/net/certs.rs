//! `weightsync certs`: certificates for encrypted links.

use std::{error::Error, path::PathBuf};

use weightsync_link::tls::{CertificateRequest, make};

use crate::SUCCESS;
use crate::output::print;
use crate::words::counted;

/// What `certs` is asked for.
#[derive(clap::Subcommand)]
pub enum CertsArgs {
    /// Make an authority, and a certificate for the trainer, relays and workers
    New {
        /// The folder, which is made if it is not there
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// Names and addresses at which workers and relays reach the trainer
        #[arg(long, value_name = "NAMES", value_delimiter = ',', required = true)]
        hosts: Vec<String>,
        /// How long they hold
        #[arg(long, value_name = "DAYS", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=3650))]
        days: u32,
    },
}

/// Makes certificates.
pub fn run(args: &CertsArgs) -> Result<u8, Box<dyn Error>> {
    let CertsArgs::New { out, hosts, days } = args;
    let made = make(&CertificateRequest {
        out: out.clone(),
        hosts: hosts.clone(),
        days: *days,
    })?;
    let mut text = String::new();
    for file in &made.files {
        text += &format!("{}\n", file.display());
    }
    text += &format!(
        "They hold for {}. Each part needs its own file alone: tls={out} at the trainer, \
         --tls {out} of a command, or WEIGHTSYNC_TLS_DIR={out}.\n",
        counted(*days as usize, "day"),
        out = out.display()
    );
    print(&text)?;
    Ok(SUCCESS)
}
