"""verl's checkpoint engine on two hosts, which are real network namespaces."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# The namespaces are those of the tests of hosts.
sys.path.append(str(Path(__file__).parents[2] / "sync"))
from hosts import FAR, NEAR, hosts  # noqa: E402, F401

pytestmark = pytest.mark.timeout(400)

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


@pytest.fixture
def address(hosts, monkeypatch):  # noqa: F811
    """A cluster of both hosts."""
    near, far = hosts
    folder = tempfile.mkdtemp(prefix="r-", dir="/tmp")
    Path(folder, "ray").mkdir()
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    places = [str(HERE), str(HERE.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places), prepend=os.pathsep)
    # The setting alone allows it, and the trainer makes a token.
    monkeypatch.delenv("WEIGHTSYNC_TOKEN")
    monkeypatch.delenv("WEIGHTSYNC_INSECURE_PLAINTEXT")
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


@pytest.mark.parametrize("allowed", [True, False], ids=["plaintext", "nothing"])
def test_far_rollouts_share_a_relay(hosts, address, allowed):  # noqa: F811
    driver = [sys.executable, HERE / "verl_far_driver.py", address, *["allowed"] * allowed]
    done = subprocess.run(
        [*hosts[0].inside(), *driver], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    if allowed:
        assert said == {"differ": [[[], []]] * 2, "relays": [2]}
    else:
        assert f"listens for that host alone, and this is {FAR}" in said["refused"]
        assert "WEIGHTSYNC_TLS_DIR), or have weights travel" in said["refused"]
