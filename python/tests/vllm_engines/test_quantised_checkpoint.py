"""INT8 weights and scales of a mapping, as a checkpoint: vLLM's own loader takes it."""

from __future__ import annotations

import json
import threading
from typing import Any

import tiny

import weightsync
from weightsync import Mapping

#: W8A8 as compressed-tensors describes it.
SCHEME: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def llama():
    """A random Llama. vLLM's kernel for AMX takes no float32, and leaves these sizes to another one."""
    return tiny.llama(hidden_size=120, head_dim=32)


def test_llm_serves_an_int8_checkpoint(made, tmp_path):
    model = llama()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": SCHEME}))
    mapping = Mapping().quantise("model.layers.*_proj.weight", "int8")
    expected = llama()
    weights = expected.state_dict()
    with (
        weightsync.Sender(model.state_dict(), mapping=mapping) as sender,
        weightsync.Receiver(sender.init_info, 0) as receiver,
    ):
        joining = threading.Thread(target=receiver.connect)
        joining.start()
        sender.connect(1, timeout=60)
        joining.join()
        snapshot = receiver.latest()
        snapshot.save_safetensors(tmp_path / "model.safetensors")
        for name in [name for name in snapshot if name.endswith("_scale")]:
            of = name.removesuffix("_scale")
            weights[of] = snapshot[of].float() * snapshot[name]
    expected.load_state_dict(weights)
    llm = made(tmp_path, weight_transfer_config=None, max_model_len=512)
    # The engine also rounds activations, by too little to change these tokens.
    assert tiny.ask(llm) == tiny.greedy(expected) != tiny.greedy(model)
