"""The ranks of one engine agree on what became of a call: all of them fail, or none."""

from __future__ import annotations

from typing import Any, NoReturn

# Bytes of a rank's words that the others see.
_WORDS = 400


class Ranks:
    """The workers of one engine, by vLLM's own group of them."""

    def agree(self, failed: str | None) -> str | None:
        """What went wrong on any rank, in words; None if nothing did. Every rank calls this."""
        group = _group()
        if group is None:
            return failed
        import torch
        import torch.distributed as dist

        ranks, own = group.world_size, group.rank_in_group
        said = torch.zeros(ranks, 1 + _WORDS, dtype=torch.uint8)
        if failed is not None:
            words = failed.encode()[:_WORDS]
            said[own, 0] = 1
            said[own, 1 : 1 + len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
        dist.all_reduce(said, op=dist.ReduceOp.MAX, group=group.cpu_group)
        failures = [
            f"rank {rank}: {_words(row)}" for rank, row in enumerate(said) if int(row[0])
        ]
        return "; ".join(failures) or None

    def fail(self, error: Exception) -> None:
        """Raises on the last rank alone.

        vLLM reads its workers' answers in order and stops at the first failure: an answer
        after that would be taken for that of the next call.
        """
        group = _group()
        if group is None or group.rank_in_group == group.world_size - 1:
            raise error


def _words(row: Any) -> str:
    return bytes(row[1:].tolist()).rstrip(b"\0").decode(errors="replace")


def _group() -> Any:
    """vLLM's group of all ranks of the engine; None if there is one rank."""
    from vllm.distributed import parallel_state

    group = parallel_state.get_world_group()
    return None if group.world_size == 1 else group
