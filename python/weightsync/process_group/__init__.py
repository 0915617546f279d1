"""Weights over a process group of torch.distributed that is there already::

    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        sender = weightsync.process_group.Sender(model)
        print(sender.send())
    else:
        receiver = weightsync.process_group.Receiver(model)
        version = receiver.receive()
"""

from __future__ import annotations

from weightsync.process_group._receiver import Receiver
from weightsync.process_group._report import RankReport, Report
from weightsync.process_group._sender import Sender

__all__ = ["RankReport", "Receiver", "Report", "Sender"]
