"""A run in the journal: whatever of it is missing after a kill, what is known to be done was done, and nothing else."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq import names
from rabbitdlq.dead_letters.run_log import PLAN_CHUNK, RunLog, RunState, read_runs
from rabbitdlq.journal import JournalEvent, JournalWriter
from tests.unit.strategies import quick

START = datetime(2024, 1, 1, tzinfo=UTC)


def event(
    kind: str, keys: Iterable[str] = (), batch: int | None = None, *, run: str = "r", **more: Any
) -> JournalEvent:
    return JournalEvent(event=kind, at=START, queue="orders", run=run, keys=tuple(keys), batch=batch, **more)


def started(count: int | None, **more: Any) -> JournalEvent:
    return event(names.RUN_STARTED, operation="replay", count=count, who="ann", **more)


def state_of(events: Iterable[JournalEvent]) -> RunState:
    return read_runs(events)["r"]


def again(data: st.DataObject) -> bool:
    return data.draw(st.booleans())


class Story:
    """A run as it went: by one process after the other, each killed but the last; and what is true of it."""

    def __init__(self, data: st.DataObject) -> None:
        # few different keys: letters that are equal in all share one
        self.plan = data.draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=14))
        self.journal = [started(len(self.plan))]
        for number, at in enumerate(range(0, len(self.plan), 4)):
            self.journal.append(event(names.RUN_PLANNED, self.plan[at : at + 4], number))
        self.done: Counter[str] = Counter()
        #: begun in a batch that was never settled
        self.in_doubt: Counter[str] = Counter()
        for process in range(data.draw(st.integers(1, 3))):
            self._process(data, process)

    def _process(self, data: st.DataObject, process: int) -> None:
        state = state_of(self.journal)
        assert Counter(state.done) == self.done
        if process:
            self.journal.append(started(None))
        number = state.next_batch if process else 0
        unsettled: list[tuple[int, list[str], list[str]]] = []
        left: list[str] = list((Counter(self.plan) - self.done).elements())
        while left and again(data):
            size = data.draw(st.integers(1, 4))
            batch, left = left[:size], left[size:]
            self.journal.append(event(names.RUN_SENDING, batch, number))
            undone = data.draw(st.lists(st.sampled_from(batch), max_size=len(batch), unique=True))
            unsettled.append((number, batch, undone))
            number += 1
            # two kinds of events overtake each other, and batches are through in any order
            while unsettled and again(data):
                of, batch, undone = unsettled.pop(data.draw(st.integers(0, len(unsettled) - 1)))
                self.journal.append(event(names.RUN_SETTLED, undone, of))
                self.done += Counter(batch) - Counter(undone)
        for _, batch, _ in unsettled:
            self.in_doubt.update(batch)


@given(st.data())
@quick
def test_after_any_number_of_kills_every_planned_letter_is_done_or_in_flight_or_untouched(data: st.DataObject) -> None:
    story = Story(data)

    state = state_of(story.journal)

    assert state.planned == story.plan
    assert Counter(state.done) == story.done
    assert not Counter(state.done) - Counter(story.plan), "no letter is done twice"
    open_ = Counter(story.plan) - story.done
    assert set(state.in_flight) == {key for key in story.in_doubt if open_[key]}
    assert len(state.in_flight) == len(set(state.in_flight))
    assert state.next_batch > max(state.sending, default=-1)


@given(st.data())
@quick
def test_a_journal_that_ends_anywhere_calls_nothing_done_that_was_not_and_names_all_that_was_begun(
    data: st.DataObject,
) -> None:
    story = Story(data)
    end = data.draw(st.integers(1, len(story.journal)))

    state = state_of(story.journal[:end])

    assert state.is_planned == (
        sum(each.event == names.RUN_PLANNED for each in story.journal[:end]) * 4 >= len(story.plan)
    )
    done, begun, refused = Counter(state.done), Counter[str](), Counter[str]()
    for each in story.journal[:end]:
        if each.event == names.RUN_SENDING:
            begun.update(each.keys)
        elif each.event == names.RUN_SETTLED:
            refused.update(each.keys)
    assert done <= story.done
    assert done <= begun
    for key in begun:
        if begun[key] > refused[key] and state.is_planned:
            assert key in done or key in state.in_flight
    assert state.next_batch > max(
        (each.batch or 0 for each in story.journal[:end] if each.event == names.RUN_SENDING), default=-1
    )


def test_one_of_two_equal_letters_can_be_in_flight_while_the_other_is_done() -> None:
    """The one in flight was not named: a set of keys took it for the one that was done."""
    journal = [started(2), event(names.RUN_PLANNED, "aa", 0), event(names.RUN_SENDING, "a", 0)]
    journal += [event(names.RUN_SETTLED, "", 0), event(names.RUN_SENDING, "a", 1)]

    assert (state_of(journal).done, state_of(journal).in_flight) == (["a"], ["a"])


def test_what_was_in_flight_is_not_any_more_once_it_was_sent_again() -> None:
    journal = [started(2), event(names.RUN_PLANNED, "ab", 0), event(names.RUN_SENDING, "ab", 0), started(None)]
    number = state_of(journal).next_batch
    journal += [event(names.RUN_SENDING, "ab", number), event(names.RUN_SETTLED, "b", number)]

    assert (state_of(journal).done, state_of(journal).in_flight) == (["a"], ["b"])


def test_a_killed_process_and_its_heir_never_use_one_number_for_two_batches() -> None:
    """What the killed one wrote last may come after the heir's look at the journal: a broker in an alarm reads late."""
    journal = [started(4), event(names.RUN_PLANNED, "abcd", 0), event(names.RUN_SENDING, "a", 0)]
    heirs = state_of(journal).next_batch
    late = event(names.RUN_SENDING, "b", 1)
    journal += [started(None), event(names.RUN_SENDING, "c", heirs), late, event(names.RUN_SETTLED, "", heirs)]

    assert state_of(journal).done == ["c"]
    assert state_of(journal).in_flight == ["a", "b"]
    assert state_of(journal).next_batch > heirs


