"""The facts about a machine, found by trying, which leaves no trace. :mod:`doctor` judges them."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import mmap
import os
import platform
import resource
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Linux's own numbers; CPython names them in later versions than 3.11, or not at all.
_SEAL_FUTURE_WRITE = 0x10
_SO_PEERPIDFD = 77
_MADV_POPULATE_READ = 22
_PAGEMAP_SCAN = 0xC060_6610

_PAGE = mmap.PAGESIZE

#: Packages that ours works with, where they are installed.
PACKAGES = ("torch", "tensordict", "torchrl", "numpy", "ml_dtypes")


@dataclass(frozen=True)
class Facts:
    """A machine, as plain values."""

    system: str
    machine: str
    kernel: str
    python: str
    implementation: str
    free_threaded: bool
    #: Why the native module does not load; ``None`` if it does.
    native: str | None
    #: For each thing that was tried, why it does not work; ``None`` if it does.
    tried: dict[str, str | None]
    #: Descriptors: open now, and the limits; ``None`` for no limit.
    files_open: int
    files_soft: int | None
    files_hard: int | None
    #: Bytes that a file may have, a memory file too; ``None`` for no limit.
    file_size_limit: int | None
    #: Bytes; ``None`` where the system does not say, or sets no limit.
    memory_total: int | None
    memory_available: int | None
    memory_limit: int | None
    #: The unused part of that limit.
    memory_left: int | None
    #: The kernel's choice for memory files, such as ``never``.
    huge_pages: str | None
    cpu_features: tuple[str, ...]
    cores: int
    #: Cores' worth of time that a control group allows; ``None`` for no limit.
    core_quota: float | None
    #: The program that runs this container, as far as it can be seen; ``None`` outside of one.
    container: str | None
    #: Whether process 1 is in another network namespace; ``None`` if that cannot be seen.
    own_network: bool | None
    gpus: tuple[str, ...]
    #: Whether torch can use the GPUs; ``None`` without torch, or without GPUs.
    torch_uses_gpus: bool | None
    #: The versions of the :data:`PACKAGES` that are installed.
    packages: dict[str, str]


def probe() -> Facts:
    """Collects the facts about this machine, within seconds."""
    packages = dict(_packages())
    gpus = _gpus()
    files_soft, files_hard = _limits(resource.RLIMIT_NOFILE)
    memory = _meminfo()
    return Facts(
        system=platform.system(),
        machine=platform.machine(),
        kernel=platform.release(),
        python=platform.python_version(),
        implementation=platform.python_implementation(),
        free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        native=_outcome(_native),
        tried={name: _outcome(attempt) for name, attempt in ATTEMPTS.items()},
        files_open=_files_open(),
        files_soft=files_soft,
        files_hard=files_hard,
        file_size_limit=_limits(resource.RLIMIT_FSIZE)[0],
        memory_total=memory.get("MemTotal"),
        memory_available=memory.get("MemAvailable"),
        memory_limit=_memory_limit(),
        memory_left=_memory_left(),
        huge_pages=_huge_pages(),
        cpu_features=_cpu_features(),
        cores=_cores(),
        core_quota=_core_quota(),
        container=_container(),
        own_network=_own_network(),
        gpus=gpus,
        torch_uses_gpus=_torch_uses_gpus() if gpus and "torch" in packages else None,
        packages=packages,
    )


# Attempts. An attempt that returns has worked.


def _native() -> None:
    import weightsync._native  # noqa: F401


@contextlib.contextmanager
def _memory_file() -> Iterator[int]:
    fd = os.memfd_create("weightsync-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, _PAGE)
        os.posix_fallocate(fd, 0, _PAGE)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def _sealed_file() -> Iterator[int]:
    """A memory file as a slot is: its owner has it mapped writable, and nobody else can."""
    with _memory_file() as fd, mmap.mmap(fd, _PAGE):
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        yield fd


def _memfd() -> None:
    with _memory_file():
        pass


def _seals() -> None:
    with _sealed_file() as fd:
        with contextlib.suppress(PermissionError), mmap.mmap(fd, _PAGE):
            raise OSError("a sealed memory file could be mapped writable all the same")
        mmap.mmap(fd, _PAGE, prot=mmap.PROT_READ).close()


def _private_map() -> None:
    flags, prot = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    with _sealed_file() as fd, mmap.mmap(fd, _PAGE, flags=flags, prot=prot) as own:
        own[0] = 1


@contextlib.contextmanager
def _connected() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over an abstract name, as a trainer's and a worker's."""
    kind = (socket.AF_UNIX, socket.SOCK_SEQPACKET)
    name = f"\0weightsync/doctor/{secrets.token_hex(16)}"
    with socket.socket(*kind) as listener, socket.socket(*kind) as worker:
        for end in (listener, worker):
            end.settimeout(5)
        listener.bind(name)
        listener.listen(1)
        worker.connect(name)
        trainer, _ = listener.accept()
        with trainer:
            trainer.settimeout(5)
            yield trainer, worker


