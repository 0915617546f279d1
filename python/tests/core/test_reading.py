"""Reading without a copy: what is bound, what is held, and what it costs whom."""

import gc
import logging
import multiprocessing
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import weightsync
from ends import LONG, MODES, NEWEST, PUSHING, Net, all_ended, bits, meet, pair, pass_on
from torch import nn

# Only of these a receiver holds what the sender's slots hold.
IN_PLACE = ["shared-mem", "multi-process", "multi-process:every=4"]


# A worker that is called over HTTP has each version in memory of its own.
IN_SLOTS = [scheme for scheme in PUSHING if not scheme.startswith("rpc")]


@pytest.mark.parametrize("scheme", IN_SLOTS)
def test_bound_parameters_lie_in_the_version(scheme):
    worker = Net()
    own = worker.large.data_ptr(), worker.small.data_ptr(), worker.mean.data_ptr()
    parameter = worker.large
    with pair(Net(1.0), worker, setup={"scheme": scheme}) as (sender, receiver):
        assert worker.large is parameter
        assert worker.large.data_ptr() != own[0]
        # Small ones and buffers are copied into what the worker has.
        assert (worker.small.data_ptr(), worker.mean.data_ptr()) == own[1:]
        if "own-copy" not in scheme:
            with open("/proc/self/maps") as maps:
                assert _mapping_of(worker.large.data_ptr(), maps).count("memfd:")
    # Shut down, it is in the worker's own memory.
    with open("/proc/self/maps") as maps:
        assert "memfd:" not in _mapping_of(worker.large.data_ptr(), maps)
    assert worker.value == 1.0


def _mapping_of(address, maps):
    for line in maps:
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line
    raise AssertionError(f"{address:#x} is not mapped")


def test_copied_parameters_stay_where_they_are():
    worker = Net()
    own = worker.large.data_ptr()
    with pair(Net(1.0), worker, mode="copy") as (sender, receiver):
        pass_on(sender, receiver)
        assert worker.large.data_ptr() == own
        assert worker.value == 1.0


def test_snapshots_of_one_version_share_their_memory():
    with pair(Net(1.0)) as (_, receiver):
        one, other = receiver.latest(), receiver.latest()
        assert one.tensors()["large"].data_ptr() == one["large"].data_ptr()
        assert np.shares_memory(one.numpy()["large"], one["large"].numpy())
        assert bits(one["large"]) == bits(other["large"])
        del one, other


@pytest.mark.parametrize("scheme", IN_PLACE)
def test_worker_writes_are_private_to_the_version(scheme, caplog):
    trainer, workers = Net(1.0), [Net(), Net()]
    sender = weightsync.Sender(trainer, scheme=scheme)
    receivers = [
        weightsync.ModelReceiver(sender.init_info, at, model=worker)
        for at, worker in enumerate(workers)
    ]
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
        with torch.no_grad():
            workers[0].large.mul_(3.0)
        workers[0].large.data[0] = float("nan")
        assert workers[1].value == 1.0
        assert trainer.value == 1.0
        assert sender.snapshot()["large"].unique().tolist() == [1.0]
        with caplog.at_level(logging.WARNING, "weightsync"):
            # One of another slot, and then one of the same.
            for value in (2.0, 3.0, 4.0):
                trainer.fill(value)
                pass_on(sender, *receivers)
                assert [worker.value for worker in workers] == [value, value]
        warned = [record.getMessage() for record in caplog.records]
        assert len(warned) == 1, warned
        assert "large" in warned[0] and "v1" in warned[0] and "policy" in warned[0]
        assert "into its own memory" in warned[0]


def test_unwritten_tensors_cause_no_warning(caplog):
    with caplog.at_level(logging.WARNING, "weightsync"):
        trainer, worker = Net(1.0), Net()
        with pair(trainer, worker) as (sender, receiver):
            for _ in range(4):
                pass_on(sender, receiver)
                worker()
    assert caplog.records == []


def test_copy_mode_writes_last_until_the_next_version():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker, mode="copy") as (sender, receiver):
        with torch.no_grad():
            worker.large.add_(1.0)
        assert worker.large.unique().tolist() == [2.0]
        pass_on(sender, receiver)
        assert worker.value == 1.0


