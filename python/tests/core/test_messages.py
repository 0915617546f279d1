"""What errors say, and of which kind they are: each names what came, what is possible, and what to do."""

import ast
import builtins
import os
import socket
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import weightsync
from ends import LONG, Net, all_ended, meet, pair
from torch import nn

from weightsync import engines, lora, rl


def _raises(words, call, kind=weightsync.WeightsyncError):
    with pytest.raises(kind, match=words) as raised:
        call()
    assert isinstance(raised.value, weightsync.WeightsyncError)
    return raised.value


SETTINGS = [
    ({"slots": 2}, r"slots: expected .*at most.* got 2"),
    ({"slots": (1, 2, 3)}, r"slots: expected .* got \(1, 2, 3\)"),
    ({"history": -1}, "history: expected a whole number from 0 to 255, got -1"),
    ({"async_send_limit": "two"}, "async_send_limit: expected .* got 'two'"),
    ({"copy_threads": -1}, "copy_threads: expected .* got -1"),
    ({"timeout": "5"}, "timeout: expected seconds .* got '5'"),
    ({"timeout": float("nan")}, "timeout: expected seconds .* got nan"),
    ({"checksums": "yes"}, "checksums: expected True or False, got 'yes'"),
    ({"digest": 3}, "digest: expected True or False, got 3"),
    ({"strategy": "pickle"}, "strategy: expected"),
    ({"cast": "bfloat61"}, r"no dtype 'bfloat61' here.*\"bfloat16\""),
    ({"cast": 3}, "no dtype 3 here"),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda one: str(next(iter(one[0].items()))))
def test_a_setting_that_cannot_be_is_named(setting):
    given, words = setting
    _raises(words, lambda: weightsync.Sender(nn.Linear(2, 2), **given))


def test_a_cast_is_named_in_any_way():
    for cast in ["bfloat16", "BF16", torch.bfloat16, "torch.bfloat16"]:
        with pair(nn.Linear(2, 2), setup={"cast": cast}) as (_, receiver):
            assert receiver.latest()["weight"].dtype == torch.bfloat16
    for cast in [np.float16, np.dtype("float16"), "float16"]:
        assert weightsync.Sender(nn.Linear(2, 2), cast=cast).models == ["policy"]


@pytest.mark.parametrize("workers", [-1, "4", "ab", [0, -1], ["0"], 1.5, None, True, [0, 1.5]])
def test_workers_that_cannot_be_are_named(workers):
    words = f"workers: expected a count from 0 on, or the workers' numbers, got {workers!r}"
    with all_ended(weightsync.Sender(nn.Linear(2, 2))) as (sender,):
        error = _raises("workers: expected", lambda: sender.connect(workers), ValueError)
        assert str(error) == words
        sender.connect(0, timeout=LONG)
        _raises("workers: expected", lambda: sender.wait_for(workers))


def test_workers_named_twice_are_refused_at_once():
    with all_ended(weightsync.Sender(nn.Linear(2, 2))) as (sender,):
        _raises("names worker 0 twice", lambda: sender.connect([0, 1, 0]))


def test_numbers_that_cannot_be_are_named():
    with pair(nn.Linear(2, 2)) as (sender, receiver):
        info = sender.init_info
        _raises("worker's number: expected .* got -1", lambda: weightsync.Receiver(info, -1))
        _raises("worker's number: expected .* got '1'", lambda: weightsync.Receiver(info, "1"))
        _raises("worker's number: expected .* got '0'", lambda: sender.send(worker_ids="0"))
        _raises("worker's number: expected .* got -1", lambda: sender.send(worker_ids=[0, -1]))
        _raises("version: expected .* got -1", lambda: sender.send(version=-1))
        _raises("version: expected .* got 1.5", lambda: receiver.pull(1.5))
        _raises("timeout: expected .* got -1", lambda: receiver.receive(-1))


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.LazyLinear(3)


