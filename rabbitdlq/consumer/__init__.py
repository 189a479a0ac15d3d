"""Running handlers: delivery → attempt → outcome → settle."""

from rabbitdlq.consumer.attempt import Handler
from rabbitdlq.consumer.consumer import Consumer, ConsumerSummary

__all__ = ["Consumer", "ConsumerSummary", "Handler"]
