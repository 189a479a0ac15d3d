"""Running handlers: delivery → attempt → outcome → settle; in this process, or in several."""

from rabbitdlq.consumer.attempt import Handler
from rabbitdlq.consumer.breaker import Breaker, BreakerState
from rabbitdlq.consumer.classify import Rule
from rabbitdlq.consumer.consumer import Consumer
from rabbitdlq.consumer.group import ConsumerGroup
from rabbitdlq.consumer.handling import handler
from rabbitdlq.consumer.health import Health
from rabbitdlq.consumer.summary import ConsumerSummary
from rabbitdlq.consumer.supervised import SupervisorLink
from rabbitdlq.consumer.supervisor import Supervisor, SupervisorReport

__all__ = [
    "Breaker",
    "BreakerState",
    "Consumer",
    "ConsumerGroup",
    "ConsumerSummary",
    "Handler",
    "Health",
    "Rule",
    "Supervisor",
    "SupervisorLink",
    "SupervisorReport",
    "handler",
]
