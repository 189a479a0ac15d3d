"""Measure rabbitdlq beside its peers: ``python -m tests.benchmarks``, or ``make bench`` and ``make bench-quick``.

How to read it. Every contender runs once in each round, the order rotating, each in a process of its own on a queue of
its own: quorum, with the ladder behind it. A number is the median of the rounds, the spread its lowest and highest.
``x raw`` is against raw aio-pika on the same event loop, and the median of the ratios *within* a round, because what
else the machine does slows a whole round down. Believe ratios, not messages a second; and no ratio whose spreads are
wide. CPU is in seconds for 10,000 messages: less noisy than the clock where contender and broker share few cores.

What is equal. The same messages, prefetch 200, one process, a handler that gets the decoded payload and counts. The
clock starts at the first handler call and stops at the last one; afterwards the queue must be empty, or the run is an
error. ``failing`` stops when the bench itself sees the last dead letter in the queue. Peers log nothing; ours logs as
its command line does, JSON lines to a file. What each peer does is told in its module under ``contenders/``.

The broker is that of ``RABBITDLQ_URL``. Its CPU is shown where its process can be seen on this machine.
"""

import argparse
import json
import os
import platform
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tests.benchmarks.results import as_json, show
from tests.benchmarks.runs import WEBHOOKS, Run, Track
from tests.benchmarks.scenarios import QUICK, SCENARIOS, Contender, Scenario, choose

ROUNDS = 5
#: with --quick no round of a scenario is begun that would not end within this: two minutes in all
QUICK_SECONDS = 30.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; 1 where a run gave no number."""
    options = _options(arguments)
    console = Console()
    url = os.environ.get("RABBITDLQ_URL")
    if not url:
        print("RABBITDLQ_URL is not set; `make bench` gets a broker by itself", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through every finally: queues go
    all_runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="rabbitdlq-bench-") as logs:
        track = Track(url, Path(logs))
        surroundings = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
            "broker": track.broker.version_text,
        }
        console.print(", ".join(f"{name} {value}" for name, value in surroundings.items()), highlight=False)
        try:
            for name in options.only:
                scenario = SCENARIOS[name]
                contenders = _present(choose(name, quick=options.quick, peers=options.peers))
                if name == "webhooks" and not WEBHOOKS.exists():
                    print(f"webhooks: skipped, {WEBHOOKS.name} is not there", file=sys.stderr)
                    continue
                runs = _rounds(track, scenario, contenders, options)
                all_runs += runs
                show(console, scenario, contenders, runs)
        finally:
            track.broker.close()
            if options.json:
                versions = {contender.label: contender.version for contender in _present(choose_all())}
                whole = as_json(surroundings | {"versions": versions}, all_runs)
                Path(options.json).write_text(json.dumps(whole, indent=1) + "\n")
    return 1 if any(run.error for run in all_runs) else 0


def choose_all() -> list[Contender]:
    """Everybody once."""
    return list({each.label: each for name in SCENARIOS for each in choose(name, quick=False, peers=())}.values())


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    assert __doc__
    parser = argparse.ArgumentParser(
        "python -m tests.benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="ours and raw aio-pika, small, as many rounds as fit in two minutes"
    )
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS} unless given; with --quick as many as fit")
    parser.add_argument("--only", type=words, help=f"scenarios: {', '.join(SCENARIOS)}")
    parser.add_argument(
        "--peers", type=words, default=[], help=f"beside ours and raw: {', '.join(dict.fromkeys(_modules()))}"
    )
    parser.add_argument("--json", metavar="FILE", help="write every run to FILE")
    options = parser.parse_args(arguments)
    options.only = options.only or list(QUICK if options.quick else SCENARIOS)
    for given, known in ((options.only, set(SCENARIOS)), (options.peers, set(_modules()))):
        if unknown := set(given) - known:
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    return options


def _modules() -> list[str]:
    return [contender.module for contender in choose_all()]


def _present(contenders: Sequence[Contender]) -> list[Contender]:
    """Those whose package is installed and whose tools are there; the others are skipped with a word."""
    present = []
    for contender in contenders:
        if missing := contender.missing():
            print(f"{contender.label}: skipped, {missing}", file=sys.stderr)
        else:
            present.append(contender)
    return present


def _rounds(
    track: Track, scenario: Scenario, contenders: Sequence[Contender], options: argparse.Namespace
) -> list[Run]:
    messages = scenario.quick if options.quick else scenario.messages
    runs: list[Run] = []
    begun = time.monotonic()
    for round_ in range(min(options.rounds or ROUNDS, scenario.most_rounds)):
        taken = time.monotonic() - begun
        if options.quick and not options.rounds and round_ and taken / round_ * (round_ + 1) > QUICK_SECONDS:
            break
        turn = round_ % max(1, len(contenders))
        for contender in [*contenders[turn:], *contenders[:turn]]:
            run = track.run(scenario, contender, round_, messages)
            told = f"ERROR: {run.error}" if run.error else f"{run.rate:,.0f} msg/s"
            print(f"{scenario.name}, round {round_ + 1}, {contender.label}: {told}", file=sys.stderr)
            runs.append(run)
    return runs


if __name__ == "__main__":
    sys.exit(main())
