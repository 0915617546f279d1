"""Adapters of a server that is late, refuses, forgets or is gone. Real servers have tests of their own."""

import contextlib
import json
import logging
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
import weightsync
from ends import LONG, pair, pass_on
from weightsync import lora, trl
from weightsync.engines import _http as http

#: What a PEFT model's adapter is, as it is sent.
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q"]}


class Server:
    """The three routes of vLLM."""

    def __init__(self, host="127.0.0.1"):
        #: Paths by name, and what was posted.
        self.has, self.posted = {"base": "/models/base"}, []
        #: What it answers to the next posts of a route in its place; None: nothing, until the end.
        self.refuses = {}
        #: Where it says that it is now.
        self.moved = None
        self._over = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                cards = [{"id": name, "root": root} for name, root in server.has.items()]
                self.answer(302 if server.moved else 200, {"data": cards})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                route = self.path.split("/")[-1].split("_")[0]
                server.posted.append((route, body["lora_name"]))
                if route in server.refuses:
                    if (words := server.refuses[route]) is None:
                        server._over.wait(60)
                        return
                    self.answer(500, {"error": words})
                elif route == "load":
                    server.has[body["lora_name"]] = body["lora_path"]
                    self.answer(200, {})
                else:
                    known = server.has.pop(body["lora_name"], None)
                    self.answer(200 if known else 404, {} if known else {"error": "it has none"})

            def answer(self, status, said):
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", server.moved)
                self.end_headers()
                self.wfile.write(json.dumps(said).encode())

            def log_message(self, *_):
                pass

        class Listener(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        self._server = Listener((host.strip("[]"), 0), Handler)
        self.url = f"http://{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self):
        self._over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server():
    made = Server()
    yield made
    made.close()


@pytest.fixture
def ends():
    text = list(json.dumps(CONFIG).encode())
    tensors = {"q.lora_A.weight": torch.ones(2, 2), lora.CONFIG: torch.tensor(text, dtype=torch.uint8)}
    with pair(tensors) as both:
        yield both


def test_each_version_is_unloaded_once(server, ends):
    sender, receiver = ends
    with lora.ServerAdapters(server.url, "policy") as adapters:
        first = adapters.load(receiver.latest())
        assert adapters.load(receiver.latest()) == first
        pass_on(sender, receiver)
        second = adapters.load(receiver.latest())
        assert first != second and set(server.has) == {"base", second}
        assert [one.name for one in adapters.live.path.parent.iterdir()] == [second]
    assert server.posted == [
        ("load", first), ("load", second), ("unload", first), ("unload", second)
    ]
    assert set(server.has) == {"base"} and not adapters.live


def test_failed_unload_is_logged_and_made_again(server, ends, caplog):
    sender, receiver = ends
    with lora.ServerAdapters(server.url, "policy") as adapters:
        first = adapters.load(receiver.latest())
        pass_on(sender, receiver)
        server.refuses = {"unload": "busy"}
        with caplog.at_level(logging.WARNING, "weightsync"):
            second = adapters.load(receiver.latest())
        assert f"{second} is live, but the engine did not unload {first}: busy" in caplog.text
        server.refuses = {}
        pass_on(sender, receiver)
        third = adapters.load(receiver.latest())
        assert set(server.has) == {"base", third}


def test_late_server_is_a_deadline(server, ends):
    sender, receiver = ends
    adapters = lora.ServerAdapters(server.url, "policy", timeout=0.5)
    first = adapters.load(receiver.latest())
    pass_on(sender, receiver)
    server.refuses = {"load": None}
    with pytest.raises(weightsync.DeadlineError, match="load_lora_adapter did not answer"):
        adapters.load(receiver.latest())
    assert adapters.live.name == first
    server.refuses = {}
    assert adapters.load(receiver.latest()).startswith("policy-v2-")
    adapters.close()


def test_restarted_server_that_refuses_has_no_live_version(server, ends):
    sender, receiver = ends
    with lora.ServerAdapters(server.url, "policy") as adapters:
        first = adapters.load(receiver.latest())
        del server.has[first]
        server.refuses = {"load": "no room"}
        pass_on(sender, receiver)
        with pytest.raises(weightsync.LoadError, match="policy-v2-.*: no room"):
            adapters.load(receiver.latest())
        assert adapters.live is None
        server.refuses = {}
        second = adapters.load(receiver.latest())
        assert adapters.live.name == second and set(server.has) == {"base", second}


def test_name_that_the_server_has_is_not_used(server, ends):
    _, receiver = ends
    name = f"policy-v1-{receiver.latest().run[1]}"
    server.has = {name: "/somebody/else", "policy-v1": "/models/policy-v1"}
    with lora.ServerAdapters(server.url, "policy") as adapters:
        assert adapters.load(receiver.latest()) == f"{name}-2"
    assert set(server.has) == {name, "policy-v1"}


def test_dead_server_is_a_load_error(server, ends, caplog):
    _, receiver = ends
    with pytest.raises(weightsync.LoadError, match="does not say what it has"):
        with lora.ServerAdapters(server.url, "policy") as adapters:
            adapters.load(receiver.latest())
            folder = adapters.live.path.parent
            server.close()
            with caplog.at_level(logging.WARNING, "weightsync"):
                adapters.load(receiver.latest())
    assert "the engine did not unload policy-v1-" in caplog.text
    assert not folder.exists()


def test_folder_that_was_given_is_open_to_engines(server, ends, tmp_path):
    _, receiver = ends
    with lora.ServerAdapters(server.url, "policy", tmp_path) as adapters:
        adapters.load(receiver.latest())
        path = adapters.live.path
        assert path.stat().st_mode & 0o777 == path.parent.stat().st_mode & 0o777 == 0o755
    with lora.ServerAdapters(server.url, "policy") as adapters:
        adapters.load(receiver.latest())
        assert adapters.live.path.parent.stat().st_mode & 0o777 == 0o700


def test_wrong_settings_are_refused():
    for wrong, words in [
        ({"engine": "trt"}, 'engine: expected "vllm" or "sglang", got \'trt\''),
        ({"timeout": 0}, "timeout: expected seconds, more than zero, got 0"),
        ({"timeout": "1"}, "timeout: expected seconds"),
    ]:
        with pytest.raises(weightsync.SettingError, match=words):
            lora.ServerAdapters("http://host:8000", "policy", **wrong)


def test_url_of_an_ipv6_address_is_kept_or_refused():
    for url, address in [
        ("https://[::1]", ("::1", 443)),
        ("http://[::1]/", ("::1", 80)),
        ("http://[fd00::1]:8000/v1", ("fd00::1", 8000)),
        ("http://[fe80::1%eth0]:8000", ("fe80::1%eth0", 8000)),
        ("http://[fe80::1%25eth0]", ("fe80::1%eth0", 80)),
        ("https://host", ("host", 443)),
    ]:
        assert http.Server(url, "")._address == address, url
    for url in ["http://::1:8000", "http://[::1", "http://[host]:8000", "http://host:99999", "http://:80"]:
        with pytest.raises(weightsync.SettingError, match="expected a URL such as http://host:8000"):
            http.Server(url, "")
        with pytest.raises(weightsync.SettingError, match="^engines: expected a URL"):
            trl._checked(url)
    with pytest.raises(weightsync.SettingError, match="a host that a certificate can name"):
        http.Server("https://[fe80::1%eth0]:8000", "")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_server_is_asked_without_a_proxy(host, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        at = f"http://127.0.0.1:{proxy.getsockname()[1]}"
        for name in ["http_proxy", "https_proxy", "all_proxy"]:
            monkeypatch.setenv(name, at)
            monkeypatch.setenv(name.upper(), at)
        with contextlib.closing(Server(host)) as server:
            assert http.Server(server.url, "").get("v1/models", LONG)["data"]
            assert trl._serves(server.url)
            # What a server redirects to is not asked.
            server.moved = f"{at}/v1/models"
            with pytest.raises(weightsync.WeightsyncError, match=f"leads to {at}"):
                http.Server(server.url, "").get("v1/models", LONG)
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
