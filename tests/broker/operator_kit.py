"""What the tests of the operator's side share: parked messages by the hundred, the journal read, the management API."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import httpx
from pamqp import commands
from yarl import URL

from rabbitdlq import DeadLetter, Topology
from rabbitdlq.broker import Outgoing, PublishLink, original_properties
from rabbitdlq.broker.stream import PublishStream
from rabbitdlq.deaths import Arrival
from rabbitdlq.failure import Failure
from rabbitdlq.journal import JournalEvent, JournalWriter, read_journal
from rabbitdlq.local_broker import BrokerAddress
from rabbitdlq.management import ManagementApi
from rabbitdlq.message import message_of
from rabbitdlq.parking import Parking, new_park_id, park_properties
from rabbitdlq.wire import Properties
from tests.broker.kit import Bench, until

__all__ = [
    "Management",
    "account",
    "events_of",
    "letter_for",
    "letters_left",
    "nack_away",
    "park",
    "policy_known",
    "publish_all",
    "taken",
    "words",
]


def letter_for(
    topology: Topology, body: bytes, properties: Properties, *, queue: str | None = None, repeated: bool = False
) -> Outgoing:
    """What a consumer publishes when a message has used up its attempts.

    It may say that it is another ``queue``'s, or that it is ``repeated``: parked again by the consumer that came after
    a crash.
    """
    arrival = Arrival(2, 2, "shop", "order.created")
    message = replace(message_of(topology, body, properties, arrival, failures=2), queue=queue or topology.name)
    parking = Parking(
        reason="exhausted",
        failure=Failure.of("the warehouse is closed"),
        history=(),
        worker="test",
        parked_at=datetime.now(UTC),
        park_id=new_park_id(message),
        repeated=repeated,
    )
    return Outgoing(topology.dlx, topology.name, body, park_properties(message, parking, 131_072))


async def park(bench: Bench, topology: Topology, *bodies: bytes, first: int = 0, **properties: Any) -> list[str]:
    """Fill the dead-letter queue, in this order, as consumers do; gives the ids, the first is ``m0``."""
    ids = [f"m{number}" for number in range(first, first + len(bodies))]
    letters = [
        letter_for(topology, body, Properties(**{"message_id": id, "delivery_mode": 2, **properties}))
        for id, body in zip(ids, bodies, strict=True)
    ]
    await publish_all(bench.url, letters)
    return ids


async def publish_all(url: str, letters: Sequence[Outgoing]) -> None:
    """Publish them one behind the other: of single publishes later ones pass those that wait for a busy broker."""

    async def each() -> AsyncIterator[Outgoing]:
        for letter in letters:
            yield letter

    link = PublishLink(url, "rabbitdlq tests")
    try:
        stream = PublishStream(link, 1_000, timedelta(seconds=60))
        async with aclosing(stream.run(each(), lambda letter: letter)) as reports:
            assert [report.error async for report in reports] == [None] * len(letters)
    finally:
        await link.close()


async def words(letters: AsyncIterator[DeadLetter]) -> list[str]:
    """The ids of what is shown, in the order in which it is shown."""
    return [letter.id async for letter in letters]


async def taken(bench: Bench, queue: str) -> list[Properties]:
    """Take everything away; gives the properties in the queue's own order."""
    channel = await bench.raw.channel()
    found = []
    while isinstance((got := await channel.basic_get(queue, no_ack=True)).delivery, commands.Basic.GetOk):
        found.append(original_properties(got.header.properties.headers))
    await channel.close()
    return found


async def letters_left(bench: Bench, queue: str) -> list[str | None]:
    """Take everything away; gives the ids in the queue's own order."""
    return [properties.message_id for properties in await taken(bench, queue)]


