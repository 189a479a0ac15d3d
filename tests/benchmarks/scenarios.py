"""What is measured, and who takes part."""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.contenders import c_client

__all__ = ["BASELINE", "CONTENDERS", "GOALS", "QUICK", "SCENARIOS", "Contender", "Goal", "Scenario", "choose"]


@dataclass(frozen=True)
class Scenario:
    """One question."""

    name: str
    title: str
    #: messages of a full run and of a quick one; contenders that are far slower take a share of them
    messages: int
    quick: int
    #: how the contenders are ranked: messages a second, or the latency's two percentiles, or memory twice
    kind: str = "rate"
    #: rounds that are always enough
    most_rounds: int = 99


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("consume", "consume: 200-byte JSON, prefetch 200, one process", 30_000, 8_000),
        Scenario("publish", "publish: every message mandatory and confirmed", 20_000, 5_000),
        Scenario("failing", "failing: three attempts, two rungs of 100 ms, parked", 5_000, 800),
        Scenario("replay", "replay: dead letters of 1 kB, beside publishing as many", 20_000, 5_000),
        Scenario("latency", "latency, publish to handler, at 500 messages a second", 5_000, 1_000, kind="latency"),
        Scenario("large", "consume: 1 MB bodies", 300, 100),
        Scenario("webhooks", "consume: real webhooks, 7 kB (median) to 25 kB", 6_580, 1_974),
        Scenario("processes", "consume --drain: one process and two, trivial handler and half a ms", 40_000, 10_000),
        Scenario(
            "memory", "memory: one consumer after many messages", 1_000_000, 200_000, kind="memory", most_rounds=1
        ),
    )
}
#: what ``--quick`` runs, unless told otherwise
QUICK = ("consume", "publish", "failing", "latency")


@dataclass(frozen=True)
class Contender:
    """One way of doing it."""

    label: str
    #: below :mod:`tests.benchmarks.contenders`
    module: str
    #: whose version is shown
    distribution: str
    scenarios: tuple[str, ...]
    loop: str = "asyncio"
    way: str = ""
    concurrency: int = 200
    #: the part of a scenario's messages that it gets, so that a slow one does not take minutes
    share: float = 1.0
    #: it has a message format of its own, so it declares and fills its queue itself
    own_format: bool = False
    #: suffixes of the queues that it declares beside the work queue
    own_queues: tuple[str, ...] = ()
    #: the suffix of its dead-letter queue
    dead: str = ".dlq"
    quick: bool = False

    @property
    def version(self) -> str:
        """The version of what it measures, "" where it is not there."""
        if self.module == "c_client":
            return c_client.version()
        try:
            return importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            return ""

    def missing(self) -> str:
        """Why it cannot take part, "" if it can."""
        if self.module == "c_client":
            return c_client.missing()
        for name in [self.distribution, *(["uvloop"] if self.loop == "uvloop" else [])]:
            try:
                importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                return f"{name} is not installed"
        return ""


def _ours_and_raw() -> list[Contender]:
    both = []
    for loop in ("asyncio", "uvloop"):
        memory = ("memory",) if loop == "asyncio" else ()
        scenarios = ("consume", "publish", "failing", "latency", "large", "webhooks", *memory)
        both += [
            Contender(f"ours, {loop}", "ours", "rabbitdlq", scenarios, loop, quick=True),
            Contender(f"raw aio-pika, {loop}", "raw_aio_pika", "aio-pika", scenarios, loop, quick=True),
        ]
    return both


