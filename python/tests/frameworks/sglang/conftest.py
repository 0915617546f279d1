"""SGLang's servers, each made once: one takes minutes to start on a busy machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sglang_server

#: Each test of these may wait for servers that start.
TIMEOUT = pytest.mark.timeout(900)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(TIMEOUT)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[sglang_server.Server]]:
    """Two servers of the Llama that seed 0 makes."""
    model = tmp_path_factory.mktemp("model")
    sglang_server.llama().save_pretrained(model)
    found = sglang_server.packages(tmp_path_factory.mktemp("packages"))
    both: list[sglang_server.Server] = []
    try:
        both += [sglang_server.Server(model, found) for _ in range(2)]
        for server in both:
            server.wait()
        yield both
    finally:
        for server in both:
            server.kill()


@pytest.fixture
def server(servers: list[sglang_server.Server]) -> Iterator[sglang_server.Server]:
    """One of them; it is no trainer's, and fails at nothing."""
    yield servers[0]
    servers[0].fault.unlink(missing_ok=True)
