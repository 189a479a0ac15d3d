"""``rabbitdlq.toml``: the work queues of a project, read and checked at the edge."""

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.topology import DEFAULT_CRASH_LIMIT, Topology, WorkBinding

__all__ = ["BindingSettings", "QueueSettings", "load_topologies", "parse_topologies", "pick_topology"]


_HINTS = {
    "queues": '; write a table [queues.NAME] with delays = ["5s", "30s"]',
    "delays": '; write delays = ["5s", "30s"] for three attempts',
}


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
    #: dead letters of this lap or a later one are held: bulk operations leave them out
    max_laps: int = 3

    def topology(self, name: str) -> Topology:
        """The checked value; raises :class:`ConfigurationError` naming key and reason."""
        values = self.model_dump(exclude={"bindings", "delays"})
        bindings = [WorkBinding(entry.exchange, entry.key, entry.type, entry.arguments) for entry in self.bindings]
        delays: list[str | timedelta] = [*self.delays]
        return Topology(name, delays, bindings=bindings, **values)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    queues: dict[str, QueueSettings]


def load_topologies(path: Path | str) -> dict[str, Topology]:
    """The topologies of a ``rabbitdlq.toml`` by queue name.

    Raises :class:`ConfigurationError` naming the file, the key (or line and column) and the reason.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{path}: no such file; name the topology file with --topology or RABBITDLQ_TOPOLOGY"
        ) from error
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        text = data.decode("utf-8-sig")  # some editors put a byte order mark before it
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(
            f"{path}: line {line}: byte 0x{data[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from error
    try:
        values = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # "Cannot overwrite a value" and "cannot declare ... twice" are how two tables of one queue show
        raise ConfigurationError(f"{path}: not valid TOML: {_with_place(error, text)}") from error
    return parse_topologies(values, str(path))


def _with_place(error: Exception, text: str) -> str:
    """The reason with line and column; of the end too, which :mod:`tomllib` only calls by its name."""
    *_, last = text.split("\n")
    end = f"(at line {text.count(chr(10)) + 1}, column {len(last) + 1}, the end of the file)"
    return str(error).replace("(at end of document)", end)


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
            # a name is not wrong under a key of the table, the table's own name is
            reason = str(error).removeprefix("name: ")
            where = _key(("queues", name))
            raise ConfigurationError(f"{source}: {where}{'.' if reason == str(error) else ': '}{reason}") from error
    if not topologies:
        raise ConfigurationError(f"{source}: queues: no queue in it{_HINTS['queues']}")
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
    for finding in error.errors(include_url=False):
        given = finding["input"]
        reason = _REASONS.get(finding["type"], finding["msg"].replace("Input should be", "should be"))
        if isinstance(given, str | int | float) and finding["type"] != "extra_forbidden":
            reason += f", not {json.dumps(given, ensure_ascii=False):.60}"
        if finding["type"] == "missing":
            reason += _HINTS.get(str(finding["loc"][-1]), "")
        reasons.append(f"{_key(finding['loc'])}: {reason}")
    return "; ".join(reasons)


#: pydantic speaks of Python, the file is TOML
_REASONS = {
    "extra_forbidden": "unknown key",
    "missing": "missing",
    "list_type": "should be a list",
    "string_type": "should be a text",
    "int_type": "should be a whole number",
    "dict_type": "should be a table",
    "model_type": "should be a table",
}


def _key(parts: Sequence[str | int]) -> str:
    """The key as TOML writes it: ``queues.orders.delays[1]``, ``queues."orders.eu".journal``."""
    key = ""
    for part in parts:
        if isinstance(part, int):
            key += f"[{part}]"
        else:
            bare = re.fullmatch(r"[A-Za-z0-9_-]+", part) is not None
            key += f".{part if bare else json.dumps(part, ensure_ascii=False)}"
    return key.removeprefix(".")


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
                    f"{source}: {_key(('queues', name))}: duplicate {kind} {shared!r}: {_key(('queues', other))} has "
                    "it too; rename one"
                )
