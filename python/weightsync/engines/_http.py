"""Calls of a server: JSON over HTTP, each bounded in time and size."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import socket
import threading
import urllib.parse
from typing import Any

from weightsync.engines._base import Call, EngineCallError, EngineDiedError
from weightsync.errors import DeadlineError, SettingError

# No answer of a server is longer.
_LONGEST_ANSWER = 1 << 20


class Server:
    """A server.

    Args:
        url: its URL.
        missing: what to do where it lacks a path.
        api_key: what it was started with, and wants to see in each request.
    """

    def __init__(self, url: str, missing: str, api_key: str | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            # An interface of this machine is in a URL as "%25eth0".
            host, port = (parts.hostname or "").replace("%25", "%", 1), parts.port
        except ValueError as error:
            raise SettingError(
                f"expected a URL such as http://host:8000 or http://[::1]:8000, got {url!r}: {error}"
            ) from error
        if parts.scheme not in ("http", "https") or not host:
            raise SettingError(f"expected a URL such as http://host:8000, got {url!r}")
        self._is_encrypted = parts.scheme == "https"
        if self._is_encrypted and "%" in host:
            raise SettingError(
                f"expected a host that a certificate can name, got {url!r}: a link-local address is of an "
                "interface of this machine"
            )
        self.url = url.rstrip("/")
        # Without a port, http.client would take the end of an IPv6 address for one.
        self._address = host, port or (443 if self._is_encrypted else 80)
        self._path, self._missing = parts.path.rstrip("/"), missing
        if api_key is not None and not re.fullmatch(r"[!-~]+", api_key):
            raise SettingError(
                "api_key: expected letters, digits and signs of ASCII without white space, as a file "
                "may have around it (strip it)"
            )
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    @property
    def is_unencrypted(self) -> bool:
        """Whether what is posted leaves this machine in plain text."""
        return not self._is_encrypted and not _is_here(self._address[0])

    def is_of(self, given: Any) -> bool:
        """Whether this is the server's URL."""
        return isinstance(given, str) and given.rstrip("/") == self.url

    def get(self, path: str, timeout: float) -> dict[str, Any]:
        """What it answers; empty where that is no object."""
        return self._request("GET", path, None, timeout)

    def post(
        self, path: str, timeout: float, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The same, with a body."""
        return self._request("POST", path, body or {}, timeout)

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout: float
    ) -> dict[str, Any]:
        kind = http.client.HTTPSConnection if self._is_encrypted else http.client.HTTPConnection
        connection = kind(*self._address, timeout=timeout)
        text = None if body is None else json.dumps(body)
        headers = dict(self._headers)
        if text is not None:
            headers["Content-Type"] = "application/json"
        given_up = threading.Event()

        def exchange() -> tuple[http.client.HTTPResponse, bytes]:
            connection.connect()
            if given_up.is_set():
                # Nobody waits for the answer, and a call that comes late would change the engine.
                connection.close()
                raise TimeoutError
            connection.request(method, f"{self._path}/{path}", text, headers)
            answer = connection.getresponse()
            content = answer.read(_LONGEST_ANSWER + 1)
            if answer.length and len(content) <= _LONGEST_ANSWER:
                # The connection's own read returns what came before the end.
                raise http.client.IncompleteRead(content, answer.length)
            return answer, content

        try:
            # The connection's own timeout is for each of its reads, and for each of its addresses.
            answer, content = Call(f"/{_bare(path)}", exchange).wait(timeout)
        except TimeoutError as error:
            raise DeadlineError(f"/{_bare(path)} did not answer in {timeout:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            said = str(error) or type(error).__name__
            raise EngineDiedError(f"/{_bare(path)}: {said}") from error
        finally:
            given_up.set()
            if connection.sock is not None:
                # It may be read in a thread.
                with contextlib.suppress(OSError):
                    connection.sock.shutdown(socket.SHUT_RDWR)
            connection.close()
        status = answer.status
        try:
            told = json.loads(content or b"{}")
        except ValueError as error:
            # Routes may answer with a word, and no more.
            if 200 <= status < 300 and "json" in (answer.getheader("Content-Type") or ""):
                is_long = len(content) > _LONGEST_ANSWER
                what = f"more than {_LONGEST_ANSWER:,} bytes" if is_long else "text that is not JSON"
                raise EngineCallError(f"/{_bare(path)} answered with {what}") from error
            told = {}
        if 200 <= status < 300:
            return told if isinstance(told, dict) else {}
        why = refusal(told)
        if status == 404 and (why or "not found").lower() == "not found":
            raise EngineCallError(f"the server has no /{_bare(path)}: {self._missing}")
        # A redirect is not followed: a call that was not made is no success.
        moved = answer.getheader("Location")
        where = f" and leads to {moved}: give the URL or the route of that place" if moved else ""
        raise EngineCallError(why or f"/{_bare(path)} answered {status}{where}")


def refusal(answer: Any) -> str | None:
    """The words of a server's refusal."""
    if not isinstance(answer, dict):
        return None
    # Those of vLLM, FastAPI and SGLang.
    words = ("error", "detail", "message", "error_message", "error_msg")
    error = next((answer[one] for one in words if answer.get(one)), None)
    text = error.get("message") if isinstance(error, dict) else error
    return str(text) if text else None


def _is_here(host: str) -> bool:
    """Whether a host is this machine: all its addresses are of this one."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
        for family, kind, _, _, address in found:
            with socket.socket(family, kind) as end:
                end.bind(address)
    except OSError:
        return False
    # A connection to 0.0.0.0 goes to this machine.
    return bool(found)


def _bare(path: str) -> str:
    return path.split("?")[0]