def test_a_run_that_is_gone_on_with_is_not_ended_until_it_ends_again() -> None:
    journal = [started(1, archive="/a"), event(names.RUN_PLANNED, "a", 0)]
    stopped = event(names.REPLAYED, outcome="stopped", counts={"done": 0})
    assert state_of([*journal, stopped]).info().outcome == "stopped"

    journal += [stopped, started(None, archive="/b")]

    info = state_of(journal).info()
    assert (info.outcome, info.ended_at, info.planned, info.archive, info.archives) == (
        "unfinished",
        None,
        1,
        "/a",
        ("/a", "/b"),
    )
    assert state_of([*journal, event(names.REPLAYED, outcome="done")]).info().outcome == "done"


def test_a_run_whose_beginning_is_older_than_the_journal_is_not_known() -> None:
    """The start of its second process was taken for the first: a run of nothing, which was resumed, and done."""
    lost = [started(3), event(names.RUN_PLANNED, "abc", 0), event(names.RUN_SENDING, "ab", 0)]
    kept = [event(names.RUN_SENDING, "c", 1), started(None), event(names.RUN_SETTLED, "", 1)]

    assert read_runs(kept) == {}
    assert state_of([*lost, *kept]).done == ["c"]


def test_runs_are_told_apart_and_events_of_others_are_no_runs() -> None:
    others = [JournalEvent(event=names.FAILED, at=START, queue="orders", message_id="17")]
    journal = [started(1), event(names.RUN_STARTED, run="s", count=0), *others]

    assert list(read_runs(journal)) == ["r", "s"]


class Writer:
    """Keeps what is written; a confirm comes when the test says so, unless it answers at once."""

    def __init__(self, *, answers: bool | None = True) -> None:
        self.answers = answers
        self.events: list[JournalEvent] = []
        self.asked: list[asyncio.Future[bool]] = []

    def begin(self, event: JournalEvent) -> "asyncio.Future[bool]":
        self.events.append(event)
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        if self.answers is not None:
            future.set_result(self.answers)
        self.asked.append(future)
        return future

    async def append(self, event: JournalEvent) -> bool:
        return await self.begin(event)

    @property
    def kinds(self) -> list[str]:
        return [event.event for event in self.events]


