"""What a topology asks of a broker, and what it refuses to ask."""

from dataclasses import FrozenInstanceError
from datetime import date, timedelta
from typing import Any

import pytest

from rabbitdlq.entities import BindingEntity, Entities
from rabbitdlq.errors import ConfigurationError
from rabbitdlq.topology import Topology, Version, WorkBinding

V310, V312, V313, V40, V43 = (3, 10, 8), (3, 12, 14), (3, 13, 0), (4, 0, 5), (4, 3, 0)
ORDERS = Topology("orders", ("5s", "30s"), bindings=[WorkBinding("shop", "order.*")])


def arguments(topology: Topology, queue: str, version: Version) -> dict[str, Any]:
    return next(dict(entity.arguments) for entity in topology.entities(version).queues if entity.name == queue)


def ways(entities: Entities, source: str) -> list[BindingEntity]:
    return [binding for binding in entities.bindings if binding.source == source]


class TestValue:
    def test_three_attempts_are_two_waits(self) -> None:
        assert ORDERS.max_attempts == 3
        assert ORDERS.lap == timedelta(seconds=35)
        assert [(rung.number, rung.queue, rung.key) for rung in ORDERS.rungs] == [
            (1, "orders.retry.1.5s", "orders.retry.1"),
            (2, "orders.retry.2.30s", "orders.retry.2"),
        ]

    def test_it_is_frozen_and_equal_to_its_like(self) -> None:
        assert Topology("orders", ["5s"]) == Topology("orders", [timedelta(seconds=5)])
        assert Topology("orders", ["5s"]) != Topology("orders", ["6s"])
        assert len({Topology("orders", ["5s"]), Topology("orders", ["5000ms"])}) == 1
        with pytest.raises(FrozenInstanceError):
            ORDERS.name = "other"  # type: ignore[misc]

    def test_32_rungs_of_any_delays_are_a_ladder(self) -> None:
        topology = Topology("q", [f"{1_234_567 + place}ms" for place in range(32)])

        assert topology.max_attempts == 33

    @pytest.mark.parametrize(
        ("queue", "number"),
        [
            ("orders.retry.1.5s", 1),
            ("orders.retry.2.30s", 2),
            ("orders.retry.1.7s", 1),
            ("orders.retry.9.1h", 9),
            ("orders.retry.first", None),
            ("orders.retry.x.5s", None),
            ("orders.retry.²٣.5s", None),
            ("orders.retry." + "9" * 5_000 + ".5s", None),
            ("orders", None),
            ("orders-eu.retry.1.5s", None),
            ("payments.retry.1.5s", None),
        ],
    )
    def test_a_rung_is_known_by_its_number_also_of_an_earlier_ladder(self, queue: str, number: int | None) -> None:
        rung = ORDERS.rung_of(queue)

        assert (rung and rung.number) == number

    def test_a_name_with_letters_that_mean_something_in_patterns_is_only_a_name(self) -> None:
        topology = Topology("a.b+c", ["5s"])

        assert topology.rung_of("a.b+c.retry.1.5s") is not None
        assert topology.rung_of("aXbbc.retry.1.5s") is None


