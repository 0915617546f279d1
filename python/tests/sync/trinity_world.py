"""Trainers and explorers of Trinity, for the tests of its synchronizer."""

import time
from pathlib import Path
from types import SimpleNamespace

import torch

from weightsync.trinity import RunningStatus

RUNNING, REQUIRE, STOPPED = RunningStatus.RUNNING, RunningStatus.REQUIRE_SYNC, RunningStatus.STOPPED
STEPS = 8


def config(folder, method="memory", timeout=60.0, namespace="", **others):
    return SimpleNamespace(
        mode="both",
        ray_namespace=namespace,
        checkpoint_job_dir=str(folder),
        synchronizer=SimpleNamespace(
            sync_method=method, sync_timeout=timeout, explorer_world_size=1, group_name="weights"
        ),
        trainer=SimpleNamespace(name="trainer", trainer_type=others.get("kind", "verl")),
        explorer=SimpleNamespace(name="explorer"),
    )


def state(value, size=64):
    module = torch.nn.Linear(size, size)
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, value)
    return module.state_dict()


def value_of(tensors):
    """The value of all elements, as a model that has loaded them has it."""
    module = torch.nn.Linear(64, 64)
    module.load_state_dict({name: tensor.clone() for name, tensor in dict(tensors).items()})
    values = {float(value) for one in module.parameters() for value in one.detach().aminmax()}
    assert len(values) == 1, values
    return values.pop()


def write_checkpoint(folder, step, full=False):
    """As Trinity's trainer: the weights, and then the pointer."""
    actor = Path(folder, f"global_step_{step}", "actor")
    actor.mkdir(parents=True)
    torch.save(state(float(step)), actor / "model.pt")
    if full:
        (actor.parent / ".full_checkpoint").touch()
    Path(folder, "latest_state_dict_iteration.txt").write_text(str(step))


def train(call, style, publish, sample):
    """Trinity's trainer: it waits for samples, makes a step, and publishes if that is due."""
    call("set_trainer_status", RUNNING)
    synced = 0
    for step in range(1, STEPS + 1):
        while not sample():
            synced = serve(call, style, publish, step - 1, synced)
        if style == "fixed" and step % 2 == 0:
            publish(step)
        else:
            synced = serve(call, style, publish, step, synced)
    call("set_trainer_status", STOPPED)


def serve(call, style, publish, step, synced):
    if style == "explorer_driven":
        if synced == step:
            call("notify_no_new_model_state_dict")
        elif call("explorer_requires_sync"):
            publish(step)
            return step
    return synced


def explore(call, load, made=lambda: None, pause=0.0):
    """Trinity's explorer: it asks for a version every second step. Returns labels, and what they are of."""
    own, loaded = -1, []
    call("set_explorer_status", RUNNING)
    for step in range(STEPS + 1):
        if step % 2 == 0:
            newest = call("wait_new_model_state_dict", own)
            # Version 0 is the model that the explorer began with.
            if newest > own and (own, newest) != (-1, 0):
                loaded.append((newest, load(newest)))
            own = max(own, newest)
        time.sleep(pause)
        made()
    call("set_explorer_status", STOPPED, RUNNING)
    return loaded


def check(loaded):
    assert loaded
    labels = [label for label, _ in loaded]
    assert labels == sorted(set(labels))
    assert all(label == value for label, value in loaded), loaded
