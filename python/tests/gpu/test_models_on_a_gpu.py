"""Models on a GPU at either end, by the schemes of the plain package."""

import gc
import threading

import pytest
import torch
import weightsync
from ends import FAR, LONG, Net, beside, meet, pair
from torch import nn

SCHEMES = ["shared-mem", "multi-process", *FAR]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]


class Worker:
    """A receiver of another process, whose model is on a device."""

    def __init__(self, info, device, mode="bind", worker=0):
        self.model = Net(fill=-1.0).to(device)
        self.places = [tensor.data_ptr() for tensor in self.model.parameters()]
        self.receiver = weightsync.ModelReceiver(info, worker, model=self.model, mode=mode)

    def connect(self):
        self.receiver.connect(timeout=LONG)

    def receive(self):
        return self.receiver.receive(timeout=LONG), self.model.value

    def stays(self):
        """Whether parameters are where they were, and on their device."""
        return [tensor.data_ptr() for tensor in self.model.parameters()] == self.places

    def shutdown(self):
        self.receiver.shutdown()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ends", ["cuda:cuda", "cuda:cpu", "cpu:cuda"])
def test_worker_has_each_version_whole(actor, scheme, ends):
    ours, theirs = ends.split(":")
    model = Net(fill=1.0).to(ours)
    with weightsync.Sender(model, scheme=scheme) as sender:
        worker = actor(Worker, sender.init_info.to_json(), theirs)
        worker.order("connect")
        sender.connect(workers=1, timeout=LONG)
        worker.answer()
        for value in (2.0, 3.0, 4.0):
            model.fill(value)
            worker.order("receive")
            report = sender.send()
            assert worker.answer() == (report.version, value)
        if theirs == "cuda":
            assert worker.ask("stays")
        worker.ask("shutdown")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_arrives_of_each_dtype(dtype):
    bits = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    source = bits.view(dtype).cuda()
    other = torch.zeros_like(source)
    with pair({"w": source}, {"w": other}) as (sender, receiver):
        sender.send(wait="sent")
        receiver.receive(timeout=LONG)
        assert torch.equal(other.view(torch.uint8).cpu(), bits)


def test_tensors_that_are_not_row_major_arrive():
    source = nn.Linear(300, 200).cuda()
    source.weight.data = torch.randn(300, 200, device="cuda").t()
    other = nn.Linear(300, 200).cuda()
    other.weight.data = torch.zeros(200, 600, device="cuda")[:, ::2]
    with pair(source, other) as (sender, receiver):
        sender.send(wait="sent")
        receiver.receive(timeout=LONG)
        assert torch.equal(other.weight, source.weight) and other.weight.stride() == (600, 2)


def test_forward_on_another_stream_sees_one_version():
    """A kernel may run on when its forward has returned to Python."""
    model, other = Net(fill=1.0, numel=1 << 22).cuda(), Slow(fill=1.0, numel=1 << 22).cuda()
    with weightsync.Sender(model) as sender:
        receiver = weightsync.ModelReceiver(sender.init_info, 0, model=other)
        meet(sender, receiver)
        background = receiver.start_background()
        background.wait(1, timeout=LONG)
        for value in range(2, 12):
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                low, high = other()
            sender.send(model.fill(float(value)), timeout=LONG)
            assert background.wait(value, timeout=LONG)
            stream.synchronize()
            assert low.item() == high.item(), "a kernel of a forward saw a later version"
        receiver.shutdown()


class Slow(Net):
    """Reads its weights, waits for a while on the GPU, and reads them again."""

    def forward(self):
        low = self.large.detach().min()
        torch.cuda._sleep(200_000_000)
        return low, self.large.detach().max()


def test_step_on_another_stream_is_sent_whole():
    """A step of the optimizer may run on when it has returned to Python."""
    model, other = Net(fill=1.0, numel=1 << 22).cuda(), Net(fill=1.0, numel=1 << 22)
    with pair(model, other) as (sender, receiver):
        for value in (2.0, 3.0):
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(200_000_000)
                model.fill(value)
            sender.send(wait="sent")
            receiver.receive(timeout=LONG)
            assert other.value == value


@pytest.mark.parametrize("mode", ["bind", "copy"])
def test_graph_replays_with_the_new_weights(mode):
    model, other = nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda()
    x = torch.randn(8, 64, device="cuda")
    with torch.no_grad(), pair(model, other, mode=mode) as (sender, receiver):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            other(x)
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = other(x)
        for _ in range(3):
            model.weight.normal_()
            sender.send(wait="sent")
            receiver.receive(timeout=LONG)
            graph.replay()
            torch.testing.assert_close(y, model(x))


def test_changed_rows_reach_the_gpu_by_tcp():
    model, other = nn.Linear(2048, 2048).cuda(), nn.Linear(2048, 2048).cuda()
    with torch.no_grad(), pair(model, other, setup={"scheme": "distributed:share=none"}) as ends:
        sender, receiver = ends
        for row in range(4):
            model.weight[row].normal_()
            sender.send(wait="sent")
            receiver.receive(timeout=LONG)
            assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)


def test_training_goes_on_while_versions_are_sent():
    model, other = nn.Linear(512, 512).cuda(), nn.Linear(512, 512).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with weightsync.Sender(model) as sender:
        receiver = weightsync.ModelReceiver(sender.init_info, 0, model=other)
        meet(sender, receiver)
        background = receiver.start_background()
        seen = []
        ended = threading.Event()

        def act():
            x = torch.randn(16, 512, device="cuda")
            while not ended.is_set():
                with torch.no_grad():
                    seen.append(other(x).isfinite().all().item())

        try:
            with beside(act):
                try:
                    for _ in range(50):
                        loss = model(torch.randn(16, 512, device="cuda")).square().mean()
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        report = sender.send(timeout=LONG)
                    assert background.wait(report.version, timeout=LONG)
                finally:
                    ended.set()
        finally:
            receiver.shutdown()
        assert seen and all(seen) and torch.equal(other.weight, model.weight)


def test_memory_of_the_gpu_is_given_back():
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, other = Net(fill=1.0, numel=1 << 22).cuda(), Net(fill=0.0, numel=1 << 22).cuda()
    with pair(model, other) as (sender, receiver):
        for value in (2.0, 3.0):
            sender.send(model.fill(value), wait="sent")
            receiver.receive(timeout=LONG)
            assert other.value == value
    del model, other, sender, receiver
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_store_loads_into_a_model_of_a_gpu(tmp_path):
    model, other = Net(fill=3.0).cuda(), Net(fill=0.0).cuda()
    with weightsync.Sender(model, keep=weightsync.Store(tmp_path)) as sender:
        sender.connect(workers=0)
        sender.send()
    weightsync.Store(tmp_path).load_into(other)
    assert other.value == 3.0
