"""Retries with growing delays, a dead-letter queue with the whole story, and safe replay for RabbitMQ."""

from rabbitdlq.broker import Connection, apply_topology, check_topology
from rabbitdlq.consumer import Consumer, ConsumerSummary, Supervisor, SupervisorLink, SupervisorReport
from rabbitdlq.dead_letter import AttemptRecord, DeadLetter
from rabbitdlq.dead_letters import DLQManager, QueueSummary, ReplayReport
from rabbitdlq.durations import exponential
from rabbitdlq.errors import (
    AccessDenied,
    AmbiguousDeadLetter,
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
    "AttemptRecord",
    "BrokerError",
    "BrokerUnavailable",
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
    "LocalBrokerError",
    "Message",
    "Permanent",
    "Producer",
    "PublishRefused",
    "PublishUnconfirmed",
    "QueueSummary",
    "RabbitDLQError",
    "ReplayReport",
    "Supervisor",
    "SupervisorLink",
    "SupervisorReport",
    "Topology",
    "TopologyMismatch",
    "Unroutable",
    "WorkBinding",
    "apply_topology",
    "check_topology",
    "exponential",
    "load_topologies",
]
