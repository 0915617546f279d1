"""Who gets what: several models, some workers, versions held and sent again, and in between."""

import pytest
import torch
import weightsync
from ends import FAR, LONG, MODES, PUSHING, Net, all_ended, beside, meet, pair, pass_on
from torch import nn


def _crowd(source, workers, **setup):
    """A sender, the receivers and their models."""
    sender = weightsync.Sender(source, **setup)
    models = [Net() for _ in range(workers)]
    receivers = [
        weightsync.ModelReceiver(sender.init_info, at, model=model)
        for at, model in enumerate(models)
    ]
    return sender, receivers, models


@pytest.mark.parametrize("scheme", PUSHING)
def test_some_workers_alone_change(scheme):
    trainer = Net(1.0)
    sender, receivers, models = _crowd(trainer, 3, scheme=scheme)
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
        sender.send(Net(5.0), worker_ids=[1], wait="sent")
        sender.send(Net(6.0), worker_ids=2, wait="sent")
        assert [receiver.receive(0.05) for receiver in receivers] == [None, 2, 3]
        assert [model.value for model in models] == [1.0, 5.0, 6.0]
        # Something for all is for all again.
        trainer.fill(7.0)
        pass_on(sender, *receivers)
        assert [model.value for model in models] == [7.0] * 3


@pytest.mark.parametrize("scheme", PUSHING)
def test_a_worker_that_is_not_there_is_a_line(scheme):
    sender, receivers, _ = _crowd(Net(1.0), 1, scheme=scheme)
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
        report = sender.send(worker_ids=[8], timeout=0.1)
        assert [(line.worker, line.outcome) for line in report.workers] == [(8, "absent")]
        assert not report.all_applied


@pytest.mark.parametrize("scheme", PUSHING)
def test_each_worker_may_have_weights_of_its_own(scheme):
    sender, receivers, models = _crowd(Net(1.0), 3, scheme=scheme, slots=(4, 8))
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
        shared = Net(5.0)
        report = sender.send_each({0: shared, 1: Net(6.0), 2: shared}, wait="sent")
        assert sorted(report.versions) == ["policy"]
        got = [receiver.receive(LONG) for receiver in receivers]
        assert [model.value for model in models] == [5.0, 6.0, 5.0]
        assert got[0] == got[2] != got[1]


@pytest.mark.parametrize("scheme", PUSHING)
def test_a_held_worker_is_passed_over_and_catches_up(scheme):
    trainer = Net(1.0)
    sender, receivers, models = _crowd(trainer, 2, scheme=scheme, slots=(4, 8))
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
        sender.hold([0])
        assert [status.held for status in sender.workers] == [True, False]
        for value in (2.0, 3.0):
            trainer.fill(value)
            report = sender.send(wait="sent")
            receivers[1].receive(LONG)
            assert receivers[0].receive(0) is None
        assert [model.value for model in models] == [1.0, 3.0]
        with beside(lambda: receivers[1].receive(LONG)):
            report = sender.send(timeout=LONG)
        assert [line.outcome for line in report.workers] == ["held", "applied"]
        sender.release(0)
        assert receivers[0].receive(LONG) == 4
        assert [model.value for model in models] == [3.0, 3.0]


def test_an_older_version_can_be_read_and_sent_again():
    trainer = Net(1.0)
    sender, receivers, models = _crowd(trainer, 1, history=2)
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
        digests = [sender.digest()]
        for value in (2.0, 3.0):
            trainer.fill(value)
            pass_on(sender, *receivers)
            digests.append(sender.digest())
        assert len(set(digests)) == 3
        for version, digest in enumerate(digests, 1):
            old = sender.snapshot(version=version)
            assert (old.version, old.digest()) == (version, digest)
            assert old["mean"].tolist() == [float(version)] * 5
        first = sender.snapshot(version=1)
        sender.send(first, wait="sent")
        assert receivers[0].receive(LONG) == 4
        assert models[0].value == 1.0
        assert sender.digest() == digests[0]
        # The trainer's own weights are not touched.
        assert trainer.value == 3.0
        with pytest.raises(weightsync.ModelError, match="v99"):
            sender.snapshot(version=99)
        del first, old


