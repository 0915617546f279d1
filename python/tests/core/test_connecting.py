"""What the trainer's `connect` says while it waits, and when it need not wait any longer."""

import asyncio
import contextlib
import logging
import multiprocessing
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import weightsync
from ends import LONG, Net, all_ended, meet, pair

SPAWN = multiprocessing.get_context("spawn")


def _fails():
    raise SystemExit(3)


@pytest.mark.parametrize("start", ["multiprocessing", "subprocess"])
def test_connect_notices_a_process_that_failed(start):
    with all_ended(weightsync.Sender(Net())) as (sender,):
        if start == "multiprocessing":
            process = SPAWN.Process(target=_fails)
            process.start()
        else:
            process = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
        words = rf"pid {process.pid}\) ended with exit code 3"
        with pytest.raises(weightsync.PeerError, match=words) as raised:
            # Without a deadline: the wait ends by the process.
            sender.connect(1, processes=[process], timeout=None)
        assert raised.value.remedy == "give up"
        process.join() if start == "multiprocessing" else process.wait()
        if start == "multiprocessing":
            process.close()


def test_connect_notices_that_every_process_has_ended():
    with all_ended(weightsync.Sender(Net())) as (sender,):
        processes = [subprocess.Popen([sys.executable, "-c", ""]) for _ in range(2)]
        with pytest.raises(weightsync.PeerError, match="all 2 processes have ended"):
            sender.connect(2, processes=processes, timeout=None)


def test_connect_passes_processes_that_live():
    sender = weightsync.Sender(Net())
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=Net())
    idle = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(idle, stdin=subprocess.PIPE) as process, all_ended(sender, receiver):
        meet(sender, receiver, processes=[process])
        process.stdin.close()
    with all_ended(weightsync.Sender(Net())) as (sender,):
        with pytest.raises(weightsync.WrongTypeError, match="multiprocessing or subprocess"):
            sender.connect(1, processes=[3])


def test_connect_numbers_the_first_version():
    with all_ended(weightsync.Sender(Net())) as (sender,):
        with pytest.raises(weightsync.SettingError, match="version: expected a whole number"):
            sender.connect(0, version=-1)
        sender.connect(0, version=7)
        assert sender.version == 7
        assert sender.send().version == 8


def test_connect_says_who_joins_at_info(caplog):
    caplog.set_level(logging.INFO, logger="weightsync")
    sender = weightsync.Sender(Net())
    info = sender.init_info
    receivers = [weightsync.ModelReceiver(info, number, model=Net()) for number in range(2)]
    with all_ended(sender, *receivers):
        meet(sender, *receivers)
    # What the library said is said once Python runs.
    said = [(one.levelno, one.getMessage()) for one in caplog.records]
    said = [text for level, text in said if level == logging.INFO]
    assert any("policy waits for 2 workers" in text for text in said), said
    assert any("has joined: 2 of 2 workers" in text for text in said), said
    assert any("connected" in text for text in said), said


@contextlib.contextmanager
def hanging_up(info):
    """Accepts connections at a sender's address, lists them, and hangs up."""
    port = int(re.search(r"127\.0\.0\.1:([1-9]\d*)", info.to_json())[1])
    accepted = []
    with socket.create_server(("127.0.0.1", port)) as server:

        def hang_up():
            while True:
                try:
                    connection, peer = server.accept()
                except OSError:
                    return
                # To close with bytes unread would reset the connection.
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(LONG)
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(4096):
                        pass
                accepted.append(peer)

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            yield accepted
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_background_logs_why_no_sender_is_reached(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="weightsync")
    scheme = "distributed:listen=127.0.0.1:0,share=none"
    sender = weightsync.Sender(Net(), scheme=scheme, run_dir=tmp_path / "run")
    receiver = weightsync.ModelReceiver(sender.init_info, 0, model=Net())

    def said(words):
        lines = [one for one in caplog.records if "no sender is reached" in one.getMessage()]
        return [one.levelno for one in lines if words in one.getMessage()]

    def until(there):
        ends = time.monotonic() + LONG
        while not there():
            assert time.monotonic() < ends, caplog.text
            time.sleep(0.01)

    with all_ended(sender, receiver):
        meet(sender, receiver)
        with all_ended(receiver.start_background()) as (background,):
            info = sender.init_info
            sender.shutdown()
            until(lambda: said("refused"))
            with hanging_up(info) as accepted:
                until(lambda: said("the other end") and len(accepted) > 5)
            # One line for each reason, and no warning: the sender has shut down.
            assert set(said("")) == {logging.INFO}
            assert len(said("the other end")) == 1, caplog.text
            assert (background.state, background.failure) == ("closed", None)


