"""Handlers in processes and threads of their own: real ones, without a broker."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from rabbitdlq import Consumer, names
from rabbitdlq.consumer.attempt import Attempt, Completed, Failed, Handler, Interrupted, Result
from rabbitdlq.consumer.classify import Classifier, Rule
from rabbitdlq.consumer.deadlines import Running, Timeouts
from rabbitdlq.consumer.handling import HandlerOptions, handler, options_of
from rabbitdlq.consumer.isolation import Isolation, abandoned_limit
from rabbitdlq.consumer.pool import Child, ChildAttempt, ChildNotStarted
from rabbitdlq.consumer.sizes import parse_size
from rabbitdlq.deaths import Arrival
from rabbitdlq.errors import ConfigurationError, External, IdempotencyError, Permanent, Transient
from rabbitdlq.message import Message, message_of
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Properties
from tests.unit import isolated

TOPOLOGY = Topology("orders", ["5s"])
SHORT = timedelta(milliseconds=200)


def message(do: str, payload: Any = None, **more: Any) -> Message:
    body = {"do": do, **more}
    return message_of(
        TOPOLOGY,
        json.dumps(body).encode(),
        Properties(message_id=f"m-{do}"),
        Arrival(0, 0, "", "orders"),
        failures=0,
        payload=body if payload is None else payload,
    )


class Deaf:
    """An async handler that takes no notice of its cancellation."""

    def __init__(self) -> None:
        self.began, self.release = threading.Event(), threading.Event()

    async def __call__(self, _: Message) -> None:
        self.began.set()
        while not self.release.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue


async def none_left(attempt: Attempt) -> None:
    """Return when no handler runs on that nobody waits for."""
    async with asyncio.timeout(10):
        while attempt.left:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def children(
    function: Handler = isolated.plain,
    classes: Mapping[Any, Any] | None = None,
    soft: timedelta = timedelta(seconds=30),
    **options: Any,
) -> AsyncIterator[ChildAttempt]:
    attempt = ChildAttempt(function, classes or {}, Timeouts(soft, soft * 2), **options)
    await attempt.start()
    try:
        yield attempt
    finally:
        await attempt.close()


async def run(attempt: Attempt, message: Message) -> Result:
    return await asyncio.wait_for(attempt.run(message), 20)


async def noted(path: Path, lines: int) -> list[str]:
    async with asyncio.timeout(10):
        while not path.exists() or len(found := path.read_text().splitlines()) < lines:
            await asyncio.sleep(0.01)
    return found


def running(task: "asyncio.Task[Any]", message: Message) -> Running:
    return Running(task, cast(Any, None), message, time.perf_counter())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # also where it goes between the opening and the reading
        return True


async def all_gone(pids: Iterable[int | str]) -> None:
    async with asyncio.timeout(5):
        for pid in pids:
            while not gone(int(pid)):
                await asyncio.sleep(0.01)


class TestDeath:
    @pytest.mark.parametrize(
        ("do", "more", "text", "traceback"),
        [
            ("segfault", {}, "the process of the handler ended with SIGSEGV", "in _mischief"),
            ("exit", {"code": 3}, "the process of the handler ended with exit code 3", None),
            ("exit", {"code": 0}, "the process of the handler ended with exit code 0", None),
            (
                "sigkill",
                {},
                "the process of the handler ended with SIGKILL (from outside: maybe for lack of memory)",
                None,
            ),
        ],
    )
    @pytest.mark.parametrize("function", [isolated.plain, isolated.in_loop])
    async def test_the_end_of_a_child_is_a_failed_attempt_and_the_next_one_runs(
        self, function: Handler, do: str, more: dict[str, Any], text: str, traceback: str | None, tmp_path: Path
    ) -> None:
        async with children(function) as attempt:
            result = await run(attempt, message(do, **more))
            after = await run(attempt, message("note", path=str(tmp_path / "noted")))

        assert isinstance(result, Failed)
        assert (result.failure.type, result.failure.message, result.reason) == ("HandlerDied", text, names.CRASHED)
        assert (result.rule.kind, result.rule.known) == (Transient, False)
        assert (traceback or "") in (result.failure.traceback or "")
        assert bool(result.failure.traceback) is bool(traceback), "a crash says where"
        assert isinstance(after, Completed)

    async def test_neighbours_are_not_disturbed_by_any_number_of_deaths(self, tmp_path: Path) -> None:
        path = tmp_path / "noted"
        async with children() as attempt:
            neighbours = [
                asyncio.create_task(attempt.run(message("hold", path=str(path), until=str(tmp_path / "go"))))
                for _ in range(3)
            ]
            began = await noted(path, 3)
            deaths = [await run(attempt, message(do, code=3)) for do in ("segfault", "exit", "sigkill", "exit")]
            assert not any(task.done() for task in neighbours), "they run while the others die"
            (tmp_path / "go").touch()
            results = await asyncio.wait_for(asyncio.gather(*neighbours), 20)

        assert len(set(began)) == 3, "each in a process of its own"
        assert all(isinstance(result, Completed) for result in results)
        assert all(isinstance(death, Failed) and death.reason == names.CRASHED for death in deaths)

    async def test_a_child_that_dies_while_it_is_idle_costs_no_attempt(self, tmp_path: Path) -> None:
        path = tmp_path / "noted"
        async with children() as attempt:
            for number in (1, 2):
                assert isinstance(await run(attempt, message("note", path=str(path))), Completed)
                os.kill(int((await noted(path, number))[-1]), signal.SIGKILL)
            assert isinstance(await run(attempt, message("note", path=str(path))), Completed)

        assert len(set(path.read_text().split())) == 3

    @pytest.mark.parametrize("do", ["deaf", "program"])
    async def test_nothing_is_left_of_the_children_when_the_consumer_has_ended(self, do: str, tmp_path: Path) -> None:
        path = tmp_path / "noted"
        async with children() as attempt:
            tasks = [asyncio.create_task(attempt.run(message(do, path=str(path)))) for _ in range(2)]
            began = await noted(path, 2)

        await all_gone(pid for line in began for pid in line.split()[1:])
        results = await asyncio.wait_for(asyncio.gather(*tasks), 10)
        assert all(isinstance(result, Interrupted) for result in results)

    async def test_a_signal_to_the_whole_group_does_not_end_a_child(self, tmp_path: Path) -> None:
        path = tmp_path / "noted"
        async with children() as attempt:
            task = asyncio.create_task(attempt.run(message("wait", seconds=0.5, path=str(path))))
            pid = int((await noted(path, 1))[0].split()[1])
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid, number)
            assert isinstance(await asyncio.wait_for(task, 10), Completed)


class TestPrograms:
    @pytest.mark.parametrize(
        ("do", "number"),
        [("terminate", signal.SIGTERM), ("terminate", signal.SIGINT), ("fork", signal.SIGTERM)],
    )
    async def test_what_a_handler_starts_heeds_the_signals_that_its_process_does_not(
        self, do: str, number: signal.Signals
    ) -> None:
        """What is ignored stays so in the programs that are started: none ended when its handler told it to."""
        async with children() as attempt:
            assert isinstance(await run(attempt, message(do, signal=int(number))), Completed)

    async def test_what_a_handler_has_left_running_is_let_be_when_its_process_has_nothing_to_do(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "noted"
        async with children() as attempt:
            assert isinstance(await run(attempt, message("leave", path=str(path))), Completed)
        left = [int(pid) for pid in path.read_text().split()]
        try:
            assert not [pid for pid in left if gone(pid)]
        finally:
            for pid in left:
                os.kill(pid, signal.SIGKILL)

    async def test_but_not_beside_the_retry_of_another_unless_it_has_a_session_of_its_own(self, tmp_path: Path) -> None:
        path, deaf = tmp_path / "noted", tmp_path / "deaf"
        async with children() as attempt:
            await run(attempt, message("leave", path=str(path)))
            task = asyncio.create_task(attempt.run(message("deaf", path=str(deaf))))
            await noted(deaf, 1)
        child, daemon = (int(pid) for pid in path.read_text().split())
        try:
            await all_gone([child])
            assert not gone(daemon)
        finally:
            os.kill(daemon, signal.SIGKILL)
        assert isinstance(await asyncio.wait_for(task, 10), Interrupted)


class TestMemory:
    async def test_a_handler_that_takes_too_much_gets_a_memory_error_and_its_child_is_replaced(
        self, tmp_path: Path
    ) -> None:
        path = tmp_path / "noted"
        async with children(max_memory=256 * 2**20) as attempt:
            await run(attempt, message("note", path=str(path)))
            result = await run(attempt, message("memory"))
            await run(attempt, message("note", path=str(path)))

        assert isinstance(result, Failed)
        assert (result.failure.type, result.reason) == ("MemoryError", None)
        assert "in _mischief" in (result.failure.traceback or "")
        before, after = path.read_text().split()
        assert before != after

    async def test_a_limit_in_which_the_child_cannot_even_start_is_refused_with_the_numbers(self) -> None:
        attempt = ChildAttempt(isolated.plain, {}, Timeouts(), max_memory=36 * 2**20)
        with pytest.raises(ConfigurationError, match=r"^max_memory: 36 MiB is too little: the process takes \d+ MiB"):
            await attempt.start()

    @pytest.mark.parametrize(
        ("where", "size", "what"),
        [
            ("async", "512MiB", "with isolation 'async' handlers share the memory of this process"),
            (None, 10**9, "with isolation 'async'"),
            ("thread", "512MiB", "with isolation 'thread'"),
            ("process", "1MiB", "1,048,576 bytes are less than the Python of a child takes; give at least 32 MiB"),
            ("process", "512 miles", "'512 miles' is no size; write bytes, or a number and a unit, like 512MiB or 2GB"),
            ("process", "0", "'0' is no size"),
            ("process", -5, "-5 is no size"),
            ("process", True, "True is no size"),
        ],
    )
    def test_a_limit_that_makes_no_sense_is_refused(self, where: str | None, size: Any, what: str) -> None:
        with pytest.raises(ConfigurationError, match=f"^max_memory: {what}"):
            Isolation.of(where, size)

    @pytest.mark.parametrize(
        ("text", "size"),
        [("512MiB", 512 * 2**20), ("2GB", 2 * 10**9), ("1.5 GiB", 3 * 2**29), ("100mb", 10**8), ("77", 77), (5, 5)],
    )
    def test_sizes_are_read_as_people_write_them(self, text: str | int, size: int) -> None:
        assert parse_size(text) == size


class TestFailures:
    @pytest.mark.parametrize("function", [isolated.plain, isolated.in_loop, isolated.undecorated])
    async def test_a_failure_is_told_as_if_the_handler_had_run_here(self, function: Handler) -> None:
        here = Attempt(function, Classifier({KeyError: Permanent, ValueError: Rule(External, max_attempts=2)}))
        classes = {KeyError: Permanent, ValueError: Rule(External, max_attempts=2)}
        async with children(function, classes) as attempt:
            for do in ("unpicklable", "permanent", "external", "drop", "later", "key", "quit"):
                result, expected = await run(attempt, message(do)), await run(here, message(do))
                assert isinstance(result, Failed)
                assert isinstance(expected, Failed)
                assert result.failure == expected.failure, do
                assert (result.rule, result.rule.known) == (expected.rule, expected.rule.known)
                assert (result.retry_after, result.reason) == (expected.retry_after, expected.reason)
                assert "rabbitdlq/consumer/child.py" not in (result.failure.traceback or "")

    async def test_the_message_arrives_as_it_is(self, tmp_path: Path) -> None:
        sent = message("echo", path=str(tmp_path / "noted"))
        async with children() as attempt:
            assert isinstance(await run(attempt, sent), Completed)

        pid, text = (tmp_path / "noted").read_text().strip()[1:-1].split(", ", 1)
        assert int(pid) != os.getpid()
        assert text == repr(sent)

    async def test_so_does_a_payload_of_the_handlers_own_type(self, tmp_path: Path) -> None:
        order = isolated.Order(id=5, tags=[str(tmp_path / "noted")])
        async with children(isolated.ordered, decodes=False) as attempt:
            assert isinstance(await run(attempt, message("x", order)), Completed)
        assert (tmp_path / "noted").read_text().strip() == repr(order)

    async def test_a_payload_that_cannot_be_sent_is_a_failed_attempt(self, tmp_path: Path) -> None:
        async with children(decodes=False) as attempt:
            result = await run(attempt, message("x", threading.Lock()))
            assert isinstance(await run(attempt, message("note", path=str(tmp_path / "noted"))), Completed)
        assert isinstance(result, Failed)
        assert "cannot pickle" in result.failure.message


class TestTimeouts:
    @pytest.mark.parametrize("function", [isolated.plain, isolated.in_loop, isolated.undecorated])
    async def test_at_the_soft_timeout_a_handler_may_clean_up_and_the_child_lives_on(
        self, function: Handler, tmp_path: Path
    ) -> None:
        path = tmp_path / "noted"
        async with children(function, {BaseException: Permanent}, soft=SHORT) as attempt:
            results = [await run(attempt, message("wait", path=str(path))) for _ in range(2)]

        lines = path.read_text().splitlines()
        assert lines[1::2] == ["cleaned up"] * 2
        assert lines[0] == lines[2], "the same child"
        for result in results:
            assert isinstance(result, Failed)
            assert (result.failure.type, result.reason) == ("HandlerTimeout", names.TIMEOUT)
            assert result.rule.kind is Transient, "it is no exception of the handler's"
            assert result.failure.message == "the handler took longer than 0.2 s"
            where = "in plain" if function is isolated.plain else "in in_loop"
            assert where in (result.failure.traceback or "")
            assert 200 <= result.duration_ms < 20_000

    @pytest.mark.parametrize("do", ["deaf", "program"])
    async def test_at_the_hard_timeout_the_child_is_killed_and_says_where_it_was(self, do: str, tmp_path: Path) -> None:
        """The programs that it had started went on beside the retry."""
        path, sent = tmp_path / "noted", message(do, path=str(tmp_path / "noted"))
        async with children(soft=SHORT) as attempt:
            looked_at: list[Running] = []

            async def work() -> Result:
                task = asyncio.current_task()
                assert task is not None
                looked_at.append(running(task, sent))
                return await attempt.run(sent, looked_at[0])

            task = asyncio.create_task(work())
            began, *_ = await noted(path, 2)
            # as the consumer's clock does it
            looked_at[0].cancelled, looked_at[0].told = True, looked_at[0].failure(SHORT)
            task.cancel()
            result = await asyncio.wait_for(task, 5)
            await all_gone(began.split()[1:])

        assert isinstance(result, Interrupted), "for the clock to make a timeout of"
        told = looked_at[0].told
        assert told is not None
        assert "in plain" in (told.traceback or "")

    @pytest.mark.parametrize(("function", "do"), [(isolated.plain, "wait"), (isolated.in_loop, "wait")])
    async def test_at_the_consumers_end_a_handler_is_interrupted_and_may_clean_up(
        self, function: Handler, do: str, tmp_path: Path
    ) -> None:
        path = tmp_path / "noted"
        async with children(function) as attempt:
            task = asyncio.create_task(attempt.run(message(do, path=str(path))))
            await noted(path, 1)
            task.cancel()
            result = await asyncio.wait_for(task, 4)
            assert isinstance(result, Interrupted)
            assert path.read_text().splitlines()[1] == "cleaned up"

    async def test_a_second_cancellation_does_not_wait_for_a_deaf_one(self, tmp_path: Path) -> None:
        path = tmp_path / "noted"
        async with children() as attempt:
            task = asyncio.create_task(attempt.run(message("deaf", path=str(path))))
            await noted(path, 1)
            task.cancel()
            await noted(path, 2)
            task.cancel()
            assert isinstance(await asyncio.wait_for(task, 2), Interrupted)

    async def test_the_clock_does_not_run_while_a_child_starts(self) -> None:
        attempt = ChildAttempt(isolated.plain, {}, Timeouts())
        sent = message("wait", seconds=0)
        task = asyncio.create_task(asyncio.sleep(0))
        known = running(task, sent)
        work = asyncio.create_task(attempt.run(sent, known))
        await asyncio.sleep(0)
        assert known.began == float("inf")
        assert isinstance(await asyncio.wait_for(work, 20), Completed)
        assert known.began < float("inf")
        await attempt.close()
        await task


class TestThread:
    async def test_an_async_handler_that_blocks_harms_nobody(self) -> None:
        blocked, release = threading.Event(), threading.Event()

        async def handle(_: Message) -> None:
            await asyncio.sleep(0)
            blocked.set()
            release.wait(20)

        task = asyncio.create_task(Isolation("thread").attempt(handle, {}, None, Timeouts()).run(message("x")))
        await asyncio.to_thread(blocked.wait, 10)
        assert not task.done(), "this event loop goes on meanwhile"
        release.set()
        assert isinstance(await asyncio.wait_for(task, 10), Completed)

    async def test_it_is_cancelled_and_may_clean_up(self) -> None:
        began, cleaned = threading.Event(), []

        async def handle(_: Message) -> None:
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)
                cleaned.append(threading.current_thread() is not threading.main_thread())

        attempt = Isolation("thread").attempt(handle, {}, None, Timeouts())
        assert attempt.is_async
        task = asyncio.create_task(attempt.run(message("x")))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()

        assert isinstance(await asyncio.wait_for(task, 10), Interrupted)
        assert cleaned == [True]
        assert not attempt.left

    @pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), StopIteration(), KeyboardInterrupt()])
    async def test_whatever_it_raises_is_a_failure_that_begins_in_the_handler(self, error: BaseException) -> None:
        async def handle(_: Message) -> None:
            raise error

        attempt = Isolation("thread").attempt(handle, {ValueError: Permanent}, None, Timeouts())
        result = await run(attempt, message("x"))

        assert isinstance(result, Failed)
        assert result.rule.kind is (Permanent if isinstance(error, ValueError) else Transient)
        assert "rabbitdlq/consumer" not in (result.failure.traceback or "")

    async def test_a_thread_that_is_left_to_itself_is_counted_until_it_ends(self) -> None:
        began, release = threading.Event(), threading.Event()

        def handle(_: Message) -> None:
            began.set()
            release.wait(20)

        attempt = Isolation().attempt(handle, {}, None, Timeouts())
        task = asyncio.create_task(attempt.run(message("x")))
        await asyncio.to_thread(began.wait, 10)
        task.cancel()
        assert isinstance(await task, Interrupted)
        assert len(attempt.left) == 1
        release.set()
        await none_left(attempt)

    async def test_so_is_one_that_is_deaf_and_cancelled_twice(self) -> None:
        deaf = Deaf()
        attempt = Isolation("thread").attempt(deaf, {}, None, Timeouts())
        running = Running(cast(Any, None), cast(Any, None), message("x"), 0.0)
        task = asyncio.create_task(attempt.run(message("x"), running))
        await asyncio.to_thread(deaf.began.wait, 10)
        task.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        assert isinstance(await asyncio.wait_for(task, 2), Interrupted)
        assert (len(attempt.left), running.runs_on) == (1, True)
        deaf.release.set()
        await none_left(attempt)

    async def test_where_a_plain_function_is_can_be_told(self) -> None:
        began, release = threading.Event(), threading.Event()

        def wait_for_the_database() -> None:
            began.set()
            release.wait(20)

        def handle(_: Message) -> None:
            wait_for_the_database()

        attempt = Isolation().attempt(handle, {}, None, Timeouts())
        sent = message("x")
        known: list[Running] = []

        async def work() -> Result:
            task = asyncio.current_task()
            assert task is not None
            known.append(running(task, sent))
            return await attempt.run(sent, known[0])

        task = asyncio.create_task(work())
        await asyncio.to_thread(began.wait, 10)
        told = known[0].failure(SHORT)
        release.set()
        await task

        assert "in handle" in (told.traceback or "")
        assert "in wait_for_the_database" in (told.traceback or "")
        assert "consumer/threads.py" not in (told.traceback or "")


def _closure() -> Callable[[Message], None]:
    def handle(_: Message) -> None: ...

    return handle


UNGUARDED = """
import asyncio, multiprocessing
from rabbitdlq import Consumer, Topology
from rabbitdlq.consumer import pool

