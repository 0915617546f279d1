"""Loaders: where a whole version goes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from weightsync import _dtypes
from weightsync._memory import flat_bytes, is_dense, storage_of
from weightsync._source import check_whole
from weightsync._targets.base import copy_values
from weightsync._targets.writing import Overlaps, check_kept, check_memory
from weightsync.errors import UnsupportedError, WrongWeightsError
from weightsync.transfer.extractor import tensors_of
from weightsync.transfer.strategy import WeightLoader


class ModuleLoader(WeightLoader):
    """A plain torch module. Everything is compared before the first tensor is written.

    Args:
        module: what is loaded into, in place; parameters keep their memory.
        cast: whether tensors of another dtype are cast.
        strict: whether all of the module's tensors must be there.
    """

    def __init__(self, module: torch.nn.Module, *, cast: bool = False, strict: bool = True) -> None:
        self._module, self._cast, self._strict = module, cast, strict

    def most_bytes(self) -> int:
        # What is cast may come in elements of 16 bytes (complex128).
        return sum(
            one.numel() * (16 if self._cast else one.element_size())
            for one in self._own().values()
        )

    def _own(self) -> dict[str, torch.Tensor]:
        if self._strict:
            return tensors_of(self._module)
        state = self._module.state_dict(keep_vars=True)
        return {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}

    async def load_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        own = self._own()
        # First: one of a lazy module, or a nested one, has no shape to compare.
        for name in named_tensors:
            if name in own:
                check_memory(name, own[name])
        came = {name: (one.dtype, tuple(one.shape)) for name, one in named_tensors.items()}
        check_fit(own, came, cast=self._cast, strict=self._strict)
        targets, again = {name: own[name] for name in named_tensors}, self._own()
        check_kept(targets.items(), ((name, again[name]) for name in targets))
        for name, tensor in named_tensors.items():
            if not is_dense(tensor) or tensor.is_meta:
                raise WrongWeightsError(
                    f"nothing was loaded: {name} came on the meta device, nested, sparse or "
                    "quantised"
                )
            check_whole(name, tensor)
        # What lies in the module itself is written over while it is read.
        own_memory = {storage_of(one) for one in own.values()} - {0}
        named_tensors = {
            name: one.detach().clone() if storage_of(one) in own_memory else one
            for name, one in named_tensors.items()
        }
        # Tied ones too.
        Overlaps((name, name, target) for name, target in targets.items()).check(
            lambda name: flat_bytes(named_tensors[name].to(own[name].dtype)).cpu().numpy().tobytes()
        )
        for name, tensor in named_tensors.items():
            copy_values(own[name], tensor)


class EngineLoader(WeightLoader):
    """An engine's own way to load, such as a vLLM model's ``load_weights``.

    Args:
        load: takes ``(name, tensor)`` pairs; it may be a coroutine function.
        restore: brings the weights before back, exactly; called if ``load`` raises. Without it
            ``load`` must change nothing if it raises.
    """

    def __init__(
        self,
        load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any],
        restore: Callable[[], Any] | None = None,
    ) -> None:
        self._load, self._restore = load, restore

    async def load_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        try:
            await _done(self._load(iter(named_tensors.items())))
        except BaseException:
            if self._restore is not None:
                await _done(self._restore())
            raise


class VllmLoader(WeightLoader):
    """The model of a vLLM worker, in the worker's process: through vLLM's layerwise reload.

    Tensors are compared with the engine's checkpoint before the model is touched. If the load
    fails midway, the weights before come back exactly: the loader keeps the tensors of the last
    version, and before the first one it reads vLLM's own checkpoint again. The engine must not
    generate meanwhile. A worker's extension makes it:
    ``VllmLoader(self.model_runner.model, self.vllm_config)``.

    Args:
        model: the worker's model.
        vllm_config: the worker's ``VllmConfig``.

    Raises:
        UnsupportedError: if the engine has several ranks: they do not agree on a load that fails.
    """

    def __init__(self, model: Any, vllm_config: Any) -> None:
        from weightsync.vllm._load import VllmPlace

        parallel = vllm_config.parallel_config
        ranks = getattr(parallel, "world_size_across_dp", parallel.world_size)
        if ranks > 1:
            raise UnsupportedError(
                f"VllmLoader loads into an engine of one rank, and this one has {ranks}: if a load "
                "failed on one of them, the others would have the new weights; use "
                "weightsync.vllm.Trainer, whose ranks agree"
            )
        self._place = VllmPlace(vllm_config, model)
        self._checkpoint = self._place.checkpoint()
        # Of the last version, with whether they have the form that the model has in memory.
        self._before: tuple[dict[str, torch.Tensor], bool] | None = None

    async def load_weights(self, named_tensors: dict[str, torch.Tensor]) -> None:
        sent = {name: _dtypes.of_tensor(name, one) for name, one in named_tensors.items()}
        new = named_tensors, self._checkpoint.compare("what was sent", sent)
        try:
            self._take(*new)
        except BaseException:
            if self._before is None:
                self._place.load_first()
            else:
                self._take(*self._before)
            raise
        self._before = new

    def _take(self, named_tensors: dict[str, torch.Tensor], in_memory: bool) -> None:
        tensors: Iterable[tuple[str, torch.Tensor]] = named_tensors.items()
        if in_memory:
            tensors = self._checkpoint.of_memory(tensors)
        self._place.load(tensors)


def check_fit(
    own: Mapping[str, torch.Tensor],
    came: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    *,
    cast: bool = False,
    strict: bool = True,
) -> None:
    """Refuses weights that do not fit a model's own tensors.

    Args:
        own: the model's tensors by name.
        came: dtypes and shapes of the weights. A tied tensor comes under one of its names.
        cast: whether another dtype fits.
        strict: whether all of the model's tensors must be there.

    Raises:
        WrongWeightsError: naming the tensors, with what was expected and what came.
    """
    wrong = [f"{name} is unknown" for name in came if name not in own]
    for name, (dtype, shape) in came.items():
        target = own.get(name)
        if target is None:
            continue
        if tuple(target.shape) != shape or not (cast or target.dtype == dtype):
            wrong.append(
                f"{name}: expected {target.dtype} {list(target.shape)}, got {dtype} {list(shape)}"
            )
    given = {id(own[name]) for name in came if name in own}
    if strict:
        wrong += [f"{name} is missing" for name, one in own.items() if id(one) not in given]
    if wrong:
        more = f", and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise WrongWeightsError(f"nothing was loaded: {'; '.join(wrong[:8])}{more}")


async def _done(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
