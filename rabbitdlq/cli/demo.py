"""``rabbitdlq demo``: the whole story in half a minute, told with the real commands on a real broker."""

import asyncio
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import typer

from rabbitdlq.broker import Connection, apply_topology, check_topology, close_channel, delete_topology, translated
from rabbitdlq.cli.broker import stopping_orderly
from rabbitdlq.cli.options import Options, options_of
from rabbitdlq.dead_letters import DLQManager
from rabbitdlq.definitions import definitions
from rabbitdlq.demo import FAILING, TOPOLOGY_FILE, jsonl
from rabbitdlq.errors import BrokerError, ConfigurationError, TopologyMismatch
from rabbitdlq.settings import load_topologies
from rabbitdlq.topology import Topology

__all__ = ["demo"]

QUEUE = "orders"
#: the files that ``make definitions`` writes, by the broker's major version
FILES = {3: "orders-3.x.json", 4: "orders.json"}
#: the application's exchange, which others may have, too
SHOP = frozenset({("exchange", "shop")})


def demo(context: typer.Context) -> None:
    """Show the main job on the broker that is there: retries, dead letters, replay. Takes about half a minute.

    Declares the work queue "orders" and deletes what it declared at the end; a queue "orders" that is in use is left
    alone, and the demo says so.
    """
    with stopping_orderly():
        Demo(options_of(context)).run()