@pytest.mark.parametrize("scheme", PUSHING)
def test_a_snapshot_stays_as_it_is_while_it_is_held(scheme):
    trainer = Net(1.0)
    with pair(trainer, setup={"scheme": scheme, "slots": (2, 8)}) as (sender, receiver):
        held = [receiver.receive(LONG)]
        views = [held[0]["large"]]
        for value in (2.0, 3.0, 4.0):
            trainer.fill(value)
            held.append(pass_on(sender, receiver))
            views.append(held[-1].numpy()["large"])
        assert [snapshot.version for snapshot in held] == [1, 2, 3, 4]
        # A view alone holds its version, too.
        del held
        trainer.fill(9.0)
        pass_on(sender, receiver)
        assert [float(view.min()) for view in views] == [1.0, 2.0, 3.0, 4.0]
        assert [float(view.max()) for view in views] == [1.0, 2.0, 3.0, 4.0]
    # And after both ends.
    assert [float(view.max()) for view in views] == [1.0, 2.0, 3.0, 4.0]
    del views


@pytest.mark.parametrize("scheme", IN_PLACE)
def test_held_snapshot_is_named_by_the_sender(scheme):
    trainer = Net(1.0)
    with pair(trainer, setup={"scheme": scheme, "slots": (2, 2)}) as (sender, receiver):
        held = receiver.receive(LONG)
        newer = pass_on(sender, receiver)
        with pytest.raises(weightsync.DeadlineError) as refused:
            sender.send(timeout=0.05)
        assert "worker 0" in str(refused.value)
        assert str(os.getpid()) in str(refused.value)
        assert refused.value.remedy == "retry"
        assert isinstance(refused.value, TimeoutError)
        # Nothing was sent, and both are as they were.
        assert (held.version, newer.version, sender.version) == (1, 2, 2)
        tensor = held["large"]
        del held
        with pytest.raises(weightsync.DeadlineError):
            sender.send(timeout=0.05)
        del tensor
        assert pass_on(sender, receiver).version == 3
        del newer


@pytest.mark.parametrize("scheme", PUSHING)
@pytest.mark.parametrize("mode", MODES)
def test_room_is_given_back(mode, scheme):
    trainer, worker = Net(0.0), Net()
    setup = {"scheme": scheme, "slots": (2, 2)}
    with pair(trainer, worker, mode=mode, setup=setup) as (sender, receiver):
        for value in range(1, 50):
            trainer.fill(value)
            sender.send(wait="sent", timeout=LONG)
            receiver.receive(LONG)
            assert worker.value == value


@pytest.mark.parametrize("scheme", IN_PLACE)
def test_room_is_given_back_when_tensors_are_dropped(scheme):
    trainer = Net(0.0)
    with pair(trainer, setup={"scheme": scheme, "slots": (2, 2)}) as (sender, receiver):
        receiver.receive(LONG)
        for value in range(1, 50):
            trainer.fill(value)
            views = pass_on(sender, receiver, timeout=LONG).tensors()
            assert views["large"].unique().tolist() == [value]
            arrays = receiver.latest().numpy()
            assert arrays["mean"][0] == value
            del views, arrays


def test_a_copy_of_a_snapshot_costs_no_room():
    trainer = Net(1.0)
    with pair(trainer, setup={"slots": (2, 2)}) as (sender, receiver):
        copies = [receiver.receive(LONG).copy()]
        for value in (2.0, 3.0, 4.0):
            trainer.fill(value)
            copies.append(pass_on(sender, receiver).copy())
        assert [copy["large"].unique().tolist() for copy in copies] == [[1.0], [2.0], [3.0], [4.0]]


@pytest.mark.parametrize("scheme", NEWEST)
def test_fork_of_a_bound_worker_reads_whole_weights(scheme):
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker, setup={"scheme": scheme}) as (sender, receiver):
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        child = context.Process(target=_read_in_child, args=(worker, there), daemon=True)
        child.start()
        there.close()
        # What comes afterwards is the parent's alone.
        for value in (2.0, 3.0, 4.0):
            trainer.fill(value)
            pass_on(sender, receiver)
            assert worker.value == value
        here.send(None)
        assert here.poll(LONG)
        assert here.recv() == (1.0, 1.0)
        child.join()
        assert child.exitcode == 0
        child.close()
        here.close()


