"""What is wrong with lines of an input: each line is named, and of many with one error no more than can be read."""

from collections import Counter
from collections.abc import Iterator

__all__ = ["Faults"]

#: lines that are told one by one for one and the same error
MOST_TOLD = 20
#: errors that are told apart; further ones are told line by line
MOST_ERRORS = 1_000
#: runs of lines that are remembered for one error, and that are shown of them in the end
MOST_RUNS, MOST_SHOWN = 10_000, 20


class Faults:
    """The lines that failed, by their error: a file that was sent to a queue that is not there has one for each."""

    def __init__(self) -> None:
        #: lines that failed
        self.count = 0
        self._times: Counter[str] = Counter()
        #: first and last line of each run of neighbours that were not told when they failed
        self._untold: dict[str, list[list[int]]] = {}

    def add(self, line: int, why: str) -> str | None:
        """What to say of it at once; None where enough was said."""
        self.count += 1
        if why not in self._times and len(self._times) >= MOST_ERRORS:
            return f"line {line}: {why}"
        self._times[why] += 1
        if self._times[why] <= MOST_TOLD:
            return f"line {line}: {why}"
        runs = self._untold.setdefault(why, [])
        if runs and line == runs[-1][1] + 1:
            runs[-1][1] = line
        elif len(runs) < MOST_RUNS:
            runs.append([line, line])
        return None

    def rest(self) -> Iterator[str]:
        """What was not said before, one line an error: ``and 180 more, lines 21-200: …``."""
        for why, runs in self._untold.items():
            more = self._times[why] - MOST_TOLD
            shown = [str(first) if first == last else f"{first}-{last}" for first, last in _joined(runs)]
            named = ", ".join(shown[:MOST_SHOWN]) + (", …" if len(shown) > MOST_SHOWN else "")
            yield f"and {more:,} more, line{'' if more == 1 else 's'} {named}: {why}"


def _joined(runs: list[list[int]]) -> list[list[int]]:
    """Sorted, and neighbours joined: confirms do not come in the order of the lines."""
    found: list[list[int]] = []
    for first, last in sorted(runs):
        if found and first == found[-1][1] + 1:
            found[-1][1] = last
        else:
            found.append([first, last])
    return found
