"""What a trainer says of servers that cannot take its versions; no server of SGLang runs."""

from __future__ import annotations

import http.server
import json
import threading
from types import SimpleNamespace

import pytest
import torch

import weightsync
from weightsync.errors import UnsupportedError
from weightsync.sglang import Engine, EngineCallError, EngineDiedError, Trainer, load
from weightsync.sglang._names import LOADER

GOOD = {
    "version": "0.5.23",
    "custom_weight_loader": [LOADER],
    "internal_states": [{"world_size": 1}],
}


@pytest.fixture
def answering():
    """Makes a server that answers ``/server_info`` so, and knows nothing of weightsync."""
    servers = []

    def make(info):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self._answer(200, info)

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                said = "Unsupported action='weightsync …'"
                self._answer(400, {"success": False, "message": said})

            def _answer(self, status, body):
                text = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *said):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({**GOOD, "version": "0.5.22"}, "tested with sglang 0.5.23, and 0.5.22 is on the server"),
        ({**GOOD, "custom_weight_loader": []}, f"start it with --custom-weight-loader {LOADER}"),
        (GOOD, "the server has not loaded weightsync's plugin"),
        ({**GOOD, "internal_states": [{"world_size": 0}]}, "expected 1 or more"),
        ([], "and none is on the server"),
    ],
)
def test_server_that_takes_no_versions_is_a_line(answering, info, said):
    with weightsync.Sender({"w": torch.zeros(3)}) as sender:
        (line,) = Trainer(sender, [Engine(answering(info))]).sync().engines
    assert (line.outcome, line.pause) == ("kept old", None)
    assert said in line.reason
    assert len(line.reason.splitlines()) == 1


@pytest.mark.parametrize("said", [{}, {"disable_overlap_schedule": False}])
def test_in_place_is_refused_with_the_overlap_schedule(answering, said):
    engine = Engine(answering({**GOOD, **said}))
    engine.check(10)
    with pytest.raises(UnsupportedError, match="--disable-overlap-schedule, or leave"):
        engine.pause("keep", False, 10)


def test_server_with_other_ranks_is_counted_once_more(answering):
    info = {**GOOD}
    engine = Engine(answering(info))
    assert engine.ranks(10) == 1
    with pytest.raises(EngineCallError, match="has not loaded weightsync's plugin"):
        engine.ask(10, do="join")
    info["internal_states"] = [{"world_size": 2}]
    assert engine.ranks(10) == 1
    with pytest.raises(EngineDiedError, match="it has 2 ranks, and had 1; sync or refresh once"):
        engine.ask(10, do="join")
    assert engine.ranks(10) == 2


def test_load_waits_for_the_gpu_before_it_writes(monkeypatch):
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from weightsync.sglang._place import SglangPlace

    done = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: done.append(device.type))
    for name in ("restore_weights_before_loading", "load_weights_and_postprocess"):
        monkeypatch.setattr(DefaultModelLoader, name, lambda *given, name=name: done.append(name))
    place = object.__new__(SglangPlace)
    config = SimpleNamespace(dtype=torch.float32)
    place._runner = SimpleNamespace(model=None, device="cuda", model_config=config)
    place.load([])
    assert done == ["cuda", "restore_weights_before_loading", "load_weights_and_postprocess"]


def test_loader_refuses_tensors_in_one_line():
    with pytest.raises(UnsupportedError, match=r"send them by weightsync\.sglang\.Trainer") as said:
        load(None, [("w", torch.zeros(3))])
    assert len(str(said.value).splitlines()) == 1