def test_certificate_is_warned_of_once_by_a_process(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WEIGHTSYNC_TLS_LOOPBACK", "1")
    pki = tmp_path / "pki"
    command = [Path(sys.executable).with_name("weightsync"), "certs", "new", "--out", pki]
    subprocess.run([*command, "--hosts", "127.0.0.1", "--days", "6"], check=True, timeout=LONG)
    scheme = f"distributed:listen=127.0.0.1:0,share=none,tls={pki}"
    with all_ended(weightsync.Sender(Net(), scheme=scheme)) as (sender,):
        info = sender.init_info
    with hanging_up(info) as accepted:
        receiver = weightsync.ModelReceiver(info, 0, model=Net())
        ends = time.monotonic() + LONG
        with all_ended(receiver):
            while len(accepted) < 3:
                assert time.monotonic() < ends, caplog.text
                with pytest.raises(weightsync.DeadlineError, match="no sender answered"):
                    receiver.connect(timeout=0.5)
    said = [one.getMessage() for one in caplog.records]
    assert sum("worker.pem expires in 143 hours" in text for text in said) == 1, said


def test_a_run_directory_is_not_made_with_its_parents(tmp_path):
    wrong = tmp_path / "rnus" / "seven"
    with pytest.raises(weightsync.OperatingSystemError, match="directory above it does not exist"):
        weightsync.Sender(Net(), run_dir=wrong)
    assert not wrong.parent.exists()
    with all_ended(weightsync.Sender(Net(), run_dir=tmp_path / "seven")) as (sender,):
        sender.connect(0, timeout=LONG)


def test_awaited_send_does_not_block_the_loop():
    async def send(sender, receiver):
        pending = sender.send_async()
        # The loop runs while the send waits for a worker that takes it in the loop.
        waiting = asyncio.ensure_future(_of(pending))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert await asyncio.to_thread(receiver.receive, LONG) == 2
        return await waiting

    async def _of(pending):
        return await pending

    with pair(Net(1.0), Net()) as (sender, receiver):
        report = asyncio.run(send(sender, receiver))
        assert report.all_applied and report.version == 2


def test_async_exit_does_not_block_the_loop():
    async def run():
        async with weightsync.Sender(Net(1.0)) as sender:
            receiver = weightsync.ModelReceiver(sender.init_info, 0, model=Net())
            joining = asyncio.create_task(asyncio.to_thread(receiver.connect, timeout=LONG))
            await asyncio.to_thread(sender.connect, timeout=LONG)
            async with receiver:
                await joining
                assert receiver.version == 1
            with pytest.raises(weightsync.LifecycleError):
                receiver.receive(0)
        with pytest.raises(weightsync.LifecycleError):
            sender.send()

    asyncio.run(run())


@pytest.mark.parametrize("reason", [None, "no more workers"])
def test_async_cascade_leaves_its_trainer(reason):
    """In order, or as a failed worker if the block ends by an exception."""

    async def run(sender):
        joined = await asyncio.to_thread(weightsync.Cascade, sender.init_info, 3, timeout=LONG)
        async with joined as cascade:
            leaf = weightsync.ModelReceiver(cascade.init_info, 0, model=Net())
            async with leaf:
                joining = asyncio.create_task(asyncio.to_thread(leaf.connect, timeout=LONG))
                await asyncio.to_thread(cascade.connect, 1, timeout=LONG)
                await joining
                assert [one.worker for one in sender.workers] == [3]
            if reason:
                raise RuntimeError(reason)

    with weightsync.Sender(Net(1.0)) as sender:
        sender.connect(0)
        with contextlib.suppress(RuntimeError):
            asyncio.run(run(sender))
        reasons = [line.reason for line in sender.send(timeout=LONG).failed]
        assert reasons == ([] if reason is None else [f"RuntimeError: {reason}"])
