"""Trinity's synchronizer."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import os
import shutil
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar

from weightsync import _files
from weightsync._calls import in_thread
from weightsync.errors import ModelError, UnsupportedError
from weightsync.ray import _cluster
from weightsync.ray._presence import Presence
from weightsync.trinity import _weights
from weightsync.trinity._watch import Watch
from weightsync.trinity._weights import Held, Inlet, Later, Outlet, Place

logger = logging.getLogger("weightsync")

_F = TypeVar("_F", bound=Callable[..., Any])
_Invocation = Callable[[Any, Any], Any]

_POINTER = "latest_state_dict_iteration.txt"


class RunningStatus(Enum):
    """The state of a trainer or an explorer. Members of Trinity's own enum are taken, and are equal."""

    RUNNING = "running"
    REQUIRE_SYNC = "require_sync"
    STOPPED = "stopped"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Enum) and (self.name, self.value) == (other.name, other.value)

    __hash__ = Enum.__hash__


_RUNNING, _REQUIRE, _STOPPED = RunningStatus


def _at_caller(decorator: Callable[[_Invocation], _Invocation]) -> Callable[[_F], _F]:
    """Has Ray run ``decorator`` where an actor's method is called, by any handle of the actor."""

    def mark(method: _F) -> _F:
        method.__ray_invocation_decorator__ = decorator  # type: ignore[attr-defined]
        return method

    return mark


def _named(invocation: _Invocation) -> _Invocation:
    """Adds which process calls. Trinity's calls do not say it, and explorers have to be told apart."""
    return lambda args, kwargs: invocation(args, {**kwargs, "caller": _me()})


def _apart(invocation: _Invocation) -> _Invocation:
    """Publishes a state dict from the process that has it, and passes on where it can be had."""

    def arguments(model_state_dict: Any, trainer_step: int) -> list[Any]:
        if isinstance(model_state_dict, Mapping):
            model_state_dict = _weights.published.send(model_state_dict, trainer_step).place
        return [model_state_dict, trainer_step]

    return lambda args, kwargs: invocation(arguments(*args, **kwargs), {})


