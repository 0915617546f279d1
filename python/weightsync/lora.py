"""LoRA: an adapter sent alone, or merged into its base weights on the way.

:func:`adapter_of` gives the tensors of a PEFT model's adapter to a ``Sender``, and
:class:`Adapters` makes each version that arrives a PEFT directory under a name of its own.
:class:`VllmAdapters` loads these into a vLLM engine. :func:`merged` gives the whole model with the
adapter added to its weights.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import (
    LifecycleError,
    LoadError,
    ModelError,
    SettingError,
    UnsupportedError,
    WrongTypeError,
    WrongWeightsError,
)

if TYPE_CHECKING:
    from weightsync.snapshot import Snapshot

__all__ = [
    "CONFIG",
    "Adapter",
    "Adapters",
    "VllmAdapters",
    "adapter_of",
    "merged",
    "save_adapter",
    "versioned_name",
]

#: The tensor, and the file, that holds an adapter's configuration as JSON.
CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"
_PREFIX = "base_model.model."

#: What an adapter's tensors can be, under names that are made here as PEFT makes them.
_KINDS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")

logger = logging.getLogger("weightsync")


def adapter_of(model: Any, adapter: str = "default") -> dict[str, Any]:
    """The tensors of an adapter alone, for a ``Sender``.

    They are the model's own tensors under the names of PEFT's checkpoints
    (``base_model.model.….lora_A.weight``), so each ``send()`` reads what training made of
    them. The configuration is one more tensor: ``adapter_config.json``, as bytes. So it is of
    the same version as the weights.

    Args:
        model: a PEFT model.
        adapter: the adapter's name in the model.

    Raises:
        UnsupportedError: for an adapter that has more than LoRA's pairs and
            ``modules_to_save``: trained biases, trained tokens, DoRA, or no LoRA at all.
    """
    import torch

    config = _config_of(model, adapter)
    if reason := _not_sent(config):
        raise UnsupportedError(
            f"the adapter {adapter!r} has {reason}, which cannot be sent alone: "
            "send the whole model, or train without"
        )
    # As PEFT writes it, in one order: the same configuration is the same bytes.
    values = {**config.to_dict(), "inference_mode": True}
    text = json.dumps(values, sort_keys=True, default=_plain)
    found: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        if (own := _checkpoint_name(name, adapter)) is not None:
            kind = re.search(rf"\.(lora_\w+)\.{re.escape(adapter)}(?:\.|$)", name)
            if kind and kind[1] not in _KINDS:
                raise UnsupportedError(
                    f"{name} cannot be sent with an adapter: expected {', '.join(_KINDS)}"
                )
            found[own] = tensor
    if not found:
        raise WrongWeightsError(f"the model has no tensors of the adapter {adapter!r}")
    return {**found, CONFIG: torch.tensor(list(text.encode()), dtype=torch.uint8)}


def versioned_name(name: str, version: int) -> str:
    """The name of one version of an adapter: ``policy-v12``."""
    return f"{name}-v{version}"


def save_adapter(snapshot: Snapshot, folder: str | Path) -> None:
    """Writes a version that :func:`adapter_of` made as a PEFT directory.

    PEFT, transformers and engines load it. The folder must not exist. It has its name only once
    it is whole.
    """
    from safetensors.torch import save_file

    if CONFIG not in snapshot:
        raise WrongWeightsError(
            f"the version has no {CONFIG}: expected the tensors of weightsync.lora.adapter_of"
        )
    folder = Path(folder)
    if folder.exists():
        raise SettingError(f"{folder} exists: give each version a folder of its own")
    part = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        tensors = {name: snapshot[name] for name in snapshot if name != CONFIG}
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, part / _TENSORS, metadata={"format": "pt"})
        (part / CONFIG).write_bytes(bytes(snapshot[CONFIG].tolist()))
        part.rename(folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


@dataclass(frozen=True)
class Adapter:
    """One version of an adapter, as a PEFT directory."""

    #: Its versioned name, which no other adapter of this process has had.
    name: str
    #: A number from 1 that no other adapter of this process has had.
    number: int
    #: The version, and the run that it is of.
    version: int
    run: tuple[int, str]
    #: The directory.
    path: Path


#: The names and the last number that adapters of this process have had. Engines cache by them.
_used_names: set[str] = set()
_last_number = 0
_using = threading.Lock()


def _use(name: str, run: str, taken: Collection[int]) -> tuple[str, int]:
    """A name and a number that no adapter has had, and that none will have from now on."""
    global _last_number
    with _using:
        others = (f"{name}-{run}-{at}" for at in itertools.count(2))
        choices = itertools.chain([name, f"{name}-{run}"], others)
        free = next(one for one in choices if one not in _used_names)
        _used_names.add(free)
        _last_number = next(one for one in itertools.count(_last_number + 1) if one not in taken)
        return free, _last_number


class Adapters:
    """The versions of one adapter, each in a directory of its own.

    Args:
        name: the adapter's name, such as ``"policy"``: version 12 is ``"policy-v12"``.
        folder: where a folder for the directories is made, under a new name for each object;
            that of temporary files without it.

    The directories end with the object, so keep it, or call :meth:`close`.

    No name, number or path is used twice in a process, whichever object used it. If a name was
    used, as by a trainer before its restart, the version is ``"policy-v12-"`` and the run's id.
    Processes that load into one server need names of their own.
    """

    def __init__(self, name: str, folder: str | Path | None = None) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise SettingError(
                f"the adapter's name {name!r} cannot be a folder's: use letters, digits, '.', '_', '-'"
            )
        self.name = name
        if folder is not None:
            folder = Path(folder).absolute()
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=f"weightsync-lora-{name}-", dir=folder))
        self._known: dict[tuple[int, str, int], Adapter] = {}
        # Also if nobody calls close().
        self._remove_all = weakref.finalize(self, _remove_folder, self._folder, os.getpid())

    def save(self, snapshot: Snapshot, taken: Collection[int] = ()) -> Adapter:
        """Writes the version's directory, once for each version.

        Args:
            snapshot: a version that :func:`adapter_of` made.
            taken: numbers that it must not get, such as those of an engine's other adapters.
        """
        if not self._remove_all.alive:
            raise LifecycleError("these adapters are closed")
        key = (*snapshot.run, snapshot.version)
        if key in self._known:
            return self._known[key]
        name, number = _use(versioned_name(self.name, snapshot.version), snapshot.run[1], taken)
        path = self._folder / name
        save_adapter(snapshot, path)
        made = Adapter(name, number, snapshot.version, snapshot.run, path)
        self._known[key] = made
        return made

    def remove(self, adapter: Adapter) -> None:
        """Removes a version's directory. Its name stays used."""
        shutil.rmtree(adapter.path, ignore_errors=True)

    def _forget(self, adapter: Adapter) -> None:
        """Removes it; its version can be saved once more, under another name."""
        self.remove(adapter)
        self._known.pop((*adapter.run, adapter.version), None)

    def close(self) -> None:
        """Removes the directories of all versions."""
        self._remove_all()

    def __enter__(self) -> Adapters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove_folder(folder: Path, process: int) -> None:
    # A process that was forked has the object, too, and not the folder.
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)


