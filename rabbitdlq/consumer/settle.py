"""Settling: what has to be safe elsewhere is confirmed first, then the delivery is acked or nacked."""

import asyncio
import logging
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import assert_never

import structlog

from rabbitdlq import journal, names
from rabbitdlq.broker import Delivery, Outgoing, PublishLink
from rabbitdlq.consumer.histories import earlier_attempts
from rabbitdlq.consumer.outcome import Dropped, Outcome, Park, Postponed, Released, Retry, Skipped, Succeeded
from rabbitdlq.consumer.rungs import Rungs, Settlement, is_missing
from rabbitdlq.consumer.suspicion import Suspicions
from rabbitdlq.dead_letter import AttemptRecord
from rabbitdlq.errors import BrokerError, BrokerUnavailable, PublishRefused, PublishUnconfirmed
from rabbitdlq.journal import HistoryIndex, JournalReader, JournalWriter
from rabbitdlq.message import Message
from rabbitdlq.parking import Parking, ladder_properties, new_park_id, park_properties
from rabbitdlq.texts import shorten
from rabbitdlq.topology import Topology

__all__ = ["Settler"]

log = structlog.stdlib.get_logger(__name__)

PARK_TIMEOUT = timedelta(seconds=10)


class Settler:
    """Settles deliveries by their outcome; used by every session of one consumer."""

    def __init__(
        self,
        topology: Topology,
        link: PublishLink,
        writer: JournalWriter,
        index: HistoryIndex,
        *,
        worker: str,
        stopping: asyncio.Event,
        over: asyncio.Event,
        park_timeout: timedelta = PARK_TIMEOUT,
    ) -> None:
        """``stopping``: set when the consumer is to end; ``over``: set when the broker sends no more."""
        self._topology = topology
        self._link = link
        self._writer = writer
        self._index = index
        self._worker = worker
        self._park_timeout = park_timeout
        #: the way into a rung that a nack does not take
        self.rungs = Rungs(topology, link, stopping=stopping, over=over, timeout=park_timeout)
        #: the journal's reader of the session at hand
        self.reader: JournalReader | None = None
        self.suspicions = Suspicions(topology)

    async def settle(self, delivery: Delivery, message: Message, outcome: Outcome) -> Settlement:
        """Do what the outcome says, and say what was done: ``too_late`` where the broker delivers the message again,
        ``left_to_broker`` where it could not be parked, ``given_back`` where the consumer ends before it is settled.

        Whatever fails on the way, the message is left where the broker finds it: unacknowledged, on the ladder, or in
        the dead-letter queue.
        """
        match outcome:
            case Succeeded() | Skipped():
                return await self._succeed(delivery, message, outcome)
            case Retry():
                return await self._retry(delivery, message, outcome)
            case Park():
                return await self._park(delivery, message, outcome)
            case Dropped():
                return await self._drop(delivery, message, outcome)
            case Postponed():
                return await self._postpone(delivery, message, outcome)
            case Released():
                return await self.rungs.give_back(delivery)
            case _:
                assert_never(outcome)

    async def _succeed(self, delivery: Delivery, message: Message, outcome: Succeeded | Skipped) -> Settlement:
        settled = delivery.ack()
        if settled and message.attempt > 1:
            self._index.forget(message.id, message.lap, datetime.now(UTC))
            await self._writer.append(journal.recovered(message, self._worker, outcome.duration_ms))
        elif settled and message.lap > 1:
            # whoever replayed it may be waiting to hear
            await self._writer.append(journal.succeeded(message, self._worker, outcome.duration_ms))
        return _done(settled)

    async def _retry(self, delivery: Delivery, message: Message, outcome: Retry) -> Settlement:
        if delivery.gone:
            return _too_late(message)
        event, _ = self._failed_event(message, outcome)
        await self._writer.append(event)
        if self._nack_leads_to(delivery, message, outcome):
            settlement = _done(delivery.nack(requeue=False))
        else:
            properties = ladder_properties(message, message.attempt)
            # from the last rung a nack leads into the dead-letter queue, with attempts left
            keep = delivery.exchange == self._topology.return_exchange and (
                delivery.routing_key == self._topology.rungs[-1].key
            )
            settlement = await self.rungs.put_or_keep(delivery, message, outcome.rung, properties, else_nack=not keep)
        if settlement == "done":
            log.warning(
                "retry_scheduled",
                message_id=message.id,
                queue=message.queue,
                attempt=message.attempt,
                max_attempts=message.max_attempts,
                retry_in_s=outcome.rung.delay.total_seconds(),
                **({} if outcome.asked is None else {"retry_after_s": outcome.asked.total_seconds()}),
                error_type=outcome.failure.type,
                error=shorten(outcome.failure.message, 300),
            )
        return settlement

    def _nack_leads_to(self, delivery: Delivery, message: Message, outcome: Retry) -> bool:
        """Whether the broker itself would bring it to the rung that it shall wait in, and nothing with it that harms.

        It goes by the rung that the message left last, which on a way by publishes is not the number of its failures.
        """
        if self.suspicions.would_travel(delivery):
            return False
        if outcome.asked is None and names.FAILURES not in message.properties.table:
            return True
        if delivery.exchange != self._topology.return_exchange:
            return outcome.rung.number == 1
        return outcome.rung.number > 1 and delivery.routing_key == self._topology.rungs[outcome.rung.number - 2].key

    async def _postpone(self, delivery: Delivery, message: Message, outcome: Postponed) -> Settlement:
        if delivery.gone:
            return _too_late(message)
        if outcome.failure is not None:
            await self._writer.append(journal.postponed(message, outcome.failure, outcome.why, self._worker))
        rung = outcome.rung or self._topology.rungs[0]
        properties = ladder_properties(message, message.attempt - 1, suspect=self.suspicions.mark(delivery))
        settlement = await self.rungs.put_or_keep(delivery, message, rung, properties)
        if settlement == "done":
            failure = outcome.failure
            log.log(
                logging.INFO if failure is None else logging.WARNING,
                "message_postponed",
                message_id=message.id,
                queue=message.queue,
                attempt=message.attempt,
                reason=outcome.why,
                retry_in_s=rung.delay.total_seconds(),
                **({} if failure is None else {"error_type": failure.type, "error": shorten(failure.message, 300)}),
            )
        return settlement

    async def _park(self, delivery: Delivery, message: Message, outcome: Park) -> Settlement:
        if delivery.gone:
            # the broker delivers it again; parking it now as well would make two of one
            return _too_late(message)
        event, record = self._failed_event(message, outcome)
        earlier, partial = await earlier_attempts(self._topology, self._index, self.reader, message)
        parking = Parking(
            reason=outcome.reason,
            failure=outcome.failure,
            history=[*earlier, record],
            worker=self._worker,
            parked_at=datetime.now(UTC),
            park_id=new_park_id(message),
            history_partial=partial,
            repeated=self.suspicions.delivered_before(delivery),
            max_attempts=outcome.max_attempts,
        )
        # told to the journal at the same time: it has the story too if the dead letter does not get there
        told = self._writer.begin(event)
        error = await self._publish_park(message, parking)
        await told
        if error is not None and is_missing(error) and await self.rungs.repaired(message):
            error = await self._publish_park(message, parking)
        if error is not None:
            return await self._not_parked(delivery, message, error)
        settled = delivery.ack()
        if settled:
            self._index.forget(message.id, message.lap, outcome.at)
        log.error(
            "message_parked",
            message_id=message.id,
            queue=message.queue,
            attempt=message.attempt,
            max_attempts=outcome.max_attempts or message.max_attempts,
            reason=outcome.reason,
            dead_letter_queue=self._topology.dlq,
            park_id=parking.park_id,
            error_type=outcome.failure.type,
            error=shorten(outcome.failure.message, 300),
        )
        await self._writer.append(
            journal.parked(message, outcome.reason, outcome.failure, self._worker, parking.park_id)
        )
        return _done(settled)

    async def _drop(self, delivery: Delivery, message: Message, outcome: Dropped) -> Settlement:
        if delivery.gone:
            return _too_late(message)
        # before the ack: what is gone afterwards has to be told of somewhere
        told = await self._writer.append(journal.dropped(message, outcome.failure, self._worker, outcome.duration_ms))
        settled = delivery.ack()
        if settled:
            self._index.forget(message.id, message.lap, datetime.now(UTC))
            log.warning(
                "message_dropped",
                message_id=message.id,
                queue=message.queue,
                attempt=message.attempt,
                reason=shorten(outcome.failure.message, 300),
                journaled=told,
            )
        return _done(settled)

    async def _publish_park(self, message: Message, parking: Parking) -> BrokerError | None:
        """Publish it, and once more if the line was lost meanwhile, all within the deadline; gives the error if any.

        One that had arrived all the same is a copy with the same park id, shown and replayed as one.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._park_timeout.total_seconds()
        error: BrokerError | None = None
        for _ in range(2):
            if isinstance(error, PublishUnconfirmed):
                parking = replace(parking, repeated=True)
            left = timedelta(seconds=deadline - clock())
            if error is not None and left <= timedelta():
                break
            try:
                publisher = await self._link.publisher(left)
                properties = park_properties(message, parking, publisher.connection.frame_max)
                outgoing = Outgoing(self._topology.dlx, shorten(message.routing_key, 255), message.body, properties)
                await publisher.publish(outgoing, timeout=left)
            except (BrokerUnavailable, PublishUnconfirmed) as lost:
                error = lost
            except BrokerError as refused:
                return refused
            else:
                return None
        return error

    async def _not_parked(self, delivery: Delivery, message: Message, error: BrokerError) -> Settlement:
        # the broker dead-letters into the same queue: one that is full or missing makes a classic work queue lose it
        refused = is_missing(error) or (isinstance(error, PublishRefused) and error.later)
        log.error(
            "park_failed",
            message_id=message.id,
            queue=message.queue,
            attempt=message.attempt,
            error=str(error),
            consequence="it waits on the slowest rung and is tried again"
            if refused
            else "nacked: the broker retries it, or parks it without its story, which the journal has",
        )
        if refused:
            await self._link.renew()
            slowest = max(self._topology.rungs, key=lambda rung: rung.delay)
            properties = ladder_properties(message, message.attempt - 1, suspect=self.suspicions.mark(delivery))
            settlement = await self.rungs.put_or_keep(delivery, message, slowest, properties)
        else:
            settlement = _done(delivery.nack(requeue=False))
        return "left_to_broker" if settlement == "done" else settlement

    def _failed_event(self, message: Message, outcome: Retry | Park) -> tuple[journal.Entry, AttemptRecord]:
        failure = outcome.failure
        record = journal.attempt_record(message, failure, self._worker, outcome.at, outcome.duration_ms)
        self._index.add_record(message.id, message.lap, record)
        return journal.failed(message, record, failure), record


def _done(settled: bool) -> Settlement:
    return "done" if settled else "too_late"


def _too_late(message: Message) -> Settlement:
    log.warning(
        "settled_too_late",
        message_id=message.id,
        queue=message.queue,
        attempt=message.attempt,
        consequence="the connection was lost while the handler ran: the broker delivers the message again",
    )
    return "too_late"
