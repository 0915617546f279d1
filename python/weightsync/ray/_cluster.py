"""Where this process is in a Ray cluster, and how weights travel there."""

from __future__ import annotations

import importlib
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightsync.errors import LifecycleError, SettingError, UnsupportedError
from weightsync.scheme import PLAINTEXT_VARIABLE, Distributed


def ray() -> Any:
    """The module, which only programs that use Ray have."""
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise UnsupportedError("Ray is not installed here: pip install 'weightsync[ray]'") from error


def running() -> Any:
    """The module, in a process of a cluster."""
    module = ray()
    if not module.is_initialized():
        raise LifecycleError("this process is in no Ray cluster: call ray.init() first")
    return module


def address() -> str:
    """The address of this host in the cluster."""
    return str(running().util.get_node_ip_address())


def node() -> str:
    """The id of this process's Ray node."""
    return str(running().get_runtime_context().get_node_id())


def listening(scheme: Distributed, insecure_plaintext: bool | None = None) -> Distributed:
    """The scheme, listening for other hosts if that is allowed, and else for this host alone.

    With certificates (``tls``, or ``WEIGHTSYNC_TLS_DIR``) it is.

    Args:
        scheme: its own address, if it has one, is kept. The permission for plain text is added, as
            relays and workers take it from the init info.
        insecure_plaintext: whether weights may travel between hosts without encryption; None: if
            ``WEIGHTSYNC_INSECURE_PLAINTEXT`` is 1.
    """
    if insecure_plaintext is None:
        insecure_plaintext = os.environ.get(PLAINTEXT_VARIABLE) == "1"
    is_encrypted = bool(scheme.tls or os.environ.get("WEIGHTSYNC_TLS_DIR"))
    is_plain = not is_encrypted and (insecure_plaintext or scheme.insecure_plaintext)
    if not (is_encrypted or is_plain):
        return scheme
    if token() is None:
        # The engine reads it there. Ray carries the init info, which has the secret.
        os.environ["WEIGHTSYNC_TOKEN"] = secrets.token_urlsafe(32)
    here = address()
    host = f"[{here}]" if ":" in here else here
    return replace(scheme, listen=scheme.listen or f"{host}:0", insecure_plaintext=is_plain)


def token() -> str | None:
    """The token that this process has, if it has any, as an environment variable has it."""
    file = os.environ.get("WEIGHTSYNC_TOKEN_FILE")
    if not file:
        return os.environ.get("WEIGHTSYNC_TOKEN")
    # Of any bytes. White space around them is none of the token.
    found = Path(file).read_bytes().strip(b" \t\n\r\f")
    if b"\0" in found:
        raise SettingError(
            f"the token in {file} has a zero byte, which no environment variable of a relay can have: "
            f"make one with `head -c 32 /dev/urandom | base64 > {file}`"
        )
    return os.fsdecode(found)
