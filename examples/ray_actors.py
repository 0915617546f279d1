"""A trainer and three workers that are Ray actors: ``python examples/ray_actors.py [ADDRESS]``.

Without an address it starts Ray here. With one it uses the cluster there.
"""

import sys

import ray
import torch

import weightsync.ray


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, info):
        self.policy = torch.nn.Linear(1024, 1024)
        # The policy has the newest weights from here on, also after Ray restarted this actor.
        self.receiver = weightsync.ray.Receiver(info, model=self.policy)

    def act(self):
        return self.receiver.version, self.policy(torch.ones(1024)).mean().item()


def main():
    ray.init(address=sys.argv[1] if len(sys.argv) > 1 else "local", log_to_driver=False)
    model = torch.nn.Linear(1024, 1024)
    with weightsync.ray.Sender(model) as sender:
        workers = [Worker.remote(sender.init_info) for _ in range(3)]
        ray.get([one.act.remote() for one in workers])
        for step in range(2):
            with torch.no_grad():
                model.weight.fill_(step + 1.0)
                model.bias.zero_()
            print(sender.send())
        acted = ray.get([one.act.remote() for one in workers])
        assert acted == [(3, 2048.0)] * 3, acted
        print(f"{len(workers)} actors act with version 3")
    ray.shutdown()


if __name__ == "__main__":
    main()
