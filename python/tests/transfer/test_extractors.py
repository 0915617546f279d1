"""Extraction from one process, and from trainers of 2 and 4 ranks over gloo."""

import asyncio
import socket

import pytest
import torch
from actors import Raised
from parties import Net
from patience import patience
from ranks import Odd, Rank
from torch import nn
from weightsync import transfer
from weightsync.errors import LifecycleError, SettingError, WrongTypeError, WrongWeightsError

KIB = 1 / (1 << 20)


def extract(extractor, model, dtype=torch.float32):
    return asyncio.run(extractor.extract_weights(model, dtype))


@pytest.fixture
def trainer(actor):
    """Ranks of a trainer, each in a process of its own."""

    def make(world):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        return [actor(Rank, rank, world, port) for rank in range(world)]

    return make


def all_(ranks, method, *args):
    for one in ranks:
        one.order(method, *args)
    return [one.answer() for one in ranks]


@pytest.mark.parametrize(
    ("world", "kinds"),
    [
        (2, ["fsdp", "odd", "tensor parallel"]),
        (4, ["fsdp", "odd", "tensor parallel", "both", "part", "other part", "copies"]),
    ],
)
def test_sharded_models_come_whole_to_rank_0(trainer, world, kinds):
    ranks = trainer(world)
    for kind in kinds:
        all_(ranks, "make", kind)
        for cfg in (
            {},
            {"group_by_module": True, "batch_size_threshold_gb": 4 * KIB},
            {"group_by_module": True, "yield_on_all_ranks": True},
        ):
            for dtype in (torch.float32, torch.bfloat16):
                first, *others = all_(ranks, "extract", cfg, dtype)
                assert first != "nothing"
                everywhere = "yield_on_all_ranks" in cfg
                assert others == [first if everywhere else "nothing"] * (world - 1)
    all_(ranks, "end")


def attempts(ranks, *, failing=None, how="", late=0.0):
    """How an extraction ends on each rank."""
    for at, one in enumerate(ranks):
        one.order("attempt", *((how, late) if at == failing else ()))
    return [one.answer() for one in ranks]


def check_told(ended, ranks, failing, kind, reason, *, within):
    """The rank that fails has its error, and the others have its number and its reason."""
    for at, (word, said, seconds) in enumerate(ended):
        assert word == (kind if at == failing else "PeerError"), ended
        assert reason in said and seconds < patience(within), ended
        assert at == failing or f"rank {failing} (" in said and f"pid {ranks[failing].pid}) failed" in said


def test_part_of_a_mesh_without_all_weights_is_refused(trainer):
    """Pipeline stages: rank 0 has half of the model."""
    ranks = trainer(4)
    all_(ranks, "make", "stages")
    for word, said, _ in attempts(ranks):
        assert word == "WrongWeightsError" and "gathers other tensors than rank" in said
    all_(ranks, "make", "others")
    first, *others = attempts(ranks)
    assert first[0] == 12
    assert all("its mesh must have rank 0 of the trainer" in said for _, said, _ in others)
    # They have failed, and rank 0 knows nothing of it. The next extraction is one of all of them.
    all_(ranks, "make", "part")
    assert [word for word, _, _ in attempts(ranks)] == [12, 0, 0, 0]
    all_(ranks, "end")


@pytest.mark.parametrize("kind", ["part", "both"])
def test_rank_that_fails_before_it_gathers_tells_the_others(trainer, kind):
    ranks = trainer(4)
    all_(ranks, "make", kind)
    for failing, late in ((1, 0.0), (0, 0.0), (3, 0.3)):
        ended = attempts(ranks, failing=failing, how="early", late=late)
        check_told(ended, ranks, failing, "ValueError", "no weights today", within=15)
        # No rank has entered a collective.
        assert all_(ranks, "all_reduce") == [4.0] * 4
        assert [word for word, _, _ in attempts(ranks)] == [12, 0, 0, 0]
    all_(ranks, "end")


