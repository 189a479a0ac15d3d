"""``x-death`` as brokers write it, and as anybody else may."""

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq.deaths import Arrival, arrival, parse_deaths
from rabbitdlq.topology import Topology
from rabbitdlq.wire import Headers
from tests.unit.strategies import header_values, json_values, quick

ORDERS = Topology("orders", ("5s", "30s"))
T1, T2, T3 = (datetime(2024, 1, 1, 12, 0, second, tzinfo=UTC) for second in (1, 2, 3))


def death(
    queue: str,
    reason: str,
    count: Any = 1,
    *,
    exchange: str = "orders.return",
    keys: Any = ("retry.1",),
    time: Any = T1,
) -> dict[str, Any]:
    """One entry as the broker writes it."""
    return {
        "count": count,
        "reason": reason,
        "queue": queue,
        "time": time,
        "exchange": exchange,
        "routing-keys": list(keys),
    }


#: on its way back from the second rung, as RabbitMQ 3.10 to 4.3 write it: the latest death first
AFTER_TWO_FAILURES = [
    death("orders.retry.2.30s", "expired", exchange="orders.dead", time=T3),
    death("orders", "rejected", 2, exchange="shop", keys=["order.created"]),
    death("orders.retry.1.5s", "expired", exchange="orders.dead", time=T2),
]

odd_values = st.one_of(json_values, header_values, st.binary())
#: nearly right, which goes deeper into the reading than noise does
odd_deaths = st.lists(
    st.dictionaries(
        st.sampled_from(["queue", "reason", "count", "exchange", "routing-keys", "time", "odd"]),
        odd_values | st.sampled_from(["orders", "orders.retry.1.5s", "expired", "rejected", ["key"], 3]),
    )
    | odd_values,
    max_size=4,
)


class TestParse:
    def test_entries_are_matched_by_queue_and_reason_whatever_their_place(self) -> None:
        """C14: the count was read from the first entry, which may be any queue's."""
        deaths = parse_deaths(AFTER_TWO_FAILURES)

        assert [(each.queue, each.reason, each.count, each.time) for each in deaths] == [
            ("orders.retry.2.30s", "expired", 1, T3),
            ("orders", "rejected", 2, T1),
            ("orders.retry.1.5s", "expired", 1, T2),
        ]
        assert (deaths[1].exchange, deaths[1].routing_key) == ("shop", "order.created")

    @given(value=odd_values | odd_deaths)
    @quick
    def test_odd_shapes_are_no_deaths_and_never_an_error(self, value: Any) -> None:
        for each in parse_deaths(value):
            assert each.queue
            assert each.reason
            assert each.count >= 1

    @given(value=odd_values | odd_deaths, exchange=st.sampled_from(["orders.return", "shop", ""]), key=st.text())
    @quick
    def test_an_arrival_with_an_odd_header_is_never_an_error(self, value: Any, exchange: str, key: str) -> None:
        way = arrival(ORDERS, exchange, key, parse_deaths(value))

        assert 0 <= way.failures <= 99
        assert way.failures <= way.counted * 99

    @given(value=st.recursive(st.binary(max_size=9), lambda inner: st.lists(inner, max_size=3), max_leaves=5))
    @quick
    def test_a_header_as_the_codec_reads_it_is_never_an_error(self, value: Any) -> None:
        headers = Headers({"x-death": [{"queue": value, "reason": value, "routing-keys": value, "count": value}]})

        parse_deaths(headers.get("x-death"))

    @pytest.mark.parametrize("count", [None, "2", 2.0, True, 0, -1, [2]])
    def test_a_count_that_is_none_is_one_death(self, count: Any) -> None:
        assert parse_deaths([death("orders", "rejected", count)])[0].count == 1

    @pytest.mark.parametrize("lacking", ["queue", "reason"])
    @pytest.mark.parametrize("value", [None, 5, "", []])
    def test_an_entry_without_queue_or_reason_is_none(self, lacking: str, value: Any) -> None:
        assert parse_deaths([death("orders", "rejected") | {lacking: value}]) == ()

    def test_the_keys_of_a_cc_header_are_not_the_publishers(self) -> None:
        found = parse_deaths([death("orders", "rejected", keys=["mine", "carbon", "copy"])])

        assert found[0].routing_key == "mine"


