"""The weights a trainer sends: modules, state dicts, nested dicts, TensorDicts, numpy arrays.

Each send reads a source again, so that it sends a replaced parameter. Names, dtypes and
shapes are kept as long as they hold.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weightsync import _dtypes, _extra
from weightsync._gpu import Staging
from weightsync._memory import Rooms, has_address, in_order, is_hollow, is_negative
from weightsync._native import Mapping as NativeMapping
from weightsync._native import Source as NativeSource
from weightsync._native import Tensors
from weightsync._torch import without_threads
from weightsync.errors import SendError, WrongTypeError, WrongWeightsError

# A send of a tensor of this many bytes takes so long that the memory of all tensors is held.
_LARGE = 1 << 16

# A tensor by its name, and whether it is a buffer.
Found = tuple[str, Any, bool]


class Source:
    """One model's weights, as they are at each send."""

    def __init__(
        self, strategy: str = "state_dict", mapping: NativeMapping | None = None
    ) -> None:
        self._strategy = strategy
        self._mapping = mapping
        self._native: NativeSource | None = None
        self._names: list[str] = []
        self._specs: list[tuple[str, str, tuple[int, ...]]] = []
        # The weights that were placed twice in a row, and their tensors if all are torch's.
        # Weights that come once, such as weights gathered for one send, are not kept.
        self._of: Any = None
        self._tensors: Tensors | None = None
        self._rooms: Rooms | None = None
        # The weights that came last, by ids and weak references, since they are not kept.
        self._last: tuple[int, list[tuple[int, weakref.ref[Any]]]] | None = None
        # Tensors that must live as long as the native source: slices, copies from a device.
        self._kept: list[Any] = []
        # Whether the values of one are not in its memory, which looks like any other's: a negative view,
        # or elements of less than a byte out of order.
        self._has_odd = False
        self._staging = Staging()
        # The tensors whose memory is held, and the memory: another thread may exchange a
        # parameter's memory while others are read. Small tensors are read too quickly for that.
        self._held: list[Any] = []
        self._memory: list[Any] = []
        # The dtypes and shapes of the tensors in each extra state, as they were first.
        self._extra_tensors: dict[str, list[tuple[str, tuple[int, ...]]]] = {}

    def place(self, weights: Any) -> NativeSource:
        """The native source of a send. It is valid until this is called again."""
        native, tensors = self._native, self._tensors
        if native is not None and tensors is not None and self._of is weights:
            self._hold_memory()
            assert self._rooms is not None
            if self._rooms.hold() and native.place_tensors(tensors):
                return native
        self._of = self._tensors = self._rooms = None
        places = Places()
        if _dtypes.is_module(weights):
            found, extras = module_weights(weights, self._strategy, places)
        else:
            found, extras = tree(weights, places)
        with without_threads():
            native = self._build_source(weights, found, extras)
        # A module makes its extra states again at each call.
        may_look_alone = not extras and not self._has_odd
        if self._is_again(weights, found) and may_look_alone:
            self._of, self._tensors = weights, places.tensors()
            if self._tensors is not None:
                self._rooms = Rooms([one for _, one, _ in found if _dtypes.is_tensor(one)])
        return native

    def _is_again(self, weights: Any, found: list[Found]) -> bool:
        now = [(id(one), weakref.ref(_lasting(one))) for _, one, _ in found]
        last, self._last = self._last, (id(weights), now)
        if last is None or last[0] != id(weights) or len(last[1]) != len(now):
            return False
        return all(
            before == after and there() is _lasting(one)
            for (before, there), (after, _), (_, one, _) in zip(last[1], now, found, strict=True)
        )

    def _build_source(
        self, weights: Any, found: list[Found], extras: dict[str, Any]
    ) -> NativeSource:
        states: list[tuple[str, Any]] = []
        found = list(found)
        for prefix, state in extras.items():
            plain, within = _extra.split(prefix, state)
            self._compare_extra(prefix, within)
            states.append((_extra.joined(prefix, _extra.NAME), plain))
            found.extend((name, tensor, False) for name, tensor in within.items())
        specs = [(name, *_spec(name, tensor)) for name, tensor, _ in found]
        tensors = [tensor for _, tensor, _ in found]
        names = [name for name, _ in states]
        if self._native is None or specs != self._specs or names != self._names:
            _check_whole(weights, found, extras)
            buffers = [name for name, _, is_buffer in found if is_buffer]
            format = "tensordict" if self._strategy == "tensordict" else "state_dict"
            self._native = NativeSource(specs, buffers, format, states, self._mapping)
            self._specs, self._names = specs, names
        self._kept = []
        of_torch = [tensor for tensor in tensors if _dtypes.is_tensor(tensor)]
        self._held = of_torch if any(one.nbytes >= _LARGE for one in of_torch) else []
        self._hold_memory()
        odd = any(_may_be_odd(tensor) for tensor in tensors)
        self._has_odd = any(map(is_negative, of_torch)) or not all(map(_dtypes.has_strides, of_torch))
        addresses, strides = _addresses(tensors, self._kept, odd, self._staging)
        self._native.place(addresses, strides, states)
        # Tensors that exist for this send alone, such as slices, must outlive the send.
        self._kept.extend(tensors)
        return self._native

    def _compare_extra(self, prefix: str, tensors: dict[str, Any]) -> None:
        """Refuses an extra state whose tensors have changed: the layout has room for the first."""
        now = [_dtypes.of(name, tensor) for name, tensor in tensors.items()]
        before = self._extra_tensors.setdefault(prefix, now)
        if now == before:
            return

        def text(tensors: list[tuple[str, tuple[int, ...]]]) -> str:
            each = ", ".join(f"{dtype} {list(shape)}" for dtype, shape in tensors)
            return f"{len(tensors)} tensor{'' if len(tensors) == 1 else 's'} ({each or 'none'})"

        raise WrongWeightsError(
            f"the extra state of {prefix!r} had {text(before)} when this sender was made, and has "
            f"{text(now)} now: keep the tensors of a state, or make a new sender"
        )

    def release(self) -> None:
        """Releases tensors and memory that were held for a send."""
        self._memory = []
        self._kept = []
        if self._tensors is None:
            self._held = []

    def _hold_memory(self) -> None:
        self._memory = [tensor.detach() for tensor in self._held]


