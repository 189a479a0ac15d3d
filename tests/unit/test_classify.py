"""What kind of failure an exception is, and what payloads have to be."""

import json
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, TypeAdapter, field_validator
from pydantic.errors import PydanticUserError

from rabbitdlq.consumer.classify import Classes, Classifier, Rule, asked_wait
from rabbitdlq.consumer.handling import HandlerOptions, handler, options_of
from rabbitdlq.consumer.payload import InvalidPayload, PayloadReader
from rabbitdlq.errors import ConfigurationError, Drop, External, Permanent, RetryAfter, Transient
from rabbitdlq.message import Message, Undecodable
from rabbitdlq.wire import Properties

if TYPE_CHECKING:
    from decimal import Decimal


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

    @pytest.mark.parametrize("kind", [Permanent, Drop])
    def test_what_is_never_tried_again_has_no_number_of_attempts(self, kind: Any) -> None:
        """It was taken, and said nothing: with 3 the first failure parked it all the same."""
        with pytest.raises(ConfigurationError, match=f"max_attempts 3 with {kind.__name__}, which is never tried"):
            Rule(kind, 3)


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    """As a task group raises it."""
    return ExceptionGroup("unhandled errors in a TaskGroup", errors)


class Several(ExceptionGroup[Exception]):
    """A group of the user's own."""


class Hopeless(ExceptionGroup[Exception], Permanent):
    """And one that says what it is."""


class TestGroups:
    """All of them were transient, whatever was in them: nothing that a task raised was ever what it said."""

    @pytest.mark.parametrize(
        ("error", "rule", "known"),
        [
            (group(Permanent("x")), Rule(Permanent), True),
            (group(group(group(Drop("x")))), Rule(Drop), True),
            (group(External("x")), Rule(External), True),
            (group(ConnectionResetError("mapped")), Rule(Transient, 2), True),
            (group(IndexError("mapped by its base")), Rule(Permanent), True),
            (group(ValueError("nobody said")), Rule(Transient), False),
            (BaseExceptionGroup("x", [SystemExit(3), Permanent("x")]), Rule(Transient), False),
            (group(Permanent("x"), ValueError("y")), Rule(Transient), False),
            (group(Drop("x"), External("y"), Permanent("z")), Rule(External), True),
            (group(ConnectionError("mapped"), ValueError("y")), Rule(Transient), True),
            (group(ConnectionError("1"), group(ConnectionResetError("2"))), Rule(Transient, 2), True),
            (group(Drop("x"), Permanent("y")), Rule(Permanent), True),
            (group(Drop("x"), group(KeyError("y"))), Rule(Drop), True),
            (Several("mine", [Drop("x")]), Rule(Drop), True),
            (Hopeless("mine", [ValueError("x")]), Rule(Permanent), True),
            (group(Hopeless("mine", [ValueError("x")])), Rule(Permanent), True),
        ],
        ids=repr,
    )
    def test_a_group_is_what_is_in_it_and_of_several_what_loses_least(
        self, error: BaseException, rule: Rule, known: bool
    ) -> None:
        found = Classifier(CLASSES).rule_of(error)

        assert (found, found.known) == (rule, known)

    @pytest.mark.parametrize("mapped", [ExceptionGroup, BaseExceptionGroup, Several])
    def test_a_group_that_is_mapped_is_not_looked_into(self, mapped: type[BaseException]) -> None:
        classifier = Classifier({mapped: Rule(External, 2), Exception: Permanent})
        error = Several("mine", [Drop("x")])

        assert classifier.rule_of(error) == Rule(External, 2)
        assert classifier.inside(error) == [error]
        assert classifier.rule_of(group(error, Drop("y"))) == Rule(External, 2)

    def test_what_every_exception_is_says_nothing_of_groups(self) -> None:
        classifier = Classifier({Exception: Permanent, BaseException: Permanent})

        assert classifier.rule_of(group(Drop("x"))) == Rule(Drop)
        assert classifier.rule_of(group(ValueError("x"))) == Rule(Permanent)

    def test_the_longest_of_the_waits_that_were_asked_for_counts(self) -> None:
        inside = Classifier().inside(group(RetryAfter(5), group(RetryAfter("1m"), ValueError("x")), RetryAfter(7)))

        assert asked_wait(inside) == timedelta(minutes=1)
        assert asked_wait([ValueError("x")]) is None

    @pytest.mark.parametrize("delay", [None, 5, "5s"])
    def test_one_that_does_not_say_how_long_in_our_words_asks_for_nothing(self, delay: Any) -> None:
        """It has a constructor of its own that does not call ours: the message was parked without its story."""

        class Busy(RetryAfter):
            def __init__(self) -> None:
                if delay is not None:
                    self.delay = delay

        assert asked_wait([Busy()]) is None
        assert Classifier().rule_of(Busy()).known


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


class Priced(BaseModel):
    """What it names is there for type checkers only."""

    price: "Decimal"


@dataclass
class Basket:
    """What it holds is defined later."""

    lines: "list[Line]"


class Line(BaseModel):
    """One of them."""

    id: int


class Careless(BaseModel):
    """Its validator uses a type that pydantic cannot validate."""

    price: float

    @field_validator("price")
    @classmethod
    def _wrong(cls, price: float) -> float:
        TypeAdapter(Priced).validate_python({"price": price})
        return price


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

    @pytest.mark.parametrize("kind", [Priced, list[Priced], "Priced"], ids=["model", "list", "text"])
    def test_so_is_one_that_names_what_is_not_there(self, kind: Any) -> None:
        """With an import for type checkers only, every message was parked as invalid."""
        with pytest.raises(
            ConfigurationError, match=r"^payload_type: .*Priced.* cannot be validated: name '.*' is not"
        ):
            PayloadReader(kind)

    def test_what_a_type_names_may_be_defined_after_it(self) -> None:
        basket = PayloadReader(Basket).read(b'{"lines": [{"id": 1}]}', JSON)

        assert basket == Basket([Line(id=1)])

    def test_a_model_that_is_wrong_itself_is_no_invalid_payload(self) -> None:
        with pytest.raises(PydanticUserError, match=r"Priced.* is not fully defined"):
            PayloadReader(Careless).read(b'{"price": 1}', JSON)


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

            @handler(payload_type=Customer)
            def __call__(self, message: Message) -> None: ...

        assert options_of(Shop().handle).payload_type is Order
        assert options_of(Shop()).payload_type is Customer
        assert options_of(partial(Shop())).payload_type is Customer
        assert options_of(print) == HandlerOptions()

    def test_a_partial_is_marked_as_its_function_is(self) -> None:
        """It ran with none of its options: another payload type, other classes, other times."""

        @handler(payload_type=Order)
        def handle(database: str, message: Message, *, table: str = "") -> None: ...

        assert options_of(partial(partial(handle, "db"), table="orders")).payload_type is Order
        assert options_of(handler(payload_type=Customer)(partial(handle, "db"))).payload_type is Customer
