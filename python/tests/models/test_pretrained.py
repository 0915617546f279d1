"""Models of transformers, from a store: their logits are those of the model that was saved."""

import subprocess
import sys

import pytest
import torch
import weightsync


def llama(tied):
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(int(tied))
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(**sizes, tie_word_embeddings=tied)
    # Its rotary frequencies stay in float32, as they do in a model that is loaded.
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def step(model):
    """Changes few elements, so that a version is saved as changes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::50] += 0.25


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[1, 5, 9, 2]])).logits


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def stored(request, tmp_path):
    """A model, and a store with two versions of it, whose checkpoint a command has saved."""
    model = llama(request.param)
    for version in [1, 2]:
        model.generation_config.max_length = 10 + version
        model.save_pretrained(tmp_path / "checkpoint")
        push = ["push", tmp_path / "checkpoint", "--to", tmp_path / "store"]
        subprocess.run([sys.executable, "-P", "-m", "weightsync", *push], check=True)
        if version == 1:
            step(model)
    return model, weightsync.Store(tmp_path / "store")


def test_pulled_directory_gives_the_same_logits(stored, tmp_path):
    from transformers import AutoModelForCausalLM

    model, store = stored
    assert store.pull(tmp_path / "out") == 2
    pulled = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert pulled.dtype == torch.bfloat16
    assert torch.equal(logits(pulled), logits(model))
    assert store.pull(tmp_path / "out", 1) == 1
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert not torch.equal(logits(first), logits(model))


def test_model_is_made_from_a_version(stored):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model, store = stored
    for cls in [AutoModelForCausalLM, LlamaForCausalLM]:
        made = store.from_pretrained(cls).eval()
        assert type(made) is LlamaForCausalLM
        assert torch.equal(logits(made), logits(model))
        assert made.generation_config.max_length == 12
        # It is a model like any other: it trains, and what it is made from stays as it was.
        made.train()
        made(torch.tensor([[1, 2]])).logits.sum().backward()
        step(made)
        assert torch.equal(logits(store.from_pretrained(cls).eval()), logits(model))
    first = store.from_pretrained(AutoModelForCausalLM, 1, dtype=torch.float32).eval()
    assert first.dtype == torch.float32
    assert not torch.equal(logits(first).bfloat16(), logits(model))


def test_model_without_a_configuration_is_refused(tmp_path):
    from transformers import AutoModelForCausalLM

    with weightsync.Store(tmp_path) as store:
        store.save(llama(False))
        assert store.files() == {}
        with pytest.raises(weightsync.ModelError, match="config.json"):
            store.from_pretrained(AutoModelForCausalLM)


def test_files_of_a_store_stay_with_its_versions(tmp_path):
    model = llama(False)
    config = {"config.json": model.config.to_json_string().encode()}
    with weightsync.Store(tmp_path / "store", files=config) as store:
        store.save(model)
    # A trainer that names no files keeps them.
    step(model)
    with weightsync.Sender(model, keep=tmp_path / "store") as sender:
        sender.connect(0)
    store = weightsync.Store(tmp_path / "store")
    assert store.load().version == 2
    assert store.files() == store.files(1) == config
    from transformers import LlamaForCausalLM

    assert torch.equal(logits(store.from_pretrained(LlamaForCausalLM).eval()), logits(model))


def test_settings_go_where_from_pretrained_takes_them(stored, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model, store = stored

    class Own(LlamaForCausalLM):
        pass

    made = store.from_pretrained(Own, use_cache=False, dtype=torch.float32)
    assert type(made) is Own
    assert (made.config.use_cache, made.dtype) == (False, torch.float32)
    made, info = store.from_pretrained(
        AutoModelForCausalLM, output_loading_info=True, trust_remote_code=False
    )
    assert not info["missing_keys"]
    with weightsync.Store(tmp_path / "bare") as bare:
        bare.save(model)
        made = bare.from_pretrained(AutoModelForCausalLM, config=model.config)
    assert torch.equal(logits(made.eval()), logits(model))


@pytest.mark.parametrize("dtype", ["auto", torch.float32, torch.float16, None])
def test_dtype_is_that_of_from_pretrained(stored, tmp_path, dtype):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    _, store = stored
    store.pull(tmp_path / "out")
    settings = {} if dtype is None else {"dtype": dtype}
    for cls in [AutoModelForCausalLM, LlamaForCausalLM]:
        expected = cls.from_pretrained(tmp_path / "out", **settings)
        assert store.from_pretrained(cls, **settings).dtype == expected.dtype


def test_tied_weights_can_be_untied(stored):
    from transformers import LlamaForCausalLM

    model, store = stored
    with weightsync.Store(store.url + "-own", files=store.files()) as own:
        # A module names both of its tied weights, and a checkpoint one.
        own.save(model)
        made = own.from_pretrained(LlamaForCausalLM, tie_word_embeddings=False)
    assert torch.equal(logits(made.eval()), logits(model))
    embedding, head = made.get_input_embeddings().weight, made.get_output_embeddings().weight
    assert embedding.data_ptr() != head.data_ptr()


def test_weights_that_do_not_fit_make_no_model(tmp_path):
    from transformers import AutoModelForCausalLM

    model = llama(False)
    wrapped = torch.nn.ModuleDict({"module": model})
    config = {"config.json": model.config.to_json_string().encode()}
    with weightsync.Store(tmp_path, files=config) as store:
        store.save(wrapped)
        with pytest.raises(weightsync.WrongWeightsError, match="does not fit LlamaForCausalLM"):
            store.from_pretrained(AutoModelForCausalLM)


def test_weights_of_another_size_need_a_setting(stored):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    model, store = stored
    for cls in [AutoModelForCausalLM, LlamaForCausalLM]:
        with pytest.raises(weightsync.WrongWeightsError, match=r"another shape \(.*embed_tokens\.weight"):
            store.from_pretrained(cls, vocab_size=32)
        made = store.from_pretrained(cls, vocab_size=32, ignore_mismatched_sizes=True)
        assert made.get_input_embeddings().weight.shape == (32, 64)
        own, other = (one.model.layers[0].mlp.up_proj.weight for one in (made, model))
        assert torch.equal(own, other)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("quantized", [False, True])
def test_quantization_config_goes_to_the_model(tmp_path, monkeypatch, quantized):
    from transformers import AutoModelForCausalLM, LlamaForCausalLM
    from transformers.quantizers import HfQuantizer, auto
    from transformers.utils.quantization_config import QuantizationConfigMixin

    class Bits(QuantizationConfigMixin):
        def __init__(self, bits, quant_method="bits"):
            self.bits, self.quant_method = bits, quant_method

    class Quantizer(HfQuantizer):
        """Stands in for the quantizers of transformers, which need packages of their own."""

        is_trainable = False

        def is_serializable(self):
            return False

        def _process_model_after_weight_loading(self, model, **kwargs):
            seen.append((self.pre_quantized, self.quantization_config.bits))

    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "bits", Quantizer)
    monkeypatch.setitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "bits", Bits)
    model, seen = llama(False), []
    if quantized:
        model.config.quantization_config = Bits(8).to_dict()
    config = {"config.json": model.config.to_json_string().encode()}
    with weightsync.Store(tmp_path / "store", files=config) as store:
        store.save(model)
        store.pull(tmp_path / "out")
        for cls in [AutoModelForCausalLM, LlamaForCausalLM]:
            store.from_pretrained(cls, quantization_config=Bits(4))
            cls.from_pretrained(tmp_path / "out", quantization_config=Bits(4))
    # As transformers has it, a checkpoint's own configuration goes before the setting.
    assert seen == [(True, 8) if quantized else (False, 4)] * 4


def test_pushed_tied_checkpoints_load_into_modules(stored):
    model, store = stored
    loaded = llama(model.config.tie_word_embeddings)
    step(loaded)
    step(loaded)
    assert store.load_into(loaded) == 2
    assert torch.equal(logits(loaded), logits(model))
