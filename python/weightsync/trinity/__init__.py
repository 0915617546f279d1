"""Trinity-RFT's synchronizer, by one changed import, and its settings.

``from weightsync.trinity import Synchronizer`` in place of ``from trinity.manager.synchronizer
import Synchronizer``: the methods are those of Trinity-RFT 0.6. Ray carries names, numbers and states
alone. Weights go by weightsync: through shared memory on one host, over TCP between hosts.
"""

from weightsync.trinity._settings import Settings, settings_of
from weightsync.trinity._synchronizer import RunningStatus, Synchronizer

__all__ = ["RunningStatus", "Settings", "Synchronizer", "settings_of"]
