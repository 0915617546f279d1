"""Policies: how a collector asks one for actions."""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from weightsync.errors import SettingError, WrongTypeError
from weightsync.rl._columns import ACTION, Batch, Column, Key
from weightsync.rl._envs import Envs

try:
    import torch
except ImportError:
    torch = None

HAS_TORCH = torch is not None

Exploration = Literal["random", "mode", "mean", "deterministic"]

LOG_PROB: Key = ("action_log_prob",)


def exploration(value: Any) -> Exploration:
    """The exploration type of a word, or of TorchRL's enum; None: random, as in TorchRL."""
    if value is None:
        return "random"
    name = str(getattr(value, "name", value)).lower()
    if name not in ("random", "mode", "mean", "deterministic"):
        raise SettingError(
            f'exploration_type: expected "random", "mode", "mean" or "deterministic", got {value!r}'
        )
    return name  # type: ignore[return-value]


class Actor:
    """Asks a policy, and sorts its answer into columns.

    A policy is called with the observations, a tensor ``[P, *shape]`` (a dict of them where the
    space is a Dict; arrays where torch is not installed). It returns one of:

    - actions, ``[P, *shape of an action]``;
    - for a Discrete space of ``n`` actions, floating-point logits ``[P, n]``;
    - a distribution of :mod:`torch.distributions`;
    - a dict of one of these under ``"action"``, and more columns such as ``"value"``.

    Logits and distributions are drawn from as ``exploration_type`` says, and the frames get an
    ``"action_log_prob"``. A TensorDict module is called with a TensorDict, as in TorchRL.
    """

    def __init__(
        self,
        policy: Any,
        envs: Envs,
        explore: Exploration,
        device: Any = None,
        own_process: bool = True,
    ) -> None:
        self.policy, self._envs, self.explore = policy, envs, explore
        self._device = device_of(policy) if device is None else device
        envs.check_policy(policy)
        space = envs.action_space
        # The number of choices of a Discrete space, and the first of them.
        self._count = int(space.n) if _is_discrete(envs) else None
        self._start = int(getattr(space, "start", 0)) if self._count is not None else 0
        self._own_process = own_process
        self._speaks_tensordict = is_tensordict_module(policy)
        self._rng = np.random.default_rng()
        self.columns = self._discover()

    def seed(self, seed: int) -> None:
        """Seeds the draws of this actor, of random actions, and in a worker process all others."""
        self._rng = np.random.default_rng(seed)
        self._envs.seed_actions(seed)
        if self._own_process:
            random.seed(seed)
            np.random.seed(seed % 2**32)
            if torch is not None:
                torch.manual_seed(seed)

    def act(self) -> tuple[dict[Key, Any], Any]:
        """The columns of the next step, and the actions for the environments."""
        if self.policy is None:
            return self.act_randomly()
        columns = self._ask(self.policy)
        action = columns[ACTION]
        if self._count is not None and np.ndim(action) > 1:
            action = np.argmax(action, -1) + self._start
        return columns, action

    def act_randomly(self) -> tuple[dict[Key, Any], Any]:
        """The same with random actions. What else the policy returns is zero."""
        action = self._envs.sample()
        column = next((one for one in self.columns if one.key == ACTION), None)
        given = action
        if column is not None and column.shape != action.shape[1:]:
            # The policy's actions are one-hot.
            given = np.zeros((len(action), *column.shape), column.dtype)
            np.put_along_axis(given, action[:, None] - self._start, 1, -1)
        return {ACTION: given}, action

    def _discover(self) -> list[Column]:
        """Asks a copy of the policy once for its columns."""
        if self.policy is None:
            columns = {ACTION: self._envs.sample()}
        else:
            try:
                copied = copy.deepcopy(self.policy)
            except Exception:
                # Not all policies can be copied. Most do not change by being asked.
                copied = self.policy
            with same_randomness(self._device):
                columns = self._ask(copied)
        return [
            Column(key, value.dtype.name, tuple(value.shape[1:])) for key, value in columns.items()
        ]

    def _ask(self, policy: Any) -> dict[Key, np.ndarray]:
        with self._no_grad():
            if self._speaks_tensordict:
                with exploring(self.explore):
                    found = self._from_tensordict(policy)
            else:
                found = self._from_plain(policy)
        columns = {key: self._array(key, value) for key, value in found.items()}
        self._check_action(columns)
        return columns

    def _from_plain(self, policy: Any) -> dict[Key, Any]:
        inputs = {key: self._tensor(value) for key, value in self._envs.observations.items()}
        only = next(iter(inputs.values())) if list(inputs) == [("observation",)] else None
        answer = policy(Batch.of(inputs, ()) if only is None else only)
        more: dict[Key, Any] = {}
        if isinstance(answer, Mapping):
            if "action" not in answer:
                raise WrongTypeError(
                    f"the policy returned {', '.join(map(str, answer))}, and no 'action'"
                )
            more = {(str(key),): value for key, value in answer.items() if key != "action"}
            answer = answer["action"]
        return {**self._drawn(answer), **more}

    def _drawn(self, answer: Any) -> dict[Key, Any]:
        """The actions of an answer that may be a distribution, or logits of one."""
        count = self._count
        if count is not None and np.ndim(answer) == 2 and answer.shape[1] == count:
            logits = self._array(ACTION, answer)
            if logits.dtype.kind == "f":
                return self._of_logits(logits)
        if not hasattr(answer, "log_prob"):
            return {ACTION: answer}
        if self.explore == "random":
            action = answer.sample()
        elif self.explore == "mean":
            action = answer.mean
        else:
            action = answer.mode
        return {ACTION: action, LOG_PROB: answer.log_prob(action)}

    def _of_logits(self, logits: np.ndarray) -> dict[Key, Any]:
        """Actions of a categorical distribution. torch's takes as long as a small policy."""
        logits = logits - logits.max(-1, keepdims=True)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        if self.explore == "random":
            # The largest of the log-probabilities with Gumbel noise is distributed like them.
            action = np.argmax(log_probs + self._rng.gumbel(size=logits.shape), -1)
        else:
            action = np.argmax(log_probs, -1)
        log_prob = np.take_along_axis(log_probs, action[:, None], -1)[:, 0]
        return {ACTION: action + self._start, LOG_PROB: log_prob}

    def _from_tensordict(self, policy: Any) -> dict[Key, Any]:
        from tensordict import TensorDict

        batched = self._envs.is_batched
        inputs = {key: self._tensor(value) for key, value in self._envs.observations.items()}
        shape = (self._envs.num_envs,) if batched else ()
        given = TensorDict({}, batch_size=shape)
        for key, value in inputs.items():
            given.set(key, value if batched else value[0])
        answer = policy(given)
        found = {}
        for key in answer.keys(include_nested=True, leaves_only=True):
            full = (key,) if isinstance(key, str) else tuple(key)
            if full not in inputs:
                value = answer.get(key)
                found[full] = value if batched else value.unsqueeze(0)
        if ACTION not in found:
            raise WrongTypeError(
                f"the policy wrote {', '.join('.'.join(key) for key in found)}, and no 'action'"
            )
        return found

    def _tensor(self, value: np.ndarray) -> Any:
        # A copy: the policy may keep what it is given, and the array changes with the next step.
        if torch is None:
            return value.copy()
        return torch.tensor(value, device="cpu" if self._device is None else self._device)

    def _array(self, key: Key, value: Any) -> np.ndarray:
        if hasattr(value, "detach"):
            value = value.detach().cpu()
            if value.dtype.is_floating_point and value.dtype.itemsize == 2:
                # numpy has no bfloat16; half precision follows it.
                value = value.float()
            value = value.numpy()
        array: np.ndarray = np.asarray(value)
        if array.ndim == 0 or len(array) != self._envs.num_envs or array.dtype.kind not in "biufc":
            raise WrongTypeError(
                f"the policy returned {'.'.join(key)} as {array.dtype} of shape "
                f"{list(array.shape)}: expected numbers, {self._envs.num_envs} in the first dimension"
            )
        return array

    def _check_action(self, columns: Mapping[Key, np.ndarray]) -> None:
        """Refuses actions that the environments cannot take."""
        action, space = columns[ACTION], self._envs.action_space
        shape = action.shape[1:]
        if self._count is not None:
            fits = shape == (self._count,) or (shape == () and action.dtype.kind in "iu")
            expected = f"integers [{len(action)}], or logits [{len(action)}, {self._count}]"
        else:
            fits = shape == tuple(space.shape)
            expected = str([len(action), *space.shape])
        if not fits:
            raise WrongTypeError(
                f"the policy returned actions ({action.dtype}) of shape {list(action.shape)} for "
                f"the action space {space}: expected {expected}"
            )

    def _no_grad(self) -> contextlib.AbstractContextManager[Any]:
        gradless: contextlib.AbstractContextManager[Any]
        gradless = contextlib.nullcontext() if torch is None else torch.no_grad()
        return gradless