def _read_in_child(worker, pipe):
    pipe.recv()
    pipe.send(worker())


def test_forked_child_gets_an_error_for_an_end():
    trainer, worker = Net(1.0), Net()
    with pair(trainer, worker) as (sender, receiver):
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        child = context.Process(target=_use_in_child, args=(sender, receiver, there), daemon=True)
        child.start()
        there.close()
        assert here.poll(LONG)
        said = here.recv()
        child.join()
        child.close()
        here.close()
        assert [kind for kind, _ in said] == ["LifecycleError"] * len(said), said
        # And the parent's go on.
        pass_on(sender, receiver)


def _use_in_child(sender, receiver, pipe):
    said = []
    for call in (
        lambda: sender.send(timeout=1.0),
        lambda: receiver.receive(0),
        lambda: receiver.pull(timeout=0),
    ):
        try:
            call()
            said.append(("nothing", ""))
        except Exception as error:
            said.append((type(error).__name__, str(error)))
    pipe.send(said)


def test_forked_child_gets_an_error_for_a_snapshot():
    with pair(Net(1.0)) as (_, receiver):
        snapshot = receiver.latest()
        view = snapshot._native.view()
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        args = (snapshot, view, there)
        child = context.Process(target=_look_in_child, args=args, daemon=True)
        child.start()
        there.close()
        assert here.poll(LONG)
        assert here.recv() == ["LifecycleError", "BufferError"]
        child.join()
        child.close()
        here.close()
        assert memoryview(view).nbytes


def _look_in_child(snapshot, view, pipe):
    said = []
    for call in (snapshot.tensors, lambda: memoryview(view)):
        try:
            call()
            said.append("nothing")
        except Exception as error:
            said.append(type(error).__name__)
    pipe.send(said)


def test_a_forked_child_has_its_parents_copies():
    with pair(Net(1.0)) as (_, receiver):
        copy = receiver.latest().copy()
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()
        child = context.Process(target=_use_copy_in_child, args=(copy, there), daemon=True)
        child.start()
        there.close()
        assert here.poll(LONG)
        assert here.recv() == (copy.digest(), 1.0)
        child.join()
        child.close()
        here.close()


def _use_copy_in_child(copy, pipe):
    model = Net()
    try:
        copy.load_into(model)
        pipe.send((copy.digest(), model.value))
    except Exception as error:
        pipe.send(error)


def test_worker_sees_no_change_before_a_send():
    trainer, worker = Net(1.0), Net()
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.5)
    with pair(trainer, worker) as (sender, receiver):
        snapshot = sender.snapshot()
        for _ in range(5):
            optimizer.zero_grad()
            sum(parameter.sum() for parameter in trainer.parameters()).backward()
            optimizer.step()
            trainer.mean.add_(1.0)
            assert receiver.receive(0) is None
            assert worker.value == 1.0
            assert snapshot["mean"].tolist() == [1.0] * 5
        sender.send(wait="sent")
        # Also after the send, and before and after the worker takes it.
        trainer.fill(77.0)
        receiver.receive(LONG)
        assert worker.large.unique().tolist() == [-1.5]
        assert worker.mean.unique().tolist() == [6.0]
        del snapshot


def test_a_worker_can_train_what_it_received():
    trainer, worker = Net(1.0), Net()
    optimizer = torch.optim.Adam(worker.parameters(), lr=0.1)
    for mode in MODES:
        with pair(trainer, worker, mode=mode) as (sender, receiver):
            worker.large.sum().backward()
            optimizer.step()
            assert not torch.equal(worker.large, trainer.large)
            assert trainer.value == 1.0
            pass_on(sender, receiver)
            assert worker.value == 1.0


