"""Element types: safetensors' names next to torch's and numpy's."""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from weightsync._checks import text
from weightsync.errors import WrongTypeError, WrongWeightsError

if TYPE_CHECKING:
    import numpy as np
    import torch

# safetensors' name: torch's name, which is numpy's and ml_dtypes' too.
_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

# Two elements to a byte: torch counts the bytes, safetensors the elements.
PACKED = "F4"
_TORCH_PACKED = "float4_e2m1fn_x2"


@cache
def _by_torch() -> dict[torch.dtype, str]:
    import torch

    known = {name: getattr(torch, own, None) for name, own in _NAMES.items()}
    known[PACKED] = getattr(torch, _TORCH_PACKED, None)
    return {dtype: name for name, dtype in known.items() if dtype is not None}


@cache
def _to_torch() -> dict[str, torch.dtype]:
    return {name: dtype for dtype, name in _by_torch().items()}


def of_tensor(name: str, tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    """The dtype's name and the shape of a tensor, both as in safetensors."""
    import torch

    text("the name of a tensor", name)
    if is_lazy(tensor):
        raise WrongWeightsError(
            f"tensor {name!r} has no shape yet, because its module is lazy: run the module once "
            "before it is sent"
        )
    if tensor.is_nested:
        raise WrongTypeError(f"tensor {name!r} is nested: send its parts, each as a tensor")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise WrongTypeError(
            f"tensor {name!r} is {'quantised' if tensor.is_quantized else tensor.layout}: "
            "send dense tensors, such as its parts"
        )
    found = _by_torch().get(tensor.dtype)
    if found is None:
        raise WrongTypeError(
            f"tensor {name!r} is {tensor.dtype}, which cannot be sent: possible are "
            + ", ".join(str(dtype) for dtype in _by_torch())
        )
    shape = tuple(tensor.shape)
    if found == PACKED:
        shape = (*shape[:-1], shape[-1] * 2) if shape else shape
    return found, shape


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor can be read by its strides, which count elements: not if two share a byte, unless
    it is row-major."""
    return tensor.is_contiguous() or tensor.dtype is not _to_torch().get(PACKED)


def packed_in_order(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a row-major copy of its bytes if it cannot be read by its strides."""
    import torch

    return tensor if has_strides(tensor) else tensor.view(torch.uint8).contiguous()


def torch_dtype(name: str) -> torch.dtype:
    """torch's dtype for a name of safetensors."""
    try:
        return _to_torch()[name]
    except KeyError:
        raise WrongTypeError(f"this torch has no dtype for {name}") from None


def torch_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """torch's shape for a shape of safetensors."""
    if name == PACKED and shape:
        if shape[-1] % 2:
            raise WrongTypeError(
                f"torch has no tensor of F4 with an odd last dimension, as of {list(shape)}: it holds two "
                "elements in a byte; write the version with save_safetensors, or pull it, and read its "
                "bytes"
            )
        return (*shape[:-1], shape[-1] // 2)
    return shape


@cache
def has_torch() -> bool:
    """Whether torch is installed."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def zeros(name: str, shape: tuple[int, ...]) -> Any:
    """A tensor in the host's memory, or an array where torch is not installed."""
    if has_torch():
        import torch

        return torch.zeros(torch_shape(name, shape), dtype=torch_dtype(name), device="cpu")
    import numpy as np

    return np.zeros(shape, numpy_dtype(name))


def is_of_torch_itself(value: object) -> bool:
    """Whether it is a torch tensor, or a parameter, and of no other class."""
    torch = sys.modules.get("torch")
    return torch is not None and type(value) in (torch.Tensor, torch.nn.Parameter)


def is_lazy(tensor: Any) -> bool:
    """Whether it is a torch tensor of a lazy module, which has no shape yet."""
    if is_of_torch_itself(tensor):
        # Torch's own test for a parameter takes as long as all other questions.
        return False
    from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

    return isinstance(tensor, (UninitializedBuffer, UninitializedParameter))


def of_array(name: str, array: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """The dtype's name and the shape of a numpy array."""
    text("the name of a tensor", name)
    own = array.dtype.name
    for found, known in _NAMES.items():
        if known == own and array.dtype.isnative:
            return found, array.shape
    raise WrongTypeError(
        f"array {name!r} is {array.dtype}, which cannot be sent: possible are "
        + ", ".join(_NAMES.values())
        + " in this machine's byte order"
    )


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype for a name of safetensors: numpy's, or ml_dtypes' where numpy has none."""
    import numpy as np

    try:
        known = _NAMES[name]
    except KeyError:
        raise WrongTypeError(f"numpy has no dtype for {name}: read the tensor with torch") from None
    try:
        return np.dtype(known)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise WrongTypeError(
            f"numpy has no {known}: install ml_dtypes, or read the tensor with torch"
        ) from None
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, known))
    return found


def of(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    """The dtype's name and the shape of a torch tensor or a numpy array."""
    return of_tensor(name, tensor) if is_tensor(tensor) else of_array(name, tensor)


def name_of(dtype: Any) -> str:
    """safetensors' name of a dtype of torch or numpy, or of such a dtype's name."""
    torch = sys.modules.get("torch")
    if isinstance(dtype, str) or (torch is not None and isinstance(dtype, torch.dtype)):
        word = str(dtype).removeprefix("torch.")
    else:
        # numpy's dtypes and scalar types: np.dtype("float32"), np.float32.
        word = str(getattr(dtype, "name", None) or getattr(dtype, "__name__", ""))
    if word in _NAMES:
        return word
    for name, known in _NAMES.items():
        if known == word:
            return name
    raise WrongTypeError(
        f"there is no dtype {dtype!r} here: pass a dtype of torch or numpy, or a name such as "
        '"bfloat16" or "BF16"'
    )


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: object) -> bool:
    """Whether it is a numpy array, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def is_module(value: object) -> bool:
    """Whether it is a torch module, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def is_tensordict(value: object) -> bool:
    """Whether it is a TensorDict, without importing tensordict."""
    tensordict = sys.modules.get("tensordict")
    return tensordict is not None and isinstance(value, tensordict.TensorDictBase)
