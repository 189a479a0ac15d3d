"""What is said of letters before they are sent, from what is known of them and of their target."""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import httpx
import pytest

from rabbitdlq import names
from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters import preflight as module
from rabbitdlq.dead_letters.facts import LetterFacts
from rabbitdlq.dead_letters.preflight import Finding
from rabbitdlq.dead_letters.replay import Target
from rabbitdlq.management import ManagementApi, QueueState
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers, Properties
from tests.unit.test_management import answers, binding, exchange

ORDERS = Topology("orders", ["5s"])
TARGET = Target.of_queue("orders")
TEN = LetterFacts(count=10, total_bytes=1_000, largest_bytes=200)
URL = "http://ann:s3cret@broker:15672"
MIB = 1024 * 1024


def of_letters(
    letters: LetterFacts, target: Target = TARGET, version: tuple[int, ...] = (4, 0)
) -> dict[str, tuple[str, str]]:
    """By check: the level and the text."""
    found = list(module._of_letters(version, ORDERS, target, letters))
    assert len({finding.check for finding in found}) == len(found)
    return {finding.check: (finding.level, finding.text) for finding in found}


async def by_management(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[httpx.Request], httpx.Response],
    target: Target = TARGET,
    letters: LetterFacts = TEN,
    vhost: str = "/",
) -> list[Finding]:
    api = partial(ManagementApi, transport=httpx.MockTransport(answer))
    monkeypatch.setattr(module, "ManagementApi", api)
    return await module._by_management(vhost, ORDERS, target, letters, URL)


def queue(
    ready: int = 0, *, ready_bytes: int = 0, arguments: dict[str, Any] | None = None, **policy: Any
) -> QueueState:
    definition = {key.replace("_", "-"): value for key, value in policy.items()}
    return QueueState(arguments or {}, definition, ready, ready_bytes, 1)


class TestLetters:
    def test_facts_are_gathered_letter_by_letter(self) -> None:
        facts = LetterFacts()
        for reason, own, more in (
            ("exhausted", "orders", {"expiration": "5"}),
            ("exhausted", "other", {"user_id": "bob"}),
            ("permanent", "orders", {}),
        ):
            headers = Headers({names.PARK_ID: "p", names.REASON: reason, names.QUEUE: own})
            wire = Properties(message_id="1", headers=headers, **more)  # type: ignore[arg-type]
            facts.add(DeadLetter.parse("orders", b"12345", wire))
        moved = Headers({names.PARK_ID: "p", names.ORIGINAL: '{"user_id": "bob", "expiration": "7"}'})
        facts.add(DeadLetter.parse("orders", b"1234567", Properties(headers=moved)))
        facts.add(DeadLetter.parse("orders", b"x" * 100, Properties()), held=True)

        assert facts == LetterFacts(
            count=4,
            total_bytes=22,
            largest_bytes=7,
            reasons=Counter({"exhausted": 2, "permanent": 1, "unknown": 1}),
            origins=Counter({"orders": 3, "other": 1}),
            user_ids=2,
            expirations=2,
            held=1,
        )

    def test_ordinary_letters_give_no_warning(self) -> None:
        facts = LetterFacts(3, 30, 10, Counter(exhausted=3), Counter(orders=3))

        assert of_letters(facts) == {"size": ("ok", "the largest letter has 10 bytes")}

    def test_what_failed_for_good_fails_again(self) -> None:
        facts = LetterFacts(5, 5, 1, Counter(permanent=1, undecodable=3, exhausted=1))

        level, text = of_letters(facts)["return"]
        assert level == "warning"
        assert text.startswith("3 as undecodable and 1 as permanent were parked at the first attempt")

    def test_letters_of_other_queues_and_held_ones_are_told(self) -> None:
        found = of_letters(LetterFacts(5, 5, 1, origins=Counter(orders=3, b=1, a=1), held=1_000))

        assert found["origin"] == (
            "warning",
            "letters that failed in other queues would go to 'orders': 'a' (1), 'b' (1)",
        )
        assert found["held"][0] == "warning"
        assert found["held"][1].startswith("1,000 letters")

    def test_what_does_not_go_with_them_is_told(self) -> None:
        found = of_letters(LetterFacts(5, 5, 1, user_ids=2, expirations=1))

        assert found["user-id"] == ("ok", "2 letters had a user id: they are sent without it")
        assert found["expiration"] == ("ok", "1 letters had an expiration: they are sent without it")

    @pytest.mark.parametrize(
        "target", [Target.of_queue("orders.dlq"), Target("", "orders.dlq"), Target("orders.dlx", "k")]
    )
    def test_the_dead_letter_queue_is_no_target(self, target: Target) -> None:
        assert of_letters(TEN, target)["return"][0] == "error"

    @pytest.mark.parametrize(
        ("size", "version", "level"),
        [
            (16 * MIB, (4, 0), "ok"),
            (16 * MIB + 1, (4, 0), "warning"),
            (16 * MIB + 1, (3, 13), "ok"),
            (128 * MIB + 1, (3, 13), "warning"),
            (512 * MIB, (4, 3), "warning"),
            (512 * MIB + 1, (4, 3), "error"),
        ],
    )
    def test_a_body_above_the_brokers_default_may_be_refused(
        self, size: int, version: tuple[int, ...], level: str
    ) -> None:
        assert of_letters(LetterFacts(1, size, size), version=version)["size"][0] == level

    def test_as_json(self) -> None:
        assert Finding("ok", "size", "fine").as_json() == {"level": "ok", "check": "size", "text": "fine"}


