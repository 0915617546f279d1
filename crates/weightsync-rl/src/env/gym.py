"""Steps environments of Gymnasium for a rollout. `gym.rs` runs this, and describes the messages."""

import fcntl
import os
import signal
import socket
import struct
import sys

F_SETSIG = 10


def die_with(lifeline):
    """Has the kernel kill this process once the other end of a pipe is closed.

    Nothing is written to the pipe. A thread could not do this: an environment that hangs may hold
    the interpreter's lock.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
    try:
        # The other process may have died before.
        if os.read(lifeline, 1) == b"":
            os._exit(1)
    except BlockingIOError:
        pass


class Refused(Exception):
    """Says what is wrong with an environment, and what to do."""


def make(name, count):
    try:
        import gymnasium
    except ImportError as error:
        raise Refused(
            f"{sys.executable} cannot import gymnasium ({error}): install it with "
            f"`{sys.executable} -m pip install gymnasium`, or name a Python that has it"
        ) from None
    return [gymnasium.make(name) for _ in range(count)]


def described(env):
    """The number of quantities in an observation, the space of actions, and the goal."""
    from gymnasium.spaces import Box, Discrete

    seen, done = env.observation_space, env.action_space
    goal = getattr(env.spec, "reward_threshold", None)
    goal = float("nan") if goal is None else float(goal)
    if not isinstance(seen, Box):
        raise Refused(f"its observations are {seen}: expected a Box")
    if isinstance(done, Discrete):
        return struct.pack("<IBIfff", seen_len(seen), 0, int(done.n), 0.0, 0.0, goal)
    if not isinstance(done, Box):
        raise Refused(f"its actions are {done}: expected Discrete or a Box")
    low, high = float(done.low.min()), float(done.high.max())
    if (done.low != low).any() or (done.high != high).any() or abs(low) + abs(high) > 1e9:
        raise Refused(f"its actions are {done}: expected the same finite bounds for all quantities")
    return struct.pack("<IBIfff", seen_len(seen), 1, seen_len(done), low, high, goal)


def seen_len(space):
    length = 1
    for size in space.shape:
        length *= size
    return length


def serve(link, envs):
    import numpy

    seen, space = envs[0].observation_space, envs[0].action_space
    expected = seen_len(seen)

    def observed(observation):
        numbers = numpy.ascontiguousarray(observation, dtype="<f4")
        if numbers.size != expected:
            raise Refused(
                f"an observation has the shape {numbers.shape}: expected {seen.shape}, as its "
                "observation_space says. Correct the environment"
            )
        return numbers.tobytes()

    discrete = not hasattr(space, "low")
    action_len = 4 if discrete else 4 * seen_len(space)
    while True:
        kind, index = struct.unpack("<BI", exactly(link, 5))
        env = envs[index]
        if kind == 0:
            (seed,) = struct.unpack("<q", exactly(link, 8))
            observation, _ = env.reset(seed=seed if seed >= 0 else None)
            link.sendall(b"\0" + observed(observation))
            continue
        action = exactly(link, action_len)
        if discrete:
            action = int(space.start) + struct.unpack("<I", action)[0]
        else:
            action = numpy.frombuffer(action, "<f4").reshape(space.shape)
            action = action.clip(space.low, space.high).astype(space.dtype)
        observation, reward, terminated, truncated, _ = env.step(action)
        ended = struct.pack("<fBB", float(reward), bool(terminated), bool(truncated))
        link.sendall(b"\0" + ended + observed(observation))


def exactly(link, length):
    message = b""
    while len(message) < length:
        part = link.recv(length - len(message))
        if not part:
            # Nobody asks any more.
            os._exit(0)
        message += part
    return message


def main():
    die_with(0)
    # Ctrl-C reaches every process of a terminal. The lifeline ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=os.dup(1))
    # What an environment prints is no message.
    os.dup2(2, 1)
    try:
        envs = make(sys.argv[1], int(sys.argv[2]))
        link.sendall(b"\0" + described(envs[0]))
        serve(link, envs)
    except Exception as error:
        words = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        words = words.encode()[:4000]
        link.sendall(struct.pack("<BI", 1, len(words)) + words)


main()
