"""Chunks, requests and init infos: what is sent is plain data, and what comes is checked."""

import base64
import json

import pytest
import torch
from weightsync import transfer
from weightsync.errors import SettingError, WrongTypeError, WrongWeightsError
from weightsync.transfer.chunk import allocate, layout, unpack
from weightsync.transfer.init_info import rank_in_deployment, rank_offsets

LISTS = {"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 3], [5]]}
NUMBERS = {"version": 3, "chunk": 1, "last": False}


def handle(**changes):
    made = {
        "handle": base64.b64encode(bytes(66)).decode(),
        "storage_bytes": 4096,
        "storage_offset": 0,
        "ref_counter": base64.b64encode(b"/torch_12_34_5").decode(),
        "ref_counter_offset": 0,
        "event": base64.b64encode(bytes(64)).decode(),
        "event_sync": True,
        "begin": 0,
    }
    return {**made, **changes}


REQUESTS = [
    transfer.BroadcastWeightUpdateRequest(**LISTS, **NUMBERS),
    transfer.BroadcastWeightUpdateRequest(**LISTS, **NUMBERS, sizes=[6, 5]),
    transfer.CudaIpcWeightUpdateRequest(
        **LISTS, **NUMBERS, ipc_handles=[{"GPU-1": handle()}, {"GPU-1": handle(), "GPU-2": handle()}]
    ),
    transfer.PackedCudaIpcWeightUpdateRequest(
        **LISTS, **NUMBERS, sizes=[6, 5], ipc_handles={"GPU-1": handle()}
    ),
    transfer.PackedCudaIpcWeightUpdateRequest(version=3, chunk=2),
    transfer.WeightsyncUpdateRequest(version=3),
    transfer.LoraLoadRequest(lora_path="/tmp/adapter", lora_name="adapter"),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda one: type(one).__name__)
def test_request_comes_back_equal(request_):
    kind = type(request_)
    data = json.loads(json.dumps(request_.to_dict()))
    assert kind.from_dict(data) == request_
    sent = request_.serialize()
    assert len(sent) % 4 == 0 and kind.deserialize(sent) == request_


def broadcast(**changes):
    return {"kind": "broadcast", **LISTS, **NUMBERS, "sizes": [6, 5], **changes}


def packed(**changes):
    return {
        "kind": "packed_cuda_ipc", **LISTS, **NUMBERS, "sizes": [6, 5], "alignment": 4,
        "ipc_handles": {"GPU-1": handle()}, **changes,
    }  # fmt: skip


def without(data, name):
    return {key: value for key, value in data.items() if key != name}


HOSTILE = [
    (None, "a request is a dict, got None"),
    ([], "a request is a dict"),
    ({}, "kind: expected 'broadcast', got None"),
    (broadcast(kind="lora"), "kind: expected 'broadcast', got 'lora'"),
    (without(broadcast(), "names"), "names: a broadcast request needs this field"),
    (broadcast(extra=1), "extra.*: a broadcast request has no such field"),
    (broadcast(names="ab"), "names: expected a list, got 'ab'"),
    (broadcast(names=["a", 2]), r"names\[1\]: expected text"),
    (broadcast(names=["a", ""]), r"names\[1\]: expected text"),
    (broadcast(names=["a", "x" * (1 << 17)]), r"names\[1\]: expected text of 1 to 65536"),
    (broadcast(names=["a", "a"]), "names: expected each name once, got 'a' again"),
    (broadcast(names=["a"]), "dtypes: expected 1 of them"),
    (broadcast(dtypes=["float32"]), "dtypes: expected 2 of them.*got 1"),
    (broadcast(dtypes=["float32", "float31"]), r"dtypes\[1\]: expected the name of a dtype.*float31"),
    (broadcast(dtypes=["float32", None]), r"dtypes\[1\]: expected the name"),
    (broadcast(dtypes=["float32", "nn"]), r"dtypes\[1\]"),
    (broadcast(shapes=[[2, 3]]), "shapes: expected 2 of them"),
    (broadcast(shapes=[[2, 3], 5]), r"shapes\[1\]: expected a list"),
    (broadcast(shapes=[[2, 3], [-5]]), r"shapes\[1\]: expected an integer from 0"),
    (broadcast(shapes=[[2, 3], [5.0]]), r"shapes\[1\]: expected an integer"),
    (broadcast(shapes=[[2, 3], [True]]), r"shapes\[1\]: expected an integer"),
    (broadcast(shapes=[[2, 3], [1] * 65]), r"shapes\[1\]: expected a list of at most 64"),
    (broadcast(shapes=[[2, 3], [1 << 60]]), "shapes: expected at most .* bytes in all"),
    (broadcast(shapes=[[2, 3], [10**40]]), r"shapes\[1\]: expected an integer"),
    (broadcast(sizes=[6]), "sizes: expected 2 of them"),
    (broadcast(sizes=[6, 6]), r"sizes\[1\]: expected 5 elements of shape \[5\], got 6"),
    (broadcast(sizes={}), "sizes: expected a list"),
    (broadcast(version=0), "version: expected an integer from 1"),
    (broadcast(version="3"), "version: expected an integer"),
    (broadcast(chunk=-1), "chunk: expected an integer from 0"),
    (broadcast(last=1), "last: expected true or false, got 1"),
    (packed(alignment=6), "alignment: expected a power of two, got 6"),
    (packed(alignment=2), "alignment: expected an integer from 4"),
    (packed(ipc_handles={}), "ipc_handles: expected handles by GPU UUID"),
    (packed(ipc_handles=[handle()]), "ipc_handles: expected handles by GPU UUID"),
    (packed(ipc_handles={"GPU-1": 7}), "expected a handle, got 7"),
    (packed(ipc_handles={"GPU-1": without(handle(), "event")}), "event: missing"),
    (packed(ipc_handles={"GPU-1": handle(handle="?")}), "handle: expected base64"),
    (packed(ipc_handles={"GPU-1": handle(handle="A" * 4096)}), "base64 of at most 512"),
    (packed(ipc_handles={"GPU-1": handle(storage_bytes=16)}), "expected memory for 36 bytes from 0"),
    (packed(ipc_handles={"GPU-1": handle(begin=4090)}), "expected memory for 36 bytes from 4090"),
    (packed(ipc_handles={"GPU-1": handle(begin=-4)}), "begin: expected an integer"),
    (packed(ipc_handles={"GPU-1": handle(storage_bytes=True)}), "storage_bytes: expected an integer"),
    (packed(ipc_handles={"GPU-1": handle(event_sync=0)}), "event_sync: expected true or false"),
    (
        packed(ipc_handles={"GPU-1": handle(ref_counter=base64.b64encode(b"/../etc").decode())}),
        "ref_counter: expected a name of torch's",
    ),
]


@pytest.mark.parametrize(("data", "said"), HOSTILE)
def test_hostile_request_is_refused_by_name(data, said):
    kinds = {one.kind: one for one in map(type, REQUESTS)}
    packed_ = isinstance(data, dict) and data.get("kind") == "packed_cuda_ipc"
    with pytest.raises(transfer.RequestError, match=said):
        kinds["packed_cuda_ipc" if packed_ else "broadcast"].from_dict(data)


def test_bytes_that_were_cut_or_damaged_are_refused():
    kind, sent = transfer.BroadcastWeightUpdateRequest, REQUESTS[1].serialize()
    for cut in (b"", sent[:-8], sent[: len(sent) // 2], sent + b"more"):
        with pytest.raises(transfer.RequestError, match="End marker not found"):
            kind.deserialize(cut)
    for damaged in (b"{" + sent, sent[3:], b"[" * 100000 + sent):
        with pytest.raises(transfer.RequestError, match="is JSON before its end marker"):
            kind.deserialize(damaged)
    for other in ("{}", None, 3):
        with pytest.raises(transfer.RequestError, match=r"expected the bytes that serialize\(\) returned, got"):
            kind.deserialize(other)


def test_lora_request_needs_a_path():
    with pytest.raises(transfer.RequestError, match="lora_path: expected text"):
        transfer.LoraLoadRequest(lora_name="a")
    with pytest.raises(transfer.RequestError, match="zero byte"):
        transfer.LoraLoadRequest(lora_path="a\0b")


def test_chunk_knows_its_size():
    tensors = [torch.zeros(2, 3), torch.zeros(5, dtype=torch.bfloat16)]
    chunk = transfer.WeightChunk(["a", "b"], tensors, LISTS["dtypes"], LISTS["shapes"])
    assert chunk.total_size_bytes == 34 and chunk.total_numel == 11 and len(chunk) == 2
    assert chunk.dtypes == [torch.float32, torch.bfloat16] and chunk.shapes == [(2, 3), (5,)]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"names": ["a"]}, WrongWeightsError, "same length, got names: 1, tensors: 2"),
        ({"shapes": [[2, 3], [6]]}, WrongWeightsError, r"b: expected torch.bfloat16 \[6\]"),
        ({"dtypes": ["float32", "float16"]}, WrongWeightsError, "b: expected torch.float16"),
        ({"dtypes": ["float32", "float31"]}, WrongTypeError, "got 'float31'"),
        ({"total_size_bytes": 33}, WrongWeightsError, "have 34 bytes, got 33"),
    ],
)
def test_chunk_refuses_what_does_not_fit(changes, error, said):
    tensors = [torch.zeros(2, 3), torch.zeros(5, dtype=torch.bfloat16)]
    with pytest.raises(error, match=said):
        transfer.WeightChunk(**{**LISTS, "tensors": tensors, **changes})


