"""A trainer that is written against SkyRL 0.3.0's interface, with its imports changed."""

import asyncio
import json
import socket
import sys
import types

import pytest
import ray
import torch
from parties import Net, Worker, call
from skyrl_trainer import SkyRank
from weightsync import transfer
from weightsync.errors import SettingError, UnsupportedError, WrongWeightsError
from weightsync.transfer import skyrl
from weightsync.transfer.skyrl import (
    BroadcastInitInfo,
    BroadcastTransferStrategy,
    BroadcastWeightTransferSender,
    BroadcastWeightUpdateRequest,
    CudaIpcInitInfo,
    CudaIpcTransferStrategy,
    CudaIpcWeightTransferSender,
    CudaIpcWeightUpdateRequest,
    LoraLoadRequest,
    WeightChunk,
    WeightExtractor,
    WeightTransferSender,
    WeightTransferStrategy,
    WeightUpdateRequest,
    _IPC_REQUEST_END_MARKER,
    _plain,
    get_transfer_strategy,
    get_transfer_strategy_cls,
    yield_module_grouped_chunks,
)


class Extractor(WeightExtractor):
    """Keeps its model, and yields chunks of strings and lists."""

    def __init__(self, model, threshold):
        self.model, self.threshold = model, threshold

    def extract_weights(self, dtype):
        yield from yield_module_grouped_chunks(
            params=self.model.state_dict(),
            dtype=dtype,
            gather_tensor_fn=lambda param: param,
            get_shape_fn=lambda name, param, tensor: list(tensor.shape),
            batch_size_threshold_gb=self.threshold,
        )

    def get_weight_metadata(self, dtype):
        state = self.model.state_dict()
        return {
            "names": list(state),
            "dtype_names": [str(dtype).split(".")[-1]] * len(state),
            "shapes": [list(one.shape) for one in state.values()],
        }


@pytest.mark.parametrize("reach", ["loopback", "network"])
def test_trainer_of_the_older_interface_syncs(actor, reach):
    strategy = transfer.strategy_from_config("packed_broadcast")
    workers = [actor(Worker, "packed_broadcast") for _ in range(2)]
    assert strategy.packed
    model = Net(fill=1.0)
    extractor = Extractor(model, 0.0)
    client = transfer.ActorClient(workers, call=call)

    class Config:
        weight_sync_backend = "gloo"
        run_engines_locally = True
        # Where this machine is reached, as Ray says it.
        master_addr = "127.0.0.1" if reach == "loopback" else ray.util.get_node_ip_address()

    cls = get_transfer_strategy_cls(weight_sync_backend="gloo", colocate_all=True)
    assert cls is BroadcastTransferStrategy

    async def run():
        total, _ = await client.get_world_size()
        info = cls.create_init_info(Config(), inference_world_size=total)
        assert not info.override_existing_receiver and info.world_size == 3
        sender, _ = await asyncio.gather(
            asyncio.to_thread(cls.create_sender, init_info=info, inference_client=client),
            client.init_weight_update_communicator(info),
        )
        for version in (1, 2):
            model.fill(float(version))
            await sender.send_chunks(
                extractor.extract_weights(torch.float32),
                weight_metadata=extractor.get_weight_metadata(torch.float32),
            )
            assert [one.ask("state") for one in workers] == [(version, float(version))] * 2
        sender.teardown()
        sender.teardown()

    asyncio.run(run())


@pytest.mark.parametrize("group_by_module", [False, True])
def test_sharded_trainer_of_the_older_interface_syncs(actor, group_by_module):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [actor(SkyRank, rank, 2, port) for rank in range(2)]

    def all_(method, *args):
        for one in ranks:
            one.order(method, *args)
        return [one.answer() for one in ranks]

    all_("init_weight_sync_state", group_by_module)
    for version in (1, 2):
        first, second = all_("broadcast_to_inference_engines", float(version))
        assert first == [(version, float(version))] * 2 and second == []
    all_("end")