class Streamed:
    """Weights that are made while they are sent: a tensor lives until it has its place.

    A sender takes it in place of a model, once. The tensors come as ``(name, tensor)`` pairs in
    groups, each name once. What comes before its turn is kept.

    Args:
        specs: name, dtype (as safetensors names it) and shape of each tensor.
        groups: iterated over once, in the thread that sends.
    """

    def __init__(
        self,
        specs: list[tuple[str, str, tuple[int, ...]]],
        groups: Iterable[Iterable[tuple[str, Any]]] = (),
    ) -> None:
        self._specs = {name: (dtype, tuple(shape)) for name, dtype, shape in specs}
        self._names = list(self._specs)
        self._groups = iter(groups)
        self._waiting: dict[str, Any] = {}
        self._came: set[str] = set()
        # The one that is being copied.
        self._held: Any = None
        #: What ended it before its last tensor.
        self.failure: BaseException | None = None
        self.native = NativeSource.streamed(specs, self._fetch)

    def _fetch(self, at: int) -> int:
        try:
            self._held = None
            name = self._names[at]
            while name not in self._waiting:
                if not self._next_group():
                    raise WrongWeightsError(f"{name} is missing: no chunk has brought it")
            held = self._waiting.pop(name)
            if at == len(self._names) - 1:
                while self._next_group():
                    pass
            if held.device.type != "cpu" or _may_be_odd(held) or not held.is_contiguous():
                with without_threads():
                    held = in_order(held.detach().cpu())
            self._held = held
            return int(held.data_ptr())
        except BaseException as error:
            self.failure = error
            raise

    def _next_group(self) -> bool:
        group = next(self._groups, None)
        for name, tensor in group or ():
            if name in self._came:
                raise WrongWeightsError(f"{name} has come with an earlier chunk")
            expected, got = self._specs.get(name), _spec(name, tensor)
            if expected != got:
                raise WrongWeightsError(
                    f"{name}: expected {_in_words(expected)}, got {_in_words(got)}"
                )
            self._came.add(name)
            self._waiting[name] = tensor
        return group is not None

    def release(self) -> None:
        """Releases what was held."""
        self._held, self._waiting = None, {}


def _in_words(spec: tuple[str, tuple[int, ...]] | None) -> str:
    return "no such tensor" if spec is None else f"{spec[0]} {list(spec[1])}"