class TestRoom:
    @pytest.mark.parametrize(
        ("state", "level", "words"),
        [
            (queue(5), "ok", "has no length limit"),
            (queue(5, max_length=15), "ok", "takes 15 messages, and has room for 10 of these 10"),
            (
                queue(5, max_length=14, overflow="reject-publish"),
                "warning",
                "room for 9 of these 10 letters: 1 would stay",
            ),
            (
                queue(50, max_length=14, overflow="reject-publish"),
                "warning",
                "room for 0 of these 10 letters: 10 would",
            ),
            (queue(5, max_length=14), "error", r"1 of its oldest messages would be LOST \(drop-head\)"),
            (queue(5, max_length=14, overflow="drop-head"), "error", "LOST"),
            (
                queue(5, max_length=14, dead_letter_exchange="dlx"),
                "error",
                "push 1 of its oldest messages out, through 'dlx'",
            ),
            (
                queue(5, max_length=14, overflow="reject-publish-dlx", arguments={"x-dead-letter-exchange": "dlx"}),
                "error",
                "1 would stay, with a copy of each sent through 'dlx'",
            ),
            (
                queue(0, ready_bytes=500, max_length_bytes=1_000, overflow="reject-publish"),
                "warning",
                "takes 1,000 bytes, and has room for 5 of these 10 letters",
            ),
            (queue(0, ready_bytes=500, max_length_bytes=1_500), "ok", "room for 10 of these 10"),
            (
                queue(0, max_length=100, max_length_bytes=300, overflow="reject-publish"),
                "warning",
                "takes 100 messages and 300 bytes, and has room for 3",
            ),
            (
                queue(0, arguments={"x-max-length": 3, "x-overflow": "reject-publish"}, max_length=50),
                "warning",
                "takes 3 messages",
            ),
            (QueueState({}, None, 1, 1, 1), "unknown", "no figures of it yet"),
            (QueueState({}, {}, None, None, None), "unknown", "no figures of it yet"),
        ],
    )
    def test_what_a_full_queue_would_do_is_told(self, state: QueueState, level: str, words: str) -> None:
        finding = module._room("orders", state, TEN)

        assert (finding.level, finding.check) == (level, "room")
        assert re.search(words, finding.text), finding.text

    def test_empty_letters_take_no_bytes(self) -> None:
        letters = LetterFacts(count=10)

        assert module._room("orders", queue(ready_bytes=5, max_length_bytes=5), letters).level == "ok"

    @pytest.mark.parametrize(
        ("state", "level"),
        [
            (queue(message_ttl=5_000), "warning"),
            (QueueState({"x-message-ttl": 5_000}, {}, 0, 0, 0), "error"),
            (QueueState({"x-message-ttl": 5_000, "x-dead-letter-exchange": "d"}, {}, 0, 0, 0), "warning"),
            (queue(delivery_limit=3), "warning"),
            (queue(delivery_limit=100), None),
            (queue(delivery_limit=-1), None),
            (queue(arguments={"x-delivery-limit": 3}), None),
        ],
    )
    def test_a_queue_that_sends_letters_back_by_itself_is_told(self, state: QueueState, level: str | None) -> None:
        found = [
            each.level for each in module._of_queue(ORDERS, "orders", state, TEN, told=True) if each.check == "return"
        ]

        assert found == ([level] if level else [])


