//! The RPC scheme alone: what the suite does not ask of every scheme.

mod addresses;
mod async_runtimes;
mod encrypted;
mod files;
mod first;
mod foreign;
mod greedy;
mod hostile;
mod impostor;
mod links;
mod proxy;

use std::time::Duration;

use weightsync_conformance::scale::patience;
use weightsync_engine::transport::FirstWeights;
use weightsync_engine::{
    Expect, InitInfo, Receiver, ReceiverSetup, Result, Sender, SenderSetup, Tensors,
};
use weightsync_serve::Rpc;

/// How long something may take that takes a moment.
fn soon() -> Duration {
    patience(10)
}

/// How long nothing is waited for that is not to come.
const BRIEF: Duration = Duration::from_millis(150);

/// A model of so many floats, each of this value.
fn weights(len: usize, value: f32) -> Tensors {
    let mut weights = Tensors::new();
    weights
        .insert("layer.weight", [len as u64], vec![value; len])
        .expect("a tensor");
    weights
}

/// With the first weights at connect.
fn at_connect() -> Rpc {
    Rpc::default().initial(FirstWeights::AtConnect)
}

fn setup(weights: &Tensors, scheme: Rpc) -> SenderSetup {
    let setup = SenderSetup::new("policy", weights).expect("a model");
    setup
        .scheme(scheme)
        .expect("a place")
        .send_timeout(Some(soon()))
}

/// A sender that expects nobody.
fn sender(weights: &Tensors, scheme: Rpc) -> Sender {
    let setup = setup(weights, scheme);
    setup
        .connect(weights, Expect::Count(0), Some(soon()))
        .expect("a sender")
}

fn worker(info: InitInfo, number: u32) -> Result<Receiver> {
    ReceiverSetup::new(info, number).connect(Some(soon()))
}

/// The value of what a worker receives next.
fn receive(receiver: &mut Receiver) -> f32 {
    let got = receiver.recv_timeout(soon()).expect("it comes");
    let got = got.expect("it comes in time");
    let values = got.slice::<f32>("layer.weight").expect("floats");
    assert!(values.iter().all(|value| *value == values[0]), "a mix");
    values[0]
}

/// The parts of an init info's JSON form.
fn parts(info: &InitInfo) -> (String, [u8; 16]) {
    let value = serde_json::to_value(info).expect("it has a JSON form");
    let address = value["at"]["address"].as_str().expect("an address");
    let secret = value["at"]["secret"].clone();
    let secret = serde_json::from_value(secret).expect("16 bytes");
    (address.to_owned(), secret)
}