def _descriptors_pass() -> None:
    with _connected() as (trainer, worker), _sealed_file() as fd:
        socket.send_fds(trainer, [b"1"], [fd])
        _, received, _, _ = socket.recv_fds(worker, 1, 1)
        for one in received:
            os.close(one)
        if len(received) != 1:
            raise OSError(f"{len(received)} descriptors arrived, 1 was sent")


def _peer_pidfd() -> None:
    with _connected() as (trainer, _):
        os.close(trainer.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))


def _pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _populate() -> None:
    with mmap.mmap(-1, _PAGE) as own:
        own.madvise(_MADV_POPULATE_READ)


def _pagemap_scan() -> None:
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The argument's size, then eleven zeros: no page is scanned.
        fcntl.ioctl(fd, _PAGEMAP_SCAN, struct.pack("12Q", 96, *[0] * 11))
    finally:
        os.close(fd)


#: The attempts, by their names in :attr:`Facts.tried`.
ATTEMPTS: dict[str, Callable[[], None]] = {
    "memfd": _memfd,
    "seals": _seals,
    "private map": _private_map,
    "descriptors pass": _descriptors_pass,
    "pidfd": _pidfd,
    "peer pidfd": _peer_pidfd,
    "populate": _populate,
    "pagemap scan": _pagemap_scan,
}


def _outcome(attempt: Callable[[], None]) -> str | None:
    try:
        attempt()
    # A feature that this Python was built without counts as one that the machine lacks. And a
    # native module may raise any exception as it loads, whose text helps the user.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


# Facts that are read.


def _read(path: str | Path) -> str:
    """A file's text; empty if there is no such file or it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _packages() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield name, importlib.metadata.version(name)


def _files_open() -> int:
    try:
        # The listing itself opens one more.
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return 0


def _limits(of: int) -> tuple[int | None, int | None]:
    """The soft and the hard limit."""

    def known(limit: int) -> int | None:
        return None if limit == resource.RLIM_INFINITY else limit

    soft, hard = resource.getrlimit(of)
    return known(soft), known(hard)


def _meminfo() -> dict[str, int]:
    found = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words[1:] == ["kB"] and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found


def _group_files(name: str, old_controller: str, old_name: str) -> Iterator[str]:
    """The texts of a file of this process's control group and of the groups above it."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, own = rest.partition(":")
        if not controllers:
            base, file = Path("/sys/fs/cgroup"), name
        elif old_controller in controllers.split(","):
            base, file = Path("/sys/fs/cgroup") / old_controller, old_name
        else:
            continue
        here = Path(own.lstrip("/"))
        for folder in (here, *here.parents):
            yield _read(base / folder / file).strip()


def _memory_limit() -> int | None:
    texts = _group_files("memory.max", "memory", "memory.limit_in_bytes")
    # The older interface says "none" by a number near the largest.
    limits = [int(text) for text in texts if text.isdigit() and int(text) < 1 << 60]
    return min(limits, default=None)


def _memory_left() -> int | None:
    """The memory left under the limits of this control group and those above it, with caches."""
    limits = _group_files("memory.max", "memory", "memory.limit_in_bytes")
    used = _group_files("memory.current", "memory", "memory.usage_in_bytes")
    statistics = _group_files("memory.stat", "memory", "memory.stat")
    left = []
    for limit, use, lines in zip(limits, used, statistics, strict=True):
        if limit.isdigit() and int(limit) < 1 << 60 and use.isdigit():
            pairs = dict(line.split(maxsplit=1) for line in lines.splitlines() if " " in line)
            cached = int(pairs.get("total_inactive_file", pairs.get("inactive_file", "0")))
            left.append(max(int(limit) - max(int(use) - cached, 0), 0))
    return min(left, default=None)


def _core_quota() -> float | None:
    quotas = []
    for text in _group_files("cpu.max", "cpu", "cpu.cfs_quota_us"):
        words = text.split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            quotas.append(int(words[0]) / int(words[1]))
        elif len(words) == 1 and words[0].isdigit():
            # The older interface; the period is a file of its own, and nearly always this.
            quotas.append(int(words[0]) / 100_000)
    return min(quotas, default=None)


def _huge_pages() -> str | None:
    text = _read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    _, _, rest = text.partition("[")
    return rest.partition("]")[0] or None


def _cpu_features() -> tuple[str, ...]:
    """The flags of the first processor; all have the same wherever this runs."""
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, rest = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(rest.split()))
    return ()


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _container() -> str | None:
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    for path, name in (("/.dockerenv", "Docker"), ("/run/.containerenv", "Podman")):
        if Path(path).exists():
            return name
    return _read("/run/systemd/container").strip() or None


def _own_network() -> bool | None:
    try:
        return os.readlink("/proc/self/ns/net") != os.readlink("/proc/1/ns/net")
    except OSError:
        return None


def _gpus() -> tuple[str, ...]:
    """The GPUs that NVIDIA's tool lists, without their identifiers."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        listed = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    lines = (line for line in listed.splitlines() if line.startswith("GPU "))
    return tuple(line.partition(" (UUID")[0].strip() for line in lines)


def _torch_uses_gpus() -> bool | None:
    # In a process of its own: this one is not to hold a GPU.
    ask = "import torch; print(torch.cuda.is_available())"
    try:
        answer = subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.strip() == "True"
