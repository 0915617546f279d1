"""The line of live progress: on a terminal, and quiet elsewhere."""

from __future__ import annotations

import os
import pty
from typing import Any

import pytest
from counting import Constant, Counting

from weightsync import rl


def written(monkeypatch: pytest.MonkeyPatch, ends: tuple[int, int], **settings: Any) -> str:
    """What a collector of 60 frames writes to standard error at the second of these ends."""
    policy = Constant(1)
    with (
        os.fdopen(ends[0], "rb", buffering=0) as theirs,
        os.fdopen(ends[1], "w") as ours,
        monkeypatch.context() as patch,
    ):
        patch.setattr("sys.stderr", ours)
        with rl.MultiSyncCollector(
            [Counting] * 2,
            policy,
            frames_per_batch=20,
            total_frames=60,
            workers="threads",
            **settings,
        ) as collector:
            for _ in collector:
                collector.update_policy_weights_()
        # It has an end to read to, whatever was written before.
        print("END", file=ours, flush=True)
        read = b""
        while not read.endswith((b"END\n", b"END\r\n")):
            read += theirs.read(1000)
    return read.decode().replace("\r\n", "\n").removesuffix("END\n")


def test_progress_is_a_line_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = written(monkeypatch, pty.openpty())
    assert lines.startswith("\r")
    assert lines.count("\n") == 1
    last = lines.split("\r")[-1]
    assert last.startswith("60 of 60 frames, ")
    assert "frames/s, v3, frames are 0.0 versions old" in last
    assert last.endswith("\n")


def test_progress_is_quiet_in_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert written(monkeypatch, os.pipe()) == ""


def test_progress_is_shown_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "60 of 60 frames" in written(monkeypatch, os.pipe(), progress=True)
    assert written(monkeypatch, pty.openpty(), progress=False) == ""
