"""Loading into a torch module."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Any, NamedTuple

from weightsync import _dtypes, _extra, _guard
from weightsync._guard import loading
from weightsync._memory import Rooms, is_hollow
from weightsync._native import Copies, Layout, Snapshot, Tensors
from weightsync._source import Places, has_extra_state, module_tensors
from weightsync._targets.base import Target, Tied, bytes_of, copy_all, is_plain
from weightsync._targets.memory import copy_of, exchange, free, leave_shared_memory, retire
from weightsync._targets.writing import Overlaps, check_is_somewhere, check_writable
from weightsync._torch import as_worker
from weightsync._view import View
from weightsync.errors import LifecycleError, LoadError, WrongTypeError, WrongWeightsError

# Smaller parameters are copied: to copy them is quicker than to bind them.
BIND_FROM = 64 * 1024


class ModuleTarget(Target):
    """A torch module. In ``bind`` mode its larger parameters lie in the version itself.

    ``Parameter`` objects stay the same, so optimizers and other holders see the new
    values. Buffers are copied, because workers write them.
    """

    def __init__(self, module: Any, mode: str = "bind", *, stays: bool = False) -> None:
        self._module = weakref.ref(module)
        self._mode, self._stays = mode, stays
        # The sender's tensors, once they are known: a buffer that is not persistent is
        # received only if it is sent, and extra state gets the room that the sender gave it.
        self._sent: dict[str, tuple[str, tuple[int, ...]]] | None = None
        self._entries: list[_Entry] = []
        # Other names of tied tensors, which do not arrive.
        self._left_out: list[_Entry] = []
        self._stateful: dict[str, Any] = {}
        self._layout: Layout | None = None
        self._tensors: Tensors | None = None
        self._planned: _Plan | None = None
        # Whether `layout` has just looked at the module: the library calls it before `load`.
        self._fresh = False
        self._bound: list[Any] = []
        # Whether those lie in the sender's memory.
        self._in_slot = False
        # One thread may fork, which unbinds the module, while another loads.
        self._lock = threading.RLock()
        _targets.add(self)

    def layout(self) -> Layout:
        with self._lock:
            self._live_module()
            if self._layout is None or not self._holds():
                self._look()
            assert self._layout is not None
            self._fresh = True
            return self._layout

    def shape(self, layout: Layout) -> bool:
        with self._lock, as_worker():
            self._sent = {name: (dtype, tuple(shape)) for name, dtype, shape in layout.tensors()}
            self._layout, self._fresh = None, False
            if not self._stays:
                found = module_tensors(self._live_module(), "tensordict")
                leave_shared_memory([tensor for _, _, _, _, tensor, _ in found])
            return self._materialise()

    def load(self, snapshot: Snapshot) -> None:
        with loading, self._lock, as_worker():
            if not self._fresh:
                self.layout()
            self._fresh = False
            with contextlib.ExitStack() as undo:
                if snapshot.extra_states:
                    # First: a module may refuse it.
                    self._set_states(snapshot, undo)
                self._bring(snapshot)
                undo.pop_all()

    def tensors(self) -> list[tuple[str, Any]]:
        """The tensors that versions are loaded into."""
        return [(entry.name, entry.tensor) for entry in self._entries]

    def release(self) -> None:
        with self._lock, as_worker():
            # A tensor whose storage was taken away has none of a version.
            bound = [tensor for tensor in self._bound if not is_hollow(tensor)]
            before = exchange([(tensor, copy_of(tensor)) for tensor in bound])
            self._bound, self._in_slot = [], False
            retire(before)

    def _set_states(self, snapshot: Snapshot, undo: contextlib.ExitStack) -> None:
        for prefix, state in View(snapshot).extra_states():
            part = self._stateful[prefix]
            undo.callback(part.set_extra_state, part.get_extra_state())
            part.set_extra_state(state)

    def _bring(self, snapshot: Snapshot) -> None:
        if self._bind(snapshot, self._plan(snapshot)):
            return
        # A tensor was replaced after `layout` had looked at the module.
        self._look()
        if not self._bind(snapshot, self._plan(snapshot)):
            raise LoadError(
                "another thread replaces the module's tensors while a version is loaded: "
                "let it do so inside `with receiver.frozen():`"
            )

    def _bind(self, snapshot: Snapshot, plan: _Plan) -> bool:
        """Brings a version into the module; False if a tensor differs from the plan."""
        import torch

        plan.tied.check(snapshot)
        plan.overlaps.check(lambda name: bytes_of(snapshot, name))
        # Another thread may exchange a parameter's memory while this one writes there.
        memory = [tensor.detach() for tensor in plan.held]
        view = snapshot.view() if plan.bound or plan.others else None
        made: list[tuple[Any, Any]] = []
        for tensor, dtype, shape, offset, count in (*plan.bound, *plan.others):
            flat = torch.frombuffer(view, dtype=dtype, count=count, offset=offset)
            made.append((tensor, flat if shape is None else flat.view(shape)))
        if plan.copies is not None:
            if not snapshot.copy_into(plan.copies):
                return False
        elif plan.copied:
            snapshot.copy_to(
                [(at, tensor.data_ptr(), tensor.nbytes) for _, at, tensor in plan.copied]
            )
        bound = made[: len(plan.bound)]
        # First: Ctrl-C may end the exchange.
        self._bound = [tensor for tensor, _ in bound]
        before = exchange(bound)
        try:
            copy_all(made[len(bound) :])
            del memory
            if plan.changed:
                # Autograd then refuses a backward over values that it has saved of them.
                torch.autograd.graph.increment_version(plan.changed)
        finally:
            in_slot, self._in_slot = self._in_slot, snapshot.holds_slot
            free(before, in_slot=in_slot)
        return True

    def _plan(self, snapshot: Snapshot) -> _Plan:
        """Which tensor of the snapshot goes where, and how."""
        plan = self._planned
        if plan is None or plan.layout != snapshot.layout:
            # Two that were sent as one lie at one place of the version, and share nothing of their own.
            bound = {id(tensor) for tensor in self._bound}
            self._planned = plan = _Plan(
                self._entries, self._tensors, snapshot, self._mode, bound
            )
        return plan

    def _look(self) -> None:
        """Finds the module's tensors, and guards parts that are new."""
        module, known = self._live_module(), self._sent or {}
        parts = list(module.named_modules(remove_duplicate=False))
        self._entries, self._left_out = [], []
        specs: list[tuple[str, str, tuple[int, ...]]] = []
        found = list(module_tensors(module, "tensordict"))
        arrive = {
            id(tensor) for prefix, _, _, key, tensor, _ in found if _extra.joined(prefix, key) in known
        }
        for prefix, owner, inside, key, tensor, is_buffer in found:
            name = _extra.joined(prefix, key)
            is_sent = name in known
            if not is_sent and id(tensor) in arrive:
                # A tied tensor that arrives under another of its names, as in a checkpoint of transformers.
                self._left_out.append(_Entry(name, inside, key, tensor, is_buffer))
                continue
            if is_buffer and not is_sent and key in owner._non_persistent_buffers_set:
                continue
            self._entries.append(_Entry(name, inside, key, tensor, is_buffer))
            specs.append((name, *_dtypes.of_tensor(name, tensor)))
            check_writable(name, tensor)
            if is_sent:
                # It got memory when the sender's tensors were known.
                check_is_somewhere(name, tensor)
        self._stateful = {prefix: part for prefix, part in parts if has_extra_state(part)}
        for name, spec in known.items():
            if _extra.is_extra(name) and _extra.prefix_of(name) in self._stateful:
                specs.append((name, *spec))
        self._kinds = self._kinds_now()
        self._counts = [
            (place, len(place)) for _, part in parts for place in (part._parameters, part._buffers)
        ]
        self._children = [(part._modules, list(part._modules.values())) for _, part in parts]
        self._layout = Layout(specs)
        self._planned = None
        self._rooms = Rooms([entry.tensor for entry in self._entries if entry.tensor.numel()])
        places = Places()
        for entry in self._entries:
            places.tensor(entry.inside, entry.key)
        for entry in self._left_out:
            places.also(entry.inside, entry.key)
        for _, part in parts:
            places.all_of(part)
        self._tensors = places.tensors()
        _guard.cover(module)

    def _holds(self) -> bool:
        """Whether all is as `_look` found it, and can be written."""
        if not self._rooms.hold():
            return False
        if self._tensors is not None:
            return self._tensors.hold()
        if any(len(place) != count for place, count in self._counts):
            return False
        # A part that was replaced keeps its own tensors where they are.
        if any(list(place.values()) != children for place, children in self._children):
            return False
        # A scripted module's are no dicts, and have no `get`.
        if not all([
            entry.key in entry.inside and entry.inside[entry.key] is entry.tensor
            for entry in (*self._entries, *self._left_out)
        ]):
            return False
        return self._kinds_now() == self._kinds

    def _kinds_now(self) -> tuple[list[Any], ...]:
        """The properties that ``tensor.data = …`` and ``module.to(…)`` change in place."""
        tensors = [entry.tensor for entry in self._entries]
        return (
            [tensor.shape for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            [tensor.is_cpu for tensor in tensors],
            [tensor.is_contiguous() for tensor in tensors],
        )

    def _materialise(self) -> bool:
        """Gives lazy and meta tensors the sender's shapes, and memory; whether any was lazy."""
        import torch

        module, sent, took = self._live_module(), self._sent or {}, False
        made: dict[int, Any] = {}
        # The tensors without memory that the module had, where they were.
        before: list[tuple[str, dict[str, Any], str, Any]] = []
        absent: list[tuple[str, dict[str, Any], str, Any, bool]] = []
        with torch.no_grad():
            for prefix, _, inside, key, tensor, is_buffer in list(
                module_tensors(module, "tensordict")
            ):
                name = _extra.joined(prefix, key)
                lazy = _dtypes.is_lazy(tensor)
                if not lazy and tensor.device.type != "meta":
                    continue
                known = sent.get(name)
                if known is None:
                    absent.append((name, inside, key, tensor, is_buffer and not lazy))
                    continue
                if lazy:
                    shape = _dtypes.torch_shape(*known)
                    tensor.materialize(shape, dtype=_dtypes.torch_dtype(known[0]))
                    took = True
                    continue
                if id(tensor) not in made:
                    room = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype, device="cpu")
                    made[id(tensor)] = _alike(tensor, room)
                before.append((name, inside, key, tensor))
                inside[key] = made[id(tensor)]
            for name, inside, key, tensor, needs_values in absent:
                # Another name of a tensor that arrives.
                if id(tensor) in made:
                    before.append((name, inside, key, tensor))
                    inside[key] = made[id(tensor)]
                elif needs_values:
                    raise WrongWeightsError(
                        f"buffer {name!r} has no values here, and is not persistent, so a state "
                        'dict does not have it: send with strategy="tensordict"'
                    )
        if before:
            _check_exchanged(module, before)
        return took

    def _live_module(self) -> Any:
        module = self._module()
        if module is None:
            raise LifecycleError(
                "the worker's module was freed: keep a reference to it while its receiver lives"
            )
        return module


