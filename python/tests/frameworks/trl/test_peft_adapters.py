"""Adapters of the real PEFT: what is sent is what PEFT saves, and what is merged is what it merges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch

import weightsync
from weightsync import lora

PARTS = ["q_proj", "v_proj", "down_proj"]


def _adapted(dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A Llama with an adapter that was trained: none of its tensors is zero."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": PARTS, **settings}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(tiny.llama().to(dtype), config)
    _train(model)
    return model


def _train(model: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                change = torch.randn(parameter.shape, generator=generator) * 0.1
                parameter.add_(change.to(parameter.dtype))


#: Kinds of LoRA that are sent alone and merged.
KINDS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "saved": {"modules_to_save": ["lm_head"]},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "random": {"init_lora_weights": False},
}
kinds = pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)


@kinds
def test_adapter_is_what_peft_saves(settings: dict[str, Any], tmp_path: Path) -> None:
    model = _adapted(**settings)
    sent = lora.adapter_of(model)
    text = bytes(sent.pop(lora.CONFIG).tolist())
    expected = peft.get_peft_model_state_dict(model)
    assert sorted(sent) == sorted(expected)
    assert all(torch.equal(sent[name], one) for name, one in expected.items())
    # The model's own, so that each send reads what training made.
    assert all(sent[name].data_ptr() == one.data_ptr() for name, one in expected.items())
    model.save_pretrained(tmp_path)
    config, saved = json.loads(text), json.loads((tmp_path / lora.CONFIG).read_text())
    # PEFT writes a set in any order.
    for one in (config, saved):
        one["target_modules"] = sorted(one["target_modules"])
    assert config == saved


def test_adapter_of_a_name_is_what_peft_saves() -> None:
    model = _adapted(modules_to_save=["lm_head"])
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj", "q_proj"]))
    _train(model)
    for name in ("default", "other"):
        sent = lora.adapter_of(model, name)
        del sent[lora.CONFIG]
        expected = peft.get_peft_model_state_dict(model, adapter_name=name)
        assert sorted(sent) == sorted(expected)
        assert all(torch.equal(sent[own], one) for own, one in expected.items())


def _arrive(tensors: dict[str, Any]) -> Any:
    """What a worker receives, in this process."""
    from threading import Thread

    with (
        weightsync.Sender(tensors) as sender,
        weightsync.Receiver(sender.init_info, 0) as receiver,
    ):
        joining = Thread(target=receiver.connect)
        joining.start()
        sender.connect(1, timeout=60)
        joining.join()
        return receiver.latest().copy()


@kinds
def test_peft_loads_what_was_sent(settings: dict[str, Any]) -> None:
    model = _adapted(**settings).eval()
    tokens = torch.tensor(tiny.PROMPTS[:1])
    with lora.Adapters("loaded") as adapters:
        made = adapters.save(_arrive(lora.adapter_of(model)))
        loaded = peft.PeftModel.from_pretrained(tiny.llama(), made.path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@kinds
def test_merged_is_what_peft_merges(settings: dict[str, Any], dtype: torch.dtype) -> None:
    model = _adapted(dtype, **settings)
    got = {name: one.clone() for name, one in lora.merged(model).items()}
    expected = model.merge_and_unload().state_dict()
    assert sorted(got) == sorted(expected)
    # The adapter is float32 in both: the sums are the same, and rounded once.
    assert all(torch.equal(got[name], one) for name, one in expected.items())


def test_merged_replicated_layers_are_what_the_model_computes() -> None:
    layers = tiny.llama().config.num_hidden_layers
    model = _adapted(layer_replication=[(0, layers), (layers - 1, layers)]).eval()
    tokens = torch.tensor(tiny.PROMPTS[:1])
    config = tiny.llama().config
    config.num_hidden_layers = layers + 1
    made = type(tiny.llama())(config).eval()
    made.load_state_dict(lora.merged(model))
    with torch.no_grad():
        assert torch.allclose(made(tokens).logits, model(tokens).logits, atol=1e-6)
    with pytest.raises(weightsync.UnsupportedError, match="layer_replication"):
        lora.adapter_of(model)


def test_merged_conv1d_is_what_peft_merges() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    base = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2))
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "attn.c_proj"], fan_in_fan_out=True)
    model = peft.get_peft_model(base, config)
    _train(model)
    got = {name: one.clone() for name, one in lora.merged(model).items()}
    # attn.c_proj is square: nothing but the argument says how it lies.
    state = lora.merged(model.state_dict(), alpha=config.lora_alpha, fan_in_fan_out=True)
    assert all(torch.equal(state[name], one) for name, one in got.items())
    expected = model.merge_and_unload().state_dict()
    assert sorted(got) == sorted(expected)
    assert all(torch.equal(got[name], one) for name, one in expected.items())


def test_merged_keeps_what_another_adapter_saves() -> None:
    model = _adapted()
    settings = {"target_modules": ["k_proj"], "modules_to_save": ["lm_head"]}
    model.add_adapter("other", peft.LoraConfig(r=2, **settings))
    _train(model)
    got = {name: one.clone() for name, one in lora.merged(model).items()}
    assert sorted(got) == sorted(tiny.llama().state_dict())
    model.set_adapter("default")
    expected = model.merge_and_unload(adapter_names=["default"]).state_dict()
    assert all(torch.equal(got[name], expected[name]) for name in got if name != "lm_head.weight")
    assert torch.equal(got["lm_head.weight"], tiny.llama().lm_head.weight)


@pytest.mark.parametrize(
    ("settings", "sent", "merged"),
    [
        ({"bias": "lora_only"}, "bias='lora_only'", None),
        ({"use_dora": True}, "DoRA", "DoraLinearVariant"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices", "trainable_token_indices"),
        ({"alora_invocation_tokens": [1]}, None, "aLoRA"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, None, "lora_embedding_A"),
    ],
    ids=["bias", "dora", "tokens", "alora", "embedding"],
)
def test_kinds_that_do_not_fit_are_refused(
    settings: dict[str, Any], sent: str | None, merged: str | None
) -> None:
    model = _adapted(**settings)
    for words, call in ((sent, lora.adapter_of), (merged, lora.merged)):
        if words is None:
            call(model)
            continue
        with pytest.raises(weightsync.UnsupportedError, match=words):
            call(model)


def test_variant_that_adds_its_pair_alone_is_sent_and_merged() -> None:
    model = _adapted(init_lora_weights="mica").eval()
    tokens = torch.tensor(tiny.PROMPTS[:1])
    with torch.no_grad(), lora.Adapters("mica") as adapters:
        made = adapters.save(_arrive(lora.adapter_of(model)))
        loaded = peft.PeftModel.from_pretrained(tiny.llama(), made.path).eval()
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    got = {name: one.clone() for name, one in lora.merged(model).items()}
    expected = model.merge_and_unload().state_dict()
    assert all(torch.equal(got[name], one) for name, one in expected.items())


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_adapter_that_changed_the_base_model_is_sent_merged_alone(init: str) -> None:
    model = _adapted(init_lora_weights=init)
    with pytest.raises(weightsync.UnsupportedError, match=f"init_lora_weights='{init}'.*whole model"):
        lora.adapter_of(model)
    got = {name: one.clone() for name, one in lora.merged(model).items()}
    expected = model.merge_and_unload().state_dict()
    assert all(torch.equal(got[name], one) for name, one in expected.items())


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"kasa_config": peft.KasaConfig()}, "KasaLinearVariant"),
        ({"monteclora_config": peft.MontecloraConfig()}, "MontecloraLinearVariant"),
    ],
    ids=["kasa", "monteclora"],
)
def test_variants_that_add_something_else_are_refused(settings: dict[str, Any], kind: str) -> None:
    model = _adapted(**settings)
    for call in (lora.adapter_of, lora.merged):
        with pytest.raises(weightsync.UnsupportedError, match=kind):
            call(model)


@pytest.mark.parametrize("how", ["set_scale", "scale_layer"])
@pytest.mark.parametrize("settings", [{}, KINDS["patterns"], KINDS["rslora"]], ids=str)
def test_scale_of_all_layers_is_sent(how: str, settings: dict[str, Any]) -> None:
    model = _adapted(**settings).eval()
    layers = [one for one in model.modules() if hasattr(one, "set_scale")]
    for one in layers:
        one.set_scale("default", 0.5) if how == "set_scale" else one.scale_layer(0.5)
    tokens = torch.tensor(tiny.PROMPTS[:1])
    with torch.no_grad(), lora.Adapters("scaled") as adapters:
        made = adapters.save(_arrive(lora.adapter_of(model)))
        loaded = peft.PeftModel.from_pretrained(tiny.llama(), made.path).eval()
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)
    got = {name: one.clone() for name, one in lora.merged(model).items()}
    layers[0].scale_layer(3.0)
    with pytest.raises(weightsync.UnsupportedError, match="scaled one by one"):
        lora.adapter_of(model)
    layers[0].scale_layer(1 / 3.0)
    expected = model.merge_and_unload().state_dict()
    assert all(torch.equal(got[name], one) for name, one in expected.items())


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern", "use_rslora"])
def test_sglang_gets_no_adapter_whose_layers_are_scaled_apart(name: str) -> None:
    value = True if name == "use_rslora" else {"q_proj": 2}
    snapshot = _arrive(lora.adapter_of(_adapted(**{name: value})))
    with (
        lora.ServerAdapters("http://127.0.0.1:9", "apart", engine="sglang") as adapters,
        pytest.raises(weightsync.UnsupportedError, match=f"has {name}"),
    ):
        adapters.load(snapshot)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_weights_are_bit_for_bit_the_same_after_many_merges(dtype: torch.dtype) -> None:
    """TRL merges and unmerges the trainer's model at each sync."""
    import weightsync.trl

    weightsync.trl.WeightTransfer("http://127.0.0.1:9")
    model = _adapted(dtype)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    for _ in range(100):
        model.merge_adapter()
        merged = model.state_dict()
        assert not all(torch.equal(merged[name], one) for name, one in before.items())
        model.unmerge_adapter()
    after = model.state_dict()
    assert all(torch.equal(after[name], one) for name, one in before.items())


def test_model_that_is_merged_is_refused() -> None:
    model = _adapted()
    before = lora.merged(model)
    model.merge_adapter()
    with pytest.raises(weightsync.UnsupportedError, match="is merged already"):
        lora.merged(model)
    model.unmerge_adapter()
    after = lora.merged(model)
    for name, one in before.items():
        torch.testing.assert_close(after[name], one, rtol=1e-5, atol=1e-6)
