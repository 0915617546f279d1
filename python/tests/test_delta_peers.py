"""What our deltas are compared with codes what it is given: a peer that loses changes is no peer."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from patience import patience
import numpy as np
import pytest

PROGRAM = Path(__file__).parents[2] / "bench/peers/delta.py"

FAR = 0xFFFF
ELEMENTS = 5 * FAR


def _peers():
    spec = importlib.util.spec_from_file_location("delta_peers", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PEERS = _peers()

#: Where changes lie.
CASES = {
    "none": [],
    "all": range(ELEMENTS),
    "the first": [0],
    "the last": [ELEMENTS - 1],
    "gaps about the longest entry": np.cumsum([FAR - 1, FAR, FAR + 1, FAR + 2]),
    "a gap of two such entries": [2 * FAR],
    "neighbours after it": [2 * FAR, 2 * FAR + 1, 4 * FAR + 2],
    "some": np.flatnonzero(np.random.default_rng(1).random(ELEMENTS) < 0.01),
    "many": np.flatnonzero(np.random.default_rng(2).random(ELEMENTS) < 0.33),
}


def versions(places, width):
    """Two versions of random elements that differ at these places."""
    random = np.random.default_rng(3)
    dtype = PEERS.WORDS[width]
    old = random.integers(0, np.iinfo(dtype).max, ELEMENTS, dtype, endpoint=True)
    new = old.copy()
    new[list(places)] ^= dtype.type(1)
    return old, new


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", PEERS.WAYS.values())
def test_codecs_return_the_bytes_they_were_given(way, case, width):
    old, new = versions(CASES[case], width)
    image = old.copy()
    way.apply(way.encode(old, new), image)
    assert np.array_equal(image, new)


@pytest.mark.parametrize("width", [2, 4])
def test_the_program_says_what_each_takes(tmp_path, width):
    places = CASES["some"]
    for name, version in zip(("old", "new"), versions(places, width), strict=True):
        version.tofile(tmp_path / name)
    program = [sys.executable, PROGRAM, "old", "new", "--width", str(width), "--rounds", "1"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=patience(50))
    assert done.returncode == 0, done.stderr
    told = {line["peer"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(told) == list(PEERS.WAYS)
    for line in told.values():
        assert line["changes"] == len(places)
        assert min(line[f"{what}_s"] for what in ("encode", "decode", "memcpy")) > 0
    assert told["int32 + value"]["bytes"] == len(places) * (4 + width)
    # A gap and a value, and what the two parts of compressed bytes begin and end with.
    assert told["u16 gap + value + zstd-1"]["bytes"] <= len(places) * (2 + width) + 64
