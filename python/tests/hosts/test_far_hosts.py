"""Hosts 0.4 s apart, there and back: versions arrive whole, and a death is known without a timeout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
WEIGHTSYNC = Path(sys.executable).with_name("weightsync")


PROGRAM = """
import json, os, subprocess, sys

ends, setting = sys.argv[1:]

def start(*words, host=()):
    command = [*host, sys.executable, ends, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

def hear(process):
    return json.loads(process.stdout.readline())

def send():
    trainer.stdin.write("\\n")
    trainer.stdin.flush()
    return hear(trainer)["lines"]

trainer = start("train", f"distributed:listen=10.94.0.1:0,{setting}")
told = hear(trainer)
far = os.environ["FAR"].split()
workers = [start("work", told["info"], str(number), host=far) for number in range(2)]
first = [hear(worker) for worker in workers]
said = {"first": first, "both": sorted(send()), "seen": [hear(worker) for worker in workers]}
# One worker dies.
workers[0].kill()
workers[0].wait()
while True:
    lines = dict(send())
    assert hear(workers[1])["seen"]
    if lines.get(0) != "applied":
        break
said["one"] = sorted(lines.items())
trainer.kill()
trainer.wait()
said["end"] = hear(workers[1])["end"]
said["pid"] = told["pid"]
print(json.dumps(said))
"""


@pytest.mark.parametrize("encrypted", [False, True])
def test_deaths_are_known_at_once_over_long_links(
    encrypted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a token for tests, of nobody else")
    setting = "insecure-plaintext"
    if encrypted:
        setting = f"tls={tmp_path / 'pki'}"
        make = [WEIGHTSYNC, "certs", "new", "--out", tmp_path / "pki", "--hosts", "10.94.0.1"]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    # Without privileges: a user namespace may do this.
    inside = ["unshare", "-Ur", "-n"] if os.getuid() else ["unshare", "-n"]
    program = [sys.executable, "-c", PROGRAM, str(HERE / "far_ends.py"), setting]
    command = [*inside, sys.executable, str(HERE / "cable.py"), "0.2", *program]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    said: dict[str, Any] = json.loads(ended.stdout)
    assert said["both"] == [[0, "applied"], [1, "applied"]]
    assert said["one"] == [[0, "died"], [1, "applied"]]
    assert f"the sender (pid {said['pid']}) died" in said["end"]
