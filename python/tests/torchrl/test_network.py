"""What TorchRL's schemes between hosts are asked for, and where they are found."""

import pytest
import weightsync
from tiny import policy
from weightsync.torchrl import DistributedWeightSyncScheme, RPCWeightSyncScheme


@pytest.mark.parametrize("backend", ["nccl", "mpi", "ucc"])
def test_a_backend_that_is_not_here_is_named(backend):
    with pytest.raises(weightsync.UnsupportedError, match=f"'{backend}'.*'gloo'"):
        DistributedWeightSyncScheme(backend)


def test_where_workers_find_the_trainer():
    scheme = DistributedWeightSyncScheme()
    with pytest.raises(weightsync.LifecycleError, match="init_on_sender"):
        scheme.get_store_info()
    scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=["cpu"])
    info = scheme.get_store_info()
    assert info["host"] == "127.0.0.1" and info["port"] > 0
    assert "distributed" in info["init_info"]
    scheme.shutdown()


def test_off_loopback_a_token_is_wanted(monkeypatch):
    for name in ("WEIGHTSYNC_TOKEN", "WEIGHTSYNC_TOKEN_FILE", "WEIGHTSYNC_INSECURE_PLAINTEXT"):
        monkeypatch.delenv(name, raising=False)
    scheme = DistributedWeightSyncScheme(listen="0.0.0.0:0")
    with pytest.raises(weightsync.WeightsyncError, match="token"):
        scheme.init_on_sender(model_id="policy", model=policy(1.0), devices=["cpu"])


def test_when_the_first_weights_come_is_one_of_two():
    with pytest.raises(ValueError, match='"send" or "connect"'):
        RPCWeightSyncScheme(initial="soon")
