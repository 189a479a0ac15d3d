"""The management HTTP API, as far as it is needed: importing definitions, and what AMQP does not tell.

See https://www.rabbitmq.com/docs/management#http-api.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

from rabbitdlq.broker import shown_url
from rabbitdlq.broker.translate import AT_BEHIND_HOST
from rabbitdlq.errors import AccessDenied, BrokerError, BrokerUnavailable, ConfigurationError
from rabbitdlq.texts import printable, shorten

__all__ = [
    "BindingState",
    "ExchangeState",
    "ManagementApi",
    "QueueState",
    "Routes",
    "import_definitions",
    "topic_takes",
]

TIMEOUT_SECONDS = 30.0
#: for a question whose answer is nice to have
_LOOK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class QueueState:
    """A queue as the API shows it: up to five seconds old. None where the API has no figures yet."""

    arguments: Mapping[str, Any]
    #: what applies of all policies, by their own keys: ``max-length``
    policy: Mapping[str, Any] | None
    #: ready for delivery
    messages: int | None
    message_bytes: int | None
    consumers: int | None

    def limit(self, key: str) -> int | None:
        """The limit that applies: the lower one of the argument and the policy; None where there is none."""
        found = (_number(self.arguments.get(f"x-{key}")), _number((self.policy or {}).get(key)))
        return min((value for value in found if value is not None), default=None)

    def setting(self, key: str) -> str | None:
        """The word that applies: the argument's, else the policy's; None where there is none."""
        found = (self.arguments.get(f"x-{key}"), (self.policy or {}).get(key))
        return next((printable(value) for value in found if isinstance(value, str)), None)


@dataclass(frozen=True, slots=True)
class ExchangeState:
    """An exchange as the API shows it."""

    type: str
    alternate: str | None


@dataclass(frozen=True, slots=True)
class BindingState:
    """Where an exchange leads to."""

    destination: str
    to_queue: bool
    routing_key: str


@dataclass(frozen=True, slots=True)
class Routes:
    """Where a key leads to."""

    #: by name
    queues: tuple[str, ...]
    #: exchanges that decide by more than the key, with their type
    unclear: tuple[str, ...]


class ManagementApi:
    """Questions to the API, without side effects. Used as an async context manager.

    Every question raises :class:`AccessDenied` for an account that may not ask it, :class:`BrokerUnavailable` where
    nothing answers, and :class:`BrokerError` where the answer is not one of this API.
    """

    def __init__(self, url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises :class:`ConfigurationError` for a URL that is none."""
        self._shown = shown_url(url)
        self._base, auth = _parts(url)
        self._client = httpx.AsyncClient(auth=auth, timeout=_LOOK_SECONDS, transport=transport)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def queue(self, vhost: str, name: str) -> QueueState | None:
        """The queue; None where there is none."""
        values = await self._get("queues", vhost, name)
        if not isinstance(values, dict):
            return None
        policy = values.get("effective_policy_definition")
        return QueueState(
            arguments=_mapping(values.get("arguments")),
            # an empty one is written as a list by some versions
            policy=None if policy is None else _mapping(policy),
            messages=_number(values.get("messages_ready")),
            message_bytes=_number(values.get("message_bytes_ready")),
            consumers=_number(values.get("consumers")),
        )

    async def exchange(self, vhost: str, name: str) -> ExchangeState | None:
        """The exchange; None where there is none."""
        values = await self._get("exchanges", vhost, name)
        if not isinstance(values, dict):
            return None
        alternate = _mapping(values.get("arguments")).get("alternate-exchange")
        return ExchangeState(_text(values.get("type")), alternate if isinstance(alternate, str) else None)

    async def bindings(self, vhost: str, exchange: str) -> list[BindingState]:
        """What is bound to the exchange."""
        values = await self._get("exchanges", vhost, exchange, "bindings", "source")
        return [
            BindingState(
                destination=_text(each.get("destination")),
                to_queue=each.get("destination_type") == "queue",
                routing_key=_text(each.get("routing_key")),
            )
            for each in (values if isinstance(values, list) else [])
            if isinstance(each, dict)
        ]

    async def routes(self, vhost: str, exchange: str, key: str) -> Routes:
        """Where a message with this key goes from this exchange, through further exchanges too."""
        queues, unclear = set[str](), set[str]()
        ahead, seen = [exchange], set[str]()
        while ahead:
            name = ahead.pop()
            state = None if name in seen else await self.exchange(vhost, name)
            seen.add(name)
            if state is None:
                continue
            if state.type not in _TAKES:
                unclear.add(f"{name!r} ({state.type})")
                continue
            takes = _TAKES[state.type]
            taken = [each for each in await self.bindings(vhost, name) if takes(each.routing_key, key)]
            queues |= {each.destination for each in taken if each.to_queue}
            ahead += [each.destination for each in taken if not each.to_queue]
            if not taken and state.alternate is not None:
                ahead.append(state.alternate)
        return Routes(tuple(sorted(queues)), tuple(sorted(unclear)))

    async def alarms(self) -> list[str]:
        """The alarms in effect in the cluster, like ``memory on rabbit@one``; publishers are blocked by any of them."""
        values = await self._get("health", "checks", "alarms")
        alarms = values.get("alarms") if isinstance(values, dict) else None
        found = [
            f"{_text(each.get('resource'))} on {_text(each.get('node'))}"
            for each in (alarms if isinstance(alarms, list) else [])
            if isinstance(each, dict)
        ]
        if isinstance(values, dict) and values.get("status") != "ok" and not found:
            return [_text(values.get("reason")) or "of an unknown kind"]
        return found

    async def _get(self, *path: str) -> Any:
        """What is there; None where nothing is."""
        url = f"{self._base}/api/{'/'.join(quote(part, safe='') for part in path)}"
        try:
            answer = await self._client.get(url)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BrokerUnavailable(f"management API at {self._shown}: {str(error) or type(error).__name__}") from error
        if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            raise AccessDenied(
                f"management API at {self._shown}: the account may not look ({_reason(answer)}); it needs the tag "
                "'management', and a permission in the virtual host"
            )
        if answer.status_code == HTTPStatus.NOT_FOUND and "json" in answer.headers.get("content-type", ""):
            return None
        # a health check that fails says so by its status
        if not answer.is_success and answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
            raise BrokerError(f"management API at {self._shown}: {answer.status_code} {_reason(answer)}")
        try:
            return answer.json()
        except ValueError as error:
            raise BrokerError(
                f"management API at {self._shown}: {answer.status_code}, and no JSON; is it the management API?"
            ) from error


