"""What a trainer says of servers that cannot take its versions; no server of SGLang runs."""

from __future__ import annotations

import http.server
import json
import threading

import pytest
import torch

import weightsync
from weightsync.errors import UnsupportedError
from weightsync.sglang import Engine, Trainer, load
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


def test_loader_refuses_tensors_in_one_line():
    with pytest.raises(UnsupportedError, match=r"send them by weightsync\.sglang\.Trainer") as said:
        load(None, [("w", torch.zeros(3))])
    assert len(str(said.value).splitlines()) == 1
