//! The settings of `serve`: each is a flag, a variable of the environment, and a key of a file.

use std::path::{Path, PathBuf};
use std::{error::Error, fs};

use serde::{Deserialize, Serialize};
use weightsync_link::access::{Access, Token};
use weightsync_link::tls::CertificateRole;
use weightsync_serve::synchronizer::{StyleWords, SynchronizerOptions, method};

/// Where a synchronizer listens by default.
const ADDRESS: &str = "127.0.0.1:7100";

/// The settings of a synchronizer. What is not set has its default.
#[derive(clap::Args, Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    /// Where it listens, as HOST:PORT; 127.0.0.1:7100 by default
    #[arg(long, value_name = "HOST:PORT", env = "WEIGHTSYNC_SERVE_ADDRESS")]
    address: Option<String>,
    /// How versions travel: memory, checkpoint or nccl. By default the trainer chooses
    #[arg(long, env = "WEIGHTSYNC_SERVE_METHOD")]
    method: Option<String>,
    /// When parties synchronise that do not say so: fixed (the default), explorer_driven,
    /// trainer_driven, fully_async or bounded
    #[arg(long, env = "WEIGHTSYNC_SERVE_STYLE")]
    style: Option<String>,
    /// Steps between two syncs; 1 by default
    #[arg(long, value_name = "STEPS", env = "WEIGHTSYNC_SERVE_INTERVAL")]
    interval: Option<u64>,
    /// For the style fixed: by how many steps explorers are ahead; 0 by default
    #[arg(long, value_name = "STEPS", env = "WEIGHTSYNC_SERVE_OFFSET")]
    offset: Option<u64>,
    /// For the style bounded: how many versions an explorer may be behind; 1 by default
    #[arg(long, value_name = "VERSIONS", env = "WEIGHTSYNC_SERVE_LAG")]
    lag: Option<u64>,
    /// How many older versions are kept in memory; 1 by default
    #[arg(long, value_name = "VERSIONS", env = "WEIGHTSYNC_SERVE_HISTORY")]
    history: Option<u8>,
    /// A store that keeps the versions: a directory, or an address such as s3://bucket/path
    #[arg(long, value_name = "STORE", env = "WEIGHTSYNC_SERVE_STORE")]
    store: Option<String>,
    /// Which versions the store keeps: all (the default), N, or N+every:M. With the method checkpoint the
    /// trainer says it
    #[arg(long, env = "WEIGHTSYNC_SERVE_KEEP")]
    keep: Option<String>,
    /// A directory for what a restarted synchronizer has to know
    #[arg(long, value_name = "DIRECTORY", env = "WEIGHTSYNC_SERVE_RUN_DIR")]
    run_dir: Option<PathBuf>,
    /// How many trainers and explorers there may be at a time; 4096 by default
    #[arg(long, value_name = "NUMBER", env = "WEIGHTSYNC_SERVE_MAX_PARTIES")]
    max_parties: Option<usize>,
    /// File with the token that every party must have [default: WEIGHTSYNC_TOKEN_FILE, or the token in
    /// WEIGHTSYNC_TOKEN]
    #[arg(long, value_name = "FILE", env = "WEIGHTSYNC_TOKEN_FILE")]
    token_file: Option<PathBuf>,
    /// Folder or file with the certificates of encrypted connections, as `weightsync certs new` makes
    /// them
    #[arg(long, value_name = "PATH", env = "WEIGHTSYNC_TLS_DIR")]
    tls: Option<PathBuf>,
    /// Allow unencrypted connections to other machines
    #[arg(
        long,
        num_args = 0..=1,
        default_missing_value = "true",
        env = "WEIGHTSYNC_SERVE_INSECURE_PLAINTEXT"
    )]
    insecure_plaintext: Option<bool>,
}

/// Reads a file of settings.
pub fn read(file: &Path) -> Result<Settings, Box<dyn Error>> {
    let text = fs::read_to_string(file);
    let text = text.map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
    parse(&text).map_err(|error| format!("{}: {error}", file.display()).into())
}

fn parse(text: &str) -> Result<Settings, String> {
    // As a table first, only to name an unknown key with what was probably meant.
    let table: toml::Table = text.parse().map_err(|error| format!("{error}"))?;
    let known = keys();
    for key in table.keys() {
        if !known.contains(key) {
            return Err(format!(
                "there is no setting {key}; {}",
                nearest(key, &known)
            ));
        }
    }
    toml::from_str(text).map_err(|error| error.to_string())
}

/// The names of all settings.
fn keys() -> Vec<String> {
    // The names come from the type, so a new setting is known here without a second list.
    let all = serde_json::to_value(Settings::default());
    let all = all
        .ok()
        .and_then(|all| Some(all.as_object()?.keys().cloned().collect()));
    all.unwrap_or_default()
}

/// What was probably meant.
pub fn nearest(key: &str, known: &[impl AsRef<str>]) -> String {
    let likeness = |known: &str| strsim::jaro_winkler(key, known);
    let best = known.iter().map(AsRef::as_ref);
    let best = best.max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    // Below this likeness a suggestion would be misleading, and all names are listed.
    match best.filter(|best| likeness(best) > 0.7) {
        Some(best) => format!("did you mean {best}?"),
        None => {
            let known: Vec<_> = known.iter().map(AsRef::as_ref).collect();
            format!("there are {}", known.join(", "))
        }
    }
}

