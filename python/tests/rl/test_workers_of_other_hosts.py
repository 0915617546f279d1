"""Workers that join over a network: the same frames, and nothing lost or left where one fails."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from counting import Constant, Counting, Large, Pixels, zeros
from meddling import Proxy, free_port

import weightsync
from weightsync import rl
from weightsync.rl import _crew

COMMAND = [sys.executable, "-m", "weightsync.rl.worker"]
WEIGHTSYNC = Path(sys.executable).with_name("weightsync")


@pytest.fixture(autouse=True)
def as_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIGHTSYNC_TOKEN", "WEIGHTSYNC_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    # Where workers find `counting`, as on a host where it is installed.
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))


def by_hand(address: str, *arguments: str) -> subprocess.Popen[str]:
    """A worker that somebody starts."""
    command = [*COMMAND, "--join", address, *arguments]
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE)


def is_gone(pid: int | None) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 60
    while not all(map(is_gone, pids)):
        assert time.monotonic() < until, "a process is left"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "cat_results", ["stack", *(pytest.param(one, marks=pytest.mark.soak) for one in (0, -1))]
)
def test_frames_equal_those_of_processes(cat_results: Any) -> None:
    envs = [lambda: rl.SerialEnv(2, lambda: Counting(3)), lambda: rl.SerialEnv(2, Counting)]
    settings: dict[str, Any] = {"frames_per_batch": 32, "cat_results": cat_results, "seed": 3}
    batches = []
    for kind in (rl.MultiSyncCollector, rl.DistributedSyncDataCollector):
        with kind(envs, Constant(1), **settings) as collector:
            batches.append([collector.next() for _ in range(3)])
    for near, far in zip(*batches, strict=True):
        assert far.batch_size == near.batch_size
        assert far.columns().keys() == near.columns().keys()
        for key, value in near.columns().items():
            assert np.array_equal(far.columns()[key], value), key


def test_nested_columns_come_over_the_network() -> None:
    def policy(observation: Any) -> Any:
        import torch

        return torch.full((1, 2), 0.5)

    with rl.RPCDataCollector([Pixels], policy, frames_per_batch=4, return_type="numpy") as collector:
        batch = collector.next()
    assert (batch["pixels"] == 7).all()
    assert batch["next", "state", "speed"].tolist() == [[1.0]] * 4


def test_weights_reach_workers_before_their_next_part() -> None:
    policy = Constant(1)
    with rl.DistributedSyncDataCollector([Counting] * 2, policy, frames_per_batch=8) as collector:
        for version in (1, 2, 3):
            batch = collector.next()
            assert set(batch["collector", "policy_version"].flatten().tolist()) == {version}
            assert set(batch["action"].flatten().tolist()) == {version % 3}
            assert collector.update_policy_weights_(policy.choose((version + 1) % 3)).all_applied


def test_first_worker_comes_first() -> None:
    with rl.DistributedDataCollector([Counting] * 2, zeros, frames_per_batch=10) as collector:
        assert isinstance(collector, rl.MultiAsyncCollector)
        ids = [set(collector.next()["collector", "traj_ids"].tolist()) for _ in range(6)]
        assert sum(map(len, ids)) == len(set.union(*ids))
    made = rl.DistributedDataCollector([Counting], zeros, frames_per_batch=10, sync=True)
    with made as collector:
        assert isinstance(collector, rl.DistributedSyncDataCollector)
        assert collector.next().batch_size == (1, 10)


def test_nothing_is_left_after_shutdown() -> None:
    collector = rl.DistributedDataCollector([Counting] * 2, zeros, frames_per_batch=10)
    collector.next()
    pids = [collector.pid(worker) for worker in range(2)]
    host, port = collector.address.split(":")
    before = len(os.listdir("/proc/self/fd"))
    collector.shutdown()
    assert all(map(is_gone, pids))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)))
    assert len(os.listdir("/proc/self/fd")) < before


@pytest.mark.parametrize(
    "fault",
    [
        "kill",
        *(pytest.param(one, marks=pytest.mark.soak) for one in ("raise", "refuse", "exit", "hang")),
    ],
)
def test_failed_worker_is_launched_again(fault: str) -> None:
    words = {
        "raise": "the pole broke",
        "refuse": "the simulator is gone",
        "kill": r"its process \d+ was killed by SIGKILL; the link to it, from .*, has ended",
        "exit": "ended with exit code 3",
        "hang": "collecting one part for more than",
    }
    envs = [Counting, lambda: Counting(fault=fault, at=12)]
    policy, timeout = Constant(1), 20.0 if fault == "hang" else 100.0
    with rl.DistributedSyncDataCollector(
        envs, policy, frames_per_batch=20, restart=True, timeout=timeout
    ) as collector:
        collector.next()
        collector.update_policy_weights_(policy.choose(2))
        batch = collector.next()
        (failure,) = batch.failures
        assert (failure.worker, failure.restarted) == (1, True)
        assert re.search(words[fault], failure.reason), failure.reason
        assert set(batch["action"].flatten().tolist()) == {2}
        assert set(batch["collector", "policy_version"].flatten().tolist()) == {2}
        assert len(batch["collector", "traj_ids"].unique()) == 4
        assert collector.update_policy_weights_().all_applied


@pytest.mark.parametrize("fault", ["damaged", pytest.param("cut", marks=pytest.mark.soak)])
def test_part_that_breaks_off_is_collected_again(fault: str) -> None:
    """The link breaks in the middle of the first part of 32 MiB."""
    did: list[int] = []

    def meddle(passed: int, data: bytes) -> bytes | None:
        if did or passed < 10 << 20:
            return data
        did.append(passed)
        return None if fault == "cut" else data[:-1] + bytes([data[-1] ^ 1])

    port = free_port()
    proxy = Proxy(port, meddle)
    try:
        with rl.DistributedSyncDataCollector(
            [Large],
            zeros,
            frames_per_batch=4,
            restart=True,
            listen=f"127.0.0.1:{port}",
            advertise=proxy.address,
        ) as collector:
            batch = collector.next()
            words = "has ended" if fault == "cut" else "checksum"
            assert [re.search(words, one.reason) is None for one in batch.failures] == [False]
            for at, frame in enumerate(batch["observation"][0]):
                assert frame.unique().tolist() == [at]
    finally:
        proxy.close()


def test_worker_killed_while_it_sends_delivers_nothing() -> None:
    """A first worker is killed in the middle of its part; a second one fills the same slot."""
    killed: list[int] = []

    def meddle(passed: int, data: bytes) -> bytes:
        if not killed and passed > 10 << 20:
            killed.append(collector.pid(0) or 0)
            os.kill(killed[0], signal.SIGKILL)
        return data

    port = free_port()
    proxy = Proxy(port, meddle)
    try:
        with rl.DistributedDataCollector(
            [Large],
            zeros,
            frames_per_batch=4,
            restart=True,
            listen=f"127.0.0.1:{port}",
            advertise=proxy.address,
        ) as collector:
            batch = collector.next()
            assert [one.restarted for one in batch.failures] == [True]
            assert "killed by SIGKILL" in batch.failures[0].reason
            assert batch["collector", "traj_ids"].tolist() == [0] * 4
            for at, frame in enumerate(batch["observation"]):
                assert frame.unique().tolist() == [at]
    finally:
        proxy.close()


TRAINER = """
import os, sys, time
sys.path.insert(0, {tests!r})
from counting import Counting, zeros
from weightsync import rl