class Synchronizer:
    """Trinity's synchronizer: :meth:`get_actor` makes the Ray actor, or finds it.

    It also works as an object of one program, without Ray: its coroutines then run in one event loop.

    Args:
        config: Trinity's ``Config``, or an object with the same attributes.
        module_ref: what asked for the actor; None outside Ray.
    """

    def __init__(self, config: Any, module_ref: Any = None) -> None:
        self.config = config
        self.model_version = 0
        self._in_actor = module_ref is not None
        #: The trainer's state.
        self.trainer_status = _STOPPED
        self._trainer_process = ""
        # States by process. Calls outside Ray do not say whose they are: "" counts all of these.
        self._explorers: dict[str, Counter[RunningStatus]] = {}
        self._presence = Presence(self._gone, self.shutdown)
        self._dead: set[str] = set()
        self._changed = asyncio.Event()
        self._no_news = 0
        # Counts what becomes the newest version, also one of an earlier step.
        self._news = 0
        self._offered = 0
        self._meeting = _Meeting()
        # The newest weights; Tinker's are a path.
        self._state: Held | str | None = None
        self._storing = asyncio.Lock()
        # Explorers may be told of versions that are older than the newest. Each one that is kept takes
        # the memory of a model.
        self._inlet, self._outlet = Inlet(), Outlet(history=1)
        # The versions that explorers were told of, by process. What they then load has to be that
        # version, also if newer ones have come.
        self._told: dict[str, list[_Version]] = {}
        # The checkpoints that were found here.
        self._found: set[int] = set()
        # The step that the pointer file named last.
        self._pointed: int | None = None
        self._bad = ""
        self._watch: Watch | None = None
        if self._in_actor and self._has_method("memory"):
            # Takes seconds, for which the trainer would wait at its first sync.
            importlib.import_module("torch")

    @classmethod
    def get_actor(cls, config: Any = None, namespace: str | None = None) -> Any:
        """The Ray actor of a namespace; with a ``config`` it is made unless it is there.

        With a ``config`` the calling process counts as present until it ends. The actor ends with the
        last one.
        """
        ray = _cluster.ray()
        if config is None:
            return ray.get_actor(_weights.NAME, namespace=namespace)
        options = {"namespace": config.ray_namespace, "get_if_exists": True, "lifetime": "detached"}
        # Each present process and each wait is a call that is open.
        made = ray.remote(cls).options(name=_weights.NAME, num_cpus=0, max_concurrency=10_000, **options)
        actor = made.remote(config, module_ref=_me())
        key = actor._actor_id.hex()
        if key not in _weights.presence:
            # This call has no answer while the process lives. The actor waits for the answer as well,
            # and Ray ends that wait when the process, which owns the answer, has died.
            _weights.presence[key] = actor.present.remote()
            actor.add_module.remote(None, [_weights.presence[key]])
        return actor

    @_at_caller(_named)
    async def present(self, *, caller: str) -> None:
        """Returns when the calling process has ended. The actor ends with the last one."""
        await self._presence.hold(caller)

    @_at_caller(_named)
    async def add_module(
        self, module_ref: Any = None, presence: list[Any] | None = None, *, caller: str = ""
    ) -> None:
        """Counts the calling process as present. :meth:`get_actor` calls it."""
        for answer in presence or ():
            self._presence.watch(caller, answer)

    @_at_caller(_named)
    async def set_trainer_status(self, status: Any, *, caller: str = "") -> None:
        """Sets the trainer's state. At STOPPED nobody waits for it any longer."""
        self.trainer_status, self._trainer_process = _status(status), caller
        self._wake()

    def trainer_requires_weight_sync(self) -> bool | None:
        """Whether the trainer waits for explorers; None if it has stopped."""
        return None if self.trainer_status is _STOPPED else self.trainer_status is _REQUIRE

    @_at_caller(_named)
    async def set_explorer_status(
        self, status: Any, old_status: Any = None, *, caller: str = ""
    ) -> None:
        """Sets an explorer's state."""
        if caller and old_status is None:
            self._explorers.pop(caller, None)
        self._move(caller, _status(status), None if old_status is None else _status(old_status))
        if _status(status) is _STOPPED:
            self._told.pop(caller, None)
            self._tidy()
        self._meet()
        self._wake()

    @property
    def explorer_status_counts(self) -> Counter[RunningStatus]:
        """How many explorers are in each state."""
        return sum(self._explorers.values(), Counter())

    def explorer_requires_sync(self) -> bool:
        """Whether some explorer waits for a version."""
        return self.explorer_status_counts[_REQUIRE] > 0

    @_at_caller(_apart)
    async def set_model_state_dict(self, model_state_dict: Any, trainer_step: int) -> None:
        """Takes the weights of a step. They are the newest version once they are here.

        Args:
            model_state_dict: tensors by name; Tinker's path; or None: they lie in the checkpoint
                of the step.
        """
        async with self._storing:
            state = model_state_dict
            if isinstance(state, (Mapping, Place)):
                state = await in_thread(lambda: self._keep(model_state_dict, trainer_step), leaves=True)
            self._offer(state, trainer_step)

    def _offer(self, state: Held | str | None, step: int) -> None:
        self._state, self.model_version = state, step
        self._news += 1
        self._wake()

    def get_model_state_dict(self, version: int | None = None) -> tuple[Any, int]:
        """The newest weights, or those of a version, with their version."""
        of = self._newest() if version is None else self._find(version, "")
        if not isinstance(of.state, Held):
            return of.state, of.number
        if not self._in_actor:
            return dict(of.state.snapshot), of.number
        exact = version is not None
        return Later(_weights.state_dict, of.state.place, self.config.ray_namespace, exact)  # type: ignore[return-value]

    @_at_caller(_named)
    def get_model_state_dict_iterator(
        self, version: int | None = None, *, caller: str = ""
    ) -> Iterator[tuple[str, Any]]:
        """The tensors by name: of a version, or of the one that the calling explorer was told of.

        For another process it is the one that an explorer of its Ray job was told of last, or an
        explorer of another job. Where there is none, it is the newest.
        """
        held = self._find(version, caller).state
        if held is None:
            return
        if not isinstance(held, Held):
            raise UnsupportedError("the weights are a path, and not tensors by name")
        if not self._in_actor:
            yield from held.snapshot.items()
            return
        names, where = list(held.snapshot), (held.place, self.config.ray_namespace)
        for name in names:
            yield Later(_weights.item, *where, name, name == names[-1])  # type: ignore[misc]

    async def place_of(self, place: Place, exact: bool) -> Place:
        """Where the weights are now that were first at this place; unless ``exact``, or newer ones."""
        held = {of.state.place: of.state for of in self._known() if isinstance(of.state, Held)}
        if place not in held and (exact or not isinstance(self._state, Held)):
            raise ModelError(f"v{place.version} is not kept; the newest is v{self.model_version}")
        return await in_thread(lambda: self._outlet.place(held.get(place, self._state)), leaves=True)

    async def get_state_dict_meta(self) -> list[tuple[str, str, tuple[int, ...]]] | None:
        """Name, dtype and shape of each tensor."""
        if not isinstance(self._state, Held):
            return None
        return [
            (name, str(tensor.dtype).split(".")[-1], tuple(tensor.shape))
            for name, tensor in self._state.snapshot.items()
        ]

    @_at_caller(_named)
    async def wait_new_model_state_dict(self, current_version: int, *, caller: str = "") -> int:
        """Waits for a version newer than the explorer's.

        Returns:
            The newest version. It is the explorer's own, or an older one, when the trainer has stopped,
            has nothing new, or has gone back to an earlier step, and after ``sync_timeout`` seconds.
        """
        # The explorer has loaded what it was told of before.
        told = self._told.pop(caller, [])
        if not caller:
            done = next((of for of in told if of.number == current_version), None)
            self._told[caller] = [of for of in told if of is not done]
        self._look()
        self._tidy()
        before = (self._news, self._no_news)
        self._move(caller, _REQUIRE, _RUNNING)
        try:
            await self._until(
                lambda: self.model_version > current_version
                or self.trainer_status is _STOPPED
                or (self._news, self._no_news) != before
                or caller in self._dead
            )
        finally:
            self._end_wait(caller)
        if self.model_version > current_version and caller not in self._dead:
            self._tell(caller)
        return self.model_version

    async def notify_no_new_model_state_dict(self) -> None:
        """Ends the waits for a new version: the trainer has made no step since the last one."""
        self._no_news += 1
        self._wake()

    @_at_caller(_named)
    async def get_latest_model_version(self, *, caller: str = "") -> int:
        """The newest version."""
        self._look()
        if caller in self._presence:
            self._told.pop(caller, None)
            self._tell(caller)
        return self.model_version

    @_at_caller(_named)
    async def get_latest_model_path(
        self, use_huggingface: bool = False, *, caller: str = ""
    ) -> str | None:
        """The checkpoint of the version that the calling explorer was told of; None before the first."""
        self._look()
        version = self._find(None, caller).number
        if not version:
            return None
        path = self._folder(version) / "actor"
        return str(path / "huggingface" if use_huggingface else path)

    @_at_caller(_named)
    async def ready_to_nccl_sync(
        self, module: Literal["trainer", "explorer"], trainer_step: int, *, caller: str = ""
    ) -> int | None:
        """Waits until the trainer and every running explorer are here.

        Args:
            module: which side calls.
            trainer_step: the trainer's step; for an explorer the version that it runs.

        Returns:
            The version that is to be sent now; None if the other side has stopped, or did not come
            within ``sync_timeout`` seconds.
        """
        meeting = self._meeting
        if module == "trainer":
            self.trainer_status, self._trainer_process, self._offered = _REQUIRE, caller, trainer_step
        else:
            # Nobody says how the transfer ended. An explorer that comes back with a version has it.
            self.model_version = max(self.model_version, trainer_step)
            self._move(caller, _REQUIRE, _RUNNING)
        self._meet()
        self._wake()
        try:
            await self._until(
                lambda: meeting.version is not None or self._is_alone(module) or caller in self._dead
            )
        finally:
            if meeting.version is None and module == "trainer" and self.trainer_status is _REQUIRE:
                self.trainer_status = _RUNNING
            elif meeting.version is None and module == "explorer":
                self._end_wait(caller)
        if meeting.version is None:
            logger.warning("%s: no sync, the other side has stopped or did not come in time", module)
        return meeting.version

    async def setup_weight_sync_group(
        self, master_address: str, master_port: int, state_dict_meta: Any = None
    ) -> None:
        """Has the explorer join Trinity's process group."""
        explorer = self._actor(self.config.explorer.name)
        await explorer.setup_weight_sync_group.remote(master_address, master_port)
        if state_dict_meta is not None:
            await explorer.set_state_dict_meta.remote(state_dict_meta)

    async def coordinate_weight_sync_setup(self, timeout: int | None = None) -> None:
        """Has trainer and explorer form Trinity's process group."""
        settings = self.config.synchronizer
        both = [self._actor(one.name) for one in (self.config.trainer, self.config.explorer)]
        address, port, meta = await both[0].get_weight_sync_info.remote()
        size, seconds = settings.explorer_world_size + 1, timeout or settings.sync_timeout
        group = (address, port, size, settings.group_name, seconds)
        await asyncio.gather(*(one.setup_weight_sync_group.remote(*group) for one in both))
        await both[1].set_state_dict_meta.remote(meta)

    async def coordinate_weight_sync_teardown(self) -> None:
        """Has explorer and trainer, in this order, leave Trinity's process group."""
        for one in (self.config.explorer, self.config.trainer):
            try:
                await self._actor(one.name).teardown_weight_sync_group.remote()
            except (ValueError, _cluster.ray().exceptions.RayActorError) as error:
                logger.warning("%s has left its process group by ending: %s", one.name, error)

    def shutdown(self) -> None:
        """Frees what it holds. An actor does so when its last process has gone."""
        for end in (self._inlet, self._outlet, _weights.reader):
            end.close()
        self._end_watch()

    def _actor(self, name: str) -> Any:
        return _cluster.ray().get_actor(name, namespace=self.config.ray_namespace)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, met: Callable[[], bool]) -> None:
        """Waits for a condition, or for ``sync_timeout`` seconds."""
        pause = None
        if self._has_checkpoints():
            if self._watch is None or self._watch.loop is not asyncio.get_running_loop():
                self._end_watch()
                self._watch = Watch(Path(self.config.checkpoint_job_dir), self._look)
            pause = None if self._watch.sees_all else 1.0
            self._look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.synchronizer.sync_timeout):
                while not met():
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), pause)
                    self._look()

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def _move(self, process: str, status: RunningStatus, old: RunningStatus | None) -> None:
        if process in self._dead:
            return
        counts = self._explorers.setdefault(process, Counter())
        if old is not None and status is _STOPPED and not counts[old]:
            # It stops while a wait of its own is open.
            old = _REQUIRE
        # A synchronizer that was started again has not seen the old state.
        if old is not None and counts[old]:
            counts[old] -= 1
        counts[status] += 1

    def _end_wait(self, process: str) -> None:
        # It may have said meanwhile that it has stopped.
        if self._explorers.get(process, Counter())[_REQUIRE]:
            self._move(process, _RUNNING, _REQUIRE)

    def _gone(self, process: str) -> None:
        self._dead.add(process)
        self._explorers.pop(process, None)
        self._told.pop(process, None)
        if process == self._trainer_process:
            self.trainer_status = _STOPPED
        self._tidy()
        self._meet()
        self._wake()

    def _newest(self) -> _Version:
        return _Version(self.model_version, self._state)

    def _known(self) -> list[_Version]:
        return [self._newest(), *itertools.chain(*self._told.values())]

    def _tell(self, caller: str) -> None:
        # The last that was told is at the end.
        self._told[caller] = [*self._told.pop(caller, []), self._newest()]

    def _find(self, version: int | None, caller: str) -> _Version:
        if version is None:
            return self._told_last(caller) or self._newest()
        for of in self._known():
            if of.number == version:
                return of
        raise ModelError(f"v{version} is not kept; the newest is v{self.model_version}")

    def _told_last(self, caller: str) -> _Version | None:
        """What the caller was told of last, or else an explorer of its Ray job, or else any."""
        told = [(one, of[-1]) for one, of in self._told.items() if of and of[-1].number]
        own = [of for one, of in told if one == caller]
        of_job = [of for one, of in told if _job(one) == _job(caller)]
        for found in (own, of_job, [of for _, of in told]):
            if found:
                return found[-1]
        return None

    def _is_alone(self, module: str) -> bool:
        """Whether the other side has stopped."""
        return not self._awaited() if module == "trainer" else self.trainer_status is _STOPPED

    def _awaited(self) -> int:
        counts = self.explorer_status_counts
        return counts[_RUNNING] + counts[_REQUIRE]

    def _meet(self) -> None:
        """Lets trainer and explorers begin if all are here."""
        waiting = self.explorer_status_counts[_REQUIRE]
        if self.trainer_status is not _REQUIRE or not waiting or waiting != self._awaited():
            return
        self._meeting.version = self._offered
        self._meeting = _Meeting()
        self.trainer_status = _RUNNING
        for counts in self._explorers.values():
            counts[_RUNNING] += counts.pop(_REQUIRE, 0)

    def _keep(self, state: Mapping[str, Any] | Place, step: int) -> Held:
        """Takes weights over from the process that published them, which may end."""
        if isinstance(state, Place):
            state = self._inlet.snapshot(state)
        return self._outlet.send(dict(state), step)

    def _has_method(self, name: str) -> bool:
        method = self.config.synchronizer.sync_method
        return str(getattr(method, "value", method)) == name

    def _has_checkpoints(self) -> bool:
        return self.config.mode != "bench" and self._has_method("checkpoint")

    def _folder(self, step: int) -> Path:
        return Path(self.config.checkpoint_job_dir, f"global_step_{step}")

    def _look(self) -> None:
        """Reads which checkpoint is the newest."""
        if not self._has_checkpoints():
            return
        pointer = Path(self.config.checkpoint_job_dir, _POINTER)
        try:
            text = _text(pointer)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            return self._complain(f"{pointer} cannot be read: {error}")
        # The trainer opens the file before it writes to it.
        if not text:
            return
        if not text.isdecimal():
            return self._complain(f"{pointer}: expected the number of a step, got {text[:40]!r}")
        step, state = int(text), None
        # A trainer that was started again may go back. Its file may be older than what it has told.
        has_gone_back = self._pointed is not None and step < self._pointed
        if step <= self.model_version and not has_gone_back:
            self._pointed = step
            return
        try:
            if self.config.trainer.trainer_type == "tinker":
                state = _text(self._folder(step) / "remote_sampler_path.txt")
            else:
                self._folder(step).stat()
        except OSError as error:
            return self._complain(f"{pointer} names step {step}, which cannot be read: {error}")
        self._pointed = step
        self._found.add(step)
        self._offer(state, step)
        self._tidy()

    def _complain(self, words: str) -> None:
        if words != self._bad:
            logger.error("%s; explorers stay at version %d", words, self.model_version)
        self._bad = words

    def _tidy(self) -> None:
        """Removes earlier checkpoints that were written for explorers, and that none is reading."""
        wanted = {of.number for of in itertools.chain(*self._told.values())}
        for step in self._found - wanted - {self.model_version}:
            self._found.discard(step)
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, _remove_what_was_for_explorers, self._folder(step))


