"""Versions that last: saved in a directory or an object store, and loaded without a running trainer."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from weightsync import _files
from weightsync._checks import absolute, text
from weightsync._native import Store as NativeStore
from weightsync._native import SetSnapshot, StoredModel, StoredVersion
from weightsync._deadline import Deadline
from weightsync._source import Source, Streamed
from weightsync._targets import target_of
from weightsync.errors import DeadlineError, LifecycleError, ModelError, SettingError
from weightsync.snapshot import Snapshot

if TYPE_CHECKING:
    from weightsync._native import Saver as NativeSaver
    from weightsync._native import Saving as NativeSaving
    from weightsync._native import Writer, _Saved

__all__ = ["Saved", "Saving", "Store", "StoredModel", "StoredVersion"]

logger = logging.getLogger("weightsync")

_T = TypeVar("_T")

#: How many saves of a sender are remembered.
_REMEMBERED = 256

# The most bytes of a file next to the weights; all of them together have this bound, too.
_MOST_OF_FILES = 256 << 20

# How long the end of a sender waits for a save: so many seconds, and the time of storage that takes
# so many bytes a second.
_PATIENCE = 60.0
_SLOWEST = 10e6


class Saved(NamedTuple):
    """A version that is in the store, and stays there whatever dies."""

    #: Its number among all versions of the store.
    sequence: int
    #: The bytes that were written for its weights.
    stored_bytes: int
    #: The bytes of its weights.
    bytes: int
    #: The version of each model.
    versions: dict[str, int]
    #: The share of the elements that changed, where that is known.
    changes: float | None


class Store:
    """Versions of a model, or of several, in a directory or an object store.

    Every version that is loaded is whole and has the digest that its writer made. A damaged file is
    found before anything of it is used, and is named.

    Args:
        url: the path of a directory, or ``s3://bucket/path``, ``gs://…`` or ``az://…`` as a string.
            Nothing is read or made yet.
        keep: which versions stay: ``"all"``; a number, such as 8: the newest ones;
            ``"8+every:100"``: of the older ones every 100th, too. Versions with a name stay, and
            those that a process is reading.
        shard_bytes: the most bytes of tensors in one safetensors file.
        files: files to save with the weights, such as a model's ``config.json``: their paths, or a
            dict of their bytes by name. Without any, those of the newest version stay.
        deltas: whether versions are saved as changes where that takes few bytes.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        keep: int | str = "all",
        shard_bytes: int = 5 << 30,
        files: Iterable[str | os.PathLike[str]] | Mapping[str, bytes] = (),
        deltas: bool = True,
    ) -> None:
        self._native = NativeStore(text("url", os.fsdecode(url)))
        if not isinstance(shard_bytes, int) or shard_bytes < 1:
            raise SettingError(f"shard_bytes: expected a number of bytes, got {shard_bytes!r}")
        self._options = {
            "keep": str(keep),
            "shard_bytes": shard_bytes,
            "files": _read(files),
            "deltas": deltas,
        }
        NativeStore.check(self._options)
        self._writer: Writer | None = None
        # Two first saves at once would claim the store twice. A signal's handler may save, too.
        self._claiming = threading.RLock()
        self._claims = False
        # The saver of a sender that keeps its versions here; without one when its last save has ended.
        self._kept = _Kept()

    @property
    def url(self) -> str:
        """Where the store is: an absolute path, or an address. Other processes open it by this."""
        return self._native.address()

    def versions(self) -> list[StoredVersion]:
        """Every version that can be loaded, oldest first. What is damaged is logged as a warning."""
        versions, damage = self._native.versions()
        for file, what in damage:
            logger.warning("%s is damaged: %s", file, what)
        return versions

    def damage(self) -> list[tuple[str, str]]:
        """The damaged manifests and heads: each file, and what is wrong with it.

        The weights are checked when a version is loaded.
        """
        return self._native.versions()[1]

    def load(
        self,
        version: int | None = None,
        *,
        model: str | None = None,
        at_least: int | None = None,
        named: str | None = None,
        timeout: float | None = 0,
    ) -> Snapshot:
        """Loads a version of a model into memory of this process.

        Args:
            version: exactly this version; None: the newest that is whole.
            model: which model, where the store has several.
            at_least: the newest version, once it is this one or a later one.
            named: the version of this name.
            timeout: how long to wait for a version that may still come, in seconds; None: for ever.

        Raises:
            ModelError: if there is no such model, version or name.
            CorruptError: naming the damaged file of a version that was asked for.
            DeadlineError: if ``at_least`` has not come in time.
        """
        asked = _asked(version, model, named, at_least)
        loaded = self._native.load_one(asked, model, timeout)
        return Snapshot(self._in_time(loaded, at_least, timeout))

    def load_all(
        self,
        version: int | None = None,
        *,
        model: str | None = None,
        named: str | None = None,
        timeout: float | None = 0,
    ) -> dict[str, Snapshot]:
        """As :meth:`load`, for every model of the version, by its name.

        Args:
            model: the model whose version it is, where the store has several.
        """
        found = self._load_set(version, model=model, named=named, timeout=timeout)
        return {one.model: Snapshot(one) for one, _ in found.members()}

    def _load_set(
        self,
        version: int | None = None,
        *,
        model: str | None = None,
        at_least: int | None = None,
        named: str | None = None,
        timeout: float | None = 0,
    ) -> SetSnapshot:
        """As :meth:`load`, for every model of the version; ``load_into`` of it loads all or none."""
        loaded = self._native.load(_asked(version, model, named, at_least), timeout)
        return self._in_time(loaded, at_least, timeout)

    def load_into(
        self,
        target: Any,
        version: int | None = None,
        *,
        model: str | None = None,
        at_least: int | None = None,
        named: str | None = None,
        timeout: float | None = 0,
    ) -> int:
        """Loads a version straight into a module, a TensorDict, or a dict of tensors or arrays.

        Returns:
            The version that was loaded.

        Raises:
            WrongWeightsError: naming each tensor that does not fit. No tensor was copied.
        """
        found = self.load(version, model=model, at_least=at_least, named=named, timeout=timeout)
        found._native.load_into(target_of(target, "copy", stays=True))
        return found.version

    def files(
        self, version: int | None = None, *, model: str | None = None, named: str | None = None
    ) -> dict[str, bytes]:
        """The files that were saved with a version's weights, such as ``config.json``, by name."""
        return dict(self._native.files(_asked(version, model, named), model))

    def pull(
        self,
        out: str | os.PathLike[str],
        version: int | None = None,
        *,
        model: str | None = None,
        named: str | None = None,
    ) -> int:
        """Writes a version to a directory, as a checkpoint that transformers and vLLM load as it is.

        The directory has its name only when all of it is on the disk. One that an earlier call wrote
        is replaced; any other that is not empty is refused.

        Returns:
            The version that was written.
        """
        return self._native.pull(_asked(version, model, named), model, out)

    def from_pretrained(
        self,
        cls: type[Any],
        version: int | None = None,
        *,
        model: str | None = None,
        named: str | None = None,
        **settings: Any,
    ) -> Any:
        """Makes a model of a class of transformers from a version, as its ``from_pretrained`` does.

        The configuration is the ``config.json`` that was saved with the version: by
        ``files=`` of this class, or by ``weightsync push`` of a checkpoint. Tied and renamed weights
        are treated as that class treats those of a checkpoint. The weights are in memory twice while
        the model is made.

        Args:
            cls: such as ``AutoModelForCausalLM`` or ``LlamaForCausalLM``.
            version: exactly this version; None: the newest that is whole.
            model: which model, where the store has several.
            named: the version of this name.
            settings: for the ``from_pretrained`` of that class: ``dtype``, ``trust_remote_code``,
                ``config``, or values of the configuration.

        Raises:
            ModelError: if there is no such version, or it has no ``config.json``.
            WrongWeightsError: naming weights of the model that the version has not, or has in
                another shape. ``ignore_mismatched_sizes=True`` initializes the latter.
        """
        from weightsync._pretrained import made

        asked = _asked(version, model, named)
        found, files = self._native.load_with_files(asked, model)
        named_files = dict(files)
        if "config.json" not in named_files and "config" not in settings:
            raise ModelError(
                f"v{found.version} of {found.model} in {self.url} has no config.json: save it with "
                "Store(url, files=[...]) or with weightsync push of a checkpoint directory, or pass config="
            )
        return made(cls, named_files, Snapshot(found), settings)

    def load_unless_within(
        self, held: int, lag: int, *, model: str | None = None
    ) -> Snapshot | None:
        """Loads the newest version, unless ``held`` is at most ``lag`` versions behind it."""
        found = self._native.load_unless_within(text("model", model), held, lag)
        return None if found is None else Snapshot(found)

    def save(self, weights: Any, *, name: str = "policy", version: int | None = None) -> Saved:
        """Saves the next version of a model, and returns when it is durable.

        The first save of this object takes the store over: another writer can save nothing more,
        and is told so. The version is compared with the newest one of the store, and saved as
        changes where that takes few bytes.

        Args:
            weights: a torch module, a state dict, a nested dict of tensors or numpy arrays, a
                TensorDict, or a :class:`Snapshot` of another store or a receiver.
            name: the model's name.
            version: its number, such as a training step; the next one without it.

        Raises:
            SendError: if the number does not grow.
            PeerError: if another writer has taken the store over. :meth:`close` ends this one, and the
                next save takes the store back.
            LifecycleError: while a sender keeps its versions with this object.
            OperatingSystemError: naming the file that could not be written.
        """
        text("name", name)
        if isinstance(weights, Snapshot):
            return Saved(*self._claimed().save_snapshot(name, weights._native, version))
        # It keeps the copies and slices that it reads, so it stays until they were read.
        source = Source("state_dict", None)
        native = weights.native if isinstance(weights, Streamed) else source.place(weights)
        return Saved(*self._claimed().save([(name, native, version)]))

    def name(self, name: str, version: int, *, model: str | None = None) -> None:
        """Names a version, which is then kept; a name that another version has moves.

        Raises:
            SettingError: if it cannot be a name.
            ModelError: if there is no such version.
        """
        self._native.set_name(text("name", name), text("model", model), version)

    def remove_name(self, name: str) -> None:
        """Takes a name back. The version is then kept or removed like any other."""
        self._native.remove_name(text("name", name))

    def names(self) -> dict[str, dict[str, int]]:
        """The names, and the version of each model that they stand for."""
        return self._native.names()

    def close(self) -> None:
        """Ends saving with this object. Any number of times."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    def __getstate__(self) -> Any:
        raise LifecycleError("a store is not pickled: pass its url, and open it where it is used")

    def _in_time(self, loaded: _T | None, at_least: int | None, timeout: float | None) -> _T:
        if loaded is None:
            what = "a first version" if at_least is None else f"v{at_least} or a later version"
            raise DeadlineError(
                f"{self.url} did not have {what} within {timeout} s: is its trainer running?"
            )
        return loaded

    def _claimed(self) -> Writer:
        """The writer; the first call takes the store over."""
        with self._claiming:
            if self._kept.saver is not None:
                raise LifecycleError(
                    f"a sender keeps its versions in this store ({self.url}): save with the sender, "
                    "or shut it down first"
                )
            if self._writer is None:
                if self._claims:
                    raise LifecycleError("the store is being taken over by a call of this thread")
                self._claims = True
                try:
                    writer = self._native.writer(self._options)
                    writer.read_base()
                    self._writer = writer
                finally:
                    self._claims = False
            return self._writer


class Saving:
    """The save of one version by a :class:`Sender` with ``keep``."""

    def __init__(self, versions: dict[str, int], native: NativeSaving) -> None:
        #: The versions of the models.
        self.versions = versions
        self._native = native
        self._ended: tuple[str, _Saved | None, str | None] | None = None

    @property
    def outcome(self) -> Literal["saving", "durable", "failed", "superseded"]:
        """How it ended. A save is superseded if a newer version came before its turn."""
        ended = self._end(0)
        return "saving" if ended is None else ended[0]  # type: ignore[return-value]

    @property
    def saved(self) -> Saved | None:
        """What is durable, if it is."""
        ended = self._end(0)
        return None if ended is None or ended[1] is None else Saved(*ended[1])

    @property
    def reason(self) -> str | None:
        """Why it failed, if it did."""
        ended = self._end(0)
        return None if ended is None else ended[2]

    def wait(self, timeout: float | None = None) -> str:
        """Waits for the end, and returns the outcome; ``"saving"`` at the deadline."""
        self._end(timeout)
        return self.outcome

    def _end(self, timeout: float | None) -> tuple[str, _Saved | None, str | None] | None:
        if self._ended is None:
            self._ended = self._native.wait(timeout)
        return self._ended

    def __repr__(self) -> str:
        versions = ", ".join(f"{name} v{version}" for name, version in self.versions.items())
        return f"<Saving {versions}: {self.outcome}>"


class _Kept:
    """The saver of a sender, which a keeper shares with its store until its last save has ended.

    A weak reference of the store to the keeper is not enough: Python clears those of a cycle first.
    """

    saver: NativeSaver | None = None


class Keeper:
    """Saves every so many versions of a sender, while training goes on."""

    def __init__(self, store: Store, every: int, models: Iterable[str]) -> None:
        if every < 1:
            raise SettingError(f"every: expected 1 or more, got {every}")
        self._store = store
        self._every = every
        self._models = list(models)
        self._kept = _Kept()
        self._pid = os.getpid()
        self._newest = 0
        self._sent = 0
        # Of the version that was saved last.
        self._bytes = 0
        self.saves: deque[Saving] = deque(maxlen=_REMEMBERED)

    def open(self) -> int:
        """Takes the store over. The result is the newest version of any of the models there."""
        store = self._store
        with store._claiming:
            if self._kept.saver is None:
                # The store's own writer would be fenced off.
                store.close()
                writer = store._claimed()
                self._newest = max(writer.version(model) for model in self._models)
                store._writer, store._kept = None, self._kept
                # Last, and in one step: Ctrl-C before it leaves a store that anybody may save in.
                self._kept.saver = writer.saver()
        return self._newest

    def sent(self, session: Any) -> None:
        """Saves what was sent last, if it is its turn."""
        # Another thread may close it in the meantime.
        saver = self._kept.saver
        sent = session.sent_versions()
        models = [model for model in self._models if sent[model]]
        if saver is None or not models:
            return
        self._sent += 1
        if (self._sent - 1) % self._every:
            return
        snapshots = [session.sent(model, None) for model in models]
        versions = {one.model: one.version for one in snapshots}
        self._bytes = sum(one.layout.payload_bytes for one in snapshots)
        self.saves.append(Saving(versions, saver.save(snapshots)))

    def close(self) -> None:
        """Waits until the last save has ended. Ctrl-C ends the wait; the save goes on.

        So it does where storage answers no more, or is slower than 10 MB/s and a minute.
        """
        # A signal's handler, or another thread, may close it in the meantime.
        saver = self._kept.saver
        if saver is None or os.getpid() != self._pid:
            # In a forked child the thread that saves is the parent's.
            return
        # Of two saves, one may wait for the other.
        last = list(self.saves)[-2:]
        until = Deadline(len(last) * (_PATIENCE + self._bytes / _SLOWEST))
        left = [saving for saving in last if saving.wait(until.left()) == "saving"]
        for saving in left:
            logger.error(
                "%s: %s, and this process waits for it no longer; if the storage is not just slow, the "
                "version is not in the store: save it elsewhere", self._store, saving
            )  # fmt: skip
        saver.close(not left)
        # Not before: another writer would fence off the last save.
        self._kept.saver = None

    def __del__(self) -> None:
        if hasattr(self, "_kept") and not sys.is_finalizing():
            self.close()


def keeper_of(keep: Any, every: int, models: Iterable[str], scheme: str) -> Keeper | None:
    """What saves a sender's versions; None if nothing does."""
    if keep is None:
        if every != 1:
            raise SettingError("every is for keep: give the store with keep=")
        return None
    word = scheme.partition(":")[0]
    if word == "none":
        raise SettingError("the scheme none sends nothing, so there is nothing to keep")
    if word == "store":
        raise SettingError(
            "the scheme store saves every version itself: give its keep setting, such as "
            "StoreScheme(url, keep=8), and not keep= of the sender"
        )
    return Keeper(keep if isinstance(keep, Store) else Store(keep), every, models)


def _asked(
    version: int | None, model: str | None, named: str | None, at_least: int | None = None
) -> tuple[str | None, int | None, int | None, str | None]:
    return (text("model", model), version, at_least, text("named", named))


def _read(files: Iterable[str | os.PathLike[str]] | Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    if isinstance(files, Mapping):
        return [(text("files", name), bytes(data)) for name, data in files.items()]
    if isinstance(files, (str, os.PathLike)):
        raise SettingError(f"files: expected a list of paths or a dict of bytes, got {files!r}")
    read = []
    for path in files:
        path = absolute(path)
        read.append((text("files", os.path.basename(path)), _files.read(path, _MOST_OF_FILES)))
    return read
