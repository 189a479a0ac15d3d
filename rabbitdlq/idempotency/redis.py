"""Claims in Redis 6 or later: for consumers on many hosts. One script call for each step."""

import re
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.idempotency.address import needs_extra, server_name
from rabbitdlq.idempotency.keys import DEFAULT_KEEP, DEFAULT_NAMESPACE, new_token, span, stored_key
from rabbitdlq.idempotency.memory import utc_now
from rabbitdlq.idempotency.store import Claim, IdempotencyStore

__all__ = ["RedisStore"]

_FORM = "redis://user:password@host:6379/0"
_SCHEMES = ("redis", "rediss")
#: calls at once; more of them wait for a connection
_CONNECTIONS = 8
_SECONDS = 5

#: a key's value is "claim TOKEN" or "done TOKEN", and Redis itself removes it at its end.
#: A client that lost its connection asks again: that it holds the claim already is no news to it.
_CLAIM = """
if redis.call('SET', KEYS[1], 'claim ' .. ARGV[1], 'NX', 'PX', ARGV[2]) then return {'new', 0} end
local value = redis.call('GET', KEYS[1])
if value == 'claim ' .. ARGV[1] then return {'new', 0} end
if string.sub(value, 1, 5) == 'done ' then return {'done', 0} end
return {'busy', redis.call('PTTL', KEYS[1])}
"""
_COMPLETE = """
local value = redis.call('GET', KEYS[1])
if value and value ~= 'claim ' .. ARGV[1] and value ~= 'done ' .. ARGV[1] then return 0 end
redis.call('SET', KEYS[1], 'done ' .. ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == 'claim ' .. ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


class RedisStore(IdempotencyStore):
    """A store in Redis. Leases run by the server's clock.

    It promises what the server promises. A Redis that is killed loses what it had not written to disk, and a replica
    that takes over misses what had not reached it: such keys are new again. ``maxmemory-policy`` must be
    ``noeviction`` or one of ``volatile-*`` with room for all keys, or keys are forgotten early.
    """

    def __init__(self, url: str, *, namespace: str = DEFAULT_NAMESPACE, keep: timedelta | str = DEFAULT_KEEP) -> None:
        """``url``: ``redis://user:password@host:6379/0``, ``rediss://`` for TLS; options of redis-py in its query.

        Raises :class:`ConfigurationError` for a URL that cannot be read, or where redis-py is not installed.
        """
        super().__init__(namespace=namespace, keep=keep)
        self._name = server_name(url, _FORM, _SCHEMES)
        # the client library takes any other path for database 0
        if not re.fullmatch(r"/?|/\d+", urlsplit(url).path):
            raise ConfigurationError(f"idempotency: {self._name}: the path must be the number of a database, like /0")
        try:
            import redis.asyncio  # noqa: F401, PLC0415 - an extra, which who uses another store goes without
        except ImportError as error:
            raise needs_extra("redis") from error
        self._url = url
        self._client: Any = None
        self._scripts: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """What and where it is, for messages to people."""
        return self._name

    async def open(self) -> None:
        """Connect, and see that the server answers."""
        async with self._opening:
            if self._client is not None:
                return
            from redis import asyncio as aioredis  # noqa: PLC0415 - see above
            from redis.asyncio.retry import Retry  # noqa: PLC0415
            from redis.backoff import ExponentialBackoff  # noqa: PLC0415

            try:
                pool = aioredis.BlockingConnectionPool.from_url(
                    self._url,
                    max_connections=_CONNECTIONS,
                    timeout=2 * _SECONDS,
                    socket_timeout=_SECONDS,
                    socket_connect_timeout=_SECONDS,
                    # each step can be said twice, see the scripts; connections that a restart broke are made anew
                    retry=Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
                )
                client = aioredis.Redis.from_pool(pool)
            except ValueError:
                # its text may show the URL, and with it the password
                raise ConfigurationError(f"idempotency: {self._name}: a bad option in the URL's query") from None
            try:
                await self._answer(client.ping)
            except TypeError:
                raise ConfigurationError(f"idempotency: {self._name}: an unknown option in the URL's query") from None
            except BaseException:
                await client.aclose()
                raise
            self._scripts = {text: client.register_script(text) for text in (_CLAIM, _COMPLETE, _RELEASE)}
            self._client = client

    async def close(self) -> None:
        """Let go of connections."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def claim(self, key: str, lease: timedelta) -> Claim:
        """New, done, or busy."""
        token = new_token()
        state, rest_ms = await self._run(_CLAIM, key, token, span("lease", lease))
        match state.decode():
            case "new":
                return Claim("new", token)
            case "done":
                return Claim("done")
        # a key without an end is none of ours, but somebody's
        return Claim("busy", until=utc_now() + timedelta(milliseconds=rest_ms) if rest_ms >= 0 else None)

    async def complete(self, key: str, token: str) -> bool:
        """Write down that the work is done; False where somebody else has got the claim since."""
        return bool(await self._run(_COMPLETE, key, token, self._keep_ms))

    async def release(self, key: str, token: str) -> None:
        """Give the key back; nothing happens where it is done, or is no longer held."""
        await self._run(_RELEASE, key, token)

    async def _run(self, script: str, key: str, *arguments: str | int) -> Any:
        name = f"{self.namespace}:{stored_key(key)}"
        if self._client is None:
            raise self._not_open()
        return await self._answer(lambda: self._scripts[script](keys=[name], args=list(arguments)))

    async def _answer(self, call: Callable[[], Awaitable[Any]]) -> Any:
        from redis.exceptions import RedisError  # noqa: PLC0415 - see above

        try:
            return await call()
        except (RedisError, OSError) as error:
            raise self._error(" ".join(str(error).split()) or type(error).__name__) from error
