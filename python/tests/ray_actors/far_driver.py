"""The driver of a cluster of two hosts: it prints what its actors have, and the sender's status.

Its arguments: the cluster's address, and where the sender listens if that is not left to it.
"""

import json
import subprocess
import sys
import tempfile
import time

import ray
from ray_world import Worker, net

import weightsync.ray

ray.init(address=sys.argv[1], log_to_driver=False)
while len([one for one in ray.nodes() if one["Alive"]]) < 2:
    time.sleep(0.01)


def actor(**options):
    return ray.remote(Worker).options(num_cpus=0, **options).remote()


def status(info):
    """As `weightsync status` has it."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(info.to_json())
        file.flush()
        command = [sys.executable, "-m", "weightsync", "status", "--json", "--info", file.name]
        done = subprocess.run([*command, "--insecure-plaintext"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


scheme = weightsync.Distributed(listen=sys.argv[2]) if len(sys.argv) > 2 else None
with weightsync.ray.Sender(net(1.0), scheme=scheme) as sender:
    workers = [actor(resources={"far": 1}) for _ in range(2)]
    try:
        ray.get([one.state.remote() for one in workers])
    except ray.exceptions.RayActorError as error:
        print(json.dumps({"refused": str(error)}))
        sys.exit()
    workers.append(actor(resources={"near": 1}))
    ray.get(workers[-1].state.remote())
    # Workers that joined before their host's relay move to it.
    while True:
        seen = status(sender.init_info)
        relays = seen["relays"]
        routes = [one["route"] for one in seen["workers"]]
        if [routes.count({"agent": one["agent"]}) for one in relays] == [2]:
            break
        time.sleep(0.05)
    sender.send(net(2.0)).ensure_applied()
    values = [[one[1], one[3]] for one in ray.get([one.state.remote() for one in workers])]
    print(json.dumps({"values": values, "status": seen}))
ray.shutdown()
