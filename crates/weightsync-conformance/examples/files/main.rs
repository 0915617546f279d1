//! A trainer and three workers, with a scheme that is not built in: weights go
//! through files. `cargo run --release -p weightsync-conformance --example files`
//!
//! The scheme is in `scheme/`. A test of this package runs the conformance suite
//! on it (`tests/files.rs`).

mod scheme;

use std::time::Duration;

use scheme::Files;
use weightsync_engine::{Expect, ReceiverSetup, SenderSetup, Set, Tensors, worker};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let soon = Some(Duration::from_secs(10));
    if let Some(me) = worker::current()? {
        let setup = ReceiverSetup::new(me.init_value()?, me.index() as u32);
        // The init info names the scheme by its word: a worker has to know it.
        let mut receiver = setup.connect(soon)?;
        while let Ok(set) = receiver.set().recv() {
            println!("worker {} has {:?}", me.index(), set.versions());
        }
        return Ok(()); // the trainer has closed its end
    }
    let (mut policy, mut critic) = (Tensors::new(), Tensors::new());
    policy.insert("layer.weight", [2, 2], [0.0_f32; 4])?;
    critic.insert("head.weight", [2], [0.0_f32; 2])?;
    let dir = std::env::temp_dir().join("weightsync-files-example");
    let files = Files::new(&dir.display().to_string())?;
    let setup = SenderSetup::new("policy", &policy)?
        .add_model("critic", &critic)?
        .scheme(files.clone())?;
    let workers = worker::Spawn::this_program()?.count(3);
    let workers = workers.init_value(&setup.init_info())?.start()?;
    let both = Set::new().with("policy", &policy).with("critic", &critic);
    let mut sender = setup.connect(&both, Expect::Count(3), soon)?;
    for step in 1..=3 {
        policy.slice_mut::<f32>("layer.weight")?[0] = step as f32;
        let both = Set::new().with("policy", &policy).with("critic", &critic);
        println!("{}", sender.send(&both)?);
    }
    drop(sender); // the workers read what was sent last, and leave
    drop(workers);
    assert!(files.sweep().is_empty(), "and nothing is left");
    Ok(())
}
