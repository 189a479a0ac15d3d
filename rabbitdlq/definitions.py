"""Topologies as the broker's definitions.json: for ``load_definitions``, ``rabbitmqctl import_definitions``, HTTP API.

See https://www.rabbitmq.com/docs/definitions. Arguments depend on the broker's version, so a file is written for one.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rabbitdlq.broker import parse_version
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.topology import Topology, Version

__all__ = ["HOLDER_PREFIX", "Account", "accounts", "definitions", "definitions_version"]

OLDEST: Version = (3, 10)
NOTHING = "^$"
#: how the name of the lock's holder begins. It stands where an alternate exchange's would, so operators need the right
#: to write to that; there is no such exchange
HOLDER_PREFIX = "dlq-lock "


def definitions_version(text: str) -> Version:
    """The version that ``--broker`` names: ``4.x`` and ``3.x`` mean the oldest of the line that is supported.

    >>> definitions_version("4.x"), definitions_version("3.13")
    ((4, 0), (3, 13))

    Raises :class:`ConfigurationError` for what is no version, or one before 3.10.
    """
    version: Version = {"3.x": OLDEST, "4.x": (4, 0)}.get(text, parse_version(text))
    if len(version) < 2:
        raise ConfigurationError(f"--broker: {text!r} is no version; write 4.x, 3.x or one like 3.13")
    if version < OLDEST:
        raise ConfigurationError(f"--broker: {text} is older than 3.10, the oldest version that is supported")
    return version


@dataclass(frozen=True, slots=True)
class Account:
    """A user of the broker with the permissions of one role, as regular expressions of names."""

    role: str
    name: str
    configure: str
    write: str
    read: str
    tags: tuple[str, ...] = ()


def accounts(topologies: Iterable[Topology]) -> tuple[Account, ...]:
    """The least each role needs for these topologies: a producer, a consumer and an operator.

    All three work with entities that exist already: none of them may declare the topology.
    """
    producer_write, consumer_write, consumer_read = {"amq.default"}, set[str](), set[str]()
    operator_configure, operator_write, operator_read = set[str](), {"amq.default"}, set[str]()
    private: list[str] = []
    for topology in topologies:
        producer_write |= {binding.exchange for binding in topology.bindings}
        consumer_write |= {topology.dlx, topology.journal_exchange, topology.retry_exchange}
        consumer_read |= {topology.name, topology.journal_queue}
        operator_configure |= {topology.lock_queue, topology.lock_exchange}
        operator_write |= {topology.dlx, topology.journal_exchange, topology.lock_queue}
        operator_read |= {topology.dlq, topology.journal_queue, topology.lock_exchange}
        # from 4.3 on a queue is counted by those only who have a right on it; of all rights this one allows least
        rungs = {rung.queue for rung in topology.rungs}
        consumer_write |= rungs
        operator_write |= rungs | {topology.name}
        if topology.journal == "live":
            # each reader of a live journal declares, binds and reads a queue that the broker names
            private = [r"amq\.gen-.*"]
    return (
        Account("producer", "rabbitdlq-producer", NOTHING, _names(producer_write), NOTHING),
        Account(
            "consumer",
            "rabbitdlq-consumer",
            _names((), private),
            _names(consumer_write, private),
            _names(consumer_read, private),
        ),
        Account(
            "operator",
            "rabbitdlq-operator",
            _names(operator_configure, private),
            _names(operator_write, [*private, f"{HOLDER_PREFIX}.*"]),
            _names(operator_read, private),
            ("management",),
        ),
    )


def _names(names: Iterable[str], patterns: Iterable[str] = ()) -> str:
    alternatives = [*sorted(re.escape(name).replace(r"\-", "-") for name in names), *patterns]
    return f"^({'|'.join(alternatives)})$" if alternatives else NOTHING


def definitions(
    topologies: Iterable[Topology],
    version: Version,
    *,
    vhost: str = "/",
    passwords: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The definitions for a broker of this version; with ``passwords`` by role also an account for each role.

    Raises :class:`ConfigurationError` where a role has no password.
    """
    topologies = list(topologies)
    result: dict[str, Any] = {"vhosts": [{"name": vhost}]}
    if passwords is not None:
        roles = accounts(topologies)
        result["users"] = [_user(account, passwords) for account in roles]
        result["permissions"] = [
            {
                "user": account.name,
                "vhost": vhost,
                "configure": account.configure,
                "write": account.write,
                "read": account.read,
            }
            for account in roles
        ]
    result |= {"exchanges": [], "queues": [], "bindings": []}
    for topology in topologies:
        entities = topology.entities(version)
        result["exchanges"] += [
            {
                "name": exchange.name,
                "vhost": vhost,
                "type": exchange.type,
                "durable": True,
                "auto_delete": False,
                "internal": False,
                "arguments": dict(exchange.arguments),
            }
            for exchange in entities.exchanges
            if not exchange.name.startswith("amq.")
        ]
        result["queues"] += [
            {
                "name": queue.name,
                "vhost": vhost,
                "durable": True,
                "auto_delete": False,
                "arguments": dict(queue.arguments),
            }
            for queue in entities.queues
        ]
        result["bindings"] += [
            {
                "source": binding.source,
                "vhost": vhost,
                "destination": binding.destination,
                "destination_type": binding.destination_type,
                "routing_key": binding.routing_key,
                "arguments": dict(binding.arguments),
            }
            for binding in entities.bindings
        ]
    result["exchanges"] = list({exchange["name"]: exchange for exchange in result["exchanges"]}.values())
    return result


def _user(account: Account, passwords: Mapping[str, str]) -> dict[str, Any]:
    password = passwords.get(account.role)
    if not password:
        raise ConfigurationError(f"account {account.name!r}: no password for it")
    return {
        "name": account.name,
        "password_hash": password_hash(account.name, password),
        "hashing_algorithm": "rabbit_password_hashing_sha256",
        "tags": list(account.tags),
        "limits": {},
    }


def password_hash(name: str, password: str) -> str:
    """As RabbitMQ keeps it: salt and SHA-256 of salt and password, in base64.

    The salt comes from name and password, so that the same input writes the same file; see
    https://www.rabbitmq.com/docs/passwords#computing-password-hash.
    """
    salt = hashlib.sha256(f"{name}\0{password}".encode()).digest()[:4]
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()
