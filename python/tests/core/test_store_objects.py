"""Stores in an object store: a real S3 server, moto, in a process of its own."""

import contextlib
import http.client
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
import uuid

import pytest
import torch
import weightsync
from ends import LONG, Net, all_ended, meet, pass_on

#: The Python that has moto.
PYTHON = "WEIGHTSYNC_OBJECTS_PYTHON"

#: One request after the other: moto does not check a condition and write in one step. It ends with
#: its standard input.
MOTO = """
import os, sys, threading
from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

app = DomainDispatcherApplication(create_backend_app)
server = make_server("127.0.0.1", 0, app, request_handler=MotoRequestHandler)
print(server.port, flush=True)
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
server.serve_forever()
"""


@pytest.fixture(scope="module")
def bucket():
    """The address of a bucket; this process and its children find the server."""
    assert PYTHON in os.environ, f"{PYTHON} is not set: run `cargo xtask pytest`, which sets it"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([os.environ[PYTHON], "-c", MOTO], **pipes) as moto:
        endpoint = f"http://127.0.0.1:{int(moto.stdout.readline())}"
        made = urllib.request.Request(f"{endpoint}/weightsync", method="PUT")
        urllib.request.urlopen(made).close()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in _found_at(endpoint).items():
                patch.setenv(name, value)
            yield "s3://weightsync"
        moto.stdin.close()


def _found_at(endpoint):
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
    }


@pytest.fixture
def url(bucket):
    return f"{bucket}/{uuid.uuid4().hex}/policy"


def test_versions_load_from_objects(url, tmp_path):
    with weightsync.Store(url, keep=2, files={"config.json": b"{}"}) as store:
        model = Net(1.0, numel=1 << 16)
        for _ in range(3):
            store.save(model)
            with torch.no_grad():
                model.large[::100] += 1
        store.name("best", 2)
        store.save(model)
    store = weightsync.Store(url)
    assert [one.version for one in store.versions()] == [2, 3, 4]
    assert store.names() == {"best": {"policy": 2}}
    loaded = Net(0.0, numel=1 << 16)
    assert store.load_into(loaded, at_least=4, timeout=LONG) == 4
    assert torch.equal(loaded.large, model.large)
    assert store.files() == {"config.json": b"{}"}
    assert store.pull(tmp_path / "out", named="best") == 2
    with pytest.raises(weightsync.ModelError, match="v9"):
        store.load(9)


def test_weights_go_through_objects(url):
    trainer, models = Net(1.0), [Net(), Net()]
    sender = weightsync.Sender(trainer, scheme=f"store:{url}")
    receivers = [
        weightsync.ModelReceiver(sender.init_info, at, model=model) for at, model in enumerate(models)
    ]
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
        trainer.fill(2.0)
        pass_on(sender, *receivers)
        assert [model.value for model in models] == [2.0, 2.0]


def test_a_sender_keeps_its_versions_in_objects(url):
    trainer = Net(1.0)
    with weightsync.Sender(trainer, keep=url) as sender:
        sender.connect(0)
        trainer.fill(2.0)
        sender.send()
    assert [one.outcome for one in sender.saves][-1] == "durable"
    model = Net()
    assert weightsync.Store(url).load_into(model) == 2
    assert model.value == 2.0


def test_forked_children_have_requests_of_their_own(url):
    with weightsync.Store(url) as store:
        store.save(Net(1.0))
        children = []
        for _ in range(3):
            child = os.fork()
            if child == 0:
                model = Net()
                store.load_into(model)
                refused = False
                try:
                    store.save(Net(9.0))
                except weightsync.LifecycleError:
                    refused = True
                # The parent saves the second version meanwhile.
                os._exit(0 if refused and model.value in (1.0, 2.0) else 1)
            children.append(child)
        # The parent's connections are its own while they read.
        store.save(Net(2.0))
        assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
        assert store.load(2)["small"].tolist() == [2.0] * 3


def test_ctrl_c_ends_a_request_without_an_answer(tmp_path):
    program = (
        "import signal, sys, weightsync\n"
        # A shell's background jobs ignore it.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "weightsync.Store('s3://bucket/policy').versions()\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, **_found_at(endpoint)},
            stderr=subprocess.PIPE,
        )
        with process:
            # It asks, and gets no answer.
            asked, _ = silent.accept()
            with asked:
                asked.recv(1)
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=LONG)
    assert b"KeyboardInterrupt" in errors


