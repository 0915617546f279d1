"""Models of one worker that share memory: a set brings one value to each place."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from weightsync._native import Layout, Snapshot
from weightsync._targets.base import Target, bytes_of
from weightsync._targets.module import ModuleTarget
from weightsync._targets.tree import TreeTarget
from weightsync._targets.writing import Overlaps


def together(targets: Mapping[str, Any], mapped: Container[str]) -> dict[str, Any]:
    """The targets of a worker; those that a set loads are compared before the first is written.

    Args:
        mapped: the names of those that are not asked for their layouts before each load.
    """
    known = {
        name: one
        for name, one in targets.items()
        if name not in mapped and isinstance(one, (ModuleTarget, TreeTarget))
    }
    if len(known) < 2:
        return dict(targets)
    set_ = _Set(known)
    return {name: _Member(set_, name) if name in known else one for name, one in targets.items()}


class _Member(Target):
    """One of the targets."""

    def __init__(self, of: _Set, name: str) -> None:
        self._of, self._name = of, name
        self._target: Target = of.targets[name]

    def layout(self) -> Layout:
        self._of.expect(self._name)
        return self._target.layout()

    def shape(self, layout: Layout) -> bool:
        return self._target.shape(layout)

    def load(self, snapshot: Snapshot) -> None:
        self._of.load(self._name, snapshot)


class _Set:
    """The library asks all models of a set for their layouts, and then loads them in that order.

    So the last one is known, and its call loads all of them.
    """

    def __init__(self, targets: dict[str, Any]) -> None:
        self.targets = targets
        # The models that were asked for their layouts, in order, and what came for them so far.
        self._expected: list[str] = []
        self._came: dict[str, Snapshot] = {}
        # The version that each model has, and whether the last set was refused.
        self._has: dict[str, tuple[Any, int]] = {}
        self._was_refused = False
        # The tensors that were compared last, by id, and those of them that share memory.
        self._looked: list[tuple[str, str, int]] = []
        self._overlaps = Overlaps([])

    def expect(self, name: str) -> None:
        self._came.clear()
        # Up to its last turn the list is of sets before.
        if name in self._expected:
            del self._expected[: self._expected.index(name) + 1]
        self._expected.append(name)

    def load(self, name: str, snapshot: Snapshot) -> None:
        self._came[name] = snapshot
        if name in self._expected[:-1]:
            return
        came, self._came = self._came, {}
        versions = {one: (snapshot.run, snapshot.version) for one, snapshot in came.items()}
        was_refused, self._was_refused = self._was_refused, False
        if was_refused and all(self._has.get(one) == version for one, version in versions.items()):
            # The way back from a set that was not written.
            return
        try:
            self._compare(came)
        except BaseException:
            self._was_refused = True
            raise
        for one, snapshot in came.items():
            self._has.pop(one, None)
            self.targets[one].load(snapshot)
            self._has[one] = versions[one]

    def _compare(self, came: dict[str, Snapshot]) -> None:
        """Refuses different values for memory of several models.

        Raises:
            WrongWeightsError: naming two tensors.
        """
        if len(came) < 2:
            return
        found = [(one, *tensor) for one in came for tensor in self.targets[one].tensors()]
        looked = [(one, name, id(tensor)) for one, name, tensor in found]
        if looked != self._looked:
            ties = {one: dict(snapshot.ties) for one, snapshot in came.items()}
            self._overlaps = Overlaps(
                (f"{one}: {name}", (one, ties[one].get(name, name)), tensor)
                for one, name, tensor in found
            )
            # A model's own it compares itself.
            self._overlaps.keep(lambda parts: len({part.sent[0] for part in parts}) > 1)
            self._looked = looked
        self._overlaps.check(lambda sent: bytes_of(came[sent[0]], sent[1]))
