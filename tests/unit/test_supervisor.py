"""The supervisor's decisions: when to restart, how long to wait, what to add up; and the line to its processes."""

import asyncio
import json
import os
import pydoc
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from datetime import timedelta
from typing import Any, cast

import pytest
import structlog

from rabbitdlq.consumer import Consumer, ConsumerSummary
from rabbitdlq.consumer.supervised import LINE_VARIABLE, SupervisorLink
from rabbitdlq.consumer.supervisor import LASTING, Backoff, Ending, Supervisor, Verdict, added_up, judged
from rabbitdlq.errors import BrokerError, ConfigurationError


def seconds(number: float) -> timedelta:
    return timedelta(seconds=number)


class TestBackoff:
    def test_each_wait_is_twice_the_last_up_to_the_longest(self) -> None:
        backoff = Backoff(seconds(1), seconds(10))

        assert [backoff.after(seconds(0)) for _ in range(6)] == [seconds(n) for n in (1, 2, 4, 8, 10, 10)]

    def test_a_process_that_lasted_makes_the_next_wait_short_again(self) -> None:
        backoff = Backoff(seconds(1), seconds(10))
        for _ in range(5):
            backoff.after(LASTING - seconds(1))

        assert backoff.after(LASTING) == seconds(1)
        assert backoff.after(seconds(0)) == seconds(2)

    def test_a_longest_wait_below_the_first_is_kept(self) -> None:
        assert Backoff(seconds(5), seconds(1)).after(seconds(0)) == seconds(1)


CRASHES = [Ending(code, began=True) for code in (-signal.SIGKILL, 0, 1, 2, 70)]
REFUSED = Ending(1, began=True, error="connection refused")
WRONG_USE = Ending(2, error="--handler: 'x' is not MODULE:FUNCTION")
FINISHED = Ending(0, began=True, finished=True)


class TestJudged:
    @pytest.mark.parametrize("drain", [False, True])
    @pytest.mark.parametrize("first", [False, True])
    @pytest.mark.parametrize("ending", CRASHES)
    def test_whoever_may_have_run_handlers_and_said_nothing_at_the_end_is_restarted(
        self, ending: Ending, first: bool, drain: bool
    ) -> None:
        """``os._exit(2)`` in a handler is no wrong use, and ``os._exit(0)`` no drained queue."""
        assert judged(ending, first=first, stopping=False, drain=drain) == "restart"

    @pytest.mark.parametrize(
        ("ending", "first", "expected"),
        [
            (REFUSED, True, "give up"),
            (REFUSED, False, "restart"),
            (Ending(1, began=True, worked=True, error="queue deleted"), True, "restart"),
            (WRONG_USE, True, "give up"),
            (WRONG_USE, False, "give up"),
            (Ending(1), True, "give up"),  # Python's own: a program that cannot be loaded
            (Ending(0), True, "give up"),  # not a consumer
            (Ending(1), False, "restart"),
            (Ending(-signal.SIGKILL), True, "restart"),
            (Ending(None, error="python cannot be started"), True, "give up"),
            (Ending(None, error="python cannot be started"), False, "restart"),
        ],
    )
    def test_what_would_not_work_the_next_time_either_is_given_up(
        self, ending: Ending, first: bool, expected: Verdict
    ) -> None:
        assert judged(ending, first=first, stopping=False, drain=False) == expected

    def test_finished_is_done_with_drain_only(self) -> None:
        assert judged(FINISHED, first=True, stopping=False, drain=True) == "done"
        assert judged(FINISHED, first=True, stopping=False, drain=False) == "restart"

    def test_a_process_that_drained_and_broke_at_its_exit_is_not_restarted_and_not_forgotten(self) -> None:
        broken = Ending(-signal.SIGSEGV, began=True, finished=True)

        assert judged(broken, first=True, stopping=False, drain=True) == "failed"

    @pytest.mark.parametrize(
        ("ending", "expected"),
        [
            (FINISHED, "done"),
            (Ending(-signal.SIGKILL, began=True, finished=True), "failed"),
            (Ending(-signal.SIGTERM), "done"),  # it had nothing in hand yet
            (Ending(-signal.SIGTERM, began=True), "failed"),
            (REFUSED, "failed"),
            (WRONG_USE, "failed"),
            *((crash, "failed") for crash in CRASHES),
        ],
    )
    def test_after_a_stop_nothing_is_restarted(self, ending: Ending, expected: Verdict) -> None:
        for first in (False, True):
            assert judged(ending, first=first, stopping=True, drain=False) == expected