def test_packing_keeps_every_dtype_and_place():
    torch.manual_seed(0)
    dtypes = [torch.bool, torch.float64, torch.uint8, torch.bfloat16, torch.complex64, torch.int16]
    shapes = [(3,), (2, 2), (0, 4), (), (1, 3), (5,)]
    tensors = [(torch.rand(shape) * 9).to(dtype) for dtype, shape in zip(dtypes, shapes, strict=True)]
    chunk = transfer.WeightChunk(list("abcdef"), tensors, dtypes, shapes)
    places, size = layout(dtypes, shapes)
    assert places == [0, 8, 40, 40, 48, 72] and size == 84
    buffer = chunk.pack()
    back = unpack(buffer, chunk.dtypes, chunk.shapes)
    assert all(torch.equal(one, two) for one, two in zip(tensors, back, strict=True))
    again = transfer.WeightChunk(list("abcdef"), back, dtypes, shapes, packed=True)
    assert again.pack().data_ptr() == buffer.data_ptr()
    # One that only says that it is packed is packed.
    false = transfer.WeightChunk(list("abcdef"), tensors, dtypes, shapes, packed=True)
    assert all(torch.equal(*pair) for pair in zip(unpack(false.pack(), dtypes, shapes), back, strict=True))
    with pytest.raises(WrongWeightsError, match="has 84 bytes, got 83"):
        unpack(buffer[:-1], dtypes, shapes)
    assert allocate([], [])[0].numel() == 0


