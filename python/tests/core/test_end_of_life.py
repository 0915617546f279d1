"""A worker ends in each way while another of its threads runs its model: nothing crashes, no value changes."""

import subprocess
import sys
from pathlib import Path

import end_of_life
import pytest
import weightsync
from ends import LONG, PUSHING, all_ended

PROGRAM = str(Path(__file__).parent / "end_of_life.py")
# Every way for one module, and every module for one way.
CASES = [("Direct", way) for way in end_of_life.WAYS if way != "loads_beside_uses"] + [
    (name, "shutdown") for name in end_of_life.MODULES if name != "Direct"
]


@pytest.mark.parametrize(("name", "way"), CASES, ids=lambda one: one)
def test_worker_ends_while_a_thread_runs_its_model(name, way):
    sender = weightsync.Sender(end_of_life.filled(name, 0.5), timeout=LONG)
    with (
        all_ended(sender),
        subprocess.Popen([sys.executable, PROGRAM, name, way], stdin=subprocess.PIPE) as worker,
    ):
        worker.stdin.write(sender.init_info.to_json().encode())
        worker.stdin.close()
        try:
            sender.connect(1, timeout=LONG)
            code = worker.wait(LONG)
        finally:
            worker.kill()
        assert code == (3 if way == "exception_beside_daemon" else 0)


@pytest.mark.parametrize("scheme", PUSHING)
def test_worker_uses_parameters_outside_forwards_while_versions_are_loaded(scheme):
    sender = weightsync.Sender(end_of_life.filled("Direct", 0.5), scheme=scheme, timeout=LONG)
    command = [sys.executable, PROGRAM, "Direct", "loads_beside_uses"]
    with all_ended(sender), subprocess.Popen(command, stdin=subprocess.PIPE) as worker:
        worker.stdin.write(sender.init_info.to_json().encode())
        worker.stdin.close()
        try:
            sender.connect(1, timeout=LONG)
            for _ in range(end_of_life.LOADS - sender.version):
                sender.send().ensure_applied()
            assert worker.wait(LONG) == 0
        finally:
            worker.kill()


# A thread computes in one call for longer than any operator takes.
LONG_CALL = """
import hashlib, os, threading, time, torch
from weightsync._targets import memory

memory._LONGEST_OPERATOR = 0.0
long = threading.Thread(target=hashlib.pbkdf2_hmac, args=("sha256", b"", b"", 2**31 - 1), daemon=True)
long.start()
while memory._processor_time(long.native_id) < 5e7:
    time.sleep(0.01)
counts = []
for _ in range(memory._MOST + 2):
    memory.free([torch.empty(1024)], in_slot=False)
    counts.append(len(memory._retired))
print(max(counts) - memory._MOST, flush=True)
os._exit(0)
"""


def test_memory_of_loads_is_bounded_while_a_thread_stays_in_one_call():
    ended = subprocess.run([sys.executable, "-c", LONG_CALL], capture_output=True, text=True, timeout=LONG)
    assert ended.returncode == 0, ended.stderr
    # As many are kept as a load keeps without waiting, and no more.
    assert ended.stdout.strip() == "0"
