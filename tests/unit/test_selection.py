"""Which dead letters are meant: every filter alone, together, and on letters that lack what is asked for."""

import contextlib
import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq import ConfigurationError, DeadLetter, NumberRange, Selection, Where
from rabbitdlq.dead_letters.where import Tally
from rabbitdlq.failure import Failure
from rabbitdlq.wire import Headers, Properties
from tests.unit.strategies import json_values, quick
from tests.unit.test_dead_letter import CRASHED

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
KEY_ERROR = Failure("KeyError", "'customer'\nand more", None, "ab12cd34ef567890")
BODY = json.dumps(
    {
        "customer": {"id": 42, "name": "Ada", "vip": True},
        "items": [{"sku": "A-1", "price": 9.5}, {"sku": "B-2", "price": 20}],
        "note": None,
        "get": 7,
        "first name": "Ada",
    }
).encode()


def letter(body: bytes = BODY, **changes: Any) -> DeadLetter:
    """Parked by a consumer, at noon."""
    parsed = DeadLetter.parse(
        "orders",
        body,
        Properties(
            message_id="m1", headers=Headers({"tenant": "acme", "x-tries": 3}), priority=4, timestamp=1_770_000_000
        ),
    )
    known: dict[str, Any] = {
        "reason": "exhausted",
        "error": KEY_ERROR,
        "attempts": 3,
        "max_attempts": 3,
        "routing_key": "order.created",
        "exchange": "shop",
        "moved_to_dlq_at": NOON,
        "lap": 1,
        "park_id": "p1",
    }
    return replace(parsed, **(known | changes))


#: one that the broker parked when the delivery limit was reached: no error, no history of ours
BARE = DeadLetter.parse("orders", b"\xff", Properties(headers=Headers({"x-death": CRASHED})))
#: nobody knows anything of it
UNKNOWN = DeadLetter.parse("orders", b"{}", Properties())


def chosen(**filters: Any) -> Selection:
    return Selection(**filters)


