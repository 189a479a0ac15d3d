"""What a consumer's vitals mean, and what metrics and the status server make of them."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rabbitdlq.consumer import ConsumerSummary
from rabbitdlq.consumer.breaker import BreakerState
from rabbitdlq.consumer.counts import MOST_ERRORS, OTHER_ERRORS, AttemptCounts
from rabbitdlq.consumer.health import Health, Phase, Status, Vitals, health_of, worst
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.metrics import exposition
from rabbitdlq.status import StatusServer
from rabbitdlq.topology import Topology

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
AGO = NOW - timedelta(minutes=5)
WELL = Vitals("consuming", AGO, breaker=BreakerState("closed", AGO, 10, 0))


def judged(vitals: Vitals) -> Health:
    return health_of(vitals, queue="orders", worker="w", now=NOW)


class TestHealth:
    def test_a_consumer_that_consumes_and_has_no_trouble_is_ok(self) -> None:
        health = judged(WELL)

        assert (health.status, health.live) == ("ok", True)
        assert {check.status for check in health.checks} == {"ok"}

    @pytest.mark.parametrize("phase", ["starting", "lost", "stopping", "ended"])
    def test_one_that_does_not_consume_is_down_since_then(self, phase: Phase) -> None:
        """C10, C22: it idles, and everything looks well."""
        health = judged(replace(WELL, phase=phase, reason="the broker cancelled the consumer"))

        assert health.status == "down"
        assert (health.check("consuming").status, health.check("consuming").since) == ("down", AGO)
        if phase == "lost":
            assert "the broker cancelled the consumer" in health.check("consuming").text

    @pytest.mark.parametrize(
        ("phase", "live"), [("lost", True), ("starting", True), ("stopping", True), ("ended", False)]
    )
    def test_a_broker_that_is_away_is_no_reason_for_a_restart(self, phase: Phase, live: bool) -> None:
        assert judged(replace(WELL, phase=phase)).live is live

    @pytest.mark.parametrize("phase", ["consuming", "stopping", "ended"])
    def test_one_that_has_drained_its_queue_is_well(self, phase: Phase) -> None:
        """A group's quick queue was called dead while a slow one was still at work, and the process was restarted."""
        health = judged(replace(WELL, phase=phase, drained=True))

        assert (health.status, health.live) == ("ok", True)
        assert health.check("consuming").text == "drained: everything is done"

    @pytest.mark.parametrize(
        ("seconds", "status", "live"), [(2.9, "ok", True), (3.1, "down", True), (29, "down", True), (31, "down", False)]
    )
    def test_a_blocked_event_loop_is_down_and_after_a_while_beyond_help(
        self, seconds: float, status: Status, live: bool
    ) -> None:
        health = judged(replace(WELL, silence=timedelta(seconds=seconds)))

        assert (health.check("event_loop").status, health.status, health.live) == (status, status, live)

    @pytest.mark.parametrize(
        ("changes", "name", "words", "since"),
        [
            ({"journal_failing": (AGO, "no route"), "journal_lost": 1_200}, "journal", ["no route", "1,200"], AGO),
            ({"parking_blocked": (AGO, "low on disk")}, "parking", ["low on disk"], AGO),
            (
                {"parking_blocked": (AGO, "low on disk"), "kept": 1_200, "parks_failed": 3},
                "parking",
                ["low on disk", "1,200 messages wait for a rung", "3 messages left to the broker"],
                AGO,
            ),
            ({"kept": 2}, "parking", ["2 messages wait for a rung"], None),
            ({"parks_failed": 3, "last_park_failed_at": NOW - timedelta(seconds=5)}, "parking", ["3"], None),
            (
                {"breaker": BreakerState("open", AGO, 10, 9, 2, NOW + timedelta(seconds=30))},
                "breaker",
                ["open", "12:00:30"],
                AGO,
            ),
            ({"overdue": 2, "abandoned": 1}, "handlers", ["2 beyond", "1 abandoned"], None),
        ],
        ids=["journal", "blocked", "blocked and kept", "kept", "parks", "breaker", "handlers"],
    )
    def test_trouble_that_leaves_it_working_is_degraded_and_told_of(
        self, changes: dict[str, Any], name: str, words: list[str], since: datetime | None
    ) -> None:
        health = judged(replace(WELL, **changes))

        assert (health.status, health.live) == ("degraded", True)
        assert [check.name for check in health.checks if check.status != "ok"] == [name]
        assert all(word in health.check(name).text for word in words), health.check(name).text
        assert since is None or health.check(name).since == since

    def test_parks_that_failed_long_ago_are_counted_and_no_alarm_any_more(self) -> None:
        health = judged(replace(WELL, parks_failed=3, last_park_failed_at=NOW - timedelta(minutes=2)))

        assert health.status == "ok"
        assert "3 messages" in health.check("parking").text

    def test_it_is_json_with_times_that_have_a_zone(self) -> None:
        told = json.loads(json.dumps(judged(replace(WELL, last_settled_at=NOW)).as_json()))

        assert told["last_settled_at"] == "2026-03-01T12:00:00.000+00:00"
        assert told["checks"][0] == {
            "name": "consuming",
            "status": "ok",
            "text": "consuming",
            "since": "2026-03-01T11:55:00.000+00:00",
        }

    def test_nothing_is_the_worst_of_nothing(self) -> None:
        assert worst([]) == "ok"
        with pytest.raises(KeyError):
            judged(WELL).check("weather")