def test_tensors_that_cannot_be_sent_are_named():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
        jagged = torch.nested.nested_tensor(
            [torch.ones(2), torch.ones(3)], layout=torch.jagged
        )
    for given, words in [
        ({"a": {"b": nested}}, r"'a\.b' is nested: send its parts"),
        ({"a": {"b": jagged}}, r"'a\.b' is nested: send its parts"),
        (Lazy(), r"'inside\.weight' has no shape yet.*run the module once"),
        ({"a": torch.ones(2).to_sparse()}, r"'a' is torch\.sparse_coo"),
        ({"a": torch.ones(2, dtype=torch.complex128)}, r"'a' is torch\.complex128"),
        ({"a": torch.ones(2, device="meta")}, r"'a' is on the meta device"),
        ({"a": 3}, r"'a' is a int"),
        ([1], "not a list"),
    ]:
        _raises(words, lambda given=given: weightsync.Sender(given))


class Stateful(nn.Linear):
    state: object = None

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_extra_state_gaining_a_tensor_names_its_module():
    model = nn.Sequential(nn.Linear(2, 2), Stateful(2, 2))
    model[1].state = {"mean": torch.ones(3)}
    with pair(model) as (sender, _):
        model[1].state = {"mean": torch.ones(3), "low": torch.ones(1)}
        words = r"extra state of '1' .*had 1 tensor.*has 2"
        error = _raises(words, sender.send, weightsync.WrongWeightsError)
        assert "__extra" not in str(error)
        model[1].state = {"mean": torch.ones(4)}
        _raises(r"extra state of '1'.*\[3\].*\[4\]", sender.send, weightsync.WrongWeightsError)
        model[1].state = {"mean": torch.ones(3)}
        assert sender.send(wait="sent").version == 2


def test_calls_of_a_receiver_say_what_state_it_is_in():
    sender = weightsync.Sender(Net(1.0))
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=Net())
    with all_ended(sender, receiver):
        assert (receiver.version, receiver.versions) == (0, {"policy": 0})
        assert receiver.models == ["policy"]
        meet(sender, receiver)
        assert (receiver.version, receiver.models) == (1, ["policy"])
        background = receiver.start_background()
        assert (receiver.version, receiver.versions) == (1, {"policy": 1})
        assert receiver.models == ["policy"]
        assert receiver.run == background.run
        for call in ["receive", "receive_set", "pull", "connect", "start_background"]:
            words = f"{call} cannot be called after start_background.*safe_point"
            _raises(words, getattr(receiver, call), weightsync.LifecycleError)


def test_a_port_of_another_program_is_called_that():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for scheme in ["distributed", "rpc"]:
            words = rf"cannot listen at 127\.0\.0\.1:{port}.*another program"
            _raises(
                words,
                lambda scheme=scheme: weightsync.Sender(
                    nn.Linear(2, 2), scheme=f"{scheme}:listen=127.0.0.1:{port}"
                ).connect(0),
            )


def test_durations_are_said_in_few_digits():
    with all_ended(weightsync.Sender(nn.Linear(2, 2))) as (sender,):
        _raises(
            r"within \d+\.\d(ms|s): ", lambda: sender.connect(1, timeout=0.12345), TimeoutError
        )


@pytest.mark.parametrize("scheme", ["distributed", "rpc"])
def test_security_errors_name_the_scheme_setting(scheme, monkeypatch):
    monkeypatch.delenv("WEIGHTSYNC_TOKEN", raising=False)
    monkeypatch.delenv("WEIGHTSYNC_TOKEN_FILE", raising=False)

    def sender(settings):
        word = f"{scheme}:listen=0.0.0.0:0,advertise=127.0.0.1:0{settings}"
        return weightsync.Sender(nn.Linear(2, 2), scheme=word)

    _raises("without a token.*setting insecure-plaintext", lambda: sender("").connect(0))
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a token of at least 16 bytes")
    _raises("not encrypted.*setting insecure-plaintext", lambda: sender("").connect(0))
    with all_ended(sender(",insecure-plaintext")) as (open,):
        assert "insecure-plaintext" in open.scheme
        open.connect(0, timeout=LONG)


WRAPPED = {
    "module": lambda model: nn.DataParallel(model),
    "_orig_mod": lambda model: torch.compile(model, backend="eager"),
    "module._orig_mod": lambda model: nn.DataParallel(torch.compile(model, backend="eager")),
}


