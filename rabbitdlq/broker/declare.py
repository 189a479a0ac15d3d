"""Declaring and checking a topology: all of it or nothing, and nothing is ever deleted."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from rabbitdlq.broker.connection import CONNECT_TIMEOUT, Channel, Connection, close_channel
from rabbitdlq.broker.translate import Difference, difference, translated
from rabbitdlq.durations import MAX_RUNGS
from rabbitdlq.entities import BindingEntity, Entities, ExchangeEntity, QueueEntity
from rabbitdlq.errors import AccessDenied, ConfigurationError, EntityNotFound, TopologyMismatch
from rabbitdlq.topology import Topology

__all__ = [
    "Finding",
    "Report",
    "apply_topology",
    "check_topology",
    "count_messages",
    "delete_topology",
    "ensure_topology",
    "queue_counts",
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One entity that is not as the topology wants it."""

    kind: Literal["queue", "exchange"]
    name: str
    problem: Literal["missing", "differs"]
    #: for "differs": which argument, what the topology wants, what there is
    argument: str = ""
    wanted: str = ""
    found: str = ""

    def __str__(self) -> str:
        if self.problem == "missing":
            return f"{self.kind} {self.name!r} is missing"
        return f"{self.kind} {self.name!r}: {self.argument} should be {self.wanted!r} but is {self.found!r}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a check found. ``arguments_compared`` is False where the account may only look whether things exist."""

    topology: Topology
    findings: tuple[Finding, ...]
    arguments_compared: bool = True
    #: entities that exist, by kind and name
    present: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    #: entities of which this account learns nothing: from RabbitMQ 4.3 on it sees only what it has a right on
    hidden: frozenset[tuple[str, str]] = field(default_factory=frozenset)

    @property
    def differing(self) -> tuple[Finding, ...]:
        """What exists otherwise."""
        return tuple(finding for finding in self.findings if finding.problem == "differs")

    @property
    def missing(self) -> tuple[Finding, ...]:
        """What does not exist."""
        return tuple(finding for finding in self.findings if finding.problem == "missing")


async def check_topology(connection: Connection, topology: Topology) -> Report:
    """Compare what exists with what the topology wants, changing nothing.

    A declaration of something that exists is the broker's own comparison of arguments; it needs the configure
    permission. Without it only existence is checked. Bindings cannot be seen over AMQP.
    """
    entities = topology.entities(connection.version)
    probe = _Probe(connection)
    findings: list[Finding] = []
    present: set[tuple[str, str]] = set()
    hidden: set[tuple[str, str]] = set()
    compared = True
    try:
        wanted: list[ExchangeEntity | QueueEntity] = [*entities.exchanges, *entities.queues]
        for entity in wanted:
            kind = _kind(entity)
            try:
                there = await probe.exists(entity)
            except AccessDenied:
                compared = False
                hidden.add((kind, entity.name))
                continue
            if not there:
                findings.append(Finding(kind, entity.name, "missing"))
                continue
            present.add((kind, entity.name))
            try:
                differs = await probe.compare(entity)
            except AccessDenied:
                compared = False
                continue
            if differs:
                findings.append(Finding(kind, entity.name, "differs", *differs))
    finally:
        await probe.close()
    return Report(topology, tuple(findings), compared, frozenset(present), frozenset(hidden))


async def apply_topology(connection: Connection, topology: Topology, *, migrate: bool = False) -> Report:
    """Declare what is missing; idempotent. Gives the report of the check that came first.

    Raises :class:`TopologyMismatch`, with nothing changed, where an entity exists with other arguments, and
    :class:`AccessDenied` where the account may not declare. ``migrate`` lets a changed ladder replace the old one:
    see :func:`_migrate`.
    """
    report = await check_topology(connection, topology)
    differing = report.differing
    changed_ladder = [finding for finding in differing if finding.name == topology.ladder_exchange]
    if migrate:
        differing = tuple(finding for finding in differing if finding not in changed_ladder)
    if differing:
        raise TopologyMismatch(_mismatch(topology, differing))
    entities = topology.entities(connection.version)
    channel = await connection.channel()
    try:
        with translated(f"declaring the topology of {topology.name!r}"):
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds() * 6):
                if changed_ladder:
                    await _migrate(channel, topology, changed_ladder[0].found)
                await _declare_missing(channel, entities, report)
                for binding in topology.outdated_bindings(connection.version):
                    await channel.exchange_unbind(
                        destination=binding.destination, source=binding.source, arguments=dict(binding.arguments)
                    )
    finally:
        await close_channel(channel)
    return report


