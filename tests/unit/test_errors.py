"""The tree of errors, as the module's docstring draws it."""

import inspect
import re

import rabbitdlq
from rabbitdlq import errors


def drawn() -> dict[str, str]:
    """Each class of the drawing with its parent."""
    parents: dict[str, str] = {}
    above: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^( {4}[ │├└─]*)(\w+)(\s|$)", line)
        if match is None:
            continue
        depth, name = len(match[1]), match[2]
        while above and above[-1][0] >= depth:
            above.pop()
        parents[name] = above[-1][1] if above else "Exception"
        above.append((depth, name))
    return parents


def test_the_drawing_is_the_tree() -> None:
    classes = {
        name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)
    }

    assert drawn() == {name: kind.__bases__[0].__name__ for name, kind in classes.items()}


def test_every_error_is_public_and_can_be_caught_by_one_name() -> None:
    assert set(drawn()) == set(errors.__all__)
    for name in errors.__all__:
        assert getattr(rabbitdlq, name) is getattr(errors, name)
        assert issubclass(getattr(errors, name), errors.RabbitDLQError)
