"""Lines of an input that failed: named one by one, and together where there are many."""

from rabbitdlq.cli.faults import MOST_ERRORS, MOST_RUNS, MOST_TOLD, Faults


def test_few_are_named_at_once_and_nothing_is_left() -> None:
    faults = Faults()

    assert [faults.add(line, "no") for line in (1, 5)] == ["line 1: no", "line 5: no"]
    assert (faults.count, list(faults.rest())) == (2, [])


def test_of_many_with_one_error_the_rest_is_named_by_its_lines_in_whichever_order_they_came() -> None:
    faults = Faults()
    for line in range(1, MOST_TOLD + 1):
        assert faults.add(line, "no") is not None

    for line in (24, 21, 22, 23, 30, 50, 51):
        assert faults.add(line, "no") is None
    assert faults.add(60, "other") == "line 60: other"

    assert list(faults.rest()) == ["and 7 more, lines 21-24, 30, 50-51: no"]
    assert faults.count == MOST_TOLD + 8


def test_memory_and_the_last_line_are_bounded() -> None:
    faults = Faults()
    for line in range(0, 4 * MOST_RUNS, 2):
        faults.add(line, "no")
    for number in range(2 * MOST_ERRORS):
        assert faults.add(number, f"error {number}") is not None

    (rest,) = faults.rest()
    assert rest.startswith(f"and {2 * MOST_RUNS - MOST_TOLD:,} more, lines 40, 42, ")
    assert rest.endswith(", …: no")
    assert len(rest) < 200
