"""``rabbitdlq.toml``: the work queues of a project, read and checked at the edge."""

import tomllib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.topology import DEFAULT_CRASH_LIMIT, Topology, WorkBinding

__all__ = ["BindingSettings", "QueueSettings", "load_topologies", "parse_topologies", "pick_topology"]


class BindingSettings(BaseModel):
    """One entry of ``bindings``: an exchange of the application that feeds the work queue."""

    model_config = ConfigDict(extra="forbid", strict=True)

    #: the exchange, declared durable where it is missing
    exchange: str
    #: direct, fanout, headers or topic
    type: Literal["direct", "fanout", "headers", "topic"] = "topic"
    #: the binding's routing key
    key: str = ""
    #: the binding's arguments, for headers exchanges
    arguments: dict[str, Any] = {}


class QueueSettings(BaseModel):
    """One table ``[queues.NAME]``."""

    model_config = ConfigDict(extra="forbid", strict=True)

    #: 1 to 32 delays like "500ms", "5s", "2m", "1h"; attempts are one more
    delays: list[str]
    #: what feeds the work queue
    bindings: list[BindingSettings] = []
    #: "quorum" or "classic"
    queue_type: Literal["quorum", "classic"] = "quorum"
    #: crashes of consumers before the broker itself parks the message (quorum, RabbitMQ 3.13 and newer)
    crash_limit: int = DEFAULT_CRASH_LIMIT
    #: "stream", or "live" where the broker has no streams
    journal: Literal["stream", "live"] = "stream"
    #: how long the journal keeps events
    journal_max_age: str = "7d"
    #: how large the journal may grow, in bytes
    journal_max_bytes: int = 1_000_000_000
    #: "quorum" or "classic"; the work queue's type unless given
    dlq_type: Literal["quorum", "classic"] | None = None

    def topology(self, name: str) -> Topology:
        """The checked value; raises :class:`ConfigurationError` naming key and reason."""
        values = self.model_dump(exclude={"bindings", "delays"})
        bindings = [WorkBinding(entry.exchange, entry.key, entry.type, entry.arguments) for entry in self.bindings]
        delays: list[str | timedelta] = [*self.delays]
        return Topology(name, delays, bindings=bindings, **values)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    queues: dict[str, QueueSettings]


def load_topologies(path: Path) -> dict[str, Topology]:
    """The topologies of a ``rabbitdlq.toml`` by queue name.

    Raises :class:`ConfigurationError` naming the file, the key (or line and column) and the reason.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{path}: no such file; name the topology file with --topology or RABBITDLQ_TOPOLOGY"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # "Cannot overwrite a value" and "cannot declare ... twice" are how two tables of one queue show
        raise ConfigurationError(f"{path}: not valid TOML: {error}") from error
    return parse_topologies(values, str(path))


def parse_topologies(values: Mapping[str, Any], source: str) -> dict[str, Topology]:
    """The topologies of a parsed file; ``source`` names it in errors."""
    try:
        file = _File.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(f"{source}: {_reasons(error)}") from error
    topologies: dict[str, Topology] = {}
    for name, entry in file.queues.items():
        try:
            topologies[name] = entry.topology(name)
        except ConfigurationError as error:
            raise ConfigurationError(f"{source}: queues.{name}.{error}") from error
    if not topologies:
        raise ConfigurationError(f"{source}: queues: no queue in it; write a table [queues.NAME] with delays")
    _refuse_shared_names(topologies, source)
    return topologies


def pick_topology(topologies: Mapping[str, Topology], queue: str, source: str) -> Topology:
    """The topology of one queue; raises :class:`ConfigurationError` naming those there are."""
    try:
        return topologies[queue]
    except KeyError:
        known = ", ".join(sorted(topologies))
        raise ConfigurationError(f"{source}: no queue {queue!r} in it; there are: {known}") from None


def _reasons(error: ValidationError) -> str:
    """All findings, each as ``key: reason``."""
    reasons = []
    for finding in error.errors():
        key = ".".join(f"[{part}]" if isinstance(part, int) else str(part) for part in finding["loc"])
        message = "unknown key" if finding["type"] == "extra_forbidden" else finding["msg"]
        reasons.append(f"{key.replace('.[', '[')}: {message}")
    return "; ".join(reasons)


def _refuse_shared_names(topologies: Mapping[str, Topology], source: str) -> None:
    """Two work queues whose derived names meet, like ``orders`` and ``orders.dlq``, would share a queue."""
    owners: dict[tuple[str, str], str] = {}
    for name, topology in topologies.items():
        entities = topology.entities((4, 0))
        own = [("exchange", exchange.name) for exchange in entities.exchanges if not exchange.theirs]
        for entity in [*own, *(("queue", queue.name) for queue in entities.queues), ("queue", topology.lock_queue)]:
            other = owners.setdefault(entity, name)
            if other != name:
                kind, shared = entity
                raise ConfigurationError(
                    f"{source}: queues.{name}: duplicate {kind} {shared!r}: queues.{other} has it too; rename one"
                )