class Hanging(Counting):
    def step(self, action):
        # With the interpreter's lock, as an environment in C may have it.
        if self.taken == 15: import ctypes; ctypes.PyDLL(None).sleep(10_000)
        return super().step(action)

def main():
    collector = rl.DistributedDataCollector([Hanging, Counting], zeros, frames_per_batch=10)
    print(collector.pid(0), collector.pid(1), flush=True)
    collector.next()
    sys.stdin.read()
main()
"""


def test_killed_trainer_takes_its_workers_along() -> None:
    program = TRAINER.format(tests=str(Path(__file__).parent))
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    pids = [int(one) for one in trainer.stdout.readline().split()]
    trainer.kill()
    trainer.communicate()
    wait_until_gone(pids)


def test_launcher_that_fails_is_reported() -> None:
    with pytest.raises(weightsync.PeerError, match=r"launcher `sh -c 'exit 7 0'` ended with exit code 7, before"):
        rl.DistributedDataCollector(
            [Counting], zeros, frames_per_batch=10, launcher=["sh", "-c", "exit 7 {worker}"]
        )
    with pytest.raises(weightsync.OperatingSystemError, match="no-such-command"):
        rl.DistributedDataCollector(
            [Counting], zeros, frames_per_batch=10, launcher="no-such-command {worker}"
        )


def test_launcher_is_a_command_for_each_host(tmp_path: Path) -> None:
    told = ["sh", "-c", f'echo $1 $2 > {tmp_path}/$2; exec "$0" -m weightsync.rl.worker']
    command = [*told, sys.executable, "{host}", "{worker}"]
    with rl.DistributedSyncDataCollector(
        [Counting] * 3, zeros, frames_per_batch=12, launcher=command, hosts=["one", "two"]
    ) as collector:
        assert collector.next().batch_size == (3, 4)
    assert [(tmp_path / str(one)).read_text() for one in range(3)] == [
        "one 0\n",
        "two 1\n",
        "one 2\n",
    ]


def launcher(script: str, *arguments: object) -> list[str]:
    """A launcher that is a script: ``$0`` is Python."""
    return ["sh", "-c", script, sys.executable, *map(str, arguments)]


def test_launcher_of_a_dead_host_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ssh to a host that has lost its power: it goes on after its worker."""
    # To wait so long for a launcher is to fail.
    monkeypatch.setattr(_crew, "_LEAVE", 10_000.0)
    script = 'sleep 9999 & echo $! >> $1; "$0" -m weightsync.rl.worker && kill $! || wait'
    with rl.DistributedSyncDataCollector(
        [lambda: Counting(fault="kill", at=12)],
        zeros,
        frames_per_batch=10,
        launcher=launcher(script, tmp_path / "left"),
        restart=True,
    ) as collector:
        collector.next()
        (failure,) = collector.next().failures
        assert re.search("killed by SIGKILL; the link to it, from .*, has ended", failure.reason)
    # With all that the launcher had started here.
    wait_until_gone([int(one) for one in (tmp_path / "left").read_text().split()])