@pytest.mark.parametrize("part", WRAPPED)
def test_a_wrapped_model_is_recognised(part):
    wrapped = WRAPPED[part](nn.Linear(2, 3))
    for trainer, worker, whose in [
        (wrapped, nn.Linear(2, 3), "got"),
        (nn.Linear(2, 3), wrapped, "expected"),
    ]:
        sender = weightsync.Sender(trainer)
        receiver = weightsync.ModelReceiver(sender.init_info, 0, model=worker)
        names = " and ".join(rf'"{one}" \(of [A-Za-z.]*\)' for one in part.split("."))
        words = rf"names {whose} have {names} in.*pass the module inside \(model\.{part}\)"
        with all_ended(sender, receiver):
            _raises(words, lambda: meet(sender, receiver), weightsync.WrongWeightsError)
    sender = weightsync.Sender(nn.Linear(2, 3))
    with all_ended(sender):
        sender.connect(0, timeout=LONG)
        _raises(rf"model\.{part}\)", lambda: sender.send(wrapped), weightsync.WrongWeightsError)


@pytest.fixture
def lost_directory(tmp_path, monkeypatch):
    """A working directory that was removed."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()


def _sent_to_nobody(**settings):
    sender = weightsync.Sender(nn.Linear(2, 2), **settings)
    with all_ended(sender):
        sender.connect(0, timeout=LONG)


#: Calls that take a path: its way through the package is another one each time.
WITH_PATHS = {
    "store": lambda path, _: weightsync.Store(path),
    "pull": lambda path, store: store.pull(path),
    "files": lambda path, _: weightsync.Store("/nowhere", files=[path]),
    "scheme": lambda path, _: weightsync.StoreScheme(path),
    "keep": lambda path, _: _sent_to_nobody(keep=path),
    "run_dir": lambda path, _: _sent_to_nobody(run_dir=path),
    "run_dir of rpc": lambda path, _: _sent_to_nobody(run_dir=path, scheme="rpc"),
    "tls": lambda path, _: _sent_to_nobody(scheme=f"distributed:tls={path}"),
    "synchronizer": lambda path, _: weightsync.Synchronizer.local(run_dir=path),
    "its store": lambda path, _: weightsync.Synchronizer.local(store=path),
    "replay buffer": lambda path, _: rl.ReplayBuffer(8, directory=path),
    "adapters": lambda path, _: lora.Adapters("policy", path),
    "checkpoints": lambda path, _: engines.Remote("http://[::1]", routes=ROUTES, directory=path),
    "like": lambda path, _: engines.Remote("http://[::1]", routes=ROUTES, like=path),
}
ROUTES = {"update": "/update"}


@pytest.mark.parametrize("call", WITH_PATHS)
def test_path_in_a_removed_directory_is_said_to_lead_nowhere(call, tmp_path, lost_directory):
    with weightsync.Store(tmp_path / "store") as store:
        store.save(nn.Linear(2, 2))
        _raises("working directory was removed.*absolute path", lambda: WITH_PATHS[call]("a", store))


#: What Python makes of a file's name with the byte 0xff.
ODD = "a\udcff"

#: Calls that take text which goes to other processes.
WITH_NAMES = {
    "url": lambda: weightsync.Store(ODD),
    "url of a path": lambda: weightsync.Store(Path(ODD)),
    "url of bytes": lambda: weightsync.Store(os.fsencode(ODD)),
    "files": lambda: weightsync.Store("/nowhere", files={ODD: b""}),
    "named": lambda: weightsync.Store("/nowhere").load(named=ODD),
    "scheme": lambda: weightsync.Sender(nn.Linear(2, 2), scheme=f"store:{ODD}"),
    "scheme of settings": lambda: weightsync.Distributed(tls=Path(ODD)),
    "the name of a model": lambda: weightsync.Sender(nn.Linear(2, 2), name=ODD),
    "the name of a tensor": lambda: weightsync.Sender({ODD: torch.ones(2)}),
    "the name of a tensor within": lambda: weightsync.Sender({"a": {ODD: np.ones(2)}}),
    "the name of a tensor of a rule": lambda: weightsync.Mapping().rename("a", ODD),
    "device": lambda: weightsync.Receiver(weightsync.Sender(nn.Linear(2, 2)).init_info, 0, device=ODD),
    "address": lambda: weightsync.Synchronizer.connect(ODD),
    "store": lambda: weightsync.Synchronizer.local(store=ODD),
}


@pytest.mark.parametrize("call", WITH_NAMES)
def test_text_that_is_not_utf_8_is_named(call):
    setting = call.split(" of ")[0] if call.startswith(("url", "scheme")) else call
    words = setting.split(" within")[0].split(" of a rule")[0] + ": expected text that is UTF-8"
    error = _raises(words, WITH_NAMES[call], weightsync.SettingError)
    assert ascii(ODD).strip("'") in str(error)
    # The error can be printed and logged.
    str(error).encode()


def test_files_may_have_any_name(tmp_path):
    other = tmp_path / ODD
    other.mkdir()
    with weightsync.Store(tmp_path / "store") as store:
        store.save(nn.Linear(2, 2))
        assert store.pull(other / ODD) == 1
        assert store.load().save_safetensors(other / "a.safetensors")
    # Its workers read where it is in an init info.
    _raises("it is not UTF-8; choose", lambda: _sent_to_nobody(run_dir=other / "run"))
    # What others have put into the store has any name, too.
    for folder in [tmp_path / "store", *(one for one in (tmp_path / "store").iterdir() if one.is_dir())]:
        (folder / ODD).mkdir()
        (folder / f"{ODD}.json").touch()
    with weightsync.Store(tmp_path / "store", keep=1) as store:
        store.save(nn.Linear(2, 2))
        assert store.load().version == 2
        assert (tmp_path / "store" / f"{ODD}.json").exists()


def test_a_dtype_that_differs_mentions_the_cast():
    sender = weightsync.Sender(nn.Linear(2, 3))
    worker = nn.Linear(2, 3, dtype=torch.bfloat16)
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=worker)
    with all_ended(sender, receiver):
        _raises(r"the sender can cast: cast=\"BF16\"", lambda: meet(sender, receiver))


def test_every_error_is_one_of_ours():
    model = nn.Linear(2, 2)
    with pair(model) as (sender, receiver):
        snapshot, info = receiver.latest(), sender.init_info
        for call, kind in [
            (lambda: sender.send(wait="aplied"), ValueError),
            (lambda: sender.send_each({}), ValueError),
            (lambda: receiver.pull(1, at_least=2), ValueError),
            (lambda: sender.send(model="nothing"), KeyError),
            (lambda: snapshot["nothing"], KeyError),
            (lambda: snapshot.load_into([1]), TypeError),
            (lambda: sender.send({3: torch.ones(1)}), TypeError),
            (lambda: weightsync.ModelReceiver(info, 1, model=model, mode="x"), ValueError),
            (lambda: weightsync.ModelReceiver(info, 1, model=3), TypeError),
            (lambda: weightsync.InitInfo.from_json("{}"), ValueError),
        ]:
            error = _raises(".", call, kind)
            assert str(error) and not str(error).startswith('"')
        assert snapshot.get("nothing") is None
        assert "nothing" not in snapshot


#: Raises of Python's own exceptions: the file under the package, the exception, the reason.
ALLOWED = {
    ("_probe.py", "OSError"): "an attempt of `doctor` fails; the report has the text, nobody the exception",
    ("rl/__init__.py", "AttributeError"): "what Python asks of a module's __getattr__",
    ("process_group/_group.py", "RuntimeError"): "as gloo raises it; its callers say what has ended",
    ("torchrl/__init__.py", "AttributeError"): "what Python asks of a module's __getattr__",
    ("engines/_checkpoint.py", "ValueError"): "its caller takes the file for unreadable",
    ("engines/_http.py", "TimeoutError"): "the call was given up, so nobody has the exception",
    ("rl/_base.py", "NotImplementedError"): "an abstract method",
    ("rl/_form.py", "ValueError"): "its caller says that a worker's form cannot be read",
    ("rl/_multi_base.py", "NotImplementedError"): "an abstract method",
    ("rl/_values.py", "ValueError"): "its caller says that what a worker sent cannot be read",
    ("transfer/skyrl.py", "AttributeError"): "what Python asks of a module's __getattr__",
    ("vllm/_engines.py", "NotImplementedError"): "an abstract method",
}


def test_package_raises_no_bare_exception():
    package = Path(weightsync.__file__).parent
    found = set()
    for file in package.rglob("*.py"):
        where = file.relative_to(package)
        for node in ast.walk(ast.parse(file.read_text())):
            raised = node.exc if isinstance(node, ast.Raise) else None
            name = getattr(getattr(raised, "func", raised), "id", "")
            if isinstance(getattr(builtins, name, None), type):
                found.add((str(where), name))
    assert found == ALLOWED.keys(), "raise a WeightsyncError, or give the reason in ALLOWED"
