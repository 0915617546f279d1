//! A store in S3, when requests fail: a real server, and a proxy in front of it that spoils any one
//! request of a save or a load.

mod proxy;
mod server;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::sync::{Arc, Barrier, Mutex};

use libtest_mimic::{Arguments, Failed, Trial};
use proxy::{Fault, Proxy};
use weightsync_core::Version;
use weightsync_engine::{Snapshot, Tensors};
use weightsync_store::{Keep, SaveOptions, Saved, Store, StoreError, Which, Writer};

/// A test, which spoils requests by a fault.
type Run = fn(&Proxy, Fault);

fn main() -> ExitCode {
    let arguments = Arguments::from_args();
    let proxy = match server::provide(true) {
        Ok(server::Role::Ended(code)) => return code,
        Ok(server::Role::Test(ends)) => Ok(Arc::new(Proxy::start(ends.endpoint, ends.server))),
        Err(missing) => Err(missing),
    };
    let mut trials = Vec::new();
    let mut test = |name: String, run: Run, fault: Fault| {
        let proxy = proxy.clone();
        // Without a server all of them fail.
        trials.push(Trial::test(name, move || {
            let proxy = proxy.map_err(Failed::from)?;
            run(&proxy, fault);
            Ok(())
        }));
    };
    let faults = [
        ("request_got_lost", Fault::Unsent),
        ("answer_got_lost", Fault::Unanswered),
        ("answer_was_a_lie", Fault::DoneAnd500),
        ("server_fails", Fault::Error),
        ("server_is_busy", Fault::SlowDown),
        ("server_denies", Fault::Denied),
    ];
    for (when, fault) in faults {
        test(format!("save_is_whole_or_fails_when_{when}"), saves, fault);
        test(format!("load_is_whole_or_fails_when_{when}"), loads, fault);
    }
    for (when, fault) in [
        ("answer_got_lost", Fault::Unanswered),
        ("server_denies", Fault::Denied),
    ] {
        test(
            format!("upload_in_parts_is_whole_when_{when}"),
            large,
            fault,
        );
    }
    let others: [(&str, Run, Fault); 8] = [
        (
            "save_survives_a_server_without_answer",
            hangs,
            Fault::TooSlow,
        ),
        ("racing_writers_never_both_win", race, Fault::Error),
        (
            "overtaken_writer_removes_nothing_of_its_successor",
            overtaken,
            Fault::Error,
        ),
        (
            "service_without_conditions_is_refused",
            careless,
            Fault::Error,
        ),
        ("claim_is_whole_or_fails_when_denied", claims, Fault::Denied),
        (
            "claim_is_whole_or_fails_when_answer_got_lost",
            claims,
            Fault::Unanswered,
        ),
        ("requests_are_as_many_as_documented", counts, Fault::Error),
        ("bucket_that_is_missing_is_named", no_bucket, Fault::Error),
    ];
    for (name, run, fault) in others {
        test(name.into(), run, fault);
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The requests that a fault spoils, one after the other: every third every day, and all of them
/// where a run leaves nothing out. The fault decides which third.
fn places(fault: Fault) -> impl Iterator<Item = u64> {
    match std::env::var_os("WEIGHTSYNC_WHOLE") {
        Some(_) => (1..).step_by(1),
        None => (1 + fault as u64 % 3..).step_by(3),
    }
}

/// Weights that tell one number from another: some change with it, most do not.
fn weights(number: u64, elements: usize) -> Tensors {
    let mut values: Vec<u32> = (0..elements as u32).collect();
    for value in values.iter_mut().step_by(97) {
        *value ^= number as u32;
    }
    let mut weights = Tensors::new();
    let inserted = weights.insert("layer.weight", [elements as u64], values);
    inserted.expect("a tensor");
    weights
}

/// The number of the weights in a snapshot; fails if it is a mix.
fn number(snapshot: &Snapshot) -> u64 {
    let got = snapshot.slice::<u32>("layer.weight").expect("the tensor");
    let number = u64::from(got[0]);
    let all = weights(number, got.len());
    let whole = Snapshot::of("policy", &all, snapshot.run(), snapshot.version());
    let whole = whole.expect("a snapshot");
    assert_eq!(snapshot.digest(), whole.digest(), "it is a mix");
    number
}

fn store(name: &str) -> Store {
    let address = format!("s3://{}/{name}-{}", server::BUCKET, std::process::id());
    Store::open(&address).expect("an address")
}

fn newest(store: &Store) -> (Version, u64) {
    let loaded = store.load(&Which::Newest).expect("the newest version");
    assert_eq!(loaded.damage, []);
    let only = loaded.set.only().expect("one model");
    (only.version(), number(only))
}

fn exactly(store: &Store, version: Version) -> u64 {
    let which = Which::Exactly(version.into());
    let loaded = store.load(&which).expect("a version that was saved");
    number(loaded.set.only().expect("one model"))
}

/// What one writer has tried and what it was told.
#[derive(Default)]
struct Ledger {
    tried: BTreeMap<Version, u64>,
    saved: BTreeMap<Version, u64>,
}

impl Ledger {
    fn save(
        &mut self,
        writer: &mut Writer,
        number: u64,
        elements: usize,
    ) -> Result<Saved, StoreError> {
        let model = weightsync_core::ModelId::new("policy").expect("a name");
        let next = writer.version(&model).next();
        assert_eq!(
            self.tried.insert(next, number),
            None,
            "{next} was used before"
        );
        let saved = writer.save_weights("policy", &weights(number, elements))?;
        assert_eq!(saved.versions, [(model, next)]);
        self.saved.insert(next, number);
        Ok(saved)
    }

    /// Everything that was saved is there, and the newest is what was tried.
    fn check(&self, store: &Store) {
        let there = versions(store);
        for version in self.saved.keys() {
            assert!(there.contains(version), "{version} is lost");
        }
        let (version, number) = newest(store);
        assert!(Some(&version) >= self.saved.keys().last(), "{version}");
        assert_eq!(self.tried[&version], number);
    }

    /// The same, and every version is what was tried. A request takes moto some 10 ms.
    fn check_all(&self, store: &Store) {
        self.check(store);
        for version in versions(store) {
            assert_eq!(exactly(store, version), self.tried[&version], "{version}");
        }
    }
}

/// The versions that there are.
fn versions(store: &Store) -> Vec<Version> {
    let there = store.versions().expect("the versions");
    assert_eq!(there.damage, []);
    let there = there.versions.iter();
    there.map(|one| one.models[0].version).collect()
}

fn options() -> SaveOptions {
    let mut options = SaveOptions::default();
    // So that old versions are removed too.
    options.keep = "3".parse::<Keep>().expect("a number");
    options
}

/// Spoils every request of a save, one after the other.
fn saves(proxy: &Proxy, fault: Fault) {
    spoil_saves(proxy, fault, "saves", 1 << 12, &options);
}

/// The same with files that are uploaded in parts.
fn large(proxy: &Proxy, fault: Fault) {
    spoil_saves(proxy, fault, "large", 2_200_000, &|| {
        let mut options = options();
        options.deltas = false;
        options
    });
}

fn spoil_saves(
    proxy: &Proxy,
    fault: Fault,
    name: &str,
    elements: usize,
    options: &dyn Fn() -> SaveOptions,
) {
    let store = store(name);
    let mut ledger = Ledger::default();
    let mut writer = Writer::claim(&store, options()).expect("a writer");
    for number in 1..6 {
        let saved = ledger.save(&mut writer, number, elements);
        saved.expect("no fault yet");
    }
    let (mut number, mut failed) = (6, 0);
    for at in places(fault) {
        proxy.arm(at, fault);
        let result = ledger.save(&mut writer, number, elements);
        let Some(spoiled) = proxy.disarm() else {
            result.expect("nothing was spoiled");
            println!("{} requests, {failed} of these saves failed", at - 1);
            assert!(at > 5, "{at}");
            break;
        };
        if let Err(error) = &result {
            assert!(matches!(error, StoreError::File { .. }), "{error}");
            failed += 1;
        }
        let context = format!("request {at}, {spoiled}: {result:?}");
        // Only the versions that are kept.
        ledger.forget_old(&store);
        ledger.check(&store);
        number += 1;
        let saved = ledger.save(&mut writer, number, elements);
        saved.unwrap_or_else(|error| panic!("{context}; the next save: {error}"));
        number += 1;
    }
    ledger.forget_old(&store);
    ledger.check_all(&store);
    // A writer that comes later finds the same.
    let before = newest(&store);
    Writer::claim(&store, options()).expect("another writer");
    assert_eq!(newest(&store), before);
    // What is denied is not tried again, and everything else is.
    match fault {
        Fault::Denied => assert!(failed > 0, "{failed}"),
        _ => assert_eq!(failed, 0),
    }
}

impl Ledger {
    /// Forgets those that `keep` drops: all but the newest three of what was published.
    fn forget_old(&mut self, store: &Store) {
        let there = store.versions().expect("the versions").versions;
        assert!(there.len() >= 3, "{there:?}");
        let oldest = there[0].models[0].version;
        let kept: Vec<_> = self.saved.keys().rev().take(2).copied().collect();
        // Two of the last three saves at least were reported, so these are there.
        assert!(kept.iter().all(|kept| *kept >= oldest), "{kept:?} {oldest}");
        self.saved.retain(|version, _| kept.contains(version));
    }
}

/// Spoils every request of a load, one after the other.
fn loads(proxy: &Proxy, fault: Fault) {
    let store = store("loads");
    let mut ledger = Ledger::default();
    let mut writer = Writer::claim(&store, options()).expect("a writer");
    for number in 1..4 {
        let saved = ledger.save(&mut writer, number, 1 << 12);
        saved.expect("no fault yet");
    }
    let mut failed = 0;
    for at in 1.. {
        proxy.arm(at, fault);
        let result = store.load(&Which::Newest);
        let spoiled = proxy.disarm();
        match &result {
            Ok(loaded) => {
                assert_eq!(loaded.damage, [], "{spoiled:?}");
                assert_eq!(
                    number(loaded.set.only().expect("one model")),
                    3,
                    "{spoiled:?}"
                );
            }
            Err(StoreError::File { .. }) if spoiled.is_some() => failed += 1,
            Err(error) => panic!("{spoiled:?}: {error}"),
        }
        // A load leaves nothing that is in the way of the next one.
        assert_eq!(newest(&store).1, 3);
        if spoiled.is_none() {
            println!("{} requests, {failed} of these loads failed", at - 1);
            assert!(at > 5, "{at}");
            break;
        }
    }
    match fault {
        Fault::Denied => assert!(failed > 2, "{failed}"),
        _ => assert_eq!(failed, 0),
    }
}

/// A server that takes a request and does not answer costs the client's time limit, and no version.
fn hangs(proxy: &Proxy, fault: Fault) {
    let store = store("hangs");
    let mut ledger = Ledger::default();
    let mut writer = Writer::claim(&store, options()).expect("a writer");
    // The first save writes more than those that follow.
    for number in 1..3 {
        proxy.arm(u64::MAX, fault);
        let saved = ledger.save(&mut writer, number, 1 << 12);
        saved.expect("no fault yet");
    }
    let requests = proxy.requests();
    // The write that publishes: the last one of the head.
    let mut heads = requests.iter().enumerate();
    let head = heads.rfind(|(_, line)| line.starts_with("PUT") && line.contains("head.json"));
    let (at, _) = head.expect("a save writes the head");
    proxy.arm(at as u64 + 1, fault);
    ledger.save(&mut writer, 3, 1 << 12).expect("found out");
    let spoiled = proxy.disarm().expect("it was spoiled");
    assert!(spoiled.contains("head.json"), "{spoiled}");
    ledger.check_all(&store);
}

/// Two writers that take a store over from one another. What either was told is saved is there.
fn race(_: &Proxy, _: Fault) {
    let store = store("race");
    let start = Arc::new(Barrier::new(2));
    let race = |side: u64| {
        let (store, start) = (store.clone(), start.clone());
        move || {
            let mut reported = Vec::new();
            let mut runs = Vec::new();
            let mut fenced = 0;
            for round in 0..8 {
                start.wait();
                let mut writer = Writer::claim(&store, SaveOptions::default()).expect("a writer");
                runs.push(writer.run().epoch);
                for step in 0..3 {
                    let number = 1 + side * 1000 + round * 10 + step;
                    match writer.save_weights("policy", &weights(number, 1 << 10)) {
                        Ok(saved) => reported.push((saved.versions[0].1, number)),
                        Err(StoreError::Fenced { .. }) => fenced += 1,
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            (reported, runs, fenced)
        }
    };
    let (one, two) = (std::thread::spawn(race(1)), std::thread::spawn(race(2)));
    let (one, two) = (one.join().expect("a writer"), two.join().expect("a writer"));
    let mut runs: Vec<_> = one.1.iter().chain(&two.1).collect();
    runs.sort();
    runs.dedup();
    assert_eq!(runs.len(), 16, "two writers had the same epoch");
    println!(
        "{} and {} saved, {} fenced",
        one.0.len(),
        two.0.len(),
        one.2 + two.2
    );
    assert!(one.2 + two.2 > 0, "nobody was fenced");
    let reported: BTreeMap<_, _> = one.0.iter().chain(&two.0).copied().collect();
    assert_eq!(
        reported.len(),
        one.0.len() + two.0.len(),
        "a number was used twice"
    );
    for (version, number) in reported {
        assert_eq!(exactly(&store, version), number, "{version}");
    }
}

/// A successor claims the store and publishes before each request of a claim and a save, in turn.
fn overtaken(proxy: &Proxy, _: Fault) {
    for at in 1.. {
        let store = store(&format!("overtaken-{at}"));
        let mut first = Writer::claim(&store, options()).expect("a writer");
        for number in 0..3 {
            first
                .save_weights("policy", &weights(number, 1 << 10))
                .expect("saved");
        }
        let (theirs, seen) = (store.clone(), Arc::new(Mutex::new(Vec::new())));
        let published = seen.clone();
        proxy.meanwhile(at, move || {
            let mut successor = Writer::claim(&theirs, options()).expect("a writer");
            for number in 100..102 {
                let saved = successor.save_weights("policy", &weights(number, 1 << 10));
                let version = saved.expect("nobody is in the way").versions[0].1;
                published.lock().unwrap().push((version, number));
            }
        });
        let saved = Writer::claim(&store, options())
            .and_then(|mut writer| writer.save_weights("policy", &weights(200, 1 << 10)));
        let came = proxy.requests().len() as u64;
        let published = seen.lock().unwrap().clone();
        if published.is_empty() {
            saved.expect("nobody was in the way");
            assert!(at > 10, "{at} requests are too few for what is done");
            break;
        }
        assert!(came >= at, "{came}");
        // A writer that claims the store after its successor goes on with what that one published.
        let there = versions(&store);
        for (version, number) in published {
            assert!(there.contains(&version), "request {at}: {version} is lost");
            assert_eq!(exactly(&store, version), number, "request {at}: {version}");
        }
        match saved {
            Ok(saved) => assert_eq!(exactly(&store, saved.versions[0].1), 200, "request {at}"),
            Err(StoreError::Fenced { .. }) => {}
            Err(error) => panic!("request {at}: {error}"),
        }
    }
}

/// A service that ignores a condition publishes nothing.
fn careless(proxy: &Proxy, fault: Fault) {
    for (header, name) in [("if-none-match", "If-None-Match"), ("if-match", "If-Match")] {
        let store = store(header);
        proxy.arm(u64::MAX, fault);
        proxy.strip(header, u64::MAX);
        let error = Writer::claim(&store, options()).expect_err("no writer");
        assert!(error.to_string().contains(name), "{error}");
        let requests = proxy.requests();
        let removed = requests.last().is_some_and(|line| line.starts_with("POST"));
        assert!(removed, "{requests:#?}");
        proxy.arm(u64::MAX, fault);
        let found = store.versions().expect("an empty store");
        assert!(found.versions.is_empty() && found.damage.is_empty());
        // As if another writer had removed what the condition is tried on.
        proxy.strip(header, 1);
        Writer::claim(&store, options()).expect("a writer, with conditions");
    }
}

/// Spoils the requests of a claim and of the first save after it.
fn claims(proxy: &Proxy, fault: Fault) {
    let name = "claims";
    let mut ledger = Ledger::default();
    let mut failed = 0;
    let mut number = 1;
    for at in places(fault) {
        // A store that has asked for nothing yet.
        let store = store(name);
        proxy.arm(at, fault);
        let saved = match Writer::claim(&store, options()) {
            Ok(mut writer) => ledger.save(&mut writer, number, 1 << 12).map(drop),
            Err(error) => Err(error),
        };
        let spoiled = proxy.disarm();
        number += 1;
        if let Err(error) = &saved {
            assert!(matches!(error, StoreError::File { .. }), "{error}");
            failed += 1;
        }
        let mut writer = Writer::claim(&store, options()).expect("another writer");
        // Another writer uses a number again if nothing was written of it.
        let there = versions(&store);
        ledger.tried.retain(|version, _| there.contains(version));
        let next = ledger.save(&mut writer, number, 1 << 12);
        next.unwrap_or_else(|error| panic!("{spoiled:?}: {error}"));
        number += 1;
        ledger.saved.retain(|_, saved| *saved + 2 >= number);
        ledger.check(&store);
        if spoiled.is_none() {
            saved.expect("nothing was spoiled");
            println!("{} requests, {failed} of these claims failed", at - 1);
            assert!(at > 10, "{at}");
            break;
        }
    }
}

fn no_bucket(_: &Proxy, _: Fault) {
    let store = Store::open("s3://no-such-bucket/policy").expect("an address");
    let error = store.load(&Which::Newest).expect_err("no bucket");
    assert!(matches!(error, StoreError::File { .. }), "{error}");
    assert!(error.to_string().contains("NoSuchBucket"), "{error}");
}

/// `docs/store.md` has these numbers.
fn counts(proxy: &Proxy, fault: Fault) {
    let store = store("counts");
    let count = |what: &str| {
        let requests = proxy.requests();
        let is_list = |line: &str| line.contains("list-type");
        let count = |kind: &dyn Fn(&str) -> bool| requests.iter().filter(|line| kind(line)).count();
        let counts = [
            count(&|line| line.starts_with("GET") && !is_list(line)),
            count(&|line| line.starts_with("PUT")),
            count(&is_list),
            count(&|line| line.starts_with("POST")),
        ];
        println!("{what}: {counts:?} of {requests:#?}");
        counts
    };
    let mut ledger = Ledger::default();
    let mut save = |writer: &mut Writer, number| {
        proxy.arm(u64::MAX, fault);
        let saved = ledger.save(writer, number, 1 << 12);
        saved.expect("no fault");
    };
    proxy.arm(u64::MAX, fault);
    let mut writer = Writer::claim(&store, options()).expect("a writer");
    count("a claim");
    save(&mut writer, 1);
    count("the first save");
    save(&mut writer, 2);
    let save_one = count("a save");
    save(&mut writer, 3);
    save(&mut writer, 4);
    let save_and_remove = count("a save that removes a version");
    proxy.arm(u64::MAX, fault);
    newest(&store);
    let load = count("a load");
    assert_eq!([save_one, save_and_remove, load], COUNTS);
}

/// Reads, writes, lists and deletes: of a save, of one that removes a version too, and of a load of an
/// anchor and three deltas.
const COUNTS: [[usize; 4]; 3] = [[4, 3, 1, 0], [6, 3, 4, 2], [8, 2, 1, 1]];
