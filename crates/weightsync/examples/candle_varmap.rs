//! A candle model at both ends: `cargo run --release -p weightsync --features candle --example candle_varmap`

use std::error::Error;
use std::thread;
use std::time::Duration;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Linear, Module, VarBuilder, VarMap};
use weightsync::{Error as SyncError, Expect, InitInfo, ReceiverSetup, SenderSetup};

const SOON: Option<Duration> = Some(Duration::from_secs(30));

fn main() -> Result<(), Box<dyn Error>> {
    let (vars, policy) = policy()?;
    let setup = SenderSetup::new("policy", &vars)?;
    let info = setup.init_info();
    // In practice, a process of its own.
    let worker = thread::spawn(move || act(info).map_err(|error| error.to_string()));

    let mut sender = setup.connect(&vars, Expect::Count(1), SOON)?;
    for step in 1..=3 {
        // In practice, a step of an optimizer.
        for var in vars.all_vars() {
            var.set(&var.affine(1.0, 0.1)?)?;
        }
        println!("trainer, step {step}: {}", value(&policy)?);
        println!("{}", sender.send(&vars)?);
    }
    drop(sender); // tells the worker that nothing more comes
    Ok(worker.join().map_err(|_| "the worker panicked")??)
}

/// Loads every version into a model of its own, and uses it.
fn act(info: InitInfo) -> Result<(), Box<dyn Error>> {
    let (mut vars, policy) = policy()?;
    // A trainer whose model is another one is refused, by the tensors' names.
    let mut receiver = ReceiverSetup::new(info, 0).model(&vars)?.connect(SOON)?;
    loop {
        match receiver.loading(&mut vars).recv() {
            Ok(version) => println!("worker, {version}: {}", value(&policy)?),
            Err(SyncError::SenderClosed) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
}

fn policy() -> candle_core::Result<(VarMap, Linear)> {
    let vars = VarMap::new();
    let builder = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let layer = candle_nn::linear(3, 1, builder.pp("policy"))?;
    Ok((vars, layer))
}

fn value(policy: &Linear) -> candle_core::Result<f32> {
    let observation = Tensor::new(&[[1.0_f32, 2.0, 3.0]], &Device::Cpu)?;
    policy
        .forward(&observation)?
        .flatten_all()?
        .get(0)?
        .to_scalar()
}
