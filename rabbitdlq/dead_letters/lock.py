"""The operator's lock on one dead-letter queue, and who holds it.

The lock is an exclusive queue: the broker refuses it to a second connection and deletes it with its owner's. But of
somebody else's exclusive queue it tells nothing. So the holder's name stands in the arguments of an exchange that is
bound to that queue and deleted with its last binding: it is there for as long as the lock, also when the holder dies.
Declaring it with other arguments is an error whose text shows those it has. None of this publishes anything: during a
memory or disk alarm, when letters are deleted to make room, a connection that publishes would be blocked.
"""

import asyncio
import contextlib
import os
import string
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, unquote

import aiormq.exceptions
import structlog

from rabbitdlq.broker import Channel, Connection, close_channel, translated
from rabbitdlq.broker.connection import CONNECT_TIMEOUT
from rabbitdlq.broker.translate import difference
from rabbitdlq.dead_letter import read_time
from rabbitdlq.definitions import HOLDER_PREFIX
from rabbitdlq.errors import AccessDenied, BrokerError, DeadLettersInUse, EntityNotFound, TopologyMismatch
from rabbitdlq.texts import printable, shorten
from rabbitdlq.topology import Topology

__all__ = ["Holder", "LockState", "lock_state", "release_lock", "take_lock"]

log = structlog.stdlib.get_logger(__name__)

#: for a holder that has the lock and has not told its name yet, or is just giving it up
PATIENCE_SECONDS = 1.0
_AGAIN_SECONDS = 0.05
#: the holder meets others that tidy up after a dead one; twice would be bad luck already
_TRIES = 3
#: characters that stand for themselves: the broker's error shows them between single quotes
_PLAIN = "".join(set(string.printable) - set(string.whitespace) - set("%'")) + " "


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the lock."""

    who: str
    #: in one word, for instance "replaying"
    doing: str
    since: datetime
    process: int

    @classmethod
    def here(cls, who: str, doing: str) -> "Holder":
        """This process, from now on."""
        return cls(who, doing, datetime.now(UTC).replace(microsecond=0), os.getpid())

    def encode(self) -> str:
        """As the broker keeps it. What matters least comes last, because the broker cuts what it answers."""
        since = self.since.strftime("%Y-%m-%dT%H:%M:%SZ")
        who = quote(shorten(printable(self.who), 200), safe=_PLAIN)
        return f"{HOLDER_PREFIX}{since} {quote(self.doing, safe='')} {self.process} {who}"

    @classmethod
    def parse(cls, text: str) -> "Holder | None":
        """The holder, with a name that may be cut; None where too little is left, or it is none."""
        since, doing, process, who = [*text.removeprefix(HOLDER_PREFIX).split(" ", 3), "", "", "", ""][:4]
        moment = read_time(since)
        if not text.startswith(HOLDER_PREFIX) or moment is None or not who or not process.isdecimal():
            return None
        return cls(_shown(who), _shown(doing), moment, int(process))

    def as_json(self) -> dict[str, Any]:
        """As ``dlq summary --json`` shows it."""
        return {
            "who": self.who,
            "doing": self.doing,
            "since": self.since.isoformat(timespec="seconds"),
            "process": self.process,
        }

    def __str__(self) -> str:
        return f"{self.who} is {self.doing} since {self.since.isoformat(timespec='seconds')} (process {self.process})"


@dataclass(frozen=True, slots=True)
class LockState:
    """Whether somebody holds the lock, and who."""

    #: None where this account may not know
    held: bool | None
    #: None where nobody has it, or where it is not to be known who
    holder: Holder | None = None


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() else "?" for each in unquote(text))


async def take_lock(connection: Connection, topology: Topology, who: str, doing: str) -> None:
    """Lock the dead-letter queue for this connection, until :func:`release_lock` or its end.

    Raises :class:`DeadLettersInUse` where another connection has it; it says who, if the holder's account may tell.
    """
    loop, holder = asyncio.get_running_loop(), Holder.here(who, doing)
    # for the management UI
    arguments: dict[str, Any] = {"holder": printable(who), "since": holder.since.isoformat()}
    until = loop.time() + PATIENCE_SECONDS
    while True:
        try:
            await _ask(
                connection,
                f"locking {topology.dlq!r}",
                lambda channel: channel.queue_declare(topology.lock_queue, exclusive=True, arguments=arguments),
            )
            break
        except BrokerError as error:
            if not isinstance(error.__cause__, aiormq.exceptions.ChannelLockedResource):
                raise
            other = await _holder(connection, topology)
            if other is not None or loop.time() >= until:
                raise DeadLettersInUse(_in_use(topology, other)) from error
        await asyncio.sleep(_AGAIN_SECONDS)
    try:
        await _tell(connection, topology, holder)
    except BaseException:
        with contextlib.suppress(BrokerError):
            await _ask(connection, "unlocking", lambda channel: channel.queue_delete(topology.lock_queue))
        raise


async def lock_state(connection: Connection, topology: Topology) -> LockState:
    """Whether the dead-letter queue is locked at this moment, by whichever connection; takes no lock."""
    what = f"looking whether {topology.dlq!r} is locked"
    try:
        await _ask(connection, what, lambda channel: channel.queue_declare(topology.lock_queue, passive=True))
    except EntityNotFound:
        return LockState(held=False)
    except AccessDenied:
        return LockState(held=None)
    except BrokerError as error:
        if not isinstance(error.__cause__, aiormq.exceptions.ChannelLockedResource):
            raise
    for _ in range(_TRIES):  # it may not have told its name yet
        holder = await _holder(connection, topology)
        if holder is not None:
            return LockState(held=True, holder=holder)
        await asyncio.sleep(_AGAIN_SECONDS)
    return LockState(held=True)


async def release_lock(channel: Channel, topology: Topology) -> None:
    """Give up the lock of the channel's connection; where the line is gone, the broker has done so by itself."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
            await channel.queue_delete(topology.lock_queue)


