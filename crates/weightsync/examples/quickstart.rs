//! A trainer and four worker processes: `cargo run --release -p weightsync --example quickstart`
use std::time::Duration;
use weightsync::{Expect, ReceiverSetup, SenderSetup, Tensors, worker};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let soon = Some(Duration::from_secs(10));
    if let Some(me) = worker::current()? {
        let mut receiver = ReceiverSetup::new(me.init_value()?, me.index() as u32).connect(soon)?;
        while let Ok(weights) = receiver.recv() {
            let bias = weights.slice::<f32>("layer.bias")?;
            println!("worker {} has {}: {bias:?}", me.index(), weights.version());
        }
        return Ok(()); // the trainer has closed its end
    }
    let mut weights = Tensors::new();
    weights.insert("layer.bias", [2], [0.0_f32, 0.0])?;
    let setup = SenderSetup::new("policy", &weights)?;
    let workers = worker::Spawn::this_program()?.count(4);
    let _workers = workers.init_value(&setup.init_info())?.start()?;
    let mut sender = setup.connect(&weights, Expect::Count(4), soon)?;
    weights.slice_mut::<f32>("layer.bias")?[0] = 1.0;
    println!("{}", sender.send(&weights)?);
    Ok(())
}
