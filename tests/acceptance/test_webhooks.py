"""Real payloads: 329 webhooks, published and consumed by the commands, a third of them into the dead-letter queue."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rabbitdlq import names
from tests.acceptance.cli import Shell, handler_failing

WEBHOOKS = Path(__file__).parents[3] / "shared" / "data" / "webhooks.jsonl"


@pytest.mark.skipif(not WEBHOOKS.is_file(), reason="the payloads are not here")
async def test_webhooks_that_fail_lie_in_the_dead_letter_queue_byte_for_byte(shell: Shell) -> None:
    lines = WEBHOOKS.read_bytes().splitlines()
    assert len(lines) == 329
    failing = [line for line in lines if json.loads(line)["event"].startswith("p")]
    shell.write("hooks.py", handler_failing("order['event'].startswith('p')"))
    await shell.declare()

    published = await shell("publish", shell.queue, str(WEBHOOKS))
    consumed = await shell("consume", shell.queue, "--handler", "hooks:handle", "--drain", "--log-level", "critical")

    assert (published.code, published.lines) == (0, ["published 329, failed 0"])
    handled = len(lines) - len(failing)
    assert len(failing) > 50
    assert (consumed.code, consumed.lines) == (
        0,
        [f"{handled} succeeded, {2 * len(failing)} retried, {len(failing)} parked"],
    )
    noted = Counter((what, attempt) for what, _, attempt in shell.noted())
    assert noted == {("succeeded", 1): handled, **{("failed", attempt): len(failing) for attempt in (1, 2, 3)}}
    assert len({(what, id, attempt) for what, id, attempt in shell.noted()}) == len(shell.noted()), "one ran twice"
    parked = await shell.raw.take_all(shell.topology.dlq)
    assert sorted(body for body, _, _ in parked) == sorted(failing)
    for _, properties, _ in parked:
        history = json.loads(str(properties.table[names.HISTORY]))
        assert [record["error_message"] for record in history] == ["boom 1", "boom 2", "boom 3"]
    assert await shell.raw.count(shell.queue) == 0
