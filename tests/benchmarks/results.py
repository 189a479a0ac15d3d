"""From runs to rows: medians, spread, ratios; as a table and as JSON."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tests.benchmarks.runs import Run
from tests.benchmarks.scenarios import BASELINE, GOALS, Contender, Scenario

__all__ = ["as_json", "goal_lines", "paired_ratio", "rows_of", "show", "spread"]

HEADERS = {
    "rate": ("contender", "version", "msg/s", "spread", "x raw", "CPU client", "CPU broker", "RSS MB"),
    "latency": ("contender", "version", "p50 ms", "spread", "p99 ms", "spread", "p50 x raw", "p99 x raw", "CPU client"),
    "memory": ("contender", "version", "RSS MB at 100,000", "at the end", "growth", "msg/s"),
}


def spread(values: Sequence[float], digits: int = 0) -> str:
    """``lowest-highest``; of one value there is none."""
    return f"{min(values):,.{digits}f}-{max(values):,.{digits}f}" if len(values) > 1 else ""


def paired_ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """The median of the ratios round by round: what slows a whole round down slows both."""
    ratios = [ours[round_] / theirs[round_] for round_ in ours if theirs.get(round_)]
    return statistics.median(ratios) if ratios else None


def _by_round(runs: Iterable[Run], contender: str, value: str) -> dict[int, float]:
    found = {}
    for run in runs:
        if run.contender == contender and not run.error:
            found[run.round] = run.rate if value == "rate" else run.extra[value]
    return found


def _ratio_text(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _median_text(values: Sequence[float | None], digits: int = 2) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):,.{digits}f}" if known else ""


def rows_of(scenario: Scenario, contenders: Sequence[Contender], runs: Sequence[Run]) -> list[list[str]]:
    """One row for each contender, in their order; one that never gave a number has its error in the third column."""
    rows = []
    for contender in contenders:
        its = [run for run in runs if run.contender == contender.label]
        good, errors = [run for run in its if not run.error], [run.error for run in its if run.error]
        row = [contender.label, contender.version]
        if good:
            baseline = next(
                (other.label for other in contenders if (other.module, other.loop) == (BASELINE, contender.loop)), ""
            )
            row += _numbers(scenario.kind, contender.label, baseline, good, runs)
        if errors:
            row[0] += f" ({len(errors)} of {len(its)} failed)"
            row += [f"ERROR: {errors[0]}"] if not good else []
        rows.append(row)
    return rows


def _numbers(kind: str, label: str, baseline: str, good: Sequence[Run], runs: Sequence[Run]) -> list[str]:
    def ratio(value: str) -> str:
        return _ratio_text(paired_ratio(_by_round(runs, label, value), _by_round(runs, baseline, value)))

    client = _median_text([run.client_cpu for run in good])
    rates = [run.rate for run in good]
    if kind == "latency":
        p50, p99 = ([run.extra[name] for run in good] for name in ("p50_ms", "p99_ms"))
        return [
            *(_median_text(p50), spread(p50, 2)),
            *(_median_text(p99), spread(p99, 2)),
            *(ratio("p50_ms"), ratio("p99_ms"), client),
        ]
    if kind == "memory":
        first, last = good[-1].extra["first_rss_mb"], good[-1].extra["last_rss_mb"]
        return [f"{first:.1f}", f"{last:.1f}", f"{last - first:+.1f}", f"{rates[-1]:,.0f}"]
    broker, rss = _median_text([run.broker_cpu for run in good]), _median_text([run.rss_mb or None for run in good], 0)
    return [_median_text(rates, 0), spread(rates), ratio("rate"), client, broker, rss]


def goal_lines(scenario: Scenario, runs: Sequence[Run]) -> list[str]:
    """What is wanted of us, and what it is; goals whose contenders did not run are left out."""
    lines = []
    for goal in GOALS:
        if goal.scenario == scenario.name:
            ratio = paired_ratio(_by_round(runs, goal.ours, "rate"), _by_round(runs, goal.peer, "rate"))
            if ratio is not None:
                lines.append(f"  {goal.ours} / {goal.peer}: {ratio:.2f} (wanted {goal.wanted:g})")
    return lines


def show(console: Console, scenario: Scenario, contenders: Sequence[Contender], runs: Sequence[Run]) -> None:
    """Print one scenario: a drawn table on a terminal, columns of text elsewhere."""
    headers, rows = HEADERS[scenario.kind], rows_of(scenario, contenders, runs)
    rounds = len({run.round for run in runs})
    title = f"{scenario.title}; {rounds} rounds"
    if console.is_terminal:
        table = Table(title=title, title_justify="left")
        for place, name in enumerate(headers):
            table.add_column(name, justify="left" if place < 2 else "right")
        for row in rows:
            table.add_row(*map(escape, row))
        console.print(table)
    else:
        console.print(f"\n{title}", soft_wrap=True)
        wide = [row for row in rows if len(row) == len(headers)]
        widths = [max(len(row[place]) for row in [headers, *wide]) for place in range(len(headers))]
        for row in [list(headers), *rows]:
            cells = [
                cell.ljust(width) if place < 2 else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(row, widths, strict=False))
            ]
            console.print("  ".join(cells).rstrip(), soft_wrap=True, highlight=False, markup=False)
    for line in goal_lines(scenario, runs):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def as_json(surroundings: Mapping[str, Any], runs: Iterable[Run]) -> dict[str, Any]:
    """Everything, run by run."""
    return {**surroundings, "runs": [asdict(run) | {"rate": run.rate} for run in runs]}
