use candle_core::{DType, Device, Var};

use super::*;

#[test]
fn a_gradient_is_cut_to_the_allowed_norm() {
    let vars = vec![
        Var::ones((2, 3), DType::F32, &Device::Cpu).unwrap(),
        Var::ones(4, DType::F32, &Device::Cpu).unwrap(),
    ];
    let optimizer = Optimizer::new(vars, 1e-3, 0.5).unwrap();
    for (factor, expected) in [(1e3, 0.5), (0.1, 0.1 * 10_f64.sqrt())] {
        let [a, b] = &optimizer.vars[..] else {
            panic!("two variables");
        };
        let sum = (a.sum_all().unwrap() + b.sum_all().unwrap()).unwrap();
        let mut gradients = (sum * factor).unwrap().backward().unwrap();
        optimizer.clip(&mut gradients).unwrap();
        let mut squares = 0.0;
        for var in &optimizer.vars {
            let gradient = gradients.get(var).expect("both are in the loss");
            squares += scalar(&gradient.sqr().unwrap().sum_all().unwrap()).unwrap();
        }
        assert!((squares.sqrt() - expected).abs() < 1e-3, "{squares}");
    }
}