#: Held by the thread that has set tensordict's interaction type.
_interacting = threading.RLock()


@contextlib.contextmanager
def exploring(explore: str) -> Iterator[None]:
    """Has TensorDict policies explore so.

    tensordict has one interaction type for all threads, so one thread at a time calls its policy.
    """
    from tensordict.nn import InteractionType, set_interaction_type

    with _interacting, set_interaction_type(InteractionType[explore.upper()]):
        yield


@contextlib.contextmanager
def same_randomness(device: Any) -> Iterator[None]:
    """Puts the generators of random numbers back to where they were, also that of a device.

    Not in a worker thread: the generators are the trainer's too, which may draw meanwhile.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    states = random.getstate(), np.random.get_state()
    # Not all GPUs: to ask for the state of one takes memory of it.
    gpus = [] if device is None or "cuda" not in str(device) else [torch.device(device)]
    try:
        with contextlib.nullcontext() if torch is None else torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _is_discrete(envs: Envs) -> bool:
    return hasattr(envs.action_space, "n") and tuple(envs.action_space.shape) == ()


def is_tensordict_module(policy: Any) -> bool:
    """Whether a policy takes and returns TensorDicts."""
    try:
        from tensordict.nn import TensorDictModuleBase
    except ImportError:
        return False
    return isinstance(policy, TensorDictModuleBase)


def device_of(policy: Any) -> Any:
    """The device of a policy's weights where it is not the CPU, else None."""
    weights = getattr(policy, "parameters", None)
    first = None if weights is None else next(iter(weights()), None)
    device = getattr(first, "device", None)
    return None if getattr(device, "type", None) in (None, "cpu", "meta") else device


def on_device(policy: Any, device: Any) -> Any:
    """The policy, or a copy if it has to be on another device."""
    parameters = getattr(policy, "parameters", None)
    if device is None or parameters is None:
        return policy
    device = torch.device(device)
    elsewhere = any(
        one.device.type != device.type or device.index not in (None, one.device.index)
        for one in parameters()
    )
    return copy.deepcopy(policy).to(device) if elsewhere else policy


def make_policy(policy: Any, factory: Callable[[], Any] | None, device: Any) -> Any:
    """The policy that a worker runs, on its device."""
    made = policy if factory is None else factory()
    if device is not None and hasattr(made, "to"):
        made = made.to(device)
    return made
