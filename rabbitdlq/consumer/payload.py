"""Payloads as the handler wants them: decoded, and validated where it names a type."""

from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError

from rabbitdlq.errors import ConfigurationError
from rabbitdlq.message import Undecodable, decode_payload, is_json
from rabbitdlq.texts import printable
from rabbitdlq.wire import Properties

__all__ = ["InvalidPayload", "PayloadReader"]

#: field errors that a failure's text names
MAX_ERRORS = 20


class InvalidPayload(ValueError):
    """The payload is not of the handler's type. The text names each field and what is wrong with it."""


class PayloadReader:
    """Reads payloads, and validates them against a type: a pydantic model, a dataclass, ``list[int]``, whatever."""

    def __init__(self, payload_type: Any = None) -> None:
        """Raises :class:`ConfigurationError` for a type that pydantic cannot validate, or not yet."""
        self._adapter: TypeAdapter[Any] | None = None
        self._name = getattr(payload_type, "__name__", str(payload_type))
        if payload_type is not None:
            try:
                self._adapter = TypeAdapter(payload_type)
                # names in it may have been defined after it; one that is unknown to this day would fail every message
                self._adapter.rebuild(raise_errors=True)
            except (PydanticUserError, TypeError, NameError, SyntaxError) as error:
                reason = str(error).splitlines()[0]
                if isinstance(error, PydanticUndefinedAnnotation):
                    reason += "; what it names has to be there when the Consumer is made, not only for type checkers"
                raise ConfigurationError(f"payload_type: {payload_type!r} cannot be validated: {reason}") from error

    def read(self, body: bytes, properties: Properties) -> Any:
        """The payload; raises :class:`Undecodable`, or :class:`InvalidPayload` with the fields that are wrong.

        What pydantic raises of a model that is wrong itself, as one that a validator uses, is let through.
        """
        if self._adapter is None:
            return decode_payload(body, properties)
        try:
            if is_json(properties):
                try:
                    return self._adapter.validate_json(body)
                except ValidationError as error:
                    if error.errors(include_url=False, include_input=False)[0]["type"] != "json_invalid":
                        raise
            # what is no JSON, or is so only to a reader that takes a little more, which also says best what is wrong
            return self._adapter.validate_python(decode_payload(body, properties))
        except ValidationError as error:
            raise InvalidPayload(self._told(error)) from None
        except (Undecodable, PydanticUserError, PydanticUndefinedAnnotation):
            raise  # the latter two say that the code is wrong, not the payload
        except Exception as error:  # a validator of the user's own broke: it will not do better the next time
            raise InvalidPayload(f"not a valid {self._name}: {type(error).__name__}: {error}") from error

    def _told(self, error: ValidationError) -> str:
        """``not a valid Order: customer.id: Input should be a valid integer (it is 'x'); total: Field required``."""
        words = []
        problems = error.errors(include_url=False, include_context=False)
        for problem in problems[:MAX_ERRORS]:
            place = ".".join(str(part) for part in problem["loc"])
            shown = repr(problem["input"])
            value = "" if problem["type"] == "missing" or len(shown) > 100 else f" (it is {shown})"
            words.append(f"{place + ': ' if place else ''}{problem['msg']}{value}")
        more = f"; and {len(problems) - MAX_ERRORS} more" if len(problems) > MAX_ERRORS else ""
        return printable(f"not a valid {self._name}: {'; '.join(words)}{more}")