class Demo:
    """One run of the demo."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._topology: Topology = load_topologies(TOPOLOGY_FILE)[QUEUE]
        self._environment = {
            **os.environ,
            "RABBITDLQ_URL": options.url,
            "RABBITDLQ_TOPOLOGY": str(TOPOLOGY_FILE),
            "RABBITDLQ_LOG_FORMAT": "json",
            "PYTHONUNBUFFERED": "1",
        }

    def run(self) -> None:
        """Tell the story; whatever happens, what was declared is deleted."""
        found = asyncio.run(self._look())
        try:
            print(asyncio.run(self._prepare()))
            self._tell()
        finally:
            asyncio.run(self._clear(found))

    # --- the story

    def _tell(self) -> None:
        self._title("1. The topology: a work queue, a ladder of two delays, a dead-letter queue")
        self._command("topology", "show", QUEUE)
        self._title("2. Ten orders come in; three have no address, and the handler does not expect that")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "orders.jsonl")
            path.write_text(jsonl())
            route = ("--exchange", "shop", "--routing-key", "order.created")
            self._command("publish", QUEUE, str(path), *route, shown=("publish", QUEUE, "orders.jsonl", *route))
        self._title("3. A consumer works on them; the broker brings failures back after 1 s, then after 3 s more")
        self._consume({})
        self._title("4. What failed three times rests in the dead-letter queue")
        self._command("dlq", "list", QUEUE)
        letter = self._first_letter()
        self._title("5. One dead letter in full")
        self._command("dlq", "show", QUEUE, letter)
        self._title("6. The bug is fixed: send all of them back")
        self._command("dlq", "replay", QUEUE, "--all")
        self._consume({"RABBITDLQ_DEMO_FIXED": "1"})
        self._title("7. Nothing is left behind")
        self._command("dlq", "summary", QUEUE)

    def _title(self, text: str) -> None:
        print(f"\n\033[1m{text}\033[0m" if sys.stdout.isatty() else f"\n{text}", flush=True)

    def _prompt(self, words: tuple[str, ...]) -> None:
        print(f"$ rabbitdlq {shlex.join(words)}", flush=True)

    def _command(self, *words: str, shown: tuple[str, ...] | None = None) -> None:
        self._prompt(shown or words)
        done = subprocess.run(_program(*words), env=self._environment, check=False)  # noqa: S603 - our own program
        if done.returncode:
            raise typer.Exit(done.returncode)

    def _consume(self, more: Mapping[str, str]) -> None:
        """A consumer process; its JSON log lines are shown in short."""
        # successes are told at that level
        words = ("consume", QUEUE, "--handler", "rabbitdlq.demo.handler:handle", "--drain", "--log-level", "debug")
        self._prompt(words)
        environment = {**self._environment, **more}
        with subprocess.Popen(  # noqa: S603 - our own program
            _program(*words), env=environment, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            try:
                for line in process.stderr:
                    if told := _short(line):
                        print(told, flush=True)
            except BaseException:
                process.terminate()
                raise
        if process.returncode:
            raise typer.Exit(process.returncode)

    # --- around it

    async def _look(self) -> frozenset[tuple[str, str]]:
        """What of the topology is there already; raises :class:`ConfigurationError` where it is in use."""
        async with await Connection.open(self._options.url, "rabbitdlq demo") as connection:
            try:
                found = (await check_topology(connection, self._topology)).present
            except TopologyMismatch as error:
                raise _in_use() from error  # whose it is does not want the demo's delays
        if found - SHOP:
            await self._refuse_to_disturb()
        return found

    async def _prepare(self) -> str:
        """Declare the topology, from the definitions if the management API is known; gives what was done."""
        async with await Connection.open(self._options.url, "rabbitdlq demo") as connection:
            source = self._import(connection)
            missing = (await apply_topology(connection, self._topology)).missing
        return f"topology loaded from {source}" if source and not missing else "topology declared"

    async def _refuse_to_disturb(self) -> None:
        async with DLQManager(self._topology, url=self._options.url) as manager:
            (found,) = await manager.summary()
        if any((found.waiting, found.dead, found.consumers, *found.on_ladder.values())):
            raise _in_use()

    def _import(self, connection: Connection) -> str | None:
        """Load the definitions by the management API, where its URL is known; gives where they came from."""
        url = self._options.management_url
        if url is None:
            return None
        from rabbitdlq.management import import_definitions  # noqa: PLC0415 - its HTTP client is slow to import

        version = connection.version
        path = Path("definitions", FILES[4 if version >= (4, 0) else 3])
        if path.is_file() and version[:2] not in {(3, 13), (3, 12)}:
            values, source = json.loads(path.read_text()), str(path)
        else:
            values, source = definitions([self._topology], version), "definitions made for this version"
        try:
            import_definitions(url, _entities_only(values, connection.vhost))
        except BrokerError:
            return None  # over AMQP then; the management API is a convenience here
        return source

    def _first_letter(self) -> str:
        async def look() -> str:
            async with DLQManager(self._topology, url=self._options.url) as manager:
                letters = await manager.peek_all()
            if len(letters) != len(FAILING):
                raise ConfigurationError(f"demo: {len(FAILING)} dead letters were expected; did others consume?")
            return letters[0].id

        return asyncio.run(look())

    async def _clear(self, found: frozenset[tuple[str, str]]) -> None:
        """Delete what was declared here; what had been there before stays."""
        async with await Connection.open(self._options.url, "rabbitdlq demo") as connection:
            if not found - SHOP:
                await delete_topology(connection, self._topology)
            if not found:
                channel = await connection.channel()
                with contextlib.suppress(BrokerError), translated("deleting the exchange 'shop'"):
                    await channel.exchange_delete("shop", if_unused=True)  # others may have bound to it meanwhile
                await close_channel(channel)


def _program(*words: str) -> list[str]:
    return [sys.executable, "-m", "rabbitdlq", *words]


def _entities_only(values: dict[str, Any], vhost: str) -> dict[str, Any]:
    """Without accounts, which the demo needs not and must not leave behind, and for this virtual host."""
    kinds = ("exchanges", "queues", "bindings")
    return {kind: [entity | {"vhost": vhost} for entity in values[kind]] for kind in kinds}


def _short(line: str) -> str:
    """A log line of the consumer in a few words; others as they are."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line.rstrip()
    time = datetime.fromisoformat(entry["timestamp"]).astimezone().strftime("%H:%M:%S")
    start = f"  {time}  {str(entry.get('message_id'))[:8]}  attempt {entry.get('attempt')}"
    match entry.get("event"):
        case "retry_scheduled":
            wait = f"{entry['retry_in_s']:g} s"
            return f"{start}  failed: {entry['error_type']}: {entry['error']}; again in {wait}"
        case "message_parked":
            return f"{start}  failed: {entry['error_type']}: {entry['error']}; parked, {entry['reason']}"
        case "delivery_settled" if entry["outcome"] == "succeeded":
            return f"{start}  succeeded"
        case _ if entry.get("level") == "debug" or entry.get("event") == "consumer_started":
            return ""
        case _:
            return line.rstrip()


def _in_use() -> ConfigurationError:
    return ConfigurationError(
        f"demo: the broker has a work queue {QUEUE!r} in use; run the demo on another broker, for instance "
        "with 'rabbitdlq broker run -- rabbitdlq demo' and RABBITDLQ_URL unset"
    )
