//! Models that serve from a version itself, and may write in it.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, RwLock, mpsc};
use std::thread;

use weightsync_engine::{
    AnyScheme, Background, Error, Expect, Layout, PrivateView, Receiver, ReceiverSetup, Result,
    SafePoints, Sender, SenderSetup, Set, SetLoader, Snapshot, TensorView, Tensors, Version,
    WeightLoader, Written,
};

use crate::{bytes_of, pair_by, send, send_to, soon, weights};

/// A model bound to what was sent: two equal numbers.
#[derive(Default)]
struct Bound {
    view: Option<PrivateView>,
    binds: usize,
    /// A value it cannot have.
    refuses: Option<f32>,
    /// It would rather have a copy.
    copies: bool,
    copied: f32,
}

impl WeightLoader for Bound {
    fn layout(&self) -> Result<Layout> {
        WeightLoader::layout(&numbers(0.0))
    }

    fn bind(&mut self, snapshot: &Snapshot) -> Result<bool> {
        if self.copies {
            return Ok(false);
        }
        self.binds += 1;
        let value = snapshot.slice::<f32>("a")?[0];
        self.view = Some(snapshot.private()?);
        match self.refuses == Some(value) {
            true => Err(Error::Load {
                name: "a".into(),
                source: format!("it is not to be {value}").into(),
            }),
            false => Ok(true),
        }
    }

    fn load(&mut self, tensors: &[TensorView<'_>]) -> Result<()> {
        assert!(self.copies, "it was bound");
        self.copied = tensors[0].elements::<f32>()?[0];
        Ok(())
    }
}

impl Bound {
    fn value(&self) -> f32 {
        let Some(view) = &self.view else {
            return self.copied;
        };
        let [a, b] = ["a", "b"].map(|name| read(view, name));
        assert_eq!(a, b);
        f32::from_le_bytes(a[..4].try_into().unwrap())
    }
}

fn numbers(value: f32) -> Tensors {
    let mut tensors = Tensors::new();
    tensors.insert("a", [3000], vec![value; 3000]).unwrap();
    tensors.insert("b", [3000], vec![value; 3000]).unwrap();
    tensors
}

/// As the kernel sees this process: this crate has no unsafe code, and neither
/// has its test.
fn memory() -> File {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(true)
        .open("/proc/self/mem")
        .unwrap()
}

fn place(view: &PrivateView, name: &str) -> (u64, usize) {
    let range = view.layout().tensor(name).unwrap().range;
    assert!(range.offset + range.len <= view.len() as u64);
    let start = view.as_ptr().addr() as u64;
    assert_eq!(start % 64, 0);
    (start + range.offset, range.len as usize)
}

fn read(view: &PrivateView, name: &str) -> Vec<u8> {
    let (start, len) = place(view, name);
    let mut bytes = vec![0; len];
    memory().read_exact_at(&mut bytes, start).unwrap();
    bytes
}

fn write(view: &PrivateView, name: &str) {
    let (start, len) = place(view, name);
    memory().write_all_at(&vec![0x5a; len], start).unwrap();
}

#[test]
fn writes_in_place_are_private_to_worker_and_version() {
    for (scheme, shared) in [
        ("shared-mem", true),
        ("multi-process", true),
        ("multi-process:own-copy", false),
    ] {
        let scheme: AnyScheme = scheme.parse().unwrap();
        let setup = SenderSetup::new("policy", &weights()).unwrap();
        let (mut sender, mut receiver) = pair_by(setup.scheme(scheme).unwrap(), &weights());
        for version in 2..8 {
            let mut sent = weights();
            sent.slice_mut::<f32>("layer.weight").unwrap()[0] = version as f32;
            let snapshot = send_to(&mut sender, &sent, &mut receiver);
            let as_sent = bytes_of(&snapshot);
            let (tell, told) = mpsc::channel();
            let view = snapshot.private_with(move |written| tell.send(written).unwrap());
            let view = view.unwrap();
            assert_eq!(view.is_shared(), shared);
            for (name, bytes) in &as_sent {
                assert_eq!(&read(&view, name), bytes, "{name} of {version}");
            }
            write(&view, "layer.bias");
            write(&view, "step");
            assert_eq!(read(&view, "layer.bias"), [0x5a; 28]);
            assert_eq!(bytes_of(&snapshot), as_sent);
            assert_eq!(bytes_of(view.snapshot()), as_sent);
            drop(view);
            let named: Vec<Written> = told.iter().collect();
            let names: Vec<_> = named.iter().map(|one| one.tensors.join(" ")).collect();
            match shared {
                true => assert_eq!(names, ["layer.bias step"]),
                false => assert!(names.is_empty()),
            }
            for written in named {
                assert_eq!(written.version, Version(version));
                let words = written.to_string();
                let expected = format!("layer.bias, step of policy {}", written.version);
                assert!(words.contains(&expected), "{words}");
            }
        }
    }
}

#[test]
fn binding_loader_is_not_loaded() {
    let setup = SenderSetup::new("policy", &numbers(1.0)).unwrap();
    let (mut sender, mut receiver) = pair_by(setup, &numbers(1.0));
    let mut model = Bound::default();
    for value in [2.0, 3.0, 4.0] {
        let (report, version) = send(&mut sender, &numbers(value), || {
            receiver.loading(&mut model).recv_timeout(soon())
        });
        assert!(report.unwrap().all_applied());
        assert!(version.unwrap().is_some());
        assert_eq!(model.value(), value);
        write(model.view.as_ref().unwrap(), "a");
    }
    assert_eq!(model.binds, 3);
    // It may change its mind.
    model = Bound {
        copies: true,
        ..Bound::default()
    };
    let (report, _) = send(&mut sender, &numbers(5.0), || {
        receiver.loading(&mut model).recv_timeout(soon()).unwrap()
    });
    assert!(report.unwrap().all_applied());
    assert_eq!((model.value(), model.binds), (5.0, 0));
}

#[test]
fn a_snapshot_is_loaded_by_hand_into_what_fits() {
    let setup = SenderSetup::new("policy", &numbers(1.0)).unwrap();
    let (_sender, mut receiver) = pair_by(setup, &numbers(1.0));
    let snapshot = receiver.latest().unwrap().unwrap();
    let mut bound = Bound::default();
    snapshot.load_into(&mut bound).unwrap();
    assert_eq!((bound.value(), bound.binds), (1.0, 1));
    let mut copy = numbers(0.0);
    snapshot.load_into(&mut copy).unwrap();
    assert_eq!(copy.slice::<f32>("b").unwrap()[..2], [1.0, 1.0]);
    // What does not fit is named, and not touched.
    let mut small = Tensors::new();
    small.insert("a", [3000], vec![0.0_f32; 3000]).unwrap();
    small.insert("b", [2], vec![0.0_f32; 2]).unwrap();
    let error = snapshot.load_into(&mut small).unwrap_err();
    assert!(matches!(error, Error::WrongModel { .. }), "{error}");
    assert!(error.to_string().contains("[3000]"), "{error}");
    assert_eq!(small.slice::<f32>("a").unwrap()[0], 0.0);
}

#[test]
fn loader_wrappers_pass_the_version_on() {
    let setup = SenderSetup::new("policy", &numbers(1.0)).unwrap();
    let (mut sender, mut receiver) = pair_by(setup, &numbers(1.0));
    let shared = Arc::new(Mutex::new(Bound::default()));
    let mut own = Bound::default();
    let mut models: [Box<dyn WeightLoader + Send>; 4] = [
        Box::new(&mut own),
        Box::new(Mutex::new(Bound::default())),
        Box::new(RwLock::new(Bound::default())),
        Box::new(shared.clone()),
    ];
    for (model, value) in models.iter_mut().zip([2.0, 3.0, 4.0, 5.0]) {
        let (report, _) = send(&mut sender, &numbers(value), || {
            // `load` panics.
            receiver.loading(model).recv_timeout(soon()).unwrap()
        });
        assert!(report.unwrap().all_applied());
    }
    drop(models);
    assert_eq!(own.value(), 2.0);
    assert_eq!(shared.lock().unwrap().value(), 5.0);
}

#[derive(Default)]
struct Agent {
    actor: Bound,
    critic: Bound,
}

fn loaders(agent: &mut Agent) -> SetLoader<'_> {
    let models = SetLoader::new().with("actor", &mut agent.actor);
    models.with("critic", &mut agent.critic)
}

