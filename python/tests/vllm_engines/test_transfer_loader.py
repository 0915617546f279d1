"""``weightsync.transfer`` into an ``LLM``: whole versions, and the old weights after a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import tiny

from weightsync import transfer
from weightsync.errors import PeerError

_METHODS = {
    "init_weight_update_communicator": "init_transfer",
    "update_named_weights": "update_transfer",
}


def client_of(llm: Any, strategy: str) -> transfer.ActorClient:
    async def call(actor: Any, method: str, *told: Any) -> Any:
        first = (strategy,) if method == "init_weight_update_communicator" else ()
        args = (*first, *told)
        return await asyncio.to_thread(actor.collective_rpc, _METHODS[method], args=args)

    return transfer.ActorClient([llm], call=call)


@pytest.fixture(scope="module")
def llm(made):
    return made(tiny.llama(), worker_extension_cls="transfer_worker.TransferWorker")


@pytest.mark.parametrize("strategy", ["weightsync", "packed_broadcast"])
def test_llm_loads_what_a_transfer_brings(llm, strategy):
    model = tiny.llama(7)
    extractor = transfer.ModuleExtractor({"group_by_module": True})
    training = transfer.TrainingActor(extractor, model)

    async def run() -> None:
        await training.initialize_weight_sync(None, strategy, client_of(llm, strategy))
        for step in range(2):
            tiny.change(model, step)
            await training.sync_weights()
            assert tiny.ask(llm) == tiny.greedy(model)
        # A load that fails midway leaves the old weights, exactly.
        before = tiny.greedy(model)
        llm.collective_rpc("fail_next_load")
        tiny.change(model, 3)
        with pytest.raises((PeerError, RuntimeError), match="failed midway"):
            await training.sync_weights()
        assert tiny.ask(llm) == before
        await training.sync_weights()
        assert tiny.ask(llm) == tiny.greedy(model)

    asyncio.run(run())
    llm.collective_rpc("end_transfer")
    training.shutdown()


def test_failed_first_load_leaves_own_weights(made):
    own = tiny.llama(9)
    llm = made(own, worker_extension_cls="transfer_worker.TransferWorker")
    model = tiny.llama(10)
    training = transfer.TrainingActor(transfer.ModuleExtractor(), model)

    async def run() -> None:
        client = client_of(llm, "weightsync")
        await training.initialize_weight_sync(None, "weightsync", client)
        llm.collective_rpc("fail_next_load")
        with pytest.raises((PeerError, RuntimeError), match="failed midway"):
            await training.sync_weights()
        assert tiny.ask(llm) == tiny.greedy(own)
        await training.sync_weights()
        assert tiny.ask(llm) == tiny.greedy(model)

    asyncio.run(run())
    llm.collective_rpc("end_transfer")
    training.shutdown()
