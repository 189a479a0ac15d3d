"""Everything that talks AMQP: connections, confirmed publishes, declarations; the only place that knows aio-pika."""

from rabbitdlq.broker.connection import DEFAULT_URL, Channel, Connection, close_channel, heartbeat_of, parse_version
from rabbitdlq.broker.declare import (
    Finding,
    Report,
    apply_topology,
    check_topology,
    count_messages,
    delete_topology,
    ensure_topology,
    queue_counts,
)
from rabbitdlq.broker.hot_path import ConsumingChannel, Delivery
from rabbitdlq.broker.link import Blocked, PublishLink
from rabbitdlq.broker.publisher import Outgoing, Publisher, new_id
from rabbitdlq.broker.reader import original_properties
from rabbitdlq.broker.stream import PublishReport, PublishStream
from rabbitdlq.broker.translate import cancelled_by_us, shown_url, translate, translated

__all__ = [
    "DEFAULT_URL",
    "Blocked",
    "Channel",
    "Connection",
    "ConsumingChannel",
    "Delivery",
    "Finding",
    "Outgoing",
    "PublishLink",
    "PublishReport",
    "PublishStream",
    "Publisher",
    "Report",
    "apply_topology",
    "cancelled_by_us",
    "check_topology",
    "close_channel",
    "count_messages",
    "delete_topology",
    "ensure_topology",
    "heartbeat_of",
    "new_id",
    "original_properties",
    "parse_version",
    "queue_counts",
    "shown_url",
    "translate",
    "translated",
]