class TestBlocked:
    async def test_a_connection_that_gives_no_answer_after_a_publish_is_blocked(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Silent:
            async def basic_qos(self, **_: Any) -> None:
                await asyncio.Event().wait()

        class Prompt:
            async def basic_qos(self, **_: Any) -> None:
                pass

        monkeypatch.setattr(module, "BLOCKED_SECONDS", 0.01)
        assert await module._is_blocked(cast(Any, Silent()))
        assert not await module._is_blocked(cast(Any, Prompt()))


class TestManagement:
    async def test_without_it_one_finding_says_what_to_give(self) -> None:
        (found,) = await module._by_management("/", ORDERS, TARGET, TEN, None)
        (routed,) = await module._by_management("/", ORDERS, Target("shop", "k"), TEN, None)

        assert (found.level, found.check) == ("unknown", "management")
        assert "give --management-url or RABBITDLQ_MANAGEMENT_URL" in found.text
        assert "every letter is sent mandatory" in routed.text

    async def test_all_is_well(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state = {"arguments": {}, "effective_policy_definition": {}, "messages_ready": 0, "consumers": 0}
        paths = {"health/checks/alarms": {"status": "ok"}, "queues/a%2Fb/orders": state}
        found = await by_management(monkeypatch, answers(paths), vhost="a/b")

        assert [(each.level, each.check) for each in found] == [("ok", "alarm"), ("ok", "room")]

    async def test_alarms_are_errors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        paths = {"health/checks/alarms": {"status": "failed", "alarms": [{"node": "n", "resource": "disk"}]}}
        (found,) = await by_management(monkeypatch, answers(paths))

        assert found == Finding("error", "alarm", "no messages are taken while there are alarms: disk on n")

    @pytest.mark.parametrize("status", [401, 403, 500, 302, 200])
    async def test_a_broken_or_forbidden_one_is_one_unknown(self, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
        (found,) = await by_management(monkeypatch, lambda _: httpx.Response(status, text="<html>"))

        assert (found.level, found.check) == ("unknown", "management")
        assert "http://ann:***@broker:15672" in found.text
        assert "s3cret" not in found.text

    @pytest.mark.parametrize("url", ["nonsense", "http://ann:s3/cret@broker"])
    async def test_a_url_that_is_none_is_one_unknown_too(self, url: str) -> None:
        (found,) = await module._by_management("/", ORDERS, TARGET, TEN, url)

        assert (found.level, found.check) == ("unknown", "management")
        assert "cret" not in found.text

    async def test_a_named_exchange_is_followed_and_each_queue_looked_at(self, monkeypatch: pytest.MonkeyPatch) -> None:
        state = {"arguments": {}, "effective_policy_definition": {}, "messages_ready": 0, "consumers": 0}
        paths = {
            "health/checks/alarms": {"status": "ok"},
            "exchanges/%2F/shop": exchange("direct"),
            "exchanges/%2F/shop/bindings/source": [binding("a", "k"), binding("b", "k"), binding("orders.dlq", "back")],
            "queues/%2F/a": state,
            "queues/%2F/b": state,
            "queues/%2F/orders.dlq": state,
        }

        async def found(key: str) -> list[tuple[str, str]]:
            findings = await by_management(monkeypatch, answers(paths), Target("shop", key))
            return [(each.level, each.check) for each in findings if each.level != "ok"]

        assert await found("k") == [("warning", "route"), ("warning", "consumers"), ("warning", "consumers")]
        assert await found("missing") == [("error", "route")]
        assert ("error", "return") in await found("back")
        paths["exchanges/%2F/shop"] = exchange("headers")
        assert await found("k") == [("unknown", "route")]
