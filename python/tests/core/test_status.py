"""What a sender tells of its workers, in its own program and from the shell."""

import json
import subprocess
import sys
import time

import pytest
import weightsync
from ends import FAR, LONG, Net
from test_deaths import Worker

COMMAND = [sys.executable, "-P", "-m", "weightsync", "status"]


def asked(*arguments):
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=LONG
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def until(seen, condition):
    deadline = time.monotonic() + LONG
    while not condition(status := seen()):
        assert time.monotonic() < deadline, status
        time.sleep(0.01)
    return status


def workers_of(status):
    """For each worker its number, versions, last outcome, and how it went."""
    return [
        (
            one["worker"],
            one["versions"],
            one["last"] and one["last"]["outcome"],
            one["gone"] and one["gone"]["outcome"],
        )
        for one in status["workers"]
    ]


@pytest.mark.parametrize("scheme", ["shared-mem", "multi-process", *FAR, "store"])
def test_status_has_each_outcome_and_the_dead_until_they_are_back(actor, scheme, tmp_path):
    scheme = f"store:{tmp_path / 'store'}" if scheme == "store" else scheme
    trainer = Net(1.0)
    with weightsync.Sender(trainer, scheme=scheme) as sender:
        first, second = (actor(Worker, sender.init_info, at) for at in range(2))
        for worker in (first, second):
            worker.order("connect")
        sender.connect(2, timeout=LONG)
        assert [worker.answer() for worker in (first, second)] == [1, 1]
        for worker in (first, second):
            worker.order("receive")
        sender.send(trainer.fill(2.0), timeout=LONG).ensure_applied()
        assert [worker.answer()[0] for worker in (first, second)] == [2, 2]
        status = sender.status()
        assert workers_of(status) == [(0, [2], "applied", None), (1, [2], "applied", None)]
        assert status["models"][0]["version"] == 2
        assert status["last_send"]["versions"][0][1] == 2
        assert status["last_send"]["took_seconds"] > 0
        assert [one["pid"] for one in status["workers"]] == [first.pid, second.pid]
        # Another process is told the same. A store's files do not have the outcomes.
        info = tmp_path / "info.json"
        info.write_text(sender.init_info.to_json())
        outside = json.loads(asked(info, "--json"))
        keeps = slice(0, 2) if scheme.startswith("store") else slice(0, 4)
        assert [one[keeps] for one in workers_of(outside)] == [
            one[keeps] for one in workers_of(status)
        ]
        tree = asked("--info", info)
        assert f"worker 1 (pid {second.pid}, " in tree
        # The dead one stays, without another send and with one.
        second.kill()
        status = until(sender.status, lambda status: workers_of(status)[1][3])
        assert workers_of(status)[1] == (1, [2], "applied", "died")
        first.order("receive")
        sender.send(trainer.fill(3.0), timeout=LONG)
        assert first.answer()[0] == 3
        assert workers_of(sender.status()) == [(0, [3], "applied", None), (1, [2], "died", "died")]
        assert [one.worker for one in sender.workers] == [0]
        # It is back.
        again = actor(Worker, sender.init_info, 1)
        assert again.ask("connect") == 3
        sender.wait_for([1], timeout=LONG)
        back = workers_of(sender.status())
        assert [(one[0], one[3]) for one in back] == [(0, None), (1, None)]
        again.kill()
        until(sender.status, lambda status: workers_of(status)[1][3])
        sender.forget([1])
        assert [one[0] for one in workers_of(sender.status())] == [0]


def test_worker_that_leaves_in_order_leaves_the_status():
    with weightsync.Sender(Net(1.0)) as sender:
        sender.connect(0, timeout=LONG)
        with weightsync.Receiver(sender.init_info, 4) as receiver:
            receiver.connect(timeout=LONG)
            assert [one["worker"] for one in sender.status()["workers"]] == [4]
        assert sender.status()["workers"] == []


def test_status_of_a_run_directory_lists_its_senders(tmp_path):
    run = tmp_path / "run"
    with weightsync.Sender(Net(1.0), run_dir=run) as sender:
        sender.connect(0, timeout=LONG)
        status = json.loads(asked(run, "--json"))
        assert status["models"] == sender.status()["models"]
        assert (status["scheme"], status["sends"]) == ("shared-mem", 1)
    done = subprocess.run([*COMMAND, run], capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 1
    assert "no sender that lives has told its address" in done.stderr


def test_status_of_a_store_needs_no_sender(tmp_path):
    store = tmp_path / "store"
    with weightsync.Sender(Net(1.0), scheme=f"store:{store}") as sender:
        sender.connect(0, timeout=LONG)
        alive = json.loads(asked(f"store:{store}", "--json"))
        assert alive["pid"] > 0
    for address in (f"store:{store}", store):
        left = json.loads(asked(address, "--json"))
        assert (left["pid"], left["models"][0]["version"]) == (0, 1)
        assert "no sender is there now" in asked(address)
