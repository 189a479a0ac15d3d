"""Which deliveries are settled and not yet told to the broker, and the fewest frames that tell it."""

import itertools

from rabbitdlq.broker.frames import How

__all__ = ["Settlements"]


class Settlements:
    """The deliveries of one channel that are open or not told. Pure: what has to be written is asked for.

    The broker numbers the deliveries of a channel 1, 2, 3 … and takes "this one and all before it" for an answer. A
    run of neighbours that end alike is told in one frame, up to the first delivery that is still open; what is settled
    beyond it is told one by one, because whatever is still open must not be swept along.
    """

    def __init__(self) -> None:
        #: in the order of their tags, as they came
        self._open: dict[int, None] = {}
        self._untold: dict[int, How] = {}

    def __len__(self) -> int:
        """How many are settled and not told."""
        return len(self._untold)

    @property
    def open(self) -> int:
        """How many are not settled."""
        return len(self._open)

    def opened(self, tag: int) -> None:
        """A delivery came."""
        self._open[tag] = None

    def settle(self, tag: int, how: How) -> bool:
        """Note the end of a delivery; False where it has ended before: the broker closes the channel over a second."""
        if tag not in self._open:
            return False
        del self._open[tag]
        self._untold[tag] = how
        return True

    def swept(self, tag: int) -> None:
        """All up to this one are told already."""
        for each in list(itertools.takewhile(tag.__ge__, self._open)):
            del self._open[each]

    def frames(self) -> list[tuple[How, int, bool]]:
        """Answers to write in this order: how, delivery tag, and whether it speaks for all open ones before it too."""
        lowest_open = next(iter(self._open), None)
        answers: list[tuple[How, int, bool]] = []
        run: How | None = None
        for tag in sorted(self._untold):
            how = self._untold[tag]
            swept = lowest_open is None or tag < lowest_open
            if swept and how == run:
                answers[-1] = (how, tag, True)
            else:
                answers.append((how, tag, False))
                run = how if swept else None
        self._untold.clear()
        return answers