async def ensure_topology(connection: Connection, topology: Topology) -> Report:
    """Declare the topology, or where the account may not, make sure that all of it that it can see exists.

    Raises :class:`TopologyMismatch`, or :class:`EntityNotFound` naming what is missing and cannot be declared.
    """
    try:
        return await apply_topology(connection, topology)
    except AccessDenied as denied:
        report = await check_topology(connection, topology)
        # without the journal histories are incomplete; without the rest messages are lost
        needed = [finding for finding in report.missing if finding.name != topology.journal_queue]
        if needed:
            names = ", ".join(f"{finding.kind} {finding.name!r}" for finding in needed)
            raise EntityNotFound(
                f"{names}: missing, and this account may not declare ({denied}); run 'rabbitdlq topology apply' with "
                "an account that has the configure permission, or load the definitions"
            ) from denied
        if report.differing:
            raise TopologyMismatch(_mismatch(topology, report.differing)) from denied
        return report


async def delete_topology(connection: Connection, topology: Topology) -> None:
    """Delete the queues and exchanges of a topology with everything in them; those of the application stay."""
    entities = topology.entities(connection.version)
    channel = await connection.channel()
    try:
        with translated(f"deleting the topology of {topology.name!r}"):
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds() * 6):
                for queue in entities.queues:
                    await channel.queue_delete(queue.name)
                for exchange in entities.exchanges:
                    if not exchange.theirs:
                        await channel.exchange_delete(exchange.name)
    finally:
        await close_channel(channel)


async def count_messages(channel: Channel, queue: str) -> int:
    """Messages of a queue that are ready for delivery, as :func:`queue_counts` gives them."""
    return (await queue_counts(channel, queue))[0]


async def queue_counts(channel: Channel, queue: str) -> tuple[int, int]:
    """Messages ready for delivery, and consumers; needs a permission on the queue from RabbitMQ 4.3 on, whichever.

    Raises :class:`EntityNotFound`, :class:`AccessDenied`.
    """
    with translated(f"counting the messages of queue {queue!r}"):
        async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
            declared = await channel.queue_declare(queue=queue, passive=True)
    return declared.message_count or 0, declared.consumer_count or 0