class Places:
    """The dicts and keys where tensors are, so that the next send need not search for them."""

    def __init__(self) -> None:
        self._tensors: list[tuple[dict[str, Any], str]] = []
        self._others: list[tuple[dict[str, Any], str]] = []
        self._dicts: list[dict[str, Any]] = []
        self._known = True

    def tensor(self, place: dict[str, Any], key: str) -> None:
        """Adds a tensor."""
        self._tensors.append((place, key))

    def all_of(self, module: Any) -> None:
        """Adds a module's dicts; their other entries must not change."""
        for part in (module._parameters, module._buffers):
            if not isinstance(part, dict):
                # Of a scripted module.
                self._known = False
                return
            self._dicts.append(part)
            self._others.extend((part, key) for key, value in part.items() if value is None)
        self._dicts.append(module._modules)
        self._others.extend((module._modules, key) for key in module._modules)

    def inside(self, part: Any) -> dict[str, Any]:
        """The dict that has the entries of a dict or a TensorDict."""
        found = part
        if _dtypes.is_tensordict(part):
            own = getattr(part, "__dict__", {})
            found = own.get("_tensordict")
            self._others.append((own, "_tensordict"))
        if not isinstance(found, dict):
            # Another kind of mapping, or of TensorDict.
            self._known = False
            return {}
        self._dicts.append(found)
        return found

    def entry(self, inside: dict[str, Any], key: Any, value: Any) -> None:
        """Adds an entry: a tensor, or another value that must not change."""
        if not isinstance(key, str) or inside.get(key) is not value:
            self._known = False
        elif _dtypes.is_tensor(value):
            self.tensor(inside, key)
        else:
            self._others.append((inside, key))

    def also(self, place: dict[str, Any], key: str) -> None:
        """Adds a place that must not change."""
        self._others.append((place, key))

    def tensors(self) -> Tensors | None:
        """All tensors as one native value; None if each send must search for them."""
        torch = sys.modules.get("torch")
        if torch is None or not self._known:
            return None
        return Tensors.of(torch.Tensor, self._tensors, self._others, self._dicts)


def _check_whole(weights: Any, found: list[Found], extras: dict[str, Any]) -> None:
    """Refuses a model if a part of its state, or all of it, would not be sent."""
    missing = _unsent(weights, found, extras) if _dtypes.is_module(weights) else []
    if missing:
        shown = ", ".join(map(repr, missing[:8])) + (", …" if len(missing) > 8 else "")
        raise SendError(
            f"the state dict of {type(weights).__name__} has {shown}, which are neither "
            "parameters nor buffers nor extra state, and would not be sent. Register the tensors "
            "as buffers; or, if the state dict has tensors only, send `model.state_dict()` and "
            "pass the received tensors to the worker's `load_state_dict`"
        )
    if not extras and not any(tensor.nbytes for _, tensor, _ in found):
        kind = f"a {type(weights).__name__} without" if found == [] else "nothing but empty"
        raise SendError(f"there is nothing to send: the weights are {kind} tensors")


def _unsent(module: Any, found: list[Found], extras: dict[str, Any]) -> list[str]:
    """The names that only a module's state dict has, if the module overrides how it is made."""
    import torch

    plain = torch.nn.Module
    if not any(
        type(part).state_dict is not plain.state_dict
        or type(part)._save_to_state_dict is not plain._save_to_state_dict
        or getattr(part, "_state_dict_hooks", None)
        for part in module.modules()
    ):
        return []
    names = {name for name, *_ in found}
    # A sent tensor may be in the state dict under another name.
    places = {tensor.data_ptr() for _, tensor, _ in found if _has_memory(tensor)}
    missing = []
    for name, value in module.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if name in names or value is None or (last == _extra.TORCH_NAME and prefix in extras):
            continue
        if not (_has_memory(value) and value.data_ptr() in places):
            missing.append(name)
    return missing


def _has_memory(value: Any) -> bool:
    import torch

    if not _dtypes.is_tensor(value) or isinstance(value, torch.nn.parameter.UninitializedTensorMixin):
        return False
    return value.device.type != "meta" and bool(value.nbytes)


def has_extra_state(module: Any) -> bool:
    """Whether a module defines an extra state."""
    import torch

    return type(module).get_extra_state is not torch.nn.Module.get_extra_state


def module_weights(
    module: Any, strategy: str, places: Places
) -> tuple[list[Found], dict[str, Any]]:
    """The tensors of a module by dotted names, and its extra states as they are now."""
    found: list[Found] = []
    extras: dict[str, Any] = {}
    for prefix, _, inside, key, tensor, is_buffer in module_tensors(module, strategy):
        found.append((_extra.joined(prefix, key), tensor, is_buffer))
        places.tensor(inside, key)
    for prefix, part in module.named_modules(remove_duplicate=False):
        places.all_of(part)
        if has_extra_state(part):
            extras[prefix] = part.get_extra_state()
    return found, extras


def module_tensors(
    module: Any, strategy: str
) -> Iterator[tuple[str, Any, dict[str, Any], str, Any, bool]]:
    """Every tensor of a module: prefix, owner, the dict it is in, key, tensor, is a buffer.

    A state dict leaves out buffers that are not persistent; a tensordict has them.
    """
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, tensor in owner._parameters.items():
            if tensor is not None:
                yield prefix, owner, owner._parameters, key, tensor, False
        transient = owner._non_persistent_buffers_set if strategy == "state_dict" else ()
        for key, tensor in owner._buffers.items():
            if tensor is not None and key not in transient:
                yield prefix, owner, owner._buffers, key, tensor, True


