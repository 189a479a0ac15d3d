"""A failed attempt as a value, and the fingerprint: one bug, one fingerprint."""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq.errors import Permanent
from rabbitdlq.failure import MESSAGE_BYTES, TRACEBACK_BYTES, Failure, fingerprint
from tests.unit.strategies import quick


def caught(raising: Callable[[], Any]) -> BaseException:
    try:
        raising()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def fail(error: BaseException) -> None:
    raise error


class Mute(Exception):
    """One that cannot even say what it is."""

    def __str__(self) -> str:
        raise ValueError("no words")


class TestFailure:
    def test_it_tells_type_text_and_where(self) -> None:
        failure = Failure.of(caught(lambda: fail(ValueError("no order 17"))))

        assert (failure.type, failure.message) == ("ValueError", "no order 17")
        assert failure.traceback is not None
        assert failure.traceback.endswith("ValueError: no order 17\n")
        assert ", in fail" in failure.traceback
        assert len(failure.fingerprint) == 16

    @pytest.mark.parametrize(
        ("error", "name"),
        [
            (KeyError("x"), "KeyError"),
            (Permanent("never"), "Permanent"),
            (Mute(), f"{__name__}.Mute"),
            (TimeoutError(), "TimeoutError"),
        ],
    )
    def test_the_type_is_named_with_its_module_where_that_says_something(self, error: Exception, name: str) -> None:
        assert Failure.of(error).type == name

    def test_an_error_that_was_never_raised_has_no_traceback(self) -> None:
        assert Failure.of(ValueError("x")).traceback is None

    def test_a_text_is_an_error_too(self) -> None:
        assert Failure.of("found broken by hand") == Failure(
            "Error", "found broken by hand", None, fingerprint("Error", "found broken by hand")
        )

    def test_an_error_whose_text_fails_is_told_all_the_same(self) -> None:
        failure = Failure.of(caught(lambda: fail(Mute())))

        assert failure.message == "(its text failed: ValueError)"
        assert failure.traceback is not None

    def test_a_text_and_a_traceback_without_end_are_cut_on_a_character(self) -> None:
        """C5: a huge error text pushed the headers over the frame, and the message went round for ever."""
        failure = Failure.of(caught(lambda: fail(ValueError("ä€😀" * 40_000))))

        assert len(failure.message.encode()) <= MESSAGE_BYTES
        assert failure.message.endswith("…[cut]")
        assert failure.traceback is not None
        assert len(failure.traceback.encode()) <= TRACEBACK_BYTES + 9
        assert failure.traceback.startswith("[cut]… ")

    def test_of_a_long_traceback_the_end_is_kept(self) -> None:
        def deeper(left: int) -> None:
            if left == 0:
                raise ValueError("the bottom")
            # two lines by turns: a line that only repeats is told once, with a count
            if left % 2:
                deeper(left - 1)
            else:
                deeper(left - 1)

        failure = Failure.of(caught(lambda: deeper(200)))

        assert failure.traceback is not None
        assert failure.traceback.endswith("ValueError: the bottom\n")

    def test_the_chain_of_causes_is_in_the_traceback(self) -> None:
        def chained() -> None:
            try:
                fail(KeyError("price"))
            except KeyError as error:
                raise ValueError("no price") from error

        failure = Failure.of(caught(chained))

        assert failure.traceback is not None
        assert "KeyError: 'price'" in failure.traceback
        assert "direct cause" in failure.traceback

    @given(text=st.text() | st.text(alphabet="\ud800\udcffa"))
    @quick
    def test_any_text_becomes_one_that_can_be_sent(self, text: str) -> None:
        failure = Failure.of(caught(lambda: fail(ValueError(text))))

        for part in (failure.type, failure.message, failure.traceback or "", failure.fingerprint):
            part.encode("utf-8")

    def test_a_traceback_that_cannot_be_written_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> list[str]:
            raise RuntimeError("no")

        monkeypatch.setattr(traceback, "walk_tb", broken)

        assert Failure.of(caught(lambda: fail(ValueError("x")))).traceback is None


