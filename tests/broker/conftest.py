"""Fixtures of the broker tests."""

from collections.abc import AsyncIterator

import pytest

from rabbitdlq import Connection
from rabbitdlq.consumer import draining
from rabbitdlq.local_broker import BrokerAddress
from tests.broker.kit import Bench, Raw


@pytest.fixture(params=["quorum", "classic"])
def queue_type(request: pytest.FixtureRequest) -> str:
    """Both kinds of queue; a test for which one is enough overrides it by its own parametrization."""
    return str(request.param)


@pytest.fixture(autouse=True)
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain with retries out looks on for three seconds instead of ten: no test's ladder is slower than that, and no
    other consumer takes its messages; dozens of tests drain.
    """
    monkeypatch.setattr(draining, "LOOKS_WITH_RETRIES_OUT", 15)


@pytest.fixture
async def bench(broker: BrokerAddress, queue_type: str) -> AsyncIterator[Bench]:
    """A workplace on the broker, cleared away afterwards."""
    async with await Connection.open(broker.url, "rabbitdlq tests") as connection:
        raw = Raw(connection)
        yield Bench(broker.url, raw, queue_type)
        await raw.delete_everything()