def test_older_names_have_the_older_forms():
    info = BroadcastInitInfo(True, "10.0.0.1", 4321, 1, 9)
    servers = info.for_servers(world_size_per_server=4, num_servers=4, dp_size=2)
    assert [one.rank_offset for one in servers] == [1, 1, 5, 5]
    assert servers[3].to_api_payload() == {
        "master_address": "10.0.0.1", "master_port": 4321, "rank_offset": 5, "world_size": 9,
    }  # fmt: skip
    assert get_transfer_strategy("nccl", True) == "ipc"
    assert get_transfer_strategy("nccl", False) == "nccl"
    chunk = WeightChunk(
        names=["a"], dtypes=["torch.bfloat16"], shapes=[[2]], tensors=[torch.zeros(2).bfloat16()]
    )
    assert chunk.total_size_bytes == 4
    assert LoraLoadRequest(lora_path="/adapter").lora_name == ""
    ipc = CudaIpcInitInfo(True, "bfloat16")
    assert ipc.for_servers(4, 2) == [ipc, ipc] and ipc.to_api_payload() == {}
    assert transfer.init_info_from_dict(json.loads(json.dumps(ipc.to_dict()))) == ipc


def test_older_chunks_are_positional_and_have_strings():
    tensors = [torch.zeros(2, 3), torch.zeros(5)]
    chunk = WeightChunk(["a", "b"], ["torch.float32"] * 2, [[2, 3], [5]], tensors)
    assert chunk.dtypes == ["torch.float32"] * 2 and chunk.shapes == [[2, 3], [5]]
    assert len(chunk) == 2 and chunk.total_numel == 11 and chunk.total_size_bytes == 44
    with pytest.raises(ValueError, match="All lists must have the same length"):
        WeightChunk(["a"], ["torch.float32"] * 2, [[2, 3], [5]], tensors)
    with pytest.raises(ValueError, match="same length, got names: 2, tensors: 2, dtypes: 2, shapes: 1"):
        WeightChunk(["a", "b"], ["torch.float32"] * 2, [[2, 3]], tensors)
    with pytest.raises(WrongWeightsError, match="b: expected torch.float16"):
        WeightChunk(["a", "b"], ["torch.float32", "torch.float16"], [[2, 3], [5]], tensors)


def test_shape_of_an_older_chunk_is_a_label():
    tensor = torch.arange(6.0).view(2, 3)

    def chunk(shape):
        return next(
            yield_module_grouped_chunks(
                params={"a": tensor},
                dtype=torch.float32,
                gather_tensor_fn=lambda param: param,
                get_shape_fn=lambda name, param, gathered: shape,
            )
        )

    assert chunk([999, 888]).shapes == [[999, 888]]
    assert torch.equal(chunk([999, 888]).tensors[0], tensor)
    (sent,) = _plain([chunk([3, 2])])
    assert sent.shapes == [(3, 2)] and torch.equal(sent.tensors[0], tensor.view(3, 2))
    with pytest.raises(WrongWeightsError, match=r"a: expected the shape of 6 elements.* got \[999, 888\]"):
        list(_plain([chunk([999, 888])]))


def test_text_stands_for_a_handle_until_it_is_opened():
    lists = {"names": ["a"], "dtypes": ["bfloat16"], "shapes": [[4, 2]], "sizes": [8]}
    for handles in ({"GPU-1": "placeholder"}, {}):
        request = CudaIpcWeightUpdateRequest(**lists, ipc_handles=handles)
        sent = request.serialize()
        assert len(sent) % 4 == 0 and CudaIpcWeightUpdateRequest.deserialize(sent) == request
        # What receivers parse, and what they open.
        kind = transfer.PackedCudaIpcWeightUpdateRequest
        with pytest.raises(transfer.RequestError, match="ipc_handles"):
            kind.from_dict(request.to_dict())
        with pytest.raises(transfer.RequestError, match="ipc_handles"):
            kind.check_handles(request)
    for wrong in ({"GPU-1": ""}, {"": "text"}, {"GPU-1": "text", "GPU-2": 7}, ["text"]):
        with pytest.raises(transfer.RequestError, match="ipc_handles"):
            CudaIpcWeightUpdateRequest(**lists, ipc_handles=wrong)


def test_cut_or_damaged_request_is_refused_in_skyrls_words():
    for damaged, said in (
        (b"no request", "End marker not found"),
        (b"not_json!!!" + _IPC_REQUEST_END_MARKER, "Failed to deserialize"),
    ):
        with pytest.raises(ValueError, match=said):
            CudaIpcWeightUpdateRequest.deserialize(damaged)


