"""Ray's direct transport by weightsync: objects of tensors that actors pass to each other."""

import gc
import logging
import multiprocessing

import pytest
import torch

import weightsync.ray

# Ray waits a minute for a process that does not come up before it starts another.
pytestmark = pytest.mark.timeout(300, func_only=True)


def tensors(value):
    """Several dtypes and shapes: an empty tensor, one without dimensions, one that is not contiguous."""
    return {
        "weight": torch.full((256, 64), value),
        "bias": torch.full((64,), value, dtype=torch.bfloat16),
        "step": torch.tensor(int(value)),
        "empty": torch.empty(0, 3),
        "turned": torch.full((3, 5), value).t(),
    }


class Reader:
    def read(self, got):
        for name, expected in tensors(2.0).items():
            assert torch.equal(got[name], expected), name
        # What a reader writes is its own.
        got["weight"].fill_(9.0)
        return {name: (str(one.dtype), tuple(one.shape)) for name, one in got.items()}


def test_ray_get_brings_tensors_our_way(cluster, start):
    ray = cluster.ray
    weightsync.ray.register()
    weightsync.ray.register()

    class Making:
        @ray.method(tensor_transport="WEIGHTSYNC")
        def make(self, value):
            return tensors(value)

        def held(self):
            from ray.experimental.rdt.util import get_tensor_transport_manager

            return len(get_tensor_transport_manager("WEIGHTSYNC")._senders)

    source = ray.remote(Making).options(num_cpus=0, enable_tensor_transport=True).remote()
    readers = [
        ray.remote(Reader).options(num_cpus=0, enable_tensor_transport=True).remote() for _ in range(2)
    ]
    made = source.make.remote(2.0)
    seen = cluster.get([one.read.remote(made) for one in readers])
    assert seen[0] == seen[1]
    assert seen[0]["bias"] == ("torch.bfloat16", (64,))
    # Both readers have memory of their own, so the object is as it was.
    assert cluster.get(readers[0].read.remote(made)) == seen[0]
    others = [source.make.remote(float(one)) for one in range(3)]
    # The driver reads them, too.
    assert [one["weight"].unique().item() for one in cluster.get(others)] == [0.0, 1.0, 2.0]
    del made, others
    while cluster.get(source.held.remote()):
        pass
    for one in (source, *readers):
        ray.kill(one)


def test_far_reader_hears_what_to_set(monkeypatch):
    _direct = pytest.importorskip("weightsync.ray._direct")
    monkeypatch.setattr(_direct._cluster, "address", lambda: "here")
    made = _direct.Published([], "cpu", "info", "there")
    with pytest.raises(weightsync.PeerError, match="on there.*this is here: give that process"):
        _direct.Transport().recv_multiple_tensors("object", made, None)


def _publish(pipe):
    """Makes the tensors of an object, in a process of its own."""
    sender = weightsync.Sender({"0": torch.ones(4)}, scheme=weightsync.Distributed(pull=True))
    sender.connect(0)
    pipe.send(sender.init_info.to_json())
    pipe.recv()


def test_reader_hears_that_the_maker_is_gone(monkeypatch, caplog):
    _direct = pytest.importorskip("weightsync.ray._direct")
    monkeypatch.setattr(_direct._cluster, "address", lambda: "here")
    monkeypatch.setattr(_direct, "LIMIT", 1.0)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    maker = context.Process(target=_publish, args=(there,), daemon=True)
    maker.start()
    made = _direct.Published([((4,), torch.float32)], "cpu", here.recv(), "here")
    (tensor,) = _direct.Transport().recv_multiple_tensors("object", made, None)
    assert torch.equal(tensor, torch.ones(4))
    # A reader may write, and nothing warns of it.
    with caplog.at_level(logging.WARNING, "weightsync"):
        tensor.fill_(2.0)
        del tensor
        gc.collect()
    assert not caplog.records
    maker.kill()
    maker.join()
    with pytest.raises(weightsync.PeerError, match="made this object, on here, did not bring its tensors"):
        _direct.Transport().recv_multiple_tensors("object", made, None)


def test_driver_puts_tensors_for_actors(cluster):
    ray = cluster.ray
    weightsync.ray.register()
    reader = ray.remote(Reader).options(num_cpus=0, enable_tensor_transport=True).remote()
    put = ray.put(tensors(2.0), _tensor_transport="WEIGHTSYNC")
    assert cluster.get(reader.read.remote(put))["step"] == ("torch.int64", ())
    ray.kill(reader)
