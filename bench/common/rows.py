"""Rows, as `cargo xtask bench` prints them for every group."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn


@dataclass(frozen=True)
class Row:
    """A figure, what it is compared with, and how far it may go."""

    case: str
    value: float
    unit: str
    baseline: float
    ratio: float
    target: float | None
    met: bool | None

    @classmethod
    def over(
        cls, case: str, seconds: float, baseline: float, target: float | None, unit: str = "ms"
    ) -> Row:
        """A time as a multiple of another, which may be ``target`` at most."""
        ratio = seconds / baseline
        met = None if target is None else ratio <= target
        factor = _FACTORS[unit]
        return cls(case, seconds * factor, unit, baseline * factor, ratio, target, met)

    @classmethod
    def within(
        cls, case: str, seconds: float, baseline: float, target: float | None, unit: str = "ms"
    ) -> Row:
        """A time that may be ``target`` at most, in its own unit, compared with another."""
        value = seconds * _FACTORS[unit]
        met = None if target is None else value <= target
        own = baseline * _FACTORS[unit]
        return cls(case, value, unit, own, seconds / baseline, target, met)

    @classmethod
    def compared(cls, case: str, ratio: float, other: float, target: float) -> Row:
        """A multiple of memcpy compared with another."""
        return cls(case, ratio, "×", other, ratio / other, target, ratio / other <= target)


_FACTORS = {"µs": 1e6, "ms": 1e3, "s": 1.0}


class Printer:
    """Prints rows as they come: a table, or a line of JSON each."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        if not as_json:
            _line("case", "value", "baseline", "ratio", "target")

    def __call__(self, row: Row) -> None:
        """Prints one."""
        if self._json:
            print(json.dumps(asdict(row), ensure_ascii=False), flush=True)
            return
        target = ""
        if row.target is not None:
            target = f"≤ {row.target:.3g} {'met' if row.met else 'MISSED'}"
        value = f"{row.value:.2f} {row.unit}"
        _line(row.case, value, f"{row.baseline:.2f}", f"{row.ratio:.2f}", target)


def show_all(cases: Iterable[Any], only: str, as_json: bool) -> NoReturn:
    """Measures the cases whose name contains ``only``, prints their rows, and ends the process."""
    show = Printer(as_json)
    failed = []
    for case in cases:
        if only in case.name:
            try:
                for row in case.rows():
                    show(row)
            except Exception:
                # The others are measured all the same.
                traceback.print_exc()
                failed.append(case.name)
    if failed:
        print(f"no figures for {'; '.join(failed)}", file=sys.stderr, flush=True)
    # Threads of other packages do not all end when something has failed.
    sys.stdout.flush()
    os._exit(1 if failed else 0)


def _line(case: str, value: str, baseline: str, ratio: str, target: str) -> None:
    print(f"{case:<70}{value:>12}  {baseline:>10}  {ratio:>7}  {target}".rstrip(), flush=True)
