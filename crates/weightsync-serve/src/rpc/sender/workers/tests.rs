//! Workers on a real segment, and connections that come and go.

use weightsync_engine::{Attributes, Dtype, Layout, WorkerStatus};
use weightsync_mem::{Listener, SegmentOptions, SegmentWriter, Targets};

use weightsync_engine::transport::Endpoint;

use super::*;
use crate::rpc::wire::Runs;

/// The name of each connection: these tests reach them by their numbers.
fn name() -> Digits {
    Digits::random().unwrap()
}

/// A sender of one model of one byte, and what serves its workers.
fn sender() -> (SegmentWriter, Arc<SharedSender>) {
    let id = ModelId::new("policy").unwrap();
    let at = Endpoint::fresh(std::slice::from_ref(&id), None).unwrap();
    let layout = Layout::new([("weight".to_owned(), Dtype::U8, vec![1])]).unwrap();
    let segment = weightsync_mem::ModelDescription {
        layout: layout.clone(),
        note: Vec::new(),
    };
    let run = Run {
        epoch: Epoch(1),
        id: [1; 16],
    };
    let listener = Listener::at(at.address()).unwrap();
    let options = SegmentOptions::default();
    let writer =
        SegmentWriter::create_on(listener, *at.secret(), run, &[segment], options).unwrap();
    let model = ModelSpec {
        id,
        layout,
        attributes: Attributes::default(),
    };
    let found = "127.0.0.1:1".parse().unwrap();
    let access = Access::with_token(None).unwrap();
    let readers = RemoteReaders::of(&writer);
    let models = vec![model];
    let history = Arc::new(SendHistory::new("rpc", at.address(), &models));
    let shared = SharedSender::new(models, readers, (found, at.secret()), access, history);
    (writer, Arc::new(shared))
}

fn publish(writer: &mut SegmentWriter) {
    writer
        .stage(&[0], None)
        .unwrap()
        .publish(&Targets::All)
        .unwrap();
}

fn registration(pid: u32, addr: &str) -> WorkerRegistration {
    WorkerRegistration {
        worker: WorkerId(0),
        pid,
        addr: addr.parse().unwrap(),
        device: String::new(),
        wanted: ModelMask::ALL,
        announces: false,
    }
}

fn admit(shared: &SharedSender, registration: &WorkerRegistration) -> ConnectionId {
    let admitted = shared
        .admit(registration, name(), shared.holder(registration))
        .unwrap();
    admitted.expect("nobody else comes").0
}

#[test]
fn number_holder_is_told_by_process_and_address() {
    let (_writer, shared) = sender();
    let first = registration(1, "10.0.0.1:5000");
    let id = admit(&shared, &first);
    assert_eq!(shared.holder(&first), None, "it registers again");
    for other in [
        registration(2, "10.0.0.1:5000"),
        registration(1, "10.0.0.2:5000"),
    ] {
        assert_eq!(shared.holder(&other), Some(id));
        assert!(shared.admit(&other, name(), None).unwrap().is_none());
        assert!(shared.is_here(id));
    }
    // The caller has found out that the holder is silent.
    let id = admit(&shared, &registration(2, "10.0.0.1:5000"));
    assert!(shared.is_here(id) && !shared.is_here(id - 1));
}

#[test]
fn announcing_worker_counts_after_its_announcement() {
    let (writer, shared) = sender();
    let announces = WorkerRegistration {
        announces: true,
        ..registration(1, "10.0.0.1:5000")
    };
    let id = admit(&shared, &announces);
    assert_eq!(writer.readers().len(), 1, "it is called meanwhile");
    let there = Attendance {
        workers: vec![WorkerStatus::new(WorkerId(0), 1, 1)],
        ..Attendance::default()
    };
    assert!(shared.joined_only(&there).workers.is_empty());
    // A worker that has loaded a version counts.
    let mut loaded = there.clone();
    loaded.workers[0].versions = vec![Version(1)];
    assert_eq!(shared.joined_only(&loaded).workers.len(), 1);
    shared.joined(id).unwrap();
    assert_eq!(shared.joined_only(&there).workers.len(), 1);
}

#[test]
fn worker_goes_on_by_the_connection_that_is_left() {
    let (mut writer, shared) = sender();
    publish(&mut writer);
    let worker = registration(1, "10.0.0.1:5000");
    let (old, new) = (admit(&shared, &worker), admit(&shared, &worker));
    assert!(shared.next_call(old).is_none());
    let called = shared.next_call(new).unwrap().sequence;
    assert!(shared.next_call(new).is_none(), "it was called");
    shared.end(new, Departure::Lost);
    assert_eq!(writer.readers().len(), 1);
    assert_eq!(shared.next_call(old).unwrap().sequence, called);
    shared.end(old, Departure::Left);
    assert!(writer.readers().is_empty());
    assert!(shared.registration(old).is_none());
}

