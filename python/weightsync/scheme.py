"""Schemes as values: how weights travel, with their settings.

A value and its text mean the same: ``str(MultiProcess(every=4))`` is
``"multi-process:every=4"``, and a :class:`Sender` takes either.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from weightsync._native import Session
from weightsync.errors import SettingError

__all__ = ["Distributed", "MultiProcess", "NoSync", "Rpc", "Scheme", "SharedMem", "StoreScheme"]


@dataclass(frozen=True)
class Scheme:
    """A way for weights to travel; ``str()`` of it is its text.

    Raises:
        SettingError: for a setting that the scheme does not take.
    """

    _name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        # Settings and their values are checked in Rust alone.
        Session(str(self))

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
        pull: workers take a version only when they ask for one, and sends wait for no
            worker.
    """

    _name: ClassVar[str] = "shared-mem"

    pull: bool = False


@dataclass(frozen=True, kw_only=True)
class MultiProcess(Scheme):
    """A queue to each worker process on this machine.

    Args:
        every: deliver every version in order, with at most this many (1 to 32) in a
            worker's queue; None: the newest version only.
        own_copy: each version is copied into the worker's own memory, so that a worker
            that holds one keeps no slot.
    """

    _name: ClassVar[str] = "multi-process"

    every: int | None = None
    own_copy: bool = False


@dataclass(frozen=True, kw_only=True)
class Distributed(Scheme):
    """Workers on any host: they dial in, over TCP.

    Args:
        listen: where the trainer listens, as ``"host:port"``; loopback without it, which
            workers of other hosts cannot reach. Other addresses need a token
            (``WEIGHTSYNC_TOKEN_FILE``).
        advertise: the address by which workers reach the trainer, if ``listen`` is not it.
        tls: the folder or file with the certificates of encrypted links, as ``weightsync certs new``
            makes them; that of ``WEIGHTSYNC_TLS_DIR`` without it. Workers look for theirs at the
            same path, unless that variable names another.
        insecure_plaintext: allow unencrypted connections to other machines.
        every: deliver every version in order, with at most this many (1 to 32) in a
            worker's queue; None: the newest version only.
        pull: workers take a version only when they ask for one.
        own_copy: each version is copied into the worker's own memory.
        share: ``"all"``: workers read the trainer's memory on its host, and that of their
            host's relay elsewhere; ``"relay"``: only the relay's; ``"none"``: each worker
            fetches a copy of its own.
        deltas: whether hosts with an older version get the changes alone: ``"auto"`` if
            that is quicker, ``"always"`` if it takes fewer bytes, ``"never"``.
        verify: ``"blake3"``: hosts do not trust relays, and compare what relays send with digests
            that the trainer tells them. ``"checksums"`` finds accidents alone.
        arity: how many hosts fetch from each host, 1 to 64; 1 is a chain.
        connections: the number of connections by which a host fetches, 1 to 8.
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

    Args:
        initial: ``"send"``: the first weights come with the first send; ``"connect"``:
            with the rendez-vous.
        listen: where the trainer listens, as ``"host:port"``; loopback without it. Other
            addresses need a token (``WEIGHTSYNC_TOKEN_FILE``) on every host.
        advertise: the address by which workers reach the trainer, if ``listen`` is not it.
        tls: the folder or file with the certificates of encrypted connections, as ``weightsync certs
            new`` makes them; that of ``WEIGHTSYNC_TLS_DIR`` without it. Workers look for theirs at
            the same path, unless that variable names another.
        insecure_plaintext: allow unencrypted connections to other machines.
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
        keep: which versions stay, as for :class:`weightsync.Store`; 8 by default.
        temporary: a store of this sender alone below the path, which is removed when the sender
            and its workers have left.
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