@pytest.mark.parametrize(
    ("kind", "how", "late", "error", "reason"),
    [
        ("both", "early", 3.0, "ValueError", "no weights today"),
        ("fsdp", "middle", 0.0, "MemoryError", "no room for layers.1"),
        ("both", "middle", 0.0, "MemoryError", "no room for layers.1"),
        ("callback", "callback", 0.0, "KeyError", "the bridge knows no layers.1"),
    ],
)
@pytest.mark.parametrize("failing", [0, 1])
def test_rank_that_fails_while_others_gather_ends_their_waits(trainer, kind, how, late, error, reason, failing):
    ranks = trainer(4)
    all_(ranks, "make", kind)
    ended = attempts(ranks, failing=failing, how=how, late=late)
    check_told(ended, ranks, failing, error, reason, within=20)


def test_rank_that_stops_early_ends_the_waits_of_the_others(trainer):
    ranks = trainer(2)
    all_(ranks, "make", "fsdp")
    first, second = attempts(ranks, failing=0, how="stops")
    assert first[0] == "stopped"
    assert second[0] == "PeerError" and "gathered the weights: it stopped" in second[1]


def test_rank_that_extracts_alone_goes_on_with_the_others(trainer):
    ranks = trainer(2)
    all_(ranks, "make", "fsdp")
    ranks[0].ask("make_alone")
    for _ in range(3):
        assert ranks[0].ask("attempt")[0] == 12
    ranks[0].ask("make_again")
    for _ in range(2):
        assert [word for word, _, _ in attempts(ranks)] == [12, 0]
    for failing in (1, 0):
        ended = attempts(ranks, failing=failing, how="early")
        check_told(ended, ranks, failing, "ValueError", "no weights today", within=15)
        assert all_(ranks, "all_reduce") == [2.0, 2.0]
    all_(ranks, "end")


def test_rank_that_was_not_initialized_tells_the_others(trainer):
    ranks = trainer(2)
    all_(ranks, "make", "fsdp")
    ranks[1].order("attempt")
    with pytest.raises(Raised, match="sync_weights comes after initialize_weight_sync"):
        ranks[0].ask("sync")
    word, said, _ = ranks[1].answer()
    assert word == "PeerError" and "rank 0 (" in said and "sync_weights comes after" in said
    all_(ranks, "end")


def test_tied_weights_are_sent_once():
    names = extract(transfer.ModuleExtractor(), Odd()).metadata["names"]
    assert "embed.weight" in names and "head.weight" not in names


def test_modules_are_groups_and_never_split():
    model = Net(width=16)
    cfg = {"group_by_module": True, "batch_size_threshold_gb": 5 * KIB}
    plan = extract(transfer.ModuleExtractor(cfg), model, torch.bfloat16)
    # A layer is 2 * (16 * 32 * 2 + 16 + 32) bytes, so that two of them are a batch.
    chunks = list(plan)
    assert [len(chunk) for chunk in chunks] == [8, 4]
    assert len(plan) == 2
    assert chunks[1].module_name == "layers.2"
    assert sum([chunk.names for chunk in chunks], []) == plan.metadata["names"]


@pytest.mark.parametrize(
    ("sizes", "threshold", "batches"),
    [
        ([4, 4, 4], 8, [2, 1]),
        ([9, 1], 8, [1, 1]),
        ([1, 9, 1], 8, [1, 1, 1]),
        ([8, 8], 8, [1, 1]),
        ([0, 9], 8, [2]),
        ([], 8, []),
    ],
)
def test_batches_are_flushed_before_the_threshold(sizes, threshold, batches):
    chunks = [
        transfer.WeightChunk(["w"], [torch.empty(size, dtype=torch.uint8)], ["uint8"], [[size]])
        for size in sizes
    ]
    own = transfer.ModuleExtractor()
    made = own._batch_by_threshold(iter(chunks), threshold / (1 << 30))
    assert [len(batch) for batch in made] == batches


def test_plan_is_consumed_once():
    plan = extract(transfer.ModuleExtractor(), Net())
    assert len(list(plan)) == 12
    with pytest.raises(LifecycleError, match="iterated over once"):
        iter(plan)


