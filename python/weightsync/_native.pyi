"""The native half of the package. Timeouts are in seconds; None waits until the other end is gone."""

import sys
from collections import abc
from collections.abc import Callable, Generator, Iterable, Sequence
from os import PathLike
from typing import Any, Literal, Protocol, Required, TypedDict, final

__all__ = [
    "Background",
    "BuiltinEnvs",
    "Cascade",
    "Copies",
    "DryRun",
    "EngineUpdate",
    "InitInfo",
    "Layout",
    "MappedTarget",
    "Mapping",
    "PendingSend",
    "Report",
    "Permit",
    "ReplayBuffer",
    "Saver",
    "Saving",
    "Session",
    "SetSnapshot",
    "Snapshot",
    "Source",
    "Store",
    "StoredModel",
    "StoredVersion",
    "SyncExplorer",
    "SyncTrainer",
    "Synchronizer",
    "TensorOutcome",
    "Tensors",
    "TrainerLink",
    "TrainerPort",
    "Trajectories",
    "View",
    "WorkerPlace",
    "WorkerReport",
    "WorkerStatus",
    "Writer",
    "__version__",
    "checksum",
    "command",
    "runs",
    "scheme_settings",
]

__version__: str

def checksum(address: int, size: int) -> int:
    """A checksum of so many bytes at an address of this process: 64 bits, as a signed number."""

def command(arguments: Sequence[str], itself: Sequence[str]) -> int:
    """Runs the ``weightsync`` command with the arguments after its name, and returns its exit
    status. ``itself`` starts the command as a process of its own: a program and its first
    arguments. Python's handlers of signals do not run meanwhile.
    """

def scheme_settings(scheme: str) -> list[tuple[str, str, str, str | None]]:
    """The settings of a scheme: their names, the values they take, what they do, and their
    defaults.
    """

_Level = Literal["sent", "staged", "applied"]
_State = Literal["following", "searching", "closed", "died", "failed"]
_Outcome = Literal[
    "applied",
    "staged",
    "refused",
    "died",
    "left",
    "failed",
    "lost",
    "late",
    "held",
    "full",
    "asks",
    "absent",
]

# A name, a dtype as safetensors spells it, a shape.
_Spec = tuple[str, str, Sequence[int]]
# A count, or numbers.
_Workers = int | Iterable[int]
# A model's name, unless there is one only, and its weights.
_Given = Sequence[tuple[str | None, Source]]
# Model, workers, level, timeout, whether the update is partial, version, whether to wait
# for workers that were late before.
_Send = tuple[
    str | None, Sequence[int] | None, str | None, float | None, bool, int | None, bool
]

class _Setup(TypedDict):
    scheme: str
    run_dir: str | PathLike[str] | None
    cast: str | None
    slots: tuple[int, int] | None
    history: int
    checksums: bool
    digest: bool
    copy_threads: int
    async_send_limit: int | None
    deadline: float | None

class _Target(Protocol):
    def layout(self) -> Layout: ...
    def shape(self, layout: Layout, /) -> bool: ...
    def load(self, snapshot: Snapshot, /) -> None: ...

_Targets = Sequence[tuple[str, _Target | MappedTarget]]

@final
class InitInfo:
    @staticmethod
    def from_json(text: str) -> InitInfo: ...
    def to_json(self) -> str: ...
    @property
    def models(self) -> list[str]: ...
    @property
    def scheme(self) -> str: ...
    @property
    def store(self) -> str | None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __reduce__(self) -> tuple[Any, tuple[str]]: ...

@final
class Layout:
    def __new__(cls, tensors: Sequence[_Spec]) -> Layout: ...
    def tensors(self) -> list[tuple[str, str, list[int]]]: ...
    @property
    def payload_bytes(self) -> int: ...
    @property
    def id(self) -> str: ...
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class Source:
    def __new__(
        cls,
        tensors: Sequence[_Spec],
        buffers: Sequence[str],
        format: str,
        extra: Sequence[tuple[str, Any]],
        mapping: Mapping | None = None,
    ) -> Source: ...
    @staticmethod
    def streamed(tensors: Sequence[_Spec], fetch: Callable[[int], int]) -> Source: ...
    def place(
        self,
        addresses: Sequence[int],
        strides: abc.Mapping[int, Sequence[int]] | None = None,
        extra: Sequence[tuple[str, Any]] | None = None,
    ) -> None: ...
    def place_tensors(self, tensors: Tensors) -> bool: ...
    @property
    def layout(self) -> Layout: ...

