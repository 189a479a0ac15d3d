"""From the client library's errors to ours: none gets past, and no password gets out."""

import asyncio
import inspect
import ssl
from collections.abc import Iterator

import aio_pika.exceptions
import aiormq.abc
import aiormq.exceptions
import pamqp.exceptions
import pytest
from pamqp import commands
from pamqp.header import ContentHeader

from rabbitdlq.broker import shown_url, translate, translated
from rabbitdlq.broker.translate import LOWER_ERRORS, Difference, difference
from rabbitdlq.errors import (
    AccessDenied,
    BrokerError,
    BrokerUnavailable,
    EntityNotFound,
    PublishRefused,
    RabbitDLQError,
    TopologyMismatch,
    Unroutable,
)

SECRET = "pa55word"
URL = f"amqp://anna:{SECRET}@broker.example:5672/shop"


def lower_classes() -> Iterator[type[BaseException]]:
    """Every exception class that the client library and what is under it know."""
    seen: set[type[BaseException]] = set()
    for module in (aiormq.exceptions, aio_pika.exceptions, pamqp.exceptions):
        for _, kind in sorted(vars(module).items()):
            if inspect.isclass(kind) and issubclass(kind, BaseException) and kind not in seen:
                seen.add(kind)
                yield kind


def made(kind: type[BaseException]) -> BaseException:
    """One of that kind, as the library makes it."""
    if issubclass(kind, aiormq.exceptions.DeliveryError):
        frame = commands.Basic.Return(312, "NO_ROUTE", "shop", "order.created")
        returned = aiormq.abc.DeliveredMessage(delivery=frame, header=ContentHeader(), body=b"", channel=None)  # type: ignore[arg-type]
        return kind(returned, frame)
    return kind("some words of the broker")


LOWER = list(lower_classes())
CLASSES = pytest.mark.parametrize("kind", LOWER, ids=[f"{kind.__module__}.{kind.__name__}" for kind in LOWER])