def topic_takes(pattern: str, key: str) -> bool:
    """Whether a topic exchange takes this key through this binding: ``*`` is one word, ``#`` any number of words.

    >>> [topic_takes("order.*", "order.created"), topic_takes("#.eu", "eu"), topic_takes("order.*", "order")]
    [True, True, False]
    """
    words = key.split(".") if key else []
    #: how many words can have been taken by the parts so far
    places = {0}
    for part in pattern.split(".") if pattern else []:
        if part == "#":
            places = set(range(min(places, default=len(words) + 1), len(words) + 1))
        else:
            places = {place + 1 for place in places if place < len(words) and part in ("*", words[place])}
    return len(words) in places


#: whether a binding's key takes a message's, by the type of the exchange; others look at more than the key
_TAKES: Mapping[str, Callable[[str, str], bool]] = {
    "direct": str.__eq__,
    "fanout": lambda binding, key: True,
    "topic": topic_takes,
}


def import_definitions(url: str, definitions: Mapping[str, Any]) -> None:
    """Load definitions into the broker, as its management UI's import does.

    What exists already is skipped by the broker without a word, so check afterwards. Raises :class:`AccessDenied` for
    an account that may not, :class:`BrokerUnavailable` where nothing answers, :class:`ConfigurationError` for a URL
    that is none, and :class:`BrokerError` with the broker's reason.
    """
    shown = shown_url(url)
    base, auth = _parts(url)
    try:
        answer = httpx.post(f"{base}/api/definitions", json=dict(definitions), auth=auth, timeout=TIMEOUT_SECONDS)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BrokerUnavailable(f"management API at {shown}: {str(error) or type(error).__name__}") from error
    if answer.status_code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise AccessDenied(f"management API at {shown}: the account may not import definitions (it needs a tag)")
    if not answer.is_success:
        raise BrokerError(f"management API at {shown}: {answer.status_code} {answer.text[:300]}")


def _parts(url: str) -> tuple[str, tuple[str, str]]:
    """The address without account, query and last slash, and the account; a proxy may serve it below a path."""
    shown, form = shown_url(url), "write http://user:password@host:15672"
    if AT_BEHIND_HOST.search(url):
        # what was meant to be the password has been read as port and path: it must not be shown
        raise ConfigurationError(f"management URL: there is an @ behind the host; {form}")
    try:
        address = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"management URL: {shown!r}: {error}; {form}") from error
    if address.scheme not in {"http", "https"} or not address.host:
        raise ConfigurationError(f"management URL: {shown!r} is not http:// or https:// with a host; {form}")
    bare = address.copy_with(username=None, password=None, query=None, fragment=None)
    return str(bare).rstrip("/"), (address.username, address.password)


def _reason(answer: httpx.Response) -> str:
    try:
        values = answer.json()
    except ValueError:
        values = None
    reason = values.get("reason") if isinstance(values, dict) else None
    return shorten(printable(reason if isinstance(reason, str) else answer.reason_phrase), 300)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: Any) -> str:
    return printable(value) if isinstance(value, str) else ""
