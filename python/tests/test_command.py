"""The command `weightsync`, as `pip install` brings it and as `python -m weightsync`."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import weightsync
from patience import patience

#: Where pip puts the commands of this environment's packages.
SCRIPT = [str(Path(sys.executable).with_name("weightsync"))]
MODULE = [sys.executable, "-P", "-m", "weightsync"]
BOTH = pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])

LONG = patience(30)


def run(command, *arguments, **options):
    options = {"stdout": subprocess.PIPE, **options}
    return subprocess.run(
        [*command, *map(str, arguments)], stderr=subprocess.PIPE, text=True, timeout=LONG, **options
    )


@BOTH
def test_help_lists_every_subcommand_of_the_package(command):
    done = run(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    listed = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    names = "bench diff push pull log watch serve config certs relay status scrub doctor".split()
    names.append("help")
    assert listed[: len(names)] == names
    # What the doctor takes it says itself.
    assert "--json" in run(command, "doctor", "--help").stdout


@BOTH
def test_log_is_written_while_the_command_runs(command, tmp_path):
    pki = str(tmp_path / "pki")
    made = run(command, "certs", "new", "--out", pki, "--hosts", "127.0.0.1", "--days", "6")
    assert made.returncode == 0, made.stderr
    serve = [*command, "serve", "--address", "127.0.0.1:0", "--tls", pki]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            assert "expires in 143 hours" in running.stderr.readline()
        finally:
            running.kill()


@BOTH
def test_wrong_level_of_the_log_is_named(command, monkeypatch):
    monkeypatch.setenv("WEIGHTSYNC_LOG", "loud")
    done = run(command, "status", "127.0.0.1:1")
    expected = "expected off, error, warn, info, debug or trace, got \"loud\""
    assert (done.returncode, done.stderr) == (1, f"weightsync: WEIGHTSYNC_LOG: {expected}\n")


def test_demo_is_refused_as_an_unknown_command():
    done = run(SCRIPT, "demo")
    assert done.returncode == 2
    assert "unrecognized subcommand 'demo'" in done.stderr


def safetensors(path, values):
    """A file with one tensor of floats."""
    data = np.asarray(values, dtype="<f4").tobytes()
    spec = {"dtype": "F32", "shape": [len(values)], "data_offsets": [0, len(data)]}
    header = json.dumps({"bias": spec}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@BOTH
def test_diff_says_what_changed_by_its_exit_status(command, tmp_path):
    older = safetensors(tmp_path / "ä.safetensors", [1.0, 2.0])
    newer = safetensors(tmp_path / "b.safetensors", [1.0, 3.0])
    same = run(command, "diff", older, older)
    assert (same.returncode, same.stderr) == (0, "")
    differs = run(command, "diff", "--json", older, newer)
    assert (differs.returncode, differs.stderr) == (1, "")
    rows = [json.loads(line) for line in differs.stdout.splitlines()]
    assert (rows[0]["tensor"], rows[0]["state"]) == ("bias", "changed")
    absent = run(command, "diff", older, tmp_path / "absent")
    assert (absent.returncode, absent.stdout) == (2, "")
    assert absent.stderr.startswith("weightsync: ")


LOST = ["log s", "push a --to s", "push /nowhere --to s", "pull s --out o", "watch s --exec true"]
LOST += ["scrub --store s", "diff a b", "certs new --out pki --hosts h", "status --info a"]
LOST += ["relay --info a", "serve --store s", "serve --config a", "config check a"]


def run_in_a_removed_directory(path, *arguments):
    gone = path / "gone"
    gone.mkdir()
    return run(["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', gone], *arguments)


@pytest.mark.parametrize("arguments", LOST)
def test_command_in_a_removed_directory_says_so(arguments, tmp_path):
    done = run_in_a_removed_directory(tmp_path, *MODULE, *arguments.split())
    assert done.returncode in (1, 2), done.stderr
    said = done.stderr.splitlines()
    assert all(line.startswith("weightsync: ") for line in said), said
    assert done.stderr.count("working directory was removed: give an absolute path") == 1, said


@BOTH
def test_doctor_works_in_a_removed_directory(command, tmp_path):
    done = run_in_a_removed_directory(tmp_path, *command, "doctor", "--json")
    assert (json.loads(done.stdout)["works"], done.stderr) == (True, "")


@BOTH
def test_argument_that_is_not_utf_8_is_named(command):
    for arguments, named in [
        (["log", b"a\xff"], rb'"a\xFF"'),
        (["status", b"\xff:7070"], rb'"\xFF:7070"'),
        (["pull", "s", "--out", "o", "--name", b"\xfe"], rb'"\xFE"'),
    ]:
        done = subprocess.run([*command, *arguments], capture_output=True, timeout=LONG)
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"expected arguments in UTF-8, got " + named in done.stderr, done.stderr


def test_diff_is_quiet_where_its_pipe_is_closed(tmp_path):
    file = safetensors(tmp_path / "a.safetensors", [1.0])
    done = run(SCRIPT, "diff", file, file, stdout=closed_pipe())
    assert (done.returncode, done.stderr) == (0, "")


def closed_pipe():
    """A pipe whose reader is gone."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.fixture
