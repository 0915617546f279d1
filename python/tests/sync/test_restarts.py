"""Trainer, explorers and synchronizer are killed as processes, and come back."""

import contextlib
import signal
import subprocess
import sys
from pathlib import Path

from patience import patience
import pytest

from weightsync import Store

PARTIES = Path(__file__).with_name("parties.py")


class Running:
    """A process that is told lines and answers with lines."""

    def __init__(self, *arguments):
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def words(self):
        return self.process.stdout.readline().split()

    def tell(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def ask(self, line):
        self.tell(line)
        return self.words()

    def kill(self):
        self.process.kill()
        self.end()

    def stop(self):
        """Ends in order: its input is over."""
        self.process.stdin.close()
        assert self.process.wait(60) == 0

    def end(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class World:
    """Processes of a synchronizer and its parties."""

    def __init__(self, directory):
        self.directory = directory
        self.store = str(directory / "store")
        self.address = "127.0.0.1:0"
        self.running = []

    def start(self, *arguments):
        self.running.append(Running(sys.executable, *arguments))
        return self.running[-1]

    def serve(self, method):
        run_dir = str(self.directory / "run")
        arguments = ["--method", method, "--run-dir", run_dir, "--address", self.address]
        if method != "nccl":
            arguments += ["--store", self.store]
        server = self.start("-m", "weightsync", "serve", *arguments)
        self.address = server.words()[4].rstrip(";")
        return server

    def trainer(self, method, step=0):
        trainer = self.start(PARTIES, "trainer", self.address, method, self.store, str(step))
        return trainer, trainer.words()

    def explorer(self, name):
        explorer = self.start(PARTIES, "explorer", self.address, name)
        assert explorer.words() == ["joined"]
        return explorer


@pytest.fixture
def world(tmp_path):
    made = World(tmp_path)
    yield made
    for running in made.running:
        running.end()


@pytest.mark.parametrize("method", ["memory", pytest.param("checkpoint", marks=pytest.mark.soak)])
def test_each_process_restarts_and_carries_on(world, method):
    server = world.serve(method)
    trainer, joined = world.trainer(method)
    assert joined[:2] == ["joined", "1"]
    epochs = [int(joined[2])]
    explorer = world.explorer("e0")
    assert explorer.ask(1) == ["synced", "1", "0", "0.0"]

    explorer.kill()
    assert trainer.ask(1)[:2] == ["synced", "2"]
    explorer = world.explorer("e0")
    assert explorer.ask(1) == ["synced", "2", "1", "1.0"]

    trainer.kill()
    trainer, joined = world.trainer(method, step=1)
    assert joined[:2] == ["joined", "3"]
    epochs.append(int(joined[2]))
    assert trainer.ask(2) == ["synced", "4", "e0=2"]
    assert explorer.ask(2) == ["synced", "4", "2", "2.0"]

    server.kill()
    server = world.serve(method)
    assert trainer.ask(3)[:2] == ["synced", "5"]
    assert explorer.ask(3) == ["synced", "5", "3", "3.0"]

    # All but the synchronizer's store are gone. It saves while training goes on.
    assert Store(world.store).load(at_least=5, timeout=patience(30)).version == 5
    for one in (trainer, server, explorer):
        one.kill()
    server = world.serve(method)
    explorer = world.explorer("e0")
    assert explorer.ask(1) == ["synced", "5", "3", "3.0"]
    trainer, joined = world.trainer(method, step=3)
    assert joined[:2] == ["joined", "6"]
    epochs.append(int(joined[2]))
    assert epochs == sorted(set(epochs))
    assert explorer.ask(2) == ["synced", "6", "3", "3.0"]
    explorer.stop()
    trainer.stop()
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 128 + signal.SIGTERM


def test_nccl_processes_restart_and_meet_again(world):
    server = world.serve("nccl")
    trainer, _ = world.trainer("nccl")
    explorer = world.explorer("e0")

    def meet(step):
        explorer.tell(step)
        ended, version, lines = trainer.ask(step)
        assert (ended, lines) == ("synced", f"e0={version}")
        assert explorer.words() == ["synced", version, str(step), f"{step}.0"]

    meet(1)
    explorer.kill()
    explorer = world.explorer("e0")
    meet(2)
    trainer.kill()
    trainer, _ = world.trainer("nccl", step=2)
    meet(3)
    server.kill()
    world.serve("nccl")
    meet(4)


def test_killed_explorer_does_not_hold_up_a_meeting(world):
    world.serve("nccl")
    trainer, _ = world.trainer("nccl")
    explorers = {name: world.explorer(name) for name in ("e0", "e1")}
    for explorer in explorers.values():
        explorer.tell(1)
    # It may begin with the first that has come; the other comes to the next.
    ran = {}
    step = 0
    while len(ran) < 2:
        step += 1
        _, version, lines = trainer.ask(step)
        ran.update(line.split("=") for line in lines.split(",") if line.endswith(f"={version}"))
    for explorer in explorers.values():
        assert explorer.words()[0] == "synced"
    explorers["e1"].kill()
    explorers["e0"].tell(2)
    ended, version, lines = trainer.ask(step + 1)
    assert (ended, lines) == ("synced", f"e0={version}")
    assert explorers["e0"].words()[:2] == ["synced", version]


def test_killed_trainer_ends_the_wait_of_nobody(world):
    world.serve("memory")
    trainer, _ = world.trainer("memory")
    explorer = world.explorer("e0")
    assert explorer.ask(1)[:2] == ["synced", "1"]
    explorer.tell(2)
    trainer.kill()
    trainer, joined = world.trainer("memory", step=0)
    assert joined[1] == "2"
    # The wait goes on, or begins now, and ends with the new trainer's version.
    assert explorer.words()[:2] == ["synced", "2"]
