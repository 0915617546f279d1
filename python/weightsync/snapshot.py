"""What a worker holds: one whole version."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from weightsync._native import Snapshot as NativeSnapshot
from weightsync._target import arrays_of, target_of, tensors_of


class Snapshot(Mapping[str, Any]):
    """One whole version of a model: its tensors by name, read without a copy.

    It does not change while it, or a tensor of it, is held, whatever the sender
    does, and also after the sender's death. Holding one costs the sender room for
    one version; :meth:`copy` does not. What is written into a tensor of it is seen
    by nobody else, and is gone with the version.
    """

    def __init__(self, native: NativeSnapshot) -> None:
        self._native = native
        self._tensors: dict[str, Any] | None = None

    @property
    def model(self) -> str:
        """The model it is of."""
        return self._native.model

    @property
    def version(self) -> int:
        """Its number in the run."""
        return self._native.version

    @property
    def run(self) -> tuple[int, str]:
        """The run it belongs to: its epoch and id."""
        return self._native.run

    def tensors(self) -> dict[str, Any]:
        """Torch tensors over the version, by name; tied ones under each of theirs."""
        if self._tensors is None:
            self._tensors = tensors_of(self._native)
        return dict(self._tensors)

    def numpy(self) -> dict[str, Any]:
        """numpy arrays over the version; bf16 and fp8 want ml_dtypes installed."""
        return arrays_of(self._native)

    def load_into(self, model: Any) -> None:
        """Copies the version into a module, a TensorDict, or a dict of tensors or arrays.

        Raises:
            WrongWeightsError: naming each tensor that does not fit; nothing was copied.
        """
        self._native.load_into(target_of(model, "copy"))

    def copy(self) -> Snapshot:
        """The same version in this process's own memory."""
        return Snapshot(self._native.to_owned_copy())

    def digest(self) -> str:
        """The identity of its bytes, as this process sees them: one pass."""
        return self._native.digest()

    @property
    def published_digest(self) -> str | None:
        """The digest the sender made, if it has."""
        return self._native.published_digest

    def verify(self) -> bool:
        """Compares it with the sender's checksums; False if it made none.

        Raises:
            CorruptError: naming what differs.
        """
        return self._native.verify_checksums()

    def save_safetensors(self, path: str | os.PathLike[str]) -> str:
        """Writes a safetensors file, whole or not at all; its digest."""
        return self._native.save_safetensors(os.fspath(path))

    def __getitem__(self, name: str) -> Any:
        if self._tensors is None:
            self._tensors = tensors_of(self._native)
        try:
            return self._tensors[name]
        except KeyError:
            some = ", ".join(repr(known) for known in list(self._tensors)[:5])
            raise KeyError(f"{self.model} has no tensor {name!r}; it has {some}, …") from None

    def __iter__(self) -> Iterator[str]:
        if self._tensors is None:
            self._tensors = tensors_of(self._native)
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._native.layout)

    def __repr__(self) -> str:
        return repr(self._native)