@final
class Mapping:
    def __new__(cls) -> Mapping: ...
    @staticmethod
    def from_json(text: str) -> Mapping: ...
    def to_json(self) -> str: ...
    def rename(self, old: str, new: str) -> Mapping: ...
    def cast(self, tensors: str, dtype: str) -> Mapping: ...
    def transpose(self, tensors: str, order: Sequence[int]) -> Mapping: ...
    def fuse(self, parts: Sequence[str], into: str, dim: int) -> Mapping: ...
    def split(self, tensor: str, into: Sequence[tuple[str, int]], dim: int) -> Mapping: ...
    def drop(self, tensors: str) -> Mapping: ...
    def quantise(
        self,
        tensors: str,
        to: str,
        block: tuple[int, int] | None = None,
        scale: str | None = None,
    ) -> Mapping: ...
    @property
    def rules(self) -> list[str]: ...
    @property
    def quantises(self) -> bool: ...
    def dry_run(self, source: Layout, target: Layout) -> DryRun: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __reduce__(self) -> tuple[Any, tuple[str]]: ...

@final
class DryRun:
    """The effect that a mapping would have. The lists are complete."""

    @property
    def tensors(self) -> list[TensorOutcome]:
        """What happens to each tensor of the source, in its order."""
    @property
    def unmatched(self) -> list[str]:
        """Names of mapped tensors that have no place in the target."""
    @property
    def missing(self) -> list[str]:
        """Names of the target that would get no tensor."""
    @property
    def shapes(self) -> list[tuple[str, list[int], list[int]]]:
        """``(name, expected, got)`` of tensors whose shape would differ."""
    @property
    def dtypes(self) -> list[tuple[str, str, str]]:
        """``(name, expected, got)`` of tensors whose dtype would differ."""
    @property
    def problems(self) -> list[str]:
        """Rules that do not fit the tensors they match, in words."""
    @property
    def unused(self) -> list[tuple[int, str]]:
        """Rules that match no tensor: their numbers, from 1, and words."""
    @property
    def is_complete(self) -> bool:
        """Whether each mapped tensor has a place in the target, and each place a tensor."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class TensorOutcome:
    """What happens to one tensor of the source."""

    @property
    def name(self) -> str: ...
    @property
    def becomes(self) -> list[str]: ...
    @property
    def rules(self) -> list[int]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...

@final
class MappedTarget:
    def __new__(cls, mapping: Mapping, id: str, target: _Target) -> MappedTarget: ...

@final
class Tensors:
    @staticmethod
    def of(
        class_: type,
        places: Sequence[tuple[dict[str, Any], str]],
        others: Sequence[tuple[dict[str, Any], str]],
        dicts: Sequence[dict[str, Any]],
    ) -> Tensors | None: ...
    def hold(self) -> bool: ...
    def __len__(self) -> int: ...

@final
class Copies:
    def __new__(cls, tensors: Tensors, pairs: Sequence[tuple[int, int]]) -> Copies: ...

@final
class View:
    # Before that it is a buffer too, but Python has no name for it.
    if sys.version_info >= (3, 12):
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Snapshot:
    @property
    def model(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def run(self) -> tuple[int, str]: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def whole_layout(self) -> Layout: ...
    def mapped(self, mapping: Mapping) -> Snapshot: ...
    @property
    def format(self) -> str: ...
    @property
    def ties(self) -> list[tuple[str, str]]: ...
    @property
    def buffers(self) -> list[str]: ...
    def places(self) -> list[tuple[str, str, list[int], int, int]]: ...
    def view(self, quiet: bool = False) -> View: ...
    def load_into(self, target: _Target) -> None: ...
    def copy_to(self, places: Sequence[tuple[int, int, int]]) -> None: ...
    def copy_into(self, copies: Copies) -> bool: ...
    def extra_state(self, name: str) -> Any: ...
    @property
    def extra_states(self) -> list[str]: ...
    def digest(self) -> str: ...
    @property
    def published_digest(self) -> str | None: ...
    def verify_checksums(self) -> bool: ...
    def save_safetensors(self, path: str | PathLike[str]) -> str: ...
    def to_owned_copy(self) -> Snapshot: ...
    @property
    def holds_slot(self) -> bool: ...

@final
class SetSnapshot:
    @property
    def sequence(self) -> int: ...
    def members(self) -> list[tuple[Snapshot, bool]]: ...
    def load_into(self, targets: _Targets) -> None: ...

class _UniformSampler(TypedDict):
    sampler: Literal["uniform", "without_replacement"]

class _PrioritisedSampler(TypedDict, total=False):
    sampler: Required[Literal["prioritised"]]
    alpha: float
    beta: float
    eps: float

class _SliceSampler(TypedDict, total=False):
    sampler: Required[Literal["slices"]]
    column: Required[str]
    num_slices: int
    slice_len: int
    strict_len: bool

class _Part(TypedDict):
    is_greedy: bool
    longest: int
    # Of each column the address of the first frame, and the bytes from one environment to the next.
    columns: Sequence[tuple[int, int] | None]
    observations: int

# The lengths of the episodes under way, their trajectories, and the next trajectory's number.
_Episodes = tuple[Sequence[int], Sequence[int], int]

@final
class BuiltinEnvs:
    """Environments of a built-in task. Arrays are given by address; the caller holds them until the
    call returns.
    """

    def __new__(cls, task: str, num_envs: int, seed: int) -> BuiltinEnvs: ...
    @property
    def sizes(self) -> tuple[int, int, list[float] | None]:
        """The quantities of an observation, the actions, and the range of each quantity of a
        continuous action.
        """
    def reset(self, envs: Sequence[tuple[int, int | None]], observations: int) -> None:
        """Begins new episodes in these environments, with seeds or without."""
    def step(
        self, which: Sequence[bool], actions: int, room: tuple[int, int, int, int]
    ) -> None:
        """Takes a step in these environments. Room is for observations, rewards (64 bits), and
        whether an environment is terminated and truncated.
        """
    def run(
        self,
        part: _Part,
        tensors: Sequence[tuple[str, int, int]],
        steps: tuple[int, int],
        version: int,
        episodes: _Episodes,
    ) -> tuple[list[int], list[int], int]:
        """Has a policy take steps: where the first one goes in time, and how many. Its tensors are
        a name, an address and a count each. Returns the episodes under way afterwards.
        """
    def __len__(self) -> int: ...

@final
class TrainerPort:
    """The port at which a collector's workers join. The token is the environment's."""

    #: ``host:port``, by which workers reach it.
    address: str
    #: What workers need to join, in hexadecimal digits.
    secret: str
    #: Whether the secret is that of a token, which workers can have too.
    has_token: bool

    def __new__(
        cls,
        listen: str | None,
        advertise: str | None,
        tls: str | PathLike[str] | None,
        insecure_plaintext_code: bool,
        workers: int,
    ) -> TrainerPort: ...
    def open(self, worker: int, ticket: int | None, settings: bytes) -> WorkerPlace:
        """Opens the place of a worker, in place of the one before. A worker with the ticket may
        join; without a ticket, one that names this number or none.
        """
    def close(self) -> None:
        """Closes the port."""

@final
class WorkerPlace:
    """A worker's place, for one life of it."""

    def fileno(self) -> int:
        """Readable while there is something to hear."""
    def order(self, json: str) -> None:
        """Sends an order, once the worker is there. If too many wait the link ends."""
    def expect(self, part: int, fd: int, rows: Sequence[tuple[int, int, int, int]]) -> None:
        """Says, before the order, where a part's bytes belong in a file: for each column the offset
        of the first run of bytes, the bytes of each, how many there are, and the bytes from one
        to the next.
        """
    def hear(
        self,
    ) -> tuple[Literal["joined", "said", "part", "gone"], str, int, float] | None:
        """What the worker has said or done, the part's number, and when, on the monotonic clock."""
    def leave(self) -> None:
        """Asks the worker to end, after the orders before."""
    def wait(self, timeout: float) -> bool:
        """Waits until no worker is there; false at the timeout."""
    def cut(self) -> None:
        """Ends the link at once; nothing that the worker sent is written any more."""