CONTENDERS: Sequence[Contender] = (
    *_ours_and_raw(),
    Contender("ours, send_all, asyncio", "ours", "rabbitdlq", ("publish",), way="send_all", quick=True),
    Contender("ours, send_all, uvloop", "ours", "rabbitdlq", ("publish",), "uvloop", way="send_all"),
    Contender("aiormq, asyncio", "raw_aiormq", "aiormq", ("publish",)),
    Contender("pika, select", "pika_select", "pika", ("consume", "publish")),
    Contender("pika, blocking", "pika_blocking", "pika", ("consume",)),
    Contender("FastStream", "faststream", "faststream", ("consume", "failing", "publish", "latency"), share=0.5),
    Contender(
        *("dramatiq", "dramatiq", "dramatiq", ("consume", "failing")),
        concurrency=8,
        share=0.3,
        own_format=True,
        own_queues=(".DQ", ".XQ"),
        dead=".XQ",
    ),
    Contender("Celery, solo", "celery", "celery", ("consume",), way="solo", share=0.3, own_format=True),
    Contender("Celery, prefork", "celery", "celery", ("consume",), way="prefork", share=0.3, own_format=True),
    Contender(
        *("taskiq", "taskiq", "taskiq-aio-pika", ("consume",)), share=0.3, own_format=True, own_queues=(".dead",)
    ),
    Contender("C, librabbitmq", "c_client", "", ("consume", "publish")),
    Contender("ours, publish 1 kB", "ours", "rabbitdlq", ("replay",), way="publish", quick=True),
    Contender("ours, replay", "ours", "rabbitdlq", ("replay",), way="replay", quick=True),
    Contender("ours, 1 process", "ours_cli", "rabbitdlq", ("processes",), way="handle 1", quick=True),
    Contender("ours, 2 processes", "ours_cli", "rabbitdlq", ("processes",), way="handle 2", quick=True),
    Contender("ours, 1 process, working", "ours_cli", "rabbitdlq", ("processes",), way="work 1", share=0.3, quick=True),
    Contender(
        "ours, 2 processes, working", "ours_cli", "rabbitdlq", ("processes",), way="work 2", share=0.3, quick=True
    ),
)
#: whom a contender is compared with: raw aio-pika on the same loop
BASELINE = "raw_aio_pika"


@dataclass(frozen=True)
class Goal:
    """A ratio that is wanted: ``ours`` against ``peer``, both by label."""

    scenario: str
    ours: str
    peer: str
    wanted: float


GOALS = (
    Goal("consume", "ours, asyncio", "raw aio-pika, asyncio", 1.9),
    Goal("consume", "ours, uvloop", "raw aio-pika, uvloop", 1.9),
    Goal("consume", "ours, asyncio", "FastStream", 4.0),
    Goal("consume", "ours, asyncio", "dramatiq", 3.0),
    Goal("consume", "ours, asyncio", "Celery, solo", 4.0),
    Goal("consume", "ours, asyncio", "pika, select", 0.8),
    Goal("publish", "ours, asyncio", "raw aio-pika, asyncio", 4.0),
    Goal("publish", "ours, uvloop", "raw aio-pika, uvloop", 4.0),
    Goal("publish", "ours, send_all, asyncio", "raw aio-pika, asyncio", 4.0),
    Goal("publish", "ours, send_all, asyncio", "C, librabbitmq", 0.6),
    Goal("failing", "ours, asyncio", "raw aio-pika, asyncio", 1.2),
    Goal("failing", "ours, uvloop", "raw aio-pika, uvloop", 1.2),
    Goal("failing", "ours, asyncio", "FastStream", 4.0),
    Goal("failing", "ours, asyncio", "dramatiq", 6.0),
    Goal("replay", "ours, replay", "ours, publish 1 kB", 0.7),
    Goal("processes", "ours, 2 processes", "ours, 1 process", 1.5),
    Goal("processes", "ours, 2 processes, working", "ours, 1 process, working", 1.5),
)


def choose(scenario: str, *, quick: bool, peers: Sequence[str]) -> list[Contender]:
    """Who takes part in the scenario; ours and raw aio-pika always do."""
    wanted = {"ours", "ours_cli", BASELINE, *peers}
    return [
        contender
        for contender in CONTENDERS
        if scenario in contender.scenarios
        and (contender.quick or not quick or contender.module in peers)
        and (contender.module in wanted or not peers)
    ]