def log_to(writer: Writer, resumed: RunState | None = None, named: Sequence[str] = ()) -> RunLog:
    return RunLog(cast(JournalWriter, writer), "orders", "r", "replay", resumed, named)


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_a_log_writes_is_what_is_read() -> None:
    writer, keys = Writer(), [f"k{number}" for number in range(PLAN_CHUNK + 1)]
    log = log_to(writer)
    await log.start(keys, who="ann")
    batch = await log.sending(keys[:3])
    log.settled(batch, ["k1"])
    assert await log.sending(keys[3:5]) == batch + 1

    state = state_of(writer.events)

    assert state.is_planned
    assert (state.planned, state.done, state.in_flight) == (keys, ["k0", "k2"], ["k3", "k4"])
    await log.end(who="ann", amqp_user="guest", ids=["m0"], count=1, outcome="stopped")
    assert (state_of(writer.events).info().outcome, log.written) == ("stopped", True)


async def test_what_was_in_flight_stays_named_when_it_is_done_and_the_next_process_is_killed_too() -> None:
    """A run that was killed twice named what was in flight at the second kill only, and not the copies of the first."""
    writer = Writer()
    await log_to(writer).start(["a", "b", "c"])
    await log_to(writer).sending(["a", "b"])

    for names_now in (["id-a", "id-b"], ["id-c"]):
        state = state_of(writer.events)
        named = list(state.named)
        log = log_to(writer, state, named)
        await log.go_on()
        named.extend(names_now)
        log.settled(await log.sending(state.in_flight), [])
        assert await log.sending(["c"]) == state.next_batch + 1

    assert state_of(writer.events).named == ["id-a", "id-b", "id-c"]
    assert state_of(writer.events).info().in_flight == ("id-a", "id-b", "id-c")


async def test_nothing_is_sent_before_the_whole_plan_is_confirmed() -> None:
    writer = Writer(answers=None)
    starting = asyncio.create_task(log_to(writer).start(["k"] * (PLAN_CHUNK + 1)))
    await turns()
    assert writer.kinds == [names.RUN_STARTED]
    writer.asked[0].set_result(True)
    await turns()
    assert writer.kinds == [names.RUN_STARTED, names.RUN_PLANNED, names.RUN_PLANNED]
    writer.asked[2].set_result(True)
    await turns()
    assert not starting.done()
    writer.asked[1].set_result(True)
    await starting


async def test_the_end_is_told_when_every_batch_is_settled_in_the_journal() -> None:
    """Else a run could be over in the journal before letters of it are done there."""
    writer = Writer()
    log = log_to(writer)
    batch = await log.sending(["a"])
    writer.answers = None
    log.settled(batch, [])
    ending = asyncio.create_task(log.end(who="ann", amqp_user="guest", ids=[], count=1))
    await turns()
    assert writer.kinds == [names.RUN_SENDING, names.RUN_SETTLED]
    writer.asked[-1].set_result(True)
    await turns()
    assert writer.kinds[-1] == names.REPLAYED
    writer.asked[-1].set_result(True)
    await ending


@pytest.mark.parametrize("lost", ["plan", "batch", "end"])
async def test_a_journal_that_cannot_be_written_stops_nothing_and_is_told(lost: str) -> None:
    writer = Writer()
    log = log_to(writer)
    for step in ("plan", "batch", "end"):
        writer.answers = step != lost
        if step == "plan":
            await log.start(["a"])
        elif step == "batch":
            log.settled(await log.sending(["a"]), [])
        else:
            await log.end(who="ann", amqp_user="guest", ids=[], count=1)

    assert not log.written
    assert writer.kinds[-1] == names.REPLAYED
    # without a plan the rest is of no use, and trying to write it disturbs the letters
    assert (names.RUN_SENDING in writer.kinds) == (names.RUN_SETTLED in writer.kinds) == (lost != "plan")


def test_a_run_without_its_whole_plan_cannot_be_gone_on_with() -> None:
    assert not state_of([started(3), event(names.RUN_PLANNED, "ab", 0)]).is_planned
    assert not state_of([started(3)]).is_planned
    assert state_of([started(3), event(names.RUN_PLANNED, "c", 1), event(names.RUN_PLANNED, "ab", 0)]).planned == [
        "a",
        "b",
        "c",
    ]


def test_times_are_those_of_the_first_start_and_the_last_end() -> None:
    later = START + timedelta(hours=1)
    end = JournalEvent(event=names.REPLAYED, at=later, queue="orders", run="r", outcome="done", counts={"done": 1})

    info = state_of([started(1), event(names.RUN_PLANNED, "a", 0), started(None), end]).info()

    assert (info.started_at, info.ended_at, info.counts) == (START, later, {"done": 1})
