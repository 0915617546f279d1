"""A trainer with a slow and a fast explorer, each at its own pace.

The policy learns which way to turn: explorers turn as it says, most of the time, and send what came of
it. The trainer publishes every four steps; an explorer takes the newest version when it has explored for
a while, and a trainer that waits for samples is woken by an explorer that asks.

    python examples/synchronizer.py
"""

from __future__ import annotations

import queue
import time

import torch
from torch import multiprocessing as mp

import weightsync

STEPS = 120
BATCH = 64


def policy() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


def explore(address: str, name: str, pause: float, samples: mp.Queue, over: mp.Event) -> None:
    """Explores until the trainer has stopped."""
    torch.set_num_threads(1)
    model = policy()
    with weightsync.Synchronizer.connect(address) as sync:
        with sync.explorer(name, model, style="explorer_driven", interval=5) as explorer:
            print(f"{name}: {explorer.sync(0)}", flush=True)
            step = 0
            while not over.is_set():
                step += 1
                seen = torch.rand(BATCH, 2) * 2 - 1
                with torch.no_grad():
                    turned = torch.distributions.Categorical(logits=model(seen)).sample()
                won = (turned == (seen[:, 0] > seen[:, 1]).long()).float()
                # Arrays travel whole; tensors would need this process to be there when they are read.
                samples.put((seen.numpy(), turned.numpy(), won.numpy()))
                time.sleep(pause)
                if explorer.need_sync(step):
                    synced = explorer.sync(step, timeout=1)
                    if synced:
                        print(f"{name}: {synced}, wins {won.mean():.0%}", flush=True)
            samples.cancel_join_thread()


def train(sync: weightsync.Synchronizer, samples: mp.Queue) -> None:
    """Makes steps of what explorers send."""
    model = policy()
    optimiser = torch.optim.Adam(model.parameters(), lr=0.02)
    with sync.trainer(model, style="fixed", interval=4) as trainer:
        for step in range(1, STEPS + 1):
            while (batch := taken(samples)) is None:
                # An explorer may need weights before it makes more samples.
                if trainer.wait_need_sync(timeout=0.01):
                    trainer.sync(step - 1)
            seen, turned, won = batch
            logits = torch.distributions.Categorical(logits=model(seen))
            loss = -(logits.log_prob(turned) * (won - won.mean())).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            if trainer.need_sync(step):
                print(trainer.sync(step), flush=True)


def taken(samples: mp.Queue) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    try:
        seen, turned, won = (torch.from_numpy(array) for array in samples.get_nowait())
    except queue.Empty:
        return None
    return seen, turned, won


def main() -> None:
    torch.set_num_threads(1)
    samples, over = mp.Queue(maxsize=16), mp.Event()
    with weightsync.Synchronizer.local(listen="127.0.0.1:0") as sync:
        print(f"the page is at http://{sync.address}/", flush=True)
        explorers = [
            mp.Process(target=explore, args=(sync.address, name, pause, samples, over))
            for name, pause in (("slow", 0.05), ("fast", 0.005))
        ]
        for explorer in explorers:
            explorer.start()
        train(sync, samples)
        over.set()
        # What is left in the queue holds up nobody.
        while any(explorer.is_alive() for explorer in explorers):
            taken(samples)
            time.sleep(0.01)


if __name__ == "__main__":
    mp.set_start_method("spawn")
    main()
