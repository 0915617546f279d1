//! A checkpoint on disk, sent as BF16, and a version kept as a checkpoint again:
//! `cargo run --release -p weightsync --example safetensors_file -- in.safetensors out.safetensors`
//!
//! Without arguments it makes a small checkpoint of its own in a temporary folder.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use weightsync::{Dtype, Expect, ReceiverSetup, SafetensorsFile, SenderSetup, Tensors};

const SOON: Option<Duration> = Some(Duration::from_secs(30));

fn main() -> Result<(), Box<dyn Error>> {
    match &std::env::args().skip(1).collect::<Vec<_>>()[..] {
        [from, to] => serve(from.as_ref(), to.as_ref()),
        _ => {
            let folder = std::env::temp_dir().join(format!("weightsync-{}", std::process::id()));
            std::fs::create_dir(&folder)?;
            let served =
                checkpoint(&folder).and_then(|from| serve(&from, &folder.join("out.safetensors")));
            std::fs::remove_dir_all(&folder)?;
            served
        }
    }
}

/// Sends the weights in one file to a worker, which keeps them in another.
fn serve(from: &Path, to: &Path) -> Result<(), Box<dyn Error>> {
    // Each tensor is read straight into shared memory, cast on its way; integers stay.
    let file = SafetensorsFile::open(from)?;
    let setup = SenderSetup::new("policy", &file)?.cast(Dtype::BF16)?;
    let info = setup.init_info();
    let to = to.to_owned();

    // In practice, a process of its own, perhaps one that is started much later.
    let worker = thread::spawn(move || -> weightsync::Result<()> {
        let mut receiver = ReceiverSetup::new(info, 0).connect(SOON)?;
        let weights = receiver.recv()?;
        let digest = weights.save_safetensors(&to)?;
        println!(
            "{} with digest {digest} is in {}",
            weights.version(),
            to.display()
        );
        // It stays until the trainer has closed: one that has left again is not counted.
        while receiver.recv().is_ok() {}
        Ok(())
    });
    let sender = setup.connect(&file, Expect::Count(1), SOON)?;
    println!(
        "{} tensors, {} bytes",
        sender.layout()?.len(),
        sender.layout()?.payload_bytes()
    );
    drop(sender);
    Ok(worker.join().map_err(|_| "the worker panicked")??)
}

/// A small checkpoint: any version can be saved, by the sender as well.
fn checkpoint(folder: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let mut weights = Tensors::new();
    weights.insert("layer.weight", [4, 4], [0.1_f32; 16])?;
    weights.insert("step", [], [7_i64])?;
    let setup = SenderSetup::new("policy", &weights)?;
    let sender = setup.connect(&weights, Expect::Count(0), SOON)?;
    let path = folder.join("in.safetensors");
    sender.snapshot()?.save_safetensors(&path)?;
    Ok(path)
}
