"""A RabbitMQ broker for the demo, the tests and trying things out, whatever the machine has to offer.

`LocalBroker` is a private node of ours from the machine's ``rabbitmq-server``; `obtain_broker` takes the first broker
that can be had, and leaves nothing running that it started.
"""

from rabbitdlq.local_broker.climb import broker_from_environment, ensure_server, obtain_broker, private_broker
from rabbitdlq.local_broker.compose import docker_answers
from rabbitdlq.local_broker.node import BrokerAddress, BrokerStatus, LocalBroker, say_on_stderr
from rabbitdlq.local_broker.setup import PLUGINS

__all__ = [
    "PLUGINS",
    "BrokerAddress",
    "BrokerStatus",
    "LocalBroker",
    "broker_from_environment",
    "docker_answers",
    "ensure_server",
    "obtain_broker",
    "private_broker",
    "say_on_stderr",
]
