"""An ``AsyncLLM``, whose calls run in its own event loop."""

from __future__ import annotations

import asyncio

import faulty
import pytest
import tiny

import weightsync
from weightsync import staleness
from weightsync.errors import LifecycleError
from weightsync.vllm import Trainer


async def ask(engine):
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0, max_tokens=tiny.LENGTH, detokenize=False, ignore_eos=True
    )

    async def one(place, prompt):
        answers = engine.generate({"prompt_token_ids": prompt}, sampling, f"request {place}")
        async for answer in answers:
            last = answer
        return list(last.outputs[0].token_ids)

    return [await one(place, prompt) for place, prompt in enumerate(tiny.PROMPTS)]


async def update_it(folder, model, backend):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    settings = {**tiny.engine_settings(folder), "weight_transfer_config": {"backend": backend}}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))
    try:
        await updates_are_late(engine, folder)
        with weightsync.Sender(model) as sender:
            trainer = Trainer(sender, [engine])
            for call in (trainer.sync, trainer.refresh, trainer.sleep, trainer.wake):
                with pytest.raises(LifecycleError, match="sync_async"):
                    call()
            for step in range(1, 4):
                tiny.change(model, step)
                report = await trainer.sync_async(step=step)
                assert report.all_synced, report
                assert await ask(engine) == tiny.greedy(model), step
                assert await engine.get_weight_version() == str(step)
            await tokens_have_the_version_that_made_them(engine, trainer)
    finally:
        engine.shutdown()


async def tokens_have_the_version_that_made_them(engine, trainer):
    """A request that an update freezes has tokens of both versions."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=2000, detokenize=False, ignore_eos=True)
    for version in range(4, 24):
        started = asyncio.Event()
        request = asyncio.create_task(finished(engine, sampling, f"long {version}", started))
        await started.wait()
        assert (await trainer.sync_async(step=version)).all_synced
        versions = staleness.versions_of(await request)
        assert len(versions) == 2000
        # A slow update may come when the request is over.
        assert versions == sorted(versions)
        assert {version - 1} <= set(versions) <= {version - 1, version}
        if version in versions:
            return
    raise AssertionError("no update came in the middle of a request")


async def finished(engine, sampling, name, started):
    async for answer in engine.generate({"prompt_token_ids": [1, 5]}, sampling, name):
        last = answer
        started.set()
    return last


async def updates_are_late(engine, folder):
    """A load that takes longer than the trainer waits: the report says what the engine runs."""
    model = tiny.llama(1)
    with weightsync.Sender(model) as sender:
        trainer = Trainer(sender, [engine], timeout=2)
        assert (await trainer.sync_async()).all_synced
        tiny.change(model, 1)
        faulty.slow_in(folder).write_text("3")
        (line,) = (await trainer.sync_async()).engines
        assert (line.outcome, line.version) == ("updated", 2), line
        assert "did not come back in 2 s" in line.reason
        assert await ask(engine) == tiny.greedy(model)
        assert await engine.get_weight_version() == "2"
        assert [worker.version for worker in sender.workers] == [2]


def test_async_llm_answers_as_transformers(tmp_path, faults):
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    asyncio.run(update_it(tmp_path, model, faults))
