"""What a worker loads into: a module, a TensorDict, a dict of tensors or arrays.

The library calls ``layout``, ``shape`` and ``load``; ``load`` is called at safe
points only, and again with the version before if a set fails midway.
"""

from __future__ import annotations

import abc
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from weightsync import _dtypes, _extra, _guard
from weightsync._guard import loading
from weightsync._native import Copies, Layout, Snapshot, Tensors
from weightsync._source import Places, has_extra_state, module_tensors, tree
from weightsync.errors import LifecycleError, LoadError, SettingError, UnsupportedError, WrongTypeError, WrongWeightsError

# Smaller tensors are copied where others are bound: the copy is quicker than the binding.
BIND_FROM = 64 * 1024


def target_of(model: Any, mode: str) -> Target:
    """The target of a worker's model."""
    if mode not in ("bind", "copy"):
        raise SettingError(f'mode: expected "bind" or "copy", got {mode!r}')
    if _dtypes.is_module(model):
        return ModuleTarget(model, mode)
    if isinstance(model, Mapping) or _dtypes.is_tensordict(model):
        return TreeTarget(model)
    if all(callable(getattr(model, name, None)) for name in ("layout", "shape", "load")):
        return cast("Target", model)
    raise WrongTypeError(
        "a worker's model is a torch module, a TensorDict, a dict of tensors or arrays, or has "
        f"methods layout, shape and load; not a {type(model).__name__}"
    )


class Target(abc.ABC):
    """A place for weights; what :func:`target_of` makes of a model."""

    @abc.abstractmethod
    def layout(self) -> Layout:
        """The names, dtypes and shapes that the model has room for."""

    @abc.abstractmethod
    def shape(self, layout: Layout) -> bool:
        """Learns the sender's names, dtypes and shapes; returns whether the model took them."""

    @abc.abstractmethod
    def load(self, snapshot: Snapshot) -> None:
        """Loads a whole version."""

    def release(self) -> None:
        """Releases the sender's memory; what was loaded stays."""


