"""An adapter's tensors for a sender, and a PEFT directory of each version that arrives."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import tempfile
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync import _checks, _files
from weightsync.errors import (
    LifecycleError,
    ModelError,
    SettingError,
    UnsupportedError,
    WrongTypeError,
    WrongWeightsError,
)

if TYPE_CHECKING:
    from weightsync.snapshot import Snapshot

#: The tensor, and the file, that holds an adapter's configuration as JSON.
CONFIG = "adapter_config.json"
_TENSORS = "adapter_model.safetensors"

#: What an adapter's tensors can be, under names that are made here as PEFT makes them.
_KINDS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def adapter_of(model: Any, adapter: str = "default") -> dict[str, Any]:
    """The tensors of an adapter alone, for a ``Sender``.

    They are the model's own tensors under the names of PEFT's checkpoints
    (``base_model.model.….lora_A.weight``), so each ``send()`` reads what training made of
    them. The configuration is one more tensor: ``adapter_config.json``, as bytes. So it is of
    the same version as the weights.

    A scale that ``set_scale`` or ``scale_layer`` has given to all layers alike is in the
    configuration, as it is at this call.

    Args:
        model: a PEFT model.
        adapter: the adapter's name in the model.

    Raises:
        UnsupportedError: for an adapter that has more than LoRA's pairs and
            ``modules_to_save``: trained biases, trained tokens, DoRA, or no LoRA at all; for one whose
            making has changed the base model's weights, such as PiSSA's; and for layers that were
            scaled one by one.
    """
    import torch

    config = _config_of(model, adapter)
    if reason := _not_sent(config) or _variant_of(model, adapter):
        raise UnsupportedError(
            f"the adapter {adapter!r} cannot be sent alone, because it has {reason}: "
            "send the whole model, or train without"
        )
    # As PEFT writes it, in one order: the same configuration is the same bytes.
    values = {**config.to_dict(), "inference_mode": True}
    if (factor := _factor(model, adapter)) != 1:
        values["lora_alpha"] = _whole(values["lora_alpha"] * factor)
        patterns = values.get("alpha_pattern") or {}
        values["alpha_pattern"] = {key: _whole(one * factor) for key, one in patterns.items()}
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
    return {**found, CONFIG: torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")}


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
        # As any folder; who may enter is said by the one around it.
        part.chmod(0o755)
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

    #: Its versioned name.
    name: str
    #: A number from 1 that no other adapter of this process has had; 0 for a server's, which gives
    #: numbers of its own.
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
        free = next(one for one in _choices(name, run) if one not in _used_names)
        _used_names.add(free)
        _last_number = next(one for one in itertools.count(_last_number + 1) if one not in taken)
        return free, _last_number


def _choices(name: str, run: str) -> Iterator[str]:
    """The names that a version can have, the first ones first."""
    yield name
    yield f"{name}-{run}"
    for at in itertools.count(2):
        yield f"{name}-{run}-{at}"


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
            folder = Path(_checks.absolute(folder))
            folder.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix=folder_prefix(name), dir=folder))
        if folder is not None:
            # An engine may be another user's.
            self._folder.chmod(0o755)
        self._known: dict[tuple[int, str, int], Adapter] = {}
        # Also without a call of close().
        self._remove_all = _files.removed_with(self, self._folder)

    def save(self, snapshot: Snapshot, taken: Collection[int] = ()) -> Adapter:
        """Writes the version's directory, once for each version.

        Args:
            snapshot: a version that :func:`adapter_of` made.
            taken: numbers that it must not get, such as those of an engine's other adapters.
        """
        if (known := self._saved(snapshot)) is not None:
            return known
        name = versioned_name(self.name, snapshot.version)
        return self._save(snapshot, *_use(name, snapshot.run[1], taken))

    def _save_for_server(self, snapshot: Snapshot, taken: Collection[str]) -> Adapter:
        """The same, under a name of its run: a server outlives this process and what it used."""
        if (known := self._saved(snapshot)) is not None:
            return known
        choices = _choices(versioned_name(self.name, snapshot.version), snapshot.run[1])
        next(choices)
        return self._save(snapshot, next(one for one in choices if one not in taken), 0)

    def _saved(self, snapshot: Snapshot) -> Adapter | None:
        if not self._remove_all.alive:
            raise LifecycleError("these adapters are closed")
        return self._known.get((*snapshot.run, snapshot.version))

    def _save(self, snapshot: Snapshot, name: str, number: int) -> Adapter:
        path = self._folder / name
        save_adapter(snapshot, path)
        made = Adapter(name, number, snapshot.version, snapshot.run, path)
        self._known[(*snapshot.run, snapshot.version)] = made
        return made

    def remove(self, adapter: Adapter) -> None:
        """Removes a version's directory. Its name stays used.

        Raises:
            SettingError: for an adapter that :meth:`save` of this object has not made.
        """
        if adapter not in self._known.values():
            raise SettingError(
                f"{adapter.path} is not of these adapters: give remove() what their save() returned"
            )
        shutil.rmtree(adapter.path, ignore_errors=True)

    def _forget(self, adapter: Adapter) -> None:
        """Removes it; its version can be saved again."""
        self.remove(adapter)
        self._known.pop((*adapter.run, adapter.version), None)

    def close(self) -> None:
        """Removes the directories of all versions."""
        self._remove_all()

    def __enter__(self) -> Adapters:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def folder_prefix(name: str) -> str:
    """How the folders of an adapter begin."""
    return f"weightsync-lora-{name}-"


def _checkpoint_name(name: str, adapter: str) -> str | None:
    """The name in PEFT's checkpoints, of a tensor that belongs to the adapter."""
    parts = name.split(".")
    for at, part in enumerate(parts[:-1]):
        of_adapter = part.startswith("lora_") or part == "modules_to_save"
        if of_adapter and parts[at + 1] == adapter:
            kept = at if part == "modules_to_save" else at + 1
            return ".".join(parts[:kept] + parts[at + 2 :])
    return None


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
    if getattr(config, "lora_bias", False):
        return "lora_bias"
    if getattr(config, "layer_replication", None):
        return "layer_replication, which gives the model more layers than an engine has"
    if getattr(config, "use_dora", False):
        return "DoRA"
    # Who loads the adapter has the base model's own weights.
    init = str(getattr(config, "init_lora_weights", True)).lower()
    if init.startswith(("corda", "loftq", "lora_ga", "olora", "pissa")):
        return f"init_lora_weights={init!r}, which has changed the base model's weights"
    return None


