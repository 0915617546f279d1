//! A sender, and agents that are none.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::timeout;
use weightsync::{Expect, InitInfo, Sender, SenderSetup, Tensors};
use weightsync_core::{Epoch, Version};

use crate::access::Key;
use crate::link::{self, Link, LinkEnd};
use crate::relay::runtime;
use crate::scheme::Distributed;
use crate::wire::hello::Role;
use crate::wire::message::{FromRoot, Held, RefusalRemedy, ToRoot};

/// Longer than anything here takes.
const SOON: Duration = Duration::from_secs(20);

fn sender() -> (Sender, InitInfo) {
    let mut weights = Tensors::new();
    let values = vec![1.0_f32; 256];
    weights.insert("layer.weight", [16, 16], values).unwrap();
    let setup = SenderSetup::new("policy", &weights).unwrap();
    let setup = setup.scheme(Distributed::new()).unwrap();
    let info = setup.init_info();
    let sender = setup.connect(&weights, Expect::Count(0), SOON).unwrap();
    (sender, info)
}

/// An agent's end of its link, which does what a test says.
struct Fake {
    link: Link<ToRoot>,
    heard: mpsc::Receiver<Result<FromRoot, LinkEnd>>,
}

impl Fake {
    async fn dial(info: &InitInfo) -> Self {
        let address: SocketAddr = info.endpoint().address().parse().unwrap();
        let key = Key::new(info.endpoint().secret());
        let socket = link::dial(address, &key, Role::Control).await.unwrap();
        let (events, heard) = mpsc::channel(64);
        let link = Link::start(socket, &events, |what| what);
        Self { link, heard }
    }

    /// Its first words.
    fn say_agent(&self, seen: Epoch) {
        self.link.say(&ToRoot::Agent {
            name: "fake".into(),
            host: [9; 16],
            pid: 1,
            bulk: None,
            seen,
            holds: Vec::new(),
            run: None,
        });
    }

    /// What the sender says next; or how it has ended the link.
    async fn hear(&mut self) -> Result<FromRoot, LinkEnd> {
        let heard = timeout(SOON, self.heard.recv()).await;
        heard.expect("in time").expect("an end, at last")
    }

    /// Hears what the sender says until this comes.
    async fn hear_until(&mut self, what: impl Fn(&FromRoot) -> bool) -> FromRoot {
        loop {
            let heard = self.hear().await.expect("the link is there");
            if what(&heard) {
                return heard;
            }
        }
    }
}

fn run(test: impl Future<Output = ()>) {
    runtime("weightsync-test").unwrap().block_on(test);
}

#[test]
fn who_is_fenced_off_is_told_so_and_its_link_is_ended() {
    let (_sender, info) = sender();
    run(async {
        let mut fake = Fake::dial(&info).await;
        fake.say_agent(Epoch(u64::MAX));
        let FromRoot::Refused { remedy, .. } = fake.hear().await.unwrap() else {
            panic!("it was not refused")
        };
        assert!(matches!(remedy, RefusalRemedy::Fenced { .. }), "{remedy:?}");
        // It would go on saying that it is there.
        let end = fake.hear().await.unwrap_err();
        assert!(matches!(end, LinkEnd::HungUp), "{end}");
    });
}

#[test]
fn who_says_that_it_has_more_than_there_can_be_is_given_up() {
    let (_sender, info) = sender();
    run(async {
        let mut fake = Fake::dial(&info).await;
        fake.say_agent(Epoch(0));
        let welcome = |word: &FromRoot| matches!(word, FromRoot::Parent { .. });
        fake.hear_until(welcome).await;
        for page in 0..2 {
            let have = (1..=50).map(|number| Held {
                model: 0,
                version: Version(page * 50 + number),
            });
            fake.link.say(&ToRoot::Holds {
                have: have.collect(),
                dropped: Vec::new(),
            });
        }
        while fake.hear().await.is_ok() {}
    });
}