def test_an_ending_is_logged_with_signal_or_exit_code_and_reason() -> None:
    assert Ending(-9).words == {"signal": "SIGKILL"}
    assert Ending(-40).words == {"signal": "40"}  # a real-time signal has no name
    assert Ending(0).words == {"exit_code": 0}
    assert REFUSED.words == {"exit_code": 1, "error": "connection refused"}
    assert Ending(None, error="no").words == {"error": "no"}


def test_every_number_is_added_up() -> None:
    names = [each.name for each in fields(ConsumerSummary)]
    one = ConsumerSummary(**{name: number for number, name in enumerate(names, 1)})
    other = ConsumerSummary(**dict.fromkeys(names, 100))

    assert asdict(added_up([one, other])) == {name: 100 + number for number, name in enumerate(names, 1)}
    assert added_up([]) == ConsumerSummary()


class TestSupervisor:
    def test_what_cannot_be_supervised_is_a_configuration_error(self) -> None:
        with pytest.raises(ConfigurationError, match="processes: 0"):
            Supervisor(["true"], 0)
        with pytest.raises(ConfigurationError, match="command"):
            Supervisor([], 2)

    @pytest.mark.parametrize(
        ("command", "reason"),
        [
            (["/nowhere/python"], "/nowhere/python cannot be started: No such file or directory"),
            ([sys.executable, "-S", "-c", "raise SystemExit(7)"], "exit code 7 before it began to consume"),
        ],
    )
    async def test_a_command_that_is_no_consumer_is_told_once_and_not_tried_for_ever(
        self, command: list[str], reason: str
    ) -> None:
        with pytest.raises(BrokerError, match=reason):
            await asyncio.wait_for(Supervisor(command, 3).run(), 20)

    async def test_cancelled_it_leaves_no_process_and_no_open_file(self) -> None:
        before = set(os.listdir("/proc/self/fd"))
        with structlog.testing.capture_logs() as logs:
            running = asyncio.create_task(Supervisor(["/bin/sleep", "60"], 2).run())
            await until(lambda: len(logs) == 2)

            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running

        for event in logs:
            assert event["event"] == "process_started"
            with pytest.raises(ProcessLookupError):  # neither running nor a zombie
                os.kill(event["pid"], 0)
        assert set(os.listdir("/proc/self/fd")) == before


class FakeConsumer:
    """Counts its stops."""

    def __init__(self) -> None:
        self.stops = 0
        self.summary = ConsumerSummary()
        self.queue = "orders"
        self.worker = "w"
        self.go_on = asyncio.Event()
        self.fails: Exception | None = None

    def stop(self) -> None:
        self.stops += 1

    async def run(self) -> ConsumerSummary:
        await self.go_on.wait()
        if self.fails:
            raise self.fails
        return self.summary


Line = tuple[socket.socket, dict[str, str]]