class TestFilters:
    @pytest.mark.parametrize(
        "selection",
        [
            chosen(),
            chosen(ids=frozenset({"m1", "other"})),
            chosen(ids=frozenset({"p1"})),
            chosen(reasons=frozenset({"permanent", "exhausted"})),
            chosen(error="KeyError"),
            chosen(error="KeyError: *"),
            chosen(error="Key*: 'customer'"),
            chosen(error="*cust?mer*"),
            chosen(fingerprint="ab12cd34ef567890"),
            chosen(fingerprint="ab12cd"),
            chosen(routing_key="order.created"),
            chosen(routing_key="order.*"),
            chosen(older_than=NOON + timedelta(seconds=1)),
            chosen(newer_than=NOON),
            chosen(newer_than=NOON.astimezone(timezone(timedelta(hours=5)))),
            chosen(attempts=NumberRange.parse("3")),
            chosen(attempts=NumberRange.parse("2-5")),
            chosen(lap=NumberRange.parse("<2")),
            chosen(where=Where("payload.customer.id == 42")),
            chosen(held=True, limit=0),
        ],
        ids=lambda selection: selection.describe(),
    )
    def test_a_letter_that_has_what_is_asked_for_belongs_to_it(self, selection: Selection) -> None:
        assert selection.matches(letter())

    @pytest.mark.parametrize(
        "selection",
        [
            chosen(ids=frozenset({"M1"})),
            chosen(reasons=frozenset({"permanent"})),
            chosen(error="keyerror"),
            chosen(error="Key"),
            chosen(error="*and more*"),
            chosen(fingerprint="ab12ce"),
            chosen(fingerprint="12cd34"),
            chosen(routing_key="order"),
            chosen(routing_key="Order.*"),
            chosen(older_than=NOON),
            chosen(newer_than=NOON + timedelta(microseconds=1)),
            chosen(attempts=NumberRange.parse(">3")),
            chosen(lap=NumberRange.parse(">1")),
            chosen(where=Where("payload.customer.id == 43")),
        ],
        ids=lambda selection: selection.describe(),
    )
    def test_and_one_that_has_something_else_does_not(self, selection: Selection) -> None:
        assert not selection.matches(letter())

    def test_filters_combine(self) -> None:
        both = chosen(reasons=frozenset({"exhausted"}), error="KeyError*", attempts=NumberRange.parse(">=3"))

        assert both.matches(letter())
        assert not both.matches(letter(reason="permanent"))
        assert not both.matches(letter(error=replace(KEY_ERROR, type="ValueError")))
        assert not both.matches(letter(attempts=1))

    def test_a_pattern_is_the_whole_text_and_its_brackets_are_brackets(self) -> None:
        """Error texts are full of them: as a class of characters, "[Errno 111]" is one character."""
        refused = letter(error=Failure("ConnectionRefusedError", "[Errno 111] Connection refused", None, "ab12cd"))

        assert chosen(error="ConnectionRefusedError: [Errno 111]*").matches(refused)
        assert not chosen(error="ConnectionRefusedError: [Errno 112]*").matches(refused)
        assert not chosen(error="*Errno").matches(refused)

    @pytest.mark.parametrize("each", [BARE, UNKNOWN], ids=["delivery limit", "unknown"])
    @pytest.mark.parametrize(
        "selection",
        [
            chosen(error="*"),
            chosen(fingerprint="ab12cd"),
            chosen(attempts=NumberRange.parse(">=3")),
            chosen(ids=frozenset({"p1", ""})),
            chosen(lap=NumberRange.parse(">1")),
            chosen(where=Where("error.type == 'KeyError'")),
            chosen(where=Where("payload.customer.id == 42")),
        ],
        ids=lambda selection: selection.describe(),
    )
    def test_a_letter_that_lacks_what_is_asked_for_does_not_belong(
        self, each: DeadLetter, selection: Selection
    ) -> None:
        assert not selection.matches(each)

    def test_a_bare_letter_is_found_by_what_the_broker_knows_of_it(self) -> None:
        assert BARE.bare
        for selection in (
            chosen(),
            chosen(reasons=frozenset({"delivery-limit"})),
            chosen(routing_key="order.*"),
            chosen(ids=frozenset({BARE.id})),  # C13: a derived one
            chosen(older_than=datetime.now(UTC)),
            chosen(where=Where("error is null and reason == 'delivery-limit' and attempts == 2")),
        ):
            assert selection.matches(BARE), selection.describe()

    def test_a_letter_without_a_known_time_is_neither_older_nor_newer(self) -> None:
        assert UNKNOWN.moved_to_dlq_at is None
        assert not chosen(older_than=NOON).matches(UNKNOWN)
        assert not chosen(newer_than=NOON).matches(UNKNOWN)

    def test_what_only_costs_is_not_looked_at_where_something_cheap_says_no(self) -> None:
        where = Where("payload.nothing.there == 1")

        assert not chosen(reasons=frozenset({"permanent"}), where=where).matches(letter())
        assert where.tally.failures == 0
        assert not chosen(reasons=frozenset({"exhausted"}), where=where).matches(letter())
        assert where.tally.failures == 1


