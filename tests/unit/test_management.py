"""The management API: what it tells, and every way in which it can fail to."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rabbitdlq.errors import AccessDenied, BrokerError, BrokerUnavailable, ConfigurationError
from rabbitdlq.management import BindingState, ExchangeState, ManagementApi, QueueState, Routes, topic_takes
from tests.unit.strategies import json_values, quick

URL = "http://ann:s3cret@broker:15672/rabbit/"
Answer = Callable[[httpx.Request], httpx.Response]


def api(answer: Answer, url: str = URL) -> ManagementApi:
    return ManagementApi(url, transport=httpx.MockTransport(answer))


def answers(paths: Mapping[str, Any]) -> Answer:
    """By the path below ``/api/``, as it is on the wire; 404 for any other."""

    def answer(request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode().partition("/api/")[2]
        if path not in paths:
            return httpx.Response(404, json={"error": "Object Not Found", "reason": "Not Found"})
        return httpx.Response(200, json=paths[path])

    return answer


async def test_a_question_goes_to_the_right_place_with_the_account() -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(404, json={})

    async with api(answer) as management:
        assert await management.queue("a/b %", "or/ders#1?") is None
    (request,) = asked
    assert request.url.raw_path == b"/rabbit/api/queues/a%2Fb%20%25/or%2Fders%231%3F"
    assert request.headers["authorization"] == httpx.BasicAuth("ann", "s3cret")._auth_header
    assert request.method == "GET"


async def test_a_queue_has_the_lower_limit_and_the_arguments_word() -> None:
    values = {
        "arguments": {"x-max-length": 5, "x-overflow": "drop-head", "x-message-ttl": True},
        "effective_policy_definition": {"max-length": 3, "overflow": "reject-publish", "dead-letter-exchange": "dlx"},
        "messages_ready": 2,
        "message_bytes_ready": 20,
        "consumers": 1,
    }
    async with api(answers({"queues/%2F/orders": values})) as management:
        queue = await management.queue("/", "orders")

    assert queue is not None
    assert (queue.messages, queue.message_bytes, queue.consumers) == (2, 20, 1)
    assert (queue.limit("max-length"), queue.limit("max-length-bytes"), queue.limit("message-ttl")) == (3, None, None)
    assert (queue.setting("overflow"), queue.setting("dead-letter-exchange")) == ("drop-head", "dlx")


@pytest.mark.parametrize(("written", "read"), [([], {}), ({}, {}), (None, None)])
async def test_a_queue_without_policies_and_one_that_is_not_counted_yet(written: Any, read: Any) -> None:
    async with api(answers({"queues/%2F/q": {"effective_policy_definition": written}})) as management:
        assert await management.queue("/", "q") == QueueState({}, read, None, None, None)


async def test_alarms_are_told_with_their_node() -> None:
    def alarmed(_: httpx.Request) -> httpx.Response:
        alarms = [{"node": "rabbit@one", "resource": "memory"}, {"node": "rabbit@two", "resource": "disk"}]
        return httpx.Response(503, json={"status": "failed", "reason": "There are alarms", "alarms": alarms})

    async with api(alarmed) as management:
        assert await management.alarms() == ["memory on rabbit@one", "disk on rabbit@two"]
    async with api(lambda _: httpx.Response(503, json={"status": "failed", "reason": "odd"})) as management:
        assert await management.alarms() == ["odd"]
    async with api(answers({"health/checks/alarms": {"status": "ok"}})) as management:
        assert await management.alarms() == []


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (
            httpx.Response(401, json={"reason": "Not management user"}),
            AccessDenied,
            r"\(Not management user\); it needs",
        ),
        (httpx.Response(403), AccessDenied, r"\(Forbidden\); it needs the tag 'management'"),
        (httpx.Response(500, json={"error": "x", "reason": "boom"}), BrokerError, "500 boom"),
        (httpx.Response(302, headers={"location": "/login"}), BrokerError, "302 Found"),
        (httpx.Response(404, text="<html>no such page"), BrokerError, "404 Not Found"),
        (httpx.Response(503, text="no backend"), BrokerError, "503, and no JSON; is it the management API"),
        (httpx.Response(200, text="<html>hello"), BrokerError, "200, and no JSON; is it the management API"),
        (httpx.Response(200, content=b"\xff\xfe"), BrokerError, "no JSON"),
    ],
)
async def test_what_it_refuses_or_does_not_understand_is_one_error(
    answer: httpx.Response, kind: type[Exception], words: str
) -> None:
    async with api(lambda _: answer) as management:
        with pytest.raises(kind, match=words) as caught:
            await management.queue("/", "orders")
    assert type(caught.value) is kind
    assert str(caught.value).startswith("management API at http://ann:***@broker:15672/rabbit/: ")


@pytest.mark.parametrize("error", [httpx.ConnectError("All attempts failed"), httpx.ReadTimeout("")])
async def test_where_nothing_answers_it_is_unavailable(error: httpx.HTTPError) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    async with api(fail) as management:
        with pytest.raises(BrokerUnavailable, match=r"\*\*\*@broker:15672/rabbit/: (All|ReadTimeout)"):
            await management.alarms()


@pytest.mark.parametrize(
    "url",
    ["", "broker:15672", "amqp://ann:s3cret@broker", "http://", "http://ann:s3cret@broker:x", "http://ann:s3/cret@b"],
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^management URL: .*write http://user:password@host:15672") as caught:
        ManagementApi(url)
    assert "s3" not in str(caught.value)


@quick
@given(json_values)
async def test_whatever_json_comes_it_is_read_or_refused(value: Any) -> None:
    text = json.dumps(value)
    async with api(lambda _: httpx.Response(200, content=text, headers={"content-type": "application/json"})) as asked:
        await asked.queue("/", "q")
        await asked.exchange("/", "x")
        await asked.bindings("/", "x")
        await asked.alarms()


def exchange(kind: str, alternate: str | None = None) -> dict[str, Any]:
    return {"type": kind, "arguments": {"alternate-exchange": alternate} if alternate else {}}


def binding(destination: str, key: str, kind: str = "queue") -> dict[str, Any]:
    return {"destination": destination, "destination_type": kind, "routing_key": key, "source": "x"}


async def routes(paths: Mapping[str, Any], key: str) -> Routes:
    whole = {f"exchanges/%2F/{path}": value for path, value in paths.items()}
    async with api(answers(whole)) as management:
        return await management.routes("/", "x", key)


async def test_a_key_is_followed_through_further_exchanges_and_round_in_circles() -> None:
    paths = {
        "x": exchange("topic"),
        "x/bindings/source": [binding("a", "order.*"), binding("y", "#", "exchange"), binding("b", "other")],
        "y": exchange("direct"),
        "y/bindings/source": [
            binding("c", "order.new"),
            binding("d", "order.*"),
            binding("x", "order.new", "exchange"),
        ],
    }

    assert await routes(paths, "order.new") == Routes(("a", "c"), ())
    assert await routes(paths, "order") == Routes((), ())


async def test_what_no_binding_takes_goes_to_the_alternate_exchange() -> None:
    paths = {
        "x": exchange("direct", "y"),
        "x/bindings/source": [binding("a", "one")],
        "y": exchange("fanout"),
        "y/bindings/source": [binding("b", "whatever")],
    }

    assert await routes(paths, "one") == Routes(("a",), ())
    assert await routes(paths, "two") == Routes(("b",), ())
    assert await routes({"x": exchange("direct", "gone"), "x/bindings/source": []}, "two") == Routes((), ())


async def test_where_more_than_the_key_decides_it_is_unclear() -> None:
    paths = {
        "x": exchange("fanout"),
        "x/bindings/source": [binding("a", ""), binding("h", "", "exchange"), binding("z", "", "exchange")],
        "h": exchange("headers"),
        "z": exchange("x-consistent-hash"),
    }

    assert await routes(paths, "k") == Routes(("a",), ("'h' (headers)", "'z' (x-consistent-hash)"))


async def test_exchange_and_bindings_as_they_are() -> None:
    paths = {"exchanges/v/x": exchange("direct", "y"), "exchanges/v/x/bindings/source": [binding("q", "k"), 7, {}]}
    async with api(answers(paths)) as management:
        assert await management.exchange("v", "x") == ExchangeState("direct", "y")
        assert (await management.bindings("v", "x"))[0] == BindingState("q", True, "k")
        assert await management.exchange("v", "missing") is None


@pytest.mark.parametrize(
    ("pattern", "key", "taken"),
    [
        ("", "", True),
        ("#", "", True),
        ("*", "", False),
        ("", "a", False),
        ("#", "a.b.c", True),
        ("*.*", "a.b", True),
        ("*.*", "a", False),
        ("a.#", "a", True),
        ("a.#.b", "a.b", True),
        ("a.#.b", "a.x.y.b", True),
        ("a.#.b", "a.x.y", False),
        ("#.#", "", True),
        ("#.a.#", "b", False),
        ("*.#.*", "a", False),
        ("*.#.*", "a.b", True),
        ("a..b", "a..b", True),
        ("a.*.b", "a..b", True),
        ("a", "b", False),
    ],
)
def test_a_topic_takes(pattern: str, key: str, taken: bool) -> None:
    assert topic_takes(pattern, key) is taken


def plainly(pattern: tuple[str, ...], key: tuple[str, ...]) -> bool:
    """The same, as the protocol's text says it, without caring for time."""
    if not pattern:
        return not key
    if pattern[0] == "#":
        return any(plainly(pattern[1:], key[taken:]) for taken in range(len(key) + 1))
    return bool(key) and pattern[0] in ("*", key[0]) and plainly(pattern[1:], key[1:])


@settings(quick, max_examples=100)
@given(
    st.lists(st.sampled_from("ab*#"), min_size=1, max_size=6), st.lists(st.sampled_from("ab"), min_size=1, max_size=6)
)
def test_a_topic_takes_what_it_is_said_to_take(pattern: list[str], key: list[str]) -> None:
    assert topic_takes(".".join(pattern), ".".join(key)) == plainly(tuple(pattern), tuple(key))