def test_init_infos_come_back_equal():
    native = json.dumps({"no": "init info"})
    for info in (
        transfer.EmptyWeightSyncInitInfo(override_existing_receiver=True),
        transfer.TorchDistributedWeightSyncInitInfo(master_port=1234, world_size=5),
    ):
        assert transfer.init_info_from_dict(json.loads(json.dumps(info.to_dict()))) == info
    with pytest.raises(SettingError):
        transfer.WeightsyncInitInfo(info=native)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "other"}, "kind: expected one of empty, .*torch_distributed, weightsync, got 'other'"),
        ({"kind": []}, "kind: expected one of"),
        ({"master_port": 70000}, "master_port: expected 0 to 65535, got 70000"),
        ({"master_port": "80"}, "master_port: expected int, got '80'"),
        ({"world_size": 1}, "world_size: expected 2"),
        ({"rank_offset": 0}, "rank_offset: expected 1"),
        ({"rank_offset": True}, "rank_offset: expected int"),
        ({"master_addr": ""}, "master_addr"),
        ({"override_existing_receiver": 1}, "override_existing_receiver: expected bool, got 1"),
        ({"more": 1}, "more: an init info of kind torch_distributed has no such field"),
    ],
)
def test_init_info_refuses_what_cannot_be(changes, said):
    data = transfer.TorchDistributedWeightSyncInitInfo().to_dict()
    with pytest.raises(SettingError, match=said):
        transfer.init_info_from_dict({**data, **changes})


def test_init_info_names_what_is_missing():
    data = transfer.TorchDistributedWeightSyncInitInfo().to_dict()
    with pytest.raises(SettingError, match="backend: .* needs this field"):
        transfer.init_info_from_dict(without(data, "backend"))
    with pytest.raises(SettingError, match="an init info is a dict, got a str"):
        transfer.init_info_from_dict("{}")


def test_rank_offsets_advance_between_deployments():
    # Two engines of 4 workers; and two deployments of 2 replicas each, of 2 * 3 * 2 workers.
    assert rank_offsets(2, 4) == [1, 5]
    assert rank_offsets(4, 12, dp_size=2) == [1, 1, 13, 13]
    ranks = [
        rank_in_deployment(tp, pp, dp, tp_size=2, pp_size=3)
        for dp in range(2)
        for pp in range(3)
        for tp in range(2)
    ]
    assert ranks == list(range(12))
    with pytest.raises(SettingError, match="groups of dp_size"):
        rank_offsets(3, 4, dp_size=2)
    with pytest.raises(SettingError, match="tp_rank 2"):
        rank_in_deployment(2, tp_size=2)