def test_shutdown_ends_what_launchers_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_crew, "_LEAVE", 0.1)
    script = 'sleep 9999 & echo $! > $1; "$0" -m weightsync.rl.worker; wait'
    collector = rl.DistributedSyncDataCollector(
        [Counting], zeros, frames_per_batch=10, launcher=launcher(script, tmp_path / "left")
    )
    collector.shutdown()
    wait_until_gone([int((tmp_path / "left").read_text())])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"launcher": "ssh {host} worker"}, r"give hosts="),
        ({"launcher": "worker", "hosts": ["a"]}, r"has no \{host\}"),
        ({"hosts": ["a"]}, "give a command with"),
        ({"launcher": "submitit"}, "srun"),
        ({"launcher": None}, "need a token"),
        ({"launcher": ""}, "empty"),
        ({"workers": "threads"}, "launcher says how"),
        ({"listen": "0.0.0.0:0"}, "without a token"),
        ({"listen": "nonsense"}, "HOST:PORT"),
    ],
)
def test_settings_of_launchers_are_checked(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(weightsync.WeightsyncError, match=words):
        rl.DistributedDataCollector([Counting], zeros, frames_per_batch=10, **settings)


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a token for tests, of nobody else")
    yield


def test_code_takes_a_permission_of_its_own_for_plain_text(
    token: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_INSECURE_PLAINTEXT", "1")
    everywhere: dict[str, Any] = {"frames_per_batch": 10, "listen": "0.0.0.0:0"}
    with pytest.raises(weightsync.WeightsyncError, match="insecure_plaintext_code=True"):
        rl.DistributedDataCollector([Counting], zeros, **everywhere)
    # That for weights, which a caller may know.
    with pytest.raises(weightsync.SettingError, match="insecure_plaintext_code=True"):
        rl.DistributedDataCollector([Counting], zeros, insecure_plaintext=True, **everywhere)
    # Of no machine.
    alone = by_hand("192.0.2.1:9")
    assert "--insecure-plaintext-code" in alone.communicate(timeout=60)[1]
    assert alone.returncode == 1


def test_workers_join_on_their_own(token: None, monkeypatch: pytest.MonkeyPatch) -> None:
    address = f"127.0.0.1:{free_port()}"
    # The first waits for its trainer.
    first = by_hand(address, "--worker", "1")
    other = by_hand(address)
    with rl.DistributedSyncDataCollector(
        [Counting, lambda: Counting(fault="kill", at=12)],
        Constant(1),
        frames_per_batch=20,
        launcher=None,
        listen=address,
        restart=True,
    ) as collector:
        assert collector.next().batch_size == (2, 10)
        # Nobody waits for these.
        third = by_hand(address, "--worker", "1")
        assert third.communicate()[1].splitlines() == [
            f"weightsync: the trainer at {address} did not let this worker in: worker 1 is there "
            "already: give this one another number, or none"
        ]
        assert third.returncode == 1
        monkeypatch.setenv("WEIGHTSYNC_TOKEN", "another token, which is wrong")
        stranger = by_hand(address)
        assert "refused the token" in stranger.communicate()[1]
        # The one that is killed is replaced by another that joins.
        monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a token for tests, of nobody else")
        replacement: list[Any] = []

        def replace() -> None:
            first.wait()
            replacement.append(by_hand(address, "--worker", "1"))

        thread = threading.Thread(target=replace)
        thread.start()
        batch = collector.next()
        thread.join()
        assert [one.restarted for one in batch.failures] == [True]
        assert "has ended" in batch.failures[0].reason
    for one in (other, *replacement):
        one.communicate()
        assert one.returncode == 0
    first.communicate()


def test_worker_without_a_token_says_what_it_needs() -> None:
    joining = by_hand("127.0.0.1:1", "--patience", "0")
    assert "set WEIGHTSYNC_TOKEN_FILE" in joining.communicate()[1]
    assert joining.returncode == 1


def test_worker_gives_up_where_no_trainer_is(token: None) -> None:
    joining = by_hand(f"127.0.0.1:{free_port()}", "--patience", "0")
    assert "no answer from 127.0.0.1" in joining.communicate()[1]
    assert joining.returncode == 1


def test_worker_by_hand_has_certificates_of_its_own(
    token: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pki = tmp_path / "pki"
    make = [WEIGHTSYNC, "certs", "new", "--out", pki, "--hosts", "127.0.0.1"]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    monkeypatch.setenv("WEIGHTSYNC_TLS_LOOPBACK", "1")
    address = f"127.0.0.1:{free_port()}"
    # A variable for another end of this host does not count.
    monkeypatch.setenv("WEIGHTSYNC_TLS_DIR", str(tmp_path / "nothing"))
    worker = by_hand(address, "--tls", str(pki / "worker.pem"))
    with rl.DistributedSyncDataCollector(
        [Counting],
        Constant(1),
        frames_per_batch=10,
        launcher=None,
        listen=address,
        tls=pki / "trainer.pem",
    ) as collector:
        collector.next()
        assert collector.update_policy_weights_(Constant(2)).all_applied
        assert collector.next()["action"].tolist() == [[2] * 10]
    assert worker.wait() == 0


FAR = """
import json, socket, subprocess, sys, threading
sys.path.insert(0, {tests!r})
from counting import Constant, Counting
from weightsync import rl

def ip(*words):
    subprocess.run(["ip", *words], check=True)

ip("link", "set", "lo", "up")
fars = []
for number in range(2):
    # Another host: a network namespace, at the other end of a cable.
    far = subprocess.Popen(["unshare", "-n", "sh", "-c", "echo; read _"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    far.stdout.readline()
    near = f"near{{number}}"
    ip("link", "add", near, "type", "veth", "peer", "name", "far", "netns", str(far.pid))
    ip("addr", "add", f"10.93.{{number}}.1/24", "dev", near)
    ip("link", "set", near, "up")
    for words in (f"addr add 10.93.{{number}}.2/16 dev far", "link set far up", "link set lo up"):
        subprocess.run(["nsenter", "-t", str(far.pid), "-n", "ip", *words.split()], check=True)
    fars.append(far)

# What a program on the cable can read.
cable = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
cable.bind(("near0", 0))
read = set()

def listen():
    while packet := cable.recv(1 << 16):
        read.update(word for word in (b"observation", b"reward") if word in packet)

threading.Thread(target=listen, daemon=True).start()

policy = Constant(1)
collector = rl.DistributedSyncDataCollector(
    [Counting] * 2, policy, frames_per_batch=20, restart=True,
    # The cable of a host is whole again when a worker is started there.
    launcher=[
        "sh", "-c", 'nsenter -t $0 -n ip link set far up; exec nsenter -t $0 -n "$1" -m weightsync.rl.worker',
        "{{host}}", sys.executable,
    ],
    hosts=[str(far.pid) for far in fars], listen="10.93.0.1:0", **{setting!r},
)
collector.next()
assert collector.update_policy_weights_(policy.choose(2)).all_applied
batch = collector.next()
before = [collector.pid(worker) for worker in range(2)]
# The host of a worker is cut off.
subprocess.run(["nsenter", "-t", str(fars[1].pid), "-n", "ip", "link", "set", "far", "down"], check=True)
after = collector.next()
print(json.dumps({{
    "cut_off": before[1],
    "actions": batch["action"].tolist(),
    "versions": batch["collector", "policy_version"].tolist(),
    "reasons": [one.reason for one in after.failures],
    "restarted": [one.restarted for one in after.failures],
    "steps": after["observation"][1, :, 0].tolist(),
    "read": sorted(word.decode() for word in read),
}}), flush=True)
last = [collector.pid(worker) for worker in range(2)]
print(json.dumps(last), flush=True)
sys.stdin.readline()
collector.shutdown()
for far in fars:
    far.stdin.close()
"""


@pytest.mark.parametrize("encrypted", [pytest.param(False, marks=pytest.mark.soak), True])
def test_worker_of_another_host_that_is_silent(
    token: None, encrypted: bool, tmp_path: Path
) -> None:
    """Real hosts, as the network sees them."""
    setting: dict[str, Any] = {"insecure_plaintext_code": True}
    if encrypted:
        # The permission for plain text changes nothing where there are certificates.
        setting["tls"] = str(tmp_path / "pki")
        make = [WEIGHTSYNC, "certs", "new", "--out", setting["tls"], "--hosts", "10.93.0.1"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    program = FAR.format(tests=str(Path(__file__).parent), setting=setting)
    # Without privileges: a user namespace may do this.
    inside = ["unshare", "-Ur", "-n"] if os.getuid() else ["unshare", "-n"]
    ended = subprocess.run(
        [*inside, sys.executable, "-c", program], input="", capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    said, last = map(json.loads, ended.stdout.splitlines())
    assert said["actions"] == [[2] * 10] * 2
    assert said["versions"] == [[2] * 10] * 2
    assert said["restarted"] == [True]
    assert "its host answered nothing for 10s" in said["reasons"][0]
    assert said["steps"] == [0, 1, 2, 3, 4] * 2
    # The worker that was cut off has found its trainer's host gone, too.
    wait_until_gone([said["cut_off"], *last])
    # The names of columns travel as text.
    assert said["read"] == ([] if encrypted else ["observation", "reward"])


def standstill() -> float:
    """Seconds that a process is stopped: in the soak longer than a host may be silent."""
    soak = os.environ.get("WEIGHTSYNC_SOAK") or "1"
    return 15.0 if soak == "full" or float(soak) > 1 else 1.0


def test_worker_that_does_not_get_to_run_is_kept() -> None:
    with rl.DistributedSyncDataCollector([Counting] * 2, zeros, frames_per_batch=20) as collector:
        collector.next()
        pids = [collector.pid(worker) for worker in range(2)]
        assert pids[1] is not None
        os.kill(pids[1], signal.SIGSTOP)
        goes_on = threading.Timer(standstill(), os.kill, (pids[1], signal.SIGCONT))
        goes_on.start()
        # A link that ends is an error here.
        batch = collector.next()
        goes_on.join()
        assert batch["observation"][1, :, 0].tolist() == [0, 1, 2, 3, 4] * 2
        assert [collector.pid(worker) for worker in range(2)] == pids


STOPPED = """
import sys
sys.path.insert(0, {tests!r})
from counting import Counting, zeros
from weightsync import rl

collector = rl.DistributedSyncDataCollector([Counting] * 2, zeros, frames_per_batch=20)
collector.next()
print(flush=True)
sys.stdin.readline()
print(collector.next()["observation"][1, :, 0].tolist() == [0, 1, 2, 3, 4] * 2)
collector.shutdown()
"""


def test_trainer_that_does_not_get_to_run_keeps_its_workers() -> None:
    program = STOPPED.format(tests=str(Path(__file__).parent))
    trainer = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    trainer.stdout.readline()
    trainer.send_signal(signal.SIGSTOP)
    goes_on = threading.Timer(standstill(), trainer.send_signal, (signal.SIGCONT,))
    goes_on.start()
    said, errors = trainer.communicate("\n")
    goes_on.join()
    assert (said, trainer.returncode) == ("True\n", 0), errors


INTERRUPTED = """
import os, signal, sys, threading
sys.path.insert(0, {tests!r})
from counting import Counting, zeros
from weightsync import rl

collector = rl.DistributedSyncDataCollector([Counting], zeros, frames_per_batch=10)
collector.next()
os.kill(collector.pid(0), signal.SIGSTOP)
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    collector.next()
    raise SystemExit("it was not interrupted")
except KeyboardInterrupt:
    os.kill(collector.pid(0), signal.SIGCONT)
print(collector.next()["observation"][0, :, 0].tolist())
collector.shutdown()
"""


def test_ctrl_c_leaves_remote_workers_usable() -> None:
    program = INTERRUPTED.format(tests=str(Path(__file__).parent))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "[0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 1.0, 2.0, 3.0, 4.0]\n", ended.stderr
