"""The examples in docstrings are true."""

import doctest
import importlib

import pytest

#: pure modules; those named with True have examples, and losing them would be a loss
MODULES = {
    "rabbitdlq.broker.connection": True,
    "rabbitdlq.dead_letters.selection": True,
    "rabbitdlq.dead_letters.where": True,
    "rabbitdlq.deaths": False,
    "rabbitdlq.durations": True,
    "rabbitdlq.failure": True,
    "rabbitdlq.limits": True,
    "rabbitdlq.message": False,
    "rabbitdlq.parking": False,
    "rabbitdlq.settings": False,
    "rabbitdlq.topology": False,
    "rabbitdlq.texts": True,
}


@pytest.mark.parametrize("name", MODULES)
def test_examples_give_what_they_say(name: str) -> None:
    result = doctest.testmod(importlib.import_module(name))

    assert result.failed == 0
    assert result.attempted > 0 or not MODULES[name]
