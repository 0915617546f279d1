"""`python -m weightsync doctor`: what it finds here, and what it says of machines that lack
something."""

import dataclasses
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from patience import patience
import numpy as np
import pytest
import weightsync
from weightsync import _probe, doctor

#: A machine on which there is nothing to say.
FINE = _probe.Facts(
    system="Linux",
    machine="x86_64",
    kernel="6.18.0",
    python="3.11.7",
    implementation="CPython",
    free_threaded=False,
    native=None,
    tried=dict.fromkeys(_probe.ATTEMPTS),
    files_open=10,
    files_soft=20_000,
    files_hard=20_000,
    file_size_limit=None,
    memory_total=32 << 30,
    memory_available=20 << 30,
    memory_limit=None,
    memory_left=None,
    huge_pages="never",
    cpu_features=("aes", "avx2", "pclmulqdq"),
    cores=2,
    core_quota=None,
    container=None,
    own_network=False,
    gpus=(),
    torch_uses_gpus=None,
    packages=dict(doctor.TESTED),
)


def fails(name):
    return {"tried": {**FINE.tried, name: "OSError: [Errno 38] Function not implemented"}}


# What differs from a fine machine; the one topic that is no longer ok, how bad it is, and words of
# its line and of its fix.
CASES = {
    "another system": (
        {"system": "Darwin", "machine": "arm64"},
        ("problem", "system", "Darwin", "on Linux"),
    ),
    "another processor": (
        {"machine": "aarch64", "cpu_features": ("asimd",)},
        ("note", "system", "tested on x86_64 only", None),
    ),
    "no native module": (
        {"native": "ImportError: no such file"},
        ("problem", "python", "does not load (ImportError: no such file)", "pip install"),
    ),
    "no GIL": ({"free_threaded": True}, ("note", "python", "not tested without a GIL", None)),
    "no memory files": (
        fails("memfd"),
        ("problem", "shared memory", "cannot be made", "memfd_create"),
    ),
    "no seals": (fails("seals"), ("problem", "shared memory", "cannot be sealed", "Linux 5.1")),
    "no private maps": (
        fails("private map"),
        ("problem", "shared memory", "copy-on-write", "Linux 5.1"),
    ),
    "no sockets": (
        fails("descriptors pass"),
        ("problem", "shared memory", "no worker can join", "AF_UNIX"),
    ),
    "no pidfd": (fails("pidfd"), ("note", "kernel", "groups of worker processes", "5.3")),
    "no peer pidfd": (fails("peer pidfd"), ("note", "kernel", "hang-up", "6.5")),
    "no populate": (fails("populate"), ("note", "kernel", "first touched", "5.14")),
    "no pagemap scan": (fails("pagemap scan"), ("note", "kernel", "take longer", "6.7")),
    "no descriptors left": (
        {"files_soft": 75, "files_hard": 75},
        ("problem", "descriptors", "0 workers", "hard limit"),
    ),
    "few descriptors": (
        {"files_soft": 474, "files_hard": 474},
        ("note", "descriptors", "200 workers", "hard limit"),
    ),
    "small pages only": (
        {"huge_pages": "never", "kernel": "5.15.0-generic"},
        ("note", "huge pages", "shmem_enabled is never", "echo advise"),
    ),
    "huge pages forbidden": (
        {"huge_pages": "deny"},
        ("note", "huge pages", "2 MiB of page tables", "echo advise"),
    ),
    "no huge pages": ({"huge_pages": None}, ("note", "huge pages", "this kernel has none", None)),
    "no word on memory": (
        {"memory_total": None, "memory_available": None},
        ("note", "memory", "does not say", None),
    ),
    "little memory": (
        {"memory_available": 512 << 20},
        ("note", "memory", "a model of 256 MiB", "end other programs"),
    ),
    "a small container": (
        {"memory_limit": 768 << 20},
        ("note", "memory", "a control group allows 768 MiB", "container's memory limit"),
    ),
    "small files only": (
        {"file_size_limit": 1 << 30},
        ("note", "memory", "a file may have 1.0 GiB only", "ulimit -f unlimited"),
    ),
    "one core": ({"cores": 1}, ("note", "processor", "1 core", "two cores")),
    "the time of one core": (
        {"cores": 8, "core_quota": 1.5},
        ("note", "processor", "the time of 1.5", "two cores"),
    ),
    "a container": (
        {"container": "Docker", "own_network": None},
        ("note", "network", "in a container (Docker)", "--network container:NAME"),
    ),
    "a network namespace": (
        {"own_network": True},
        ("note", "network", "network namespace of its own", "one network"),
    ),
    "a GPU that torch does not see": (
        {"gpus": ("GPU 0: NVIDIA H200",), "torch_uses_gpus": False},
        ("note", "GPUs", "torch does not see", "build of torch"),
    ),
    "another torchrl": (
        {"packages": {**doctor.TESTED, "torchrl": "0.15.0"}},
        ("note", "torchrl", "0.15.0: tested with 0.14.1 only", "pip install torchrl==0.14.1"),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), CASES.values(), ids=CASES)
