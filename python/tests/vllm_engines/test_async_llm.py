"""An ``AsyncLLM``, whose calls run in its own event loop."""

from __future__ import annotations

import asyncio

import tiny

import weightsync
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


async def update_it(folder, model):
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**tiny.engine_settings(folder)))
    try:
        with weightsync.Sender(model) as sender:
            trainer = Trainer(sender, [engine])
            for step in range(1, 4):
                tiny.change(model, step)
                report = await trainer.sync_async(step=step)
                assert report.all_synced, report
                assert await ask(engine) == tiny.greedy(model), step
                assert await engine.get_weight_version() == str(step)
    finally:
        engine.shutdown()


def test_an_async_llm_answers_as_transformers(tmp_path):
    model = tiny.llama()
    model.save_pretrained(tmp_path)
    asyncio.run(update_it(tmp_path, model))
