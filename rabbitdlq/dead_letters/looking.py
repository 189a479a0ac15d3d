"""Looking at dead letters: the bodies of what :class:`DLQManager` reads, and the shapes it gives."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from rabbitdlq.broker import Connection, close_channel, queue_counts
from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters.browse import Browser, Held
from rabbitdlq.dead_letters.lock import Holder, lock_state
from rabbitdlq.dead_letters.selection import Selection
from rabbitdlq.errors import AmbiguousDeadLetter, DeadLetterNotFound, EntityNotFound
from rabbitdlq.topology import Topology

__all__ = ["QueueSummary", "ambiguous", "find", "not_found", "read_letters", "summarize"]


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """How one work queue stands. Counts are of messages ready for delivery; None where the queue does not exist."""

    queue: str
    #: waiting for a consumer
    waiting: int | None
    #: waiting on the ladder, by rung
    on_ladder: Mapping[str, int | None]
    #: without those that somebody who looks or replays holds in his hands: fewer than there are while it is in use
    dead: int | None
    consumers: int | None
    #: whether somebody looks at the dead letters or does something with them; None where this account may not know
    in_use: bool | None = False
    #: who that is; None also where it is in use and not to be known by whom
    held_by: Holder | None = None

    def as_json(self) -> dict[str, Any]:
        """As ``rabbitdlq dlq summary --json`` shows it."""
        return {
            "queue": self.queue,
            "waiting": self.waiting,
            "on_ladder": dict(self.on_ladder),
            "dead": self.dead,
            "consumers": self.consumers,
            "in_use": self.in_use,
            "held_by": None if self.held_by is None else self.held_by.as_json(),
        }


async def summarize(connection: Connection, topology: Topology) -> QueueSummary:
    """How the work queue, its ladder and its dead-letter queue stand; needs no lock."""

    async def counts(queue: str) -> tuple[int | None, int | None]:
        channel = await connection.channel()  # a missing queue closes it
        try:
            return await queue_counts(channel, queue)
        except EntityNotFound:
            return None, None
        finally:
            await close_channel(channel)

    waiting, consumers = await counts(topology.name)
    state = await lock_state(connection, topology)
    dead, _ = await counts(topology.dlq)
    if state.held is False:  # somebody may have taken letters between the two
        state = await lock_state(connection, topology)
    return QueueSummary(
        queue=topology.name,
        waiting=waiting,
        on_ladder={rung.queue: (await counts(rung.queue))[0] for rung in topology.rungs},
        dead=dead,
        consumers=consumers,
        in_use=state.held,
        held_by=state.holder,
    )


async def read_letters(
    browser: Browser, limit: int | None = None, selection: Selection | None = None
) -> AsyncGenerator[DeadLetter, None]:
    """The letters that belong to the selection, oldest first, at most ``limit``; copies of one are shown once.

    Memory grows by some 70 bytes a letter: copies are known by a hash of what they have in common.
    """
    everything = selection is None or selection.everything
    if selection is not None and selection.limit is not None:
        limit = selection.limit if limit is None else min(limit, selection.limit)
    left = limit
    if left is not None and left <= 0:
        return
    seen: set[int] = set()
    async with aclosing(browser.read(limit if everything else None)) as held_letters:
        async for held in held_letters:
            letter = held.letter
            if (key := letter.copy_key) is not None:
                known = len(seen)
                seen.add(hash(key))
                if letter.repeated and len(seen) == known:
                    continue
            if not (everything or selection is None or selection.matches(letter)):
                continue
            yield letter
            if left is not None:
                left -= 1
                if left == 0:
                    return


def not_found(topology: Topology, wanted: str, narrowed: str = "") -> DeadLetterNotFound:
    """No letter has that id; ``narrowed`` says among which."""
    return DeadLetterNotFound(
        f"no dead letter {wanted!r} in {topology.dlq!r}{narrowed}; 'rabbitdlq dlq list {topology.name}' shows those "
        "there are"
    )


def ambiguous(topology: Topology, wanted: str, count: int, park_ids: Sequence[str]) -> AmbiguousDeadLetter:
    """Several letters have that id; a park id is empty where the broker parked one."""
    named = ", ".join(park_id or "(parked bare, no park id)" for park_id in park_ids[:20])
    return AmbiguousDeadLetter(
        f"{count} dead letters in {topology.dlq!r} have the id {wanted!r}; name one by its park id: {named}"
    )


async def find(browser: Browser, topology: Topology, wanted: str) -> list[Held]:
    """The one letter with that message id or park id, the oldest of several that are equal in all, then its copies.

    Raises :class:`DeadLetterNotFound`, or :class:`AmbiguousDeadLetter` where several have the id.
    """
    found: list[Held] = []
    async with aclosing(browser.read()) as held_letters:
        async for held in held_letters:
            if wanted in (held.letter.id, held.letter.park_id):
                found.append(held)
    if not found:
        raise not_found(topology, wanted)
    letters = [held.letter for held in found]
    distinct = {letter.copy_key or index for index, letter in enumerate(letters)}
    if len(distinct) > 1:
        raise ambiguous(topology, wanted, len(distinct), [letter.park_id for letter in letters])
    return [found[0], *(held for held in found[1:] if held.letter.repeated)]
