"""LoRA: adapters alone under versioned names, and merged into their base weights."""

import gc
import json
import logging
import os
import threading
from types import SimpleNamespace

import pytest
import torch
import weightsync
from ends import pair, pass_on
from safetensors.torch import load_file
from torch import nn
from weightsync import lora

#: What PEFT calls a weight of the adapted model.
QUERY = "base_model.model.layers.0.q_proj"


class Config:
    """What a PEFT config has: values that JSON has, and a set."""

    def to_dict(self):
        return {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": {"q_proj", "k_proj"},
            "inference_mode": False,
        }


class Linear(nn.Module):
    """A linear layer with LoRA, and PEFT's names."""

    def __init__(self, into, out, dtype=torch.float32):
        super().__init__()
        self.base_layer = nn.Linear(into, out, dtype=dtype)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(into, 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, out, bias=False)})
        self.scaling = {"default": 2.0}


def _peft(dtype=torch.float32):
    """A module of PEFT's form."""
    torch.manual_seed(0)
    layer = nn.ModuleDict(
        {
            "q_proj": Linear(6, 5, dtype),
            "k_proj": Linear(6, 3, dtype),
            "norm": nn.LayerNorm(6, dtype=dtype),
        }
    )
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = nn.ModuleDict({"layers": nn.ModuleList([layer])})
    model.peft_config = {"default": Config()}
    return model


def _step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape).to(parameter.dtype))


def test_adapter_is_sent_alone_with_its_config(tmp_path):
    model = _peft()
    tensors = lora.adapter_of(model)
    assert sorted(tensors) == sorted(
        [lora.CONFIG]
        + [f"base_model.model.layers.0.{part}_proj.lora_{side}.weight" for part in "qk" for side in "AB"]
    )
    with pair(tensors) as (sender, receiver):
        for step in range(3):
            snapshot = receiver.latest()
            folder = tmp_path / str(step)
            lora.save_adapter(snapshot, folder)
            config = json.loads((folder / "adapter_config.json").read_text())
            assert (config["r"], config["target_modules"]) == (4, ["k_proj", "q_proj"])
            assert config["inference_mode"] is True
            saved = load_file(folder / "adapter_model.safetensors")
            assert lora.CONFIG not in saved
            assert torch.equal(
                saved[f"{QUERY}.lora_A.weight"],
                model.base_model.model["layers"][0]["q_proj"].lora_A["default"].weight,
            )
            _step(model)
            pass_on(sender, receiver)
        with pytest.raises(weightsync.SettingError, match="exists"):
            lora.save_adapter(snapshot, folder)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["0", "1", "2"]


def test_adapter_names_are_used_once():
    assert lora.versioned_name("policy", 12) == "policy-v12"
    model = _peft()
    with lora.Adapters("once") as adapters:
        names, numbers = [], []
        # Two trainers, one after the other: both begin with version 1.
        for _ in range(2):
            with pair(lora.adapter_of(model)) as (sender, receiver):
                for _ in range(2):
                    snapshot = receiver.latest()
                    made = adapters.save(snapshot)
                    assert adapters.save(snapshot) == made
                    assert (made.version, made.run) == (snapshot.version, snapshot.run)
                    names.append(made.name)
                    numbers.append(made.number)
                    pass_on(sender, receiver)
        assert names[:2] == ["once-v1", "once-v2"]
        assert len(set(names)) == 4 and len(set(numbers)) == 4
        with lora.Adapters("once") as others:
            following = range(max(numbers) + 1, max(numbers) + 100)
            assert others.save(snapshot, taken=following).number == following.stop
            with pytest.raises(weightsync.SettingError, match="not of these adapters"):
                others.remove(made)
            assert made.path.exists()
        folder = made.path.parent
        adapters.remove(made)
        assert not made.path.exists() and adapters.save(snapshot) == made
    assert not folder.exists()
    with pytest.raises(weightsync.LifecycleError, match="closed"):
        adapters.save(snapshot)
    with pytest.raises(weightsync.SettingError, match="folder's"):
        lora.Adapters("a/b")