fn two() -> (Sender, Receiver) {
    let one = numbers(1.0);
    let setup = SenderSetup::new("actor", &one).unwrap();
    let setup = setup
        .add_model("critic", &one)
        .unwrap()
        .send_timeout(Some(soon()));
    let info = setup.init_info();
    let worker = thread::spawn(|| ReceiverSetup::new(info, 0).connect(Some(soon())).unwrap());
    let set = Set::new().with("actor", &one).with("critic", &one);
    let sender = setup.connect(&set, Expect::Count(1), Some(soon())).unwrap();
    (sender, worker.join().unwrap())
}

fn both(background: &Background<Agent>) -> (f32, f32) {
    let agent = background.read().unwrap();
    (agent.actor.value(), agent.critic.value())
}

/// One model is bound and the other then cannot be, by binding or by loading: the
/// first is bound to the version before again, which lost nothing.
#[test]
fn a_set_that_fails_midway_is_bound_to_what_it_had() {
    let (mut sender, receiver) = two();
    let agent = Agent {
        critic: Bound {
            refuses: Some(3.0),
            ..Bound::default()
        },
        ..Agent::default()
    };
    let background = receiver
        .set_in_background(agent, loaders, SafePoints::Implied)
        .unwrap();
    let mut send = |value: f32| {
        let numbers = numbers(value);
        let set = Set::new().with("actor", &numbers).with("critic", &numbers);
        sender.send(&set).unwrap()
    };
    assert!(send(2.0).all_applied());
    assert_eq!(both(&background), (2.0, 2.0));
    let report = send(3.0);
    let words = report.to_string();
    assert!(
        !report.all_applied() && words.contains("went back"),
        "{words}"
    );
    assert!(words.contains("it is not to be 3"), "{words}");
    assert_eq!(both(&background), (2.0, 2.0));
    assert_eq!(background.read().unwrap().actor.binds, 4);
    assert!(send(4.0).all_applied());
    assert_eq!(both(&background), (4.0, 4.0));
}

#[test]
fn a_bound_model_outlives_both_ends() {
    let setup = SenderSetup::new("policy", &numbers(1.0)).unwrap();
    let (mut sender, receiver) = pair_by(setup, &numbers(1.0));
    let background = receiver
        .in_background(Bound::default(), SafePoints::Implied)
        .unwrap();
    assert!(sender.send(&numbers(2.0)).unwrap().all_applied());
    drop(sender);
    let (receiver, model) = background.stop().unwrap();
    drop(receiver);
    assert_eq!(model.value(), 2.0);
    write(model.view.as_ref().unwrap(), "b");
}
