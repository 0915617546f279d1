//! `weightsync certs`, `relay`, `status` and `scrub`: the network as a person meets it.

mod certs;
mod relay;
mod scrub;
mod status;

use std::{error::Error, net::ToSocketAddrs, path::PathBuf, time::Duration};

use weightsync_engine::InitInfo;
use weightsync_net::Token;
use weightsync_net::tls::{Part, Tls};

pub use certs::{Args as CertsArgs, run as certs};
pub use relay::{Args as RelayArgs, run as relay};
pub use scrub::run as scrub;
pub use status::run as status;

/// Where the credentials are.
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

/// A sender's address, its secret, and the certificates of a link to it.
type Endpoint = (String, [u8; 16], Option<Tls>);

/// A sender that is asked for something.
#[derive(clap::Args)]
pub struct Asked {
    /// The sender, as HOST:PORT
    #[arg(value_name = "HOST:PORT")]
    sender: Option<String>,
    #[command(flatten)]
    key: Key,
    /// As JSON
    #[arg(long)]
    pub json: bool,
    /// Allow unencrypted connections to other machines
    #[arg(long)]
    insecure_plaintext: bool,
    /// Certificates of encrypted links: a folder, or a file such as worker.pem [default:
    /// WEIGHTSYNC_TLS_DIR]
    #[arg(long, value_name = "PATH")]
    tls: Option<PathBuf>,
    /// Seconds of silence until it is given up
    #[arg(long, default_value_t = 5)]
    timeout: u64,
}

impl Asked {
    /// Where it is, its secret, and the certificates of a link to it.
    fn endpoint(&self) -> Result<Endpoint, Box<dyn Error>> {
        let (address, secret) = match self.key.credentials()? {
            Credentials::Token(token) => (address(self.sender.as_deref())?, token.secret()),
            Credentials::Info(info) => {
                let at = info.endpoint();
                (at.address().to_owned(), *at.secret())
            }
        };
        let mut access = weightsync_net::Access::with_token(None)?;
        access.insecure_plaintext |= self.insecure_plaintext;
        let access = access.with_tls(Part::Worker, self.tls.as_deref())?;
        for one in address.to_socket_addrs().into_iter().flatten() {
            access.may_dial_with_secret(one)?;
        }
        Ok((address, secret, access.tls))
    }

    fn timeout(&self) -> Option<Duration> {
        Some(Duration::from_secs(self.timeout.max(1)))
    }
}

/// The token of a sender, or its init info, which has its address too.
enum Credentials {
    Token(Token),
    Info(Box<InitInfo>),
}

impl Key {
    fn credentials(&self) -> Result<Credentials, Box<dyn Error>> {
        if let Some(file) = &self.info {
            let text = std::fs::read_to_string(file)
                .map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
            return Ok(Credentials::Info(Box::new(serde_json::from_str(&text)?)));
        }
        let token = match &self.token_file {
            Some(file) => Some(Token::from_file(file)?),
            None => Token::from_env()?,
        };
        token.map(Credentials::Token).ok_or_else(|| {
            "the sender requires its token: name its file by --token-file or \
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