def test_adapters_share_no_name_number_or_path(tmp_path):
    with pair(lora.adapter_of(_peft())) as (_, receiver):
        snapshot = receiver.latest().copy()
    for folder in (None, tmp_path / "new"):
        made = []

        def save(folder=folder, made=made):
            # Never closed, as by a process that ended early.
            made.append((adapters := lora.Adapters("shared", folder), adapters.save(snapshot)))

        threads = [threading.Thread(target=save) for _ in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        saved = [one for _, one in made]
        for field in ("name", "number", "path"):
            assert len({getattr(one, field) for one in saved}) == 4
        assert len({one.path.parent for one in saved}) == 4
        assert all(one.name.startswith("shared-v1") for one in saved)
        assert all(one.path.exists() for one in saved)
        if folder:
            assert all(one.path.parent.parent == folder for one in saved)
        made.clear()
        gc.collect()
        assert not any(one.path.parent.exists() for one in saved)


def test_forked_process_keeps_the_directories():
    with lora.Adapters("forked") as adapters:
        if (child := os.fork()) == 0:
            adapters.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert adapters._folder.exists()


class Engine:
    """What an engine of vLLM has for LoRA."""

    def __init__(self):
        self.loaded = {}
        self.fails = False
        self.keeps = False
        self.names = set()
        self.paths = set()

    def add_lora(self, request):
        # What vLLM caches by.
        assert request.lora_name not in self.names and request.lora_path not in self.paths
        assert request.lora_int_id not in self.loaded
        self.names.add(request.lora_name)
        self.paths.add(request.lora_path)
        self.loaded[request.lora_int_id] = load_file(f"{request.lora_path}/adapter_model.safetensors")
        if self.fails:
            # In one of its processes.
            raise ValueError("no such module")
        return True

    def remove_lora(self, number):
        if self.keeps:
            raise RuntimeError("the engine is busy")
        del self.loaded[number]
        return True

    def list_loras(self):
        return set(self.loaded)


@pytest.fixture
def vllm(monkeypatch):
    """The one thing that is imported from vLLM."""
    request = SimpleNamespace(LoRARequest=SimpleNamespace)
    monkeypatch.setitem(__import__("sys").modules, "vllm.lora.request", request)


@pytest.mark.usefixtures("vllm")
def test_engine_keeps_the_old_adapter_if_loading_fails():
    model, engine = _peft(), Engine()
    with (
        pair(lora.adapter_of(model)) as (sender, receiver),
        lora.VllmAdapters(SimpleNamespace(llm_engine=engine), "failing") as adapters,
    ):
        first = adapters.load(receiver.latest())
        assert (first.lora_name, list(engine.loaded)) == ("failing-v1", [first.lora_int_id])
        assert adapters.load(receiver.latest()) is first
        _step(model)
        pass_on(sender, receiver)
        engine.fails = True
        for _ in range(2):
            with pytest.raises(weightsync.LoadError, match="failing-v2.*: no such module"):
                adapters.load(receiver.latest())
            assert adapters.live.name == "failing-v1"
            assert list(engine.loaded) == [first.lora_int_id]
        engine.fails = False
        # The same snapshot, once the engine has mended.
        second = adapters.load(receiver.latest())
        assert second.lora_name.startswith("failing-v2-")
        assert list(engine.loaded) == [second.lora_int_id]
        assert [one.name for one in adapters.live.path.parent.iterdir()] == [second.lora_name]
        assert torch.equal(
            engine.loaded[second.lora_int_id][f"{QUERY}.lora_B.weight"],
            model.base_model.model["layers"][0]["q_proj"].lora_B["default"].weight,
        )
    assert not engine.loaded


@pytest.mark.usefixtures("vllm")
def test_new_adapter_is_live_if_the_old_one_stays(caplog):
    model, engine = _peft(), Engine()
    with (
        pair(lora.adapter_of(model)) as (sender, receiver),
        lora.VllmAdapters(engine, "staying") as adapters,
    ):
        first = adapters.load(receiver.latest())
        _step(model)
        pass_on(sender, receiver)
        engine.keeps = True
        with caplog.at_level(logging.WARNING, "weightsync"):
            second = adapters.load(receiver.latest())
        assert "staying-v2 is live" in caplog.text and "busy" in caplog.text
        assert adapters.live.name == second.lora_name == "staying-v2"
        assert set(engine.loaded) == {first.lora_int_id, second.lora_int_id}
        engine.keeps = False
    assert set(engine.loaded) == {first.lora_int_id}


@pytest.mark.usefixtures("vllm")
def test_two_objects_load_into_one_engine(tmp_path):
    engine = Engine()
    with pair(lora.adapter_of(_peft())) as (_, receiver):
        # The engine's own: a number that would be next.
        with lora.Adapters("next") as probe:
            taken = probe.save(receiver.latest()).number + 1
        engine.loaded[taken] = None
        requests = []
        for folder in (None, None, tmp_path, tmp_path):
            # Never closed.
            adapters = lora.VllmAdapters(engine, "twice", folder)
            requests.append(adapters.load(receiver.latest()))
        assert len({one.lora_name for one in requests}) == 4
        assert len(engine.loaded) == 5 and engine.loaded[taken] is None
        adapters.close()


def test_engine_that_is_awaited_is_refused():
    class AsyncLLM(Engine):
        async def add_lora(self, request):
            raise AssertionError(request)

    with pytest.raises(weightsync.UnsupportedError, match=r"AsyncLLM.add_lora.*Adapters\.save"):
        lora.VllmAdapters(AsyncLLM(), "policy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_merged_weights_are_those_of_torch(dtype):
    model = _peft(dtype)
    worker = {name: torch.zeros_like(one) for name, one in lora.merged(model).items()}
    assert sorted(worker) == sorted(
        f"layers.0.{name}"
        for name in ["q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "norm.weight", "norm.bias"]
    )
    with pair(lora.merged(model), worker) as (sender, receiver):
        for _ in range(3):
            _step(model)
            pass_on(sender, receiver, weights=lora.merged(model))
            for name, layer in model.base_model.model["layers"][0].items():
                got = worker[f"layers.0.{name}.weight"]
                if name == "norm":
                    assert torch.equal(got, layer.weight)
                    continue
                low, high = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                expected = layer.base_layer.weight.double() + 2.0 * (high.double() @ low.double())
                # Half a unit of the dtype, and what float32 loses of a sum of four.
                unit = torch.finfo(dtype).eps
                exact = 1e-12 if dtype == torch.float64 else 1e-5
                torch.testing.assert_close(
                    got.double(), expected.detach(), rtol=unit / 2 + exact, atol=exact
                )
                assert torch.equal(worker[f"layers.0.{name}.bias"], layer.base_layer.bias)
    same = lora.merged(model.state_dict(), alpha=8)
    assert all(torch.equal(one, worker[name]) for name, one in same.items())


def test_what_cannot_be_merged_is_named():
    model = _peft()
    state = model.state_dict()
    base = f"{QUERY}.base_layer.weight"
    without = {name: one for name, one in state.items() if not name.endswith("q_proj.lora_B.default.weight")}
    embedding = {**state, "base_model.model.e.lora_embedding_A.default": torch.ones(2, 2)}
    magnitude = {**state, f"{QUERY}.lora_magnitude_vector.default.weight": torch.ones(5)}
    convolution = {**state, f"{QUERY}.lora_A.default.weight": torch.ones(4, 6, 1, 1)}
    deeper = {**state, f"{QUERY}.lora_sampler.default.a.b": torch.ones(1)}
    tokens = {**state, "base_model.model.e.token_adapter.trainable_tokens_delta.default": torch.ones(1)}
    packed = {**state, base: torch.ones(5, 6, dtype=torch.uint8)}
    unsupported = weightsync.UnsupportedError
    for weights, how, error, words in [
        (state, {}, weightsync.SettingError, "alpha is missing"),
        (without, {"alpha": 8}, weightsync.WrongWeightsError, "lacks lora_B.default.weight"),
        (embedding, {"alpha": 8}, unsupported, "lora_embedding_A"),
        (magnitude, {"alpha": 8}, unsupported, "lora_magnitude_vector"),
        (convolution, {"alpha": 8}, unsupported, "lora_A.default.weight cannot be merged"),
        (deeper, {"alpha": 8}, unsupported, "lora_sampler"),
        (tokens, {"alpha": 8}, unsupported, "trainable_token_indices"),
        (packed, {"alpha": 8}, unsupported, "q_proj.weight is torch.uint8.*without quantisation"),
        (model, {"adapter": "other"}, weightsync.WrongWeightsError, "no tensors of the adapter 'other'"),
        (3, {}, weightsync.WrongTypeError, "PEFT model"),
    ]:
        with pytest.raises(error, match=words):
            lora.merged(weights, **how)


def test_model_that_cannot_be_merged_is_refused():
    for name, value, words in [
        ("alora_invocation_tokens", [1], "aLoRA.*adapter_of"),
        ("trainable_token_indices", [1], "trainable_token_indices"),
        ("target_parameters", ["experts.down_proj"], "target_parameters.*adapter_of"),
    ]:
        model = _peft()
        setattr(model.peft_config["default"], name, value)
        with pytest.raises(weightsync.UnsupportedError, match=words):
            lora.merged(model)
    for name, value, words in [
        ("merged", True, r"k_proj is merged already.*unmerge_adapter\(\)"),
        ("lora_variant", {"default": object()}, "k_proj has a LoRA of the kind object"),
    ]:
        model = _peft()
        setattr(model.base_model.model["layers"][0]["k_proj"], name, value)
        with pytest.raises(weightsync.UnsupportedError, match=words):
            lora.merged(model)


def test_merged_weights_can_lie_transposed():
    state = _peft().state_dict()
    expected = lora.merged(state, alpha=8)["layers.0.q_proj.weight"]
    turned = {name: one.T if name.endswith("base_layer.weight") else one for name, one in state.items()}
    got = lora.merged(turned, alpha=8, fan_in_fan_out=True)["layers.0.q_proj.weight"]
    assert torch.equal(got.T, expected)
    with pytest.raises(weightsync.WrongWeightsError, match=r"\[6, 5\] and B @ A is \[5, 6\]"):
        lora.merged(turned, alpha=8)


def test_merged_has_what_another_adapter_replaces():
    model = _peft()
    head = nn.Module()
    head.original_module = nn.Linear(2, 2)
    head.modules_to_save = nn.ModuleDict({"other": nn.Linear(2, 2)})
    model.base_model.model["head"] = head
    assert torch.equal(lora.merged(model)["head.weight"], head.original_module.weight)
    head.modules_to_save["default"] = nn.Linear(2, 2)
    assert torch.equal(lora.merged(model)["head.weight"], head.modules_to_save["default"].weight)


def test_adapter_that_cannot_be_named_is_refused():
    with pytest.raises(weightsync.WrongTypeError, match="PEFT model, got Linear"):
        lora.adapter_of(nn.Linear(2, 2))
    with pytest.raises(weightsync.ModelError, match="no adapter 'x'; it has 'default'"):
        lora.adapter_of(_peft(), "x")
    for name, value, words in [
        ("bias", "lora_only", "bias='lora_only'"),
        ("trainable_token_indices", [1], "trainable_token_indices"),
        ("use_dora", True, "DoRA"),
        ("lora_bias", True, "lora_bias"),
        ("layer_replication", [(0, 2), (1, 3)], "layer_replication"),
        ("peft_type", "ADALORA", "the peft_type ADALORA"),
    ]:
        model = _peft()
        setattr(model.peft_config["default"], name, value)
        with pytest.raises(weightsync.UnsupportedError, match=words):
            lora.adapter_of(model)
    model = _peft()
    query = model.base_model.model["layers"][0]["q_proj"]
    query.lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(2, 2)})
    with pytest.raises(weightsync.UnsupportedError, match="lora_magnitude_vector.default.weight cannot"):
        lora.adapter_of(model)
