"""Updates of a server of SGLang on the CPU, compared with SGLang's own.

    cargo xtask bench sglang [--json]

The trainer and the server are on one host. In each round a change comes to the same server in four
ways, one after the other: a checkpoint in /dev/shm and /update_weights_from_disk; a broadcast over
gloo and /update_weights_from_distributed, all tensors in one call; weightsync over TCP; and
weightsync in shared memory. All of them pause with `retract` and drop the cache. Medians of the
rounds (`--rounds`, of the program itself), warm.

The pause is from before the call that pauses to after the one that resumes. The bytes are those
that go to the server, or would go to one on another host: it reads a checkpoint whole, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from models import Size, Steps, size_of
from rows import Printer, Row

import weightsync
from weightsync.sglang import Engine, Trainer

SIZE = Size(
    "Llama of 0.2 GB",
    {
        "vocab_size": 16000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
)
#: Shares of the elements that a step changes.
SHARES = (0.0002, 0.011, 1.0)
_TIMEOUT = 300
_GROUP = "peers"


class Server:
    """A server, and its calls."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / "server.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += (
            "--device cpu --attention-backend torch_native --sampling-backend pytorch "
            "--disable-overlap-schedule --skip-tokenizer-init --dtype bfloat16 --sleep-on-idle "
            "--max-total-tokens 4096 --max-running-requests 2 "
            "--custom-weight-loader weightsync.sglang.load"
        ).split()
        # SGLang imports this on a device that it has no kernels for, and does not call it.
        stub = folder / "found" / "vllm"
        stub.mkdir(parents=True)
        (stub / "__init__.py").touch()
        (stub / "_custom_ops.py").write_text("rotary_embedding = None\n")
        path = os.pathsep.join([str(stub.parent), os.environ.get("PYTHONPATH", "")])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "HF_HUB_OFFLINE": "1",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": path,
                },
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it serves."""
        until = time.monotonic() + 600
        while time.monotonic() < until and self._process.poll() is None:
            try:
                self.post("generate", input_ids=[1], sampling_params={"max_new_tokens": 1})
                return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(self._log.read_text(errors="replace")[-4000:])

    def post(self, path: str, **body: Any) -> None:
        request = urllib.request.Request(
            f"{self.url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            answer.read()

    @contextmanager
    def paused(self, seconds: list[float]) -> Iterator[None]:
        began = time.perf_counter()
        self.post("pause_generation", mode="retract")
        yield
        self.post("continue_generation")
        seconds.append(time.perf_counter() - began)

    def kill(self) -> None:
        os.killpg(self._process.pid, 9)
        self._process.wait()


class Disk:
    """SGLang's update from a checkpoint."""

    name = "SGLang from disk"

    def __init__(self, server: Server, model: Any, folder: Path) -> None:
        self._server, self._model, self._folder = server, model, folder

    def update(self, pauses: list[float], step: int) -> int:
        self._model.save_pretrained(self._folder)
        with self._server.paused(pauses):
            self._server.post(
                "update_weights_from_disk", model_path=str(self._folder), weight_version=str(step)
            )
        return sum(file.stat().st_size for file in self._folder.glob("*.safetensors"))


class Gloo:
    """SGLang's update over a process group: the trainer is rank 0."""

    name = "SGLang over gloo"

    def __init__(self, server: Server, model: Any, port: int) -> None:
        from sglang.srt.utils import init_custom_process_group

        self._server, self._model = server, model
        thread = threading.Thread(
            target=lambda: server.post(
                "init_weights_update_group",
                master_address="127.0.0.1",
                master_port=port,
                rank_offset=1,
                world_size=2,
                group_name=_GROUP,
                backend="gloo",
            )
        )
        thread.start()
        self._group = init_custom_process_group(
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=2,
            rank=0,
            group_name=_GROUP,
        )
        thread.join()

    def update(self, pauses: list[float], step: int) -> int:
        tensors = dict(self._model.named_parameters())
        body = {
            "names": list(tensors),
            "dtypes": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
            "shapes": [list(one.shape) for one in tensors.values()],
            "group_name": _GROUP,
            "weight_version": str(step),
        }
        with self._server.paused(pauses):
            self._server.post("begin_weight_update")
            thread = threading.Thread(
                target=lambda: self._server.post("update_weights_from_distributed", **body)
            )
            thread.start()
            for one in tensors.values():
                torch.distributed.broadcast(one.data, src=0, group=self._group)
            thread.join()
            self._server.post("end_weight_update")
        return size_of(self._model)


