"""A failed attempt as a value, and the fingerprint: one bug, one fingerprint."""

import asyncio
import traceback
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq.errors import Permanent
from rabbitdlq.failure import MESSAGE_BYTES, TRACEBACK_BYTES, Failure, fingerprint, inside
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


def in_a_task_group(*raising: Callable[[], Any]) -> BaseException:
    async def task(each: Callable[[], Any]) -> None:
        each()

    async def together() -> None:
        async with asyncio.TaskGroup() as tasks:
            for each in raising:
                tasks.create_task(task(each))

    return caught(lambda: asyncio.run(together()))


def ship() -> None:
    raise KeyError("address")


def bill() -> None:
    raise ValueError("no order 17")


class Several(ExceptionGroup[Exception]):
    """A group of the user's own."""


class TestGroups:
    """A letter said 'unhandled errors in a TaskGroup (1 sub-exception)', and not which."""

    def test_a_group_of_one_is_told_as_that_one_and_its_traceback_has_both(self) -> None:
        failure, alone = Failure.of(in_a_task_group(ship)), Failure.of(caught(ship))

        assert (failure.type, failure.message) == ("KeyError", "'address'")
        assert failure.fingerprint == alone.fingerprint
        assert failure.traceback is not None
        assert ", in together\n" in failure.traceback
        assert ", in ship\n" in failure.traceback
        assert "unhandled errors in a TaskGroup (1 sub-exception)" in failure.traceback

    def test_of_several_each_is_named(self) -> None:
        failure = Failure.of(in_a_task_group(ship, bill))

        assert failure.type == "ExceptionGroup"
        assert failure.message == (
            "unhandled errors in a TaskGroup (2 sub-exceptions): KeyError: 'address'; ValueError: no order 17"
        )
        assert failure.traceback is not None
        assert failure.traceback.count("Traceback") == 3

    def test_their_fingerprint_is_that_of_the_bugs_in_it_in_any_order_and_number(self) -> None:
        several, others = Failure.of(in_a_task_group(ship, bill)), Failure.of(in_a_task_group(bill, ship, bill, ship))
        nested = Failure.of(BaseExceptionGroup("x", [in_a_task_group(bill, ship)]))

        assert several.fingerprint == others.fingerprint == nested.fingerprint
        assert Failure.of(in_a_task_group(bill, bill)).fingerprint == Failure.of(caught(bill)).fingerprint
        alone = {Failure.of(caught(each)).fingerprint for each in (ship, bill)}
        assert len(alone | {several.fingerprint}) == 3

    def test_the_class_of_a_group_is_told_where_that_is_asked_for(self) -> None:
        error = caught(lambda: fail(Several("rows", [KeyError("address")])))

        assert Failure.of(error).type == "KeyError"
        told = Failure.of(error, error)
        assert told.type == f"{__name__}.Several"
        assert told.message == "rows (1 sub-exception): KeyError: 'address'"

    def test_of_very_many_some_are_told(self) -> None:
        errors: list[Exception] = [ValueError("ä" * 5_000), TimeoutError(), TimeoutError(), Mute()]
        errors += [ValueError(f"row {number}") for number in range(10_000)]
        failure = Failure.of(caught(lambda: fail(ExceptionGroup("rows", errors))))

        assert "…[cut]; TimeoutError (2 times); " in failure.message
        assert "Mute: (its text failed: ValueError); ValueError: row 0; " in failure.message
        assert failure.message.endswith("; ValueError: row 6; and 9993 more")
        assert len(failure.message.encode()) <= MESSAGE_BYTES

    def test_what_is_in_a_group_comes_in_its_order_and_once(self) -> None:
        first, second = ValueError("1"), ValueError("2")
        nested = ExceptionGroup("x", [first, second])

        assert inside(first) == [first]
        assert inside(ExceptionGroup("x", [nested, first, nested])) == [first, second]
        assert inside(ExceptionGroup("x", [nested, first]), lambda group: group is nested) == [nested, first]


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
    # as databases, networks, clouds and validators say it
    (
        'duplicate key value violates unique constraint "orders_pkey"\nDETAIL:  Key (id)=(17) already exists.',
        'duplicate key value violates unique constraint "orders_pkey"\nDETAIL:  Key (id)=(4711) already exists.',
    ),
    (
        'duplicate key value violates unique constraint "users_email_key"\n'
        "DETAIL:  Key (email)=(ada@example.com) already exists.",
        'duplicate key value violates unique constraint "users_email_key"\n'
        "DETAIL:  Key (email)=(Grace Hopper) already exists.",
    ),
    (
        "(1062, \"Duplicate entry 'ada' for key 'users.email'\")",
        "(1062, \"Duplicate entry 'grace' for key 'users.email'\")",
    ),
    (
        "(psycopg.errors.DeadlockDetected) deadlock detected\n"
        "DETAIL:  Process 4242 waits for ShareLock on transaction 998877; blocked by process 17.",
        "(psycopg.errors.DeadlockDetected) deadlock detected\n"
        "DETAIL:  Process 1 waits for ShareLock on transaction 5; blocked by process 99.",
    ),
    (
        "(sqlite3.IntegrityError) NOT NULL constraint failed: orders.price\n"
        "[SQL: INSERT INTO orders (id, note) VALUES (?, ?)]\n"
        "[parameters: (17, None)]\n(Background on this error at: https://sqlalche.me/e/20/gkpj)",
        "(sqlite3.IntegrityError) NOT NULL constraint failed: orders.price\n"
        "[SQL: INSERT INTO orders (id, note) VALUES (?, ?)]\n"
        "[parameters: (18, 'by hand')]\n(Background on this error at: https://sqlalche.me/e/20/gkpj)",
    ),
    (
        "Error 111 connecting to redis-7.internal:6379. Connection refused.",
        "Error 111 connecting to redis-12.internal:6380. Connection refused.",
    ),
    (
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)",
        "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1129)",
    ),
    (
        "HTTPSConnectionPool(host='api.example.com', port=443): Max retries exceeded with url: "
        "/orders/17 (Caused by ConnectTimeoutError(<urllib3.connection.HTTPSConnection object at "
        "0x7f3a2b>, 'Connection to api.example.com timed out. (connect timeout=5)'))",
        "HTTPSConnectionPool(host='eu.example.com', port=8443): Max retries exceeded with url: "
        "/orders/new (Caused by ConnectTimeoutError(<urllib3.connection.HTTPSConnection object at "
        "0x55d0aa>, 'Connection to eu.example.com timed out. (connect timeout=30)'))",
    ),
    (
        "Client error '404 Not Found' for url 'https://api.example.com/orders/17'",
        "Client error '404 Not Found' for url 'https://api.example.com/customers/ada'",
    ),
    (
        "404, message='Not Found', url='https://api.example.com/orders/17'",
        "404, message='Not Found', url='https://api.example.com/x'",
    ),
    ("dial tcp 10.0.0.1:5432: connect: connection refused", "dial tcp [2001:db8::5]:5432: connect: connection refused"),
    ("no answer within 1 second", "no answer within 30 seconds", "no answer within 2 minutes"),
    ("gave up after 1 attempt", "gave up after 5 attempts"),
    ("message of 512 bytes is too large", "message of 12 MB is too large", "message of 3.5 GiB is too large"),
    (
        "An error occurred (NoSuchKey) when calling the GetObject operation: key reports/2026-11-30/17.csv",
        "An error occurred (NoSuchKey) when calling the GetObject operation: key reports/2025-01-01/4.csv",
    ),
    (
        "rate limit of acct_1Nv0FGQ9RKHgCVdK exceeded, retry in 12s",
        "rate limit of acct_9Zx8YwQ2AbCdEfGh exceeded, retry in 1m",
    ),
    ("pod orders-7d9f8b6c5-x2x9k was evicted", "pod orders-5c6b7d8f9-abcde was evicted"),
    (
        "queue arn:aws:sqs:eu-west-1:123456789012:orders is throttled",
        "queue arn:aws:sqs:eu-west-1:210987654321:orders is throttled",
    ),
    (
        "1 validation error for Order\n"
        "price\n"
        "  Input should be a valid number [type=float_type, input_value={'id': 17, 'no': None}, "
        "input_type=dict]\n    For further information visit https://errors.pydantic.dev/2.11/v/float_type",
        "1 validation error for Order\n"
        "price\n"
        "  Input should be a valid number [type=float_type, input_value={'sku': 'A-1', 'customer'...ue, "
        "'x': [1]}, input_type=dict]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/float_type",
    ),
    (
        "1 validation error for Order\n"
        "items.0.price\n  Field required [type=missing, input_value={'sku': 'A'}, input_type=dict]",
        "1 validation error for Order\n"
        "items.13.price\n  Field required [type=missing, input_value={}, input_type=dict]",
    ),
    ("could not decode b'\\xff\\xfe'", "could not decode b'abc'", 'could not decode b"it\'s"'),
    ("unknown street „Ring“", "unknown street „Aleja“"),
    ("unknown lane \u2018Mews\u2019", "unknown lane \u2018Łódź\u2019"),
    ("Expecting value: line 1 column 1 (char 0)", "Expecting value: line 17 column 4 (char 512)"),
    ("order ORD-2026-000017 is paid twice", "order ORD-2025-123456 is paid twice"),
    ("IBAN DE89370400440532013000 is blocked", "IBAN GB29NWBK60161331926819 is blocked"),
    ("price 1,234.50 EUR is above the limit of 1,000.00 EUR", "price 99 EUR is above the limit of 50 EUR"),
    ("customer {'id': 17, 'name': 'Ada'} is unknown", "customer {'id': 4, 'name': 'Grace Hopper'} is unknown"),
    (
        "<Task pending name='Task-17' coro=<run() running at /srv/app/main.py:42>> was destroyed",
        "<Task pending name='Task-9' coro=<run() running at /home/x/main.py:17>> was destroyed",
    ),
    ("Decimal('12.50') is not 0", "Decimal('7') is not 0"),
    (
        "datetime.datetime(2026, 11, 30, 1, 2, tzinfo=datetime.timezone.utc) is in the past",
        "datetime.datetime(2025, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc) is in the past",
    ),
    ("coordinates (52.52, 13.405) are outside", "coordinates (-33.86, 151.2) are outside"),
    (
        "checksum e3b0c44298fc1c149afbf4c8996fb924 does not match",
        "checksum 5d41402abc4b2a76b9719d911017c592 does not match",
    ),
    ("object of size 0 at offset 17", "object of size 123 at offset 0"),
    ("version 1.2.3 is not supported", "version 2.0.0-beta.1 is not supported"),
    ("file report_2026_11.csv is locked", "file report_2025_01.csv is locked"),
    ("thread 140234 (worker-3) died", "thread 7 (worker-12) died"),
    ("retry 3/5 failed", "retry 1/10 failed"),
    ("at 10:15 PM the shop is closed", "at 9:05 AM the shop is closed"),
    ("index out of range [5] with length 3", "index out of range [12] with length 0"),
    # a wrapped error keeps what it wraps
    ("could not ship order 17: 'a' is no address", "could not ship order 18: 'b' is no address"),
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
    # the quoted word is the program's own
    ("'NoneType' object has no attribute 'price'", "'NoneType' object has no attribute 'total'"),
    ("'NoneType' object is not subscriptable", "'int' object is not subscriptable"),
    ("name 'price' is not defined", "name 'total' is not defined"),
    ("No module named 'orders'", "No module named 'customers'"),
    ("cannot import name 'Order' from 'shop'", "cannot import name 'Customer' from 'shop'"),
    ("handle() got an unexpected keyword argument 'price'", "handle() got an unexpected keyword argument 'total'"),
    (
        "handle() missing 1 required positional argument: 'price'",
        "handle() missing 1 required positional argument: 'total'",
    ),
    (
        'duplicate key value violates unique constraint "orders_pkey"',
        'duplicate key value violates unique constraint "users_email_key"',
    ),
    (
        'null value in column "price" of relation "orders" violates not-null constraint',
        'null value in column "total" of relation "orders" violates not-null constraint',
    ),
    ('relation "orders" does not exist', 'relation "customers" does not exist'),
    ("(1054, \"Unknown column 'price' in 'field list'\")", "(1054, \"Unknown column 'total' in 'field list'\")"),
    (
        "(sqlite3.IntegrityError) NOT NULL constraint failed: orders.price\n[SQL: x]",
        "(sqlite3.IntegrityError) NOT NULL constraint failed: orders.total\n[SQL: x]",
    ),
    (
        "Client error '404 Not Found' for url 'https://x.example/1'",
        "Client error '409 Conflict' for url 'https://x.example/1'",
    ),
    (
        "404, message='Not Found', url='https://x.example/1'",
        "500, message='Internal Server Error', url='https://x.example/1'",
    ),
    ("Cannot read properties of undefined (reading 'price')", "Cannot read properties of undefined (reading 'total')"),
    (
        'Cannot invoke "Order.getPrice()" because "order" is null',
        'Cannot invoke "Order.getTotal()" because "order" is null',
    ),
    ('Undefined array key "price"', 'Undefined array key "total"'),
    (
        "1 validation error for Order\nitems.0.price\n  Field required",
        "1 validation error for Order\nitems.0.sku\n  Field required",
    ),
    (
        "1 validation error for Order\nprice\n  Field required [type=missing, input_value={}, input_type=dict]",
        "1 validation error for Order\n"
        "price\n  Input should be a valid number [type=float_type, input_value={}, input_type=dict]",
    ),
    ("'price' is a required property", "'total' is a required property"),
    (
        "An error occurred (NoSuchKey) when calling the GetObject operation: x",
        "An error occurred (AccessDenied) when calling the GetObject operation: x",
    ),
    (
        "An error occurred (AccessDenied) when calling the GetObject operation: x",
        "An error occurred (AccessDenied) when calling the PutObject operation: x",
    ),
    ('status = StatusCode.UNAVAILABLE\n\tdetails = "a"', 'status = StatusCode.DEADLINE_EXCEEDED\n\tdetails = "a"'),
    ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate has expired", "[SSL: WRONG_VERSION_NUMBER] wrong version number"),
    ("[Errno 2] No such file or directory: '/x'", "[Errno 13] Permission denied: '/x'"),
    ("Connection to 10.0.0.1 timed out", "Connection to 10.0.0.1 refused"),
    ("undefined method `price' for nil:NilClass", "undefined method `total' for nil:NilClass"),
    ("division by zero", "integer division or modulo by zero"),
    ("list index out of range", "string index out of range"),
    ("Expecting value: line 1 column 1 (char 0)", "Extra data: line 1 column 1 (char 0)"),
    ("unsupported operand type(s) for +: 'int' and 'str'", 'can only concatenate str (not "int") to str'),
    ("payment 17 was declined: insufficient_funds", "payment 17 was declined: expired_card"),
    ("{'price': ['Missing data for required field.']}", "{'total': ['Missing data for required field.']}"),
    ("stock of item 17 is empty", "stock of item 17 is reserved"),
    ("order 17 not found", "order 17 found twice"),
    ("got 3 rows, expected 1", "expected 3 columns, got 1"),
    ("NOT_FOUND - no queue 'orders' in vhost '/'", "NOT_FOUND - no exchange 'orders' in vhost '/'"),
    (
        "json: cannot unmarshal string into Go struct field Order.price of type int",
        "json: cannot unmarshal string into Go struct field Order.total of type int",
    ),
    ("timeout=5 while connecting", "timeout=5 while reading"),
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
