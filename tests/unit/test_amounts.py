"""Rates, shares and waiting times, as people type them; and how fast work goes, as they are told."""

from datetime import timedelta

import pytest

from rabbitdlq.cli import progress
from rabbitdlq.cli.amounts import parse_rate, parse_share, parse_wait
from rabbitdlq.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "rate"),
    [("50/s", 50), ("50", 50), ("0.5/s", 0.5), ("600/m", 10), ("1000/h", 1_000 / 3_600), (" 5 / s ", 5)],
)
def test_a_rate_is_told_by_second_minute_or_hour(text: str, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


def test_no_rate_is_as_fast_as_it_goes() -> None:
    assert parse_rate(None) is None


@pytest.mark.parametrize(
    "text", ["", "0", "0/s", "0.0000001/s", "-5/s", "50/d", "fast", "5//s", "1e3/s", "\u0665/s", "inf"]
)
def test_what_is_no_rate_is_told(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--rate: .* is no rate above zero; write 50/s, 600/m or 1000/h"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "share"), [("10%", 0.1), ("0%", 0), ("100%", 1), ("0.25", 0.25), ("1", 1), ("0.5 %", 0.005)]
)
def test_a_share_is_told_in_percent_or_as_a_number_up_to_one(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "101%", "1.1", "10", "-1%", "ten", "%"])
def test_what_is_no_share_is_told(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--abort-above: .* is no share; write 10% or 0\.1"):
        parse_share(text)


def test_a_time_is_told_with_its_unit() -> None:
    assert parse_wait("--wait", "2m") == timedelta(minutes=2)
    for text in ("2", "-2m", "soon", ""):
        with pytest.raises(ConfigurationError, match=r"^--wait: "):
            parse_wait("--wait", text)


class TestProgress:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        """The time, for the test to set."""
        now = [100.0]
        monkeypatch.setattr("rabbitdlq.cli.progress.time.monotonic", lambda: now[0])
        return now

    def test_a_line_tells_how_far_how_fast_and_how_long(
        self, clock: list[float], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with progress.Reporter("replaying orders") as reporter:
            reporter.at(0, 20_000)
            clock[0] += 60  # the plan is written to the journal
            reporter.at(0, 20_000)
            clock[0] += 4
            reporter.at(1_200)
            clock[0] += 1
            reporter.at(1_250)
            clock[0] += 1
            reporter.at(1_300)
        assert capsys.readouterr().err.splitlines() == [
            "replaying orders: 0 of 20,000, 0/s",
            "replaying orders: 1,250 of 20,000, 250/s, 75 s left",
        ]

    def test_what_was_done_before_and_what_was_waited_for_is_no_speed(
        self, clock: list[float], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with progress.Reporter("replaying orders") as reporter:
            reporter.at(15_000, 20_000)
            clock[0] += 2
            reporter.at(15_200)
            reporter.waiting(True)
            clock[0] += 120
            reporter.waiting(False)
            clock[0] += 3
            reporter.at(15_500)
        assert capsys.readouterr().err.splitlines() == [
            "replaying orders, waiting for what becomes of them: 15,200 so far",
            "replaying orders: 15,500 of 20,000, 100/s, 45 s left",
        ]
