"""Reports whether weightsync works on this machine: ``python -m weightsync doctor``.

:func:`examine` collects the facts, :func:`judge` draws the conclusions. Judging is a pure
function, so the facts of another machine can be judged too.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from weightsync._probe import Facts, probe

Level = Literal["ok", "note", "problem"]

#: The versions the project's own tests run with.
TESTED = {
    "torch": "2.15.0",
    "tensordict": "0.14.3",
    "torchrl": "0.14.1",
    "numpy": "2.4.6",
    "ml_dtypes": "0.6.0",
}

#: Descriptors that a sender has open for one worker: of its socket and of its process.
FILES_PER_WORKER = 2

#: Descriptors left for everything else a trainer opens.
FILES_SPARED = 64

#: The most workers that one sender accepts.
MOST_WORKERS = 4096

#: A page of a slot, and the most that it takes in the page tables of each process.
_PAGE_BYTES = 4096
_ENTRY_BYTES = 8

#: A program can reach a limit below this without knowing.
_FEW_WORKERS = 256

#: From this Linux on a slot gets huge pages unless ``shmem_enabled`` is ``deny``.
_COLLAPSES = (6, 1)

#: The extra time to make 1 GiB of small pages, compared with huge ones.
_SMALL_SECONDS = 0.5

_MIB = 1 << 20
_GIB = 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    #: ``problem``: the schemes for one machine do not work here. ``note``: they do, but with a
    #: limit or a cost. ``ok``: nothing to do.
    level: Level
    topic: str
    says: str
    #: The remedy, if there is one.
    fix: str | None = None


def examine() -> list[Finding]:
    """Examines this machine, within seconds, and leaves no trace."""
    return judge(probe())


def judge(facts: Facts) -> list[Finding]:
    """The findings of some facts, topic by topic."""
    if facts.system != "Linux":
        what = f"{facts.system} {facts.kernel} on {facts.machine}"
        fix = "run trainer and workers on Linux: shared memory needs features that only Linux has"
        return [Finding("problem", "system", what, fix)]
    return [finding for topic in _TOPICS for finding in topic(facts)]


def works(findings: list[Finding]) -> bool:
    """Whether the schemes for one machine work here."""
    return all(finding.level != "problem" for finding in findings)


def as_text(findings: list[Finding]) -> str:
    """The report for people."""
    width = max(len(finding.topic) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8} {finding.topic:<{width}}  {finding.says}")
        if finding.fix:
            lines.append(f"{'':<8} {'':<{width}}  → {finding.fix}")
    problems = sum(finding.level == "problem" for finding in findings)
    notes = sum(finding.level == "note" for finding in findings)
    verdict = "can run" if works(findings) else "cannot run"
    counted = f"{_count(problems, 'problem')}, {_count(notes, 'note')}"
    return "\n".join([*lines, "", f"This machine {verdict} the shared-memory schemes: {counted}."])


def as_json(facts: Facts, findings: list[Finding]) -> str:
    """The report for programs: one object with ``works``, ``findings`` and ``facts``."""
    report = {
        "works": works(findings),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "facts": dataclasses.asdict(facts),
    }
    return json.dumps(report, indent=2)


def main(*, to_json: bool) -> tuple[str, int]:
    """The report, and 0 if the schemes for one machine work here, else 1."""
    facts = probe()
    findings = judge(facts)
    report = as_json(facts, findings) if to_json else as_text(findings)
    return report, 0 if works(findings) else 1


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


# A topic each.


def _system(facts: Facts) -> Iterator[Finding]:
    what = f"Linux {facts.kernel} on {facts.machine}"
    if facts.machine == "x86_64":
        yield Finding("ok", "system", what)
    else:
        yield Finding("note", "system", f"{what}: tested on x86_64 only")


def _python(facts: Facts) -> Iterator[Finding]:
    what = f"{facts.implementation} {facts.python}"
    if facts.free_threaded:
        what += ", free-threaded"
    if facts.native is not None:
        fix = (
            "install the package for this interpreter: `pip install .` in a clone; the wheels are "
            "for CPython 3.11 and newer, with a GIL"
        )
        why = f"{what}: the native module does not load ({facts.native})"
        yield Finding("problem", "python", why, fix)
    elif facts.free_threaded:
        yield Finding("note", "python", f"{what}: not tested without a GIL")
    else:
        yield Finding("ok", "python", what)


#: Features that the schemes need: the effect of a failure, and the remedy.
_NEEDED = {
    "memfd": (
        "memory files cannot be made",
        "let memfd_create(2) and fallocate(2) through where a sandbox's filter forbids them; make "
        "room if no memory is left; `ulimit -f unlimited` if files may not be large",
    ),
    "seals": (
        "memory files cannot be sealed, so a worker could write what it reads",
        "use Linux 5.1 or newer; a sandbox with a kernel of its own may lack F_SEAL_FUTURE_WRITE",
    ),
    "private map": (
        "sealed memory cannot be mapped copy-on-write, which tensors over it need",
        "use Linux 5.1 or newer, not a sandbox with a kernel of its own",
    ),
    "descriptors pass": (
        "descriptors do not pass over an abstract socket, so no worker can join",
        "let socket(2) with AF_UNIX through: a sandbox's filter or an AppArmor profile forbids it",
    ),
}


def _shared_memory(facts: Facts) -> Iterator[Finding]:
    failed = [name for name in _NEEDED if facts.tried.get(name, "not tried") is not None]
    for name in failed:
        what, fix = _NEEDED[name]
        yield Finding("problem", "shared memory", f"{what} ({facts.tried.get(name)})", fix)
    if not failed:
        what = (
            "memory files, seals, private maps and the passing of descriptors work; "
            "the size of /dev/shm does not matter"
        )
        yield Finding("ok", "shared memory", what)


#: Optional features: the first Linux that has each, and the effect of its absence.
_WELCOME = {
    "pidfd": (
        "5.3",
        "groups of worker processes that the Rust library starts do not; those of "
        "multiprocessing work",
    ),
    "peer pidfd": ("6.5", "a peer's death is noticed by its socket's hang-up alone"),
    "populate": ("5.14", "pages are mapped when they are first touched, not beforehand"),
    "pagemap scan": ("6.7", "a worker's writes to bound tensors take longer to find"),
}


def _kernel(facts: Facts) -> Iterator[Finding]:
    failed = [name for name in _WELCOME if facts.tried.get(name, "not tried") is not None]
    for name in failed:
        since, meaning = _WELCOME[name]
        what = f"no {name} ({facts.tried.get(name)}): {meaning}"
        fix = f"use Linux {since} or newer, or let it through the sandbox's filter"
        yield Finding("note", "kernel", what, fix)
    if not failed:
        yield Finding("ok", "kernel", f"has {', '.join(_WELCOME)}")


def _descriptors(facts: Facts) -> Iterator[Finding]:
    soft, hard = facts.files_soft, facts.files_hard
    # A sender raises its process's soft limit to the hard one when it needs to.
    workers = _workers(facts, hard)
    limit = "no limit" if hard is None else f"at most {hard} in a process"
    if soft is not None and soft != hard:
        limit += f" ({soft} until a sender raises that)"
    what = f"{limit}: one sender can serve {workers} workers"
    fix = "have the hard limit raised (`ulimit -Hn`; LimitNOFILE= of a service)"
    if workers < 1:
        yield Finding("problem", "descriptors", what, fix)
    elif workers < _FEW_WORKERS:
        yield Finding("note", "descriptors", what, fix)
    else:
        yield Finding("ok", "descriptors", what)


def _workers(facts: Facts, limit: int | None) -> int:
    """How many workers a sender can serve in this process under a limit."""
    if limit is None:
        return MOST_WORKERS
    free = limit - facts.files_open - FILES_SPARED
    return max(0, min(MOST_WORKERS, free // FILES_PER_WORKER))


def _memory(facts: Facts) -> Iterator[Finding]:
    total, limit = facts.memory_total, facts.memory_limit
    sizes = (facts.memory_available, limit, facts.memory_left)
    known = [size for size in sizes if size is not None]
    if total is None or not known:
        yield Finding("note", "memory", "the system does not say how much there is")
        return
    free = min(known)
    model = free // 2 * _PAGE_BYTES // (_PAGE_BYTES + _ENTRY_BYTES)
    what = f"{_size(total)}, of which {_size(free)} can be had"
    if limit is not None and limit < total:
        what += f" (a control group allows {_size(limit)}, memory files included)"
    # A sender has two slots of a model in addition to the model, and reports if they do not fit.
    what += f": enough for the two slots of a model of {_size(model)}, with their page tables"
    largest = facts.file_size_limit
    if largest is not None and largest < model:
        what += f", but a file may have {_size(largest)} only, and a slot is a file"
        yield Finding("note", "memory", what, "`ulimit -f unlimited` before the trainer starts")
    elif free < _GIB:
        fix = "end other programs, or raise the container's memory limit"
        yield Finding("note", "memory", what, fix)
    else:
        yield Finding("ok", "memory", what)


def _huge_pages(facts: Facts) -> Iterator[Finding]:
    costs = (
        f"without them each GiB takes some {_SMALL_SECONDS:g} s more before the first send, and "
        "each process that maps it has 2 MiB of page tables for it"
    )
    fix = "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    setting = facts.huge_pages
    if setting is None:
        what = f"this kernel has none for memory files: {costs}"
        yield Finding("note", "huge pages", what)
    elif setting in ("always", "force", "within_size", "advise"):
        yield Finding("ok", "huge pages", f"used for memory files ({setting})")
    elif setting != "deny" and _kernel_version(facts) >= _COLLAPSES:
        what = f"used for memory files (shmem_enabled is {setting}, which slots do not need)"
        yield Finding("ok", "huge pages", what)
    else:
        what = f"not used for memory files (shmem_enabled is {setting}): {costs}"
        yield Finding("note", "huge pages", what, fix)


def _kernel_version(facts: Facts) -> tuple[int, ...]:
    numbers = re.match(r"(\d+)\.(\d+)", facts.kernel)
    return tuple(map(int, numbers.groups())) if numbers else (0, 0)


def _processor(facts: Facts) -> Iterator[Finding]:
    has = frozenset(facts.cpu_features)
    wide = "avx512f" in has
    if facts.machine == "x86_64":
        copies = "AVX-512" if wide else "AVX2" if "avx2" in has else "SSE2"
        used = [f"copies with {copies}"]
        used += ["casts with AVX-512"] if wide else []
        if "pclmulqdq" in has:
            lanes = "wide " if wide and "vpclmulqdq" in has else ""
            used.append(f"checksums with {lanes}carry-less multiplication")
        if "aes" in has:
            used.append(f"digests with {'wide ' if wide and 'vaes' in has else ''}AES")
        what = ", ".join(used)
    else:
        what = "portable kernels"
    cores = float(facts.cores)
    what += f"; {_count(facts.cores, 'core')}"
    if facts.core_quota is not None and facts.core_quota < cores:
        cores = facts.core_quota
        what += f", of which a control group allows the time of {cores:g}"
    if cores < 2:
        fix = "give it two cores or more: here a trainer and its worker take turns"
        yield Finding("note", "processor", what, fix)
    else:
        yield Finding("ok", "processor", what)


def _network(facts: Facts) -> Iterator[Finding]:
    fix = (
        "run trainer and workers in one container or pod, or give them one network "
        "(`docker run --network container:NAME`), and start them as the same user"
    )
    if facts.container is not None:
        what = f"in a container ({facts.container}): a worker in another one does not find a trainer here"
        yield Finding("note", "network", what, fix)
    elif facts.own_network:
        what = "in a network namespace of its own: a worker outside of it does not find a trainer here"
        yield Finding("note", "network", what, fix)
    else:
        yield Finding("ok", "network", "processes of one user on this machine find each other")


def _gpus(facts: Facts) -> Iterator[Finding]:
    if not facts.gpus:
        yield Finding("ok", "GPUs", "none found; nothing here needs one")
        return
    what = "; ".join(facts.gpus)
    if facts.torch_uses_gpus is False:
        fix = "install a build of torch for this driver; the schemes themselves need no GPU"
        yield Finding("note", "GPUs", f"{what}: torch does not see them", fix)
    else:
        what += ": their tensors pass through the host's memory, which costs a copy on either side"
        yield Finding("ok", "GPUs", what)


def _packages(facts: Facts) -> Iterator[Finding]:
    for name, tested in TESTED.items():
        version = facts.packages.get(name)
        if version is None:
            yield Finding("ok", name, "not installed; nothing but its own adapters needs it")
        elif version == tested:
            yield Finding("ok", name, f"{version}, as tested")
        elif name in ("torchrl", "tensordict") and not version.startswith(tested[:5]):
            # The schemes are subclasses of its own.
            fix = f"pip install {name}=={tested}"
            yield Finding("note", name, f"{version}: tested with {tested} only", fix)
        else:
            yield Finding("ok", name, f"{version} (tested with {tested})")


_TOPICS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    _system,
    _python,
    _shared_memory,
    _kernel,
    _descriptors,
    _memory,
    _huge_pages,
    _processor,
    _network,
    _gpus,
    _packages,
)
