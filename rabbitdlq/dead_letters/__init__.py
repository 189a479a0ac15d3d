"""Looking at dead letters, sending them back, deleting them."""

from rabbitdlq.dead_letters.manager import DLQManager, QueueSummary
from rabbitdlq.dead_letters.replay import ReplayReport

__all__ = ["DLQManager", "QueueSummary", "ReplayReport"]