@final
class TrainerLink:
    """A worker's end of the link to its trainer. Its process is killed if the trainer goes."""

    #: The worker's number.
    worker: int

    def __new__(
        cls,
        address: str,
        secret: str | None,
        tls: str | PathLike[str] | None,
        insecure_plaintext_code: bool,
        place: tuple[int | None, int | None],
        patience: float,
    ) -> TrainerLink:
        """Joins. Without a secret it takes that of the environment's token. The place is the
        worker's number, and which launch it comes from.
        """
    def settings(self) -> bytes:
        """What the worker is started with; once."""
    def next(self) -> str | None:
        """The next order; waits for it. None once the trainer has ended."""
    def say(self, json: str) -> None:
        """Sends an answer."""
    def send_part(self, part: int, columns: Sequence[tuple[int, int]]) -> None:
        """Sends a part: the addresses of its columns, and the bytes of each."""
    def leave(self) -> None:
        """Ends the link in order, once the trainer has read everything; within 5 s."""

@final
class ReplayBuffer:
    """Frames kept for learning from them again. Each column's elements are contiguous, in the order
    of the columns; the caller holds the arrays until the call returns.
    """

    def __new__(
        cls,
        columns: Sequence[_Spec],
        capacity: int,
        ndim: int = 1,
        sampler: _UniformSampler | _PrioritisedSampler | _SliceSampler | None = None,
        seed: int = 0,
        directory: str | PathLike[str] | None = None,
    ) -> ReplayBuffer: ...
    @staticmethod
    def describe(
        directory: str | PathLike[str],
    ) -> tuple[int, list[tuple[str, str, list[int]]]] | None:
        """The capacity and the columns of the buffer in a directory."""
    def extend(self, shape: Sequence[int], addresses: Sequence[int]) -> tuple[int, int]:
        """Writes a batch of ``[T]``, ``[P, T]`` or ``[B, P, T]`` frames. The ids of its frames go
        from the first number on, up to and without the second.
        """
    def sample(
        self,
        frames: int,
        addresses: Sequence[int],
        ids: int,
        weights: int | None = None,
        mask: int | None = None,
    ) -> tuple[bool, bool]:
        """Draws so many frames into arrays with room for them, and their ids (64 bits), importance
        weights (``float32``) and mask (``bool``). Says whether the sampler has weights, and a mask.
        """
    def read(self, ids: Sequence[int], addresses: Sequence[int]) -> None: ...
    def update_priorities(self, ids: Sequence[int], priorities: Sequence[float]) -> None: ...
    def set_beta(self, beta: float) -> None: ...
    def flush(self) -> None:
        """Waits until all frames are on the disk."""
    @property
    def ids(self) -> tuple[int, int]: ...
    @property
    def capacity(self) -> int: ...
    def columns(self) -> list[tuple[str, str, list[int]]]: ...
    def __len__(self) -> int: ...

