"""LoRA: adapters alone under versioned names, and merged into their base weights."""

import json
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
    with lora.Adapters("policy") as adapters:
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
        assert names[:2] == ["policy-v1", "policy-v2"]
        assert len(set(names)) == 4 and len(set(numbers)) == 4
        assert numbers[:2] == [1, 2]
        folder = made.path.parent
        adapters.remove(made)
        assert not made.path.exists() and adapters.save(snapshot) == made
    assert not folder.exists()
    with pytest.raises(weightsync.SettingError, match="folder's"):
        lora.Adapters("a/b")


class Engine:
    """What an engine of vLLM has for LoRA."""

    def __init__(self):
        self.loaded = {}
        self.fails = False

    def add_lora(self, request):
        if self.fails:
            raise ValueError("no such module")
        self.loaded[request.lora_int_id] = load_file(f"{request.lora_path}/adapter_model.safetensors")
        return True

    def remove_lora(self, number):
        del self.loaded[number]
        return True


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
        lora.VllmAdapters(SimpleNamespace(llm_engine=engine), "policy") as adapters,
    ):
        first = adapters.load(receiver.latest())
        assert (first.lora_name, list(engine.loaded)) == ("policy-v1", [1])
        assert adapters.load(receiver.latest()) is first
        _step(model)
        pass_on(sender, receiver)
        engine.fails = True
        with pytest.raises(weightsync.LoadError, match="policy-v2: no such module"):
            adapters.load(receiver.latest())
        assert adapters.live.name == "policy-v1" and list(engine.loaded) == [1]
        engine.fails = False
        _step(model)
        pass_on(sender, receiver)
        third = adapters.load(receiver.latest())
        assert (third.lora_name, list(engine.loaded)) == ("policy-v3", [3])
        assert adapters.live.path.exists()
        assert [one.name for one in adapters.live.path.parent.iterdir()] == ["policy-v3"]
        assert torch.equal(
            engine.loaded[3][f"{QUERY}.lora_B.weight"],
            model.base_model.model["layers"][0]["q_proj"].lora_B["default"].weight,
        )
    assert not engine.loaded


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
    without = {name: one for name, one in state.items() if not name.endswith("q_proj.lora_B.default.weight")}
    embedding = {**state, "base_model.model.e.lora_embedding_A.default": torch.ones(2, 2)}
    magnitude = {**state, f"{QUERY}.lora_magnitude_vector.default.weight": torch.ones(5)}
    for weights, how, error, words in [
        (state, {}, weightsync.SettingError, "alpha is missing"),
        (without, {"alpha": 8}, weightsync.WrongWeightsError, "lacks lora_B.default.weight"),
        (embedding, {"alpha": 8}, weightsync.UnsupportedError, "lora_embedding_A"),
        (magnitude, {"alpha": 8}, weightsync.UnsupportedError, "lora_magnitude_vector"),
        (model, {"adapter": "other"}, weightsync.WrongWeightsError, "no tensors of the adapter 'other'"),
        (3, {}, weightsync.WrongTypeError, "PEFT model"),
    ]:
        with pytest.raises(error, match=words):
            lora.merged(weights, **how)
    with pytest.raises(weightsync.WrongTypeError, match="PEFT model, got Linear"):
        lora.adapter_of(nn.Linear(2, 2))
    with pytest.raises(weightsync.ModelError, match="no adapter 'x'; it has 'default'"):
        lora.adapter_of(model, "x")
