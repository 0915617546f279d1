"""Policy workers and generation workers of NeMo-RL as processes, and its synchronizer's calls."""

import asyncio
import multiprocessing
import os
import signal

import torch
from named_weights import differing, weights

#: Bytes of a batch: less than the large tensor has.
BUCKET = 1 << 20


class Engine:
    """What a worker of NeMo-RL does with its checkpoint engine."""

    def __init__(self, rank, settings):
        from weightsync.nemo_rl import Transport

        # As NeMo-RL's create_checkpoint_engine passes them.
        self.transport = Transport(bucket_size=BUCKET, **settings)
        self.rank, self.got, self.drained, self.dies_after = rank, {}, 0, None

    def prepare(self):
        return {**self.transport.prepare(), "rank": self.rank}

    def init_policy(self, **topology):
        self.transport.init_policy_process_group(worker_rank=self.rank, **topology)

    def init_rollout(self, **topology):
        self.transport.init_rollout_process_group(rollout_rank=self.rank, **topology)

    def send(self, seed, options, dies_after=None):
        self.drained = 0

        def gather():
            for name, tensor in weights(seed, **options).items():
                if self.drained == dies_after:
                    os.kill(os.getpid(), signal.SIGKILL)
                lent = tensor.clone()
                yield name, lent
                # What the consumer keeps by reference alone would be seen to change.
                lent.zero_()
                self.drained += 1

        asyncio.run(self.transport.send_weights(gather()))
        return self.drained

    def receive(self, dies=False):
        async def load():
            got = {}
            async for batch in self.transport.receive_weight_batches():
                size = sum(tensor.nbytes for _, tensor in batch)
                assert len(batch) == 1 or size <= BUCKET
                got |= {name: tensor.clone() for name, tensor in batch}
                if dies:
                    os.kill(os.getpid(), signal.SIGKILL)
            return got

        self.got = asyncio.run(load())
        return self.transport.version

    def compare(self, seed, options):
        """The names that differ, and the bytes that have travelled."""
        differ = differing(self.got, weights(seed, **options))
        return differ, self.transport._incoming._receiver.travelled

    def finalize(self):
        self.transport.finalize()

    def open_files(self):
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def serve(pipe, rank, settings):
    """Answers calls in a process of its own."""
    torch.set_num_threads(1)
    engine = Engine(rank, settings)
    while True:
        try:
            name, arguments, named = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(engine, name)(*arguments, **named), None
        except Exception as error:
            answer = None, error
        pipe.send(answer)


class Worker:
    """A process with an engine."""

    def __init__(self, rank, settings):
        # Forked from a process that has imported torch, which takes seconds.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["weightsync.nemo_rl"])
        self.pipe, its = server.Pipe()
        self.process = server.Process(target=serve, args=(its, rank, settings), daemon=True)
        self.process.start()
        its.close()

    def begin(self, name, *arguments, **named):
        self.pipe.send((name, arguments, named))

    def answer(self, seconds=60):
        """The call's value; its error is raised, and an EOFError if the process has died."""
        if not self.pipe.poll(seconds):
            raise TimeoutError(f"no answer in {seconds} s")
        value, error = self.pipe.recv()
        if error is not None:
            raise error
        return value

    def call(self, name, *arguments, **named):
        self.begin(name, *arguments, **named)
        return self.answer()


class World:
    """Two policy workers, two generation workers, and what NeMo-RL's synchronizer calls."""

    def __init__(self, settings):
        self.policy = [Worker(rank, settings) for rank in range(2)]
        self.rollouts = [Worker(rank, settings) for rank in range(2)]
        self.init()

    def init(self):
        """Before the first refit, and after a finalize."""
        metadata = [one.call("prepare") for one in (*self.policy, *self.rollouts)]
        topology = {
            "metadata": metadata,
            "train_world_size": len(self.policy),
            "rollout_world_size": len(self.rollouts),
        }
        for one in self.policy:
            one.call("init_policy", **topology)
        for one in self.rollouts:
            one.call("init_rollout", **topology)

    def begin(self, seed, dies_after=None, **options):
        for one in self.policy:
            one.begin("send", seed, options, dies_after if one is self.policy[0] else None)
        for one in self.rollouts:
            one.begin("receive")

    def refit(self, seed, **options):
        """The versions that the generation workers have."""
        self.begin(seed, **options)
        assert len({one.answer() for one in self.policy}) == 1
        return [one.answer() for one in self.rollouts]

    def compare(self, seed, **options):
        return [one.call("compare", seed, options) for one in self.rollouts]

    def finalize(self):
        for one in (*self.policy, *self.rollouts):
            one.call("finalize")

    def stop(self):
        for one in (*self.policy, *self.rollouts):
            one.process.kill()
            one.process.join()
