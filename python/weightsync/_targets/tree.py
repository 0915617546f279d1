"""Loading into a TensorDict or a nested dict of tensors or arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weightsync import _dtypes, _extra
from weightsync._guard import loading
from weightsync._native import Layout, Snapshot
from weightsync._source import tree
from weightsync._targets.base import Target, Tied, copy_all, is_plain, memory_of, not_inferring
from weightsync._targets.module import leave_shared_memory
from weightsync._view import View


class TreeTarget(Target):
    """A TensorDict or a nested dict of tensors or arrays: written in place.

    An empty dict takes the sender's tensors, under dotted names.
    """

    def __init__(self, weights: Any, *, stays: bool = False) -> None:
        self._weights, self._stays = weights, stays
        self._sent: list[tuple[str, str, list[int]]] = []

    def layout(self) -> Layout:
        specs: list[tuple[str, str, Sequence[int]]] = [
            (name, *_dtypes.of(name, tensor)) for name, tensor, _ in tree(self._weights)[0]
        ]
        own = {name for name, _, _ in specs}
        # Extra state is put into the dict as it comes, under its own name.
        specs.extend(
            spec for spec in self._sent if _extra.is_extra(spec[0]) and spec[0] not in own
        )
        return Layout(specs)

    def shape(self, layout: Layout) -> bool:
        self._sent = layout.tensors()
        if not self._stays:
            found = [tensor for _, tensor, _ in tree(self._weights)[0]]
            of_torch = [tensor for tensor in found if _dtypes.is_tensor(tensor)]
            if of_torch:
                with not_inferring():
                    leave_shared_memory(of_torch)
        if len(self._weights) or _dtypes.is_tensordict(self._weights):
            return False
        import torch

        with not_inferring():
            for name, dtype, shape in self._sent:
                if not _extra.is_extra(name):
                    own = _dtypes.torch_shape(dtype, tuple(shape))
                    self._weights[name] = torch.zeros(own, dtype=_dtypes.torch_dtype(dtype))
        return True

    def load(self, snapshot: Snapshot) -> None:
        with loading, not_inferring():
            self._load(snapshot)

    def _load(self, snapshot: Snapshot) -> None:
        listed = snapshot.places()
        places = {name: at for at, (name, *_) in enumerate(listed)}
        ties = dict(snapshot.ties)
        copies, others, kept = [], [], []
        tied = Tied(listed)
        for name, tensor, _ in tree(self._weights)[0]:
            sent = ties.get(name, name)
            is_array = _dtypes.is_array(tensor)
            # A transposed view has the same memory and other bytes.
            if tensor.flags.c_contiguous if is_array else tensor.is_contiguous():
                tied.add(memory_of(tensor), name, sent)
            if is_array:
                direct = tensor.flags.c_contiguous and tensor.flags.writeable
            else:
                direct = is_plain(tensor)
                # Another thread may exchange its memory meanwhile.
                kept.append(tensor.detach())
            if not direct:
                others.append((tensor, sent))
            elif memory := memory_of(tensor):
                copies.append((places[sent], *memory))
        tied.check(snapshot)
        snapshot.copy_to(copies)
        del kept
        if not others and not snapshot.extra_states:
            return
        view = View(snapshot)
        for tensor, sent in others:
            if _dtypes.is_array(tensor):
                tensor[...] = view.array(sent)
        copy_all([(one, view.tensor(sent)) for one, sent in others if not _dtypes.is_array(one)])
        for prefix, state in view.extra_states():
            self._put(prefix, state)

    def _put(self, prefix: str, state: Any) -> None:
        place = self._weights
        name = _extra.joined(prefix, _extra.NAME)
        if name not in place:
            for part in prefix.split(".") if prefix else []:
                if part not in place:
                    break
                place = place[part]
            else:
                name = _extra.NAME
        place[name] = state
