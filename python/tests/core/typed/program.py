"""A program of a user's: `mypy --strict` accepts it, and knows what each call returns."""

from typing import assert_type

import torch
import weightsync
from torch import nn


def train(model: nn.Module) -> list[str]:
    mapping = weightsync.Mapping().rename("net.*", "policy.*").cast("*", torch.bfloat16)
    run = mapping.dry_run(model, {"policy.weight": torch.zeros(2, 2)})
    assert_type(run.unmatched, list[str])
    scheme = weightsync.MultiProcess(every=4)
    with weightsync.Sender(model, mapping=mapping, slots=(2, 3), scheme=scheme) as sender:
        sender.connect(workers=[0, 1], timeout=5.0)
        report = sender.send()
        assert_type(report, weightsync.Report)
        assert_type(report.versions, dict[str, int])
        pending = sender.send_async(wait="staged")
        report = pending.wait(1.0)
        return [f"{line.worker}: {line.outcome}" for line in report.failed]


async def train_beside_others(model: nn.Module) -> int:
    async with weightsync.Sender(models={"actor": model, "critic": model}) as sender:
        report = await sender.send_async(weights_dict={"actor": model})
        assert_type(report, weightsync.Report)
        return report.versions["actor"]


def work(info: weightsync.InitInfo, number: int, model: nn.Module) -> None:
    with weightsync.ModelReceiver(info, number, model=model) as receiver:
        receiver.connect()
        version = receiver.receive(timeout=0)
        assert_type(version, int | None)
        background = receiver.start_background()
        assert_type(background.wait(3, timeout=1.0), bool)
        assert_type(background.safe_point(), dict[str, int] | None)
        with background:
            model(torch.zeros(1, 2))


def look(text: str) -> float:
    receiver = weightsync.Receiver(text)
    snapshot = receiver.pull(at_least=2, timeout=1.0)
    assert_type(snapshot, weightsync.Snapshot | None)
    if snapshot is None:
        return 0.0
    names: list[str] = list(snapshot)
    return float(snapshot[names[0]].sum())


def look_at_several(text: str, actor: nn.Module) -> int:
    receiver = weightsync.Receiver(text, models=["actor", "critic"])
    assert_type(receiver.receive_set(), dict[str, weightsync.Snapshot] | None)
    assert_type(receiver.latest_set(), dict[str, weightsync.Snapshot] | None)
    loads = weightsync.ModelReceiver(text, 1, models={"actor": actor})
    assert_type(loads.pull_set(3, model="actor"), dict[str, int] | None)
    assert_type(loads.versions, dict[str, int])
    return loads.version


def load_by_mistake(text: str, actor: nn.Module) -> None:
    weightsync.Receiver(text, model=actor)  # type: ignore[arg-type]


def choose(port: int | None) -> weightsync.Scheme | str:
    if port is None:
        return "multi-process:every=4"
    return weightsync.Distributed(listen=f"127.0.0.1:{port}", share="relay")


def pass_on(info: weightsync.InitInfo) -> weightsync.Report | None:
    try:
        with weightsync.Cascade(info, 0) as cascade:
            cascade.connect(2)
            return cascade.forward(timeout=1.0)
    except weightsync.WeightsyncError as error:
        assert_type(error.remedy, str)
        return None
