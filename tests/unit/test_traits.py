"""What bulk operations know of a letter is what reading it whole tells, and what they send is what it would be."""

import json
from typing import Any

from hypothesis import assume, example, given
from hypothesis import strategies as st

from rabbitdlq import names
from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters.traits import Traits, key_of, traits_of
from rabbitdlq.fields import encode_value
from rabbitdlq.parking import park_properties, quick_replay_properties, replay_properties
from rabbitdlq.wire import Headers, Properties
from tests.unit.strategies import entry, properties, quick, raw_values
from tests.unit.test_parking import FRAME, message, parking, record

#: our own headers with values of ours and of anybody's, and those that harm
_OURS = sorted(names.OURS)
_HARM = [
    "x-death",
    "x-delivery-count",
    "x-acquired-count",
    "x-first-death-queue",
    "CC",
    "BCC",
    "x-mine",
    "Cc",
    "tenant",
]
_values = st.one_of(
    raw_values,
    st.sampled_from(["p1", "orders", "exhausted", "2024-01-01T12:00:00Z", "größe", "", 3, 0, 2**40, True, None]).map(
        encode_value
    ),
)
tables = st.lists(
    st.builds(lambda name, value: entry(name.encode(), value), st.sampled_from(_OURS + _HARM), _values), max_size=8
).map(b"".join)
foreign = st.builds(lambda value, table: value.but(headers=Headers.parse(table)), properties, tables)


def parked(value: Properties, body: bytes = b"{}", **more: Any) -> bytes:
    return park_properties(message(value, body), parking(**more), FRAME).encode()


def wire_of(encoded: bytes) -> Properties:
    return Properties.parse(encoded)


def by_reading(body: bytes, encoded: bytes) -> DeadLetter:
    return DeadLetter.parse("orders", body, wire_of(encoded))


def same(traits: Traits, letter: DeadLetter) -> None:
    """Every trait is what the letter says."""
    assert (traits.key, traits.id, traits.lap) == (key_of(letter), letter.id, letter.lap)
    assert (traits.repeated, traits.reason, traits.queue) == (letter.repeated, letter.reason, letter.queue)
    assert (traits.parked_at, traits.size) == (letter.moved_to_dlq_at, len(letter.body))
    if letter.error is not None:
        assert traits.fingerprint == letter.error.fingerprint
    assert traits.readable


@quick
@given(foreign, st.binary(max_size=20))
@example(Properties(headers=Headers({names.PARK_ID: "p1", names.LAP: True}), message_id="a"), b"")
@example(Properties(headers=Headers({names.PARK_ID: "p1", "x-death": []}), message_id="a"), b"")
def test_traits_of_whatever_lies_there_are_those_of_the_letter(value: Properties, body: bytes) -> None:
    same(traits_of("orders", body, value.encode()), by_reading(body, value.encode()))


@quick
@given(properties, st.binary(max_size=20), st.booleans())
def test_traits_of_what_a_consumer_parked_are_those_of_the_letter(
    value: Properties, body: bytes, repeated: bool
) -> None:
    encoded = parked(value, body, repeated=repeated, history=[record(1)])
    traits = traits_of("orders", body, encoded)
    same(traits, by_reading(body, encoded))
    assert traits.plain == (wire_of(encoded).reply_to is None and "" not in value.table)


@quick
@given(properties, st.binary(max_size=20), st.booleans())
def test_the_quick_way_back_to_work_is_the_long_one(value: Properties, body: bytes, looked_at: bool) -> None:
    assume("" not in value.table)  # whoever meets a header without a name looks closely
    wire = wire_of(parked(value.but(reply_to=None), body))
    if looked_at:  # the queue counts deliveries, and on the way back the count is in the way
        wire = wire.but(headers=wire.table.plus({"x-delivery-count": 7}))
    letter = DeadLetter.parse("orders", body, wire)
    traits = traits_of("orders", body, wire.encode())
    assert traits.plain

    quickly = Properties.parse(quick_replay_properties(wire.encode(), traits.lap, traits.key))
    thoroughly = replay_properties(letter)

    assert quickly.but(headers=None).encode() == thoroughly.but(headers=None).encode()
    assert _plain(quickly.table) == _plain(thoroughly.table)
    assert quickly.table[names.LAP] == letter.lap + 1


def _plain(headers: Headers) -> dict[str, Any]:
    """The bytes of each value, and what JSON texts say: they may be written in another way."""
    values: dict[str, Any] = {name: headers.raw(name) for name in headers}
    if names.ORIGINAL in headers:
        values[names.ORIGINAL] = json.loads(headers[names.ORIGINAL])
    return values


def test_properties_that_are_broken_are_told_and_the_letter_has_a_key_all_the_same() -> None:
    traits = traits_of("orders", b"body", b"\x20\x00\x00\x00\x00\xff")
    assert not traits.readable
    assert not traits.plain
    assert traits.key.startswith("bare-")
    assert traits == traits_of("orders", b"body", b"\x20\x00\x00\x00\x00\xff")


def test_a_key_is_the_same_at_every_reading_and_another_for_another_letter() -> None:
    """A quorum queue counts each look."""
    bare = Properties(headers=Headers({"tenant": "acme"}), message_id="a")
    looked_at = bare.but(headers=bare.table.plus({"x-delivery-count": 3, "x-acquired-count": 4}))
    key = traits_of("orders", b"1", bare.encode()).key
    assert traits_of("orders", b"1", looked_at.encode()).key == key
    other = bare.but(headers=Headers({"tenant": "other"}))
    keys = {key, traits_of("orders", b"2", bare.encode()).key, traits_of("orders", b"1", other.encode()).key}
    assert len(keys) == 3
