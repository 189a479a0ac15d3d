"""The README tells what the code does: tables, commands and programs are held to it."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

from rabbitdlq import names, parking
from rabbitdlq.cli.program import app
from rabbitdlq.consumer.handling import options_of
from rabbitdlq.local_broker import BrokerAddress
from rabbitdlq.settings import QueueSettings, load_topologies

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def table(name: str) -> list[list[str]]:
    """The rows of the table between two comments."""
    body = README.split(f"<!-- {name}:")[1].split(f"<!-- end of {name}")[0]
    rows = [line for line in body.splitlines() if line.startswith("| `")]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def blocks(language: str) -> list[str]:
    """The code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> dict[str, Any]:
    """The commands of the program by their words, with what typer knows of them."""
    found: dict[str, Any] = {}

    def walk(group: Any, words: tuple[str, ...]) -> None:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                walk(command, (*words, name))
            else:
                found[" ".join((*words, name))] = command

    walk(typer.main.get_command(app), ())
    return found


def options(command: Any) -> set[str]:
    return {
        next(option for option in parameter.opts if option.startswith("--"))
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name != "help"
    }


def test_the_commands_of_the_readme_are_those_of_the_program() -> None:
    known = commands()
    written = {}
    for usage, option_cell, _ in table("commands"):
        words = usage.strip("`").split(" ")
        name = " ".join(word for word in words if word.isalpha() and word.islower())
        selection = README.split("<!-- selection")[1].split("<!-- end of selection")[0] if "*sel" in option_cell else ""
        written[name] = set(re.findall(r"`(--[a-z-]+)", selection + option_cell))

    assert set(written) == set(known)
    for name, command in known.items():
        assert written[name] == options(command), name


def test_the_settings_of_the_readme_are_those_of_the_topology_file() -> None:
    written = {key.strip("`"): default.strip("`") for key, default, _ in table("settings")}
    known = {
        name: "required" if field.is_required() else json.dumps(field.default).replace("null", "none")
        for name, field in QueueSettings.model_fields.items()
    }

    assert written == known


def test_the_environment_variables_of_the_readme_are_those_that_are_read() -> None:
    """``--help`` cuts the longer names on a terminal of 80 columns."""
    ours = "RABBITDLQ_"
    written = {name for row in table("environment") for name in re.findall(rf"`({ours}\w+)`", row[0])}
    #: between our own processes, and for docker-compose.yml, whose ports `make` picks
    between = {"SUPERVISOR_LINE", "PROCESS_NUMBER", "DEMO_FIXED", "AMQP_PORT", "MANAGEMENT_PORT", "PROMETHEUS_PORT"}
    read = {
        name for path in (ROOT / "rabbitdlq").rglob("*.py") for name in re.findall(rf"{ours}[A-Z_]+", path.read_text())
    }

    assert written == read - {f"{ours}{name}" for name in between}


def test_the_headers_of_the_readme_are_those_of_a_dead_letter() -> None:
    written = set(re.findall(r"`(dlq-[a-z-]+)`", README))

    assert written == names.OURS
    assert parking.OWN_HEADER_BYTES < 128 * 1024


def test_what_happens_when_names_a_test_for_each_row() -> None:
    rows = README.split("<!-- what happens when")[1].split("\n\n")[0].splitlines()[3:]
    named = [re.findall(r'\]\((tests/[a-z_/]+\.py) "(test_[a-z_]+)"\)', row) for row in rows]

    assert len(rows) > 20
    assert all(named), [row for row, tests in zip(rows, named, strict=True) if not tests]
    for path, test in (each for tests in named for each in tests):
        assert f"async def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path} has no {test}"


def test_every_rabbitdlq_command_in_the_readme_exists_with_its_options() -> None:
    known = commands()
    used = [
        line.removeprefix("$ ").split("#")[0].split("|")[0]
        for block in blocks("console")
        for line in block.splitlines()
        if line.startswith("$ rabbitdlq")
    ]
    assert len(used) > 10
    for line in used:
        words = shlex.split(line)[1:]
        name = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
        assert name in known, line
        given = {word for word in words if word.startswith("--")}
        assert given <= options(known[name]), line


def test_every_make_target_of_the_readme_is_listed_by_make_help() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for target in re.findall(r"^\$ make (\w+)", README, re.MULTILINE):
        assert target == "help" or f"make {target}" in shown
    for target in ("demo", "test", "check", "broker", "definitions", "clean"):
        assert f"make {target}" in shown


def test_the_topology_of_the_readme_is_valid_and_drawn_as_shown(tmp_path: Path) -> None:
    path = tmp_path / "rabbitdlq.toml"
    path.write_text(blocks("toml")[0])

    assert load_topologies(path)["orders"].max_attempts == 3
    drawn = subprocess.run(
        [sys.executable, "-m", "rabbitdlq", "--topology", str(path), "topology", "show"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert drawn.strip() in README


def test_the_handler_of_the_readme_says_what_goes_with_it() -> None:
    (program,) = [block for block in blocks("python") if "@handler(" in block]
    names_in_it: dict[str, Any] = {}

    exec(program, names_in_it)

    options = options_of(names_in_it["handle"])
    assert set(options.classify) == {ConnectionError, LookupError, TimeoutError}
    assert options.payload_type is names_in_it["Order"]


@pytest.fixture
def _no_emails_left(broker: BrokerAddress) -> Any:
    yield
    program = f"""
import asyncio
from rabbitdlq import Connection, Topology
from rabbitdlq.broker import delete_topology
async def main():
    async with await Connection.open({broker.url!r}) as connection:
        await delete_topology(connection, Topology("emails", ["1s", "5s"]))
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.usefixtures("_no_emails_left")
def test_the_first_program_of_the_readme_does_what_it_says(broker: BrokerAddress) -> None:
    program = blocks("python")[0].replace("amqp://guest:guest@127.0.0.1:5672/", broker.url)
    assert len(program.splitlines()) < 30

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    lines = [line for line in done.stdout.splitlines() if line.startswith(("attempt", "exhausted"))]
    assert "[debug" not in done.stdout, "a program that set no logs up has every success printed"
    assert lines == [
        *(f"attempt {number} of 3 {{'to': 'ada@example.org'}}" for number in (1, 2, 3)),
        "exhausted 3 ['mail server is down', 'mail server is down', 'mail server is down']",
    ]