class TestEntities:
    @pytest.mark.parametrize("version", [V310, V312, V313, V40, V43])
    def test_a_failed_message_climbs_rung_by_rung_and_then_rests(self, version: Version) -> None:
        entities = ORDERS.entities(version)
        work = arguments(ORDERS, "orders", version)

        assert work["x-dead-letter-exchange"] == "orders.dead"
        assert "x-dead-letter-routing-key" not in work  # the key tells the next rung
        assert [(way.destination, way.routing_key) for way in ways(entities, "orders.retry")] == [
            ("orders.retry.2.30s", "orders.retry.1"),
            ("orders.dlx", "orders.retry.2"),
        ]
        assert [way.destination for way in ways(entities, "orders.retry.first")] == ["orders.retry.1.5s"]
        for rung in ORDERS.rungs:
            rung_arguments = arguments(ORDERS, rung.queue, version)
            assert rung_arguments["x-dead-letter-exchange"] == "orders.return"
            assert rung_arguments["x-dead-letter-routing-key"] == rung.key
        assert [way.destination for way in ways(entities, "orders.return")] == ["orders"]
        assert [way.destination for way in ways(entities, "orders.dlx")] == ["orders.dlq"]

    def test_each_delay_has_a_queue_of_its_own(self) -> None:
        """C4: messages expire at the head of a queue only, so a short delay behind a long one waited for it."""
        times = [arguments(ORDERS, rung.queue, V40)["x-message-ttl"] for rung in ORDERS.rungs]

        assert times == [5_000, 30_000]

    def test_two_work_queues_share_nothing(self) -> None:
        """C20: one retry queue for two origins brought messages of the second back to the first."""
        other = Topology("payments", ("5s", "30s"))
        mine, theirs = ORDERS.entities(V40), other.entities(V40)

        assert {queue.name for queue in mine.queues}.isdisjoint(queue.name for queue in theirs.queues)
        assert {exchange.name for exchange in mine.exchanges}.isdisjoint(exchange.name for exchange in theirs.exchanges)

    @pytest.mark.parametrize("version", [V310, V313, V40])
    def test_only_a_rejection_leads_onto_the_ladder(self, version: Version) -> None:
        """C16: a loop made of expiries alone is dropped by the broker without a trace."""
        reasons = {
            way.arguments["x-last-death-reason"]: way.destination
            for way in ways(ORDERS.entities(version), "orders.dead")
            if "x-last-death-reason" in way.arguments
        }

        assert reasons == {
            "rejected": "orders.retry",
            "delivery_limit": "orders.dlx",
            "expired": "orders.dlx",
            "maxlen": "orders.dlx",
        }

    @pytest.mark.parametrize("queue_type", ["quorum", "classic"])
    @pytest.mark.parametrize("version", [V310, V313, V40])
    def test_no_queue_that_holds_messages_expires_or_drops_them(self, queue_type: Any, version: Version) -> None:
        """C39, C43: x-expires deleted a retry queue with the messages in it, max-length the oldest dead letters."""
        topology = Topology("orders", ["5s"], queue_type=queue_type)
        for queue in topology.entities(version).queues:
            held = dict(queue.arguments)
            assert "x-expires" not in held
            if queue.name != topology.journal_queue:
                assert "x-max-length" not in held
                assert "x-max-length-bytes" not in held
        dlq = arguments(topology, "orders.dlq", version)
        assert not {"x-message-ttl", "x-dead-letter-exchange", "x-overflow"} & dlq.keys()

    @pytest.mark.parametrize(
        ("version", "work", "unlimited"),
        [(V310, None, None), (V312, None, None), (V313, 22, None), (V40, 22, -1), (V43, 22, -1)],
    )
    def test_delivery_limits_go_by_the_version(self, version: Version, work: int | None, unlimited: int | None) -> None:
        """C25: below 4.0 a limit of -1 is taken and deletes on the first requeue; from 4.0 on the default is 20."""
        assert arguments(ORDERS, "orders", version).get("x-delivery-limit") == work
        for queue in ("orders.dlq", *(rung.queue for rung in ORDERS.rungs)):
            assert arguments(ORDERS, queue, version).get("x-delivery-limit") == unlimited

    @pytest.mark.parametrize("version", [V310, V313, V40])
    def test_classic_queues_get_no_argument_that_only_quorum_queues_know(self, version: Version) -> None:
        topology = Topology("orders", ["5s"], queue_type="classic", journal="live")
        for queue in topology.entities(version).queues:
            assert not {"x-delivery-limit", "x-dead-letter-strategy", "x-overflow"} & dict(queue.arguments).keys()
            assert queue.arguments["x-queue-type"] == "classic"

    def test_the_dead_letter_queue_may_be_of_another_type(self) -> None:
        topology = Topology("orders", ["5s"], queue_type="classic", dlq_type="quorum")

        assert arguments(topology, "orders.dlq", V40) == {"x-queue-type": "quorum", "x-delivery-limit": -1}
        assert arguments(topology, "orders", V40)["x-queue-type"] == "classic"

    def test_quorum_queues_dead_letter_at_least_once(self) -> None:
        """C68: at-least-once needs reject-publish, or it is at-most-once without a word."""
        for queue in ("orders", *(rung.queue for rung in ORDERS.rungs)):
            held = arguments(ORDERS, queue, V40)
            assert (held["x-dead-letter-strategy"], held["x-overflow"]) == ("at-least-once", "reject-publish")

    def test_the_place_for_the_dead_is_declared_before_the_work_queue(self) -> None:
        """C38: a queue whose dead-letter exchange is missing throws its failures away."""
        entities = ORDERS.entities(V40)

        assert entities.queues[-1].name == "orders"
        assert entities.queues[0].name == "orders.dlq"

    def test_every_binding_joins_things_that_are_declared(self) -> None:
        for version in (V310, V40):
            entities = ORDERS.entities(version)
            exchanges = {exchange.name for exchange in entities.exchanges}
            queues = {queue.name for queue in entities.queues}
            for binding in entities.bindings:
                assert binding.source in exchanges
                assert binding.destination in (queues if binding.destination_type == "queue" else exchanges)
            named = [queue.arguments.get("x-dead-letter-exchange") for queue in entities.queues]
            assert exchanges >= {name for name in named if name}

    def test_exchanges_of_the_application_are_marked_as_theirs(self) -> None:
        theirs = [exchange for exchange in ORDERS.entities(V40).exchanges if exchange.theirs]

        assert [(exchange.name, exchange.type) for exchange in theirs] == [("shop", "topic")]

    def test_a_live_journal_has_no_stream(self) -> None:
        live = Topology("orders", ["5s"], journal="live").entities(V40)

        assert "orders.journal" not in {queue.name for queue in live.queues}
        assert not ways(live, "orders.journal")

    def test_the_journal_keeps_what_it_is_told_to(self) -> None:
        topology = Topology("orders", ["5s"], journal_max_age="2h", journal_max_bytes=5_000_000)

        assert arguments(topology, "orders.journal", V40) == {
            "x-queue-type": "stream",
            "x-max-age": "7200s",
            "x-max-length-bytes": 5_000_000,
            "x-stream-max-segment-size-bytes": 2_500_000,
        }


