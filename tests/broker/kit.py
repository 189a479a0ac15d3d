"""What the broker tests share: topologies of their own, waits with a deadline, consumers beside the test."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import aiormq.abc
from pamqp import commands

from rabbitdlq import Connection, Consumer, DLQManager, Producer, Topology, apply_topology
from rabbitdlq.broker import Channel, Outgoing, Publisher, original_properties
from rabbitdlq.consumer import Handler
from rabbitdlq.topology import WorkBinding
from rabbitdlq.wire import Properties

DEADLINE = 30.0


async def until(
    condition: Callable[[], Awaitable[Any]] | Callable[[], Any], what: str, deadline: float = DEADLINE
) -> Any:
    """The first truthy value of the condition; fails with ``what`` where there is none before the deadline."""
    end = time.monotonic() + deadline
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {deadline:g} s: {what}")
        await asyncio.sleep(0.02)


@dataclass
class Raw:
    """A plain AMQP client: what other people's programs do, and looks that leave no trace."""

    connection: Connection
    topologies: list[Topology] = field(default_factory=list)
    extra_queues: list[str] = field(default_factory=list)
    extra_exchanges: list[str] = field(default_factory=list)

    async def channel(self, *, confirms: bool = False) -> Channel:
        return await self.connection.channel(confirms=confirms)

    async def publish(
        self, queue: str, body: bytes = b"{}", *, exchange: str = "", mandatory: bool = True, **properties: Any
    ) -> None:
        """Publish as a foreign producer would; give a ``message_id`` or there is none on the wire."""
        channel = await self.channel(confirms=True)
        encoded = Properties(**properties).encode()

        class Bare(commands.Basic.Properties):
            def marshal(self) -> bytes:
                return encoded

        await channel.basic_publish(
            body,
            exchange=exchange,
            routing_key=queue,
            properties=Bare(message_id=uuid.uuid4().hex),
            mandatory=mandatory,
        )
        await channel.close()

    async def republish(self, outgoing: Outgoing) -> None:
        """Publish with our own publisher."""
        publisher = Publisher(self.connection)
        await publisher.publish(outgoing, timeout=timedelta(seconds=10))
        await publisher.close()

    async def count(self, queue: str) -> int:
        """Ready messages."""
        channel = await self.channel()
        declared = await channel.queue_declare(queue, passive=True)
        await channel.close()
        return declared.message_count or 0

    async def take(self, queue: str) -> tuple[bytes, Properties, commands.Basic.GetOk] | None:
        """Take one message away."""
        channel = await self.channel()
        got: aiormq.abc.DeliveredMessage = await channel.basic_get(queue, no_ack=True)
        await channel.close()
        if not isinstance(got.delivery, commands.Basic.GetOk):
            return None
        return got.body, original_properties(got.header.properties.headers), got.delivery

    async def take_all(self, queue: str) -> list[tuple[bytes, Properties, commands.Basic.GetOk]]:
        """Take all messages away."""
        taken = []
        while (message := await self.take(queue)) is not None:
            taken.append(message)
        return taken

    async def queue(self, name: str, **arguments: Any) -> str:
        """Declare a durable queue of the test's own; deleted at its end. ``x_message_ttl=5`` is ``x-message-ttl``."""
        channel = await self.channel()
        await channel.queue_declare(
            name, durable=True, arguments={key.replace("_", "-"): value for key, value in arguments.items()} or None
        )
        await channel.close()
        self.extra_queues.append(name)
        return name

    async def exchange(self, name: str, kind: str = "topic") -> str:
        """Declare a durable exchange of the test's own; deleted at its end."""
        channel = await self.channel()
        await channel.exchange_declare(name, exchange_type=kind, durable=True)
        await channel.close()
        self.extra_exchanges.append(name)
        return name

    async def bind(self, queue: str, exchange: str, key: str) -> None:
        channel = await self.channel()
        await channel.queue_bind(queue, exchange, routing_key=key)
        await channel.close()

    async def delete_everything(self) -> None:
        """Delete what the test declared."""
        channel = await self.channel()
        for topology in self.topologies:
            entities = topology.entities(self.connection.version)
            self.extra_queues += [queue.name for queue in entities.queues]
            self.extra_exchanges += [exchange.name for exchange in entities.exchanges]
        for queue in dict.fromkeys(self.extra_queues):
            await channel.queue_delete(queue)
        for exchange in dict.fromkeys(self.extra_exchanges):
            await channel.exchange_delete(exchange)
        await channel.close()


class Bench:
    """One test's workplace on the broker: fresh names, and the tools bound to them."""

    def __init__(self, url: str, raw: Raw, queue_type: Any) -> None:
        self.url = url
        self.raw = raw
        self.queue_type = queue_type

    def topology(
        self,
        delays: Iterable[str] = ("100ms", "150ms"),
        *,
        bindings: Iterable[WorkBinding] = (),
        name: str | None = None,
        **options: Any,
    ) -> Topology:
        """A topology with a name of its own; its entities are deleted at the test's end, if they were declared."""
        options.setdefault("queue_type", self.queue_type)
        topology = Topology(name or f"t-{uuid.uuid4().hex[:10]}", list(delays), bindings=bindings, **options)
        self.raw.topologies.append(topology)
        return topology

    async def declared(self, *args: Any, **options: Any) -> Topology:
        """The same, declared."""
        topology = self.topology(*args, **options)
        await apply_topology(self.raw.connection, topology)
        return topology

    async def send(self, topology: Topology, *payloads: Any, **options: Any) -> list[str]:
        """Publish with our producer; gives the ids."""
        async with Producer(self.url) as producer:
            return [await producer.send(topology.name, payload, **options) for payload in payloads]

    def dlq(self, topology: Topology) -> DLQManager:
        return DLQManager(topology, url=self.url)

    def consumer(self, topology: Topology, handler: Handler, **options: Any) -> Consumer:
        return Consumer(topology, handler, url=options.pop("url", self.url), **options)

    async def drain(self, topology: Topology, handler: Handler, **options: Any) -> Consumer:
        """Run a consumer until the queue and the ladder are empty."""
        consumer = self.consumer(topology, handler, drain=True, **options)
        await asyncio.wait_for(consumer.run(), 120)
        return consumer

    @asynccontextmanager
    async def running(self, topology: Topology, handler: Handler, **options: Any) -> AsyncIterator[Consumer]:
        """A consumer that runs beside the test and is stopped at the end of the block."""
        consumer = self.consumer(topology, handler, **options)
        task = asyncio.create_task(consumer.run())
        try:
            yield consumer
        finally:
            consumer.stop()
            await asyncio.wait_for(task, 60)
