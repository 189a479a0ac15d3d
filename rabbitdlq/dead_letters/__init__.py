"""Looking at dead letters, sending them back, deleting them."""

from rabbitdlq.dead_letters.groups import Group
from rabbitdlq.dead_letters.looking import QueueSummary
from rabbitdlq.dead_letters.manager import DLQManager
from rabbitdlq.dead_letters.plan import ReplayPlan
from rabbitdlq.dead_letters.preflight import Finding
from rabbitdlq.dead_letters.replay import Canary, Target
from rabbitdlq.dead_letters.report import RunReport
from rabbitdlq.dead_letters.run_log import RunInfo
from rabbitdlq.dead_letters.selection import NumberRange, Selection, Where
from rabbitdlq.dead_letters.story import Lap, OperatorAction, Story

__all__ = [
    "Canary",
    "DLQManager",
    "Finding",
    "Group",
    "Lap",
    "NumberRange",
    "OperatorAction",
    "QueueSummary",
    "ReplayPlan",
    "RunInfo",
    "RunReport",
    "Selection",
    "Story",
    "Target",
    "Where",
]
