"""A synchronizer, its trainer and its explorer on two hosts."""

import pytest
from hosts import FAR, hosts  # noqa: F401
from test_restarts import PARTIES


@pytest.mark.parametrize("method", ["memory", "nccl"])
def test_parties_on_two_hosts_need_no_further_settings(hosts, method):
    near, far = hosts
    server = far.start("-m", "weightsync", "serve", "--address", f"{FAR}:0", "--method", method)
    address = server.words()[4].rstrip(";")
    assert address.startswith(FAR)
    trainer = near.start(PARTIES, "trainer", address, method, "-", "0")
    assert trainer.words()[:2] == ["joined", "1"]
    # One on the host of the synchronizer, and one on the trainer's.
    explorers = [host.start(PARTIES, "explorer", address, name) for host, name in ((far, "a"), (near, "b"))]
    for step, explorer in enumerate(explorers, 1):
        assert explorer.words() == ["joined"]
        explorer.tell(1)
        # With nccl it comes to those who wait, and else to all.
        assert trainer.ask(step)[0] == "synced"
        assert explorer.words()[0] == "synced"
    for one in (*explorers, trainer):
        one.stop()
