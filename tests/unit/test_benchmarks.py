"""What the benchmarks reckon; what they measure is no matter of a test."""

import importlib.util
import json
import tomllib
from pathlib import Path

from rich.console import Console

from tests.benchmarks.contenders.protocol import Job
from tests.benchmarks.results import goal_lines, paired_ratio, rows_of, show, spread
from tests.benchmarks.runs import Run
from tests.benchmarks.scenarios import CONTENDERS, GOALS, QUICK, SCENARIOS, choose

CONSUME = SCENARIOS["consume"]
OURS, RAW = choose("consume", quick=True, peers=())[:2]


def _run(contender: str, round_: int, seconds: float) -> Run:
    return Run(contender, "consume", round_, 1_000, seconds, client_cpu=0.5, broker_cpu=None)


#: a second round in which everything took ten times as long
RUNS = [_run(OURS.label, 0, 1.0), _run(RAW.label, 0, 2.0), _run(OURS.label, 1, 10.0), _run(RAW.label, 1, 20.0)]


def test_a_ratio_is_taken_within_a_round() -> None:
    assert paired_ratio({0: 1_000.0, 1: 10.0}, {0: 500.0, 1: 5.0, 2: 1.0}) == 2.0
    assert paired_ratio({0: 1.0}, {}) is None


def test_a_row_has_median_spread_and_ratio() -> None:
    row = rows_of(CONSUME, [OURS, RAW], RUNS)[0]
    assert row[2:] == ["550", "100-1,000", "2.00", "0.50", "", ""]
    assert spread([3.0]) == ""


def test_a_contender_that_gave_no_number_shows_its_error() -> None:
    failed = Run(OURS.label, "consume", 0, error="7 messages are in the queue, not 0")
    (row,) = rows_of(CONSUME, [OURS], [failed])
    assert row[0] == f"{OURS.label} (1 of 1 failed)"
    assert row[-1] == "ERROR: 7 messages are in the queue, not 0"


def test_goals_whose_contenders_ran_are_told() -> None:
    assert goal_lines(CONSUME, RUNS) == [f"  {OURS.label} / {RAW.label}: 2.00 (wanted 1.9)"]
    labels = {contender.label: contender.scenarios for contender in CONTENDERS}
    assert all(goal.scenario in labels[goal.ours] and goal.scenario in labels[goal.peer] for goal in GOALS)


def test_the_table_is_plain_text_where_there_is_no_terminal() -> None:
    console = Console(force_terminal=False, width=40)
    with console.capture() as captured:
        show(console, CONSUME, [OURS, RAW], RUNS)
    header, first = captured.get().splitlines()[2:4]
    assert header.split()[:2] == ["contender", "version"]
    assert first.startswith(OURS.label)
    assert header.index("msg/s") + len("msg/s") == first.index("550") + len("550")


def test_quick_is_ours_and_raw_and_peers_are_those_asked_for() -> None:
    assert {each.module for name in QUICK for each in choose(name, quick=True, peers=())} == {"ours", "raw_aio_pika"}
    asked = {each.module for each in choose("consume", quick=False, peers=["pika_select"])}
    assert asked == {"ours", "raw_aio_pika", "pika_select"}
    assert len(choose("consume", quick=False, peers=())) > len(asked)


def test_every_contender_is_there_and_every_peer_is_pinned() -> None:
    modules = {contender.module for contender in CONTENDERS}
    assert all(importlib.util.find_spec(f"tests.benchmarks.contenders.{module}") for module in modules)
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    pins = dict(pin.split("==") for pin in project["optional-dependencies"]["bench"])
    pinned = {name.partition("[")[0] for name in pins}
    ours = {"rabbitdlq", "aio-pika", "aiormq", ""}
    assert {contender.distribution for contender in CONTENDERS} - ours <= pinned


def test_a_job_travels_as_json() -> None:
    job = Job("consume", "amqp://host/", "queue", 5, way="solo")
    assert job == Job(**json.loads(job.to_json()))
