"""The handler that the command line names: found, and told at once where no message could be given to it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rabbitdlq import ConfigurationError
from rabbitdlq.cli.consume import load_handler

MODULE = "shop_of_the_handler_tests"


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / f"{MODULE}.py").write_text(
        "def handle(message): ...\ndef idle(): ...\nclass Shop:\n  handle = handle\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop(MODULE, None)


def test_a_function_of_one_argument_is_found() -> None:
    assert load_handler(f"{MODULE}:handle").__name__ == "handle"
    assert load_handler(f"{MODULE}:Shop.handle") is load_handler(f"{MODULE}:handle")


def test_one_that_takes_no_message_is_told_by_the_name_that_was_given() -> None:
    with pytest.raises(
        ConfigurationError,
        match=rf"^--handler: '{MODULE}:idle' cannot be called with one argument, the message: too many positional",
    ):
        load_handler(f"{MODULE}:idle")
