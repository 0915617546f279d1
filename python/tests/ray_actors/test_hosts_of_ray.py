"""A cluster of two hosts, which are real network namespaces: the far one gets a relay."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from patience import patience
import pytest
from hosts import FAR, NEAR, hosts  # noqa: F401

# Ray waits a minute for a process that does not come up before it starts another.
pytestmark = pytest.mark.timeout(400, func_only=True)

HERE = Path(__file__).parent


def ray(host, *arguments):
    """Runs the command `ray` on a host until it is ended."""
    command = "import sys; from ray.scripts.scripts import main; sys.exit(main())"
    return subprocess.Popen(
        [*host.inside(), sys.executable, "-c", command, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.fixture(params=["plaintext", "driver", "certificates", "nothing"])
def allowed(request, monkeypatch, tmp_path):
    """What lets weights travel between hosts: in all processes, or in the driver's alone."""
    if request.param != "plaintext":
        monkeypatch.delenv("WEIGHTSYNC_INSECURE_PLAINTEXT")
    if request.param == "certificates":
        make = [sys.executable, "-m", "weightsync", "certs", "new", "--hosts", NEAR]
        subprocess.run([*make, "--out", tmp_path / "pki"], check=True, stdout=subprocess.DEVNULL)
        monkeypatch.setenv("WEIGHTSYNC_TLS_DIR", str(tmp_path / "pki"))
    return request.param


@pytest.fixture
def address(alone, hosts, allowed, monkeypatch):  # noqa: F811
    """A cluster of both hosts."""
    near, far = hosts
    folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")
    Path(folder, "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
    # Ray's own token: the sender makes one.
    monkeypatch.delenv("WEIGHTSYNC_TOKEN")
    common = ["start", "--num-cpus=2", f"--object-store-memory={80 << 20}", "--block"]
    head = ["--head", f"--node-ip-address={NEAR}", "--port=6379", "--include-dashboard=false"]
    resources = {one: f'--resources={{"{one}": 9}}' for one in ("near", "far")}
    started = [
        ray(near, *common, *head, resources["near"]),
        ray(far, *common, f"--node-ip-address={FAR}", f"--address={NEAR}:6379", resources["far"]),
    ]
    yield f"{NEAR}:6379"
    for one in reversed(started):
        os.killpg(one.pid, 9)
        one.wait()
    shutil.rmtree(folder, ignore_errors=True)


def test_far_actors_share_the_relay_of_their_host(hosts, address, allowed):  # noqa: F811
    command = [*hosts[0].inside(), sys.executable, HERE / "far_driver.py", address]
    if allowed == "driver":
        command = ["env", "WEIGHTSYNC_INSECURE_PLAINTEXT=1", *command, f"{NEAR}:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(150))
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    if allowed == "nothing":
        assert "WEIGHTSYNC_TLS_DIR" in said["refused"]
        assert "insecure_plaintext=True" in said["refused"]
        return
    assert said["values"] == [[2, 2.0]] * 3
    # One relay, with both of the far workers.
    (relay,) = said["status"]["relays"]
    routes = [one["route"] for one in said["status"]["workers"]]
    assert routes.count({"agent": relay["agent"]}) == 2