class TestArrival:
    def test_the_newest_rung_tells_how_often_it_failed(self) -> None:
        way = arrival(ORDERS, "orders.return", "retry.2", parse_deaths(AFTER_TWO_FAILURES))

        assert way == Arrival(2, 2, "shop", "order.created")

    @pytest.mark.parametrize("exchange", ["", "shop", "orders.dlx", "payments.return"])
    def test_a_message_that_came_any_other_way_begins_anew_whatever_it_carries(self, exchange: str) -> None:
        """C6: a replayed message kept its counts and was dead at once."""
        way = arrival(ORDERS, exchange, "orders", parse_deaths(AFTER_TWO_FAILURES))

        assert way == Arrival(0, 0, exchange, "orders")

    def test_deaths_in_other_queues_do_not_count(self) -> None:
        foreign = [
            death("payments.retry.2.30s", "expired"),
            death("orders", "rejected", 5),
            death("orders.retry.1.5s", "maxlen", 4),
            death("orders.dlq", "expired", 7),
        ]

        assert arrival(ORDERS, "orders.return", "retry.1", parse_deaths(foreign)).failures == 0
        assert arrival(ORDERS, "orders.return", "retry.1", parse_deaths(foreign)).counted == 0

    def test_a_message_that_went_round_because_a_rung_is_missing_counts_more_than_its_rung(self) -> None:
        round_and_round = [death("orders.retry.1.5s", "expired", 3), death("orders", "rejected", 3)]

        way = arrival(ORDERS, "orders.return", "retry.1", parse_deaths(round_and_round))

        assert (way.failures, way.counted) == (1, 3)

    def test_a_rung_of_an_earlier_ladder_counts_by_its_number(self) -> None:
        way = arrival(ORDERS, "orders.return", "retry.2", parse_deaths([death("orders.retry.2.7s", "expired")]))

        assert way.failures == 2

    def test_a_queue_with_a_number_beyond_all_rungs_is_no_rung(self) -> None:
        way = arrival(
            ORDERS, "orders.return", "retry.1", parse_deaths([death(f"orders.retry.{'9' * 5_000}.5s", "expired")])
        )

        assert (way.failures, way.counted) == (0, 0)

    def test_without_a_death_in_the_work_queue_the_delivery_says_where_it_came_from(self) -> None:
        way = arrival(ORDERS, "orders.return", "retry.1", parse_deaths([death("orders.retry.1.5s", "expired")]))

        assert (way.exchange, way.routing_key) == ("orders.return", "retry.1")

    def test_a_key_that_is_not_utf8_reads_the_same_on_the_delivery_and_in_the_header(self) -> None:
        """A derived id covers the key: read in two ways it would be two ids, and the history would be torn."""
        raw = b"caf\xe9." + "é".encode() * 124
        header = Headers({"x-death": [death("orders", "rejected", keys=[raw])]})
        text = raw.decode("utf-8", "backslashreplace").encode()[:255].decode("utf-8", "ignore")

        first = arrival(ORDERS, "", text, parse_deaths(None))
        later = arrival(ORDERS, "orders.return", "retry.1", parse_deaths(header["x-death"]))

        assert len(raw) == 253
        assert first.routing_key == later.routing_key
        assert first.routing_key.startswith("caf\\xe9.é")
        assert len(first.routing_key.encode()) <= 255


class TestPutIntoARung:
    """A publish into a rung leaves a wait without a rejection before it."""

    def test_a_wait_more_than_rejections_was_begun_by_a_publish(self) -> None:
        way = arrival(ORDERS, "orders.return", "retry.2", parse_deaths([death("orders.retry.2.30s", "expired")]))

        assert (way.nacked_since, way.failures) == (0, 2)

    def test_nacks_after_it_are_counted(self) -> None:
        deaths = [
            death("orders.retry.2.30s", "expired"),
            death("orders", "rejected"),
            death("orders.retry.1.5s", "expired"),
        ]

        assert arrival(ORDERS, "orders.return", "retry.2", parse_deaths(deaths)).nacked_since == 1

    @pytest.mark.parametrize("exchange", ["", "orders.return"])
    def test_the_way_by_nacks_alone_is_none(self, exchange: str) -> None:
        assert arrival(ORDERS, exchange, "retry.2", parse_deaths(AFTER_TWO_FAILURES)).nacked_since is None
        assert arrival(ORDERS, exchange, "retry.2", ()).nacked_since is None
