"""Retries with growing delays, a dead-letter queue with the whole story, and safe replay for RabbitMQ."""

from rabbitdlq.broker import Connection, apply_topology, check_topology
from rabbitdlq.consumer import Consumer, ConsumerSummary, Supervisor, SupervisorLink, SupervisorReport
from rabbitdlq.dead_letter import AttemptRecord, DeadLetter
from rabbitdlq.dead_letters import (
    Canary,
    DLQManager,
    Finding,
    Group,
    NumberRange,
    QueueSummary,
    ReplayPlan,
    RunInfo,
    RunReport,
    Selection,
    Story,
    Target,
    Where,
)
from rabbitdlq.durations import exponential
from rabbitdlq.errors import (
    AccessDenied,
    AmbiguousDeadLetter,
    ArchiveError,
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    DeadLetterError,
    DeadLetterNotFound,
    DeadLettersInUse,
    EntityNotFound,
    LocalBrokerError,
    Permanent,
    PublishRefused,
    PublishUnconfirmed,
    RabbitDLQError,
    ReadOnly,
    RunNotFound,
    TopologyMismatch,
    Unroutable,
)
from rabbitdlq.message import Message
from rabbitdlq.producer import Producer
from rabbitdlq.settings import load_topologies
from rabbitdlq.topology import Topology, WorkBinding

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AmbiguousDeadLetter",
    "ArchiveError",
    "AttemptRecord",
    "BrokerError",
    "BrokerUnavailable",
    "Canary",
    "ConfigurationError",
    "Connection",
    "Consumer",
    "ConsumerSummary",
    "DLQManager",
    "DeadLetter",
    "DeadLetterError",
    "DeadLetterNotFound",
    "DeadLettersInUse",
    "EntityNotFound",
    "Finding",
    "Group",
    "LocalBrokerError",
    "Message",
    "NumberRange",
    "Permanent",
    "Producer",
    "PublishRefused",
    "PublishUnconfirmed",
    "QueueSummary",
    "RabbitDLQError",
    "ReadOnly",
    "ReplayPlan",
    "RunInfo",
    "RunNotFound",
    "RunReport",
    "Selection",
    "Story",
    "Supervisor",
    "SupervisorLink",
    "SupervisorReport",
    "Target",
    "Topology",
    "TopologyMismatch",
    "Unroutable",
    "Where",
    "WorkBinding",
    "apply_topology",
    "check_topology",
    "exponential",
    "load_topologies",
]