#: texts as they are seen in logs; each line is one bug
TOGETHER = [
    ("no order 17", "no order 4711"),
    ("took 5.2s", "took 12s", "took 1,024.5s"),
    ("balance is -5", "balance is 5", "balance is +1e-05"),
    ("99.5% full", "100% full"),
    ("[Errno 2] No such file or directory: '/tmp/a/1.csv'", "[Errno 2] No such file or directory: '/srv/x.csv'"),
    ("cannot read /var/spool/orders/17.json", "cannot read /var/spool/mails/new.json", "cannot read /x"),
    (r"cannot open C:\Users\anna\x.txt", r"cannot open D:\data\y.csv"),
    ("<Order object at 0x7f3a2b> is broken", "<Order object at 0xdeadbeef> is broken"),
    (
        "order 550e8400-e29b-41d4-a716-446655440000 is gone",
        "order abcdefab-cdef-abcd-efab-cdefabcdefab is gone",
    ),
    ("commit 3f786850e387550fdab836ed7e6dc881de23001b", "commit deadbeefdeadbeefdeadbeefdeadbeefdeadbeef"),
    ("customer cus_NffrFeUfNV2Hib has no card", "customer cus_4QFOF3xrvBT2nU has no card"),
    (
        "invalid token eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4fw, sign in",
        "invalid token eyJhbGciOiJSUzI1NiJ9.eyJhdWQiOiJ4eHh9.dBjftJeZ4CVPmB92K27u, sign in",
    ),
    (
        "deadline 2024-01-01 12:00:00,123 passed",
        "deadline 2025-12-31T23:59:59.999999+02:00 passed",
        "deadline 2024-02-29T00:00:00Z passed",
    ),
    ("expired Tue, 02 Jan 2024 15:04:05 GMT", "expired Sunday, 31 December 2023 01:00:00 GMT"),
    ("since Jan  2 15:04:05 dead", "since Oct 31 00:00:01 dead"),
    ("connect to 10.0.0.1:5672 refused", "connect to [2001:db8::1]:5672 refused"),
    ("no route to fe80::1", "no route to 2001:db8:0:0:0:0:2:1", "no route to ::1"),
    ("device 00:1A:2B:3C:4D:5E is lost", "device aa:bb:cc:dd:ee:ff is lost"),
    ("mail to anna@example.com bounced", "mail to o.brien+x@mail.example.org bounced"),
    (
        "503 Service Unavailable for url: https://api.example.com/orders/17?full=true",
        "503 Service Unavailable for url: http://localhost:8080/orders",
    ),
    ("invalid literal for int() with base 10: 'abc'", "invalid literal for int() with base 10: ''"),
    ('unknown currency "EUR"', 'unknown currency "US dollar"'),
    ("unknown table `orders`", "unknown table `mails`"),
    ("unknown city “Köln”", "unknown city “Łódź”"),
    ("can't find 'alpha' here", "can't find 'beta' here"),
    ("can't parse 'a', don't ask 'b'", "can't parse 'x y', don't ask 'z'"),
    ("ids [1, 2, 3] are taken", "ids [4] are taken"),
    ("fields ['a', 'b'] are missing", "fields ['c'] are missing"),
    ("Key (id)=(17) already exists.", "Key (id)=(18) already exists."),
    (
        "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
        "'utf-8' codec can't decode byte 0x80 in position 4711: invalid start byte",
    ),
    (
        "1 validation error for Order\nprice\n  Input should be greater than 0 [input_value=-5, input_type=int]",
        "1 validation error for Order\nprice\n  Input should be greater than 0 [input_value=-17, input_type=int]",
    ),
    ("no order 17" + " and more" * 600, "no order 123456789" + " and more" * 500),
]

#: and each pair is two
APART = [
    ("connection refused", "connection reset by peer"),
    ("no order 17", "no customer 17"),
    ("order 17 is paid", "order 17 is not paid"),
    ("expected str, got int", "expected int, got str"),
    ("invalid literal for int() with base 10: 'abc'", "could not convert string to float: 'abc'"),
    ("[Errno 111] Connection refused", "[Errno 104] Connection reset by peer"),
    ("404 Not Found for url: https://x.example/1", "500 Internal Server Error for url: https://x.example/1"),
    ("1 validation error for Order\nprice\n  Field required", "1 validation error for Order\ntotal\n  Field required"),
    ("It's John's order that's wrong", "It's John's invoice that's wrong"),
    ("and/or is missing", "either/or is missing"),
    ("std::bad_alloc", "std::bad_cast"),
    ("May I ask", "Must I ask"),
    ("timeout while reading", "timeout while writing"),
    (
        "'utf-8' codec can't decode byte 0xff: invalid start byte",
        "'utf-8' codec can't decode byte 0xff: unexpected end",
    ),
    ("", "x"),
]


class TestFingerprint:
    @pytest.mark.parametrize("texts", TOGETHER, ids=lambda texts: texts[0][:40])
    def test_texts_of_one_bug_have_one_fingerprint(self, texts: tuple[str, ...]) -> None:
        assert len({fingerprint("ValueError", text, "handle") for text in texts}) == 1

    @pytest.mark.parametrize("texts", APART, ids=lambda texts: texts[0][:40])
    def test_texts_of_two_bugs_have_two(self, texts: tuple[str, ...]) -> None:
        assert len({fingerprint("ValueError", text, "handle") for text in texts}) == 2

    def test_no_two_bugs_of_these_tables_meet(self) -> None:
        prints: dict[str, str] = {}
        for texts in TOGETHER:
            first = prints.setdefault(fingerprint("ValueError", texts[0]), texts[0])
            assert first == texts[0]

    def test_type_and_place_count(self) -> None:
        prints = {fingerprint(*each) for each in [("A", "x", "f"), ("B", "x", "f"), ("A", "x", "g"), ("A", "x")]}

        assert len(prints) == 4

    @pytest.mark.parametrize("text", ["a b " * 30_000, "no order 17: " * 10_000, "7" * 110_000])
    def test_only_the_beginning_of_a_long_text_is_looked_at(self, text: str) -> None:
        """What bounds the time that an error of 100 kB can cost."""
        assert len(text) > 100_000
        assert fingerprint("E", text) == fingerprint("E", text[:4_000]) == fingerprint("E", text[:4_000] + " more")

    @given(text=st.lists(st.sampled_from(["'", '"', "“", "a@", "a-", "/a", "~/", "a:", "Mon ", "+-", "1,", "_"])))
    @quick
    def test_any_mixture_of_signs_has_a_fingerprint(self, text: list[str]) -> None:
        assert len(fingerprint("E", "".join(text) * 500)) == 16