def test_error_classes_without_end_do_not_make_metrics_without_end() -> None:
    counts = AttemptCounts()
    for number in range(MOST_ERRORS + 20):
        counts.failed(f"Error{number}")
    counts.failed("Error0")

    assert len(counts.errors) == MOST_ERRORS + 1
    assert (counts.errors["Error0"], counts.errors[OTHER_ERRORS]) == (2, 20)


@dataclass
class FakeSigns:
    now: Vitals = WELL
    counts: AttemptCounts = field(default_factory=AttemptCounts)

    def vitals(self) -> Vitals:
        return self.now


@dataclass
class FakeConsumer:
    """What the two look at."""

    topology: Topology = field(default_factory=lambda: Topology("orders", ["5s", "30s"]))
    summary: ConsumerSummary = field(default_factory=ConsumerSummary)
    signs: FakeSigns = field(default_factory=FakeSigns)

    def health(self) -> Health:
        return health_of(self.signs.now, queue=self.topology.name, worker="w", now=NOW)


def samples(*consumers: FakeConsumer) -> dict[tuple[str, ...], float]:
    """By name, queue, and the other labels' values."""
    text = exposition(list(consumers)).decode()  # type: ignore[arg-type]
    return {
        (sample.name, labels.pop("queue"), *labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        for labels in [dict(sample.labels)]
        if "queue" in labels
    }


class TestMetrics:
    def test_what_a_consumer_has_counted_is_told(self) -> None:
        consumer = FakeConsumer(summary=ConsumerSummary(succeeded=7, left_to_broker=2))
        consumer.signs.now = replace(
            WELL, in_flight=3, waiting=4, kept=8, reconnects=5, journal_lost=6, last_settled_at=NOW
        )
        for duration_ms in (0.5, 30.0, 1e7):
            consumer.signs.counts.took(duration_ms)
        consumer.signs.counts.failed("ValueError")

        told = samples(consumer)

        assert told["rabbitdlq_deliveries_total", "orders", "succeeded"] == 7
        assert told["rabbitdlq_deliveries_total", "orders", "parked"] == 0
        assert told["rabbitdlq_attempts_failed_total", "orders", "ValueError"] == 1
        assert told["rabbitdlq_deliveries_in_flight", "orders"] == 3
        assert told["rabbitdlq_deliveries_waiting", "orders"] == 4
        assert told["rabbitdlq_deliveries_kept", "orders"] == 8
        assert told["rabbitdlq_reconnects_total", "orders"] == 5
        assert told["rabbitdlq_journal_events_lost_total", "orders"] == 6
        assert told["rabbitdlq_consuming", "orders"] == 1
        assert told["rabbitdlq_breaker_state", "orders", "closed"] == 1
        assert told["rabbitdlq_breaker_state", "orders", "open"] == 0
        assert told["rabbitdlq_last_settled_timestamp_seconds", "orders"] == NOW.timestamp()
        assert told["rabbitdlq_ladder_delay_seconds", "orders", "orders.retry.2.30s", "2"] == 30
        assert told["rabbitdlq_handler_duration_seconds_bucket", "orders", "0.001"] == 1
        assert told["rabbitdlq_handler_duration_seconds_bucket", "orders", "0.05"] == 2
        assert told["rabbitdlq_handler_duration_seconds_bucket", "orders", "+Inf"] == 3
        assert told["rabbitdlq_handler_duration_seconds_count", "orders"] == 3
        assert told["rabbitdlq_handler_duration_seconds_sum", "orders"] == pytest.approx(1e4, rel=0.01)

    def test_two_consumers_of_a_queue_are_added_up_and_the_worse_one_is_told_of(self) -> None:
        """Two samples of the same name and labels make the whole answer unreadable for Prometheus."""
        two = [FakeConsumer(summary=ConsumerSummary(succeeded=number)) for number in (1, 2)]
        two[1].signs.now = replace(WELL, phase="lost", breaker=BreakerState("open", AGO, 1, 1))
        other = FakeConsumer(topology=Topology("mails", ["5s"]))

        told = samples(*two, other)

        assert told["rabbitdlq_deliveries_total", "orders", "succeeded"] == 3
        assert told["rabbitdlq_deliveries_total", "mails", "succeeded"] == 0
        assert (told["rabbitdlq_consuming", "orders"], told["rabbitdlq_consuming", "mails"]) == (0, 1)
        assert told["rabbitdlq_breaker_state", "orders", "open"] == 1


class TestStatusServer:
    @pytest.fixture
    def consumer(self) -> FakeConsumer:
        return FakeConsumer()

    @pytest.fixture
    def server(self, consumer: FakeConsumer) -> Iterator[StatusServer]:
        with StatusServer([consumer], 0) as server:  # type: ignore[list-item]
            yield server

    @staticmethod
    def ask(server: StatusServer, path: str) -> tuple[int, str, str]:
        try:
            answer = urllib.request.urlopen(f"http://127.0.0.1:{server.port}{path}", timeout=5)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()

    @pytest.mark.parametrize(
        ("changes", "live", "health", "status"),
        [
            ({}, 200, 200, "ok"),
            ({"abandoned": 1}, 200, 200, "degraded"),
            ({"phase": "lost"}, 200, 503, "down"),
            ({"silence": timedelta(minutes=1)}, 503, 503, "down"),
        ],
        ids=["well", "degraded", "lost", "blocked"],
    )
    def test_probes_are_told_what_to_do(
        self, consumer: FakeConsumer, server: StatusServer, changes: Any, live: int, health: int, status: str
    ) -> None:
        consumer.signs.now = replace(WELL, **changes)

        assert self.ask(server, "/live?verbose")[0] == live
        code, content_type, body = self.ask(server, "/health")
        assert (code, content_type, json.loads(body)["status"]) == (health, "application/json", status)

    def test_prometheus_is_served(self, server: StatusServer) -> None:
        code, content_type, body = self.ask(server, "/metrics")

        assert (code, content_type) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert 'rabbitdlq_deliveries_total{outcome="succeeded",queue="orders"} 0.0' in body

    def test_without_the_extra_it_says_what_to_install(
        self, server: StatusServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(__import__("sys").modules, "prometheus_client.core", None)

        code, _, body = self.ask(server, "/metrics")

        assert (code, "rabbitdlq[metrics]" in body) == (501, True)

    def test_another_path_is_not_found(self, server: StatusServer) -> None:
        assert self.ask(server, "/")[0] == 404

    def test_a_client_that_asks_nothing_keeps_nobody_waiting(self, server: StatusServer) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5):
            assert self.ask(server, "/live")[0] == 200

    def test_a_port_in_use_is_one_clear_error(self, consumer: FakeConsumer, server: StatusServer) -> None:
        with pytest.raises(ConfigurationError, match=rf"127\.0\.0\.1:{server.port}: Address already in use"):
            StatusServer([consumer], server.port).start()  # type: ignore[list-item]