def _remove_what_was_for_explorers(folder: Path) -> None:
    """Removes a checkpoint of this user that has nothing but the weights for explorers."""
    try:
        # Not through a link, and not another folder that takes its name meanwhile.
        opened = os.open(folder.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            found = os.stat(folder.name, dir_fd=opened, follow_symlinks=False)
            if not stat.S_ISDIR(found.st_mode):
                return
            if found.st_uid != os.geteuid():
                logger.warning("the checkpoint %s stays: it belongs to another user", folder)
            elif _is_for_explorers_alone(folder.name, opened):
                shutil.rmtree(folder.name, ignore_errors=True, dir_fd=opened)
        finally:
            os.close(opened)
    except OSError as error:
        logger.debug("the checkpoint %s stays: %s", folder, error)


def _text(file: Path) -> str:
    """A short file that the trainer has written. What is no regular file is not waited for."""
    return _files.read(file, 1 << 16).decode().strip()


def _is_for_explorers_alone(folder: str, parent: int) -> bool:
    """Whether a checkpoint has weights alone, and nothing that a trainer resumes from."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        if not set(os.listdir(opened)) <= {"actor", "remote_sampler_path.txt"}:
            return False
        actor = os.open("actor", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=opened)
    except FileNotFoundError:
        return True
    finally:
        os.close(opened)
    try:
        # Trinity marks what its trainer resumes from by a file next to `actor`; others do not.
        return not any(one.startswith(("optim", "extra_state")) for one in os.listdir(actor))
    finally:
        os.close(actor)


@dataclass(eq=False)
class _Meeting:
    """One sync of the trainer with all explorers; without a version until all have come."""

    version: int | None = None


@dataclass(frozen=True)
class _Version:
    """A version, and its weights; Tinker's are a path."""

    number: int
    state: Held | str | None


def _status(status: Any) -> RunningStatus:
    return RunningStatus(getattr(status, "value", status))


def _me() -> str:
    """The calling process, after its Ray job."""
    context = _cluster.ray().get_runtime_context()
    return f"{context.get_job_id()}/{context.get_worker_id()}"


def _job(process: str) -> str:
    return process.partition("/")[0]
