"""What became of letters that were sent back, as the journal tells it: late, twice, and of somebody else's too."""

import asyncio
import time
from datetime import UTC, datetime, timedelta

from rabbitdlq import names
from rabbitdlq.dead_letters.watch import Outcomes
from rabbitdlq.journal import JournalEvent


def told(event: str, id: str = "a", *, lap: int = 2, attempt: int = 1) -> JournalEvent:
    return JournalEvent(event=event, at=datetime.now(UTC), queue="orders", message_id=id, lap=lap, attempt=attempt)


def after(*events: JournalEvent, ids: tuple[str, ...] = ("a",)) -> list[int]:
    """Recovered, back, retrying, open: of letters that were sent for their second lap."""
    outcomes = Outcomes()
    for id in ids:
        outcomes.expect(id, 2)
    for event in events:
        outcomes.take(event)
    counts = outcomes.counts()
    assert list(counts) == ["recovered", "back", "retrying", "open"]
    assert sum(counts.values()) == len(ids)
    return list(counts.values())


def test_a_letter_is_open_until_it_is_heard_of() -> None:
    assert after() == [0, 0, 0, 1]
    assert after(told(names.SUCCEEDED)) == [1, 0, 0, 0]
    assert after(told(names.FAILED)) == [0, 0, 1, 0]
    assert after(told(names.FAILED), told(names.RECOVERED, attempt=2)) == [1, 0, 0, 0]
    assert after(told(names.FAILED), told(names.FAILED, attempt=2), told(names.PARKED, attempt=2)) == [0, 1, 0, 0]
    assert after(told(names.PARKED)) == [0, 1, 0, 0]
    # the worker died before it could nack, and the same attempt was made again
    assert after(told(names.FAILED), told(names.SUCCEEDED)) == [1, 0, 0, 0]


def test_what_is_of_another_message_or_lap_or_comes_late_changes_nothing() -> None:
    assert after(told(names.SUCCEEDED, "b"), told(names.PARKED, lap=1), told(names.SUCCEEDED, lap=3)) == [0, 0, 0, 1]
    assert after(told(names.REPLAYED), told(names.MARKER)) == [0, 0, 0, 1]
    assert after(told(names.PARKED), told(names.FAILED), told(names.SUCCEEDED)) == [0, 1, 0, 0]
    assert after(told(names.RECOVERED), told(names.FAILED)) == [1, 0, 0, 0]


def test_two_letters_of_one_id_are_two() -> None:
    """A producer used the id twice, or messages without ids are equal: there seemed to be one letter less."""
    twins = ("a", "a")
    assert after(ids=twins) == [0, 0, 0, 2]
    assert after(told(names.SUCCEEDED), ids=twins) == [1, 0, 0, 1]
    assert after(told(names.SUCCEEDED), told(names.SUCCEEDED), ids=twins) == [2, 0, 0, 0]
    assert after(told(names.FAILED), told(names.FAILED, attempt=2), ids=twins) == [0, 0, 1, 1]
    assert after(told(names.FAILED), told(names.FAILED), told(names.PARKED), ids=twins) == [0, 1, 1, 0]
    # the first failed and waits, the second succeeds
    assert after(told(names.FAILED), told(names.SUCCEEDED), ids=twins) == [1, 0, 1, 0]
    assert after(told(names.FAILED), told(names.SUCCEEDED), told(names.RECOVERED), ids=twins) == [2, 0, 0, 0]


def test_what_was_not_sent_after_all_is_not_waited_for() -> None:
    outcomes = Outcomes()
    outcomes.expect("a", 2)
    outcomes.expect("b", 2)
    outcomes.forget("a", 2)
    outcomes.forget("a", 2)
    outcomes.forget("never", 2)
    assert outcomes.counts() == {"recovered": 0, "back": 0, "retrying": 0, "open": 1}
    outcomes.take(told(names.SUCCEEDED, "b"))
    outcomes.forget("b", 2)
    assert outcomes.counts()["recovered"] == 1


async def test_waiting_ends_with_the_last_letter_with_the_time_or_when_it_is_stopped() -> None:
    stop, long = asyncio.Event(), timedelta(seconds=60)
    outcomes = Outcomes()
    await asyncio.wait_for(outcomes.ended(long, stop), 5)
    outcomes.expect("a", 2)
    outcomes.expect("b", 2)

    last = asyncio.create_task(outcomes.ended(long, stop))
    outcomes.take(told(names.FAILED))
    await asyncio.sleep(0)
    outcomes.take(told(names.SUCCEEDED, "b"))
    await asyncio.sleep(0.05)
    assert not last.done(), "one is on the ladder"
    stop.set()
    await asyncio.wait_for(last, 5)

    await asyncio.wait_for(outcomes.ended(timedelta(milliseconds=10), asyncio.Event()), 5)
    assert outcomes.counts()["retrying"] == 1


async def test_very_many_letters_are_followed_without_counting_them_anew_each_time() -> None:
    outcomes, many = Outcomes(), 20_000
    for number in range(many):
        outcomes.expect(str(number), 2)
    waiting = asyncio.create_task(outcomes.ended(timedelta(seconds=60), asyncio.Event()))
    began = time.process_time()
    for number in range(many):
        outcomes.take(told(names.SUCCEEDED, str(number)))
        await asyncio.sleep(0)
    await asyncio.wait_for(waiting, 5)
    assert time.process_time() - began < 4