class VllmAdapters:
    """Brings an adapter's versions into a vLLM ``LLM`` that was made with ``enable_lora=True``::

        adapters = weightsync.lora.VllmAdapters(llm, "policy")
        request = adapters.load(receiver.receive())
        llm.generate(prompts, sampling, lora_request=request)

    Each version is a LoRA of its own name, number and path, which vLLM caches by. So no request
    gets weights of another version than its name says. Give the engine room for two:
    ``max_loras=2``, or ``max_cpu_loras=2``.

    Raises:
        UnsupportedError: for an engine that is called with ``await``, such as ``AsyncLLM``.
    """

    def __init__(self, llm: Any, name: str, folder: str | Path | None = None) -> None:
        self._engine = getattr(llm, "llm_engine", llm)
        if not hasattr(self._engine, "add_lora"):
            raise WrongTypeError(f"expected a vllm.LLM, got {type(llm).__name__}")
        if inspect.iscoroutinefunction(self._engine.add_lora):
            raise UnsupportedError(
                f"{type(self._engine).__name__}.add_lora is called with await, and load() waits for "
                "nothing: make the directory with Adapters.save(snapshot), and give its name, "
                "number and path to the engine's own add_lora as a LoRARequest"
            )
        self._adapters = Adapters(name, folder)
        self._live: tuple[Adapter, Any] | None = None
        self._closed = False

    @property
    def live(self) -> Adapter | None:
        """The version that was loaded last."""
        return self._live[0] if self._live else None

    def load(self, snapshot: Snapshot) -> Any:
        """Loads a version and returns its ``LoRARequest``, for ``generate``.

        The engine then unloads the version before it, and its directory is removed: call this
        when no request uses that one any more. If loading fails, the version before it stays, and
        the same snapshot can be loaded once more.

        Raises:
            LoadError: if the engine refuses the version.
        """
        if self._closed:
            raise LifecycleError("these adapters are closed")
        made = self._adapters.save(snapshot, self._engine.list_loras())
        if self._live and self._live[0] == made:
            return self._live[1]
        if not made.path.exists():
            raise LoadError(f"{made.name} was live before and has been removed: send it once more")
        with self._undone(made):
            request = import_module("vllm.lora.request").LoRARequest(
                lora_name=made.name, lora_int_id=made.number, lora_path=str(made.path)
            )
            try:
                loaded = self._engine.add_lora(request)
            except Exception as error:
                raise LoadError(f"the engine cannot load {made.name}: {error}") from error
            if not loaded:
                raise LoadError(f"the engine did not load {made.name}")
        before, self._live = self._live, (made, request)
        if before:
            try:
                self._engine.remove_lora(before[0].number)
            except Exception as error:
                logger.warning(
                    "%s is live, but the engine did not unload %s: %s",
                    made.name,
                    before[0].name,
                    str(error),
                )
            self._adapters.remove(before[0])
        return request

    @contextlib.contextmanager
    def _undone(self, made: Adapter) -> Iterator[None]:
        """After an error, neither the engine nor the disk has the version."""
        try:
            yield
        except BaseException:
            # It may have failed in one of the engine's processes alone.
            with contextlib.suppress(Exception):
                self._engine.remove_lora(made.number)
            self._adapters._forget(made)
            raise

    def close(self) -> None:
        """Unloads the adapter and removes its directories."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._live:
                self._engine.remove_lora(self._live[0].number)
        finally:
            self._adapters.close()

    def __enter__(self) -> VllmAdapters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def merged(
    weights: Any,
    *,
    alpha: float | None = None,
    r: int | None = None,
    adapter: str = "default",
    fan_in_fan_out: bool | None = None,
) -> dict[str, Any]:
    """The base model's weights with a LoRA added: ``W + (alpha / r) * B @ A``.

    Give it to ``Sender(…)`` and to each ``send(weights=…)``. The names are the base model's.
    Weights without LoRA are the model's own tensors; the others are new ones, of the same
    dtype, computed in float32 (float64 for float64) and rounded once.

    Args:
        weights: a PEFT model, or its state dict. A state dict does not say whether it is merged
            already, nor what its configuration is: give a model if you have one.
        alpha: LoRA's alpha. A PEFT model's own scaling is used without it; a state dict
            needs it.
        r: the rank, if it is not that of the ``lora_A``.
        adapter: the adapter's name in the model.
        fan_in_fan_out: whether the adapted weights lie transposed, as GPT-2's ``Conv1D`` has
            them. A model says it of each layer; a state dict does not, so ``False`` is taken.

    Raises:
        UnsupportedError: for what has another result than the sum: DoRA and other variants,
            aLoRA, LoRA on embeddings and convolutions, LoRA with a bias, trained tokens, base
            weights that are quantised, and layers that are merged already.
    """
    import torch

    modules: dict[str, Any] = {}
    tensors = weights
    if not isinstance(weights, Mapping):
        if not hasattr(weights, "named_modules"):
            raise WrongTypeError(
                f"expected a PEFT model or its state dict, got {type(weights).__name__}"
            )
        modules = dict(weights.named_modules())
        tensors = weights.state_dict()
        _check_mergeable(weights, modules, adapter)
    made: dict[str, Any] = {}
    originals: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if ".trainable_tokens_" in name:
            raise UnsupportedError(f"{name} cannot be merged: train without trainable_token_indices")
        if lora := re.fullmatch(rf"(.*)\.(lora_[A-Za-z_]+)\.{re.escape(adapter)}(?:\.(.+))?", name):
            of, kind, end = lora.groups()
            if kind not in ("lora_A", "lora_B") or end != "weight" or tensor.ndim != 2:
                raise UnsupportedError(f"{name} cannot be merged: LoRA of linear layers can")
            parts.setdefault(of, {})[kind] = tensor
        elif ".lora_" in name:
            continue
        elif ".original_module." in name:
            own = name.removeprefix(_PREFIX).replace(".original_module.", ".")
            originals[own] = tensor
        elif (own := _base_name(name, adapter)) is not None:
            made[own] = tensor
    if not parts:
        raise WrongWeightsError(f"there are no tensors of the adapter {adapter!r}")
    # What only another adapter has trained whole.
    for name, tensor in originals.items():
        made.setdefault(name, tensor)
    for of, pair in parts.items():
        base = _base_name(f"{of}.weight", adapter) or of
        if missing := {"lora_A", "lora_B"} - pair.keys():
            raise WrongWeightsError(f"{of} lacks {missing.pop()}.{adapter}.weight")
        if base not in made:
            raise WrongWeightsError(f"{of} lacks base_layer.weight")
        module = modules.get(of)
        scaling = _scaling(of, pair["lora_A"], module, alpha, r, adapter)
        weight = made[base].detach()
        if weight.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedError(
                f"{base} is {weight.dtype} and cannot be merged: expected float64, float32, "
                "float16 or bfloat16, so load the base model without quantisation"
            )
        exact = torch.float64 if weight.dtype == torch.float64 else torch.float32
        change = pair["lora_B"].detach().to(exact) @ pair["lora_A"].detach().to(exact)
        transposed = fan_in_fan_out
        if transposed is None:
            transposed = getattr(module, "fan_in_fan_out", False)
        if transposed:
            change = change.T
        if change.shape != weight.shape:
            raise WrongWeightsError(
                f"{base} is {list(weight.shape)} and B @ A is {list(change.shape)}"
            )
        made[base] = (weight.to(exact) + scaling * change).to(weight.dtype)
    return made


def _check_mergeable(model: Any, modules: Mapping[str, Any], adapter: str) -> None:
    """What a PEFT model says of itself, and its tensors do not."""
    config = (getattr(model, "peft_config", None) or {}).get(adapter)
    if getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedError(
            f"the adapter {adapter!r} is an aLoRA, which acts on some tokens alone and cannot be "
            "merged: send it alone, with adapter_of"
        )
    if getattr(config, "trainable_token_indices", None):
        raise UnsupportedError(
            f"the adapter {adapter!r} has trainable_token_indices and cannot be merged: "
            "train without"
        )
    for name, module in modules.items():
        if not hasattr(module, "lora_A"):
            continue
        if getattr(module, "merged", False):
            raise UnsupportedError(
                f"{name} is merged already, and would get its LoRA twice: call the model's "
                "unmerge_adapter() before"
            )
        if variant := getattr(module, "lora_variant", {}).get(adapter):
            raise UnsupportedError(
                f"{name} has a LoRA of the kind {type(variant).__name__}, which cannot be merged: "
                "expected plain LoRA or rsLoRA"
            )


def _scaling(
    of: str, low: Any, module: Any, alpha: float | None, r: int | None, adapter: str
) -> float:
    if alpha is not None:
        return float(alpha / (r or low.shape[0]))
    known = getattr(module, "scaling", None)
    if not isinstance(known, Mapping) or adapter not in known:
        raise SettingError(f"alpha is missing: nothing says how {of} is scaled")
    return float(known[adapter])


def _checkpoint_name(name: str, adapter: str) -> str | None:
    """The name in PEFT's checkpoints, of a tensor that belongs to the adapter."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        of_adapter = part.startswith("lora_") or part == "modules_to_save"
        if of_adapter and parts[at + 1] == adapter:
            kept = at if part == "modules_to_save" else at + 1
            return ".".join(parts[:kept] + parts[at + 2 :])
    return None


