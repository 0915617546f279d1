"""The driver of a cluster of two hosts: it prints what the far rollouts have, and the relays."""

import json
import subprocess
import sys
import tempfile
import time

import ray
from named_weights import differing, weights

ray.init(address=sys.argv[1], log_to_driver=False)
while len([one for one in ray.nodes() if one["Alive"]]) < 2:
    time.sleep(0.01)


class End:
    """A process with verl's checkpoint engine of weightsync."""

    def __init__(self, **kwargs):
        import weightsync.verl

        self.engine = weightsync.verl.WeightsyncCheckpointEngine(1, timeout=60.0, **kwargs)

    async def call(self, name, *arguments, **named):
        return getattr(self.engine, name)(*arguments, **named)

    async def send(self, seed):
        return await self.engine.send_weights(iter(weights(seed).items()), seed)

    async def receive(self, seed):
        got = {name: one.clone() async for name, one in self.engine.receive_weights(seed)}
        return differing(got, weights(seed))

    async def status(self):
        """As `weightsync status` has it."""
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(self.engine._outgoing._sender.init_info.to_json())
            file.flush()
            command = [sys.executable, "-m", "weightsync", "status", "--json", "--info", file.name]
            command.append("--insecure-plaintext")
            done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def end(host, **kwargs):
    return ray.remote(End).options(num_cpus=0, resources={host: 1}).remote(**kwargs)


ends = [end("near", is_master=True, insecure_plaintext=len(sys.argv) > 2), end("far"), end("far")]
differ = []
for seed in (1, 2):
    metadata = ray.get([one.call.remote("prepare") for one in ends])
    places = [None] + [metadata[0]["place"]] * 2
    try:
        ray.get([
            one.call.remote("init_process_group", place)
            for one, place in zip(ends, places, strict=True)
        ])  # fmt: skip
    except ray.exceptions.RayTaskError as error:
        print(json.dumps({"refused": str(error)}))
        sys.exit()
    sent = ends[0].send.remote(seed)
    differ.append(ray.get([one.receive.remote(seed) for one in ends[1:]]))
    ray.get(sent)
    # Workers that joined before their host's relay move to it.
    while True:
        status = ray.get(ends[0].status.remote())
        routes = [one["route"] for one in status["workers"]]
        agents = [{"agent": one["agent"]} for one in status["relays"]]
        if (seen := [routes.count(agent) for agent in agents]) == [2]:
            break
        time.sleep(0.1)
print(json.dumps({"differ": differ, "relays": seen}))
ray.shutdown()
