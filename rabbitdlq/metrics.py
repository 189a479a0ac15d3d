"""What Prometheus is told of consumers: read from the counts they keep anyway, when somebody asks.

Needs ``prometheus-client``, the extra ``metrics``. In a program of your own::

    prometheus_client.REGISTRY.register(ConsumerCollector([consumer]))
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rabbitdlq.consumer import Consumer, ConsumerSummary
from rabbitdlq.consumer.counts import BOUNDS_SECONDS
from rabbitdlq.consumer.health import Vitals
from rabbitdlq.errors import ConfigurationError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

__all__ = ["CONTENT_TYPE", "ConsumerCollector", "exposition"]

#: of the text format that every Prometheus reads
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BREAKER = ("closed", "open", "half-open")


class ConsumerCollector:
    """A collector for a registry of ``prometheus_client``. All metrics have the label ``queue``.

    Several consumers of one queue in one process are added up.
    """

    def __init__(self, consumers: Iterable[Consumer]) -> None:
        """Raises :class:`ConfigurationError` where ``prometheus-client`` is not installed."""
        try:
            import prometheus_client.core as families  # noqa: PLC0415 - an extra that most do without
        except ImportError as error:
            raise ConfigurationError(
                "metrics need prometheus-client; install it with: pip install 'rabbitdlq[metrics]'"
            ) from error
        self._families = families
        self._consumers = list(consumers)

    def describe(self) -> "list[Metric]":
        """Nothing: without it a registry would collect once only to learn the names."""
        return []

    def collect(self) -> "Iterable[Metric]":
        """The families, as of now. May be called from any thread."""
        queues: dict[str, list[tuple[Consumer, Vitals]]] = {}
        for consumer in self._consumers:
            vitals = consumer.signs.vitals()
            queues.setdefault(consumer.topology.name, []).append((consumer, vitals))
        return [*self._counters(queues), *self._gauges(queues), self._durations(queues)]

    def _counters(self, queues: "dict[str, list[tuple[Consumer, Vitals]]]") -> "list[Metric]":
        counter = self._families.CounterMetricFamily
        deliveries = counter(
            "rabbitdlq_deliveries", "Deliveries that ended, by how they ended.", labels=["queue", "outcome"]
        )
        failed = counter(
            "rabbitdlq_attempts_failed",
            "Runs of the handler that failed, by the class of the error; rare ones together as other.",
            labels=["queue", "error_type"],
        )
        plain = {
            "rabbitdlq_reconnects": "Times that consuming began again after it was lost.",
            "rabbitdlq_journal_events_lost": "Journal events that could not be written.",
            "rabbitdlq_parks_failed": "Messages that could not be parked and were left to the broker's own way.",
            "rabbitdlq_publishing_blocked": "Times that an alarm of the broker began to keep parks from being written.",
        }
        families = {name: counter(name, text, labels=["queue"]) for name, text in plain.items()}
        for queue, consumers in queues.items():
            for field in fields(ConsumerSummary):
                number = sum(getattr(consumer.summary, field.name) for consumer, _ in consumers)
                deliveries.add_metric([queue, field.name], number)
            errors: Counter[str] = Counter()
            for consumer, _ in consumers:
                errors.update(dict(consumer.signs.counts.errors))
            for error_type, number in sorted(errors.items()):
                failed.add_metric([queue, error_type], number)
            for name, numbers in {
                "rabbitdlq_reconnects": [vitals.reconnects for _, vitals in consumers],
                "rabbitdlq_journal_events_lost": [vitals.journal_lost for _, vitals in consumers],
                "rabbitdlq_parks_failed": [vitals.parks_failed for _, vitals in consumers],
                "rabbitdlq_publishing_blocked": [vitals.blockings for _, vitals in consumers],
            }.items():
                families[name].add_metric([queue], sum(numbers))
        return [deliveries, failed, *families.values()]

    def _gauges(self, queues: "dict[str, list[tuple[Consumer, Vitals]]]") -> "list[Metric]":
        gauge = self._families.GaugeMetricFamily
        plain = {
            "rabbitdlq_consuming": "Whether the broker gives this consumer messages: 1, or 0.",
            "rabbitdlq_parking_blocked": "Whether an alarm of the broker keeps messages from being parked: 1, or 0.",
            "rabbitdlq_deliveries_in_flight": "Deliveries in a handler, or being settled.",
            "rabbitdlq_deliveries_waiting": "Deliveries that are here and not begun.",
            "rabbitdlq_deliveries_kept": "Deliveries that wait unacknowledged for a rung that cannot be reached.",
            "rabbitdlq_handlers_overdue": "Handlers at work beyond their soft timeout.",
            "rabbitdlq_handlers_abandoned": "Handlers that go on although their message is settled.",
            "rabbitdlq_event_loop_silence_seconds": "Since the event loop was last seen alive.",
            "rabbitdlq_last_settled_timestamp_seconds": "When a delivery ended last, to about a second; 0 for never.",
        }
        families = {name: gauge(name, text, labels=["queue"]) for name, text in plain.items()}
        states = "1 for the breaker's state, 0 for the others."
        breaker = gauge("rabbitdlq_breaker_state", states, labels=["queue", "state"])
        delays, labels = "The delay of each rung of the ladder.", ["queue", "rung", "retry_queue"]
        rungs = gauge("rabbitdlq_ladder_delay_seconds", delays, labels=labels)
        for queue, consumers in queues.items():
            vitals = [each for _, each in consumers]
            settled = [each.last_settled_at.timestamp() for each in vitals if each.last_settled_at is not None]
            for name, number in {
                "rabbitdlq_consuming": min(each.phase == "consuming" for each in vitals),
                "rabbitdlq_parking_blocked": max(each.parking_blocked is not None for each in vitals),
                "rabbitdlq_deliveries_in_flight": sum(each.in_flight for each in vitals),
                "rabbitdlq_deliveries_waiting": sum(each.waiting for each in vitals),
                "rabbitdlq_deliveries_kept": sum(each.kept for each in vitals),
                "rabbitdlq_handlers_overdue": sum(each.overdue for each in vitals),
                "rabbitdlq_handlers_abandoned": sum(each.abandoned for each in vitals),
                "rabbitdlq_event_loop_silence_seconds": max(each.silence.total_seconds() for each in vitals),
                "rabbitdlq_last_settled_timestamp_seconds": max(settled, default=0.0),
            }.items():
                families[name].add_metric([queue], float(number))
            breakers = [each.breaker.position for each in vitals if each.breaker is not None]
            if breakers:
                at = max(breakers, key=("closed", "half-open", "open").index)
                for state in _BREAKER:
                    breaker.add_metric([queue, state], float(state == at))
            for rung in consumers[0][0].topology.rungs:
                rungs.add_metric([queue, str(rung.number), rung.queue], rung.delay.total_seconds())
        return [*families.values(), breaker, rungs]

    def _durations(self, queues: "dict[str, list[tuple[Consumer, Vitals]]]") -> "Metric":
        family = self._families.HistogramMetricFamily(
            "rabbitdlq_handler_duration_seconds", "How long the handler ran, whatever came of it.", labels=["queue"]
        )
        for queue, consumers in queues.items():
            counted = [consumer.signs.counts.cumulative() for consumer, _ in consumers]
            ends = [*(f"{bound:g}" for bound in BOUNDS_SECONDS), "+Inf"]
            buckets = [(end, sum(each[at][1] for each in counted)) for at, end in enumerate(ends)]
            family.add_metric([queue], buckets, sum(consumer.signs.counts.seconds for consumer, _ in consumers))
        return family


def exposition(consumers: Sequence[Consumer]) -> bytes:
    """The metrics of these consumers and of this process in Prometheus' text format.

    Raises :class:`ConfigurationError` where ``prometheus-client`` is not installed.
    """
    collector = ConsumerCollector(consumers)
    from prometheus_client import (  # noqa: PLC0415 - an extra that most do without
        CollectorRegistry,
        GCCollector,
        ProcessCollector,
        generate_latest,
    )

    registry = CollectorRegistry()
    registry.register(collector)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return bytes(generate_latest(registry))
