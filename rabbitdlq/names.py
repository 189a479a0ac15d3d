"""The words of the wire: header names, reasons, event names. This module imports nothing."""

#: headers of a dead letter; flat, so that the management UI shows each on a line
REASON = "dlq-reason"
ERROR_TYPE = "dlq-error-type"
ERROR_MESSAGE = "dlq-error-message"
TRACEBACK = "dlq-traceback"
FINGERPRINT = "dlq-fingerprint"
ATTEMPTS = "dlq-attempts"
MAX_ATTEMPTS = "dlq-max-attempts"
QUEUE = "dlq-queue"
EXCHANGE = "dlq-exchange"
ROUTING_KEY = "dlq-routing-key"
FIRST_FAILED_AT = "dlq-first-failed-at"
PARKED_AT = "dlq-parked-at"
WORKER = "dlq-worker"
LAP = "dlq-lap"
PARK_ID = "dlq-park-id"
HISTORY = "dlq-history"
HISTORY_PARTIAL = "dlq-history-partial"
ORIGINAL = "dlq-original"
#: this may be a second copy: its message had been delivered before, or its park was repeated after a lost confirm
REPEATED = "dlq-repeated"
#: the message came without an id and got a derived one
ID_DERIVED = "dlq-id-derived"
#: on a message that was put into a rung by a publish, not by a nack: how often it had failed by then
FAILURES = "dlq-failures"
#: on a message that was postponed: how many crashes may have brought it back before, and since when that is told
SUSPECT = "dlq-suspect"
#: on a replayed message: the park id of the dead letter it was, the same on a copy that a crash sent twice
REPLAY_ID = "dlq-replay-id"

#: all of them; a publisher's own headers that only look alike stay with the message
OURS = frozenset(
    {
        REASON,
        ERROR_TYPE,
        ERROR_MESSAGE,
        TRACEBACK,
        FINGERPRINT,
        ATTEMPTS,
        MAX_ATTEMPTS,
        QUEUE,
        EXCHANGE,
        ROUTING_KEY,
        FIRST_FAILED_AT,
        PARKED_AT,
        FAILURES,
        WORKER,
        LAP,
        PARK_ID,
        HISTORY,
        HISTORY_PARTIAL,
        ORIGINAL,
        ID_DERIVED,
        REPLAY_ID,
        REPEATED,
        SUSPECT,
    }
)
#: what a replayed message keeps: where it is from and how often it has been here
KEPT_ON_REPLAY = frozenset({EXCHANGE, ROUTING_KEY, LAP, ORIGINAL, ID_DERIVED, REPLAY_ID, FIRST_FAILED_AT})

#: headers of the broker's own book-keeping; on a republished message they would lie or be counted on
BROKER_HEADERS = frozenset({"x-death", "x-delivery-count", "x-acquired-count"})
#: of these, what a queue adds to each delivery
DELIVERY_COUNTS = frozenset({"x-delivery-count", "x-acquired-count"})
BROKER_HEADER_PREFIXES = ("x-first-death-", "x-last-death-")


def is_brokers(name: str) -> bool:
    """Whether the broker writes headers of this name."""
    return name in BROKER_HEADERS or name.startswith(BROKER_HEADER_PREFIXES)


#: extra routing: a republished message would reach the siblings again
ROUTING_HEADERS = frozenset({"CC", "BCC"})

#: why a message rests in the dead-letter queue
EXHAUSTED = "exhausted"
PERMANENT = "permanent"
UNDECODABLE = "undecodable"
#: the payload is not of the handler's type
INVALID = "invalid"
#: the last attempt took too long
TIMEOUT = "timeout"
#: its handler was begun several times, and each time the process was gone before it ended
CRASHED = "crashed"
PUSHED = "pushed"
#: deaths that the broker's own routes brought here, by its own words
BROKER_REASONS = {
    "rejected": EXHAUSTED,
    "delivery_limit": "delivery-limit",
    "expired": "expired",
    "maxlen": "maxlen",
}

#: events of the journal; the routing key is the event's name
FAILED = "failed"
PARKED = "parked"
RECOVERED = "recovered"
REPLAYED = "replayed"
DROPPED = "dropped"
PURGED = "purged"
POPPED = "popped"
MOVED = "moved"
RESTORED = "restored"
#: a message that was replayed succeeded at the first attempt of its new lap
SUCCEEDED = "succeeded"
#: the handler could not do it now, and that spent no attempt
POSTPONED = "postponed"
#: a message that a crash had brought back: its handler begins, and has ended, however it did
STARTED = "started"
ENDED = "ended"
#: an operator's run: what it is about to do, how far it has come; its end is the operation's own event
RUN_STARTED = "run-started"
RUN_PLANNED = "run-planned"
RUN_SENDING = "run-sending"
RUN_SETTLED = "run-settled"
#: written by a reader that wants to know when it has read everything that was there when it started
MARKER = "marker"