def test_findings_name_the_lack_and_the_remedy(changes, expected):
    findings = doctor.judge(dataclasses.replace(FINE, **changes))
    level, topic, says, fix = expected
    [found] = [finding for finding in findings if finding.level != "ok"]
    assert (found.level, found.topic) == (level, topic)
    assert says in found.says
    assert (fix in found.fix) if fix else found.fix is None
    assert doctor.works(findings) == (level != "problem")
    text = doctor.as_text(findings)
    assert found.says in text
    assert ("can run" in text) == (level != "problem")


def test_every_attempt_is_judged():
    for name in _probe.ATTEMPTS:
        findings = doctor.judge(dataclasses.replace(FINE, **fails(name)))
        assert any(finding.level != "ok" for finding in findings), name


@pytest.mark.parametrize(
    ("changes", "topic", "says"),
    [
        ({}, "GPUs", "none found; nothing here needs one"),
        ({}, "descriptors", "4096 workers"),
        (
            {"files_soft": 256, "files_hard": None},
            "descriptors",
            "no limit (256 until a sender raises that): one sender can serve 4096 workers",
        ),
        ({"files_soft": 256, "files_hard": 4096}, "descriptors", "can serve 2011 workers"),
        ({}, "memory", "a model of 10.0 GiB"),
        ({"memory_limit": 64 << 30}, "memory", "a model of 10.0 GiB"),
        ({"memory_limit": 8 << 30}, "memory", "a model of 4.0 GiB"),
        ({"memory_limit": 8 << 30, "memory_left": 6 << 30}, "memory", "a model of 3.0 GiB"),
        ({"huge_pages": "within_size"}, "huge pages", "used for memory files"),
        ({"huge_pages": "never", "kernel": "6.1.0"}, "huge pages", "slots do not need"),
        ({}, "processor", "copies with AVX2, checksums with carry-less"),
        ({"cpu_features": ("avx2", "avx512f")}, "processor", "copies with AVX-512, casts with"),
        ({"cpu_features": ()}, "processor", "copies with SSE2; 2 cores"),
        ({"cores": 8, "core_quota": 16.0}, "processor", "8 cores"),
        ({"gpus": ("GPU 0: NVIDIA H200",), "torch_uses_gpus": True}, "GPUs", "NVIDIA H200"),
        ({"packages": {}}, "torch", "not installed"),
        ({"packages": {"torch": "2.14.0"}}, "torch", "2.14.0 (tested with 2.15.0)"),
        ({"packages": {"torchrl": "0.14.3"}}, "torchrl", "0.14.3 (tested with 0.14.1)"),
    ],
)
def test_findings_of_a_fine_machine_are_all_ok(changes, topic, says):
    findings = doctor.judge(dataclasses.replace(FINE, **changes))
    assert [finding for finding in findings if finding.level != "ok"] == []
    [found] = [finding for finding in findings if finding.topic == topic]
    assert says in found.says


def test_several_faults_are_several_lines():
    tried = dict.fromkeys(_probe.ATTEMPTS, "PermissionError: [Errno 1] Operation not permitted")
    findings = doctor.judge(dataclasses.replace(FINE, tried=tried))
    levels = [finding.level for finding in findings]
    assert (levels.count("problem"), levels.count("note")) == (4, 4)
    assert doctor.as_text(findings).endswith("schemes: 4 problems, 4 notes.")


def test_the_versions_are_those_the_tests_run_with():
    text = Path(__file__).parent.parent.joinpath("requirements-test.txt").read_text()
    pinned = dict(line.split("==") for line in text.splitlines() if "==" in line)
    assert {name: pinned[name] for name in doctor.TESTED} == doctor.TESTED
    assert set(doctor.TESTED) == set(_probe.PACKAGES)


def be_a_worker(info, worker, go, joined, stop):
    go.acquire()
    receiver = weightsync.Receiver(info, worker)
    receiver.connect(timeout=patience(15))
    joined.release()
    stop.acquire()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_worker_uses_the_descriptors_counted_for_it():
    workers = 3
    context = multiprocessing.get_context("spawn")
    go, joined, stop = (context.Semaphore(0) for _ in range(3))
    sender = weightsync.Sender({"weights": np.zeros(4, np.float32)}, timeout=patience(15))
    arguments = [(sender.init_info, index, go, joined, stop) for index in range(workers)]
    processes = [
        context.Process(target=be_a_worker, args=one, daemon=True) for one in arguments
    ]
    try:
        # The count before includes what each process costs its parent.
        for process in processes:
            process.start()
        sender.connect(0, timeout=patience(15))
        before = descriptors()
        for index in range(workers):
            go.release()
            sender.wait_for(index + 1, timeout=patience(15))
            assert joined.acquire(timeout=patience(15))
            # The sender's threads hold a descriptor more for a moment while a worker joins.
            expected = before + (index + 1) * doctor.FILES_PER_WORKER
            deadline = time.monotonic() + 30
            while descriptors() != expected and time.monotonic() < deadline:
                time.sleep(0.01)
            assert descriptors() == expected
    finally:
        for _ in processes:
            go.release()
            stop.release()
        for process in processes:
            process.join()
        sender.shutdown()


