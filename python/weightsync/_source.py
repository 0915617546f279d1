"""What the trainer sends from: modules, state dicts, nested dicts, TensorDicts, numpy.

A source is looked at anew for each send, so that a replaced parameter is what is
sent; what was found out about names, dtypes and shapes is kept as long as it holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from weightsync import _dtypes, _extra
from weightsync._native import Source as NativeSource

# A tensor by its name, and whether it is a buffer.
Found = tuple[str, Any, bool]


class Source:
    """One model's weights, as they are at each send."""

    def __init__(self, strategy: str = "state_dict") -> None:
        self._strategy = strategy
        self._native: NativeSource | None = None
        self._names: list[str] = []
        self._specs: list[tuple[str, str, tuple[int, ...]]] = []
        self._walk: _ModuleWalk | None = None
        self._shapes: list[Any] = []
        self._types: list[Any] = []
        self._odd = False
        # What must stay as long as the native source: slices, copies from a device.
        self._kept: list[Any] = []

    def place(self, weights: Any) -> NativeSource:
        """The source of a send. It lives as long as this source is not placed again."""
        if _dtypes.is_module(weights):
            walk = self._walk
            if walk is None or walk.module is not weights:
                self._walk = walk = _ModuleWalk(weights, self._strategy)
            elif walk.holds() and self._placed_again(walk.tensors, walk.extras()):
                assert self._native is not None
                return self._native
            found, extras = walk.look(), walk.extras()
        else:
            self._walk = None
            found, extras = tree(weights)
        return self._place_anew(found, extras)

    def _placed_again(self, tensors: list[Any], extras: dict[str, Any]) -> bool:
        """Places tensors that are the same objects as before, if they still fit."""
        assert self._native is not None
        if extras:
            # Their tensors are new ones each time.
            return False
        try:
            shapes = [tensor.shape for tensor in tensors]
        except AttributeError:
            return False
        if shapes != self._shapes or [tensor.dtype for tensor in tensors] != self._types:
            return False
        self._kept = []
        self._native.place(*_addresses(tensors, self._kept, self._odd))
        return True

    def _place_anew(self, found: list[Found], extras: dict[str, Any]) -> NativeSource:
        states: list[tuple[str, Any]] = []
        found = list(found)
        for prefix, state in extras.items():
            plain, tensors = _extra.split(prefix, state)
            states.append((_extra.joined(prefix, _extra.NAME), plain))
            found.extend((name, tensor, False) for name, tensor in tensors.items())
        specs = [(name, *_spec(name, tensor)) for name, tensor, _ in found]
        tensors = [tensor for _, tensor, _ in found]
        names = [name for name, _ in states]
        if self._native is None or specs != self._specs or names != self._names:
            buffers = [name for name, _, is_buffer in found if is_buffer]
            format = "tensordict" if self._strategy == "tensordict" else "state_dict"
            self._native = NativeSource(specs, buffers, format, states)
            self._specs, self._names = specs, names
        self._kept = []
        self._shapes = [tensor.shape for tensor in tensors]
        self._types = [tensor.dtype for tensor in tensors]
        self._odd = any(_may_be_odd(tensor) for tensor in tensors)
        self._native.place(*_addresses(tensors, self._kept, self._odd), states)
        # Tensors that exist for this send alone, such as slices, must outlive it.
        self._kept.extend(tensors)
        return self._native


class _ModuleWalk:
    """A module's tensors, and where in it they are."""

    def __init__(self, module: Any, strategy: str) -> None:
        self.module = module
        self._strategy = strategy
        self.tensors: list[Any] = []
        self._slots: list[tuple[dict[str, Any], str]] = []
        self._extras: list[tuple[str, Any]] = []
        self._counts: list[tuple[dict[str, Any], int]] = []

    def look(self) -> list[Found]:
        """Walks the whole module."""
        found: list[Found] = []
        self.tensors, self._slots, self._counts, self._extras = [], [], [], []
        for prefix, module, slots, key, tensor, is_buffer in module_tensors(
            self.module, self._strategy
        ):
            found.append((_extra.joined(prefix, key), tensor, is_buffer))
            self.tensors.append(tensor)
            self._slots.append((slots, key))
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for part in (module._parameters, module._buffers, module._modules):
                self._counts.append((part, len(part)))
            if has_extra_state(module):
                self._extras.append((prefix, module))
        return found

    def holds(self) -> bool:
        """Whether the module still has the same tensors in the same places."""
        if any(len(part) != count for part, count in self._counts):
            return False
        slots = zip(self._slots, self.tensors, strict=True)
        return all(part.get(key) is tensor for (part, key), tensor in slots)

    def extras(self) -> dict[str, Any]:
        """The extra states as they are now."""
        return {prefix: module.get_extra_state() for prefix, module in self._extras}