def test_autograd_notices_a_changed_saved_parameter():
    trainer, worker = Net(1.0), Net()
    for mode in MODES:
        with pair(trainer, worker, mode=mode) as (sender, receiver):
            # Its backward wants the small parameter as it was.
            loss = (worker.small**2).sum()
            trainer.fill(5.0)
            pass_on(sender, receiver)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            trainer.fill(1.0)


def test_a_snapshot_is_a_mapping_and_can_be_saved(tmp_path):
    with pair(Net(1.5)) as (sender, receiver):
        snapshot = receiver.latest()
        assert set(snapshot) == {"large", "small", "mean"}
        assert len(snapshot) == 3
        assert "small" in snapshot and "other" not in snapshot
        with pytest.raises(KeyError, match="other.*large"):
            snapshot["other"]
        digest = snapshot.save_safetensors(tmp_path / "it.safetensors")
        assert digest == snapshot.digest() == sender.digest()
        model = Net()
        snapshot.load_into(model)
        assert model.value == 1.5
        into = {"large": torch.zeros(32 * 1024), "small": np.zeros(3, "f4"), "mean": torch.zeros(5)}
        snapshot.load_into(into)
        assert into["small"].tolist() == [1.5] * 3
        small = {"large": torch.zeros(3), "small": torch.zeros(3)}
        with pytest.raises(weightsync.WrongWeightsError, match="(?s)mean.*large.*32768"):
            snapshot.load_into(small)
        assert small["small"].tolist() == [0.0] * 3
        assert (tmp_path / "it.safetensors").stat().st_size > 128 * 1024
        del snapshot


class Stateful(Net):
    """Parameters large enough to be bound, and extra state with a tensor in it."""

    def get_extra_state(self):
        return {"step": self.value, "seen": [torch.full((3,), self.value)]}

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("mode", MODES)
def test_worker_releases_versions_without_the_gc(mode):
    trainer, worker = Stateful(1.0), Stateful()
    with pair(trainer, worker, mode=mode, setup={"slots": (3, 3), "timeout": 5.0}) as ends:
        gc.disable()
        try:
            for value in range(2, 12):
                trainer.fill(float(value))
                pass_on(*ends)
                assert worker.state["seen"][0].tolist() == [float(value)] * 3
        finally:
            gc.enable()


WITHOUT_TORCH = """
import sys, threading
sys.modules["torch"] = None
import numpy as np, weightsync

weights = {"a": {"w": np.arange(6.0).reshape(2, 3)}, "b": np.ones(2, np.int8)}
with weightsync.Sender(weights) as sender:
    receiver = weightsync.Receiver(sender.init_info)
    joining = threading.Thread(target=receiver.connect)
    joining.start()
    sender.connect()
    joining.join()
    snapshot = receiver.latest()
    assert list(snapshot) == ["a.w", "b"] and len(snapshot) == 2 and "a.w" in snapshot
    for name, array in snapshot.items():
        assert isinstance(array, np.ndarray) and name in ("a.w", "b")
    assert (snapshot["a.w"] == weights["a"]["w"]).all()
    assert (snapshot.numpy()["b"] == 1).all()
    assert snapshot.get("c") is None
    try:
        snapshot.tensors()
    except weightsync.UnsupportedError as error:
        assert "numpy()" in str(error)
    else:
        raise AssertionError("there is no torch")
    made = snapshot.mapped(weightsync.Mapping().rename("a.*", "c.*").cast("*", "float32"))
    assert made["c.w"].dtype == np.float32
    own = {"a": {"w": np.zeros((2, 3))}, "b": np.zeros(2, np.int8)}
    snapshot.load_into(own)
    assert (own["a"]["w"] == weights["a"]["w"]).all()
    del snapshot, array, made
    receiver.shutdown()
assert "torch" not in [name for name, module in sys.modules.items() if module is not None]
"""


def test_a_snapshot_is_read_without_torch(tmp_path):
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_TORCH], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_snapshot_has_each_tied_name():
    model = nn.Module()
    model.one = nn.Parameter(torch.ones(3))
    model.two = model.one
    with pair(model) as (_, receiver):
        snapshot = receiver.latest()
        assert len(snapshot) == len(list(snapshot)) == 2
        assert snapshot["one"] is snapshot["two"]
        assert set(snapshot) == {"one", "two"}