@pytest.mark.parametrize(
    "asked",
    [
        WeightUpdateRequest(["a"], ["torch.float32"], [[2]]),
        BroadcastWeightUpdateRequest(["a"], ["torch.float32"], [[2]], [2]),
        BroadcastWeightUpdateRequest(names=["a"], dtypes=["float32"], shapes=[[2]]),
        CudaIpcWeightUpdateRequest(names=[], dtypes=[], shapes=[], sizes=[], ipc_handles={}),
        LoraLoadRequest(lora_path="/adapter", lora_name="mine"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_older_requests_are_json(asked):
    data = json.loads(json.dumps(asked.to_json_dict()))
    assert type(asked).from_json_dict(data) == asked
    # What the older interface wrote has no numbers of a sync.
    for name in ("kind", "version", "chunk", "last"):
        del data[name]
    assert type(asked).from_json_dict(data) == asked
    with pytest.raises(transfer.RequestError, match="names: expected a list"):
        type(asked).from_json_dict({**data, "names": 3})
    with pytest.raises(ValueError, match="expected 1 of them.*must have the same length"):
        type(asked).from_json_dict({**data, "names": ["a"], "dtypes": [], "shapes": [[2]]})


def test_older_classes_are_abstract():
    assert WeightExtractor.__abstractmethods__ >= {"extract_weights", "get_weight_metadata"}
    assert WeightTransferSender.__abstractmethods__ == {"send_chunks", "teardown"}
    assert WeightTransferStrategy.__abstractmethods__ == {
        "create_init_info", "create_sender", "get_vllm_transfer_engine",
    }  # fmt: skip
    assert issubclass(BroadcastWeightTransferSender, WeightTransferSender)
    assert issubclass(CudaIpcWeightTransferSender, WeightTransferSender)
    assert get_transfer_strategy_cls("nccl", True) is CudaIpcTransferStrategy
    info = CudaIpcTransferStrategy.create_init_info(types.SimpleNamespace(model_dtype="float16"))
    assert info == CudaIpcInitInfo(True, "float16")


def test_vllms_engines_are_named_where_vllm_is(monkeypatch):
    for strategy, module, name in (
        (BroadcastTransferStrategy, "nccl_engine", "NCCLWeightTransferEngine"),
        (CudaIpcTransferStrategy, "ipc_engine", "IPCWeightTransferEngine"),
    ):
        place = f"vllm.distributed.weight_transfer.{module}"
        monkeypatch.setitem(sys.modules, place, None)
        with pytest.raises(UnsupportedError, match=f"needs a vLLM that has {name}"):
            strategy.get_vllm_transfer_engine()
        engine = type(name, (), {})
        monkeypatch.setitem(sys.modules, place, types.SimpleNamespace(**{name: engine}))
        for parent in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        assert strategy.get_vllm_transfer_engine() is engine


@pytest.mark.parametrize(
    ("nodes_address", "setting", "address"),
    [
        ("127.0.0.2", None, "127.0.0.2"),
        ("127.0.0.2", "127.0.0.3", "127.0.0.3"),
        (None, None, "127.0.0.1"),
        (None, "127.0.0.3", "127.0.0.3"),
    ],
)
def test_receivers_come_to_the_address_that_ray_says(monkeypatch, nodes_address, setting, address):
    if nodes_address is None:
        monkeypatch.delitem(sys.modules, "ray", raising=False)
    else:
        util = types.SimpleNamespace(get_node_ip_address=lambda: nodes_address)
        monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(util=util))
        assert skyrl.ray.util is util
    config = types.SimpleNamespace(run_engines_locally=False, weight_sync_backend="gloo")
    if setting is not None:
        config.master_addr = setting
    info = BroadcastTransferStrategy.create_init_info(config, 2)
    assert (info.master_addr, info.world_size) == (address, 3)
    assert info.override_existing_receiver and info.master_port
    BroadcastTransferStrategy._opened.clear()


def test_address_of_another_host_is_refused_by_name():
    config = types.SimpleNamespace(weight_sync_backend="gloo", master_addr="192.0.2.1")
    with pytest.raises(SettingError, match="master_addr: expected an address of this host, got '192.0.2.1'"):
        BroadcastTransferStrategy.create_init_info(config, 2)


def test_grouping_batches_whole_modules():
    model = Net(width=16)
    # A layer is 4,288 bytes in float32.
    assert [len(one) for one in Extractor(model, 9000 / (1 << 30)).extract_weights(torch.float32)] == [8, 4]
    assert [len(one) for one in Extractor(model, 0).extract_weights(torch.float32)] == [4, 4, 4]
    assert list(Extractor(torch.nn.Module(), 1).extract_weights(torch.float32)) == []
