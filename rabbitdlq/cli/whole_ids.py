"""Shortened ids: the first characters of a message id or park id, as lists on narrow terminals show them."""

import re
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import replace

from rabbitdlq.cli.options import Options, run, say
from rabbitdlq.cli.progress import Reporter
from rabbitdlq.dead_letters import DLQManager, Selection
from rabbitdlq.errors import AmbiguousDeadLetter

__all__ = ["SHORTEST", "find_whole", "with_whole_ids"]

#: fewer characters are no id that somebody has read
SHORTEST = 6
#: ids that nobody has shortened: 32 hex digits, with dashes or without
_WHOLE = re.compile(r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
#: letters that an error names
_MOST_NAMED = 20


def with_whole_ids(options: Options, queue: str, selection: Selection) -> Selection:
    """The selection with each id whole, which is found by looking through the queue first.

    What is nobody's beginning stays as it is. Raises :class:`AmbiguousDeadLetter` for what several begin with.
    """
    if not any(map(_may_be_shortened, selection.ids)):
        return selection

    async def look() -> dict[str, str]:
        async with options.manager(queue) as manager:
            return await find_whole(manager, selection.ids)

    whole = run(look())
    for short, id in whole.items():
        if short != id:
            say(f"{short} is {id}")
    return replace(selection, ids=frozenset(whole.get(id, id) for id in selection.ids))


def _may_be_shortened(id: str) -> bool:
    return len(id) >= SHORTEST and not _WHOLE.fullmatch(id)


async def find_whole(manager: DLQManager, ids: Iterable[str]) -> dict[str, str]:
    """The whole message id or park id of those that one letter has: what is exactly so goes before beginnings.

    Raises :class:`AmbiguousDeadLetter` for what several letters begin with.
    """
    exact: dict[str, str] = {}
    begun: dict[str, list[tuple[str, str]]] = {id: [] for id in ids if _may_be_shortened(id)}
    if not begun:
        return {}
    with Reporter(f"reading the dead letters of {manager.topology.name}") as reporter:
        async with aclosing(manager.each(on_progress=reporter.at)) as letters:
            async for letter in letters:
                for short, found in begun.items():
                    if short in (letter.id, letter.park_id):
                        exact[short] = short
                    elif whole := next((id for id in (letter.id, letter.park_id) if id and id.startswith(short)), None):
                        found.append((whole, letter.park_id or letter.id))
                if len(exact) == len(begun):
                    break
    for short, found in begun.items():
        if short not in exact and len(found) > 1:
            named = ", ".join(whole if whole == key else f"{whole} ({key})" for whole, key in found[:_MOST_NAMED])
            raise AmbiguousDeadLetter(f"{len(found):,} dead letters have an id that begins with {short!r}: {named}")
    return exact | {short: found[0][0] for short, found in begun.items() if short not in exact and found}