def test_buffer_is_reused_only_when_nobody_holds_it():
    cfg = {"group_by_module": True}
    kept, places = [], set()
    for chunk in extract(transfer.ModuleExtractor(cfg), Net(fill=3.0), torch.bfloat16):
        kept.append(chunk.tensors[0])
        places.add(chunk.tensors[0].data_ptr())
        del chunk
    assert len(places) == 3 and all((one == 3.0).all() for one in kept)
    places = set()
    for chunk in extract(transfer.ModuleExtractor(cfg), Net(), torch.bfloat16):
        places.add(chunk.tensors[0].data_ptr())
        del chunk
    assert len(places) == 1


def test_what_needs_no_cast_is_read_in_place():
    model = Net()
    places = {one.data_ptr() for one in model.parameters()}
    for chunk in extract(transfer.ModuleExtractor({"group_by_module": True}), model):
        assert {one.data_ptr() for one in chunk.tensors} <= places and not chunk.packed


class Documented(transfer.WeightExtractor):
    """As the interface's document has it: flags by assignment, methods by the same names."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self._group_by_module = True
        self._batch_by_threshold = False

    def _should_group_by_module(self):
        return bool(self._group_by_module)

    def _group_by_module(self, params):
        return {"all": sorted(super()._group_by_module(params)) and sorted(params)}

    async def _extract_raw_weights(self, model, generator_dtype):
        return {name: one.to(generator_dtype) for name, one in model.named_parameters()}


def test_names_are_flags_and_methods_at_once():
    own = Documented({})
    assert own._group_by_module and not own._batch_by_threshold
    assert own._group_by_module == True and own._batch_by_threshold == False  # noqa: E712
    assert own._group_by_module({"b.c.d": 0, "a.c.d": 0}) == {"all": ["a.c.d", "b.c.d"]}
    (chunk,) = extract(own, Net(), torch.bfloat16)
    assert chunk.module_name == "all" and len(chunk) == 12
    own._group_by_module = False
    assert len(extract(own, Net())) == 12
    with pytest.raises(SettingError, match="expected true or false, got 'yes'"):
        own._group_by_module = "yes"
    other = type("Other", (Documented,), {"_batch_by_threshold": True, "__init__": lambda s: None})()
    other._group_by_module = True
    assert other._batch_by_threshold and len(extract(other, Net())) == 1


def test_megatron_names_come_by_callbacks():
    model, seen = Net(width=4), []

    def gather(name, part):
        seen.append(name)
        return torch.cat([part, part])

    own = transfer.MegatronExtractor(
        {"group_by_module": True},
        params=lambda model: {f"language.{n}": p.detach() for n, p in model.named_parameters()},
        gather=gather,
        shape=lambda name, part: (2 * part.shape[0], *part.shape[1:]),
    )
    plan = extract(own, model, torch.bfloat16)
    assert seen == [] and plan.metadata["shapes"][0] == [16, 4]
    chunks = list(plan)
    assert [chunk.module_name for chunk in chunks] == [f"language.layers.{at}" for at in range(3)]
    assert seen == plan.metadata["names"]
    assert all(chunk.packed and chunk.dtypes[0] == torch.bfloat16 for chunk in chunks)
    wrong = transfer.MegatronExtractor(params=own._params, gather=gather)
    with pytest.raises(WrongWeightsError, match="layers.0.up.weight: shape says"):
        list(extract(wrong, model))


def test_extractors_refuse_what_they_cannot_read():
    with pytest.raises(WrongTypeError, match="expected a torch module, got a dict"):
        extract(transfer.ModuleExtractor(), {})
    for wrong in (-1, True, "much"):
        with pytest.raises(SettingError, match="batch_size_threshold_gb: expected GiB above 0"):
            extract(transfer.ModuleExtractor({"batch_size_threshold_gb": wrong}), Net())
    assert list(extract(transfer.ModuleExtractor({"group_by_module": True}), nn.Module())) == []
