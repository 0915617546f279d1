"""An engine of a few lines: it generates with a model of transformers, and loads checkpoints.

``python small_engine.py FOLDER PORT`` prints its port, which may be 0 at first.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import AutoModelForCausalLM

torch.set_num_threads(1)


class State:
    """What it serves. A test may refuse the next loads, each midway."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.version, self.is_paused, self.refusals = "default", False, 0
        self.seconds = 0.0
        self.calls: list[str] = []


def answer(state: State, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """One call."""
    state.calls.append(path)
    match path:
        case "/generate":
            assert not state.is_paused
            ids = torch.tensor([body["ids"]])
            out = state.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
            )
            return 200, {"ids": out[0, ids.shape[1] :].tolist(), "version": state.version}
        case "/load":
            assert state.is_paused
            seconds, state.seconds = state.seconds, 0.0
            time.sleep(seconds)
            # One weight after the other, as engines do: a refusal leaves a mix.
            new = AutoModelForCausalLM.from_pretrained(body["path"]).state_dict()
            for place, (name, tensor) in enumerate(state.model.state_dict().items()):
                if place == 3 and state.refusals:
                    state.refusals -= 1
                    return 200, {"success": False, "message": f"{name} was refused"}
                tensor.copy_(new[name])
            state.version = body["label"]
            return 200, {"success": True}
        case "/stop" | "/go":
            state.is_paused = path == "/stop"
            return 200, {}
        case "/refuse":
            state.refusals = body["times"]
            return 200, {}
        case "/slow":
            state.seconds = body["seconds"]
            return 200, {}
        case "/moved":
            return 307, {"Location": "/load/"}
        case "/cut" | "/no-json" | "/long":
            words = "it was refused" * (80_000 if path == "/long" else 1)
            return 200, {"success": False, "message": words}
        case "/locked":
            return (200, {}) if body["key"] == "Bearer secret" else (401, {"error": "no key"})
        case "/calls":
            return 200, {"calls": state.calls}
        case _:
            return 404, {}


def main(folder: str, port: int) -> None:
    state = State(folder)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
            if self.path == "/locked":
                body["key"] = self.headers["Authorization"]
            with lock, torch.no_grad():
                status, said = answer(state, self.path, body)
            text = json.dumps(said).encode()
            length = len(text)
            if self.path == "/cut":
                text = text[:-9]
            elif self.path == "/no-json":
                text = text.replace(b'"', b"'")
            self.send_response(status)
            if "Location" in said:
                self.send_header("Location", said["Location"])
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
