//! What travels on a worker process's pipe: frames, and the collector's messages in them.

use weightsync_fuzz::fuzz;

#[test]
fn worker_frames() {
    let valid = weightsync_engine::worker::fuzz::valid();
    assert_eq!(weightsync_engine::worker::fuzz::frames(&valid), 3);
    fuzz!("worker_frames", [valid], |bytes: &[u8]| {
        weightsync_engine::worker::fuzz::frames(bytes);
    });
}

#[test]
fn collector_messages() {
    let valid = weightsync_rl::collector::fuzz::valid();
    assert!(weightsync_rl::collector::fuzz::messages(&valid));
    fuzz!("collector_messages", [valid], |bytes: &[u8]| {
        weightsync_rl::collector::fuzz::messages(bytes);
    });
}