def tree(
    weights: Any, places: Places | None = None
) -> tuple[list[Found], dict[str, Any]]:
    """The tensors of a state dict, a nested dict or a TensorDict, by dotted names."""
    found: list[Found] = []
    extras: dict[str, Any] = {}
    if not isinstance(weights, Mapping) and not _dtypes.is_tensordict(weights):
        raise WrongTypeError(
            f"weights are a torch module, a state dict, a nested dict of tensors or arrays, or a "
            f"TensorDict, not a {type(weights).__name__}"
        )
    # Not a function within this one: see `_extra`.
    _walk(weights, "", places or Places(), found, extras)
    return found, extras


def _walk(
    part: Any, prefix: str, places: Places, found: list[Found], extras: dict[str, Any]
) -> None:
    inside = places.inside(part)
    for key, value in part.items():
        places.entry(inside, key, value)
        key = ".".join(key) if isinstance(key, tuple) else key
        if not isinstance(key, str):
            raise WrongTypeError(f"{prefix or 'the weights'} have the key {key!r}: names are text")
        name = _extra.joined(prefix, key)
        last = key.rpartition(".")[2]
        if last in (_extra.NAME, _extra.TORCH_NAME):
            extras[name.rpartition(".")[0]] = value
        elif _dtypes.is_tensor(value) or _dtypes.is_array(value):
            found.append((name, value, _is_buffer(value)))
        elif isinstance(value, Mapping) or _dtypes.is_tensordict(value):
            _walk(value, name, places, found, extras)
        elif value is not None:
            if _dtypes.is_module(value):
                raise WrongTypeError(
                    f"{name!r} is a {type(value).__name__}, a module: several models are given as "
                    f"models={{{name!r}: …}}, and one as itself"
                )
            raise WrongTypeError(
                f"{name!r} is a {type(value).__name__}: weights are tensors and arrays, "
                f"and plain data under {_extra.NAME!r}"
            )


def _is_buffer(value: Any) -> bool:
    return type(value).__name__ == "Buffer"


def _spec(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    if _dtypes.is_tensor(tensor) and tensor.device.type == "meta":
        raise WrongWeightsError(f"tensor {name!r} is on the meta device and has no values to send")
    spec = _dtypes.of(name, tensor)
    check_whole(name, tensor)
    return spec


def check_whole(name: str, tensor: Any) -> None:
    """Refuses a tensor whose memory was taken away.

    Raises:
        SendError: naming it.
    """
    if is_hollow(tensor):
        raise SendError(
            f"{name!r} has no memory: its storage was taken away, as FSDP1 does between "
            "forwards. Send the gathered state dict"
        )


def check_readable(name: str, tensor: Any) -> None:
    """Refuses a tensor that cannot be read where it lies: what reads there would end the process.

    Raises:
        SendError, WrongTypeError, WrongWeightsError: naming it.
    """
    _spec(name, tensor)
    if tensor.numel() and not has_address(tensor):
        raise WrongWeightsError(
            f"{name!r} is a {type(tensor).__name__}, which has no memory of its own: send the whole "
            "tensor, or its local part"
        )


def _lasting(tensor: Any) -> Any:
    """What lives as long as a tensor. `torch.utils.swap_tensors` refuses one with weak references."""
    if _dtypes.is_tensor(tensor):
        try:
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            # One of another class may have none.
            pass
    return tensor


def _may_be_odd(tensor: Any) -> bool:
    """Whether a tensor's memory may have the conjugate, or the negative, of its values.

    Such a tensor can be contiguous.
    """
    return _dtypes.is_tensor(tensor) and (tensor.is_complex() or tensor.is_neg())


def _addresses(
    tensors: list[Any], kept: list[Any], odd: bool, staging: Staging
) -> tuple[list[int], dict[int, list[int]] | None]:
    """The current addresses of tensors, and the strides of tensors that are not row-major.

    A tensor on a device is copied to the host first: of a GPU into ``staging``, of another device
    into memory that is put into ``kept``.
    """
    try:
        # The usual case, which must be quick also with very many tensors.
        if not odd and all([tensor.is_cpu and tensor.is_contiguous() for tensor in tensors]):
            return [tensor.data_ptr() for tensor in tensors], None
    except AttributeError:
        pass
    staged = staging.copy(tensors)
    addresses: list[int] = []
    strides: dict[int, list[int]] = {}
    for at, tensor in enumerate(tensors):
        tensor = staged.get(at, tensor)
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
        ordered = _dtypes.packed_in_order(tensor)
        if ordered is not tensor:
            tensor = ordered
            kept.append(tensor)
        addresses.append(tensor.data_ptr())
        if not tensor.is_contiguous():
            strides[at] = list(tensor.stride())
    return addresses, strides or None
