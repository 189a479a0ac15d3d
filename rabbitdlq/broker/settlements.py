"""Which deliveries are settled and not yet told to the broker, and the fewest frames that tell it."""

from rabbitdlq.broker.frames import How

__all__ = ["Settlements"]


class Settlements:
    """The settled deliveries of one channel. Pure: what has to be written is asked for with :meth:`frames`.

    The broker numbers the deliveries of a channel 1, 2, 3 … and takes "this one and all before it" for an answer. A
    run of neighbours that end alike is told in one frame, up to the first delivery that is still open; what is settled
    beyond it is told one by one, because whatever is still open must not be swept along.
    """

    def __init__(self) -> None:
        #: everything below is settled and told
        self._lowest = 1
        self._untold: dict[int, How] = {}
        #: told one by one, beyond an open delivery
        self._told: set[int] = set()

    def __len__(self) -> int:
        """How many are settled and not told."""
        return len(self._untold)

    def settle(self, tag: int, how: How) -> bool:
        """Note the end of a delivery; False where it has ended before: the broker closes the channel over a second."""
        if tag < self._lowest or tag in self._untold or tag in self._told:
            return False
        self._untold[tag] = how
        return True

    def frames(self) -> list[tuple[How, int, bool]]:
        """Answers to write in this order: how, delivery tag, and whether it speaks for all open ones before it too."""
        untold, told, answers = self._untold, self._told, []
        at, run, last, length = self._lowest, None, 0, 0
        while True:
            how = untold.pop(at, None)
            if how is None:
                if at not in told:
                    break
                told.remove(at)
            elif how == run:
                last, length = at, length + 1
            else:
                if run is not None:
                    answers.append((run, last, length > 1))
                run, last, length = how, at, 1
            at += 1
        if run is not None:
            answers.append((run, last, length > 1))
        self._lowest = at
        for tag in sorted(untold):
            answers.append((untold[tag], tag, False))
        told.update(untold)
        untold.clear()
        return answers