#: Variants of PEFT that train in another way, and add ``B @ A`` as LoRA does.
PLAIN_VARIANTS = ("MiCALinearVariant", "MiCAEmbeddingVariant", "VeloraLinearVariant")


def _variant_of(model: Any, adapter: str) -> str | None:
    """The variant of LoRA that a layer has, if its pair alone does not say what it adds."""
    for module in _modules(model):
        variants = getattr(module, "lora_variant", None)
        name = type(variants.get(adapter)).__name__ if isinstance(variants, Mapping) else "NoneType"
        # Engines know an aLoRA by its configuration.
        if name not in ("NoneType", "ALoraLinearVariant", *PLAIN_VARIANTS):
            return f"a LoRA of the kind {name}"
    return None


def _modules(model: Any) -> Iterator[Any]:
    return model.modules() if hasattr(model, "modules") else iter(())


def _factor(model: Any, adapter: str) -> float:
    """By what all layers are scaled, compared with what the configuration says."""
    factors = set()
    for module in _modules(model):
        scaling, alpha, rank = (getattr(module, name, None) for name in ("scaling", "lora_alpha", "r"))
        if not isinstance(scaling, Mapping) or adapter not in scaling or not isinstance(rank, Mapping):
            continue
        own = getattr(module, "use_rslora", None)
        of_config = getattr(model.peft_config[adapter], "use_rslora", False)
        is_rank_stable = own.get(adapter, False) if isinstance(own, Mapping) else of_config
        expected = alpha[adapter] / (math.sqrt(rank[adapter]) if is_rank_stable else rank[adapter])
        factors.add(round(scaling[adapter] / expected, 9) if expected else 1.0)
    if len(factors) > 1:
        raise UnsupportedError(
            f"the adapter {adapter!r} has layers that set_scale or scale_layer has scaled one by one, which "
            "its configuration cannot say: scale all alike, or send lora.merged(model)"
        )
    return factors.pop() if factors else 1.0


def _whole(value: float) -> float:
    """As an integer where it is one, as configurations have it."""
    return int(value) if value == int(value) else value


def _plain(value: Any) -> Any:
    """What JSON has no form for, as PEFT writes it: sets as lists."""
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)