class _Entry(NamedTuple):
    """One tensor of a module, and the dict and key where the module has it."""

    name: str
    inside: dict[str, Any]
    key: str
    tensor: Any
    is_buffer: bool


# A tensor, its dtype, its shape unless it has one dimension, its offset and element count.
_Place = tuple[Any, Any, tuple[int, ...] | None, int, int]


class _Plan:
    """How the tensors of one layout reach those of a module: bound, or copied."""

    def __init__(
        self,
        entries: list[_Entry],
        tensors: Tensors | None,
        snapshot: Snapshot,
        mode: str,
        bound: set[int],
    ) -> None:
        self.layout = snapshot.layout
        self.bound: list[_Place] = []
        # Copied by torch, because their memory is no row-major memory of the host.
        self.others: list[_Place] = []
        # Copied by the library: the index among the entries, that in the snapshot, the tensor.
        self.copied: list[tuple[int, int, Any]] = []
        listed = snapshot.places()
        places = {place[0]: (at, *place[1:]) for at, place in enumerate(listed)}
        ties = dict(snapshot.ties)
        self.tied = Tied(listed)
        sent_as = [ties.get(entry.name, entry.name) for entry in entries]
        once = [
            self.tied.add(id(entry.tensor), entry.name, sent)
            for entry, sent in zip(entries, sent_as, strict=True)
        ]
        self.overlaps = Overlaps(
            (entry.name, sent, entry.tensor)
            for entry, sent, is_first in zip(entries, sent_as, once, strict=True)
            if is_first and id(entry.tensor) not in bound
        )
        for own, entry in enumerate(entries):
            tensor = entry.tensor
            at, name, sizes, offset, length = places[sent_as[own]]
            if not once[own] or not length:
                continue
            dtype = _dtypes.torch_dtype(name)
            shape = _dtypes.torch_shape(name, tuple(sizes))
            count = length // dtype.itemsize
            place = (tensor, dtype, None if len(shape) == 1 else shape, offset, count)
            may_bind = mode == "bind" and not entry.is_buffer and not tensor.is_inference()
            # Bound, it would share its memory no longer.
            may_bind = may_bind and entry.name not in self.overlaps.names
            if not is_plain(tensor):
                self.others.append(place)
            elif may_bind and length >= BIND_FROM:
                self.bound.append(place)
            else:
                self.copied.append((own, at, tensor))
        self.copies: Copies | None = None
        if tensors is not None and self.copied:
            self.copies = Copies(tensors, [(own, at) for own, at, _ in self.copied])
        copied = [tensor for _, _, tensor in self.copied]
        # While a large tensor is copied, another thread has time to exchange the next one.
        self.held = copied if any(tensor.nbytes >= BIND_FROM for tensor in copied) else []
        written = copied + [tensor for tensor, *_ in self.bound]
        # Inference tensors count no versions: autograd saves none of them.
        self.changed = [one for one in written if one.requires_grad and not one.is_inference()]