def _base_name(name: str, adapter: str) -> str | None:
    """The base model's name of a tensor, or None for one that it does not have."""
    name = name.removeprefix(_PREFIX)
    if saved := re.fullmatch(r"(.*)\.modules_to_save\.([^.]+)\.(.*)", name):
        return f"{saved[1]}.{saved[3]}" if saved[2] == adapter else None
    return name.replace(".base_layer.", ".")


def _config_of(model: Any, adapter: str) -> Any:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        raise WrongTypeError(f"expected a PEFT model, got {type(model).__name__}")
    if adapter not in configs:
        raise ModelError(
            f"the model has no adapter {adapter!r}; it has {', '.join(map(repr, configs))}"
        )
    return configs[adapter]


def _not_sent(config: Any) -> str | None:
    """What an adapter has that is not sent under PEFT's names."""
    kind = getattr(config, "peft_type", None) or "LORA"
    kind = str(getattr(kind, "value", kind))
    if kind != "LORA":
        return f"the peft_type {kind}"
    if (bias := getattr(config, "bias", None) or "none") != "none":
        return f"bias={bias!r}"
    if getattr(config, "trainable_token_indices", None):
        return "trainable_token_indices"
    return "DoRA" if getattr(config, "use_dora", False) else None


def _plain(value: Any) -> Any:
    """What JSON has no form for, as PEFT writes it: sets as lists."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