def _in_use(topology: Topology, holder: Holder | None) -> str:
    if holder is not None:
        return (
            f"{topology.dlq!r} is in use: another operator has it: {holder}; its lock is the queue "
            f"{topology.lock_queue!r}; try again later"
        )
    return (
        f"{topology.dlq!r} is in use: another operator is looking at, replaying or dropping its messages (who and "
        f"since when: arguments of queue {topology.lock_queue!r} in the management UI); try again later"
    )


async def _tell(connection: Connection, topology: Topology, holder: Holder) -> None:
    """Write down who holds the lock; an account that may not holds it all the same."""
    exchange, told = topology.lock_exchange, {"alternate-exchange": holder.encode()}

    async def hang_up(channel: Channel) -> None:
        await channel.exchange_declare(
            exchange, exchange_type="fanout", durable=False, auto_delete=True, arguments=told
        )
        await channel.queue_bind(topology.lock_queue, exchange)

    what = f"telling who has locked {topology.dlq!r}"
    for _ in range(_TRIES):
        try:
            return await _ask(connection, what, hang_up)
        except TopologyMismatch:
            # only a holder makes one, and we hold it now: this one's died before it was bound
            with contextlib.suppress(BrokerError):
                await _ask(connection, what, lambda channel: channel.exchange_delete(exchange))
        except EntityNotFound:
            continue  # somebody who was refused took it for one that a dead holder had left
        except BrokerError as error:
            log.debug("lock_holder_untold", queue=topology.dlq, error=str(error))
            return None
    return None


async def _holder(connection: Connection, topology: Topology) -> Holder | None:
    """Who holds the lock at this moment; None where that is not known for certain.

    An exchange without a binding was left by a holder that died before it bound it. So: the same name before and after
    a look at which the exchange was bound. No two holders have the same one.
    """
    name = await _told(connection, topology)
    if name is None or not await _bound(connection, topology) or await _told(connection, topology) != name:
        return None
    return Holder.parse(name)


async def _told(connection: Connection, topology: Topology) -> str | None:
    """What the exchange's argument says. A value of a wrong type is compared with it, and never declares anything."""
    try:
        await _ask(
            connection,
            f"looking who has locked {topology.dlq!r}",
            lambda channel: channel.exchange_declare(
                topology.lock_exchange,
                exchange_type="fanout",
                durable=False,
                auto_delete=True,
                arguments={"alternate-exchange": 1},
            ),
        )
    except TopologyMismatch as error:
        found = difference(error)
        return found[2] if found else None
    except BrokerError:  # there is none, or it is none of our business
        return None
    return None


async def _bound(connection: Connection, topology: Topology) -> bool:
    """Whether the exchange is bound to a lock; one that is not is deleted by this."""
    try:
        await _ask(
            connection,
            f"looking who has locked {topology.dlq!r}",
            lambda channel: channel.exchange_delete(topology.lock_exchange, if_unused=True),
        )
    except BrokerError as error:
        return isinstance(error.__cause__, aiormq.exceptions.ChannelPreconditionFailed)
    return False


async def _ask(connection: Connection, what: str, call: Callable[[Channel], Awaitable[Any]]) -> None:
    """On a channel of its own: the broker closes it on every "no"."""
    channel = await connection.channel()
    try:
        with translated(what):
            async with asyncio.timeout(CONNECT_TIMEOUT.total_seconds()):
                await call(channel)
    finally:
        await close_channel(channel)
