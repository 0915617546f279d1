"""Hosts for tests: real network namespaces, with a link between them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_restarts import Running

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
