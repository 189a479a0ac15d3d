"""The list of dead letters: everything where there is room, and what matters most on a narrow terminal."""

from collections.abc import Iterator, Sequence

from rich.cells import cell_len, set_cell_size

from rabbitdlq.cli.columns import Column
from rabbitdlq.cli.render import PASTED, heading, plain

__all__ = ["Listing"]

#: cells of a column that no terminal takes away
NARROWEST = 8
#: cells of an error, or of another long text, that still tell something: others give way first
READABLE = 24
#: characters of an id that is shortened, unless more are needed to tell it from the others
SHORTEST_ID = 8
_BETWEEN = 2
_IDS = ("id", "park id")
#: short as they are, and of no use when they are cut
_RIGID = frozenset({"parked", "created", "first failed", "reason", "attempts", "max attempts", "lap"})
_TIMES = frozenset({"parked", "created", "first failed"})
_ONE_LINE = {ord(each): " " for each in "\n\t"}
_YEAR = len("2026-")


class Listing:
    """A table of rows that :func:`render.row` made.

    A rich table looks the same, and takes 600 MB and minutes for 100,000 rows.
    """

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[tuple[str, ...]], width: int | None, *, asked: bool
    ) -> None:
        """``width`` is the terminal's, None for no limit; columns that were ``asked`` for are never left out."""
        self._names = [heading(column) for column in columns]
        self._cells = [[plain(cell).translate(_ONE_LINE) for cell in row] for row in rows]
        #: whether ids are shown by their beginnings
        self.shortened = False
        self._widths = self._natural()
        if width is not None:
            self._fit(width, asked)

    def lines(self) -> Iterator[str]:
        """The list, line by line, the head first."""
        for row in (self._names, *self._cells):
            shown = (_fitted(cell, size) for cell, size in zip(row, self._widths, strict=True))
            yield (" " * _BETWEEN).join(shown).rstrip()

    def _natural(self) -> list[int]:
        return [max(map(cell_len, column)) for column in zip(self._names, *self._cells, strict=True)]

    def _fit(self, width: int, asked: bool) -> None:
        """What is missed least gives way first, until the errors can be read; then the longest texts are cut."""
        steps = [self._shorten_ids]
        if not asked:
            steps += [lambda: self._leave_out("routing key"), self._leave_out_laps]
        steps += [self._leave_out_years]
        for step in steps:
            needed = sum(
                min(size, READABLE) if self._is_elastic(name) else size
                for name, size in zip(self._names, self._widths, strict=True)
            )
            if needed + self._gaps <= width:
                break
            step()
            self._widths = self._natural()
        # texts first; where that is not enough, whatever can be cut at all
        texts = [place for place, name in enumerate(self._names) if self._is_elastic(name)]
        others = [place for place, name in enumerate(self._names) if name not in PASTED]
        for places in (texts, others):
            while places and sum(self._widths) + self._gaps > width:
                widest = max(places, key=lambda place: self._widths[place])
                if self._widths[widest] <= NARROWEST:
                    break
                self._widths[widest] -= 1

    @property
    def _gaps(self) -> int:
        return _BETWEEN * (len(self._widths) - 1)

    @staticmethod
    def _is_elastic(name: str) -> bool:
        return name not in PASTED and name not in _RIGID

    def _shorten_ids(self) -> None:
        """To beginnings that no two of these letters have in common; other commands take them."""
        for place, name in enumerate(self._names):
            if name not in _IDS:
                continue
            ids = {row[place] for row in self._cells}
            longest = max(map(len, ids), default=0)
            size = next(
                (size for size in range(SHORTEST_ID, longest) if len({id[:size] for id in ids}) == len(ids)), longest
            )
            for row in self._cells:
                self.shortened |= len(row[place]) > size
                row[place] = row[place][:size]

    def _leave_out(self, name: str) -> None:
        if name in self._names:
            place = self._names.index(name)
            for row in (self._names, *self._cells):
                del row[place]

    def _leave_out_laps(self) -> None:
        """Unless a letter is held: that has to be known."""
        if "lap" in self._names and not any(row[self._names.index("lap")].endswith("held") for row in self._cells):
            self._leave_out("lap")

    def _leave_out_years(self) -> None:
        for place, name in enumerate(self._names):
            if name in _TIMES:
                for row in self._cells:
                    row[place] = row[place][_YEAR:]


def _fitted(cell: str, width: int) -> str:
    return set_cell_size(cell, width) if cell_len(cell) <= width else set_cell_size(cell, width - 1) + "…"
