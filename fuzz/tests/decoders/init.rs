//! What a worker needs to join, in the forms it travels in.

use weightsync_engine::{InitInfo, SenderSetup, Tensors};
use weightsync_fuzz::fuzz;

#[test]
fn init_info_json() {
    let seed = serde_json::to_vec(&sample()).expect("plain data");
    fuzz!("init_info_json", [seed], |bytes: &[u8]| {
        if let Ok(info) = serde_json::from_slice::<InitInfo>(bytes) {
            let again = serde_json::to_vec(&info).expect("plain data");
            assert_eq!(serde_json::from_slice::<InitInfo>(&again).ok(), Some(info));
        }
    });
}

#[test]
fn init_info_postcard() {
    let seed = postcard::to_stdvec(&sample()).expect("plain data");
    fuzz!("init_info_postcard", [seed], |bytes: &[u8]| {
        if let Ok((info, rest)) = postcard::take_from_bytes::<InitInfo>(bytes) {
            assert!(rest.len() < bytes.len());
            let again = postcard::to_stdvec(&info).expect("plain data");
            assert_eq!(postcard::from_bytes::<InitInfo>(&again), Ok(info));
        }
    });
}

fn sample() -> InitInfo {
    let mut weights = Tensors::new();
    weights
        .insert("bias", [2], vec![0.5_f32, 1.5])
        .expect("two elements");
    SenderSetup::new("policy", &weights)
        .expect("a valid model")
        .init_info()
}