def handle(message): ...

if "METHOD" == "spawn":
    pool._context = lambda: multiprocessing.get_context("spawn")
consumer = Consumer(Topology("orders", ["5s"]), handle, url="amqp://127.0.0.1:1/", isolation="process")
asyncio.run(consumer.run())
"""


class Bound:
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def handle(self, _: Message) -> None: ...


class TestConfiguration:
    @pytest.mark.parametrize("function", [lambda _: None, _closure(), Bound().handle])
    def test_a_handler_that_no_other_process_finds_is_refused_before_any_message(self, function: Handler) -> None:
        with pytest.raises(ConfigurationError, match=r"^handler: .* cannot be found by another process"):
            Isolation("process").attempt(function, {}, None, Timeouts())

    def test_so_are_classes_payload_types_and_setups(self) -> None:
        class Local(Exception):
            pass

        for name, options in (
            ("classify", ({Local: Permanent}, None, None)),
            ("payload_type", ({}, Local, None)),
            ("child_setup", ({}, None, lambda: None)),
        ):
            classes, payload_type, setup = options
            with pytest.raises(ConfigurationError, match=f"^{name}: .* cannot be found by another process"):
                Isolation("process", child_setup=setup).attempt(
                    isolated.plain, cast(Any, classes), payload_type, Timeouts()
                )

    def test_an_isolation_that_is_none_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="isolation: 'fork' is none of async, thread, process"):
            Isolation.of("fork", None)

    def test_without_pebble_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def missing(_: str) -> None:
            raise ModuleNotFoundError("No module named 'pebble'", name="pebble")

        monkeypatch.setattr("rabbitdlq.consumer.isolation.importlib.import_module", missing)
        with pytest.raises(ConfigurationError, match=r'pip install "rabbitdlq\[process\]"'):
            Isolation("process").attempt(isolated.plain, {}, None, Timeouts())

    async def test_a_child_that_cannot_be_set_up_is_told_before_any_message(self) -> None:
        attempt = ChildAttempt(isolated.plain, {}, Timeouts(), setup=isolated.broken_setup)
        with pytest.raises(
            ConfigurationError, match=r"could not start: OSError: no log directory \(.*isolated\.py, line"
        ):
            await attempt.start()

    @pytest.mark.parametrize("method", ["forkserver", "spawn"])
    async def test_a_program_that_starts_its_consumer_when_it_is_imported_is_told_what_to_write(
        self, method: str, tmp_path: Path
    ) -> None:
        """All that was said was that a process ended with exit code 0."""
        program = tmp_path / "program.py"
        program.write_text(UNGUARDED.replace("METHOD", method))
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, str(program), stderr=pipe)
        _, told = await asyncio.wait_for(process.communicate(), 60)
        *_, last = told.decode().splitlines()
        assert process.returncode == 1
        assert "isolation: the handler's process could not start: ended before it could begin" in last
        assert last.endswith('has to stand under `if __name__ == "__main__":`')
        assert "freeze_support" not in told.decode(), "once is enough, in our words"

    async def test_no_child_is_left_where_the_store_cannot_be_opened(self, tmp_path: Path) -> None:
        consumer = Consumer(
            TOPOLOGY,
            isolated.plain,
            url="amqp://127.0.0.1:1/",
            isolation="process",
            idempotency=f"sqlite:///{tmp_path / 'missing' / 'store.db'}",
        )
        with pytest.raises(IdempotencyError):
            await consumer.run()
        assert not cast(ChildAttempt, consumer._attempt)._all

    async def test_a_child_that_cannot_be_had_spends_no_attempt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """That there is no process to be had says nothing of the message."""
        async with children() as attempt:
            attempt._idle.clear()

            async def started(_: bytes) -> Child:
                raise ChildNotStarted("fork: resource temporarily unavailable")

            monkeypatch.setattr(Child, "start", started)
            result = await run(attempt, message("note"))
        assert isinstance(result, Failed)
        assert (result.begun, result.rule) == (False, Rule(External))
        assert result.failure.message.endswith("fork: resource temporarily unavailable")

    def test_a_handler_says_it_itself_and_the_consumer_has_the_last_word(self) -> None:
        @handler(isolation="process", max_memory="1GiB")
        def handle(_: Message) -> None: ...

        options = options_of(handle)
        assert options.isolated(None, None, None) == Isolation("process", 2**30)
        assert options.isolated(None, "2GiB", None) == Isolation("process", 2**31)
        for where in ("async", "thread"):
            assert options.isolated(where, None, None) == Isolation(where), "its limit is of a process of its own"
            with pytest.raises(ConfigurationError, match=f"^max_memory: with isolation '{where}'"):
                options.isolated(where, "2GiB", None)
        assert HandlerOptions().isolated("thread", None, None) == Isolation("thread")
        assert HandlerOptions().isolated(None, None, None) == Isolation("async")

    def test_there_is_a_bound_for_handlers_left_to_themselves(self) -> None:
        assert (abandoned_limit(1), abandoned_limit(50)) == (10, 100)