class TestSelection:
    def test_it_is_everything_where_nothing_narrows_it(self) -> None:
        assert chosen().everything
        assert chosen(held=True, limit=5).everything
        for narrowed in (
            chosen(ids=frozenset({"m1"})),
            chosen(reasons=frozenset({"x"})),
            chosen(error="*"),
            chosen(fingerprint="ab12cd"),
            chosen(routing_key=""),
            chosen(older_than=NOON),
            chosen(newer_than=NOON),
            chosen(attempts=NumberRange.parse("3")),
            chosen(lap=NumberRange.parse("3")),
            chosen(where=Where("true")),
        ):
            assert not narrowed.everything, narrowed.describe()

    def test_it_says_in_words_what_it_is(self) -> None:
        assert chosen().describe() == "all"
        assert chosen(held=True, limit=5).describe() == "all including held limit=5"
        assert (
            chosen(
                ids=frozenset({"b", "a"}),
                reasons=frozenset({"permanent", "exhausted"}),
                error="KeyError*",
                fingerprint="ab12cd",
                routing_key="order.*",
                older_than=NOON,
                newer_than=NOON - timedelta(hours=2),
                attempts=NumberRange.parse("2-5"),
                lap=NumberRange.parse(">1"),
                where=Where("payload.id == 1"),
            ).describe()
            == "id=a,b reason=exhausted,permanent error='KeyError*' fingerprint=ab12cd routing-key='order.*' "
            "older-than=2026-03-01T12:00:00+00:00 newer-than=2026-03-01T10:00:00+00:00 attempts=2-5 lap=>=2 "
            "where='payload.id == 1'"
        )
        assert chosen(ids=frozenset("abcdefg")).describe() == "id=a,b,c,d,e and 2 more"

    @pytest.mark.parametrize("text", ["ab12c", "", "AB12CD", "ab12cg", "ab12cd*"])
    def test_a_fingerprint_that_could_mean_too_much_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match="at least 6 of its hex digits"):
            chosen(fingerprint=text)

    def test_other_things_that_cannot_be_meant_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="limit -1"):
            chosen(limit=-1)
        with pytest.raises(ConfigurationError, match="older_than 2026-03-01T12:00:00: it has no time zone"):
            chosen(older_than=NOON.replace(tzinfo=None))


class TestNumberRange:
    @pytest.mark.parametrize(
        ("text", "inside", "outside"),
        [
            ("3", [3], [2, 4]),
            ("=3", [3], [2, 4]),
            (">=3", [3, 1_000], [2]),
            ("> 3", [4], [3]),
            ("<3", [0, 2], [3]),
            ("<=3", [3], [4]),
            (" 2 - 5 ", [2, 5], [1, 6]),
        ],
    )
    def test_it_is_read_as_people_write_it(self, text: str, inside: list[int], outside: list[int]) -> None:
        numbers = NumberRange.parse(text)

        assert all(number in numbers for number in inside)
        assert not any(number in numbers for number in outside)
        assert NumberRange.parse(str(numbers)) == numbers

    @pytest.mark.parametrize("text", ["", "x", "-3", "3-", ">=", "5-2", "1.5", "3,4", "٣", "9" * 30, "<0"])
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError, match="no number"):
            NumberRange.parse(text)