class Ours:
    """weightsync, by one scheme."""

    def __init__(self, server: Server, model: Any, name: str, scheme: str) -> None:
        self.name = name
        self._server = server
        self._sender = weightsync.Sender(model, scheme=scheme)
        self._trainer = Trainer(self._sender, timeout=_TIMEOUT)

    def begin(self) -> None:
        """SGLang's own updates are refused while a trainer has the server."""
        self._trainer.add(Engine(self._server.url))
        report = self._trainer.sync()
        assert report.all_synced, report

    def update(self, pauses: list[float], step: int) -> int:
        report = self._trainer.sync()
        assert report.all_synced, report
        (line,) = report.engines
        assert line.pause is not None
        pauses.append(line.pause)
        return line.bytes

    def end(self) -> None:
        self._trainer.remove(self._server.url)


def measured(rounds: int) -> Iterator[Row]:
    torch.set_num_threads(1)
    model = SIZE.make()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        folder = Path(name)
        model.save_pretrained(folder)
        server = Server(folder, 30291)
        try:
            server.wait()
            disk, gloo = Disk(server, model, folder), Gloo(server, model, 30292)
            tcp = Ours(
                server, model, "weightsync over TCP", "distributed:listen=127.0.0.1:0,share=none"
            )
            memory = Ours(server, model, "weightsync in shared memory", "shared-mem")
            ways: list[Any] = [disk, gloo, tcp, memory]
            for share in SHARES:
                yield from _rows(model, ways, share, rounds)
        finally:
            server.kill()


def _rows(model: Any, ways: list[Any], share: float, rounds: int) -> Iterator[Row]:
    steps = Steps(model, share)
    pauses: dict[str, list[float]] = {way.name: [] for way in ways}
    taken: dict[str, list[float]] = {way.name: [] for way in ways}
    sizes: dict[str, int] = {}
    for number in range(rounds + 1):
        for way in ways:
            if isinstance(way, Ours):
                way.begin()
            steps.step()
            began = time.perf_counter()
            sizes[way.name] = way.update(pauses[way.name], number)
            taken[way.name].append(time.perf_counter() - began)
            if isinstance(way, Ours):
                way.end()
    what = f"{SIZE.name}, {share:.2%} changed"
    theirs = [way.name for way in ways if not isinstance(way, Ours)]
    for key, found, limit in (("pause", pauses, 1.0), ("to serving", taken, None)):
        # The first round warms up.
        medians = {name: statistics.median(all_[1:]) for name, all_ in found.items()}
        best = min(medians[name] for name in theirs)
        for name, value in medians.items():
            target = None if name in theirs else limit
            yield Row.over(f"{what}: {key}, {name}", value, best, target)
    best = min(sizes[name] for name in theirs)
    for name, size in sizes.items():
        # In shared memory nothing travels.
        target = 1.0 if "TCP" in name else None
        ratio = size / best
        met = None if target is None else ratio <= target
        yield Row(f"{what}: bytes, {name}", size / 1e6, "MB", best / 1e6, ratio, target, met)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares updates of an SGLang server")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rounds", type=int, default=7, help="that are counted")
    args = parser.parse_args()
    show = Printer(args.json)
    for row in measured(args.rounds):
        show(row)


if __name__ == "__main__":
    main()
