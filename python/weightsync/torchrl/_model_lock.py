"""The lock of a worker's model, for workers whose own threads load."""

from __future__ import annotations

import threading
import time

from weightsync.errors import LifecycleError

# A forward waits so many seconds at least for a version that waits for other forwards, and not for
# ever, because another forward may be waiting for this one.
_GIVES_WAY = 0.01


class ModelLock:
    """Permits for the forwards of any number of threads, or none while one thread loads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The threads that have permits.
        self._holders: list[int] = []
        self._is_wanted = self._is_taken = self._is_closed = False
        self._wanted_at = 0.0

    def acquire(self) -> ModelLock:
        """Waits while a thread loads, and returns the permit, which the same thread releases."""
        with self._changed:
            if self._is_wanted:
                # As long as the version has waited: forwards that overlap do not keep it out.
                waited = time.monotonic() - self._wanted_at
                self._changed.wait_for(lambda: not self._is_wanted, max(_GIVES_WAY, waited))
            self._changed.wait_for(lambda: not self._is_taken)
            self._holders.append(threading.get_ident())
        return self

    def release(self) -> None:
        with self._changed:
            self._holders.remove(threading.get_ident())
            self._changed.notify_all()

    def refuse_holder(self) -> None:
        """Checks that this thread does not keep itself from a load.

        Raises:
            LifecycleError: inside a forward, or inside ``frozen()``.
        """
        if threading.get_ident() in self._holders:
            raise LifecycleError(
                "this thread keeps the model unchanged, in a forward or in a block of frozen(): "
                "receive after that"
            )

    def enter_alone(self, timeout: float) -> bool:
        """Waits until no permit is left; False if a forward does not end in time.

        Raises:
            LifecycleError: if the worker shuts down.
        """
        with self._changed:
            self._is_wanted, self._wanted_at = True, time.monotonic()
            try:
                self._changed.wait_for(lambda: not self._holders or self._is_closed, timeout)
                if self._is_closed:
                    raise LifecycleError("this worker has left")
                self._is_taken = not self._holders
                return self._is_taken
            finally:
                self._is_wanted = False
                self._changed.notify_all()

    def leave_alone(self) -> None:
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the wait of a thread that is to load, and refuses later ones."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