def trainer(tmp_path):
    """A sender to other hosts, and the file with its init info."""
    weights = {"bias": np.zeros(1024, dtype=np.float32)}
    with weightsync.Sender(weights, scheme="distributed:share=relay") as sender:
        info = tmp_path / "info.json"
        info.write_text(sender.init_info.to_json())
        sender.connect(0, timeout=LONG)
        yield sender, info


@pytest.mark.parametrize(
    ("command", "number"), [(SCRIPT, signal.SIGINT), (MODULE, signal.SIGINT), (SCRIPT, signal.SIGTERM)]
)
def test_relay_serves_until_a_signal_ends_it(command, number, trainer):
    sender, info = trainer
    pipe = subprocess.PIPE
    relay = [*command, "relay", "--info", info]
    # A shell starts what runs in the background with SIGINT ignored, and a relay leaves that so.
    heard = lambda: signal.signal(number, signal.SIG_DFL)  # noqa: E731
    with subprocess.Popen(relay, stdout=pipe, stderr=pipe, text=True, preexec_fn=heard) as running:
        try:
            assert "joined" in running.stdout.readline()
            with weightsync.Receiver(sender.init_info, 3) as receiver:
                receiver.connect(timeout=LONG)
                workers, seen = until_seen(command, info)
                assert (workers, seen["pid"]) == ([3], running.pid)
                tree = run(command, "status", "--info", info)
                assert (tree.returncode, tree.stderr) == (0, "")
                assert "└─ worker 3 (pid " in tree.stdout
            running.send_signal(number)
            assert running.wait(timeout=LONG) == 128 + number
            assert running.stderr.read() == ""
        finally:
            running.kill()


def until_seen(command, info):
    """The workers of the one relay that the status shows, once it has some, and the relay."""
    deadline = time.monotonic() + LONG
    while True:
        done = run(command, "status", "--json", "--info", info)
        assert done.returncode == 0, done.stderr
        status = json.loads(done.stdout)
        (seen,) = status["relays"]
        by = {"agent": seen["agent"]}
        if below := [one["worker"] for one in status["workers"] if one["route"] == by]:
            return below, seen
        assert time.monotonic() < deadline, done.stdout


def test_status_is_quiet_where_its_pipe_is_closed(trainer):
    _, info = trainer
    done = run(SCRIPT, "status", "--info", info, stdout=closed_pipe())
    assert (done.returncode, done.stderr) == (0, "")


@BOTH
def test_ctrl_c_ends_a_wait_at_once(command, tmp_path):
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("the token of this test alone")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"127.0.0.1:{silent.getsockname()[1]}"
        status = [*command, "status", place, "--token-file", token, "--timeout", "600"]
        # A shell starts background jobs with this signal ignored, and children inherit that.
        heard = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
        with subprocess.Popen(
            status, stderr=subprocess.PIPE, text=True, preexec_fn=heard
        ) as running:
            try:
                # It waits for an answer now.
                link, _ = silent.accept()
                with link:
                    running.send_signal(signal.SIGINT)
                    # As any command that leaves signals as they are.
                    assert running.wait(timeout=LONG) == -signal.SIGINT
                assert running.stderr.read() == ""
            finally:
                running.kill()


@BOTH
def test_bench_measures_with_workers_of_its_own(command, tmp_path):
    # Found by no worker, although it lies where they start.
    (tmp_path / "weightsync.py").write_text("raise SystemExit('the wrong one')")
    case = ["--size=64KiB", "--tensors=4", "--readers=2", "--rounds=5", "--json"]
    done = run(command, "bench", "multi-process", *case, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert (figures["readers"], figures["rounds"]) == (2, 5)
    assert figures["applied_us"] > 0
