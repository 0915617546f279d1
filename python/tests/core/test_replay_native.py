"""The replay buffer of the native module: columns by address."""

import numpy as np
import pytest
from weightsync import CorruptError, LifecycleError, SettingError
from weightsync._native import ReplayBuffer

COLUMNS = [("observation", "F32", (6,)), ("trajectory", "I64", ())]


def _extend(buffer, shape, trajectory):
    observations = np.full((*shape, 6), trajectory, np.float32)
    trajectories = np.full(shape, trajectory, np.int64)
    return buffer.extend(shape, [observations.ctypes.data, trajectories.ctypes.data])


def _sample(buffer, frames):
    found = {
        "observation": np.empty((frames, 6), np.float32),
        "trajectory": np.empty(frames, np.int64),
        "ids": np.empty(frames, np.uint64),
        "weights": np.empty(frames, np.float32),
        "mask": np.empty(frames, np.bool_),
    }
    at = {name: array.ctypes.data for name, array in found.items()}
    columns = [at["observation"], at["trajectory"]]
    has_weights, has_mask = buffer.sample(frames, columns, at["ids"], at["weights"], at["mask"])
    for name, there in [("weights", has_weights), ("mask", has_mask)]:
        if not there:
            del found[name]
    return found


def test_frames_are_sampled_as_they_were_written():
    buffer = ReplayBuffer(COLUMNS, 40, ndim=2, seed=1)
    assert _extend(buffer, (2, 10), 3) == (0, 20)
    assert _extend(buffer, (3, 10), 4) == (20, 50)
    assert (len(buffer), buffer.ids, buffer.capacity) == (40, (10, 50), 40)
    found = _sample(buffer, 100)
    assert set(found) == {"observation", "trajectory", "ids"}
    assert (found["trajectory"] == np.where(found["ids"] < 20, 3, 4)).all()
    assert (found["observation"] == found["trajectory"][:, None]).all()
    assert set(found["trajectory"]) == {3, 4}

    observation, trajectory = np.empty((2, 6), np.float32), np.empty(2, np.int64)
    buffer.read([49, 10], [observation.ctypes.data, trajectory.ctypes.data])
    assert trajectory.tolist() == [4, 3]
    with pytest.raises(LifecycleError, match="frame 9 is not in"):
        buffer.read([49, 9], [observation.ctypes.data, trajectory.ctypes.data])


def test_weights_and_mask_come_with_their_samplers():
    buffer = ReplayBuffer(COLUMNS, 40, sampler={"sampler": "prioritised", "alpha": 1.0})
    _extend(buffer, (4,), 1)
    buffer.set_beta(1.0)
    buffer.update_priorities([0, 1, 2, 3], [0.0, 0.0, 5.0, 5.0])
    assert set(_sample(buffer, 50)["ids"]) == {2, 3}
    # A weight is relative to the least priority of the buffer, also where the sample has no such row.
    buffer.update_priorities([0, 1, 2, 3], [1.0, 1.0, 4.0, 4.0])
    found = _sample(buffer, 50)
    assert np.allclose(found["weights"], np.where(found["ids"] < 2, 1.0, 0.25))

    settings = {"sampler": "slices", "column": "trajectory", "num_slices": 2, "strict_len": False}
    buffer = ReplayBuffer(COLUMNS, 40, sampler=settings)
    _extend(buffer, (3,), 1)
    found = _sample(buffer, 8)
    assert found["ids"].tolist() == [0, 1, 2, 2] * 2
    assert found["mask"].tolist() == [True, True, True, False] * 2


def test_directory_keeps_frames_and_refuses_others(tmp_path):
    buffer = ReplayBuffer(COLUMNS, 40, directory=tmp_path)
    _extend(buffer, (30,), 7)
    buffer.flush()
    with pytest.raises(LifecycleError, match="is open already"):
        ReplayBuffer(COLUMNS, 40, directory=tmp_path)
    del buffer
    buffer = ReplayBuffer(COLUMNS, 40, directory=tmp_path)
    assert buffer.ids == (0, 30)
    assert set(_sample(buffer, 20)["trajectory"]) == {7}
    del buffer
    with pytest.raises(SettingError, match="`observation` F32"):
        ReplayBuffer(COLUMNS[1:], 40, directory=tmp_path)
    (tmp_path / "header").write_bytes(b"")
    with pytest.raises(CorruptError, match="it is cut"):
        ReplayBuffer(COLUMNS, 40, directory=tmp_path)


def test_calls_that_cannot_be_are_refused():
    buffer = ReplayBuffer(COLUMNS, 40)
    with pytest.raises(LifecycleError, match="nothing to sample"):
        _sample(buffer, 1)
    with pytest.raises(SettingError, match="ndim = 1"):
        _extend(buffer, (2, 2), 1)
    with pytest.raises(SettingError, match="addresses of 2 columns"):
        buffer.extend((1,), [1])
    with pytest.raises(SettingError, match="has no memory of its own"):
        buffer.extend((1,), [0, 0])
    with pytest.raises(SettingError, match="no priorities"):
        buffer.set_beta(1.0)
    with pytest.raises(SettingError, match="there is no sampler"):
        ReplayBuffer(COLUMNS, 40, sampler={"sampler": "other"})
    with pytest.raises(SettingError, match="capacity is 0"):
        ReplayBuffer(COLUMNS, 0)