@pytest.mark.parametrize("scheme", PUSHING)
@pytest.mark.parametrize("checksums", [False, True])
def test_digests_agree_at_both_ends(scheme, checksums):
    trainer = Net(1.0)
    setup = {"scheme": scheme, "checksums": checksums, "digest": True}
    with pair(trainer, setup=setup) as (sender, receiver):
        seen = set()
        receiver.receive(LONG)
        for value in (1.0, 2.0, 2.0):
            trainer.fill(value)
            got = pass_on(sender, receiver)
            assert got.digest() == sender.digest() == sender.snapshot().digest()
            assert got.published_digest in (None, got.digest())
            # What travelled was checked on its way, and has none of its own.
            near = scheme not in FAR and "own-copy" not in scheme
            assert got.verify() is (checksums and near)
            seen.add(got.digest())
            del got
        assert len(seen) == 2


def test_a_digest_is_found_by_workers_once_it_was_made():
    with pair(Net(1.0)) as (sender, receiver):
        got = receiver.receive(LONG)
        assert got.published_digest is None
        assert sender.digest() == got.published_digest == got.digest()
        del got


def test_asynchronous_sends():
    trainer = Net(1.0)
    with pair(trainer, Net()) as (sender, receiver):
        trainer.fill(2.0)
        pending = sender.send_async()
        # Read already: it may change.
        trainer.fill(77.0)
        assert not pending.is_settled
        assert (pending.version, pending.versions) == (2, {"policy": 2})
        assert [line.outcome for line in pending.wait(0.01).workers] in (["late"], ["staged"])
        with pytest.raises(weightsync.SendError, match="v2") as refused:
            sender.send_async()
        assert refused.value.remedy == "retry"
        assert receiver.receive(LONG) == 2
        assert receiver._kept[0].value == 2.0
        assert pending.wait(LONG).all_applied
        assert pending.is_settled
    with pair(trainer, setup={"async_send_limit": 2, "slots": (4, 8)}) as (sender, receiver):
        several = [sender.send_async(), sender.send_async()]
        assert receiver.receive(LONG).version == 3
        assert [one.wait(1.0).version for one in several] == [2, 3]


@pytest.mark.parametrize("mode", MODES)
def test_pulls(mode):
    trainer, worker = Net(1.0), Net()
    setup = {"scheme": "shared-mem:pull", "history": 2}
    with pair(trainer, worker, mode=mode, setup=setup) as (sender, receiver):
        for value in (2.0, 3.0, 4.0):
            trainer.fill(value)
            report = sender.send()
            # It waits for nobody who has to ask.
            assert [line.outcome for line in report.workers] in ([], ["asks"])
        assert worker.value == 1.0
        assert (receiver.pull(), worker.value) == (4, 4.0)
        assert (receiver.pull(3), worker.value) == (3, 3.0)
        assert (receiver.pull(at_least=3), worker.value) == (4, 4.0)
        assert receiver.pull(at_least=9, timeout=0.02) is None
        with pytest.raises(weightsync.ModelError, match="v1.*v4"):
            receiver.pull(1)
        with beside(lambda: sender.send(version=9)):
            assert receiver.pull(at_least=9, timeout=LONG) == 9


@pytest.mark.parametrize("scheme", ["shared-mem", "multi-process"])
def test_pushed_workers_may_ask_too(scheme):
    trainer = Net(1.0)
    with pair(trainer, setup={"scheme": scheme, "history": 3}) as (sender, receiver):
        for value in (2.0, 3.0):
            trainer.fill(value)
            sender.send(wait="sent")
        old = receiver.pull(1)
        assert (old.version, float(old["small"][0])) == (1, 1.0)
        assert receiver.pull().version == 3
        del old


def test_several_models_and_workers_that_want_some():
    trainer = {"actor": Net(1.0), "critic": Net(10.0)}
    sender = weightsync.Sender(models=trainer)
    both = weightsync.Receiver(sender.init_info, 0)
    one = weightsync.Receiver(sender.init_info, 1, models=["critic"])
    critic = Net()
    loads = weightsync.ModelReceiver(sender.init_info, 2, models={"critic": critic})
    with all_ended(sender, both, one, loads):
        meet(sender, both, one, loads)
        assert sender.models == ["actor", "critic"]
        first = both.receive_set(LONG)
        assert {name: float(got["mean"][0]) for name, got in first.items()} == {
            "actor": 1.0,
            "critic": 10.0,
        }
        assert one.receive(LONG).model == "critic"
        assert critic.value == 10.0
        trainer["actor"].fill(2.0)
        sender.send(model="actor", wait="sent")
        assert sender.versions == {"actor": 2, "critic": 1}
        assert both.receive_set(LONG)["actor"].version == 2
        # It is not woken for a model that it does not run.
        assert one.receive(0) is None
        assert loads.receive(0) is None
        trainer["critic"].fill(11.0)
        sender.send(wait="sent")
        assert loads.receive(LONG) == 2
        assert critic.value == 11.0
        with pytest.raises(weightsync.ModelError, match="actor, critic"):
            sender.send(Net())
        with pytest.raises(weightsync.ModelError, match="actor, critic"):
            weightsync.ModelReceiver(sender.init_info, 3, model=Net())
        del first
    with pytest.raises(weightsync.ModelError, match="actr"):
        weightsync.Receiver(sender.init_info, 3, models=["actr"]).connect(timeout=1)


