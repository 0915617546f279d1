"""Small random models that transformers and vLLM both run, and what is asked of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

#: What vLLM needs to run on the CPU, offline, on few cores.
SURROUNDINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
os.environ.update(SURROUNDINGS)

#: How many tokens are compared.
LENGTH = 12
#: More tokens than a server generates before a pause reaches it. vLLM generates some of them
#: faster than its HTTP process passes them on, so that the pause waits behind them.
LONG = 30_000
PROMPTS = [[1, 5, 9], [17, 4], [200, 100, 50, 25]]
_SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(seed: int = 0, *, tied: bool = False, **sizes: Any) -> LlamaForCausalLM:
    """A random Llama."""
    torch.manual_seed(seed)
    settings = {**_SIZES, "intermediate_size": 128, "tie_word_embeddings": tied, **sizes}
    return LlamaForCausalLM(LlamaConfig(**settings)).eval()


def mixtral(seed: int = 0) -> MixtralForCausalLM:
    """A random mixture of experts."""
    torch.manual_seed(seed)
    config = MixtralConfig(
        **_SIZES, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2
    )
    return MixtralForCausalLM(config).eval()


def change(model: torch.nn.Module, seed: int, share: float = 1.0) -> None:
    """A step of training: adds noise to a share of each tensor's elements."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            if share < 1:
                noise *= torch.rand(parameter.shape, generator=generator) < share
            parameter += noise


def greedy(model: Any, length: int = LENGTH) -> list[list[int]]:
    """What transformers generates."""
    answers = []
    for prompt in PROMPTS:
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(tokens[0, len(prompt) :].tolist())
    return answers


def engine_settings(folder: Path) -> dict[str, Any]:
    """What both an ``LLM`` and a server are made with."""
    return {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 32_768,
        "max_num_seqs": 4,
        "weight_transfer_config": {"backend": "weightsync"},
    }


def ask(llm: Any) -> list[list[int]]:
    """What an ``LLM`` generates."""
    return [list(one.outputs[0].token_ids) for one in requests(llm)]


def requests(llm: Any, length: int = LENGTH) -> list[Any]:
    """An ``LLM``'s answers as it gives them."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=length, detokenize=False, ignore_eos=True
    )
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return llm.generate(prompts, sampling, use_tqdm=False)


def ask_core(llm: Any, name: str) -> Any:
    """What the process of an ``LLM``'s engine says."""
    return llm.llm_engine.engine_core.call_utility(name)


def surroundings(*paths: Path) -> dict[str, str]:
    """What a process of its own is started with: it finds what this one does."""
    known = [str(path) for path in paths] + [one for one in sys.path if one]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(known)}


class Server:
    """A vLLM server in processes of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        #: Where its trainer tells it what it needs to join.
        self.info_file = folder / "engine.json"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = str(folder)
        self._settings = {**engine_settings(folder), **settings}
        self._log = folder / f"server-{self.port}.log"
        self.start()

    def start(self) -> None:
        """Starts it, also once more."""
        arguments = []
        for name, value in self._settings.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                arguments.append(flag)
            elif value is not False:
                text = json.dumps(value) if isinstance(value, dict) else str(value)
                arguments += [flag, text]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
                + ["--host", "127.0.0.1", "--port", str(self.port), *arguments],
                stdout=log,
                stderr=log,
                env={**surroundings(), "WEIGHTSYNC_ENGINE_INFO": str(self.info_file)},
                start_new_session=True,
            )

    def wait(self, seconds: float = 150) -> None:
        """Until it serves."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except OSError:
                # It listens when its engine is there, which nothing announces.
                time.sleep(0.2)
        raise RuntimeError(f"{self.url} does not serve:\n{self._log.read_text()[-4000:]}")

    def ask(self, model: str | None = None) -> list[list[int]]:
        """What it generates, or what its adapter of this name does."""
        answers = []
        for prompt in PROMPTS:
            told = self.post(
                "v1/completions",
                {
                    "model": model or self.model,
                    "prompt": prompt,
                    "max_tokens": LENGTH,
                    "temperature": 0,
                    "ignore_eos": True,
                    "return_token_ids": True,
                },
            )
            answers.append(told["choices"][0]["token_ids"])
        return answers

    def post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := self._settings.get("api_key"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            said = answer.read().decode()
        # Routes of LoRA answer with a sentence.
        return json.loads(said) if said.startswith("{") else said

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}/{path}", timeout=60) as answer:
            return json.load(answer)

    def kill(self) -> None:
        """Ends all of its processes at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
