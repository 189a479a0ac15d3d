"""Fixtures of the stores' tests."""

import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rabbitdlq.idempotency import IdempotencyStore
from tests.stores.kit import Clock, Place
from tests.stores.servers import MissingServer, Server, postgres, redis_server


@pytest.fixture(scope="session")
def redis() -> Iterator[Server]:
    """A Redis for all tests; skips where there is no redis-server."""
    try:
        with redis_server() as server:
            yield server
    except MissingServer as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def postgresql() -> Iterator[Server]:
    """A PostgreSQL for all tests; skips where there is none."""
    try:
        with postgres() as server:
            yield server
    except MissingServer as error:
        pytest.skip(str(error))


def place_of(kind: str, request: pytest.FixtureRequest, directory: Path) -> Place:
    """Where stores of that kind keep their claims; a server is started only if it is needed."""
    namespace = f"test-{secrets.token_hex(6)}"
    match kind:
        case "memory":
            return Place("memory:", namespace)
        case "sqlite":
            return Place(f"sqlite:{directory / 'claims.db'}", namespace)
    server: Server = request.getfixturevalue(kind)
    return Place(server.url, namespace)


@pytest.fixture(params=["memory", "sqlite", "redis", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of store; those without a server have a clock that is put forward by hand."""
    found = place_of(request.param, request, tmp_path)
    if request.param in {"memory", "sqlite"}:
        found.clock = Clock()
    return found


@pytest.fixture(params=["sqlite", "redis", "postgresql"])
def shared_place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of store that several processes can share, by the machine's clock."""
    return place_of(request.param, request, tmp_path)


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Each kind of store that is in a user's database, by the machine's clock."""
    return place_of(request.param, request, tmp_path)


@pytest.fixture
async def store(place: Place) -> AsyncIterator[IdempotencyStore]:
    """A store of each kind, open."""
    async with place.opened() as opened:
        yield opened
