"""Schemes as values: how weights travel, with their settings.

A value and its text mean the same: ``str(MultiProcess(every=4))`` is
``"multi-process:every=4"``, and a :class:`Sender` takes either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from weightsync._checks import text
from weightsync._native import Session
from weightsync.errors import SettingError

__all__ = ["Distributed", "MultiProcess", "NoSync", "Rpc", "Scheme", "SharedMem", "StoreScheme"]

#: The variable that allows unencrypted connections to other machines where it is 1.
PLAINTEXT_VARIABLE = "WEIGHTSYNC_INSECURE_PLAINTEXT"


@dataclass(frozen=True)
class Scheme:
    """A way for weights to travel; ``str()`` of it is its text.

    Raises:
        SettingError: for a setting that the scheme does not take.
    """

    _name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        # Settings and their values are checked in Rust alone.
        Session(text("scheme", str(self)))

    def __str__(self) -> str:
        settings = ",".join(self._settings())
        return f"{self._name}:{settings}" if settings else self._name

    def _settings(self) -> Iterator[str]:
        for field in fields(self):
            value = getattr(self, field.name)
            # 0 equals False, and is refused in Rust where a flag is expected.
            if value == field.default and type(value) is type(field.default):
                continue
            key = field.name.replace("_", "-")
            if "," in str(value):
                raise SettingError(f'"{key}": expected a value without commas, got "{value}"')
            yield key if value is True else f"{key}={value}"


@dataclass(frozen=True, kw_only=True)
class SharedMem(Scheme):
    """Shared memory: workers on this machine read the newest version in place.

    Args:
        pull: workers take a version only when they ask for one, and sends wait for no worker.
    """

    _name: ClassVar[str] = "shared-mem"

    pull: bool = False


@dataclass(frozen=True, kw_only=True)
class MultiProcess(Scheme):
    """A queue to each worker process on this machine.

    Args:
        every: every version in order, with at most this many in a worker's queue; the newest alone,
            without it.
        own_copy: each version is copied into the worker's own memory, so that a worker that holds
            one keeps no slot.
    """

    _name: ClassVar[str] = "multi-process"

    every: int | None = None
    own_copy: bool = False


@dataclass(frozen=True, kw_only=True)
class Distributed(Scheme):
    """Workers on any host: they dial in, over TCP.

    A trainer that listens at another address than loopback needs a token
    (``WEIGHTSYNC_TOKEN_FILE``).

    Args:
        listen: where the trainer listens; 127.0.0.1 at a port that the system chooses, without it.
        advertise: the address at which workers reach the trainer, if ``listen`` is another one;
            port 0 is the listening port.
        tls: the certificates of encrypted links, a folder or a file; workers look for theirs at the
            same path, unless WEIGHTSYNC_TLS_DIR names another.
        insecure_plaintext: allows unencrypted connections to other machines; workers take this from
            the init info.
        every: every version in order, with at most this many in a worker's queue; the newest alone,
            without it.
        pull: workers take a version only when they ask for one; none is pushed.
        own_copy: each version is copied into the worker's own memory.
        share: whose memory workers read: the trainer's on its host and their relay's elsewhere,
            only their relay's, or none: each fetches a copy of its own.
        deltas: when hosts with an older version get the changes alone: if that is quicker, if it
            takes fewer bytes, or never.
        verify: what hosts compare that relays send: checksums, which find accidents, or the BLAKE3
            digests that the trainer tells them, for relays that nobody trusts.
        arity: how many hosts fetch from each host; 1 is a chain.
        connections: how many connections a host fetches over.
    """

    _name: ClassVar[str] = "distributed"

    listen: str | None = None
    advertise: str | None = None
    tls: str | os.PathLike[str] | None = None
    insecure_plaintext: bool = False
    every: int | None = None
    pull: bool = False
    own_copy: bool = False
    share: Literal["all", "relay", "none"] = "all"
    deltas: Literal["auto", "always", "never"] = "auto"
    verify: Literal["checksums", "blake3"] = "checksums"
    arity: int = 1
    connections: int = 2


@dataclass(frozen=True, kw_only=True)
class Rpc(Scheme):
    """The trainer calls each worker's HTTP endpoint, and the worker fetches the version.

    A trainer that listens at another address than loopback needs a token
    (``WEIGHTSYNC_TOKEN_FILE``), and so does every host.

    Args:
        initial: when workers get their first weights: with the first send, or with the rendez-vous.
        listen: where the trainer listens; 127.0.0.1 at a port that the system chooses, without it.
        advertise: the address at which workers reach the trainer, if ``listen`` is another one;
            port 0 is the listening port.
        tls: the certificates of encrypted links, a folder or a file; workers look for theirs at the
            same path, unless WEIGHTSYNC_TLS_DIR names another.
        insecure_plaintext: allows unencrypted connections to other machines; workers take this from
            the init info.
    """

    _name: ClassVar[str] = "rpc"

    initial: Literal["send", "connect"] = "send"
    listen: str | None = None
    advertise: str | None = None
    tls: str | os.PathLike[str] | None = None
    insecure_plaintext: bool = False


@dataclass(frozen=True, kw_only=True)
class NoSync(Scheme):
    """Sends no weights: for a model that never changes, or to measure a program without syncs."""

    _name: ClassVar[str] = "none"


@dataclass(frozen=True)
class StoreScheme(Scheme):
    """Versions are saved in a store, and workers load them, with no process in between.

    Args:
        url: the path of the store's directory, or an address such as ``s3://bucket/path``.
        keep: which versions stay; the newest 8 without it.
        temporary: a store of this sender alone below the path, which is removed when the sender and
            its workers have left.
    """

    _name: ClassVar[str] = "store"

    url: str | os.PathLike[str]
    keep: int | str | None = None
    temporary: bool = False

    def _settings(self) -> Iterator[str]:
        url = os.fspath(self.url)
        if "," in url or "=" in url:
            raise SettingError(f'"url": expected a path without commas and equals signs, got "{url}"')
        yield url
        if self.keep is not None:
            yield f"keep={self.keep}"
        if self.temporary:
            yield "temporary"


def may_tell_in_plaintext(scheme: str) -> bool:
    """Whether init infos of a sender may leave this machine in plain text.

    Args:
        scheme: the text of the sender's scheme.
    """
    name, _, settings = scheme.partition(":")
    # A store's init info has no secret.
    is_allowed = name == StoreScheme._name or "insecure-plaintext" in settings.split(",")
    return is_allowed or os.environ.get(PLAINTEXT_VARIABLE) == "1"
