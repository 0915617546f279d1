"""Collectors whose workers run on other hosts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.errors import SettingError
from weightsync.rl._crew import Crew
from weightsync.rl._multi_base import MultiCollector
from weightsync.rl._remote import Hosts
from weightsync.rl._worker import Start
from weightsync.rl.multi import MultiAsyncCollector, MultiSyncCollector
from weightsync.scheme import Distributed, Scheme


class _OnHosts(MultiCollector):
    """What collectors on other hosts share."""

    def __init__(
        self,
        create_env_fn: Sequence[Any],
        policy: Any = None,
        *,
        launcher: str | Sequence[str] | None = "local",
        hosts: Sequence[str] | None = None,
        listen: str | None = None,
        advertise: str | None = None,
        tls: str | os.PathLike[str] | None = None,
        insecure_plaintext_code: bool = False,
        weight_sync_schemes: Mapping[str, Scheme | str] | None = None,
        **settings: Any,
    ) -> None:
        if "workers" in settings:
            raise SettingError(
                f"{type(self).__name__} has no setting workers: launcher says how they are started"
            )
        if "insecure_plaintext" in settings:
            raise SettingError(
                "insecure_plaintext: it is for weights, and workers get code: give both ends certificates "
                "(tls=DIR), or, if you trust that network, allow it with insecure_plaintext_code=True"
            )
        if weight_sync_schemes is None:
            scheme = Distributed(
                listen=_any_port(listen),
                advertise=_any_port(advertise),
                tls=tls,
                # What allows code allows weights.
                insecure_plaintext=insecure_plaintext_code
                or os.environ.get("WEIGHTSYNC_INSECURE_PLAINTEXT_CODE") == "1",
            )
            weight_sync_schemes = {"policy": scheme}
        self._where = (launcher, hosts, listen, advertise, tls, insecure_plaintext_code)
        super().__init__(
            create_env_fn, policy, weight_sync_schemes=weight_sync_schemes, **settings
        )

    _hosts: Hosts | None = None

    @property
    def address(self) -> str:
        """Where workers join, as ``"host:port"``."""
        return "" if self._hosts is None else self._hosts.address

    def _make_crew(self, starts: list[Start]) -> Crew:
        self._hosts = Hosts(*self._where, len(starts))
        try:
            return Crew(starts, self._hosts.begin)
        except BaseException:
            self._hosts.close()
            raise

    def _close(self, close_env: bool) -> None:
        try:
            super()._close(close_env)
        finally:
            if self._hosts is not None:
                self._hosts.close()


def _any_port(address: str | None) -> str | None:
    """The same host, with a port that the system chooses: the given one is for frames."""
    return None if address is None else address.rpartition(":")[0] + ":0"


class DistributedSyncDataCollector(_OnHosts, MultiSyncCollector):
    """Workers on other hosts that collect at the same time, as those of :class:`MultiSyncCollector`.

    Frames come up over links of ``weightsync``, straight into the trainer's memory; weights go down
    by the scheme :class:`weightsync.Distributed`.

    Args:
        create_env_fn: an environment for each worker.
        policy: as for :class:`MultiSyncCollector`.
        launcher: how workers are started.

            - ``"local"``: as processes of this host.
            - A command, as a text or a list, such as
              ``"ssh {host} python3 -m weightsync.rl.worker"``, with ``{host}`` and ``{worker}``
              filled in. It gets the trainer's address and a secret on its standard input, and
              lives as long as its worker.
            - None: nothing is started. Workers join on their own, by
              ``python3 -m weightsync.rl.worker --join HOST:PORT``, with the trainer's token.
        hosts: the hosts that a launcher's ``{host}`` names, in turn.
        listen: where the trainer listens for workers, as ``"host:port"``; loopback without it,
            which other hosts cannot reach. Other addresses need a token (``WEIGHTSYNC_TOKEN_FILE``).
            The weights have a port of their own, which the system chooses.
        advertise: the address by which workers reach the trainer, if ``listen`` is not it.
        tls: the folder or file with the certificates of encrypted connections, as ``weightsync certs
            new`` makes them. Workers that a launcher starts look for theirs at the same path, unless
            ``WEIGHTSYNC_TLS_DIR`` or ``--tls`` names another; others need one of these.
        insecure_plaintext_code: allow unencrypted connections to other machines. Workers get their
            environment and policy as code, so a program that can change that traffic can run
            programs on them. Weights may then travel in plain text, too.
            ``WEIGHTSYNC_INSECURE_PLAINTEXT=1`` does not allow it, and
            ``WEIGHTSYNC_INSECURE_PLAINTEXT_CODE=1`` at both ends does.
        weight_sync_schemes: as for :class:`MultiSyncCollector`; by default a scheme ``Distributed``
            that listens at the same host.
        settings: those of :class:`MultiSyncCollector` but ``workers``.

    Raises:
        WorkerError: if a worker fails, with its last words.
    """


class DistributedDataCollector(_OnHosts, MultiAsyncCollector):
    """Workers on other hosts: batches come from the one that is done first, as in
    :class:`MultiAsyncCollector`.

    Args:
        sync: make a :class:`DistributedSyncDataCollector` instead.
        settings: those of :class:`DistributedSyncDataCollector` and :class:`MultiAsyncCollector`.

    Raises:
        WorkerError: if no worker is left.
    """

    def __new__(cls, *arguments: Any, sync: bool = False, **settings: Any) -> Any:
        if sync:
            return DistributedSyncDataCollector(*arguments, **settings)
        return super().__new__(cls)

    def __init__(self, *arguments: Any, sync: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)


class RPCDataCollector(DistributedDataCollector):
    """The same as :class:`DistributedDataCollector`, by the name of TorchRL's."""
