"""Loading into a TensorDict or a nested dict of tensors or arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from weightsync import _dtypes, _extra
from weightsync._guard import loading
from weightsync._memory import address_of
from weightsync._native import Layout, Snapshot
from weightsync._source import tree
from weightsync._targets.base import Target, Tied, bytes_of, copy_all, is_plain
from weightsync._targets.memory import leave_shared_memory
from weightsync._targets.writing import Overlaps, check_is_somewhere, check_kept, check_writable
from weightsync._torch import as_worker
from weightsync._view import View, naming
from weightsync.errors import WrongTypeError


class TreeTarget(Target):
    """A TensorDict or a nested dict of tensors or arrays: written in place.

    An empty dict takes the sender's tensors, under dotted names.
    """

    def __init__(self, weights: Any, *, stays: bool = False) -> None:
        self._weights, self._stays = weights, stays
        self._sent: list[tuple[str, str, list[int]]] = []
        # The tensors that were found to be kept.
        self._looked: list[tuple[str, int]] = []
        # Whether `layout` has just looked at them: the library calls it before `load`.
        self._fresh = False
        # Where they were in the last load.
        self._places: list[tuple[str, int, int]] = []
        self._overlaps = Overlaps([])

    def layout(self) -> Layout:
        found = self.tensors()
        specs: list[tuple[str, str, Sequence[int]]] = [
            (name, *_dtypes.of(name, tensor)) for name, tensor in found
        ]
        self._check(found)
        self._fresh = True
        own = {name for name, _, _ in specs}
        # Extra state is put into the dict as it comes, under its own name.
        specs.extend(
            spec for spec in self._sent if _extra.is_extra(spec[0]) and spec[0] not in own
        )
        return Layout(specs)

    def _check(self, found: list[tuple[str, Any]]) -> None:
        """Refuses tensors that cannot be written, or are not kept."""
        for name, tensor in found:
            check_is_somewhere(name, tensor)
            check_writable(name, tensor)
        looked = [(name, id(tensor)) for name, tensor in found]
        if looked != self._looked:
            check_kept(found, self.tensors())
            self._looked = looked

    def shape(self, layout: Layout) -> bool:
        with as_worker():
            return self._shape(layout)

    def _shape(self, layout: Layout) -> bool:
        self._sent = layout.tensors()
        if not self._stays:
            found = [tensor for _, tensor, _ in tree(self._weights)[0]]
            of_torch = [tensor for tensor in found if _dtypes.is_tensor(tensor)]
            if of_torch:
                leave_shared_memory(of_torch)
        if len(self._weights) or _dtypes.is_tensordict(self._weights):
            return False
        made = {}
        for name, dtype, shape in self._sent:
            if not _extra.is_extra(name):
                with naming(name):
                    made[name] = _dtypes.zeros(dtype, tuple(shape))
        # All of them, or none.
        for name, tensor in made.items():
            self._weights[name] = tensor
        return True

    def load(self, snapshot: Snapshot) -> None:
        with loading, as_worker():
            if not self._fresh:
                # Behind a mapping.
                self._check(self.tensors())
            self._fresh = False
            self._load(snapshot)

    def tensors(self) -> list[tuple[str, Any]]:
        """The tensors that versions are loaded into."""
        return [(name, tensor) for name, tensor, _ in tree(self._weights)[0]]

    def _load(self, snapshot: Snapshot) -> None:
        listed = snapshot.places()
        places = {name: at for at, (name, *_) in enumerate(listed)}
        ties = dict(snapshot.ties)
        copies, others, kept = [], [], []
        tied = Tied(listed)
        found = [(name, ties.get(name, name), tensor) for name, tensor, _ in tree(self._weights)[0]]
        once = [one for one in found if tied.add(id(one[2]), one[0], one[1])]
        at = [(sent, id(tensor), address_of(tensor)) for _, sent, tensor in once]
        if at != self._places:
            self._places, self._overlaps = at, Overlaps(once)
        for name, sent, tensor in found:
            is_array = _dtypes.is_array(tensor)
            if is_array:
                direct = tensor.flags.c_contiguous and tensor.flags.writeable
            else:
                direct = is_plain(tensor)
                # Another thread may exchange its memory meanwhile.
                kept.append(tensor.detach())
            if not direct:
                others.append((tensor, sent))
            elif tensor.nbytes:
                copies.append((places[sent], address_of(tensor), tensor.nbytes))
        tied.check(snapshot)
        self._overlaps.check(lambda name: bytes_of(snapshot, name))
        if not others and not snapshot.extra_states:
            snapshot.copy_to(copies)
            return
        view = View(snapshot)
        arrays = [(one, view.array(sent)) for one, sent in others if _dtypes.is_array(one)]
        tensors = [(one, view.tensor(sent)) for one, sent in others if _dtypes.is_tensor(one)]
        states = list(view.extra_states())
        with contextlib.ExitStack() as undo:
            # First: a dict may refuse it, as a locked TensorDict does.
            for prefix, state in states:
                self._put(prefix, state, undo)
            snapshot.copy_to(copies)
            del kept
            for array, values in arrays:
                array[...] = values
            copy_all(tensors)
            undo.pop_all()

    def _put(self, prefix: str, state: Any, undo: contextlib.ExitStack) -> None:
        """Puts an extra state where the weights have it, or else where their kind has it."""
        # The names of TensorDicts, or those of torch's state dicts.
        names = [_extra.NAME, _extra.TORCH_NAME]
        if not _dtypes.is_tensordict(self._weights):
            names.reverse()
        places = [(self._weights, prefix)]
        inner = self._weights
        for part in prefix.split(".") if prefix else []:
            if part not in inner:
                break
            inner = inner[part]
        else:
            places.insert(0, (inner, ""))
        possible = [(place, _extra.joined(before, name)) for place, before in places for name in names]
        place, name = next((one for one in possible if one[1] in one[0]), possible[0])
        try:
            before = (place[name],) if name in place else ()
            place[name] = state
            undo.callback(place.__setitem__ if before else place.__delitem__, name, *before)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise WrongTypeError(
                f"{name!r} is extra state, and the {type(place).__name__} that it goes to does "
                f"not take it: {error}"
            ) from error
