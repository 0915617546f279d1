"""The base of all schemes: TorchRL's own, with a state for each process."""

from __future__ import annotations

import os
import queue
from typing import Any

from torchrl import weight_update
from torchrl.weight_update import WeightSyncScheme as _TorchRLScheme

from weightsync.errors import SettingError


def _own_flag(name: str) -> property:
    """A flag of this process alone: a forked child is not its parent's sender."""
    return property(
        lambda self: self._is_own() and getattr(self, name, False),
        lambda self, value: setattr(self, name, value),
    )


class _Kind(type(_TorchRLScheme)):
    """The class of the schemes here: instances of TorchRL's scheme of the same name count, too.

    A TorchRL collector that is given no scheme makes TorchRL's, and programs ask of which kind it is.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        if super().__instancecheck__(instance):
            return True
        is_own = cls.__module__.startswith(f"{__package__}.")
        theirs = getattr(weight_update, cls.__name__, None) if is_own else None
        return theirs is not None and isinstance(instance, theirs)


class WeightSyncScheme(_TorchRLScheme, metaclass=_Kind):
    """TorchRL's scheme, as a base for schemes over custom transports.

    ``from_backend`` makes the schemes of this package.
    """

    @classmethod
    def from_backend(cls, backend: str, **kwargs: Any) -> WeightSyncScheme:
        """The scheme of a backend, made with the given arguments.

        Args:
            backend: ``none``, ``shared``, ``process``, ``distributed``, ``rpc``, ``ray`` or
                ``process-group``, or one of TorchRL's aliases ``direct``, ``thread`` and ``multiprocessing``.

        Raises:
            SettingError: for another backend.
        """
        from weightsync.torchrl._registry import SCHEMES

        kinds = {
            **SCHEMES,
            "direct": SCHEMES["none"],
            "thread": SCHEMES["shared"],
            "multiprocessing": SCHEMES["process"],
        }
        if backend not in kinds:
            raise SettingError(
                f"Unsupported weight-sync backend {backend!r}: there are {', '.join(sorted(kinds))}"
            )
        return kinds[backend](**kwargs)

    initialized_on_sender = _own_flag("_initialized_on_sender")
    initialized_on_receiver = _own_flag("_initialized_on_receiver")
    synchronized_on_sender = _own_flag("_synchronized_on_sender")
    synchronized_on_receiver = _own_flag("_synchronized_on_receiver")

    def init_on_sender(self, *args: Any, **kwargs: Any) -> None:
        self._pid = os.getpid()
        super().init_on_sender(*args, **kwargs)

    def init_on_receiver(self, *, model_id: str, context: Any = None, **kwargs: Any) -> None:
        if not self._is_own():
            self.__setstate__(self.__getstate__())
        self._pid = os.getpid()
        super().init_on_receiver(model_id=model_id, context=context, **kwargs)

    def receive(self, timeout: float | None = None) -> Any:
        """As TorchRL's, but a timeout gives None and never an exception."""
        try:
            return super().receive(timeout)
        except (queue.Empty, TimeoutError):
            return None

    def _is_own(self) -> bool:
        return getattr(self, "_pid", None) == os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state["_pid"] = None
        return state
