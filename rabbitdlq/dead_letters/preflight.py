"""What can be known before dead letters are sent back: whether they would arrive, and whether they would stay there.

Nothing is sent and nothing is changed. Over AMQP little can be asked; the management API tells the rest.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from rabbitdlq import names
from rabbitdlq.broker import Channel, Connection, Outgoing, Publisher, close_channel, new_id, queue_counts, translated
from rabbitdlq.broker.connection import CONNECT_TIMEOUT
from rabbitdlq.dead_letters.facts import LetterFacts
from rabbitdlq.dead_letters.plan import ReplayPlan
from rabbitdlq.dead_letters.replay import Target
from rabbitdlq.durations import format_duration
from rabbitdlq.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnavailable,
    ConfigurationError,
    EntityNotFound,
    PublishRefused,
    PublishUnconfirmed,
    RabbitDLQError,
)
from rabbitdlq.limits import MAX_EXCHANGE_BYTES, check_name
from rabbitdlq.management import ManagementApi, QueueState, Routes
from rabbitdlq.topology import Topology, Version
from rabbitdlq.wire import Properties

__all__ = ["Finding", "preflight", "preflight_plan"]

PROBE_TIMEOUT = timedelta(seconds=5)
#: for an answer on a connection that has just published: a blocked one gives none
BLOCKED_SECONDS = 2.0
#: queues that one exchange leads to, of which each is looked at
MOST_QUEUES = 20
_MIB = 1024 * 1024
#: what no setting of a broker allows
_LARGEST_MESSAGE = 512 * _MIB
GIVE_URL = "give --management-url or RABBITDLQ_MANAGEMENT_URL"
#: reasons of letters that fail again as they did before, however often they are sent
_LASTING = (names.UNDECODABLE, names.INVALID, names.PERMANENT)
#: checks that say of one queue that nothing arrives there
_UNREACHABLE = frozenset({"target", "write"})

Level = Literal["ok", "warning", "error", "unknown"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    #: "error": letters would be lost, or none would arrive; "warning": some would stay, or come back
    level: Level
    #: what was looked at, in one word
    check: str
    text: str

    def as_json(self) -> dict[str, str]:
        """As ``--json`` shows it."""
        return {"level": self.level, "check": self.check, "text": self.text}


async def preflight(
    connection: Connection, topology: Topology, target: Target, letters: LetterFacts, management_url: str | None
) -> list[Finding]:
    """Everything that is known of sending these letters there.

    A publish that cannot succeed asks whether the account may write. So give it a connection on which nothing else is
    going on: in a memory or disk alarm the broker blocks it from then on. What is missing, forbidden or not to be known
    is a finding; raises :class:`BrokerError` only where the connection is lost.
    """
    findings = list(_of_letters(connection.version, topology, target, letters))
    try:
        findings += await _over_amqp(connection, target)
    except (BrokerUnavailable, PublishUnconfirmed) as error:
        if not connection.is_open:
            raise
        findings.append(Finding("error", "alarm", f"the broker does not answer, as in an alarm: {error}"))
    return [*findings, *await _by_management(connection.vhost, topology, target, letters, management_url)]


async def preflight_plan(
    connection: Connection, topology: Topology, plan: ReplayPlan, to: Target | None, management_url: str | None
) -> list[Finding]:
    """The same of a plan; without a target of each of the work queues that its letters came from.

    Of several queues one where nothing arrives is a warning: the letters of the others go.
    """
    facts = LetterFacts.of(plan)
    if to is not None:
        return await preflight(connection, topology, to, facts, management_url)
    of_queues: list[list[Finding]] = []
    for origin in sorted(plan.origins, key=plan.origins.__getitem__, reverse=True) or [topology.name]:
        target, some = Target.of_queue(origin), facts.of_origin(origin)
        of_queues.append(await preflight(connection, topology, target, some, management_url))
        if any((finding.level, finding.check) == ("error", "alarm") for finding in of_queues[-1]):
            break  # nothing is answered on this connection any more
    some_arrive = not all(any(map(_is_unreachable, findings)) for findings in of_queues)
    found = [
        replace(finding, level="warning") if some_arrive and _is_unreachable(finding) else finding
        for findings in of_queues
        for finding in findings
    ]
    return list(dict.fromkeys(found))  # of the broker each says the same


def _is_unreachable(finding: Finding) -> bool:
    return finding.level == "error" and finding.check in _UNREACHABLE


# --- the letters themselves


def _of_letters(version: Version, topology: Topology, target: Target, letters: LetterFacts) -> Iterator[Finding]:
    if topology.dlq in (target.queue, None if target.exchange else target.routing_key):
        yield Finding("error", "return", f"{topology.dlq!r} is where the letters are already")
    if target.exchange == topology.dlx:
        yield Finding("error", "return", f"exchange {topology.dlx!r} leads back to where the letters are")
    if letters.held:
        yield Finding(
            "warning", "held", f"{letters.held:,} letters came back too often and are held: they stay where they are"
        )
    lasting = {reason: letters.reasons[reason] for reason in _LASTING if letters.reasons[reason]}
    # another queue has another handler, or none
    if lasting and (target.queue in (None, topology.name) or target.queue in letters.origins):
        told = " and ".join(f"{count:,} as {reason}" for reason, count in lasting.items())
        yield Finding(
            "warning",
            "return",
            f"{told} were parked at the first attempt: unless the handler was changed, they fail again",
        )
    others = {queue: count for queue, count in letters.origins.items() if queue != target.queue}
    if others and target.queue is not None:
        shown = ", ".join(f"{queue!r} ({count:,})" for queue, count in sorted(others.items())[:10])
        yield Finding("warning", "origin", f"letters that failed in other queues would go to {target.queue!r}: {shown}")
    yield _size(version, letters)
    if letters.user_ids:
        yield Finding("ok", "user-id", f"{letters.user_ids:,} letters had a user id: they are sent without it")
    if letters.expirations:
        yield Finding(
            "ok", "expiration", f"{letters.expirations:,} letters had an expiration: they are sent without it"
        )


def _size(version: Version, letters: LetterFacts) -> Finding:
    usual = (16 if version >= (4, 0) else 128) * _MIB
    told = f"the largest letter has {letters.largest_bytes:,} bytes"
    if letters.largest_bytes > _LARGEST_MESSAGE:
        return Finding("error", "size", f"{told}, more than any broker takes ({_LARGEST_MESSAGE:,}): it stays")
    if letters.largest_bytes > usual:
        return Finding(
            "warning",
            "size",
            f"{told}, and unless max_message_size was raised this broker takes no more than {usual:,}: it would stay",
        )
    return Finding("ok", "size", told)


# --- over AMQP


async def _over_amqp(connection: Connection, target: Target) -> list[Finding]:
    try:
        if target.exchange:
            check_name("exchange", target.exchange, MAX_EXCHANGE_BYTES)
        else:
            check_name("queue", target.routing_key)
    except ConfigurationError as error:
        return [Finding("error", "target", f"{target}: no such place can be: {error}")]
    channel = await connection.channel()
    try:
        findings = await (_exchange_there(channel, target) if target.exchange else _queue_there(channel, target))
    except EntityNotFound:
        kind = "exchange" if target.exchange else "queue"
        return [Finding("error", "target", f"{target}: there is no such {kind}")]
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        findings = [Finding("unknown", "target", f"{target}: {error}")]
    finally:
        await close_channel(channel)
    # last of all: in an alarm nothing is answered after it
    return [*findings, *await _may_write(connection, target)]


async def _queue_there(channel: Channel, target: Target) -> list[Finding]:
    waiting, consumers = await queue_counts(channel, target.routing_key)
    return [
        Finding("ok", "target", f"{target} is there, with {waiting:,} messages waiting"),
        Finding("ok", "consumers", f"{target} has {consumers:,} consumer{'' if consumers == 1 else 's'}")
        if consumers
        else Finding("warning", "consumers", f"{target} has no consumer: the letters would wait there"),
    ]


async def _exchange_there(channel: Channel, target: Target) -> list[Finding]:
    with translated(f"looking for {target}"):
        async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
            await channel.exchange_declare(target.exchange, passive=True)
    return [Finding("ok", "target", f"{target}: the exchange is there")]


async def _may_write(connection: Connection, target: Target) -> list[Finding]:
    """Publish what the broker refuses after it has looked at the permissions, and before it looks for a way."""
    channel, publisher = await connection.channel(), Publisher(connection)
    probe = Outgoing(
        target.exchange, target.routing_key, b"", Properties(message_id=new_id(), expiration="not a number")
    )
    try:
        await publisher.publish(probe, timeout=PROBE_TIMEOUT)
    except AccessDenied as error:
        finding = Finding("error", "write", f"this account may not send there: {error}")
    except PublishUnconfirmed:
        if not connection.is_open:
            raise
        return [_BLOCKED]
    except BrokerUnavailable:
        raise
    except BrokerError as error:
        may = isinstance(error, PublishRefused) and "invalid expiration" in str(error)
        finding = (
            Finding("ok", "write", f"user {connection.user!r} may send there")
            if may
            else Finding("unknown", "write", f"{target}: {error}")
        )
    else:
        finding = Finding("unknown", "write", f"{target}: the broker took what it should have refused")
    if await _is_blocked(channel):
        return [finding, _BLOCKED]  # closing the channels would wait for it
    await publisher.close()
    await close_channel(channel)
    return [finding]


async def _is_blocked(channel: Channel) -> bool:
    try:
        async with asyncio.timeout(BLOCKED_SECONDS):
            await channel.basic_qos(prefetch_count=1)
    except TimeoutError:
        return True
    return False


_BLOCKED = Finding(
    "error", "alarm", "the broker takes no messages at the moment: it is short of memory or of room on its disk"
)


# --- by the management API


async def _by_management(
    vhost: str, topology: Topology, target: Target, letters: LetterFacts, url: str | None
) -> list[Finding]:
    if url is None:
        text = f"how much room {target} has, and what other alarms there are, only the management API tells: {GIVE_URL}"
        if target.exchange:
            text = f"whether {target} leads anywhere: every letter is sent mandatory, one without a way stays; {text}"
        return [Finding("unknown", "management", text)]
    findings: list[Finding] = []
    try:
        async with ManagementApi(url) as api:
            alarms = await api.alarms()
            findings.append(
                Finding("error", "alarm", f"no messages are taken while there are alarms: {', '.join(alarms)}")
                if alarms
                else Finding("ok", "alarm", "there are no alarms")
            )
            queues: tuple[str, ...] = (target.routing_key,)
            if target.exchange:
                routes = await api.routes(vhost, target.exchange, target.routing_key)
                findings += _of_route(topology, target, routes)
                queues = routes.queues
            for queue in queues[:MOST_QUEUES]:
                state = await api.queue(vhost, queue)
                if state is not None:
                    findings += _of_queue(topology, queue, state, letters, told=not target.exchange)
    except RabbitDLQError as error:
        findings.append(Finding("unknown", "management", f"what the management API would tell is not known: {error}"))
    return findings


def _of_route(topology: Topology, target: Target, routes: Routes) -> Iterator[Finding]:
    shown = ", ".join(repr(queue) for queue in routes.queues[:10])
    if topology.dlq in routes.queues:
        yield Finding("error", "return", f"{target} leads back to {topology.dlq!r}")
    if routes.unclear:
        yield Finding(
            "unknown",
            "route",
            f"{target}: where {', '.join(routes.unclear)} leads to depends on more than the key; every letter is sent "
            "mandatory, one without a way stays",
        )
    elif not routes.queues:
        yield Finding("error", "route", f"{target} leads to no queue: all letters would stay")
    if len(routes.queues) > 1:
        yield Finding(
            "warning", "route", f"{target} leads to {len(routes.queues)} queues, each gets every letter: {shown}"
        )
    elif routes.queues and not routes.unclear:
        yield Finding("ok", "route", f"{target} leads to queue {shown}")


def _of_queue(
    topology: Topology, queue: str, state: QueueState, letters: LetterFacts, *, told: bool
) -> Iterator[Finding]:
    """``told``: AMQP has told of consumers already, and more freshly."""
    if not told and state.consumers == 0:
        yield Finding("warning", "consumers", f"queue {queue!r} has no consumer: the letters would wait there")
    yield _room(queue, state, letters)
    ttl, dead = state.limit("message-ttl"), state.setting("dead-letter-exchange")
    if ttl is not None:
        way = f"leaves through {dead!r}" if dead else "is lost"
        yield Finding(
            "warning" if dead or state.consumers else "error",
            "return",
            f"in queue {queue!r} what waits for {format_duration(timedelta(milliseconds=ttl))} expires and {way}",
        )
    deliveries = (state.policy or {}).get("delivery-limit")
    if isinstance(deliveries, int) and 0 <= deliveries < topology.crash_limit:
        yield Finding(
            "warning", "return", f"a policy gives what is in queue {queue!r} no more than {deliveries} deliveries"
        )


def _room(queue: str, state: QueueState, letters: LetterFacts) -> Finding:
    if state.policy is None or state.messages is None:
        return Finding(
            "unknown",
            "room",
            f"queue {queue!r}: the management API has no figures of it yet; ask again in some seconds",
        )
    most, most_bytes = state.limit("max-length"), state.limit("max-length-bytes")
    fits = letters.count
    if most is not None:
        fits = min(fits, max(0, most - state.messages))
    if most_bytes is not None and letters.total_bytes:
        free = max(0, most_bytes - (state.message_bytes or 0))
        # of letters of average size; which ones fit is not known before
        fits = min(fits, free * letters.count // letters.total_bytes)
    if most is None and most_bytes is None:
        return Finding("ok", "room", f"queue {queue!r} has no length limit")
    limits = " and ".join(
        f"{limit:,} {what}" for limit, what in ((most, "messages"), (most_bytes, "bytes")) if limit is not None
    )
    told = f"queue {queue!r} takes {limits}, and has room for {fits:,} of these {letters.count:,} letters"
    over = letters.count - fits
    if not over:
        return Finding("ok", "room", told)
    level, what = _overflow(state.setting("overflow"), state.setting("dead-letter-exchange"), f"{over:,}")
    return Finding(level, "room", f"{told}: {what}")


def _overflow(word: str | None, dead: str | None, over: str) -> tuple[Level, str]:
    """What a full queue does, and how bad that is."""
    if word == "reject-publish":
        return "warning", f"{over} would stay, unless consumers make room meanwhile"
    if word == "reject-publish-dlx":
        return "error", f"{over} would stay, with a copy of each sent through {dead!r}"
    if dead is not None:
        return "error", f"it would push {over} of its oldest messages out, through {dead!r}"
    return "error", f"{over} of its oldest messages would be LOST (drop-head)"