def test_probing_leaves_nothing_open():
    before = set(os.listdir("/proc/self/fd"))
    mapped = Path("/proc/self/maps").read_text().count("weightsync-doctor")
    _probe.probe()
    assert set(os.listdir("/proc/self/fd")) == before
    assert Path("/proc/self/maps").read_text().count("weightsync-doctor") == mapped == 0


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (
            "echo 'GPU 0: NVIDIA H200 (UUID: GPU-1a2b)'; echo 'GPU 1: Tesla T4 (UUID: GPU-3c4d)'",
            ("GPU 0: NVIDIA H200", "GPU 1: Tesla T4"),
        ),
        ("echo 'No devices were found'", ()),
        ("echo 'GPU 0: NVIDIA H200'; exit 9", ()),
        (None, ()),
    ],
)
def test_gpus_match_the_list_of_the_driver(tmp_path, monkeypatch, script, expected):
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n[ \"$1\" = -L ] || exit 1\n{script}\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _probe._gpus() == expected


@pytest.mark.parametrize(
    ("files", "memory", "left", "cores"),
    [
        # The newer interface: the least of a group's own limit and those above it holds.
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": "1073741824\n",
                "sys/fs/cgroup/a/memory.current": "805306368\n",
                "sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 268435456\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/cpu.max": "max 100000\n",
            },
            1 << 30,
            1 << 29,
            1.5,
        ),
        # The older one.
        (
            {
                "proc/self/cgroup": "4:memory:/a\n1:cpu,cpuacct:/\n0::/\n",
                "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "2147483648\n",
                "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "1073741824\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            },
            2 << 30,
            1 << 30,
            None,
        ),
        ({}, None, None, None),
    ],
)
def test_limits_of_control_groups_are_read(tmp_path, monkeypatch, files, memory, left, cores):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read = _probe._read
    monkeypatch.setattr(_probe, "_read", lambda path: read(tmp_path / str(path).lstrip("/")))
    assert (_probe._memory_limit(), _probe._memory_left()) == (memory, left)
    assert _probe._core_quota() == cores


def run(*arguments, **options):
    command = [sys.executable, "-m", "weightsync", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(30), **options)


def test_this_machine_runs_the_local_schemes():
    done = run("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "This machine can run the shared-memory schemes" in done.stdout
    report = json.loads(run("doctor", "--json").stdout)
    assert report["works"] is True
    facts = report["facts"]
    assert facts["packages"]["torch"].startswith("2.")
    # The words and the facts are of the same machine.
    topics = {finding["topic"]: finding["says"] for finding in report["findings"]}
    assert topics["python"] == f"CPython {facts['python']}"
    assert all(topic in done.stdout for topic in topics)


def limited(which, soft):
    def before_the_program():
        resource.setrlimit(which, (soft, soft))

    return before_the_program


@pytest.mark.parametrize(
    ("limit", "topic", "says"),
    [
        # Not the judgement alone: these limits are real.
        (limited(resource.RLIMIT_NOFILE, 60), "descriptors", "at most 60 in a process"),
        (limited(resource.RLIMIT_FSIZE, 1024), "shared memory", "memory files cannot be made"),
    ],
)
def test_doctor_exits_with_1_if_an_attempt_fails(limit, topic, says):
    done = run("doctor", "--json", preexec_fn=limit)
    assert done.returncode == 1, done.stdout + done.stderr
    problems = [one for one in json.loads(done.stdout)["findings"] if one["level"] == "problem"]
    assert topic in {one["topic"] for one in problems}
    assert any(says in one["says"] for one in problems)


def test_the_doctor_does_not_load_torch():
    code = "import sys; from weightsync import doctor; doctor.examine(); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(30), check=True)
    assert done.stdout.strip() == "False"


def test_unknown_command_is_refused():
    for arguments in ([], ["heal"], ["doctor", "--yaml"]):
        done = run(*arguments)
        assert done.returncode == 2, arguments
        assert "usage: weightsync" in done.stderr.lower()
    assert run("--version").stdout == f"weightsync {version()}\n"


def version():
    import importlib.metadata

    return importlib.metadata.version("weightsync")


@pytest.mark.parametrize("flags", [[], ["--json"], ["--help"]])
def test_reader_that_closes_the_pipe_early_gets_no_trace(flags):
    command = [sys.executable, "-m", "weightsync", "doctor", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        # Before the report is written.
        program.stdout.close()
        said = program.stderr.read().decode()
        program.wait(patience(60))
    assert program.returncode in (0, 1) and not said, said


@pytest.mark.parametrize("flags", [[], ["--help"]])
def test_report_that_cannot_be_written_is_an_error_in_words(flags):
    command = [sys.executable, "-m", "weightsync", "doctor", *flags]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=patience(60)
        )
    assert done.returncode == 1
    assert done.stderr.startswith("weightsync: standard output cannot be written: ")
    assert done.stderr.count("\n") == 1, done.stderr
