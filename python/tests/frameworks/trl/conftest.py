"""Two vLLM servers on the CPU, with a tokenizer, for TRL's trainers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "vllm_engines"))

import tiny

from weightsync.trl import WeightTransfer

#: Each test of these may wait for servers that start.
TIMEOUT = pytest.mark.timeout(400)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(TIMEOUT)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the Llama that seed 0 makes, and a tokenizer of as many words."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    made = tmp_path_factory.mktemp("model")
    tiny.llama().save_pretrained(made)
    # A special token is found inside of words, too.
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    known = special + [f"w{at}" for at in range(len(special), 256)]
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    )
    tokenizer.chat_template = "{% for one in messages %}{{ one.content }} {% endfor %}"
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="session")
def servers(folder: Path) -> Iterator[list[tiny.Server]]:
    """Two servers of that checkpoint."""
    both: list[tiny.Server] = []
    try:
        for _ in range(2):
            # TRL asks for the text of tokens, too.
            both.append(tiny.Server(folder, skip_tokenizer_init=False))
        for server in both:
            server.wait()
        yield both
    finally:
        for server in both:
            server.kill()


@pytest.fixture
def transfers() -> Iterator[Any]:
    """Makes a ``WeightTransfer`` that is destroyed at the end."""
    made: list[WeightTransfer] = []

    def make(*arguments: Any, **settings: Any) -> WeightTransfer:
        made.append(WeightTransfer(*arguments, **{"timeout": 30.0, **settings}))
        return made[-1]

    yield make
    for transfer in made:
        transfer.destroy()