impl Settings {
    /// These settings, and those of a file where these have none.
    pub fn over(self, file: Self) -> Self {
        // Every field is named, so a new setting cannot be forgotten here.
        Self {
            address: self.address.or(file.address),
            method: self.method.or(file.method),
            style: self.style.or(file.style),
            interval: self.interval.or(file.interval),
            offset: self.offset.or(file.offset),
            lag: self.lag.or(file.lag),
            history: self.history.or(file.history),
            store: self.store.or(file.store),
            keep: self.keep.or(file.keep),
            run_dir: self.run_dir.or(file.run_dir),
            max_parties: self.max_parties.or(file.max_parties),
            token_file: self.token_file.or(file.token_file),
            tls: self.tls.or(file.tls),
            insecure_plaintext: self.insecure_plaintext.or(file.insecure_plaintext),
        }
    }

    pub fn address(&self) -> &str {
        self.address.as_deref().unwrap_or(ADDRESS)
    }

    /// Who may connect, and with what certificates.
    pub fn access(&self) -> Result<Access, Box<dyn Error>> {
        let mut access = self.access_without_tls()?;
        access.insecure_plaintext |= self.insecure_plaintext.unwrap_or(false);
        Ok(access.with_tls(CertificateRole::Trainer, self.tls.as_deref())?)
    }

    /// Who may connect, without certificates: enough to print the header of requests.
    pub fn access_without_tls(&self) -> Result<Access, Box<dyn Error>> {
        Ok(match &self.token_file {
            Some(file) => Access::with_token(Some(Token::from_file(file)?))?,
            None => Access::from_env()?,
        })
    }

    /// What a synchronizer is made with.
    pub fn options(&self) -> Result<SynchronizerOptions, Box<dyn Error>> {
        let mut options = SynchronizerOptions::new()
            .method(self.method.as_deref().map(method).transpose()?)
            .store(self.store.clone())
            .run_dir(self.run_dir.clone());
        let style: StyleWords = self.style.as_deref().unwrap_or("fixed").parse()?;
        let style = style
            .interval(self.interval)
            .offset(self.offset)
            .lag(self.lag);
        options = options.style(style.style()?);
        if let Some(keep) = &self.keep {
            options = options.keep(keep.parse()?);
        }
        if let Some(history) = self.history {
            options = options.history(history);
        }
        if let Some(parties) = self.max_parties {
            options = options.max_parties(parties);
        }
        Ok(options)
    }

    /// Whether `serve` would take them.
    pub fn check(&self) -> Result<(), Box<dyn Error>> {
        self.options()?.check()?;
        let access = self.access()?;
        // Only checked, and nothing is bound.
        access.may_listen(weightsync_link::address::listening(
            "address",
            self.address(),
        )?)?;
        Ok(())
    }

    /// All that is set, and the defaults, as a file.
    pub fn text(&self) -> Result<String, Box<dyn Error>> {
        let set = toml::to_string(self)?;
        let defaults = [
            ("address", "\"127.0.0.1:7100\""),
            ("style", "\"fixed\""),
            ("interval", "1"),
            ("history", "1"),
            ("max_parties", "4096"),
        ];
        let mut text = set.clone();
        for (key, value) in defaults {
            // Defaults are comments: the text can be saved as a file that sets nothing more.
            if !set.lines().any(|line| line.split(' ').next() == Some(key)) {
                text += &format!("# {key} = {value}\n");
            }
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_read_from_a_file() {
        let text = "address = \"127.0.0.1:0\"\nmethod = \"memory\"\nstyle = \"bounded\"\ninterval = 4\n\
                    lag = 2\nhistory = 3\nstore = \"/srv/policy\"\nkeep = \"8\"\nrun_dir = \"/srv/run\"\n\
                    max_parties = 10\ntoken_file = \"/srv/token\"\ntls = \"/srv/pki\"\n\
                    insecure_plaintext = true\n";
        let settings = parse(text).unwrap();
        drop(settings.options().unwrap());
        assert_eq!(settings.text().unwrap(), text);
        // All but `offset`, which the style does not have.
        assert_eq!(text.lines().count() + 1, keys().len());
    }

    #[test]
    fn unknown_key_is_an_error_with_the_nearest_name() {
        let error = parse("intervall = 4").unwrap_err();
        assert_eq!(
            error,
            "there is no setting intervall; did you mean interval?"
        );
        let error = parse("zzz = 4").unwrap_err();
        assert!(error.contains("there are address, "), "{error}");
        let error = parse("interval = \"4\"").unwrap_err();
        assert!(error.contains("line 1"), "{error}");
    }

    #[test]
    fn flags_come_before_the_file() {
        let file = parse("interval = 4\nlag = 2").unwrap();
        let flags = Settings {
            interval: Some(9),
            ..Settings::default()
        };
        let both = flags.over(file);
        assert_eq!((both.interval, both.lag), (Some(9), Some(2)));
    }

    #[test]
    fn settings_that_do_not_fit_are_refused() {
        for text in [
            "method = \"ncl\"",
            "style = \"fixd\"",
            "style = \"fixed\"\nlag = 1",
            "interval = 0",
            "keep = \"8\"",
            "store = \"x\"\nkeep = \"some\"",
            "store = \"x\"\nmethod = \"nccl\"",
            "store = \"x\"\nmethod = \"checkpoint\"\nkeep = \"8\"",
            "address = \"nowhere\"",
            "token_file = \"/nonexistent\"",
        ] {
            assert!(parse(text).unwrap().check().is_err(), "{text}");
        }
    }
}
