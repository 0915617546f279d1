//! A candle model at both ends.

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, VarBuilder, VarMap};
use half::bf16;
use weightsync_engine::{Dtype, Error, SendOptions, SenderSetup, Tensors, Version, WaitFor};

use crate::{pair, pair_by, soon};

fn add(map: &VarMap, name: &str, tensor: Tensor) {
    let var = Var::from_tensor(&tensor).unwrap();
    map.data().lock().unwrap().insert(name.into(), var);
}

fn model() -> (VarMap, Linear) {
    let map = VarMap::new();
    let vars = VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu);
    let layer = candle_nn::linear(4, 3, vars.pp("actor.0")).unwrap();
    (map, layer)
}

#[test]
fn a_worker_computes_what_the_trainer_does() {
    let (trainer, trained) = model();
    let (mut worker, acting) = model();
    let (mut sender, mut receiver) = pair(&trainer);
    let input = Tensor::new(&[[1.0_f32, -2.0, 3.0, 0.5]], &Device::Cpu).unwrap();
    for step in 0..3 {
        for var in trainer.all_vars() {
            var.set(
                &(var.as_tensor() * 0.5)
                    .unwrap()
                    .affine(1.0, f64::from(step))
                    .unwrap(),
            )
            .unwrap();
        }
        let (report, loaded) = std::thread::scope(|scope| {
            let worker = scope.spawn(|| receiver.loading(&mut worker).recv_timeout(soon()));
            let report = sender.send(&trainer);
            (report, worker.join().unwrap())
        });
        assert!(report.unwrap().all_applied());
        assert_eq!(loaded.unwrap(), Some(Version(step as u64 + 2)));
        let (here, there) = (
            trained.forward(&input).unwrap(),
            acting.forward(&input).unwrap(),
        );
        assert_eq!(
            here.to_vec2::<f32>().unwrap(),
            there.to_vec2::<f32>().unwrap()
        );
    }
}

#[test]
fn variables_come_sorted_by_name_with_their_dtypes() {
    let map = VarMap::new();
    let cpu = &Device::Cpu;
    add(&map, "z", Tensor::new(&[1.5_f32, -2.0], cpu).unwrap());
    add(&map, "f64", Tensor::new(0.25_f64, cpu).unwrap());
    add(&map, "bf16", Tensor::new(&[bf16::ONE], cpu).unwrap());
    add(&map, "u8", Tensor::new(&[[1_u8, 2], [3, 4]], cpu).unwrap());
    add(&map, "u32", Tensor::new(&[u32::MAX], cpu).unwrap());
    add(&map, "i64", Tensor::new(&[-1_i64], cpu).unwrap());
    add(
        &map,
        "empty",
        Tensor::zeros((0, 3), DType::F32, cpu).unwrap(),
    );
    let (_sender, mut receiver) = pair(&map);
    let snapshot = receiver.latest().unwrap().unwrap();
    let names: Vec<_> = snapshot.tensors().map(|tensor| tensor.name()).collect();
    assert_eq!(names, ["bf16", "empty", "f64", "i64", "u32", "u8", "z"]);
    assert_eq!(snapshot.slice::<f32>("z").unwrap(), [1.5, -2.0]);
    assert_eq!(snapshot.slice::<f64>("f64").unwrap(), [0.25]);
    assert_eq!(snapshot.slice::<bf16>("bf16").unwrap(), [bf16::ONE]);
    assert_eq!(snapshot.slice::<u8>("u8").unwrap(), [1, 2, 3, 4]);
    assert_eq!(snapshot.slice::<u32>("u32").unwrap(), [u32::MAX]);
    assert_eq!(snapshot.slice::<i64>("i64").unwrap(), [-1]);
    assert_eq!(snapshot.tensor("empty").unwrap().shape(), [0, 3]);
}

#[test]
fn strided_candle_variables_arrive_row_major() {
    let map = VarMap::new();
    let matrix = Tensor::arange(0_f32, 6.0, &Device::Cpu)
        .unwrap()
        .reshape((2, 3))
        .unwrap();
    add(&map, "transposed", matrix.t().unwrap());
    add(&map, "column", matrix.narrow(1, 1, 1).unwrap());
    let setup = SenderSetup::new("policy", &map)
        .unwrap()
        .cast(Dtype::BF16)
        .unwrap();
    let (_sender, mut receiver) = pair_by(setup, &map);
    let snapshot = receiver.latest().unwrap().unwrap();
    let transposed = [0.0, 3.0, 1.0, 4.0, 2.0, 5.0].map(bf16::from_f32);
    assert_eq!(snapshot.slice::<bf16>("transposed").unwrap(), transposed);
    assert_eq!(snapshot.tensor("transposed").unwrap().shape(), [3, 2]);
    assert_eq!(
        snapshot.slice::<bf16>("column").unwrap(),
        [1.0, 4.0].map(bf16::from_f32)
    );
}

#[test]
fn candle_tensors_load_and_mismatches_are_named() {
    let (mut worker, layer) = model();
    let mut weights = Tensors::new();
    weights
        .insert("actor.0.bias", [3], [1.0_f32, 2.0, 3.0])
        .unwrap();
    weights
        .insert("actor.0.weight", [3, 4], [0.0_f32; 12])
        .unwrap();
    let (mut sender, mut receiver) = pair(&weights);
    weights.slice_mut::<f32>("actor.0.bias").unwrap()[0] = 7.0;
    sender
        .send_with(
            &weights,
            &SendOptions::new().wait(WaitFor::Sent).timeout(Some(soon())),
        )
        .unwrap();
    assert_eq!(
        receiver.loading(&mut worker).recv_timeout(soon()).unwrap(),
        Some(Version(2))
    );
    assert_eq!(
        layer.bias().unwrap().to_vec1::<f32>().unwrap(),
        [7.0, 2.0, 3.0]
    );

    add(
        &worker,
        "actor.0.bias",
        Tensor::zeros(5, DType::F32, &Device::Cpu).unwrap(),
    );
    sender
        .send_with(
            &weights,
            &SendOptions::new().wait(WaitFor::Sent).timeout(Some(soon())),
        )
        .unwrap();
    let error = receiver
        .loading(&mut worker)
        .recv_timeout(soon())
        .unwrap_err();
    assert!(
        matches!(&error, Error::WrongModel { mismatch, .. } if mismatch.shapes[0].name == "actor.0.bias"),
        "{error}"
    );
}

#[test]
fn a_dtype_that_cannot_be_read_is_named() {
    let map = VarMap::new();
    add(&map, "fine", Tensor::new(&[1.0_f32], &Device::Cpu).unwrap());
    let eight = Tensor::new(&[1.0_f32], &Device::Cpu)
        .unwrap()
        .to_dtype(DType::F8E4M3)
        .unwrap();
    add(&map, "layer.scale", eight);
    let error = SenderSetup::new("policy", &map).unwrap_err();
    let words = error.to_string();
    assert!(
        matches!(error, Error::Extract { .. })
            && words.contains("layer.scale")
            && words.contains("F8E4M3"),
        "{words}"
    );
}
