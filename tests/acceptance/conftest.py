"""Fixtures of the acceptance tests."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rabbitdlq.local_broker import BrokerAddress
from tests.acceptance.cli import Shell, open_shell


@pytest.fixture
async def shell(broker: BrokerAddress, tmp_path: Path) -> AsyncIterator[Shell]:
    """A directory to run ``rabbitdlq`` in, with a topology file of one fresh queue."""
    async with open_shell(broker, tmp_path) as opened:
        yield opened
