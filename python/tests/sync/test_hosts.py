"""A synchronizer, its trainer and its explorer on two hosts: real network namespaces."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_restarts import PARTIES, Running

NEAR, FAR = "10.91.0.1", "10.91.0.2"


class Host:
    """A host, which lives as long as the process that holds it."""

    def __init__(self, *inside):
        self.running = []
        self.holder = subprocess.Popen([*inside, "unshare", "-n", "sleep", "infinity"])
        own = os.readlink("/proc/self/ns/net")
        while self.namespace() == own or self.is_starting():
            assert self.holder.poll() is None
            time.sleep(0.001)

    def namespace(self):
        return os.readlink(f"/proc/{self.holder.pid}/ns/net")

    def is_starting(self):
        return "sleep" not in Path(f"/proc/{self.holder.pid}/cmdline").read_text().split("\0")[0]

    def inside(self):
        return ["nsenter", "-t", str(self.holder.pid), "-U", "-n", "--preserve-credentials"]

    def ip(self, *arguments):
        subprocess.run([*self.inside(), "ip", *arguments], check=True)

    def start(self, *arguments):
        self.running.append(Running(*self.inside(), sys.executable, *arguments))
        return self.running[-1]

    def end(self):
        for running in self.running:
            running.end()
        self.holder.kill()
        self.holder.wait()


@pytest.fixture
def hosts(monkeypatch):
    monkeypatch.setenv("WEIGHTSYNC_TOKEN", "a token for tests, of nobody else")
    monkeypatch.setenv("WEIGHTSYNC_INSECURE_PLAINTEXT", "1")
    near = Host("unshare", "-Ur")
    far = Host(*near.inside())
    near.ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(far.holder.pid))
    for host, name, address in ((near, "near", NEAR), (far, "far", FAR)):
        host.ip("addr", "add", f"{address}/24", "dev", name)
        host.ip("link", "set", name, "up")
        host.ip("link", "set", "lo", "up")
    yield near, far
    for host in (far, near):
        host.end()


@pytest.mark.parametrize("method", ["memory", "nccl"])
def test_parties_on_two_hosts_need_no_further_settings(hosts, method):
    near, far = hosts
    server = far.start("-m", "weightsync", "serve", "--address", f"{FAR}:0", "--method", method)
    address = server.words()[4].rstrip(";")
    assert address.startswith(FAR)
    trainer = near.start(PARTIES, "trainer", address, method, "-", "0")
    assert trainer.words()[:2] == ["joined", "1"]
    # One on the host of the synchronizer, and one on the trainer's.
    explorers = [host.start(PARTIES, "explorer", address, name) for host, name in ((far, "a"), (near, "b"))]
    for step, explorer in enumerate(explorers, 1):
        assert explorer.words() == ["joined"]
        explorer.tell(1)
        # With nccl it comes to those who wait, and else to all.
        assert trainer.ask(step)[0] == "synced"
        assert explorer.words()[0] == "synced"
    for one in (*explorers, trainer):
        one.stop()
