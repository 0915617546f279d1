"""vLLM's engines, each made once for the tests of a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faulty
import pytest
import tiny

#: Each test of these may wait for engines that start.
TIMEOUT = pytest.mark.timeout(400)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(TIMEOUT)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Makes an ``LLM`` of a model's checkpoint, or of a directory with one."""
    from vllm import LLM

    engines: list[Any] = []

    def make(model: Any, **settings: Any) -> Any:
        folder = model
        if not isinstance(model, Path):
            folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
        engines.append(LLM(**{**tiny.engine_settings(folder), **settings}))
        return engines[-1]

    yield make
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The name of the backend with faults; a package of its own brings it to vLLM's processes."""
    packages = tmp_path_factory.mktemp("packages")
    info = packages / "faulty-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nfaulty = faulty:register\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        # Spawned processes have this process's path.
        patch.syspath_prepend(packages)
        faulty.register()
        yield faulty.NAME


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[tiny.Server]]:
    """Two servers of the Llama that seed 0 makes."""
    both = []
    try:
        for _ in range(2):
            folder: Path = tmp_path_factory.mktemp("server")
            tiny.llama().save_pretrained(folder)
            both.append(tiny.Server(folder))
        for server in both:
            server.wait()
        yield both
    finally:
        for server in both:
            server.kill()
