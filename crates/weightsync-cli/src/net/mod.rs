//! `weightsync certs`, `relay`, `status` and `scrub`: the network as a person meets it.

mod certs;
mod relay;
mod scrub;
mod status;

use std::{
    error::Error,
    path::{Path, PathBuf},
    time::Duration,
};

use weightsync_engine::InitInfo;
use weightsync_link::access::Token;
use weightsync_link::address::resolve_all;
use weightsync_link::tls::{CertificateRole, Tls};
use weightsync_net::Distributed;
use weightsync_net::status::check_asked;

pub use certs::{CertsArgs, run as certs};
pub use relay::{RelayArgs, run as relay};
pub use scrub::run as scrub;
pub use status::run as status;

/// Where the credentials are.
#[derive(clap::Args)]
pub struct KeyArgs {
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
pub struct SenderArgs {
    /// The sender, as HOST:PORT. `status` takes a run directory, a file with an init info, and a
    /// store as well
    #[arg(value_name = "SENDER")]
    sender: Option<String>,
    #[command(flatten)]
    key: KeyArgs,
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

impl SenderArgs {
    /// Where it is, its secret, and the certificates of a link to it.
    fn endpoint(&self) -> Result<Endpoint, Box<dyn Error>> {
        match self.key.credentials(self.sender.as_deref())? {
            SenderCredentials::Token(address, token) => self.reach(address, token.secret()),
            SenderCredentials::Info(info) => self.endpoint_of(&info),
        }
    }

    /// The same of an init info.
    fn endpoint_of(&self, info: &InitInfo) -> Result<Endpoint, Box<dyn Error>> {
        let at = Distributed::endpoint_of(info)?;
        self.reach(at.address().to_owned(), *at.secret())
    }

    /// An address that may be dialled, with the certificates for it.
    fn reach(&self, address: String, secret: [u8; 16]) -> Result<Endpoint, Box<dyn Error>> {
        // The secret is given, so the environment's token is not read.
        let mut access = weightsync_link::access::Access::with_token(None)?;
        access.insecure_plaintext |= self.insecure_plaintext;
        let access = access.with_tls(CertificateRole::Worker, self.tls.as_deref())?;
        // Each address that the name leads to must be allowed: the connection may go to any.
        for one in resolve_all(&address)? {
            access.may_dial_with_secret(one)?;
        }
        Ok((address, secret, access.tls))
    }

    /// The init info, if a file of one was named.
    fn info(&self) -> Result<Option<InitInfo>, Box<dyn Error>> {
        match (&self.key.info, &self.sender) {
            // A file of this name comes before an address.
            (None, Some(given)) if Path::new(given).is_file() => {
                read_info(Path::new(given)).map(Some)
            }
            (None, _) => Ok(None),
            (Some(file), _) => read_info(file).map(Some),
        }
    }

    fn timeout(&self) -> Option<Duration> {
        Some(Duration::from_secs(self.timeout.max(1)))
    }
}

/// The init info in a file.
fn read_info(file: &Path) -> Result<InitInfo, Box<dyn Error>> {
    let text = std::fs::read_to_string(file)
        .map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
    let info = serde_json::from_str(&text).map_err(|error| {
        let file = file.display();
        format!("{file}: expected an init info as JSON, which is one line: {error}")
    })?;
    Ok(info)
}

/// The address of a sender and its token, or its init info, which has both.
enum SenderCredentials {
    Token(String, Token),
    Info(Box<InitInfo>),
}

impl KeyArgs {
    /// `given` is the address that was given, which an init info makes unnecessary.
    fn credentials(&self, given: Option<&str>) -> Result<SenderCredentials, Box<dyn Error>> {
        if let Some(file) = &self.info {
            // The file has the secret, so no token is asked for.
            return Ok(SenderCredentials::Info(Box::new(read_info(file)?)));
        }
        let given = given.ok_or("where is the sender? Say its HOST:PORT, or name its init info")?;
        if given.trim_start().starts_with('{') {
            // Other users see the arguments of a process.
            return Err(
                "an init info has a secret: write it to a file, and name that by --info".into(),
            );
        }
        check_asked(given).map_err(|error| match Path::new(given).exists() {
            true => format!("{error}. An init info in a file is named by --info {given}"),
            false => error.to_string(),
        })?;
        let token = match &self.token_file {
            Some(file) => Some(Token::from_file(file)?),
            None => Token::from_env()?,
        };
        let token = token.ok_or(
            "the sender requires its token: name its file by --token-file or \
             WEIGHTSYNC_TOKEN_FILE, or the sender's init info by --info",
        )?;
        Ok(SenderCredentials::Token(given.to_owned(), token))
    }
}
