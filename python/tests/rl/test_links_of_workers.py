"""What a trainer does not believe of a worker of another host, and what a worker says at its end."""

from __future__ import annotations

import gc
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from counting import Counting, zeros

import weightsync
from weightsync import rl
from weightsync._native import TrainerLink, TrainerPort
from weightsync.rl import _remote, worker

#: The columns of a worker that keeps to its orders.
COLUMNS: list[Any] = [
    [["observation"], "float32", [2]],
    [["action"], "int64", []],
    [["next", "observation"], "float32", [2]],
    [["next", "reward"], "float32", []],
    *([["next", name], "bool", []] for name in ("done", "terminated", "truncated")),
    *([["collector", name], "int64", []] for name in ("traj_ids", "policy_version")),
]


#: Those of no column: objects, records, texts, times, another byte order, and no dtypes at all.
DTYPES: list[Any] = ["object", "i4,i4", "(1000000000,)f4", "S9", "datetime64[s]", ">f4", 7, {}]


def test_columns_of_a_worker_are_taken() -> None:
    assert [one.to_json() for one in _remote._columns(COLUMNS)] == COLUMNS


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ([], "no column next.reward"),
        (COLUMNS[:-1], "no column collector.policy_version"),
        ([*COLUMNS[:-1], [["collector", "policy_version"], "int64", [1]]], "no column"),
        ([*COLUMNS[:-1], [["collector", "policy_version"], "float32", []]], "no column"),
        ([*COLUMNS, COLUMNS[0]], "two columns of one name"),
        ([*COLUMNS, [["next"], "int64", []]], "one that it lies in"),
        ([*COLUMNS, [["action", "left", "leg"], "int64", []]], "one that it lies in"),
        ([*COLUMNS, [["collector", "mask"], "float32", []]], "collector.mask"),
        ([*COLUMNS, [["a"] * 65, "int64", []]], "a column called"),
        ([*COLUMNS, [["a"], "int64", [-1]]], "the column a"),
        ([*COLUMNS, [["a"], "int64", [1] * 29]], "the column a"),
        *(([*COLUMNS, [["a"], one, []]], "the column a|columns") for one in DTYPES),
    ],
)
def test_columns_that_make_no_sense_are_refused(columns: list[Any], words: str) -> None:
    with pytest.raises(weightsync.CorruptError, match=words):
        _remote._columns(columns)


ROGUE = """
import json, sys
from weightsync._native import TrainerLink
given = json.loads(sys.stdin.readline())
place = (given["worker"], given["ticket"])
link = TrainerLink(given["address"], given["secret"], None, given["insecure_plaintext_code"], place, 20.0)
link.settings()
for said in json.loads(sys.argv[1]):
    link.say(json.dumps(said))
while link.next() is not None:
    pass
link.leave()
"""


def ready(*more: Any, num_envs: int = 1) -> dict[str, Any]:
    columns = [*COLUMNS, *more]
    return {"is": "ready", "columns": columns, "num_envs": num_envs, "is_batched": False}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([{"is": "joined"}], "expected ready once, joined where asked"),
        ([ready(), {"is": "joined"}], "expected ready once, joined where asked"),
        ([ready(), ready()], "expected ready once"),
        # Products beyond 64 bits.
        ([ready([["a"], "int64", [1 << 30, 1 << 30, 1 << 3]])], "no memory can hold"),
        ([ready([["a"], "int64", [1 << 30, 1 << 30, 0]])], "no memory can hold"),
        ([ready(num_envs=1 << 39)], "no memory can hold"),
    ],
)
def test_answers_that_no_order_asked_for_end_a_worker(said: list[Any], words: str) -> None:
    rogue = [sys.executable, "-c", ROGUE, json.dumps(said)]
    with pytest.raises(weightsync.PeerError, match=words):
        rl.DistributedDataCollector([Counting], zeros, frames_per_batch=10, launcher=rogue).next()


class Breaking(Counting):
    """Breaks what sends its worker's frames."""

    def step(self, action: int) -> Any:
        for one in gc.get_objects():
            if type(one).__name__ == "RemoteWorker":
                one._slots = {}
        return super().step(action)


def test_worker_that_cannot_send_says_why() -> None:
    with pytest.raises(weightsync.PeerError, match=r"in _send\n(.*\n)*KeyError"):
        rl.DistributedSyncDataCollector([Breaking], zeros, frames_per_batch=10).next()


class Wide(Counting):
    """Shows 1,500 numbers, each under a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        one = gymnasium.spaces.Box(-1, 1, (), np.float32)
        self.observation_space = gymnasium.spaces.Dict({f"sensor{at}": one for at in range(1500)})  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self.observation_space.sample(), {}


@pytest.mark.parametrize("kind", [rl.MultiAsyncCollector, rl.DistributedDataCollector])
def test_more_columns_than_a_message_holds(kind: Any) -> None:
    def first(_: Any) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int64)

    words = r"3007 columns take \d+ bytes.* 65536: join columns"
    with pytest.raises(weightsync.PeerError, match=words):
        kind([Wide], first, frames_per_batch=4).next()


def test_launcher_that_is_gone_costs_its_worker_alone(tmp_path: Path) -> None:
    launcher = tmp_path / "launcher"
    # Where it finds `counting`, as on a host where it is installed.
    finds = f"PYTHONPATH={Path(__file__).parent}:$PYTHONPATH"
    launcher.write_text(f"#!/bin/sh\n{finds} exec {sys.executable} -m weightsync.rl.worker\n")
    launcher.chmod(0o700)
    with rl.DistributedDataCollector(
        [lambda: Counting(fault="exit", at=25), Counting],
        zeros,
        frames_per_batch=10,
        launcher=[str(launcher)],
        restart=True,
    ) as collector:
        collector.next()
        launcher.unlink()
        failures: list[Any] = []
        while not failures:
            failures = collector.next().failures
        (failure,) = failures
        assert (failure.worker, failure.restarted) == (0, False)
        assert "ended with exit code 3" in failure.reason
        assert "cannot be started" in failure.reason
        # The other one goes on.
        assert [collector.next().numel() for _ in range(3)] == [10] * 3


def test_forked_child_does_not_touch_a_workers_link() -> None:
    port = TrainerPort(None, None, None, False, 1)
    place = port.open(0, None, b"")
    link = TrainerLink(port.address, port.secret, None, False, (0, None), 60.0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            link.say("of the child")
        except weightsync.LifecycleError:
            code = 0
        # Not the parent's.
        del link
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    link.say("of the parent")
    link.leave()
    heard = [place.hear() for _ in range(3)]
    assert [one and one[0] for one in heard] == ["joined", "said", "gone"]
    assert heard[1] is not None and heard[1][1] == "of the parent"
    port.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "expected the trainer's line"),
        ("[]", "expected the trainer's line"),
        ('{"address": "127.0.0.1:1", "secret": "sesame"}', "expected the trainer's line"),
        ("", "ended before"),
    ],
)
def test_line_of_no_trainer_is_refused(
    line: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(line.encode())))
    assert ended([]) != 0
    said = capsys.readouterr().err
    assert words in said
    assert not {"Traceback", "sesame"} & set(said.replace('"', " ").split())


@pytest.mark.parametrize("number", ["-1", "1.5", str(1 << 32)])
def test_number_of_no_worker_is_refused(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(["--join", "127.0.0.1:1", "--worker", number]) == 2
    said = capsys.readouterr().err
    assert "expected a number from 0 on" in said or "expected one argument" in said


def ended(arguments: list[str]) -> Any:
    """The exit status of the command."""
    try:
        return worker.main(arguments)
    except SystemExit as end:
        return end.code