class TestWhere:
    @pytest.mark.parametrize(
        "text",
        [
            "payload.customer.id == 42",
            "payload['customer']['id'] == 42",
            "payload['first name'] == 'Ada'",
            "payload.customer.id in [1, 42] and reason == 'exhausted'",
            "payload.customer.id == 43 or payload.customer.vip",
            "not (payload.customer.id < 42)",
            "40 < payload.customer.id <= 42",
            "payload.note is None and payload.note is null and payload.note == null",
            "payload.customer.vip == true and not false",
            "'vip' in payload.customer and 'age' not in payload.customer",
            "payload.items[0].sku == 'A-1' and payload.items[-1].price == 20",
            "'B-2' in [item.sku for item in payload.items]",
            "any(item.price > 10 for item in payload.items)",
            "len(payload.items) == 2 and payload.get == 7",
            "payload.get('nothing') is null and payload.customer.get('id', 0) == 42",
            "payload.customer.name.lower() == 'ada' and payload.customer.name.startswith('A')",
            "glob(payload.customer.name, 'A?a')",
            "error.type == 'KeyError' and 'and more' in error.message and error.fingerprint.startswith('ab')",
            "headers.tenant == 'acme' and headers['x-tries'] == 3 and 'other' not in headers",
            "properties.priority == 4 and properties.reply_to is null",
            "id == 'm1' and queue == 'orders' and exchange == 'shop' and routing_key == 'order.created'",
            "attempts == max_attempts and lap == 1",
            "size > 100",
            "parked_at == time('2026-03-01T12:00:00Z') and created_at < parked_at",
            "parked_at < ago('1h')",
            "(payload.items[0].price + 0.5) * 2 - 1 == 19 and 7 % 4 == 3 and 7 // 2 == 3",
            "int('42') == payload.customer.id and str(payload.customer.id) == '42'",
            "'yes' == ('yes' if payload.customer.vip else 'no')",
            " payload.customer.id == 42 ",
        ],
    )
    def test_conditions_that_hold(self, text: str) -> None:
        where = Where(text)

        assert where.matches(letter()), where.tally
        assert where.tally.failures == 0

    @pytest.mark.parametrize(
        "text",
        ["payload.customer.id == '42'", "payload.customer.id == 41 + 2", "payload.items == 1", "first_failed_at", "''"],
    )
    def test_conditions_that_do_not_hold(self, text: str) -> None:
        where = Where(text)

        assert not where.matches(letter())
        assert where.tally.failures == 0

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("payload.custmer.id == 42", "no key 'custmer'"),
            ("payload.note.id == 42", "no 'id' in null"),
            ("payload.customer.name.first == 'A'", "no 'first' in a text"),
            ("payload.items.sku == 'A-1'", "no 'sku' in an array"),
            ("payload.items[7].sku == 'A-1'", "no item 7"),
            ("payload.items['7'] == 1", "no '7' in an array"),
            ("payload.customer.id > 'x'", "'>' not supported between instances of 'int' and 'str'"),
            ("payload.customer.id.lower() == 'x'", r"a number has no method lower\(\)"),
            ("payload.items.get('x')", r"an array has no method get\(\)"),
            ("headers.nothing == 1", "no key 'nothing'"),
            ("1 / 0 == 1", "division by zero"),
            ("created_at > '2026'", "not supported between"),
            ("time('yesterday') < parked_at", "Invalid isoformat"),
            ("[item for item in payload.items] and item", "'item' is known inside its brackets only"),
            ("'%99999999d' % 1 == ''", "% is for numbers here"),
            ("'x' * 999999999 == ''", "too long|that long"),
            ("[1] * 999999999 == []", "that long"),
            ("any(a == b for a in 'x' * 9999 for b in 'x' * 9999 if a != b)", "too many elements"),
        ],
    )
    def test_a_letter_for_which_it_cannot_be_evaluated_is_counted_and_does_not_match(self, text: str, why: str) -> None:
        where = Where(text)
        other = letter(b"[]")

        assert not where.matches(letter())
        assert not where.matches(other)
        assert where.tally.failures == 2
        assert where.tally.first_failure is not None
        assert re.search(why, where.tally.first_failure), where.tally.first_failure
        where.tally.reset()
        assert where.tally == Tally(0, None)

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("", "column 1: invalid syntax"),
            ("payload.customer.id ==", "column 23: invalid syntax"),
            ("payload.customer.id = 42", "column 21: invalid syntax; equality is =="),
            ("paylod.id == 42", "column 1: there is no 'paylod'; there are payload, headers"),
            ("1 == 1 and order == 2", "column 12: there is no 'order'"),
            ("open('/etc/passwd')", r"column 1: there is no function open\(\); there are abs"),
            ("payload.pop('id')", r"column 1: there is no method pop\(\); there are endswith, get"),
            ("payload.customer.name.format('x')", r"there is no method format\(\)"),
            ("().__class__.__bases__[0].__subclasses__()", "there is no method __subclasses__"),
            ("len(obj=payload)", "without named arguments"),
            ("payload['x'](1)", "only functions and methods can be called"),
            ("lambda: 1", "Lambda cannot be used here"),
            ("(x := 1) == 1", "NamedExpr cannot be used here"),
            ("9 ** 9 ** 9 > 1", "Pow cannot be used here"),
            ("1 << 9999999 > 1", "LShift cannot be used here"),
            ("f'{payload}' == ''", "JoinedStr cannot be used here"),
            ("{**payload} == 1", "Dict cannot be used here"),
            ("[*payload]", "Starred cannot be used here"),
            ("import os", "invalid syntax"),
            ("1; 2", "invalid syntax"),
            ("payload.id == 1\nreason == 2", "invalid syntax"),
            ("(" * 300 + "1" + ")" * 300, "too many nested parentheses"),
            ("1 == " * 2_000 + "1", "characters are too many"),
            ("'\x00' == ''", None),
        ],
        ids=lambda value: str(value)[:30],
    )
    def test_what_is_no_condition_is_refused_at_once_with_the_place(self, text: str, told: str | None) -> None:
        with pytest.raises(ConfigurationError, match=told) as refused:
            Where(text)
        assert str(refused.value).startswith("where: ")

    def test_underscores_lead_nowhere(self) -> None:
        where = Where("payload.__class__ == 1 or headers.__init__ == 1")

        assert not where.matches(letter())
        assert where.tally.first_failure == "no key '__class__'"

    def test_only_what_is_asked_for_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reads: list[str] = []

        def payload(_: DeadLetter) -> Any:
            reads.append("payload")
            return {"id": 1}

        monkeypatch.setattr(DeadLetter, "payload", property(payload))

        assert not Where("reason == 'x' and payload.id == 1").matches(letter())
        assert reads == []
        assert Where("payload.id == 1 and payload.id < 2").matches(letter())
        assert reads == ["payload"], "decoded once for a letter"

    def test_one_letters_values_are_not_taken_for_the_nexts(self) -> None:
        where = Where("payload.customer.id == 42")

        assert [where.matches(each) for each in (letter(), letter(b'{"customer": {"id": 1}}'), letter())] == [
            True,
            False,
            True,
        ]

    def test_bodies_that_are_no_json_are_base64(self) -> None:
        assert Where("payload.base64 == '/w=='").matches(BARE)

    def test_a_payload_nested_without_end_does_no_harm(self) -> None:
        deep = letter(b"[" * 900 + b"]" * 900)
        where = Where("payload == payload or len(payload) == 1")

        assert isinstance(where.matches(deep), bool)
        assert not Where("payload" + "[0]" * 950 + " == 1").matches(deep)
        assert isinstance(Where("not " * 900 + "true").matches(deep), bool)

    def test_names_that_no_letter_has_are_told(self) -> None:
        where = Where("payload.a == 9 or payload['b'].c == 1 or headers.x == 1 or payload.items[0].sku == 1")
        for body in (b'{"a": 1, "b": {}, "items": []}', b'{"b": {"d": 1}}'):
            assert not where.matches(letter(body))

        assert where.tally.unknown == ["payload['b'].c"], "what came after it was never asked for"
        where.tally.reset()
        assert where.tally.unknown == []
        for text, unknown in (("payload.custmer.id == 42", ["payload.custmer"]), ("[x.no for x in payload.b]", [])):
            other = Where(text)
            other.matches(letter(b'{"b": [{}]}'))
            assert other.tally.unknown == unknown

    def test_it_is_equal_to_another_one_of_the_same_text(self) -> None:
        one, other = chosen(where=Where("lap == 1")), chosen(where=Where("lap == 1"))

        assert one == other
        assert hash(one) == hash(other)
        assert one != chosen(where=Where("lap == 2"))
        assert repr(one.where) == "Where('lap == 1')"

    @given(value=json_values)
    @quick
    def test_no_payload_makes_it_raise(self, value: Any) -> None:
        each = letter(json.dumps(value).encode())
        for text in ("payload.a.b == 1", "payload > 1", "'a' in payload", "payload[0].get('x') == payload.lower()"):
            assert isinstance(Where(text).matches(each), bool)

    @given(text=st.text(alphabet="payload.idx[]()'\"=<> andornt01+*%,:{}\\\n", max_size=60))
    @quick
    def test_no_text_makes_it_raise_anything_but_a_clear_error(self, text: str) -> None:
        with contextlib.suppress(ConfigurationError):
            assert isinstance(Where(text).matches(letter()), bool)