def test_a_set_with_a_wrong_member_is_not_sent_at_all():
    trainer = {"actor": Net(1.0), "critic": Net(1.0)}
    sender = weightsync.Sender(models=trainer)
    worker = {"actor": Net(), "critic": Net()}
    receiver = weightsync.ModelReceiver(sender.init_info, models=worker)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        with pytest.raises(weightsync.WrongWeightsError, match="critic"):
            sender.send(weights_dict={"actor": Net(2.0), "critic": {"large": torch.ones(3)}})
        assert receiver.receive_set(0) is None
        assert sender.versions == {"actor": 1, "critic": 1}
        assert worker["actor"].value == 1.0


def test_first_weights_may_be_others():
    sender = weightsync.Sender(Net(1.0))
    worker = Net()
    receiver = weightsync.ModelReceiver(sender.init_info, model=worker)
    with all_ended(sender, receiver):
        meet(sender, receiver, weights=Net(8.0))
        assert worker.value == 8.0
        pass_on(sender, receiver)
        assert worker.value == 1.0


@pytest.mark.parametrize("in_background", [False, True])
def test_a_cascade_of_two_levels_passes_on(in_background):
    trainer, leaf, beside_it = Net(1.0), Net(), Net()
    sender = weightsync.Sender(trainer)
    with sender:
        sender.connect(0)
        upper = weightsync.Cascade(sender.init_info, 0, timeout=LONG)
        other = weightsync.ModelReceiver(sender.init_info, 1, model=beside_it)
        with all_ended(upper, other):
            other.connect(timeout=LONG)
            lower = []

            def second():
                cascade = weightsync.Cascade(upper.init_info, 0, timeout=LONG)
                receiver = weightsync.ModelReceiver(cascade.init_info, 7, model=leaf)
                lower.extend([cascade, receiver])
                with beside(lambda: receiver.connect(timeout=LONG)):
                    cascade.connect([7], timeout=LONG)

            with beside(second):
                upper.connect(1, timeout=LONG)
            with all_ended(*lower):
                cascade, receiver = lower
                assert leaf.value == beside_it.value == 1.0
                following = receiver.start_background()
                if in_background:
                    upper.start_background()
                    cascade.start_background()
                for value in (2.0, 3.0):
                    trainer.fill(value)
                    calls = [lambda: other.receive(LONG)]
                    if not in_background:
                        calls += [lambda: upper.forward(LONG), lambda: cascade.forward(LONG)]
                    with beside(*calls):
                        report = sender.send(timeout=LONG)
                    # Applied says that it has reached the leaf.
                    assert report.all_applied, report
                    assert following.version == sender.version
                    assert leaf.value == beside_it.value == value
                assert "0x" not in repr(upper)
                following.shutdown()