def has_extra_state(module: Any) -> bool:
    """Whether a module defines an extra state."""
    import torch

    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def module_tensors(
    module: Any, strategy: str
) -> Iterator[tuple[str, Any, dict[str, Any], str, Any, bool]]:
    """Every tensor of a module: prefix, owner, the dict it is in, key, tensor, is a buffer.

    A state dict leaves buffers out that are not persistent; a tensordict has them.
    """
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in owner._parameters.items():
            if tensor is not None:
                yield prefix, owner, owner._parameters, key, tensor, False
        transient = owner._non_persistent_buffers_set if strategy == "state_dict" else ()
        for key, tensor in owner._buffers.items():
            if tensor is not None and key not in transient:
                yield prefix, owner, owner._buffers, key, tensor, True


def tree(weights: Any) -> tuple[list[Found], dict[str, Any]]:
    """The tensors of a state dict, a nested dict or a TensorDict, by dotted names."""
    found: list[Found] = []
    extras: dict[str, Any] = {}

    def walk(part: Any, prefix: str) -> None:
        for key, value in part.items():
            key = ".".join(key) if isinstance(key, tuple) else key
            if not isinstance(key, str):
                raise TypeError(f"{prefix or 'the weights'} have the key {key!r}: names are text")
            name = _extra.joined(prefix, key)
            last = key.rpartition(".")[2]
            if last in (_extra.NAME, _extra.TORCH_NAME):
                extras[name.rpartition(".")[0]] = value
            elif _dtypes.is_tensor(value) or _dtypes.is_array(value):
                found.append((name, value, _is_buffer(value)))
            elif isinstance(value, Mapping) or _dtypes.is_tensordict(value):
                walk(value, name)
            elif value is not None:
                raise TypeError(
                    f"{name!r} is a {type(value).__name__}: weights are tensors and arrays, "
                    f"and plain data under {_extra.NAME!r}"
                )

    if not isinstance(weights, Mapping) and not _dtypes.is_tensordict(weights):
        raise TypeError(
            f"weights are a torch module, a state dict, a nested dict of tensors or arrays, or a "
            f"TensorDict, not a {type(weights).__name__}"
        )
    walk(weights, "")
    return found, extras


def _is_buffer(value: Any) -> bool:
    return type(value).__name__ == "Buffer"


def _spec(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    if _dtypes.is_tensor(tensor):
        if tensor.device.type == "meta":
            raise ValueError(f"tensor {name!r} is on the meta device and has no values to send")
        return _dtypes.of_tensor(name, tensor)
    return _dtypes.of_array(name, tensor)


def _may_be_odd(tensor: Any) -> bool:
    """Whether what lies in memory may be the conjugate, or the negative, of its values.

    Those can be contiguous, and asking each tensor again at each send would cost more
    than all else that is asked.
    """
    return _dtypes.is_tensor(tensor) and (tensor.is_complex() or tensor.is_neg())


def _addresses(
    tensors: list[Any], kept: list[Any], odd: bool
) -> tuple[list[int], dict[int, list[int]] | None]:
    """Where tensors are now, with the strides of those that are not row-major.

    One on a device is copied to the host first; the copies are put into ``kept``.
    """
    try:
        # The usual case, and with very many tensors the one that counts.
        if not odd and all([tensor.is_cpu and tensor.is_contiguous() for tensor in tensors]):
            return [tensor.data_ptr() for tensor in tensors], None
    except AttributeError:
        pass
    addresses: list[int] = []
    strides: dict[int, list[int]] = {}
    for at, tensor in enumerate(tensors):
        if _dtypes.is_array(tensor):
            addresses.append(tensor.__array_interface__["data"][0])
            if not tensor.flags.c_contiguous:
                if any(step % tensor.itemsize for step in tensor.strides):
                    tensor = tensor.copy()
                    kept.append(tensor)
                    addresses[-1] = tensor.__array_interface__["data"][0]
                else:
                    strides[at] = [step // tensor.itemsize for step in tensor.strides]
            continue
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
            kept.append(tensor)
        if not tensor.is_cpu:
            tensor = tensor.detach().to("cpu")
            kept.append(tensor)
        addresses.append(tensor.data_ptr())
        if not tensor.is_contiguous():
            strides[at] = list(tensor.stride())
    return addresses, strides or None
