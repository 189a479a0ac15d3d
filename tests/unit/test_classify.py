"""What kind of failure an exception is, and what payloads have to be."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel, field_validator

from rabbitdlq.consumer.classify import Classes, Classifier, Rule
from rabbitdlq.consumer.handling import HandlerOptions, handler, options_of
from rabbitdlq.consumer.payload import InvalidPayload, PayloadReader
from rabbitdlq.errors import ConfigurationError, Drop, External, Permanent, Transient
from rabbitdlq.message import Message, Undecodable
from rabbitdlq.wire import Properties


class Declined(Permanent):
    """A kind of the user's own."""


CLASSES: Classes = {
    OSError: External,
    ConnectionError: Rule(Transient, max_attempts=2),
    LookupError: Permanent,
    KeyError: Drop,
    Declined: Transient,
}


class TestClassifier:
    @pytest.mark.parametrize(
        ("error", "rule"),
        [
            (ValueError("nobody said"), Rule(Transient)),
            (KeyboardInterrupt(), Rule(Transient)),
            (Transient("x"), Rule(Transient)),
            (External("x"), Rule(External)),
            (Permanent("x"), Rule(Permanent)),
            (Drop("x"), Rule(Drop)),
            (OSError("disk"), Rule(External)),
            (TimeoutError("a child of OSError"), Rule(External)),
            (ConnectionResetError("a grandchild: the nearer one counts"), Rule(Transient, 2)),
            (IndexError("x"), Rule(Permanent)),
            (KeyError("x"), Rule(Drop)),
            (Declined("mapped, although it is of a kind"), Rule(Transient)),
        ],
        ids=repr,
    )
    def test_the_most_specific_class_counts(self, error: BaseException, rule: Rule) -> None:
        classifier = Classifier(CLASSES)

        assert classifier.rule_of(error) == rule
        assert classifier.rule_of(error) == rule, "and again, from memory"

    def test_of_two_bases_the_first_counts_as_in_python(self) -> None:
        class Both(LookupError, OSError):
            pass

        assert Classifier(CLASSES).rule_of(Both()) == Rule(Permanent)

    @pytest.mark.parametrize(
        ("classes", "what"),
        [
            ({"ValueError": Permanent}, "'ValueError' is no class of exceptions"),
            ({dict: Permanent}, "is no class of exceptions"),
            ({ValueError: "permanent"}, "'permanent' is none of Transient, External, Permanent, Drop"),
            ({ValueError: Declined}, "Declined.* is none of"),
        ],
    )
    def test_what_makes_no_sense_is_refused_before_any_message(self, classes: Any, what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            Classifier(classes)

    @pytest.mark.parametrize("attempts", [0, -1, 1.5, True, "3"])
    def test_attempts_are_a_whole_number_above_zero(self, attempts: Any) -> None:
        with pytest.raises(ConfigurationError, match="max_attempts"):
            Rule(Transient, attempts)

    def test_classes_that_are_made_as_it_goes_do_not_fill_the_memory(self) -> None:
        classifier = Classifier(CLASSES)
        for number in range(2_000):
            assert classifier.rule_of(type(f"Made{number}", (OSError,), {})()) == Rule(External)
        assert len(classifier._known) == 1_000


class Customer(BaseModel):
    """Nested in an order."""

    id: int


class Order(BaseModel):
    """What the handler takes."""

    customer: Customer
    total: float

    @field_validator("total")
    @classmethod
    def _broken(cls, total: float) -> float:
        return 1 / total


JSON = Properties(content_type="application/json")


class TestPayloadReader:
    def test_a_payload_is_an_object_of_its_type(self) -> None:
        order = PayloadReader(Order).read(b'{"customer": {"id": "17"}, "total": 2}', JSON)

        assert isinstance(order, Order)
        assert (order.customer.id, order.total) == (17, 0.5)

    @pytest.mark.parametrize(
        ("kind", "body", "value"),
        [
            (list[int], b"[1, 2]", [1, 2]),
            (dict[str, float], b'\xef\xbb\xbf{"a": 1}', {"a": 1.0}),  # a byte order mark, which some put before it
            (int, b"7", 7),
        ],
    )
    def test_any_type_that_pydantic_knows_will_do(self, kind: Any, body: bytes, value: Any) -> None:
        assert PayloadReader(kind).read(body, Properties()) == value

    def test_text_and_bytes_are_validated_as_they_are(self) -> None:
        assert PayloadReader(str).read(b"hello", Properties(content_type="text/plain")) == "hello"
        with pytest.raises(InvalidPayload, match="not a valid Order: Input should be"):
            PayloadReader(Order).read(b"\x01", Properties(content_type="application/octet-stream"))

    def test_every_field_that_is_wrong_is_named_with_what_it_was(self) -> None:
        with pytest.raises(InvalidPayload) as caught:
            PayloadReader(Order).read(b'{"customer": {"id": "x"}}', JSON)

        assert str(caught.value) == (
            "not a valid Order: customer.id: Input should be a valid integer, unable to parse string as an integer "
            "(it is 'x'); total: Field required"
        )

    def test_of_very_many_errors_and_very_long_values_some_are_told(self) -> None:
        with pytest.raises(InvalidPayload) as caught:
            PayloadReader(list[int]).read(json.dumps(["x" * 1_000] * 50).encode(), JSON)

        assert str(caught.value).endswith("; and 30 more")
        assert len(str(caught.value)) < 3_000

    def test_a_validator_that_breaks_is_an_invalid_payload(self) -> None:
        with pytest.raises(InvalidPayload, match="not a valid Order: ZeroDivisionError: float division by zero"):
            PayloadReader(Order).read(b'{"customer": {"id": 1}, "total": 0}', JSON)

    @pytest.mark.parametrize("kind", [None, Order])
    @pytest.mark.parametrize("body", [b"", b'{"a":', b"\xff\xfe"])
    def test_what_is_no_json_is_undecodable_with_or_without_a_type(self, kind: Any, body: bytes) -> None:
        with pytest.raises(Undecodable, match="is not valid application/json"):
            PayloadReader(kind).read(body, JSON)

    @pytest.mark.parametrize("kind", [object(), "not a type"])
    def test_a_type_that_is_none_is_refused_before_any_message(self, kind: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"payload_type: .* cannot be validated"):
            PayloadReader(kind)


class TestHandler:
    def test_a_handler_says_of_itself_what_goes_with_it(self) -> None:
        @handler(classify={ValueError: Permanent}, payload_type=Order)
        async def handle(message: Message) -> None:
            """Do it."""

        assert options_of(handle) == HandlerOptions({ValueError: Permanent}, Order)
        assert handle.__doc__ == "Do it."

    def test_methods_and_objects_too(self) -> None:
        @dataclass
        class Shop:
            @handler(payload_type=Order)
            def handle(self, message: Message) -> None: ...

        assert options_of(Shop().handle).payload_type is Order
        assert options_of(print) == HandlerOptions()
