"""When a trainer and its explorers synchronise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from weightsync import _ends
from weightsync._answers import ExplorerLine, Need, Synced, Trained
from weightsync._calls import in_thread, watching
from weightsync._checks import text
from weightsync._native import Synchronizer as Native
from weightsync._parties import Explorer, Trainer
from weightsync._targets import target_of
from weightsync.errors import DeadlineError, LifecycleError, ModelError, PeerError, SettingError
from weightsync.mapping import PerModel
from weightsync.model_receiver import Mode
from weightsync.scheme import Distributed, Scheme, StoreScheme
from weightsync.sender import Sender
from weightsync.store import Store

if TYPE_CHECKING:
    from typing import Self

__all__ = ["Explorer", "ExplorerLine", "Method", "Need", "Style", "Synced", "Synchronizer", "Trained", "Trainer"]

#: How versions travel: ``"nccl"`` (also ``"online"``): from the trainer to explorers that wait for
#: it; ``"memory"``: through the synchronizer; ``"checkpoint"`` (also ``"offline"``): through a store.
Method = Literal["nccl", "memory", "checkpoint", "online", "offline"]

#: When a party synchronises.
Style = Literal[
    "fixed",
    "dynamic_by_explorer",
    "dynamic_by_trainer",
    "explorer_driven",
    "trainer_driven",
    "fully_async",
    "bounded",
]


class Synchronizer(_ends.AsyncWith):
    """Decides when a trainer and its explorers synchronise.

    Use :meth:`local` inside one program, and :meth:`connect` for one of another process, such as
    ``weightsync serve``.
    """

    def __init__(self, native: Native, *, remote: bool) -> None:
        self._native = native
        self._remote = remote
        self._address = native.address
        _ends.opened(self)

    @classmethod
    def local(
        cls,
        *,
        method: Method | None = None,
        style: Style = "fixed",
        interval: int | None = None,
        offset: int | None = None,
        lag: int | None = None,
        history: int = 1,
        store: str | os.PathLike[str] | None = None,
        keep: int | str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        listen: str | None = None,
    ) -> Self:
        """One inside this program, for its threads.

        Args:
            method: how versions travel; None: the trainer chooses.
            style: when parties synchronise that do not say so.
            interval: steps between two syncs; 1 without it.
            offset: for ``"fixed"``: by how many steps explorers are ahead.
            lag: for ``"bounded"``: how many versions an explorer may be behind; 1 without it.
            history: how many older versions are kept in memory.
            store: keeps the versions, a directory or an address such as ``s3://bucket/path``; the
                synchronizer begins with the newest one there.
            keep: which versions the store keeps, as for :class:`Store`; all without it.
            run_dir: a directory for what a restarted synchronizer has to know.
            listen: ``"host:port"``: other processes may join there, too. Port 0 is a port that the
                system chooses: see :attr:`address`.
        """
        if not 0 <= history <= 255:
            raise SettingError(f"history: expected 0 to 255 versions, got {history}")
        lasting = (
            None if store is None else text("store", os.fspath(store)),
            None if keep is None else str(keep),
            run_dir,
        )
        native = Native.start(method, (style, interval, offset, lag), history, lasting, listen)
        return cls(native, remote=listen is not None)

    @classmethod
    def connect(cls, address: str) -> Self:
        """One of another process, at ``"host:port"``. Nothing is sent before a party joins."""
        return cls(Native.connect(text("address", address)), remote=True)

    @property
    def address(self) -> str | None:
        """Where other processes reach it."""
        return self._address

    def trainer(
        self,
        model: Any = None,
        *,
        name: str = "trainer",
        models: Mapping[str, Any] | None = None,
        method: Method | None = None,
        style: Style | None = None,
        interval: int | None = None,
        offset: int | None = None,
        lag: int | None = None,
        step: int = 0,
        resume: bool = False,
        store: str | os.PathLike[str] | None = None,
        scheme: Scheme | str | None = None,
        timeout: float | None = 60.0,
        **options: Any,
    ) -> Trainer:
        """Joins as the trainer, and publishes the first version: the weights that the model has now.

        A trainer that joins later takes the place of this one, whose calls then fail.

        Args:
            model: the weights, as for :class:`Sender`; it is read during :meth:`Trainer.sync`.
            models: several models by name, in place of ``model``.
            method: how versions travel; None: as the synchronizer was made, or ``"memory"``.
            style: when the trainer synchronises; None: as the synchronizer was made.
            interval, offset, lag: as for :meth:`local`.
            step: how many steps the model has been trained for.
            resume: whether the model first loads the newest version that can be had, for a program
                that is started again. ``step`` is then that version's, if the synchronizer knows it:
                see :attr:`Trainer.step`. Without any version the model stays as it is.
            store: the store of the method ``"checkpoint"``: a directory, or an address such as
                ``s3://bucket/path``. It keeps every version; ``scheme=StoreScheme(…)`` says more.
            scheme: how weights travel to the synchronizer, or with ``"nccl"`` to explorers; None:
                shared memory inside one program, and else :class:`Distributed`, at this machine's
                address towards the synchronizer.
            timeout: how long a synchronizer that is not there yet is waited for, in seconds.
            options: further arguments of :class:`Sender`.
        """
        if store is not None and method is None:
            method = "checkpoint"
        if scheme is None:
            scheme = self._scheme(method, store)
        elif store is not None:
            raise SettingError("store= names the scheme already: give it without scheme=")
        if store is None:
            # Each explorer holds the version that it runs.
            options = {"slots": (2, 32), **options}
        sender = Sender(model, models=models, scheme=scheme, timeout=timeout, **options)
        try:
            if resume:
                known = self._resume(name, model, models, sender.init_info.store, timeout)
                step = step if known is None else known
            party = (text("name", name), (style, interval, offset, lag), method, step)
            native = self._native.trainer(party, sender.init_info, timeout, watching())
        except BaseException:
            sender.shutdown()
            raise
        trainer = Trainer(native, sender, step)
        try:
            native.first(timeout, trainer._first, watching())
        except BaseException as error:
            trainer._end(_ends.reason_of(error))
            raise
        return trainer

    async def trainer_async(self, *args: Any, **kwargs: Any) -> Trainer:
        """As :meth:`trainer`, while the event loop goes on."""
        return await in_thread(lambda: self.trainer(*args, **kwargs), unwanted=Trainer.shutdown)

    def explorer(
        self,
        name: str,
        model: Any = None,
        *,
        models: Mapping[str, Any] | None = None,
        mode: Mode = "bind",
        mapping: PerModel | None = None,
        style: Style | None = None,
        interval: int | None = None,
        offset: int | None = None,
        lag: int | None = None,
        step: int = 0,
        eval_interval: int | None = None,
        device: object = "cpu",
        timeout: float | None = 60.0,
    ) -> Explorer:
        """Joins as an explorer.

        Args:
            name: each explorer has a name of its own. One that joins with the name of another takes
                its place.
            model: where weights go, as for :class:`ModelReceiver`. Without a model
                :attr:`Explorer.snapshots` has the weights.
            models: several models by name, in place of ``model``.
            mode, mapping, device: as for :class:`ModelReceiver`.
            style: when the explorer synchronises; None: as the synchronizer was made.
            interval, offset, lag: as for :meth:`local`.
            step: how many steps it has made.
            eval_interval: after how many steps :meth:`Explorer.need_eval` is true.
            timeout: how long a synchronizer that is not there yet is waited for, in seconds.
        """
        if model is not None and models is not None:
            raise ModelError("an explorer has its model, or several as models={name: model}, not both")
        given = {"": model} if model is not None else dict(models or {})
        for one in given.values():
            # What cannot be loaded into is named before another party loses its place.
            target_of(one, mode)
        if mapping is not None and not given:
            raise SettingError("mapping= is for an explorer with a model; use Snapshot.mapped")
        if eval_interval is not None and eval_interval < 1:
            raise SettingError(f"eval_interval: expected 1 step or more, or None, got {eval_interval}")
        party = (text("name", name), (style, interval, offset, lag), None, step)
        native = self._native.explorer(party, eval_interval, timeout, watching())
        loading = {"model": model, "models": models, "mode": mode, "mapping": mapping, "device": device}
        return Explorer(native, loading)

    async def explorer_async(self, *args: Any, **kwargs: Any) -> Explorer:
        """As :meth:`explorer`, while the event loop goes on."""
        return await in_thread(lambda: self.explorer(*args, **kwargs), unwanted=Explorer.shutdown)

    def shutdown(self) -> None:
        """Ends a synchronizer of this program; its parties are told. Any number of times."""
        self._native.shutdown()
        _ends.closed(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"<Synchronizer at {self.address}>" if self._remote else "<Synchronizer of this program>"

    def __getstate__(self) -> Any:
        raise LifecycleError(
            "a synchronizer cannot be pickled: use Synchronizer.connect there, with its address"
        )

    def _scheme(self, method: str | None, store: str | os.PathLike[str] | None) -> Scheme | str:
        if store is not None:
            if method not in (None, "checkpoint", "offline"):
                raise SettingError(f'store= is for method="checkpoint", got method="{method}"')
            return StoreScheme(store, keep="all")
        if method in ("checkpoint", "offline"):
            raise SettingError('method="checkpoint" needs its store: store="/shared/runs/policy"')
        if not self._remote:
            return "shared-mem"
        route = self._native.route()
        if route is None:
            return Distributed()
        # Without certificates the synchronizer was reached in plain text, so that is allowed.
        is_plain = not os.environ.get("WEIGHTSYNC_TLS_DIR")
        return Distributed(listen=route, insecure_plaintext=is_plain)

    def _resume(
        self,
        name: str,
        model: Any,
        models: Mapping[str, Any] | None,
        store: str | None,
        timeout: float | None,
    ) -> int | None:
        """Loads the newest version; its step, if it is known."""
        given = {"models": models} if models is not None else {"model": model}
        reading = self.explorer(
            f"{name} reads", **given, mode="copy", style="explorer_driven", timeout=timeout
        )
        with reading as reader:
            if reader.method == "nccl":
                raise SettingError('resume: with method="nccl" nobody keeps versions; load a checkpoint')
            need = reader.need_sync(0)
            if not need.connected:
                raise PeerError("resume: the synchronizer is away; start it, and try again", "retry")
            if need:
                synced = reader.sync(0, timeout=timeout)
                if not synced:
                    raise DeadlineError(f"the newest version could not be loaded: {synced}", "retry")
                return synced.step
            # The synchronizer knows nothing of a store whose trainer is not there.
            if store is not None and (stored := Store(store)).versions():
                reader._put(stored._load_set())
        return None