class ModuleTarget(Target):
    """A torch module. In ``bind`` mode its larger parameters lie in the version itself.

    Parameters stay the objects they are: what else refers to them sees the new
    values. Buffers are copied, because workers write them.
    """

    def __init__(self, module: Any, mode: str = "bind") -> None:
        self._module = weakref.ref(module)
        self._mode = mode
        # The sender's, once it is known: state dicts leave some buffers out, and extra
        # state has the room that the sender gave it.
        self._sent: dict[str, tuple[str, tuple[int, ...]]] | None = None
        self._entries: list[_Entry] = []
        self._layout: Layout | None = None
        self._tensors: Tensors | None = None
        self._planned: _Plan | None = None
        # Whether the module was just looked at: a load is asked for the layout first.
        self._fresh = False
        self._bound: list[Any] = []
        # The module may be unbound by a thread that forks while another loads.
        self._lock = threading.RLock()
        _targets.add(self)

    def layout(self) -> Layout:
        with self._lock:
            self._the_module()
            if self._layout is None or not self._holds():
                self._look()
            assert self._layout is not None
            self._fresh = True
            return self._layout

    def shape(self, layout: Layout) -> bool:
        with self._lock, not_inferring():
            self._sent = {name: (dtype, tuple(shape)) for name, dtype, shape in layout.tensors()}
            self._layout, self._fresh = None, False
            return self._materialise()

    def load(self, snapshot: Snapshot) -> None:
        with loading, self._lock, not_inferring():
            if not self._fresh:
                self.layout()
            self._fresh = False
            if not self._bind(snapshot, self._plan(snapshot)):
                # Something has become of a tensor since it was looked at a moment ago.
                self._look()
                if not self._bind(snapshot, self._plan(snapshot)):
                    raise LoadError(
                        "another thread replaces the module's tensors while a version is loaded: "
                        "let it do so inside `with receiver.frozen():`"
                    )
            states = snapshot.extra_states
            if states:
                self._load_extra(snapshot, states)

    def release(self) -> None:
        with self._lock, not_inferring():
            _exchange([(tensor, tensor.detach().clone()) for tensor in self._bound])
            self._bound = []

    def _bind(self, snapshot: Snapshot, plan: _Plan) -> bool:
        """Brings a version into the module; False if a tensor is not what was planned for."""
        import torch

        plan.tied.check(snapshot)
        staged: list[tuple[Any, Any]] = []
        # Another thread may exchange a parameter's memory while it is written.
        memory = [tensor.detach() for tensor in plan.held]
        view = snapshot.view() if plan.bound or plan.others else None
        for tensor, dtype, shape, offset, count in plan.bound:
            over = torch.frombuffer(view, dtype=dtype, count=count, offset=offset)
            staged.append((tensor, over if shape is None else over.view(shape)))
        if plan.copies is not None:
            if not snapshot.copy_into(plan.copies):
                return False
        elif plan.copied:
            snapshot.copy_to(
                [(at, tensor.data_ptr(), tensor.nbytes) for _, at, tensor in plan.copied]
            )
        _exchange(staged)
        self._bound = [tensor for tensor, _ in staged]
        for tensor, dtype, shape, offset, count in plan.others:
            over = torch.frombuffer(view, dtype=dtype, count=count, offset=offset)
            _copy(tensor, over if shape is None else over.view(shape))
        del memory
        if plan.changed:
            # What autograd has saved of them is not what they are any more.
            torch.autograd.graph.increment_version(plan.changed)
        return True

    def _plan(self, snapshot: Snapshot) -> _Plan:
        """Which tensor of the snapshot goes where, and how."""
        plan, layout = self._planned, snapshot.layout
        if plan is None or plan.layout != layout:
            self._planned = plan = _Plan(self._entries, self._tensors, snapshot, self._mode)
        return plan

    def _look(self) -> None:
        module = self._the_module()
        self._entries = []
        specs: list[tuple[str, str, tuple[int, ...]]] = []
        sent = self._sent
        for prefix, _, inside, key, tensor, is_buffer in module_tensors(module, "tensordict"):
            name = _extra.joined(prefix, key)
            if sent is not None:
                if is_buffer and name not in sent and self._is_transient(module, prefix, key):
                    continue
            elif is_buffer and self._is_transient(module, prefix, key):
                continue
            self._entries.append(_Entry(name, inside, key, tensor, is_buffer))
            specs.append((name, *_dtypes.of_tensor(name, tensor)))
        if sent is not None:
            self._extras = [
                (prefix, part)
                for prefix, part in module.named_modules(remove_duplicate=False)
                if has_extra_state(part)
            ]
            prefixes = {prefix for prefix, _ in self._extras}
            for name, spec in sent.items():
                if _extra.is_extra(name) and _prefix(name) in prefixes:
                    specs.append((name, *spec))
        self._kinds = self._kinds_now()
        self._counts = [
            (part, len(part))
            for _, owner in module.named_modules(remove_duplicate=False)
            for part in (owner._parameters, owner._buffers)
        ]
        self._parts = [
            (owner._modules, list(owner._modules.values()))
            for _, owner in module.named_modules(remove_duplicate=False)
        ]
        self._layout = Layout(specs)
        self._planned = None
        places = Places()
        for entry in self._entries:
            places.tensor(entry.inside, entry.key)
        for _, part in module.named_modules(remove_duplicate=False):
            places.all_of(part)
        self._tensors = places.tensors()
        _guard.cover(module)

    def _holds(self) -> bool:
        if self._tensors is not None:
            return self._tensors.hold()
        if any(len(part) != count for part, count in self._counts):
            return False
        # A part that was replaced keeps its own tensors where they are.
        if any(list(part.values()) != parts for part, parts in self._parts):
            return False
        # A scripted module's are no dicts, and have no `get`.
        if not all([
            entry.key in entry.inside and entry.inside[entry.key] is entry.tensor
            for entry in self._entries
        ]):
            return False
        return self._kinds_now() == self._kinds

    def _kinds_now(self) -> tuple[list[Any], ...]:
        """What ``tensor.data = …`` and ``module.to(…)`` change of the same objects."""
        tensors = [entry.tensor for entry in self._entries]
        return (
            [tensor.shape for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            [tensor.is_cpu for tensor in tensors],
            [tensor.is_contiguous() for tensor in tensors],
        )

    def _is_transient(self, module: Any, prefix: str, key: str) -> bool:
        return key in module.get_submodule(prefix)._non_persistent_buffers_set

    def _materialise(self) -> bool:
        """Gives parameters without shapes, or without memory, those of the sender."""
        import torch

        module, sent, took = self._the_module(), self._sent or {}, False
        made: dict[int, Any] = {}
        with torch.no_grad():
            for prefix, owner, inside, key, tensor, is_buffer in list(
                module_tensors(module, "tensordict")
            ):
                name = _extra.joined(prefix, key)
                lazy = _dtypes.is_lazy(tensor)
                if not lazy and tensor.device.type != "meta":
                    continue
                known = sent.get(name)
                if known is None and is_buffer and not lazy:
                    raise WrongWeightsError(
                        f"buffer {name!r} has no values here, and is not persistent, so a state "
                        'dict does not have it: send with strategy="tensordict"'
                    )
                if known is None:
                    continue
                dtype = _dtypes.torch_dtype(known[0])
                shape = _dtypes.torch_shape(*known)
                if lazy:
                    tensor.materialize(shape, dtype=dtype)
                    took = True
                    continue
                if id(tensor) not in made:
                    room = torch.zeros(tuple(tensor.shape), dtype=tensor.dtype)
                    made[id(tensor)] = _alike(tensor, room)
                inside[key] = made[id(tensor)]
        return took

    def _load_extra(self, snapshot: Snapshot, names: list[str]) -> None:
        own = dict(self._extras)
        for name in names:
            prefix = _prefix(name)
            state = _extra.join(prefix, snapshot.extra_state(name), View(snapshot).copy)
            own[prefix].set_extra_state(state)

    def _the_module(self) -> Any:
        module = self._module()
        if module is None:
            raise LifecycleError(
                "the worker's module was freed: keep a reference to it as long as its receiver lives"
            )
        return module


class _Entry:
    """One tensor of a module, and where in it it is."""

    __slots__ = ("inside", "is_buffer", "key", "name", "tensor")

    def __init__(
        self, name: str, inside: dict[str, Any], key: str, tensor: Any, is_buffer: bool
    ) -> None:
        self.name, self.inside, self.key = name, inside, key
        self.tensor, self.is_buffer = tensor, is_buffer


# A tensor, its dtype, its shape if that is not flat, its offset and elements.
_Place = tuple[Any, Any, tuple[int, ...] | None, int, int]


class _Plan:
    """How the tensors of one layout reach a module's."""

    def __init__(
        self, entries: list[_Entry], tensors: Tensors | None, snapshot: Snapshot, mode: str
    ) -> None:
        self.layout = snapshot.layout
        self.bound: list[_Place] = []
        self.others: list[_Place] = []
        # The place among the entries, the place in the snapshot, the tensor.
        self.copied: list[tuple[int, int, Any]] = []
        listed = snapshot.places()
        places = {place[0]: (at, *place[1:]) for at, place in enumerate(listed)}
        ties = dict(snapshot.ties)
        self.tied = _Tied(listed)
        for own, entry in enumerate(entries):
            tensor, sent = entry.tensor, ties.get(entry.name, entry.name)
            at, name, sizes, offset, length = places[sent]
            if not self.tied.add(id(tensor), entry.name, sent) or not length:
                continue
            dtype = _dtypes.torch_dtype(name)
            shape = _dtypes.torch_shape(name, tuple(sizes))
            count = length // dtype.itemsize
            place = (tensor, dtype, None if len(shape) == 1 else shape, offset, count)
            odd = tensor.is_conj() or tensor.is_neg()
            if odd or not tensor.is_cpu or not tensor.is_contiguous():
                self.others.append(place)
            elif (
                mode == "bind"
                and not entry.is_buffer
                and length >= BIND_FROM
                and not tensor.is_inference()
            ):
                self.bound.append(place)
            else:
                self.copied.append((own, at, tensor))
                # Two parameters may share memory as well as be one.
                self.tied.add(_memory_of(tensor), entry.name, sent)
        self.copies: Copies | None = None
        if tensors is not None and self.copied:
            self.copies = Copies(tensors, [(own, at) for own, at, _ in self.copied])
        # One that is large takes so long that another thread could exchange what comes after.
        of_all = [tensor for _, _, tensor in self.copied]
        self.held = of_all if any(tensor.nbytes >= BIND_FROM for tensor in of_all) else []
        written = [tensor for _, _, tensor in self.copied]
        written += [tensor for tensor, *_ in self.bound]
        # Inference tensors count no versions: autograd saves none of them.
        self.changed = [one for one in written if one.requires_grad and not one.is_inference()]


class _Tied:
    """Names that are one tensor here, and may be several in what was sent."""

    def __init__(self, listed: list[tuple[str, str, list[int], int, int]]) -> None:
        # The places of a snapshot.
        self._listed = listed
        self._first: dict[Any, tuple[str, str]] = {}
        self._differ: list[tuple[str, str, str, str]] = []

    def add(self, tensor: Any, name: str, sent: str) -> bool:
        """A tensor by what identifies it, its name, and the name it was sent by.

        Returns:
            Whether it is the first of its kind.
        """
        first = self._first.setdefault(tensor, (name, sent))
        # What has no memory has no values either.
        if tensor is None or first[0] == name:
            return True
        if first[1] != sent:
            self._differ.append((*first, name, sent))
        return False

    def check(self, snapshot: Snapshot) -> None:
        """Compares what was sent by several names, and is one tensor here."""
        if not self._differ:
            return
        places = {name: (offset, length) for name, _, _, offset, length in self._listed}
        for one, sent, other, also in self._differ:
            (start, length), (begin, size) = places[sent], places[also]
            # Released before it raises: an exception that is kept would keep the version.
            with memoryview(snapshot.view()) as view:
                same = length == size and _same(
                    view[start : start + length], view[begin : begin + size]
                )
            if not same:
                raise WrongWeightsError(
                    f"{one!r} and {other!r} are tied here: one tensor has both names. They were "
                    f"sent as {sent!r} and {also!r}, with different values: tie them in the "
                    "trainer too, or untie them here"
                )


def _same(one: memoryview, other: memoryview) -> bool:
    """Whether two views of as many bytes are equal: in parts, as objects that compare quickly."""
    part = 1 << 20
    return all(
        bytes(one[at : at + part]) == bytes(other[at : at + part])
        for at in range(0, len(one), part)
    )


def _is_contiguous(tensor: Any) -> bool:
    """Of a tensor or an array."""
    if _dtypes.is_array(tensor):
        return bool(tensor.flags.c_contiguous)
    return bool(tensor.is_contiguous())


def _memory_of(tensor: Any) -> tuple[int, int] | None:
    """Where the values of a tensor or an array are; None if it has none."""
    if not tensor.nbytes:
        return None
    if _dtypes.is_array(tensor):
        return tensor.__array_interface__["data"][0], tensor.nbytes
    return tensor.data_ptr(), tensor.nbytes


def _copy(tensor: Any, over: Any) -> None:
    """Copies values as torch does, whatever the memory of either is."""
    import torch

    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.copy_(over)


class TreeTarget(Target):
    """A TensorDict or a nested dict of tensors or arrays: written in place.

    An empty dict takes the sender's tensors, under dotted names.
    """

    def __init__(self, weights: Any) -> None:
        self._weights = weights
        self._sent: list[tuple[str, str, list[int]]] = []

    def layout(self) -> Layout:
        found, _ = tree(self._weights)
        specs: list[tuple[str, str, Sequence[int]]] = []
        for name, tensor, _ in found:
            of = _dtypes.of_tensor if _dtypes.is_tensor(tensor) else _dtypes.of_array
            specs.append((name, *of(name, tensor)))
        own = {name for name, _, _ in specs}
        # Extra state is put into the dict as it comes, under its own name.
        specs.extend(
            spec for spec in self._sent if _extra.is_extra(spec[0]) and spec[0] not in own
        )
        return Layout(specs)

    def shape(self, layout: Layout) -> bool:
        self._sent = layout.tensors()
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
        found, _ = tree(self._weights)
        tied = _Tied(listed)
        for name, tensor, _ in found:
            sent = ties.get(name, name)
            # A transposed view has the same memory and other bytes.
            if _is_contiguous(tensor):
                tied.add(_memory_of(tensor), name, sent)
            if _dtypes.is_array(tensor):
                if tensor.flags.c_contiguous and tensor.flags.writeable:
                    address = tensor.__array_interface__["data"][0]
                    copies.append((places[sent], address, tensor.nbytes))
                else:
                    others.append((tensor, sent))
            elif tensor.is_cpu and tensor.is_contiguous() and not _is_odd(tensor):
                copies.append((places[sent], tensor.data_ptr(), tensor.nbytes))
                kept.append(tensor.detach())
            else:
                others.append((tensor, sent))
        tied.check(snapshot)
        snapshot.copy_to(copies)
        del kept
        if others:
            view = View(snapshot)
            for tensor, sent in others:
                if _dtypes.is_array(tensor):
                    tensor[...] = view.array(sent)
                else:
                    _copy(tensor, view.tensor(sent))
        for name in snapshot.extra_states:
            prefix = _prefix(name)
            state = _extra.join(prefix, snapshot.extra_state(name), View(snapshot).copy)
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


def weights_of(snapshot: Snapshot) -> dict[str, Any]:
    """Torch tensors over a snapshot, by name, and each extra state as what it was; tied ones
    under each of their names."""
    view = View(snapshot)
    found = view.all(view.tensor, lambda name: not _extra.is_extra(name))
    for name in snapshot.extra_states:
        found[name] = _extra.join(_prefix(name), snapshot.extra_state(name), view.copy)
    return found


def arrays_of(snapshot: Snapshot) -> dict[str, Any]:
    """numpy arrays over a snapshot, by name; tied ones under each of theirs."""
    view = View(snapshot)
    return view.all(view.array)


class View:
    """A snapshot's tensors, one by one: what is not asked for may be of any dtype."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._view = snapshot.view()
        self.places = {place[0]: place[1:] for place in snapshot.places()}
        self.ties = dict(snapshot.ties)

    def tensor(self, name: str) -> Any:
        import torch

        dtype, sizes, offset, length = self.places[self.ties.get(name, name)]
        own = _dtypes.torch_dtype(dtype)
        shape = _dtypes.torch_shape(dtype, tuple(sizes))
        if not length:
            return torch.empty(shape, dtype=own)
        count = length // own.itemsize
        return torch.frombuffer(self._view, dtype=own, count=count, offset=offset).view(shape)

    def array(self, name: str) -> Any:
        try:
            import numpy as np
        except ImportError:
            raise UnsupportedError(
                "neither torch nor numpy is installed here, so tensors cannot be looked at: "
                "install one of them, or save_safetensors"
            ) from None

        dtype, shape, offset, length = self.places[self.ties.get(name, name)]
        own = _dtypes.numpy_dtype(dtype)
        if not length:
            return np.empty(shape, dtype=own)
        count = length // own.itemsize
        view: Any = self._view
        return np.frombuffer(view, dtype=own, count=count, offset=offset).reshape(shape)

    def copy(self, name: str, kind: str) -> Any:
        # Not by way of torch, whose bfloat16 and float8 cannot become arrays.
        return self.array(name).copy() if kind == "array" else self.tensor(name).clone()

    def all(
        self, one: Callable[[str], Any], wanted: Callable[[str], bool] = lambda _: True
    ) -> dict[str, Any]:
        found = {name: one(name) for name in self.places if wanted(name)}
        return found | {alias: found[of] for alias, of in self.ties.items() if wanted(alias)}


def _prefix(name: str) -> str:
    """The module of an extra state's name."""
    parts = name.split(".")
    cut = -2 if parts[-2:-1] == [_extra.TENSORS] else -1
    return ".".join(parts[:cut])


def _alike(tensor: Any, room: Any) -> Any:
    """Memory as the kind of tensor that had none."""
    import torch

    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(room, requires_grad=tensor.requires_grad)
    if type(tensor).__name__ == "Buffer":
        return type(tensor)(room)
    return room


def _exchange(places: list[tuple[Any, Any]]) -> None:
    """Gives each tensor the memory of another.

    As ``tensor.data = over`` does, which keeps the interpreter's lock while it waits for a lock of
    autograd's. Another thread may have that one, and wait for the interpreter's: a thread that uses
    a parameter with gradients takes them in this order. This operator releases the interpreter's.
    """
    import torch

    set_data = torch.ops.aten.set_data.default
    # Another thread may be about to count itself among those that use the memory of before.
    before = [tensor.detach() for tensor, _ in places]
    for tensor, over in places:
        set_data(tensor, over)
    del before


def not_inferring() -> contextlib.AbstractContextManager[Any]:
    """What is made meanwhile is no inference tensor, wherever the worker calls from."""
    torch = sys.modules.get("torch")
    return contextlib.nullcontext() if torch is None else torch.inference_mode(False)


def _is_odd(tensor: Any) -> bool:
    """Whether its memory is the conjugate, or the negative, of its values."""
    return bool(tensor.is_conj() or tensor.is_neg())


# A forked child does not have the memory that modules are bound to: before a fork they
# get memory of their own, until the next version. Nobody loads while the fork is made.
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