@final
class Trajectories:
    """Gives the trajectories of a collector's workers one growing count, in the order in which they
    come: batch, worker, then time and environment of the first frame.
    """

    def __new__(cls, workers: int) -> Trajectories: ...
    def arrived(self, worker: int) -> int:
        """Takes note that a part has come from a worker, and returns its place in that worker's row
        of parts.
        """
    def replaced(self, worker: int) -> None:
        """Takes note that another has taken a worker's place: its parts do not follow those that
        have come.
        """
    def rename(self, worker: int, part: int, ids: Any) -> None:
        """Renames a part's trajectories in place: an ``int64`` array ``[P, T]`` of any strides. The
        parts of a worker come in the order of their places; where one of them is left out, the
        trajectories after it get other numbers.
        """
    @property
    def next_id(self) -> int: ...
    def go_on_from(self, next: int) -> None:
        """Has all trajectories get numbers from this one on, also those that are under way."""

def runs(ids: Any) -> tuple[list[int], list[int]]:
    """Where each trajectory begins, and how long it is: neighbours with one number in an ``int64``
    array whose last dimension is time, in the order of its elements.
    """

@final
class Report:
    @property
    def versions(self) -> dict[str, int]: ...
    @property
    def version(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def partial(self) -> list[str] | None: ...
    @property
    def changed(self) -> float | None: ...
    @property
    def delta_bytes(self) -> int | None: ...
    @property
    def copied(self) -> float: ...
    @property
    def took(self) -> float: ...
    @property
    def level(self) -> _Level: ...
    @property
    def workers(self) -> list[WorkerReport]: ...
    @property
    def all_applied(self) -> bool: ...
    @property
    def all_reached(self) -> bool: ...
    @property
    def failed(self) -> list[WorkerReport]: ...
    def worker(self, worker: int) -> WorkerReport | None: ...
    def ensure_applied(self) -> Report: ...
    def to_dict(self) -> dict[str, Any]: ...

@final
class WorkerReport:
    @property
    def worker(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def outcome(self) -> _Outcome: ...
    @property
    def reason(self) -> str | None: ...
    @property
    def versions(self) -> list[int]: ...
    @property
    def current(self) -> bool: ...
    @property
    def after(self) -> float: ...
    @property
    def late(self) -> float | None: ...
    def to_dict(self) -> dict[str, Any]: ...

@final
class WorkerStatus:
    @property
    def worker(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def held(self) -> bool: ...
    @property
    def versions(self) -> list[int]: ...
    @property
    def version(self) -> int: ...

@final
class PendingSend:
    def __await__(self) -> Generator[Any, None, Report]: ...
    def wait(self, timeout: float | None = None) -> Report: ...
    @property
    def is_settled(self) -> bool: ...
    @property
    def versions(self) -> dict[str, int]: ...
    @property
    def version(self) -> int: ...

@final
class Session:
    def summary(self) -> str: ...
    def __new__(cls, scheme: str) -> Session: ...
    def prepare_sender(
        self, models: Sequence[tuple[str, Source]], setup: _Setup
    ) -> InitInfo: ...
    def connect_sender(
        self,
        weights: _Given,
        workers: _Workers,
        timeout: float | None,
        watch: Callable[[], None] | None = None,
        version: int | None = None,
    ) -> None: ...
    def wait_for(self, workers: _Workers, timeout: float | None) -> None: ...
    def send(self, weights: _Given, options: _Send) -> Report: ...
    def send_async(self, weights: _Given, options: _Send) -> PendingSend: ...
    def send_each(self, weights: Sequence[tuple[int, Source]], options: _Send) -> Report: ...
    def send_again(self, snapshot: Snapshot, options: _Send) -> Report: ...
    def workers(self) -> list[WorkerStatus]: ...
    def status(self) -> str: ...
    def hold(self, workers: Sequence[int], hold: bool) -> None: ...
    def forget(self, workers: Sequence[int]) -> None: ...
    def sent_versions(self) -> dict[str, int]: ...
    def sent(self, model: str, version: int | None = None) -> Snapshot: ...
    def digest(self, model: str) -> str: ...
    @staticmethod
    def prepare_receiver(
        info: InitInfo, worker: int, models: Sequence[str] | None, device: str
    ) -> Session: ...
    def connect_receiver(self, targets: _Targets | None, timeout: float | None) -> None: ...
    def join_receiver(self, timeout: float | None) -> SetSnapshot | None: ...
    def load_joined(self, targets: _Targets) -> None: ...
    def receive(self, timeout: float | None = None) -> SetSnapshot | None: ...
    def receive_into(
        self, targets: _Targets, timeout: float | None = None
    ) -> dict[str, int] | None: ...
    def latest(self) -> SetSnapshot | None: ...
    def pull(
        self,
        model: str,
        version: int | None = None,
        at_least: int | None = None,
        timeout: float | None = None,
    ) -> SetSnapshot | None: ...
    def pull_into(
        self,
        targets: _Targets,
        model: str,
        version: int | None = None,
        at_least: int | None = None,
        timeout: float | None = None,
    ) -> dict[str, int] | None: ...
    def versions(self) -> dict[str, int]: ...
    def run(self) -> tuple[int, str]: ...
    def models(self) -> list[tuple[str, Layout]]: ...
    def travelled(self) -> int | None: ...
    def start_background(self, targets: _Targets, declared: bool) -> Background: ...
    @property
    def scheme(self) -> str: ...
    @property
    def init_info(self) -> InitInfo | None: ...
    def shutdown(self, reason: str | None = None) -> None: ...

@final
class Background:
    def acquire_permit(self) -> Permit: ...
    def hand_over(self, function: Callable[[], None], timeout: float | None = None) -> None: ...
    def safe_point(self) -> dict[str, int] | None: ...
    def state(self) -> tuple[_State, str, str | None]: ...
    def versions(self) -> dict[str, int]: ...
    def staged(self) -> dict[str, int]: ...
    def run(self) -> tuple[int, str]: ...
    def wait(
        self,
        versions: abc.Mapping[str, int],
        timeout: float | None = None,
        run: tuple[int, str] | None = None,
    ) -> bool: ...
    def shutdown(self, reason: str | None = None) -> None: ...

@final
class Permit:
    def release(self) -> None: ...

@final
class Cascade:
    @staticmethod
    def join(info: InitInfo, worker: int, setup: _Setup, timeout: float | None) -> Cascade: ...
    @property
    def init_info(self) -> InitInfo: ...
    def connect(self, workers: _Workers, timeout: float | None) -> None: ...
    def forward(self, timeout: float | None = None) -> Report | None: ...
    def start_background(self) -> None: ...
    @property
    def last(self) -> Report | None: ...
    def forget(self, workers: Sequence[int]) -> None: ...
    def shutdown(self, reason: str | None = None) -> None: ...

_Call = Literal["pause", "start", "update", "finish", "resume", "restore"]
_Weights = Literal["old", "new", "unknown"]

@final
class EngineUpdate:
    def __new__(cls, updates: int = 1) -> EngineUpdate: ...
    def begin(self) -> _Call | None: ...
    def done(self) -> _Call | None: ...
    def failed(self, reason: str, weights: _Weights) -> _Call | None: ...
    def died(self, reason: str) -> _Call | None: ...
    @property
    def state(self) -> str: ...
    @property
    def outcome(self) -> Literal["updated", "kept old", "not resumed", "held", "dead"] | None: ...
    @property
    def weights(self) -> _Weights: ...
    @property
    def reason(self) -> str | None: ...

# A model, exactly a version, at least a version, a name.
_Asked = tuple[str | None, int | None, int | None, str | None]
# Its number in the store, bytes written, bytes of the weights, versions, the share that changed.
_Saved = tuple[int, int, int, dict[str, int], float | None]

@final
class Store:
    def __new__(cls, address: str) -> Store: ...
    def versions(self) -> tuple[list[StoredVersion], list[tuple[str, str]]]: ...
    def load_one(
        self, asked: _Asked, model: str | None, timeout: float | None
    ) -> Snapshot | None: ...
    def load_with_files(
        self, asked: _Asked, model: str | None
    ) -> tuple[Snapshot, list[tuple[str, bytes]]]: ...
    def load(self, asked: _Asked, timeout: float | None) -> SetSnapshot | None: ...
    def files(self, asked: _Asked, model: str | None) -> list[tuple[str, bytes]]: ...
    def pull(self, asked: _Asked, model: str | None, out: str | PathLike[str]) -> int: ...
    def load_unless_within(self, model: str | None, held: int, lag: int) -> Snapshot | None: ...
    def names(self) -> dict[str, dict[str, int]]: ...
    def set_name(self, name: str, model: str | None, version: int) -> None: ...
    def remove_name(self, name: str) -> None: ...
    def address(self) -> str: ...
    @staticmethod
    def check(options: abc.Mapping[str, Any]) -> None: ...
    def writer(self, options: abc.Mapping[str, Any]) -> Writer: ...

@final
class Writer:
    def read_base(self) -> None: ...
    def version(self, model: str) -> int: ...
    def save(self, models: Sequence[tuple[str, Source, int | None]]) -> _Saved: ...
    def save_snapshot(self, name: str, snapshot: Snapshot, number: int | None) -> _Saved: ...
    def saver(self) -> Saver: ...
    def close(self) -> None: ...

@final
class Saver:
    def save(self, models: Sequence[Snapshot]) -> Saving: ...
    def close(self, waits: bool) -> None: ...

@final
class Saving:
    def wait(self, timeout: float | None) -> tuple[str, _Saved | None, str | None] | None: ...

@final
class StoredVersion:
    """A version of a store."""

    @property
    def sequence(self) -> int:
        """Its number among all versions of the store."""
    @property
    def run(self) -> tuple[int, str]:
        """The run that wrote it: its epoch and id."""
    @property
    def writer(self) -> str:
        """The process that wrote it."""
    @property
    def saved_at(self) -> float:
        """When it was written, in seconds since 1970 by the writer's clock."""
    @property
    def names(self) -> list[str]:
        """The names that it was given."""
    @property
    def models(self) -> list[StoredModel]:
        """Its models."""
    @property
    def version(self) -> int:
        """The version of the only model; a ModelError if there are several."""

@final
class StoredModel:
    """One model of a version of a store."""

    @property
    def model(self) -> str:
        """Its name."""
    @property
    def version(self) -> int:
        """Its version."""
    @property
    def digest(self) -> str:
        """The digest of its bytes."""
    @property
    def changed(self) -> bool:
        """Whether its version is another than before."""
    @property
    def changes(self) -> float | None:
        """The share of its elements that changed, where that is known."""
    @property
    def stored_bytes(self) -> int:
        """The bytes that were written for it."""
    @property
    def deltas(self) -> int:
        """How many deltas are folded onto a full version; 0 for a full version."""
    @property
    def directory(self) -> str:
        """The directory of its full version: a checkpoint that other programs load."""

# A style's word, interval, offset and lag.
_Words = tuple[str | None, int | None, int | None, int | None]
# Whether a sync is needed, by whom it was asked for, the newest version, whether the trainer has stopped
# and the synchronizer has answered.
_Need = tuple[Literal["no", "yes", "must"], list[str], int, bool, bool]
# How a sync ended, the version, its step, versions and steps behind, why it failed, and seconds.
_Synced = tuple[str, int, int | None, int, int, str | None, float]
# Name, state, step, version, how the last sync ended, and why that failed.
_Line = tuple[str, str, int, int, str | None, str | None]
# How a sync ended, the version, its step, the explorers, why it failed, and seconds.
_Trained = tuple[str, int, int, list[_Line], str | None, float]

@final
class Synchronizer:
    @staticmethod
    def start(
        method: str | None,
        style: _Words,
        history: int,
        lasting: tuple[str | None, str | None, str | PathLike[str] | None],
        listen: str | None,
    ) -> Synchronizer: ...
    @staticmethod
    def connect(address: str) -> Synchronizer: ...
    @property
    def address(self) -> str | None: ...
    def route(self) -> str | None: ...
    def trainer(
        self,
        party: tuple[str, _Words, str | None, int],
        info: InitInfo,
        timeout: float | None,
        watch: Callable[[], None] | None,
    ) -> SyncTrainer: ...
    def explorer(
        self,
        party: tuple[str, _Words, str | None, int],
        eval_interval: int | None,
        timeout: float | None,
        watch: Callable[[], None] | None,
    ) -> SyncExplorer: ...
    def shutdown(self) -> None: ...

@final
class SyncTrainer:
    def need(self, step: int | None) -> _Need: ...
    def wait_need(
        self, step: int | None, timeout: float | None, watch: Callable[[], None] | None
    ) -> _Need: ...
    def first(
        self,
        timeout: float | None,
        publish: Callable[[int], None],
        watch: Callable[[], None] | None,
    ) -> None: ...
    def sync(
        self,
        step: int,
        timeout: float | None,
        publish: Callable[[int, float | None], None],
        watch: Callable[[], None] | None,
    ) -> _Trained: ...
    def method(self) -> str: ...
    def epoch(self) -> int: ...
    def leave(self, reason: str | None) -> None: ...

@final
class SyncExplorer:
    def need(self, step: int | None) -> _Need: ...
    def wait_need(
        self, step: int | None, timeout: float | None, watch: Callable[[], None] | None
    ) -> _Need: ...
    def sync(
        self,
        step: int | None,
        timeout: float | None,
        load: Callable[[int, InitInfo, int, float | None], int],
        watch: Callable[[], None] | None,
    ) -> _Synced: ...
    def load(
        self, load: Callable[[str | None], int], watch: Callable[[], None] | None
    ) -> _Synced: ...
    def store(self) -> str | None: ...
    def need_eval(self, step: int) -> bool: ...
    def pause(self, paused: bool) -> None: ...
    def method(self) -> str: ...
    def leave(self, reason: str | None) -> None: ...
