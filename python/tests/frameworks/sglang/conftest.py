"""SGLang's servers, each made once: one takes minutes to start on a busy machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sglang_server

# Adapters are those of the tests with vLLM.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "vllm_engines"))

#: Each test of these may wait for servers that start.
TIMEOUT = pytest.mark.timeout(900)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(TIMEOUT)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the Llama that seed 0 makes."""
    folder = tmp_path_factory.mktemp("model")
    sglang_server.llama().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What servers find beyond what is installed."""
    return sglang_server.packages(tmp_path_factory.mktemp("packages"))


@pytest.fixture(scope="session")
def servers(model_folder: Path, found: Path) -> Iterator[list[sglang_server.Server]]:
    """Two servers of it."""
    both: list[sglang_server.Server] = []
    try:
        both += [sglang_server.Server(model_folder, found) for _ in range(2)]
        for server in both:
            server.wait()
        yield both
    finally:
        for server in both:
            server.kill()


@pytest.fixture
def server(servers: list[sglang_server.Server]) -> sglang_server.Server:
    """One of them."""
    return servers[0]


@pytest.fixture(scope="session")
def wide(model_folder: Path, found: Path) -> Iterator[sglang_server.Server]:
    """A server of two ranks, each with a part of the same model."""
    made = sglang_server.Server(model_folder, found, "--tp", "2")
    try:
        made.wait()
        yield made
    finally:
        made.kill()
