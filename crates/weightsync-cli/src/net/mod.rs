//! `weightsync relay` and `weightsync status`: the network as a person meets it.

mod relay;
mod status;

use std::{error::Error, path::PathBuf};

use weightsync::InitInfo;
use weightsync_net::Token;

pub use relay::{Args as RelayArgs, run as relay};
pub use status::{Args as StatusArgs, run as status};

/// What lets one in.
#[derive(clap::Args)]
pub struct Key {
    /// File with the token that the sender has [default: WEIGHTSYNC_TOKEN_FILE, or the
    /// token in WEIGHTSYNC_TOKEN]
    #[arg(long, value_name = "FILE", conflicts_with = "info")]
    token_file: Option<PathBuf>,
    /// File with the sender's init info as JSON, in place of an address and a token
    #[arg(long, value_name = "FILE")]
    info: Option<PathBuf>,
}

/// Where the sender is, and what lets one in there.
enum Way {
    Token(Token),
    Info(Box<InitInfo>),
}

impl Key {
    fn way(&self) -> Result<Way, Box<dyn Error>> {
        if let Some(file) = &self.info {
            let text = std::fs::read_to_string(file)
                .map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
            return Ok(Way::Info(Box::new(serde_json::from_str(&text)?)));
        }
        let token = match &self.token_file {
            Some(file) => Some(Token::from_file(file)?),
            None => Token::from_env()?,
        };
        token.map(Way::Token).ok_or_else(|| {
            "a sender lets in who has its token: name a file with it by --token-file or \
             WEIGHTSYNC_TOKEN_FILE, or the sender's init info by --info"
                .into()
        })
    }
}

/// The address that was given, which an init info makes unnecessary.
fn address(given: Option<&str>) -> Result<String, Box<dyn Error>> {
    given
        .map(str::to_owned)
        .ok_or_else(|| "where is the sender? Say its HOST:PORT, or name its init info".into())
}