async def nack_away(bench: Bench, queue: str, *, times: int = 1) -> None:
    """Fail the next message as other people's consumers do, so often: no journal, no parking."""
    for _ in range(times):
        channel = await bench.raw.channel()
        while not isinstance((got := await channel.basic_get(queue)).delivery, commands.Basic.GetOk):
            await asyncio.sleep(0.02)
        assert got.delivery.delivery_tag is not None
        await channel.basic_nack(got.delivery.delivery_tag, requeue=False)
        await channel.close()


async def events_of(bench: Bench, topology: Topology, *kinds: str) -> list[JournalEvent]:
    """The journal's events of these kinds."""
    link = PublishLink(bench.url, "rabbitdlq tests")
    writer = JournalWriter(topology, link)
    try:
        events = [event async for event in read_journal(bench.raw.connection, topology, writer)]
    finally:
        await link.close()
    return [event for event in events if event.event in kinds]


class Management:
    """The broker's HTTP API, with the account of the test's broker and its virtual host."""

    def __init__(self, address: BrokerAddress, client: httpx.AsyncClient) -> None:
        self.address = address
        self._client = client
        self.vhost = quote(URL(address.url).path.removeprefix("/") or "/", safe="")

    @classmethod
    @asynccontextmanager
    async def of(cls, address: BrokerAddress) -> AsyncIterator["Management"]:
        """For the length of a block."""
        url = URL(address.management_url)
        auth = (url.user or "guest", url.password or "guest")
        async with httpx.AsyncClient(base_url=str(url.with_user(None)), auth=auth, timeout=30) as client:
            yield cls(address, client)

    async def get(self, path: str) -> Any:
        """What is there; None where nothing is."""
        answer = await self._client.get(self._path(path))
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        return answer.raise_for_status().json()

    async def put(self, path: str, **body: Any) -> None:
        (await self._client.put(self._path(path), json=body)).raise_for_status()

    async def post(self, path: str, **body: Any) -> Any:
        return (await self._client.post(self._path(path), json=body)).raise_for_status().json()

    async def delete(self, path: str) -> None:
        await self._client.delete(self._path(path))

    def _path(self, path: str) -> str:
        """``{v}`` is the virtual host, as the API wants it."""
        return "/api/" + path.replace("{v}", self.vhost)

    async def look(self, queue: str, count: int) -> list[dict[str, Any]]:
        """What the UI's "Get messages" does unless it is told otherwise: take, show, requeue."""
        shown: list[dict[str, Any]] = await self.post(
            f"queues/{{v}}/{quote(queue, safe='')}/get", count=count, ackmode="ack_requeue_true", encoding="auto"
        )
        return shown

    @asynccontextmanager
    async def policy(self, queue: str, **definition: Any) -> AsyncIterator[None]:
        """A policy on one queue, for the length of a block. ``max_length=1`` is ``max-length``."""
        path = f"policies/{{v}}/{quote(queue, safe='')}"
        keys = {key.replace("_", "-"): value for key, value in definition.items()}
        await self.put(path, pattern=f"^{queue}$", definition=keys, **{"apply-to": "queues"})
        try:
            yield
        finally:
            await self.delete(path)


async def policy_known(address: BrokerAddress, queue: str, key: str) -> None:
    """Return when the queue has it; that may take the broker a moment."""

    async def known() -> bool:
        async with ManagementApi(address.management_url) as api:
            state = await api.queue("/", queue)
        return state is not None and key in (state.policy or {}) and state.messages is not None

    await until(known, f"the policy of {queue}")


@asynccontextmanager
async def account(
    management: Management, name: str, *, configure: str = ".*", write: str = ".*", read: str = ".*"
) -> AsyncIterator[str]:
    """An account of the test's own; gives the broker's URL with it."""
    await management.put(f"users/{name}", password="s3cret", tags="")
    try:
        await management.put(f"permissions/{{v}}/{name}", configure=configure, write=write, read=read)
        yield str(URL(management.address.url).with_user(name).with_password("s3cret"))
    finally:
        await management.delete(f"users/{name}")
