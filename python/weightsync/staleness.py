"""Which version made which token, and a filter for samples that are too old to learn from.

An engine that a :class:`weightsync.engines.Trainer` updates has the version as its label, and says
for each of its outputs which tokens were made under which label::

    fresh = staleness.Filter(at_most=2)
    for sample in fresh(samples, current=sender.version):
        ...                                # no token is more than two versions old
    print(fresh)                           # 480 samples of 512 are at most 2 versions old; …

A request that was frozen during an update has tokens of two versions. Its age is that of its oldest
token; :func:`versions_of` says it token by token, for a loss that leaves old ones out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from weightsync._checks import choice
from weightsync.errors import SettingError, WrongTypeError

__all__ = ["Filter", "Span", "age_of", "spans_of", "versions_of"]

_Sample = TypeVar("_Sample")


class Span(NamedTuple):
    """Tokens ``[start, end)`` of an output were made by a version."""

    #: None: by the weights that the engine began with, or by a label that is no version.
    version: int | None
    start: int
    end: int


def spans_of(output: Any) -> list[Span]:
    """The versions that made an output, in the order of its tokens.

    Args:
        output: a ``CompletionOutput`` of vLLM, a ``RequestOutput`` with one of them, an answer of
            SGLang's ``/generate``, or an object or a dict with ``weight_versions`` (spans with
            ``version``, ``start`` and ``end``), as the JSON of both has.

    Raises:
        WrongTypeError: if it says nothing of versions: the engine is older than vLLM 0.32 or SGLang
            0.5.23, or the output is not finished.
    """
    found = _field(output, "weight_versions")
    if found is None and (meta := _field(output, "meta_info")) is not None:
        found = _field(meta, "weight_versions")
        if found is None and _field(meta, "weight_version") is not None:
            # One version made all of it.
            end = _field(meta, "completion_tokens")
            found = [(meta["weight_version"], 0, end)] if isinstance(end, int) else None
    if found is None and (outputs := _field(output, "outputs")) is not None:
        if len(outputs) != 1:
            raise WrongTypeError(
                f"a request with {len(outputs)} outputs: give each of `request.outputs`, as each "
                "has versions of its own"
            )
        return spans_of(outputs[0])
    if found is None:
        raise WrongTypeError(
            f"{type(output).__name__} does not say which version made it: expected a finished "
            "output of vLLM 0.32 or newer (not of its OpenAI routes), of SGLang 0.5.23, or one with "
            "weight_versions"
        )
    return [_span(one) for one in found]


def versions_of(output: Any) -> list[int | None]:
    """The version that made each token of an output; None where no version is known."""
    return [one.version for one in spans_of(output) for _ in range(one.start, one.end)]


def age_of(output: Any, current: int) -> int | None:
    """How many versions the oldest token of an output is behind.

    None where a token's version is not known, or is newer than ``current``: it is of another run.
    """
    return _age(spans_of(output), current)


class Filter:
    """Lets samples through whose tokens are all new enough.

    Args:
        at_most: how many versions a token may be behind. Versions that the sender left out count: if
            each step of training has a version of its own, these are steps.
        unknown: what becomes of samples with a token of no known version, or of a version that is
            newer than the current one, as of an earlier run whose numbers were higher:
            ``"drop"`` or ``"keep"``. A leftover of an earlier run whose number is lower cannot be
            told: empty the queue of samples when a trainer starts again.
        spans: returns a sample's :class:`Span` list; :func:`spans_of` by default.
    """

    def __init__(
        self,
        at_most: int,
        *,
        unknown: Literal["drop", "keep"] = "drop",
        spans: Callable[[Any], Iterable[Span]] = spans_of,
    ) -> None:
        if not isinstance(at_most, int) or isinstance(at_most, bool) or at_most < 0:
            raise SettingError(f"at_most: expected a whole number from 0 on, got {at_most!r}")
        choice("unknown", unknown, "drop", "keep")
        self._at_most, self._unknown, self._spans = at_most, unknown, spans
        #: How many samples were of each age so far; None: of no known one.
        self.ages: Counter[int | None] = Counter()

    def __call__(self, samples: Iterable[_Sample], current: int) -> list[_Sample]:
        """The samples that are new enough, in their order.

        Args:
            current: the version that the trainer has now, such as ``sender.version``.
        """
        kept = []
        for sample in samples:
            age = _age(self._spans(sample), current)
            self.ages[age] += 1
            if self._keeps(age):
                kept.append(sample)
        return kept

    @property
    def kept(self) -> int:
        """How many samples were let through so far."""
        return sum(count for age, count in self.ages.items() if self._keeps(age))

    @property
    def dropped(self) -> int:
        """How many were not."""
        return sum(self.ages.values()) - self.kept

    def _keeps(self, age: int | None) -> bool:
        return self._unknown == "keep" if age is None else age <= self._at_most

    def __repr__(self) -> str:
        known = sorted(age for age in self.ages if age is not None)
        ages = [f"{self.ages[age]} of age {age}" for age in known]
        if self.ages[None]:
            ages.append(f"{self.ages[None]} of no known age")
        return (
            f"{self.kept} samples of {self.kept + self.dropped} are at most {self._at_most} versions "
            f"old; {', '.join(ages) or 'none came yet'}"
        )


def _age(spans: Iterable[Span], current: int) -> int | None:
    oldest = 0
    for one in spans:
        if one.start == one.end:
            continue
        if one.version is None or one.version > current:
            return None
        oldest = max(oldest, current - one.version)
    return oldest


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _span(given: Any) -> Span:
    if isinstance(given, Sequence) and len(given) == 3:
        version, start, end = given
    else:
        version, start, end = (_field(given, name) for name in ("version", "start", "end"))
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end:
        raise WrongTypeError(f"a span of tokens: expected version, start and end, got {given!r}")
    label = str(version)
    return Span(int(label) if label.isdecimal() else None, start, end)
