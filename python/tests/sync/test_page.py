"""The synchronizer's page, in Chromium."""

import base64
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import torch
import weightsync
from patience import patience

from weightsync import Synchronizer

#: How long something may take that takes a quiet machine a second or two.
LONG = patience(30)

pytestmark = pytest.mark.timeout(150)

#: A name with what HTML and SVG reserve.
NAME = "<b>e0</b>\"'&amp;"

#: What scripts find in the page.
TEXT = "return document.getElementById(arguments[0]).innerText"
CELLS = """return [...document.getElementById(arguments[0]).rows].map(
    ({ cells }) => [...cells].map((one) => one.innerText))"""
COUNT = "return document.querySelectorAll(arguments[0]).length"
TITLES = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent.slice(9))"
PRESS = """document.getElementById(arguments[0]).dispatchEvent(
    new KeyboardEvent("keydown", { key: arguments[1] }))"""
HAS_PROBLEM = "return document.getElementById('problem').checkVisibility()"


def get(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(url, data, timeout=LONG) as answer:
        return answer.read()


class Browser:
    """A Chromium without a screen, and its driver, which speaks WebDriver."""

    def __init__(self, home, *args):
        assert shutil.which("chromedriver"), (
            "this test needs Chromium and its driver\n"
            "  fix: apt install chromium-driver (that is Debian's name of it)"
        )
        folders = ("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_RUNTIME_DIR")
        self._home = os.fsencode(home)
        self._driver = subprocess.Popen(
            # The driver ends with this process, and Chromium with its pipe to the driver.
            ["setpriv", "--pdeathsig", "KILL", "chromedriver", "--port=0"],
            env=os.environ | dict.fromkeys(folders, home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            begun = (re.search(r"successfully on port (\d+)", line) for line in self._driver.stdout)
            port = next((found[1] for found in begun if found), None)
            assert port, "chromedriver did not start"
            self._session = f"http://127.0.0.1:{port}/session"
            options = {"args": ["--headless", "--no-sandbox", "--remote-debugging-pipe", *args]}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            made = self._ask("", {"capabilities": {"alwaysMatch": wanted}})
            self._session += f"/{made['sessionId']}"
        except BaseException:
            self.close()
            raise

    def _ask(self, command, body):
        try:
            return json.loads(get(self._session + command, body))["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def open(self, url):
        self._ask("/url", {"url": url})

    def run(self, script, *arguments):
        return self._ask("/execute/sync", {"script": script, "args": arguments})

    def wait_for(self, expected, script, *arguments):
        """Waits until a script finds this in the page."""
        until = time.monotonic() + LONG
        while (found := self.run(script, *arguments)) != expected and time.monotonic() < until:
            time.sleep(0.05)
        assert found == expected, self.run("return document.body.innerText")

    def console(self):
        """What was written there since the last call."""
        return self._ask("/se/log", {"type": "browser"})

    def close(self):
        self._driver.kill()
        self._driver.communicate()
        until = time.monotonic() + LONG
        while (left := self._processes()) and time.monotonic() < until:
            time.sleep(0.05)
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        assert not left

    def _processes(self):
        """Each has its folder in its arguments or in its environment."""
        found = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            for file in ("cmdline", "environ"):
                # The process may have ended meanwhile.
                with contextlib.suppress(OSError):
                    if self._home in Path("/proc", name, file).read_bytes():
                        found.add(int(name))
        return found


@contextlib.contextmanager
def a_browser(*args):
    # Its sockets are in there, and a socket's path is short.
    with tempfile.TemporaryDirectory() as home:
        with contextlib.closing(Browser(home, *args)) as made:
            yield made


@pytest.fixture
def browser():
    with a_browser() as made:
        yield made


def open_page(browser, address, scheme="http"):
    browser.open(f"{scheme}://{address}/")
    browser.wait_for("1", "return document.documentElement.dataset.ready")
    browser.wait_for("live", TEXT, "connection")
    browser.run("window.isSame = true")


def test_page_shows_parties_without_a_reload(browser):
    with Synchronizer.local(listen="127.0.0.1:0") as sync:
        open_page(browser, sync.address)
        for words, element in [("memory", "method"), ("none yet", "newest"), ("no trainer", "trainer")]:
            assert browser.run(TEXT, element) == words
        with sync.trainer(torch.nn.Linear(4, 4), style="fully_async") as trainer:
            assert trainer.sync(5)
            with sync.explorer(NAME, torch.nn.Linear(4, 4), style="fully_async") as explorer:
                assert explorer.sync(3).version == 2
                assert trainer.sync(7) and trainer.sync(9)
                row = [NAME, "running", "3", "v2", "2 ▲", "4", "fully_async", "synced"]
                browser.wait_for([row], CELLS, "explorers")
                assert browser.run(COUNT, "b") == 0
                browser.wait_for("v4 of step 9", TEXT, "newest")
                words = f"name trainer state running step 9 style fully_async epoch {trainer.epoch}"
                browser.wait_for(words.split(), TEXT + ".split('\\n')", "trainer")
                browser.wait_for(4, COUNT, "#marks .published")
                browser.wait_for(1, COUNT, "#marks .synced rect")
                ends = browser.run(TITLES, "#marks .synced title")
                assert ends[0].startswith(f"{NAME} runs v2 (asked "), ends
                browser.run(PRESS, "timeline", "Home")
                browser.run(PRESS, "timeline", "ArrowRight")
                browser.wait_for("trainer published v1 of step 0", TEXT + ".slice(9)", "chosen")
                versions = [(cells[0], cells[3], cells[4]) for cells in browser.run(CELLS, "versions")]
                assert versions[0] == ("v4", "0", "files") and versions[2][:2] == ("v2", "1"), versions
                link = browser.run("return document.querySelector('#versions a').href")
                listing = json.loads(get(link))
                (file,) = listing["files"]
                assert (listing["version"], file["tensors"]) == (4, 2)
                saved = get(urllib.parse.urljoin(link, file["name"]))
                end = 8 + int.from_bytes(saved[:8], "little")
                assert json.loads(saved[8:end]).keys() >= {"weight", "bias"}
            browser.wait_for([], CELLS, "explorers")
            browser.wait_for(1, COUNT, "#marks .stopped")
        browser.wait_for("no trainer", TEXT, "trainer")
        assert browser.run("return window.isSame")
        assert browser.console() == []


def test_page_goes_on_when_its_server_returns(browser):
    # Not where others listen: the port is free again when the server returns.
    with Synchronizer.local(listen="127.0.0.2:0") as sync:
        address = sync.address
        open_page(browser, address)
        with sync.trainer(torch.nn.Linear(4, 4)) as trainer:
            assert trainer.sync(1)
            browser.wait_for("v2 of step 1", TEXT, "newest")
            assert not browser.run(HAS_PROBLEM)
            assert browser.console() == []
            sync.shutdown()
            browser.wait_for("reconnecting", TEXT, "connection")
            browser.wait_for(True, HAS_PROBLEM)
            assert "What you see below is old." in browser.run(TEXT, "problem")
    with Synchronizer.local(listen=address) as sync:
        browser.wait_for("live", TEXT, "connection")
        browser.wait_for(False, HAS_PROBLEM)
        browser.wait_for("no trainer", TEXT, "trainer")
        with sync.trainer(torch.nn.Linear(4, 4), name="second"):
            browser.wait_for("v1 of step 0", TEXT, "newest")
            # The page has forgotten the events of the other server.
            seen = ["second joined as the trainer (fixed)", "second published v1 of step 0"]
            browser.wait_for(seen, TITLES, "#marks title")
        assert browser.run("return window.isSame")
        assert [entry for entry in browser.console() if entry["source"] != "network"] == []


@pytest.fixture
def encrypted(tmp_path):
    """A service whose loopback is encrypted: its address, and the folder of its certificates."""
    command = Path(sys.executable).with_name("weightsync")
    pki = tmp_path / "pki"
    subprocess.run([command, "certs", "new", "--out", pki, "--hosts", "127.0.0.1"], check=True)
    arguments = [command, "serve", "--address", "127.0.0.1:0", "--tls", pki]
    environment = os.environ | {"WEIGHTSYNC_TLS_LOOPBACK": "1"}
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, env=environment, **pipes) as service:
        try:
            found = re.search(r"127\.0\.0\.1:\d+", service.stdout.readline())
            yield found[0], pki
        finally:
            service.terminate()


def key_digest(certificate):
    """The digest of a certificate's key, by which a browser is told to accept it."""
    key = ["openssl", "x509", "-in", certificate, "-pubkey", "-noout"]
    key = subprocess.run(key, check=True, capture_output=True).stdout
    der = ["openssl", "pkey", "-pubin", "-outform", "der"]
    der = subprocess.run(der, check=True, capture_output=True, input=key).stdout
    return base64.b64encode(hashlib.sha256(der).digest()).decode()


def test_page_is_live_over_https(encrypted):
    address, pki = encrypted
    accept = f"--ignore-certificate-errors-spki-list={key_digest(pki / 'trainer.pem')}"
    with a_browser(accept) as browser:
        open_page(browser, address, "https")
        assert browser.run("return window.isSecureContext")
        assert browser.run(TEXT, "trainer") == "no trainer"
        # Plain HTTP gets no page there.
        browser.open(f"http://{address}/")
        assert "HTTPS" in browser.run("return document.body.innerText")


def test_https_client_checks_the_authority(encrypted):
    address, pki = encrypted
    trusts = ssl.create_default_context(cafile=pki / "ca.pem")
    with urllib.request.urlopen(f"https://{address}/v1/status", context=trusts) as answer:
        assert answer.status == 200
    # The certificate is for the address alone.
    port = address.split(":")[1]
    with pytest.raises(urllib.error.URLError, match="mismatch|doesn't match"):
        urllib.request.urlopen(f"https://localhost:{port}/v1/status", context=trusts)
    with pytest.raises(urllib.error.URLError, match="self-signed|self signed|unable to get local"):
        urllib.request.urlopen(f"https://{address}/v1/status", context=ssl.create_default_context())


def test_party_joins_with_the_certificate_of_its_part(encrypted, monkeypatch):
    address, pki = encrypted
    monkeypatch.setenv("WEIGHTSYNC_TLS_DIR", str(pki))
    monkeypatch.setenv("WEIGHTSYNC_TLS_LOOPBACK", "1")
    with Synchronizer.connect(address) as sync:
        # A worker's certificate is there, too, and the synchronizer would take no trainer with it.
        with sync.trainer(torch.nn.Linear(2, 2)), sync.explorer("e0") as explorer:
            assert explorer.sync(1)
        (pki / "trainer.pem").rename(pki / "away")
        with pytest.raises(weightsync.WeightsyncError, match="no certificate of a trainer"):
            sync.trainer(torch.nn.Linear(2, 2))