#[test]
fn call_is_overtaken_until_its_fetch_has_begun() {
    let (mut writer, shared) = sender();
    publish(&mut writer);
    let id = admit(&shared, &registration(1, "10.0.0.1:5000"));
    let first = shared.next_call(id).unwrap();
    assert!(!shared.is_overtaken(id, first.sequence));
    publish(&mut writer);
    assert!(shared.is_overtaken(id, first.sequence));
    // The version of a call is kept, even if no other worker wants it.
    publish(&mut writer);
    let (sequence, version) = (first.sequence, first.members[0].version());
    drop(first);
    let fetched = shared.serve(id, shared.find(0, version).expect("it is held"));
    assert!(!shared.is_overtaken(id, sequence));
    shared.called(id, true);
    assert!(shared.find(0, version).is_none());
    assert!(!fetched.bytes().is_empty());
}

#[test]
fn claims_are_cut_down_to_what_was_sent() {
    let (mut writer, shared) = sender();
    publish(&mut writer);
    let id = admit(&shared, &registration(1, "10.0.0.1:5000"));
    let applied = |sequence, model, version| Applied {
        sequence,
        versions: vec![Runs {
            model,
            version: Version(version),
        }],
    };
    let called = shared.next_call(id).unwrap().sequence;
    shared.applied(id, &applied(called, 0, 2)).unwrap();
    shared.applied(id, &applied(called, 7, 1)).unwrap();
    assert_eq!(writer.readers()[0].versions, [Version::NONE]);
    shared.applied(id, &applied(called, 0, 1)).unwrap();
    assert_eq!(writer.readers()[0].versions, [Version(1)]);
    publish(&mut writer);
    let newest = shared.next_call(id).expect("a claim hides nothing");
    assert!(newest.sequence > called);
    assert_eq!(shared.staged(id + 1, 1), Err(Uncounted::Gone));
}

#[test]
fn sequence_that_was_not_given_out_changes_nothing() {
    let (mut writer, shared) = sender();
    publish(&mut writer);
    let id = admit(&shared, &registration(1, "10.0.0.1:5000"));
    let reached = shared.next_call(id).unwrap().sequence;
    let applied = |sequence| Applied {
        sequence,
        versions: vec![Runs {
            model: 0,
            version: Version(1),
        }],
    };
    for got in [reached + 1, u64::MAX] {
        let ahead = Err(Uncounted::Ahead { got, reached });
        assert_eq!(shared.staged(id, got), ahead);
        assert_eq!(shared.refused(id, got, "no".into()), ahead);
        assert_eq!(shared.applied(id, &applied(got)), ahead);
    }
    assert_eq!(writer.readers()[0].versions, [Version::NONE]);
    let untouched = |shared: &SharedSender| {
        let mut table = shared.table();
        let worker = table.worker(id).unwrap();
        (worker.staged, worker.refused) == (0, 0)
    };
    assert!(untouched(&shared));
    // A later refusal counts, so a sender that ends does not wait for this worker.
    shared.refused(id, reached, "no".into()).unwrap();
    assert!(!untouched(&shared));
}

#[test]
fn connection_is_found_by_its_own_name_alone() {
    let (_writer, shared) = sender();
    let worker = registration(1, "10.0.0.1:5000");
    let named = |name: Digits| shared.named(&name.to_string());
    let names = [name(), name()];
    let ids = names.map(|name| shared.admit(&worker, name, None).unwrap().unwrap().0);
    assert_eq!(names.map(named), ids.map(Some));
    assert_eq!(named(name()), None);
    // What a connection's name is made of is not what other workers know.
    let run = u64::from_be_bytes(*shared.run.id.first_chunk().unwrap());
    for guessed in [
        String::new(),
        ids[0].to_string(),
        format!("{run:016x}-{}", ids[0]),
    ] {
        assert_eq!(shared.named(&guessed), None, "{guessed}");
    }
    shared.end(ids[0], Departure::Left);
    assert_eq!(names.map(named), [None, Some(ids[1])]);
}

#[test]
fn new_question_replaces_the_one_before() {
    let (mut writer, shared) = sender();
    let id = admit(&shared, &registration(1, "10.0.0.1:5000"));
    let ask = |want| match shared.ask(id, want) {
        QuestionAnswer::Later(question) => question,
        other => panic!("{other:?}"),
    };
    let first = ask(Want::Newest);
    let second = ask(Want::AtLeast {
        model: 0,
        version: Version(2),
    });
    assert!(matches!(shared.answer(id, first), QuestionAnswer::Replaced));
    publish(&mut writer);
    assert!(matches!(
        shared.answer(id, second),
        QuestionAnswer::Later(_)
    ));
    publish(&mut writer);
    let QuestionAnswer::Set { sequence, members } = shared.answer(id, second) else {
        panic!("it is there");
    };
    // The answer is the newest set, so the worker is not called with it as well.
    let newest = shared.next_call(id).unwrap();
    assert_eq!(
        (sequence, members[0].version()),
        (newest.sequence, Version(2))
    );
    let unknown = shared.ask(
        id,
        Want::Exactly {
            model: 0,
            version: Version(1),
        },
    );
    assert!(matches!(unknown, QuestionAnswer::Unknown { known } if known == [Version(2)]));
}
