"""A RabbitMQ broker for the demo, the tests and trying things out, whatever the machine has to offer.

`LocalBroker` is a private node of ours from the machine's ``rabbitmq-server``; `obtain_broker` takes the first broker
that can be had, and leaves nothing running that it started.
"""

from rabbitdlq.local_broker.node import BrokerAddress, BrokerStatus, LocalBroker
from rabbitdlq.local_broker.setup import PLUGINS

__all__ = ["PLUGINS", "BrokerAddress", "BrokerStatus", "LocalBroker"]
