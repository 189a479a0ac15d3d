"""What a selection is made of: what can be meant is taken, and what cannot is told before a letter is touched."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest

from rabbitdlq import ConfigurationError, DLQManager, NumberRange, Selection, Topology, Where
from tests.unit.test_selection import chosen, letter

TOPOLOGY = Topology("orders", ["5s"])


@pytest.mark.parametrize("name", ["ids", "reasons"])
def test_one_text_is_no_set_of_texts(name: str) -> None:
    """As a text it matched by its parts: "not-permanent-please" meant "permanent", and five letters were deleted."""
    with pytest.raises(ConfigurationError, match=rf"^{name}: 'not-permanent' is one text; write a list, like \["):
        chosen(**{name: "not-permanent"})


@pytest.mark.parametrize("many", [list, tuple, set, frozenset, iter, dict.fromkeys], ids=lambda kind: kind.__name__)
def test_any_collection_of_texts_is_taken_and_frozen(many: Callable[[list[str]], Any]) -> None:
    selection = Selection(ids=many(["m1", "12"]), reasons=many(["exhausted"]))

    assert (selection.ids, selection.reasons) == (frozenset({"m1", "12"}), frozenset({"exhausted"}))
    assert selection.matches(letter())
    assert not selection.matches(letter(reason="exhaust"))
    assert replace(selection, limit=3) == Selection(["m1", "12"], ["exhausted"], limit=3)
    assert hash(selection) == hash(replace(selection))


@pytest.mark.parametrize("ago", ["2h", timedelta(hours=2)])
def test_a_time_may_be_told_by_how_long_ago_it_was(ago: Any) -> None:
    before = datetime.now(UTC)
    selection = Selection(older_than=ago, newer_than=ago)
    after = datetime.now(UTC)

    for moment in (selection.older_than, selection.newer_than):
        assert moment is not None
        assert before <= moment + timedelta(hours=2) <= after
    assert replace(selection, limit=1).older_than == selection.older_than


def test_numbers_and_conditions_may_be_written_as_on_the_command_line() -> None:
    written = Selection(attempts=3, lap=">1", where="payload.customer.id == 42")

    assert written == Selection(
        attempts=NumberRange(3, 3), lap=NumberRange(2), where=Where("payload.customer.id == 42")
    )


@pytest.mark.parametrize(
    ("filters", "reason"),
    [
        ({"ids": [1]}, "ids: 1 cannot be used; give texts"),
        ({"ids": 12}, "ids: 12 is no list of texts"),
        ({"reasons": b"x"}, "reasons: 120 cannot be used; give texts"),
        ({"error": ["KeyError"]}, r"error: \['KeyError'\] cannot be used; give a text"),
        ({"fingerprint": 123456}, "fingerprint: 123456 cannot be used"),
        ({"routing_key": 5}, "routing_key: 5 cannot be used"),
        ({"older_than": "yesterday"}, "older_than: 'yesterday' is no time; give a datetime with a time zone, or how"),
        ({"newer_than": "-2h"}, "newer_than: '-2h' is no time"),
        ({"newer_than": date(2026, 3, 1)}, r"newer_than: datetime.date\(2026, 3, 1\) is no time"),
        ({"older_than": timedelta.max}, "older_than: .* is no time"),
        ({"attempts": "many"}, "attempts: 'many' is no number or range"),
        ({"attempts": [3]}, r"attempts: \[3\] cannot be used; give a number"),
        ({"lap": True}, "lap: True cannot be used"),
        ({"where": 5}, "where: 5 cannot be used; give a condition"),
        ({"where": "payload.a = 1"}, "where: 'payload.a = 1', column"),
        ({"limit": "3"}, "limit: '3' is no whole number"),
    ],
)
def test_what_cannot_be_meant_is_told_when_the_selection_is_made(filters: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{reason}"):
        Selection(**filters)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda dlq: dlq.replay(["m1"]), r"what: \['m1'\] cannot be used; give an id, a plan, or Selection\(ids=\["),
        (lambda dlq: dlq.drop({"m1"}, archive=None), "what: .* cannot be used"),
        (lambda dlq: dlq.move(None, "later"), "what: None cannot be used"),
        (lambda dlq: dlq.replay(Selection(ids="12")), "ids: '12' is one text"),
        (lambda dlq: dlq.peek(5, "m1"), r"selection: 'm1' cannot be used; give a Selection, like Selection\(ids=\["),
        (lambda dlq: dlq.plan("m1"), "selection: 'm1' cannot be used"),
        (lambda dlq: dlq.groups(since="soon"), "since: 'soon' is no time"),
        (lambda dlq: dlq.groups(since=datetime(2026, 3, 1)), "since 2026-03-01T00:00:00: it has no time zone"),
        (lambda dlq: dlq.groups(selection=["m1"]), "selection: .* cannot be used"),
    ],
)
async def test_the_manager_says_what_it_cannot_take_before_it_asks_the_broker(
    call: Callable[[Any], Awaitable[object]], reason: str
) -> None:
    dlq = DLQManager(TOPOLOGY, url="amqp://127.0.0.1:1/")

    with pytest.raises(ConfigurationError, match=f"^{reason}"):
        await call(dlq)
    await dlq.close()


@pytest.mark.parametrize("key", ["ids", "reasons"])
@pytest.mark.parametrize("none", [[], (), set(), iter(())])
def test_a_list_of_none_is_not_taken_for_any(key: str, none: Any) -> None:
    """A program that found nothing to name would delete everything."""
    with pytest.raises(ConfigurationError, match=f"{key}: there are none; leave it out if any will do"):
        Selection(**{key: none})
    assert Selection(limit=1) == replace(Selection(), limit=1), "unless nothing is said"