class TestEveryLowerError:
    def test_there_are_many(self) -> None:
        assert len(LOWER) > 40

    @CLASSES
    def test_is_one_of_ours_afterwards(self, kind: type[BaseException]) -> None:
        ours = translate(made(kind), "declaring 'orders'")

        assert isinstance(ours, BrokerError)
        assert str(ours).startswith("declaring 'orders': ")
        assert len(str(ours)) > len("declaring 'orders': ")

    @CLASSES
    def test_does_not_get_past(self, kind: type[BaseException]) -> None:
        assert issubclass(kind, LOWER_ERRORS)
        with pytest.raises(RabbitDLQError) as caught, translated("declaring 'orders'"):
            raise made(kind)

        assert type(caught.value.__cause__) is kind

    @CLASSES
    def test_tells_no_password(self, kind: type[BaseException]) -> None:
        error = made(kind)
        error.__cause__ = OSError(5, f"cannot reach {URL}, give up")
        ours = translate(error, f"connecting to {shown_url(URL)}")

        assert SECRET not in str(ours)
        assert "amqp://anna:***@broker.example" in str(ours)

    def test_tells_no_password_of_its_own_text(self) -> None:
        for error in (aiormq.exceptions.AMQPConnectionError(f"cannot reach {URL}"), ConnectionError(f"{URL}: no")):
            assert "amqp://anna:***@broker.example" in str(translate(error, "connecting"))
            assert SECRET not in str(translate(error, "connecting"))

    @pytest.mark.parametrize(
        ("error", "ours"),
        [
            (aiormq.exceptions.ProbableAuthenticationError("ACCESS_REFUSED"), AccessDenied),
            (aiormq.exceptions.AuthenticationError("PLAIN", ["AMQPLAIN"]), AccessDenied),
            (aiormq.exceptions.ConnectionNotAllowed("vhost shop not found"), AccessDenied),
            (aiormq.exceptions.ChannelAccessRefused("access to queue 'orders' refused"), AccessDenied),
            (aiormq.exceptions.ChannelNotFoundEntity("no queue 'orders'"), EntityNotFound),
            (aiormq.exceptions.ChannelPreconditionFailed("unknown delivery tag 5"), BrokerError),
            (aiormq.exceptions.ChannelLockedResource("orders.dlq.lock"), BrokerError),
            (aiormq.exceptions.ConnectionClosed(320, "CONNECTION_FORCED - broker shutdown"), BrokerUnavailable),
            (aiormq.exceptions.AMQPConnectionError(), BrokerUnavailable),
            (aiormq.exceptions.ChannelInvalidStateError("closed"), BrokerUnavailable),
            (made(aiormq.exceptions.PublishError), Unroutable),
            (made(aiormq.exceptions.DeliveryError), PublishRefused),
            (ConnectionRefusedError(111, "Connection refused"), BrokerUnavailable),
            (ConnectionResetError(104, "Connection reset by peer"), BrokerUnavailable),
            (OSError(101, "Network is unreachable"), BrokerUnavailable),
            (TimeoutError(), BrokerUnavailable),
            (asyncio.IncompleteReadError(b"", 7), BrokerUnavailable),
            (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"), BrokerUnavailable),
        ],
        ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value.__name__,
    )
    def test_that_matters_has_a_class_of_its_own(self, error: BaseException, ours: type[BrokerError]) -> None:
        assert type(translate(error, "working")) is ours

    def test_one_of_ours_stays_what_it_is(self) -> None:
        error = EntityNotFound("no queue")

        assert translate(error, "working") is error

    async def test_a_cancellation_by_the_library_is_a_lost_line_and_ours_goes_through(self) -> None:
        with pytest.raises(BrokerUnavailable, match="working: the connection was lost"), translated("working"):
            raise asyncio.CancelledError

        async def wait() -> None:
            with translated("working"):
                await asyncio.Event().wait()

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    def test_errors_of_other_makings_are_not_touched(self) -> None:
        with pytest.raises(ZeroDivisionError), translated("working"):
            raise ZeroDivisionError


class TestDifference:
    """What the broker says of a declaration with other arguments, on 3.10, 4.0 and 4.3."""

    @pytest.mark.parametrize(
        ("text", "found"),
        [
            (
                "PRECONDITION_FAILED - inequivalent arg 'x-message-ttl' for queue 'orders.retry.1.5s' in vhost '/': "
                "received the value '6000' of type 'signedint' but current is the value '5000' of type 'signedint'",
                ("x-message-ttl", "6000", "5000"),
            ),
            (
                "PRECONDITION_FAILED - inequivalent arg 'x-dead-letter-exchange' for queue 'orders' in vhost '/': "
                "received the value 'orders.dead' of type 'longstr' but current is none",
                ("x-dead-letter-exchange", "orders.dead", "none"),
            ),
            (
                "PRECONDITION_FAILED - inequivalent arg 'durable' for queue 'orders' in vhost '/': received 'true' but "
                "current is 'false'",
                ("durable", "true", "false"),
            ),
            (
                "PRECONDITION_FAILED - inequivalent arg 'type' for exchange 'it's' in vhost 'a 'b'': received 'topic' "
                "but current is 'fanout'",
                ("type", "topic", "fanout"),
            ),
            (
                # cut by the broker at 255 bytes
                "PRECONDITION_FAILED - inequivalent arg 'alternate-exchange' for exchange 'orders.retry.ladder' in "
                f"vhost '/': received '{'1234567ms.' * 12}123...",
                ("alternate-exchange", "as the topology says", "something else, which does not fit"),
            ),
            (
                "PRECONDITION_FAILED - inequivalent arg 'alternate-exchange' for exchange 'orders.retry.ladder' in "
                "vhost '/': received '5s' but current is '1234567ms.1234568ms.12...",
                ("alternate-exchange", "5s", "1234567ms.1234568ms.12…"),
            ),
            ("PRECONDITION_FAILED - unknown delivery tag 5", None),
            ("", None),
        ],
        ids=["value", "none", "flag", "quotes", "cut", "half cut", "other", "empty"],
    )
    def test_it_is_read_out_of_the_text(self, text: str, found: tuple[str, str, str] | None) -> None:
        """C19: a changed delay was a 406 without a word about what differed."""
        error = aiormq.exceptions.ChannelPreconditionFailed(text)

        assert difference(error) == (None if found is None else Difference(found))
        assert isinstance(translate(error, "declaring"), TopologyMismatch) == (found is not None)


class TestShownUrl:
    @pytest.mark.parametrize(
        ("url", "shown"),
        [
            (URL, "amqp://anna:***@broker.example:5672/shop"),
            ("amqp://broker.example", "amqp://broker.example"),
            ("amqp://anna@broker.example/", "amqp://anna@broker.example/"),
            (f"amqps://anna:{SECRET}@broker.example/%2F?certfile=/x&keyfile=/y", "amqps://anna:***@broker.example/%2F"),
            (f"anna:{SECRET}@broker.example:5672", "***@broker.example:5672"),
        ],
    )
    def test_it_is_the_url_without_secrets(self, url: str, shown: str) -> None:
        assert shown_url(url) == shown

    @pytest.mark.parametrize(
        "url",
        [
            f"amqp://anna:{SECRET}/x@broker.example/",
            f"amqp://anna:12/{SECRET}@broker.example/",
            f"amqp://anna:{SECRET}#x@broker.example/",
            f"amqp://anna:{SECRET}?x@broker.example/",
            f"amqp://anna:{SECRET}[@broker.example/",
            f"amqp://anna:x@{SECRET}@broker.example/",
            f"amqp://:{SECRET}@broker.example",
            f"amqp://anna:{SECRET}@broker.example:port/",
            f"amqp:anna:{SECRET}@broker.example",
            f"//anna:{SECRET}@broker.example/",
            f"anna:{SECRET}@broker.example/vhost?heartbeat=5",
            f"anna:{SECRET}@",
        ],
    )
    def test_no_way_to_write_it_wrong_shows_the_password(self, url: str) -> None:
        assert SECRET not in shown_url(url)