@pytest.fixture
def line() -> Iterator[Line]:
    """The supervisor's end of a line, and the environment with the other."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    yield ours, {LINE_VARIABLE: str(theirs.detach())}
    ours.close()


def told(ours: socket.socket) -> list[Any]:
    try:
        return [json.loads(words) for words in ours.recv(65_536).splitlines()]
    except BlockingIOError:
        return []


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


class TestSupervisorLink:
    async def test_a_process_of_its_own_runs_its_consumer_as_ever(self) -> None:
        consumer = FakeConsumer()
        consumer.go_on.set()
        consumer.fails = BrokerError("no")
        link = SupervisorLink({})
        assert not link.supervised
        with pytest.raises(BrokerError), link:
            await link.run(cast(Consumer, consumer))

    @pytest.mark.parametrize("number", ["x", "-1", "987654"])
    def test_a_variable_that_is_no_supervisors_is_a_configuration_error(self, number: str) -> None:
        with pytest.raises(ConfigurationError, match=LINE_VARIABLE):
            SupervisorLink({LINE_VARIABLE: number})

    def test_the_environment_is_read_when_it_is_made_and_help_shows_nothing_of_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As a default of an argument it was printed whole, with the passwords in it."""
        monkeypatch.setenv(LINE_VARIABLE, "x")
        with pytest.raises(ConfigurationError, match=LINE_VARIABLE):
            SupervisorLink()
        assert LINE_VARIABLE not in os.environ

        told = pydoc.plain(pydoc.render_doc(SupervisorLink))
        assert "environment" in told
        assert not [name for name in os.environ if f"{name!r}:" in told]

    async def test_numbers_are_told_while_they_change_and_at_the_end(self, line: Line) -> None:
        ours, environment = line
        consumer = FakeConsumer()
        with SupervisorLink(environment) as link:
            assert environment == {}, "a program that a handler starts takes the line for its own"
            running = asyncio.create_task(link.run(cast(Consumer, consumer)))
            consumer.summary.succeeded = 3
            said: list[Any] = []
            while len(said) < 2:
                said += told(ours)
                await asyncio.sleep(0.005)
            consumer.summary.parked = 1
            consumer.go_on.set()
            await running
        said += told(ours)

        assert said[0] == {"began": True}
        assert [(words["summary"]["succeeded"], words["summary"]["parked"]) for words in said[1:3]] == [(3, 0), (3, 1)]
        assert said[3:] == [{"finished": True}]

    async def test_signals_and_the_end_of_the_line_stop_once_and_a_word_ends_the_grace(self, line: Line) -> None:
        """A service manager signals supervisor and processes alike, and then the supervisor passes it on."""
        ours, environment = line
        consumer = FakeConsumer()
        with SupervisorLink(environment) as link:
            running = asyncio.create_task(link.run(cast(Consumer, consumer)))
            await until(lambda: told(ours))
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
            await until(lambda: consumer.stops)
            await asyncio.sleep(0.05)
            assert consumer.stops == 1
            ours.send(b"!")
            await until(lambda: consumer.stops == 2)
            ours.close()
            await asyncio.sleep(0.05)
            assert consumer.stops == 2
            consumer.go_on.set()
            await running

    @pytest.mark.parametrize("unread", [False, True])
    async def test_the_end_of_the_supervisor_is_a_stop(self, line: Line, unread: bool) -> None:
        ours, environment = line
        consumer = FakeConsumer()
        with SupervisorLink(environment) as link:
            running = asyncio.create_task(link.run(cast(Consumer, consumer)))
            await asyncio.sleep(0.05)
            if not unread:  # else the line is reset instead of ended
                assert told(ours)
            ours.close()
            await until(lambda: consumer.stops == 1)
            consumer.go_on.set()
            await running

    @pytest.mark.parametrize(("error", "code"), [(ConfigurationError("wrong"), 2), (BrokerError("refused"), 1)])
    def test_an_error_is_told_to_the_supervisor_and_not_to_people(
        self, line: Line, error: Exception, code: int
    ) -> None:
        ours, environment = line
        with pytest.raises(SystemExit) as ended, SupervisorLink(environment):
            raise error

        assert ended.value.code == code
        assert told(ours) == [{"failed": str(error), "exit_code": code}]
