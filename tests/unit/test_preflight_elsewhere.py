"""Letters that are sent or moved to another queue than the one they failed in: its handler is another one, or none."""

from collections import Counter

import pytest

from rabbitdlq.dead_letters.facts import LetterFacts
from rabbitdlq.dead_letters.preflight import _of_letters
from rabbitdlq.dead_letters.replay import Target
from rabbitdlq.topology import Topology

ORDERS = Topology("orders", ["5s"])


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (Target.of_queue("orders"), True),
        (Target.of_queue("refunds"), True),
        (Target("shop", "order.created"), True),
        (Target.of_queue("orders.later"), False),
    ],
)
def test_that_they_fail_again_is_told_of_a_queue_that_they_failed_in(target: Target, told: bool) -> None:
    letters = LetterFacts(3, 3, 1, Counter(permanent=3), Counter(orders=2, refunds=1))

    texts = [finding.text for finding in _of_letters((4, 0), ORDERS, target, letters) if finding.check == "return"]

    assert bool([text for text in texts if "they fail again" in text]) is told
