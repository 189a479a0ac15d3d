"""Coalesced acks: every delivery is told once and as it was meant, whatever the order in which handlers end."""

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq.broker.frames import How
from rabbitdlq.broker.settlements import Settlements
from tests.unit.strategies import quick

HOWS: tuple[How, ...] = ("ack", "dead", "back")


class Broker:
    """What RabbitMQ makes of the answers: "multiple" takes every open delivery up to the tag."""

    def __init__(self, deliveries: int) -> None:
        self.open = set(range(1, deliveries + 1))
        self.ended: dict[int, How] = {}

    def take(self, answers: Iterable[tuple[How, int, bool]]) -> int:
        frames = 0
        for how, tag, multiple in answers:
            frames += 1
            assert tag in self.open, f"PRECONDITION_FAILED - unknown delivery tag {tag}"
            for each in sorted(self.open) if multiple else [tag]:
                if each <= tag:
                    self.open.remove(each)
                    self.ended[each] = how
        return frames


def opened(deliveries: int) -> Settlements:
    settlements = Settlements()
    for tag in range(1, deliveries + 1):
        settlements.opened(tag)
    return settlements


@st.composite
def endings(draw: st.DrawFn) -> tuple[int, list[tuple[int, How]], list[int]]:
    """So many deliveries, some of which end in some order, with a flush after these places of it."""
    deliveries = draw(st.integers(1, 40))
    order = draw(st.permutations(range(1, deliveries + 1)))
    ending = order[: draw(st.integers(0, deliveries))]
    hows = [(tag, draw(st.sampled_from(HOWS[: draw(st.integers(1, 3))]))) for tag in ending]
    return deliveries, hows, draw(st.lists(st.integers(0, deliveries), max_size=6))


@given(endings())
@quick
def test_every_delivery_ends_as_it_was_told_and_none_that_is_open_is_swept_along(
    case: tuple[int, list[tuple[int, How]], list[int]],
) -> None:
    """C45: "multiple" settled neighbours that were still running."""
    deliveries, hows, flushes = case
    settlements, broker = opened(deliveries), Broker(deliveries)
    for place, (tag, how) in enumerate(hows):
        if place in flushes:
            broker.take(settlements.frames())
            assert broker.ended == dict(hows[:place])
        assert settlements.settle(tag, how)
        assert not settlements.settle(tag, "ack"), "the broker closes the channel over a second answer"
    broker.take(settlements.frames())

    assert broker.ended == dict(hows)
    assert broker.open == set(range(1, deliveries + 1)) - set(broker.ended)
    assert len(settlements) == 0
    assert settlements.frames() == []
    assert not any(settlements.settle(tag, "ack") for tag, _ in hows)


def test_a_run_that_ended_alike_is_one_frame_and_the_others_wait_for_nobody() -> None:
    settlements = opened(8)
    for tag in (1, 2, 3, 5, 6):
        settlements.settle(tag, "ack")

    assert settlements.frames() == [("ack", 3, True), ("ack", 5, False), ("ack", 6, False)]

    settlements.settle(4, "dead")
    settlements.settle(7, "dead")
    settlements.settle(8, "ack")

    assert settlements.frames() == [("dead", 7, True), ("ack", 8, False)]
    assert settlements.open == 0


def test_the_last_of_three_is_nacked_and_the_first_two_stay_open() -> None:
    """C45 to the letter."""
    settlements, broker = opened(3), Broker(3)
    settlements.settle(3, "dead")
    broker.take(settlements.frames())
    assert (broker.ended, broker.open) == ({3: "dead"}, {1, 2})

    settlements.settle(1, "ack")
    broker.take(settlements.frames())
    assert (broker.ended, broker.open) == ({3: "dead", 1: "ack"}, {2})


def test_one_that_stays_open_costs_no_memory_for_those_that_pass_it() -> None:
    """A hung handler, and five million others: each was remembered until it ended."""
    settlements = opened(1)
    for tag in range(2, 20_000):
        settlements.opened(tag)
        settlements.settle(tag, "ack")
        settlements.frames()

    assert settlements.open == 1
    assert sum(len(value) for value in vars(settlements).values()) == 1


def test_what_was_swept_by_hand_is_forgotten() -> None:
    settlements = opened(10)
    settlements.swept(7)

    assert settlements.open == 3
    assert not settlements.settle(7, "ack")
    assert settlements.settle(8, "ack")