def test_buckets_that_are_not_there_are_named(bucket):
    with pytest.raises(weightsync.errors.WeightsyncError, match="NoSuchBucket"):
        weightsync.Store("s3://no-such-bucket/policy").versions()


def test_commands_move_checkpoints_in_objects(url, tmp_path):
    from safetensors.torch import load_file, save_file

    def run(*words):
        command = [sys.executable, "-P", "-m", "weightsync", *map(str, words)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    weights = {"w": torch.zeros(1 << 18)}
    for value in range(3):
        weights["w"][value] = 1
        save_file(weights, tmp_path / "model.safetensors")
        said = run("push", tmp_path / "model.safetensors", "--to", url)
        assert said.startswith(f"policy v{value + 1}: "), said
    assert "% of the elements changed since v2" in said
    assert run("log", url, "-n", 1).endswith("3 versions in all\n")
    assert run("pull", url, "--version", 2, "--out", tmp_path / "out").startswith("policy v2: ")
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].sum() == 2
    assert run("watch", url, "--once", "--exec", "echo $WEIGHTSYNC_VERSION") == "3\n"
    assert run("scrub", "--store", url) == "all of 3 versions can be loaded\n"


class Proxy(http.server.BaseHTTPRequestHandler):
    """Passes requests for any host on to the server of this test."""

    protocol_version = "HTTP/1.1"
    behind = None
    asked = []

    def _pass_on(self):
        there = urllib.parse.urlsplit(self.path)
        self.asked.append(there.hostname)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        # A client of the server itself would ask for a path alone.
        path = urllib.parse.urlunsplit(("", "", there.path, there.query, ""))
        server = http.client.HTTPConnection(self.behind, timeout=LONG)
        # moto takes the first part of other hosts for the bucket.
        headers = {name.lower(): value for name, value in self.headers.items()}
        server.request(self.command, path, body, headers | {"host": self.behind})
        answer = server.getresponse()
        content = answer.read()
        server.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        if not answer.getheader("Content-Length"):
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def a_proxy(behind):
    """A proxy, and the hosts that it was asked for."""
    asked = []
    handler = type("Handler", (Proxy,), {"behind": behind, "asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", asked
        finally:
            server.shutdown()
            thread.join()


#: The host of the bucket, which variables are set (PROXY stands for the proxy), and whether requests go
#: by the proxy. No resolver knows the host `bucket.invalid`.
PROXIED = [
    ("bucket.invalid", {"HTTP_PROXY": "PROXY"}, True),
    ("bucket.invalid", {"http_proxy": "PROXY"}, True),
    ("bucket.invalid", {"ALL_PROXY": "PROXY", "NO_PROXY": "127.0.0.1,example.org"}, True),
    ("bucket.invalid", {"AWS_PROXY_URL": "PROXY", "NO_PROXY": "*"}, True),
    ("127.0.0.1", {"HTTP_PROXY": "PROXY", "NO_PROXY": "127.0.0.0/8"}, False),
    ("127.0.0.1", {"ALL_PROXY": "PROXY", "no_proxy": "127.0.0.1"}, False),
    ("127.0.0.1", {"HTTPS_PROXY": "PROXY"}, False),
    ("127.0.0.1", {"AWS_PROXY_URL": "PROXY", "AWS_PROXY_EXCLUDES": "127.0.0.1"}, False),
]


@pytest.mark.parametrize(("host", "variables", "is_asked"), PROXIED)
def test_bucket_is_reached_by_the_proxy_of_the_environment(url, monkeypatch, host, variables, is_asked):
    behind = urllib.parse.urlsplit(os.environ["AWS_ENDPOINT_URL"])
    with a_proxy(behind.netloc) as (proxy, asked):
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{behind.port}")
        for name, value in variables.items():
            monkeypatch.setenv(name, value.replace("PROXY", proxy))
        with weightsync.Store(url) as store:
            store.save(Net(3.0))
        model = Net()
        assert weightsync.Store(url).load_into(model) == 1
        assert model.value == 3.0
    assert set(asked) == ({host} if is_asked else set())
