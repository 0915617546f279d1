//! A week of training in an hour: `cargo xtask soak --hours N`.
//!
//! A trainer sends versions within the host, through a relay, to workers that fetch for themselves and
//! over HTTP, encrypted wherever they travel, and saves them. Workers check every element. Of each
//! scheme one worker stays, and one comes and goes. What the processes that stay have (threads,
//! descriptors, memory) and what lies on the disk must be no more at the end than it was near the
//! beginning.

mod parts;
mod watch;

use std::error::Error;
use std::fmt::Write as _;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use weightsync_link::tls::{CertificateRequest, make};

pub use self::parts::{PartArgs, part};
use self::parts::{Process, TrainerSaid};
use self::watch::{Kind, Samples};

/// How the soak is run.
#[derive(clap::Args)]
pub struct Args {
    /// Hours that it lasts
    #[arg(long, default_value_t = 1.0)]
    hours: f64,
    /// Versions a second; at 20 an hour has as many as a week with one every ten seconds
    #[arg(long, default_value_t = 20)]
    rate: u32,
    /// Write every sample to this file, as CSV
    #[arg(long)]
    csv: Option<PathBuf>,
}

/// How the trainer's versions travel.
const SCHEMES: [&str; 4] = [
    "shared-mem",
    "distributed:share=relay",
    "distributed:share=none,connections=2",
    "rpc",
];

/// A worker is killed or ended this often.
const CHURN: Duration = Duration::from_secs(2);

/// What everybody has is looked at this often.
const LOOK: Duration = Duration::from_secs(5);

/// Below this nothing is compared: processes have not taken all the memory that they work with.
const COMPARED: Duration = Duration::from_secs(6 * 60);

/// A week, if a trainer sends a version every ten seconds.
const WEEK: u64 = 7 * 24 * 360;

/// Runs it; an error if anything failed or grew.
pub fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let lasts = Duration::try_from_secs_f64(args.hours * 3600.0)?;
    let dir = tempfile::tempdir()?;
    let pki = dir.path().join("pki");
    make(&CertificateRequest {
        out: pki.clone(),
        hosts: vec!["127.0.0.1".into()],
        days: 2,
    })?;
    let token = dir.path().join("token");
    std::fs::write(&token, "a token of the soak, which nobody else has")?;
    std::fs::set_permissions(&token, Permissions::from_mode(0o600))?;
    let saved = dir.path().join("store");
    let environment = [
        ("WEIGHTSYNC_TLS_DIR", pki.as_path()),
        ("WEIGHTSYNC_TOKEN_FILE", token.as_path()),
        ("WEIGHTSYNC_TLS_LOOPBACK", "1".as_ref()),
    ];
    let start = |args: &[&str]| Process::start(args, &environment);

    let mut trainer = start(
        &[
            &[
                "soak-part",
                "trainer",
                &saved.display().to_string(),
                &args.rate.to_string(),
            ],
            &SCHEMES[..],
        ]
        .concat(),
    )?;
    let TrainerSaid { infos, relayed } = serde_json::from_str(&trainer.line()?)?;
    let mut relay = start(&["relay", "--join", &relayed])?;
    relay.line()?;
    let worker = |scheme: usize, number: usize| {
        let number = number.to_string();
        start(&["soak-part", "worker", &infos[scheme], &number])
    };
    let mut stay = Vec::new();
    let mut leave = Vec::new();
    for scheme in 0..SCHEMES.len() {
        stay.push(worker(scheme, 0)?);
        leave.push(worker(scheme, 1)?);
    }
    // The time begins once each has checked a version.
    for one in &mut stay {
        one.line()?;
    }

    let mut samples = Samples::default();
    let begun = Instant::now();
    let mut go_on = || -> Result<usize, Box<dyn Error>> {
        let (mut churned, mut looked, mut churns) = (begun, begun, 0);
        while begun.elapsed() < lasts {
            std::thread::sleep(Duration::from_millis(200));
            trainer.is_well("the trainer")?;
            relay.is_well("the relay")?;
            for one in stay.iter_mut().chain(&mut leave) {
                one.is_well("a worker")?;
            }
            if churned.elapsed() >= CHURN {
                churned = Instant::now();
                let scheme = churns % SCHEMES.len();
                // By turns: it is killed, or ends in order.
                match churns / SCHEMES.len() % 2 {
                    0 => leave[scheme].kill()?,
                    _ => drop(leave[scheme].end()?),
                };
                leave[scheme] = worker(scheme, 1)?;
                churns += 1;
            }
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                let at = begun.elapsed();
                let processes = [("trainer", &trainer), ("relay", &relay)];
                let workers = SCHEMES.iter().copied().zip(&stay);
                samples.look(at, processes.into_iter().chain(workers))?;
                samples.note(at, "disk", Kind::Disk, watch::disk(dir.path())?);
            }
        }
        Ok(churns)
    };
    let outcome = go_on();
    let took = begun.elapsed();
    // Also of a run that failed, which is when it is wanted.
    let written = args
        .csv
        .as_ref()
        .map_or(Ok(()), |path| std::fs::write(path, samples.csv()));
    let churns = outcome?;
    written?;
    for one in &mut leave {
        one.end()?;
    }
    let mut checked = Vec::new();
    for (scheme, one) in SCHEMES.iter().zip(&mut stay) {
        checked.push(format!("{} by {scheme}", one.end()?));
    }
    let sent = trainer.end()?;
    relay.kill()?;
    let mut report = String::new();
    writeln!(
        report,
        "{sent} versions in {:.2} h ({:.2} weeks at one every ten seconds), each by {} schemes and \
         {churns} workers that came and went; checked: {}",
        took.as_secs_f64() / 3600.0,
        sent as f64 / WEEK as f64,
        SCHEMES.len(),
        checked.join(", "),
    )?;
    let grown = samples.compare(&mut report)?;
    print!("{report}");
    match grown.as_slice() {
        _ if took < COMPARED => {
            println!("too short to compare: it takes {COMPARED:?}");
            Ok(())
        }
        [] => Ok(()),
        grown => Err(format!("it grew: {}", grown.join("; ")).into()),
    }
}
