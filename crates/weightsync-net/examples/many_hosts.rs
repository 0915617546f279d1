//! A trainer, and workers wherever they are.
//!
//! ```sh
//! many_hosts trainer 0.0.0.0:7070 info.json    # on one host; sends a version a second
//! many_hosts worker info.json 0                # on any other: copy info.json there
//! weightsync relay --info info.json            # once per host, before its workers
//! weightsync status --info info.json
//! ```
//!
//! Off loopback the trainer and each relay need `WEIGHTSYNC_TOKEN_FILE`, as others connect
//! to them. Every process needs certificates (`WEIGHTSYNC_TLS_DIR`), or
//! `WEIGHTSYNC_INSECURE_PLAINTEXT=1`.

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::time::Duration;

use weightsync_engine::{Expect, InitInfo, ReceiverSetup, SenderSetup, Tensors};
use weightsync_net::Distributed;

const SOON: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["trainer", listen, info] => train(listen, info, u64::MAX),
        ["trainer", listen, info, versions] => train(listen, info, versions.parse()?),
        ["worker", info, number] => work(info, number.parse()?),
        _ => Err("trainer HOST:PORT INFO [VERSIONS], or worker INFO NUMBER".into()),
    }
}

fn train(listen: &str, info: &str, versions: u64) -> Result<(), Box<dyn Error>> {
    let mut weights = Tensors::new();
    weights.insert("layer.weight", [1024, 1024], vec![0.0_f32; 1 << 20])?;
    let setup = SenderSetup::new("policy", &weights)?.scheme(Distributed::new().listen(listen))?;
    // A process that has it can join: give it to workers as you would a password.
    let text = serde_json::to_string(&setup.init_info())?;
    // One of an earlier run may have another mode.
    let _ = fs::remove_file(info);
    let mut new = OpenOptions::new();
    let mut file = new.write(true).create_new(true).mode(0o600).open(info)?;
    file.write_all(text.as_bytes())?;
    let mut sender = setup.connect(&weights, Expect::Count(0), Some(SOON))?;
    for version in 1..versions {
        std::thread::sleep(Duration::from_secs(1));
        weights
            .slice_mut::<f32>("layer.weight")?
            .fill(version as f32);
        println!("{}", sender.send(&weights)?);
    }
    Ok(())
}

fn work(info: &str, number: u32) -> Result<(), Box<dyn Error>> {
    let info: InitInfo = serde_json::from_str(&fs::read_to_string(info)?)?;
    let setup = ReceiverSetup::new(info, number);
    let mut receiver = setup.connect(Some(SOON))?;
    loop {
        match receiver.recv() {
            Ok(weights) => {
                let first = weights.slice::<f32>("layer.weight")?[0];
                println!("worker {number} has {}: {first}", weights.version());
            }
            Err(error) if error.is_sender_closed() => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}
