"""What was done already: a message that comes twice is worked on once.

A store keeps claims on keys. Take ``SQLiteStore`` where all consumers run on one host, ``RedisStore`` or
``PostgresStore`` for several hosts, ``MemoryStore`` for tests.
"""

from rabbitdlq.idempotency.choice import store_of
from rabbitdlq.idempotency.memory import MemoryStore
from rabbitdlq.idempotency.postgres import PostgresStore
from rabbitdlq.idempotency.record import record
from rabbitdlq.idempotency.redis import RedisStore
from rabbitdlq.idempotency.sqlite import SQLiteStore
from rabbitdlq.idempotency.store import Claim, IdempotencyStore

__all__ = [
    "Claim",
    "IdempotencyStore",
    "MemoryStore",
    "PostgresStore",
    "RedisStore",
    "SQLiteStore",
    "record",
    "store_of",
]