class _Probe:
    """Asks about one entity after the other; the broker closes the channel on every "no"."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._channel: Channel | None = None

    async def _ask(self, call: Callable[[Channel], Awaitable[object]], what: str) -> None:
        if self._channel is None or self._channel.is_closed:
            self._channel = await self._connection.channel()
        with translated(what):
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                await call(self._channel)

    async def exists(self, entity: ExchangeEntity | QueueEntity) -> bool:
        """Whether something of that kind and name is there."""
        try:
            await self._ask(lambda channel: _declare(channel, entity, passive=True), f"looking for {_label(entity)}")
        except EntityNotFound:
            return False
        return True

    async def compare(self, entity: ExchangeEntity | QueueEntity) -> Difference | None:
        """What differs, of an entity that exists. An exchange of the application is taken as it is."""
        if isinstance(entity, ExchangeEntity) and entity.theirs:
            return None
        try:
            await self._ask(lambda channel: _declare(channel, entity), f"comparing {_label(entity)}")
        except TopologyMismatch as error:
            found = difference(error)
            if found is None:
                raise
            return found
        return None

    async def close(self) -> None:
        if self._channel is not None:
            await close_channel(self._channel)


def _kind(entity: ExchangeEntity | QueueEntity) -> Literal["queue", "exchange"]:
    return "queue" if isinstance(entity, QueueEntity) else "exchange"


def _label(entity: ExchangeEntity | QueueEntity) -> str:
    return f"{_kind(entity)} {entity.name!r}"


async def _declare(channel: Channel, entity: ExchangeEntity | QueueEntity, *, passive: bool = False) -> None:
    arguments = dict(entity.arguments) or None
    if isinstance(entity, QueueEntity):
        await channel.queue_declare(entity.name, durable=True, passive=passive, arguments=arguments)
    else:
        await channel.exchange_declare(
            entity.name, exchange_type=entity.type, durable=True, passive=passive, arguments=arguments
        )


async def _bind(channel: Channel, binding: BindingEntity) -> None:
    arguments = dict(binding.arguments) or None
    if binding.destination_type == "queue":
        await channel.queue_bind(
            binding.destination, binding.source, routing_key=binding.routing_key, arguments=arguments
        )
    else:
        await channel.exchange_bind(
            destination=binding.destination,
            source=binding.source,
            routing_key=binding.routing_key,
            arguments=arguments,
        )


async def _declare_missing(channel: Channel, entities: Entities, report: Report) -> None:
    """Exchanges, queues but the work queue, bindings but the work queue's, then the work queue with its own.

    In this order no message can come before the place is there that takes it when it fails.
    """
    work = report.topology.name
    ours = [exchange for exchange in entities.exchanges if not exchange.theirs]
    theirs = [exchange for exchange in entities.exchanges if exchange.theirs]
    steps: list[ExchangeEntity | QueueEntity | BindingEntity] = [
        *ours,
        *(queue for queue in entities.queues if queue.name != work),
        *(binding for binding in entities.bindings if binding.destination != work),
        *(queue for queue in entities.queues if queue.name == work),
        *theirs,
        *(binding for binding in entities.bindings if binding.destination == work),
    ]
    for step in steps:
        if isinstance(step, BindingEntity):
            await _bind(channel, step)
        elif (_kind(step), step.name) not in report.present:
            await _declare(channel, step)


async def _migrate(channel: Channel, topology: Topology, old_mark: str) -> None:
    """Take the old ladder's bindings away so that the new one can be hung up; its queues drain by themselves.

    Between the two steps a failed message finds its key unbound and waits in the first rung: a longer way, no loss.
    With both ladders bound at once it would wait in two rungs and come back twice.
    """
    try:
        old = Topology(topology.name, old_mark.split("."), queue_type=topology.queue_type)
    except ConfigurationError as error:
        raise TopologyMismatch(
            f"topology of {topology.name!r}: the ladder that is there is too long for the broker's answer to tell it, "
            f"so it cannot be replaced; nothing was changed. Let its rungs run empty, unbind and delete them, delete "
            f"the exchange {topology.ladder_exchange!r}, and apply again"
        ) from error
    new = {(rung.queue, rung.number) for rung in topology.rungs}
    for below, rung in zip(old.rungs, old.rungs[1:], strict=False):
        if (rung.queue, rung.number) not in new:
            await channel.queue_unbind(rung.queue, topology.retry_exchange, routing_key=below.key)
    if (old.rungs[0].queue, 1) not in new:
        await channel.queue_unbind(old.rungs[0].queue, topology.first_exchange)
    for number in range(1, MAX_RUNGS + 1):
        if number != len(topology.rungs):
            await channel.exchange_unbind(
                destination=topology.dlx, source=topology.retry_exchange, routing_key=f"{topology.name}.retry.{number}"
            )
    # the mark carries no message: taking it away and setting it anew loses nothing
    await channel.exchange_delete(topology.ladder_exchange)
    await channel.exchange_declare(
        topology.ladder_exchange,
        exchange_type="fanout",
        durable=True,
        arguments={"alternate-exchange": topology.ladder_mark},
    )


def _mismatch(topology: Topology, findings: tuple[Finding, ...]) -> str:
    lines = [f"topology of {topology.name!r}: what exists differs; nothing was changed"]
    for finding in findings:
        if finding.name == topology.ladder_exchange and finding.argument == "alternate-exchange":
            lines.append(
                f"  delays: the ladder there is {finding.found.replace('.', ', ')}, the one asked for "
                f"{finding.wanted.replace('.', ', ')}; stop the consumers and run 'rabbitdlq topology apply "
                f"{topology.name} --migrate': it unhooks the old rungs, which drain by themselves"
            )
        elif finding.argument == "x-delivery-limit" and finding.found.isdigit():
            keep = int(finding.found) - len(topology.rungs)
            lines.append(f"  {finding}; crash_limit = {keep} keeps the queue as it is")
        else:
            lines.append(f"  {finding}")
    if any(finding.name != topology.ladder_exchange for finding in findings):
        # a queue that is not ours has no setting that makes it so
        foreign = any(finding.argument.startswith("x-dead-letter") for finding in findings)
        settable = "" if foreign else "set the topology to what is there, or "
        lines.append(
            f"  arguments of a queue cannot be changed: {settable}drain the queue (stop its "
            "publishers, let consumers or a shovel empty it), delete it and run 'rabbitdlq topology apply' again"
        )
    return "\n".join(lines)
