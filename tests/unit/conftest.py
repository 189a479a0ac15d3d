"""What unit tests share: a broker in memory."""

import pytest

from tests.unit.fake_broker import FakeBroker


@pytest.fixture
async def broker(monkeypatch: pytest.MonkeyPatch) -> FakeBroker:
    """What the next connection leads to."""
    broker = FakeBroker()
    broker.stand_in(monkeypatch)
    return broker