def _check_exchanged(module: Any, before: list[tuple[str, dict[str, Any], str, Any]]) -> None:
    """Refuses a module that reads tensors elsewhere than where all modules have them."""
    left = {id(one) for one in module.state_dict(keep_vars=True).values()}
    still = [name for name, _, _, tensor in before if id(tensor) in left]
    if still:
        for _, inside, key, tensor in before:
            inside[key] = tensor
        raise WrongTypeError(
            f"{still[0]!r} has no memory yet, and its module keeps it in a place of its own, too, as "
            "TensorDictParams does: make the model where it runs, and not on the meta device"
        )


def _alike(tensor: Any, room: Any) -> Any:
    """Memory as the kind of tensor that had none."""
    import torch

    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(room, requires_grad=tensor.requires_grad)
    if type(tensor).__name__ == "Buffer":
        return type(tensor)(room)
    return room


# A forked child does not have the memory that modules are bound to. So modules get memory of
# their own before a fork, until the next version. No thread loads while the process forks.
_targets: weakref.WeakSet[ModuleTarget] = weakref.WeakSet()
_forking = threading.RLock()
_held: list[ModuleTarget] = []


def _before_fork() -> None:
    _forking.acquire()
    for target in list(_targets):
        target._lock.acquire()
        _held.append(target)
        target.release()


def _after_fork() -> None:
    while _held:
        _held.pop()._lock.release()
    _forking.release()


os.register_at_fork(
    before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
)