class TestRefusals:
    @pytest.mark.parametrize(
        ("key", "reason", "given"),
        [
            ("delays", "0 given; a ladder has 1 to 32 rungs", {"delays": []}),
            ("delays", "33 given", {"delays": ["5s"] * 33}),
            ("delays", "is one text; write a list", {"delays": "5s"}),
            ("delays[1]", "'soon' is not a duration", {"delays": ["5s", "soon"]}),
            ("delays[0]", "'-5s' is negative", {"delays": ["-5s"]}),
            ("delays[0]", "is not above zero", {"delays": [timedelta(seconds=-5)]}),
            ("delays[2]", "0ms is not above zero", {"delays": ["5s", "5s", "0ms"]}),
            ("delays[0]", "0.5ms is not a whole number of milliseconds", {"delays": ["0.5ms"]}),
            ("delays[0]", "49.8d is longer than RabbitMQ's 32-bit milliseconds", {"delays": ["49.8d"]}),
            ("delays[0]", "longer than any clock", {"delays": ["9999999999d"]}),
            ("name", "cannot name a queue", {"name": "amq.orders"}),
            ("name", "'': a name is made of", {"name": ""}),
            ("name", "'größe': a name is made of", {"name": "größe"}),
            ("name", "a name is made of", {"name": "orders\n"}),
            ("name", "is longer than 255 bytes", {"name": "x" * 256}),
            ("name", ".retry.ladder', derived from it, is longer than 127 bytes", {"name": "x" * 115}),
            ("queue_type", "'stream' is none of quorum, classic", {"queue_type": "stream"}),
            ("dlq_type", "'lazy' is none of quorum, classic", {"dlq_type": "lazy"}),
            ("journal", "'none' is none of stream, live", {"journal": "none"}),
            ("journal_max_age", "at least one second", {"journal_max_age": "5ms"}),
            ("journal_max_age", "is not a duration", {"journal_max_age": "a week"}),
            ("journal_max_bytes", "not between 1,000,000 and", {"journal_max_bytes": 5}),
            ("journal_max_bytes", "not between", {"journal_max_bytes": 2**63}),
            ("crash_limit", "0 is not between 1 and 1,000,000", {"crash_limit": 0}),
            ("crash_limit", "not between", {"crash_limit": 2**63}),
        ],
    )
    def test_what_a_broker_could_not_hold_is_refused_with_its_key(
        self, key: str, reason: str, given: dict[str, Any]
    ) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            Topology(**{"name": "orders", "delays": ["5s"], **given})

        assert str(refusal.value).startswith(f"{key}: ")
        assert reason in str(refusal.value)

    @pytest.mark.parametrize(
        ("key", "reason", "binding"),
        [
            ("exchange", "the default exchange takes no bindings", WorkBinding("")),
            ("exchange", "a name is made of", WorkBinding("größe")),
            ("exchange", "is this topology's own", WorkBinding("orders.dlx", type="fanout")),
            ("exchange", "is longer than 127 bytes", WorkBinding("x" * 128)),
            ("type", "'x-delayed' is none of direct, fanout, headers, topic", WorkBinding("shop", type="x-delayed")),
            ("key", "longer than 255 bytes", WorkBinding("shop", "ä" * 128)),
            ("arguments", "cannot carry date", WorkBinding("shop", arguments={"since": date(2024, 1, 1)})),
        ],
    )
    def test_a_binding_is_refused_by_its_place(self, key: str, reason: str, binding: WorkBinding) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            Topology("orders", ["5s"], bindings=[WorkBinding("fine", "ä" * 127), binding])

        assert str(refusal.value).startswith(f"bindings[1].{key}: ")
        assert reason in str(refusal.value)

    def test_the_longest_name_that_is_taken_fits_with_everything_derived_from_it(self) -> None:
        entities = Topology("x" * 114, ["4294967295ms"] * 32).entities(V40)

        assert max(len(exchange.name) for exchange in entities.exchanges) == 127
        assert max(len(queue.name) for queue in entities.queues) <= 255
