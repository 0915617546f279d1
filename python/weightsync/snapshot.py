"""A snapshot: a read-only view of one whole version."""

from __future__ import annotations

import os
from collections import abc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from weightsync import _dtypes, _extra
from weightsync._native import Snapshot as NativeSnapshot
from weightsync._targets import target_of
from weightsync._view import View, states_of
from weightsync.errors import MissingTensorError, UnsupportedError

if TYPE_CHECKING:
    from weightsync.mapping import Mapping


class Snapshot(abc.Mapping[str, Any]):
    """One whole version of a model: its tensors by name, read without a copy.

    The tensors are torch's, or numpy's where torch is not installed. The extra state of a module is
    there under torch's name for it (``"head._extra_state"``), so ``load_state_dict`` takes a snapshot.

    A snapshot does not change while the worker holds it, or a tensor of it, whatever the
    sender does, and also after the sender's death. Each snapshot that is held costs the
    sender room for one version; a :meth:`copy` does not. A worker's writes to a snapshot's
    tensors are seen by this process alone, and are dropped with the version.
    """

    def __init__(self, native: NativeSnapshot) -> None:
        self._native = native
        # A dict, because it keeps the order and finds a name quickly.
        self._names: dict[str, None] | None = None
        # The modules that have extra state, by its name.
        self._states: dict[str, str] = {}
        self._view: View | None = None
        self._seen: dict[str, Any] = {}

    @property
    def model(self) -> str:
        """The name of the model."""
        return self._native.model

    @property
    def version(self) -> int:
        """The version's number in its run."""
        return self._native.version

    @property
    def run(self) -> tuple[int, str]:
        """The run of the version: its epoch and id."""
        return self._native.run

    def tensors(self) -> dict[str, Any]:
        """Torch tensors over the version, by name; a tied tensor under each of its names.

        With the extra states of modules it is a state dict.
        """
        if not _dtypes.has_torch():
            raise UnsupportedError("torch is not installed here, so use numpy() in place of tensors()")
        return {name: self[name] for name in self}

    def numpy(self, *names: str) -> dict[str, Any]:
        """numpy arrays over the version; bf16 and fp8 need ml_dtypes.

        Args:
            names: the tensors that are wanted; all of them without names.

        Raises:
            WrongTypeError: naming a tensor whose dtype numpy does not have.
        """
        for name in names:
            if name not in self:
                raise self._missing(name)
        view = View(self._native)
        return {name: self._read(view, name, view.array) for name in names or self}

    def load_into(self, model: Any) -> None:
        """Copies the version into a module, a TensorDict, or a dict of tensors or arrays.

        Raises:
            WrongWeightsError: naming each tensor that does not fit. No tensor was copied.
        """
        self._native.load_into(target_of(model, "copy", stays=True))

    def mapped(self, mapping: Mapping) -> Snapshot:
        """The version after the rules of a :class:`Mapping`, in this process's own memory.

        Raises:
            WrongWeightsError: naming each rule that does not fit.
        """
        return Snapshot(self._native.mapped(mapping._native))

    def copy(self) -> Snapshot:
        """The same version in this process's own memory."""
        return Snapshot(self._native.to_owned_copy())

    def digest(self) -> str:
        """The digest of the version's bytes as this process sees them; reads them all."""
        return self._native.digest()

    @property
    def published_digest(self) -> str | None:
        """The digest that the sender made, or None."""
        return self._native.published_digest

    def verify(self) -> bool:
        """Compares the bytes with the sender's checksums; False if the sender made none.

        Raises:
            CorruptError: naming the mismatch.
        """
        return self._native.verify_checksums()

    def save_safetensors(self, path: str | os.PathLike[str]) -> str:
        """Writes a safetensors file, whole or not at all, and returns its digest."""
        return self._native.save_safetensors(os.fspath(path))

    def __getitem__(self, name: str) -> Any:
        """A tensor over the version, or a numpy array where torch is not installed."""
        if self._view is None:
            self._view = View(self._native)
        view = self._view
        of = view.ties.get(name, name)
        if of not in self._seen:
            made = self._read(view, name, view.tensor if _dtypes.has_torch() else view.array)
            if name in self._states:
                # Nobody else is to change it.
                return made
            self._seen[of] = made
        return self._seen[of]

    def __contains__(self, name: object) -> bool:
        return name in self._known()

    def __iter__(self) -> Iterator[str]:
        return iter(self._known())

    def __len__(self) -> int:
        return len(self._known())

    def __repr__(self) -> str:
        return repr(self._native)

    def _missing(self, name: str) -> MissingTensorError:
        known = list(self)
        some = ", ".join(map(repr, known[:5])) + (", …" if len(known) > 5 else "")
        return MissingTensorError(f"{self.model} has no tensor {name!r}; it has {some}")

    def _read(self, view: View, name: str, one: Callable[[str], Any]) -> Any:
        """A tensor, or an extra state."""
        if name not in self._known():
            raise self._missing(name)
        prefix = self._states.get(name)
        return one(name) if prefix is None else view.extra_state(prefix)

    def _known(self) -> dict[str, None]:
        if self._names is None:
            names = dict.fromkeys(place[0] for place in self._native.places())
            names.update((alias, None) for alias, _ in self._native.ties)
            self._states = states_of(self._native)
            if self._states:
                names = {name: None for name in names if not _extra.is_extra(name)}
                names |= dict.fromkeys(self._states)
            self._names = names
        return self._names
