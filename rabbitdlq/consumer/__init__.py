"""Running handlers: delivery → attempt → outcome → settle; in this process, or in several."""

from rabbitdlq.consumer.attempt import Handler
from rabbitdlq.consumer.classify import Rule
from rabbitdlq.consumer.consumer import Consumer
from rabbitdlq.consumer.handling import handler
from rabbitdlq.consumer.processor import ConsumerSummary
from rabbitdlq.consumer.supervised import SupervisorLink
from rabbitdlq.consumer.supervisor import Supervisor, SupervisorReport

__all__ = [
    "Consumer",
    "ConsumerSummary",
    "Handler",
    "Rule",
    "Supervisor",
    "SupervisorLink",
    "SupervisorReport",
    "handler",
]
