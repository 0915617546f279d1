"""A small random model that transformers and SGLang both run, and a server of it on the CPU."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import sglang_faulty
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from weightsync.sglang._names import LOADER

#: How many tokens are compared.
LENGTH = 12
PROMPTS = [[1, 5, 9], [17, 4], [200, 100, 50, 25]]
#: What SGLang's server needs to run on the CPU, on few cores.
ARGUMENTS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch "
    "--disable-overlap-schedule --skip-tokenizer-init --dtype float32 "
    "--sleep-on-idle --max-total-tokens 70000 --max-running-requests 4 --context-length 32768"
).split()


def llama(seed: int = 0, **sizes: Any) -> LlamaForCausalLM:
    """A random Llama."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32_768,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **sizes})).eval()


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
    return [continued(model, prompt, length) for prompt in PROMPTS]


def continued(model: Any, prompt: list[int], length: int = LENGTH) -> list[int]:
    """What transformers generates after one prompt."""
    tokens = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    answer: list[int] = tokens[0, len(prompt) :].tolist()
    return answer


def packages(folder: Path) -> Path:
    """A folder with what a server needs beyond what is installed."""
    stub = folder / "vllm"
    stub.mkdir()
    # SGLang imports this on a device that it has no kernels for, and does not call it.
    (stub / "__init__.py").touch()
    (stub / "_custom_ops.py").write_text(
        "def rotary_embedding(*args):\n    raise NotImplementedError\n"
    )
    if not importlib.metadata.entry_points(group="sglang.srt.plugins", name="weightsync"):
        # weightsync is on the path, and not installed.
        info = folder / "weightsync-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: weightsync\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nweightsync = weightsync.sglang._plugin:register\n"
        )
    info = folder / "sglang_faulty-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang_faulty\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nfaulty = sglang_faulty:register\n"
    )
    return folder


class Server:
    """A server of SGLang in processes of its own."""

    def __init__(
        self,
        model: Path,
        found: Path,
        *arguments: str,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = found / f"server-{self.port}.log"
        #: Where its trainer tells it what it needs to join.
        self.info_file = found / f"engine-{self.port}.json"
        self._fault = found / f"fault-{self.port}"
        self.model = model
        key = next((one.partition("=")[2] for one in arguments if one.startswith("--api-key=")), None)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._command = [sys.executable, "-P", "-m", "sglang.launch_server"]
        self._command += ["--model-path", str(model), "--host", "127.0.0.1"]
        self._command += ["--port", str(self.port), *ARGUMENTS, *arguments]
        self._command += ["--custom-weight-loader", LOADER]
        known = [str(found), str(Path(__file__).parent), *(one for one in sys.path if one)]
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(known),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            # On a machine without GPUs two ranks speak over gloo, each on a core.
            "SGLANG_NCCL_SO_PATH": "/nonexistent",
            "SGLANG_CPU_OMP_THREADS_BIND": _cores(arguments),
            "WEIGHTSYNC_ENGINE_INFO": str(self.info_file),
            sglang_faulty.VARIABLE: str(self._fault),
        }
        self.start()

    def fail(self, what: str, loads: int = 1, rank: int = 0) -> None:
        """Has the next loads of a rank "raise" or "die" midway."""
        # Written whole: the server reads it all the time.
        new = self._fault.with_suffix(".told")
        new.write_text(f"{what} {loads} {rank}")
        os.replace(new, self._fault)

    def compiling(self, prompt: list[int], length: int) -> Request:
        """A request that waits for its grammar until the server is asked for it."""
        self.fail("compile")
        request = Request(self, prompt, length)
        until = time.monotonic() + 60
        while self._fault.read_text().split()[1] != "0":
            assert time.monotonic() < until, "the request did not come"
            time.sleep(0.02)
        return request

    def start(self) -> None:
        """Starts it, also once more."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )

    def wait(self, seconds: float = 400) -> None:
        """Until it serves."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            try:
                self.ask(length=1)
                return
            except OSError:
                # It listens when its model is there, which nothing announces.
                time.sleep(0.5)
        raise RuntimeError(f"{self.url} does not serve:\n{self.said()[-4000:]}")

    def ended(self, seconds: float) -> bool:
        """Whether its first process ends in this time."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def said(self) -> str:
        """Its log."""
        return self.log.read_text(errors="replace")

    def ask(self, length: int = LENGTH, **more: Any) -> list[list[int]]:
        """What it generates."""
        return [one["output_ids"] for one in self.answers(length, **more)]

    def answers(self, length: int = LENGTH, **more: Any) -> list[dict[str, Any]]:
        """The same, as it answers."""
        return [self.answer(prompt, length, **more) for prompt in PROMPTS]

    def answer(self, prompt: list[int], length: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, **more}
        answer: dict[str, Any] = self.post("generate", body)[1]
        return answer

    def post(self, path: str, body: dict[str, Any], seconds: float = 100) -> tuple[int, Any]:
        """The status and the answer; of a refusal, too."""
        headers = {"Content-Type": "application/json", **self._headers}
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            if path == "generate" and error.code >= 500:
                raise
            return error.code, json.load(error)

    def get(self, path: str) -> Any:
        request = urllib.request.Request(f"{self.url}/{path}", headers=self._headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def begin(self, prompt: list[int], length: int) -> Request:
        """A request that is under way."""
        request = Request(self, prompt, length)
        until = time.monotonic() + 60
        while not self.running():
            assert time.monotonic() < until, "no request came under way"
            time.sleep(0.02)
        return request

    def running(self) -> int:
        """How many requests are under way."""
        loads = self.get("v1/loads")["loads"]
        return sum(int(one["num_running_reqs"]) for one in loads)

    def kill(self) -> None:
        """Ends all of its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _cores(arguments: tuple[str, ...]) -> str:
    """A core for each rank, as SGLang reads them."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = int(arguments[arguments.index("--tp") + 1]) if "--tp" in arguments else 1
    if ranks == 1:
        return "all"
    return "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))


class Request:
    """A request in a thread of its own."""

    def __init__(self, server: Server, prompt: list[int], length: int) -> None:
        self._answers: list[dict[str, Any]] = []
        self._thread = threading.Thread(
            target=lambda: self._answers.append(server.answer(prompt, length))
        )
        self._thread.start()

    def end(self, seconds: float = 100) -> dict[str, Any]:
        """Its answer."""
        self._thread.join(seconds)
        assert self._answers, "the request did not come back"
        return self._answers[0]