def test_calls_for_one_model_are_refused_with_several():
    own = {"policy": Net(), "critic": Net()}
    sender = weightsync.Sender(models={"policy": Net(1.0), "critic": Net(1.0)}, history=2)
    receiver = weightsync.ModelReceiver(sender.init_info, 0, models=own)
    reader = weightsync.Receiver(sender.init_info, 1)
    with all_ended(sender, receiver, reader):
        meet(sender, receiver, reader)
        for _ in range(2):
            report = sender.send(model="policy", wait="sent")
            assert report.version == report.versions["policy"]
        for end in (receiver, reader):
            _refused("versions", lambda: end.version)
            _refused("receive_set", lambda: end.receive(0))
            _refused("pull_set", lambda: end.pull(timeout=0))
            _refused("model=NAME", lambda: end.pull_set(2, timeout=0))
        _refused("latest_set", reader.latest)
        _refused("versions", lambda: sender.version)
        # Nothing was taken by a call that was refused.
        versions = {"policy": 3, "critic": 1}
        assert receiver.receive_set(LONG) == receiver.versions == versions == sender.versions
        for seen in (reader.latest_set(), reader.pull_set(), reader.receive_set(0) or {}):
            assert {name: one.version for name, one in seen.items()} in (versions, {})
        old = receiver.pull_set(2, model="policy", timeout=LONG)
        assert old == receiver.versions == {"policy": 2, "critic": 1}
        background = receiver.start_background()
        _refused("versions", lambda: background.version)
        assert background.versions == old
        background.shutdown()
        _refused("versions", lambda: sender.send(wait="sent").version)
        _refused("versions", lambda: sender.send_async(wait="sent").version)
        with pytest.raises(weightsync.ModelError, match="use versions"):
            sender.workers[0].version  # noqa: B018
        del seen


def _refused(instead, call):
    with pytest.raises(weightsync.ModelError, match=f"(policy, critic|critic, policy).*use .*{instead}"):
        call()


def test_weights_of_no_worker_are_refused():
    with pair(Net(1.0), Net()) as (sender, _):
        with pytest.raises(ValueError, match="at least one worker"):
            sender.send_each({})


class Head(nn.Module):
    """A part of its own, behind one that it may share."""

    def __init__(self, encoder, fill):
        super().__init__()
        self.encoder, self.own = encoder, nn.Parameter(torch.full((3,), float(fill)))


def heads(kind, value, *, tied):
    """Two models, which may have one encoder."""
    encoder = Net(value)
    made = {"actor": Head(encoder, value), "critic": Head(encoder if tied else Net(value), value)}
    # State dicts have the same tensors.
    return {name: dict(one.state_dict()) for name, one in made.items()} if kind == "dicts" else made


def values_of(model):
    tensors = model.values() if isinstance(model, dict) else model.state_dict().values()
    return {float(one) for tensor in tensors for one in tensor.unique()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["modules", "dicts"])
def test_set_gives_a_tensor_of_two_models_one_value(kind, mode):
    trainer, worker = heads(kind, 1.0, tied=False), heads(kind, 0.0, tied=True)

    def fill(name, value):
        one = trainer[name] if kind == "dicts" else trainer[name].state_dict()
        for tensor in one.values():
            tensor.fill_(value)

    sender = weightsync.Sender(models=trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, 0, models=worker, mode=mode)
    with all_ended(sender, receiver):
        meet(sender, receiver)
        assert values_of(worker["actor"]) == values_of(worker["critic"]) == {1.0}
        for name in trainer:
            fill(name, 2.0)
        sender.send(wait="sent")
        assert receiver.receive_set(LONG) == {"actor": 2, "critic": 2}
        # One that comes alone may change what both have.
        fill("actor", 3.0)
        sender.send(model="actor", wait="sent")
        assert receiver.receive_set(LONG) == {"actor": 3, "critic": 2}
        assert (values_of(worker["actor"]), values_of(worker["critic"])) == ({3.0}, {2.0, 3.0})
        fill("critic", 4.0)
        sender.send(wait="sent")
        words = "'actor: encoder.* share memory here, and were sent"
        with pytest.raises(weightsync.LoadError, match=words):
            receiver.receive_set(LONG)
        assert receiver.versions == {"actor": 3, "critic": 2}
        assert (values_of(worker["actor"]), values_of(worker["critic"])) == ({3.0}, {2.0, 3.0})
        fill("actor", 4.0)
        sender.send(wait="sent")
        assert receiver.receive_set(LONG)
        assert values_of(worker["actor"]) == values_of(worker["critic"]) == {4.0}


def test_set_whose_models_differ_in_one_tensor_is_refused_at_connect():
    trainer, worker = heads("modules", 1.0, tied=False), heads("modules", 0.0, tied=True)
    with torch.no_grad():
        trainer["critic"].encoder.small[1] = 7
    sender = weightsync.Sender(models=trainer)
    receiver = weightsync.ModelReceiver(sender.init_info, 0, models=worker)
    with all_ended(sender, receiver):
        with pytest.raises(weightsync.WeightsyncError, match="encoder.small' share memory here"):
            meet(sender, receiver)
    assert values_of(worker["actor"]) == {0.0}
