"""The model of a receiver, and how a version becomes its weights: all tensors, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch

from weightsync import _dtypes, _extra
from weightsync._checks import choice
from weightsync._gpu import settle
from weightsync._memory import bytes_in_order, flat_bytes
from weightsync._source import module_tensors, tree
from weightsync._targets.base import copy_values, is_plain
from weightsync._targets.memory import exchange, free, leave_shared_memory
from weightsync._targets.module import BIND_FROM, _forking
from weightsync._targets.writing import Overlaps, check_kept, check_memory
from weightsync._torch import as_worker
from weightsync.errors import LoadError, WrongTypeError, WrongWeightsError
from weightsync.process_group._packing import Layout
from weightsync.transfer.loaders import check_fit

# The most bytes of copied tensors of which a load keeps the old values, to undo what fails.
_KEPT_BYTES = 16 << 20


class Target:
    """A torch module, a TensorDict, or a nested dict of tensors."""

    def __init__(self, model: Any, mode: str) -> None:
        choice("mode", mode, "bind", "copy")
        is_tree = isinstance(model, Mapping) or _dtypes.is_tensordict(model)
        if not is_tree and not _dtypes.is_module(model):
            raise WrongTypeError(
                "a receiver's model is a torch module, a TensorDict or a dict of tensors, not a "
                f"{type(model).__name__}"
            )
        self._model, self._mode = model, mode
        # An empty dict takes the sender's tensors.
        self._is_empty = isinstance(model, dict) and not model
        # The tensors that lie in the last version, by id.
        self._bound: set[int] = set()
        #: Whether a load has failed that could not be undone.
        self.is_torn = False
        with _forking, as_worker():
            leave_shared_memory([one for one in self._tensors() if _dtypes.is_tensor(one)])

    def _tensors(self) -> list[Any]:
        """All tensors of the model."""
        if _dtypes.is_module(self._model):
            return [one for _, _, _, _, one, _ in module_tensors(self._model, "tensordict")]
        return [one for _, one, _ in tree(self._model)[0]]

    def fit(self, layout: Layout) -> list[tuple[torch.Tensor, int, bool]]:
        """Where each tensor goes: the model's own tensor, the index of the one that comes, is a buffer.

        Raises:
            WrongWeightsError: naming the tensors that do not fit.
            WrongTypeError: naming a tensor that cannot be written.
        """
        if self._is_empty:
            return []
        index = {name: at for at, name in enumerate(layout.names)}
        index |= {name: index[of] for name, of in layout.ties.items()}
        own: dict[str, torch.Tensor] = {}
        buffers: set[str] = set()
        if _dtypes.is_module(self._model):
            for prefix, owner, _, key, tensor, is_buffer in module_tensors(self._model, "tensordict"):
                name = _extra.joined(prefix, key)
                if name in index or key not in owner._non_persistent_buffers_set:
                    own[name] = tensor
                    buffers |= {name} if is_buffer else set()
        else:
            for name, tensor, _ in tree(self._model)[0]:
                own[name] = tensor
                buffers.add(name)
            check_kept(own.items(), ((name, one) for name, one, _ in tree(self._model)[0]))
        for name, tensor in own.items():
            if not _dtypes.is_tensor(tensor):
                raise WrongTypeError(
                    f"{name!r} is a {type(tensor).__name__}: a receiver's model has tensors of torch"
                )
            check_memory(name, tensor)
        came = {
            name: (layout.dtypes[at], layout.shapes[at])
            for name, at in index.items()
            # Another name of a tensor that this model knows by one name.
            if name in own or name not in layout.ties or layout.ties[name] not in own
        }
        check_fit(own, came)
        return [(one, index[name], name in buffers) for name, one in own.items() if name in index]

    def load(self, layout: Layout, tensors: list[torch.Tensor]) -> None:
        """Loads a version whose bytes were checked.

        Raises:
            WrongWeightsError: if it does not fit, or if tensors that are one tensor here differ.
            LoadError: if torch refuses a tensor. The model is as it was, unless `is_torn` says
                that it may have a part of the version.
        """
        every = dict(zip(layout.names, tensors, strict=True))
        if self._is_empty:
            every |= {name: every[of] for name, of in layout.ties.items()}
            try:
                with as_worker():
                    self._model.update({name: one.clone() for name, one in every.items()})
            except RuntimeError as error:
                raise LoadError(f"there is no memory for the version: {error}") from error
            self._is_empty = False
            return
        bound: list[tuple[torch.Tensor, torch.Tensor]] = []
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        first: dict[int, int] = {}
        places = self.fit(layout)
        once = {id(own): (layout.names[at], layout.names[at], own) for own, at, _ in reversed(places)}
        # Two that were sent as one share a tensor of the version, and nothing of their own.
        overlaps = Overlaps(one for key, one in once.items() if key not in self._bound)
        overlaps.check(lambda name: flat_bytes(every[name]).cpu().numpy().tobytes())
        for own, at, is_buffer in places:
            known = first.get(id(own))
            first.setdefault(id(own), at)
            if known is not None and known != at and not torch.equal(flat_bytes(tensors[known]), flat_bytes(tensors[at])):
                raise WrongWeightsError(
                    f"{layout.names[known]!r} and {layout.names[at]!r} are tied here, and were sent "
                    "with different values: tie them in the trainer too, or untie them here"
                )
            if known is not None:
                continue
            may_bind = self._mode == "bind" and not is_buffer and not own.is_inference()
            # Bound, it would share its memory no longer.
            may_bind = may_bind and layout.names[at] not in overlaps.names
            lies = is_plain(own) and own.nbytes >= BIND_FROM
            (bound if may_bind and lies else copied).append((own, tensors[at]))
        # A process that forks meanwhile would give its child a part of the version.
        with _forking, as_worker(), torch.no_grad():
            self._write(bound, copied)
            self._bound = {id(own) for own, _ in bound}

    def _write(
        self,
        bound: list[tuple[torch.Tensor, torch.Tensor]],
        copied: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Writes all, or none."""
        can_undo = sum(own.nbytes for own, _ in copied) <= _KEPT_BYTES
        try:
            before_bound = [(own, own.detach()) for own, _ in bound]
            before_copied = [(own, own.detach().clone()) for own, _ in copied if can_undo]
        except RuntimeError as error:
            raise LoadError(f"the model's old values cannot be kept: {error}") from error
        freed: list[torch.Tensor] = []
        try:
            _copy(copied)
            freed = exchange(bound)
            changed = [own for own, _ in bound if own.requires_grad]
            if changed:
                # Autograd then refuses a backward over values that it has saved of them.
                torch.autograd.graph.increment_version(changed)
        except BaseException as error:
            # Until all is undone.
            self.is_torn = True
            free(exchange(before_bound), in_slot=False)
            _undo(before_copied)
            self.is_torn = not can_undo
            if isinstance(error, (RuntimeError, TypeError, ValueError)):
                raise LoadError(f"the model refused a tensor: {error}") from error
            raise
        finally:
            before_bound.clear()
            free(freed, in_slot=False)


def _undo(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for own, old in pairs:
        # A tensor that refuses every write has its old values.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            copy_values(own, old)


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    settle(own for own, _ in pairs)
    to, values = [], []
    for own, source in pairs:
        if is_plain(own) and not own.is_inference():
            to.append(bytes_in_order(own))
            values.append(flat_bytes(source))
        else:
            copy_values(own, source)
    if to:
        torch._foreach_copy_(to, values)
