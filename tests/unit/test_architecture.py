"""How the package is built: what may import what, how long a file may be, what has to say what it is."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import rabbitdlq

PACKAGE = Path(rabbitdlq.__file__).parent
#: what may be imported from where: a module sees its own package and the rows above it. Modules of one row that are in
#: one cell know each other, as far as they make no circle; cells of one row do not.
ROWS: tuple[tuple[str, ...], ...] = (
    ("errors names durations",),
    ("wire fields glance texts rates limits entities",),
    ("topology deaths message failure dead_letter parking settings logs",),
    ("broker",),
    ("producer journal definitions management idempotency",),
    ("consumer", "dead_letters"),
    ("doctor", "local_broker"),
    ("metrics status",),
    ("rabbitdlq",),  # the public face
    ("demo",),
    ("cli",),
    ("__main__",),
)
#: beyond the rows: what these may see of ours at all
ONLY = {"errors": {"durations"}, "names": set(), "durations": set(), "local_broker": {"errors"}}
#: values and words do not talk to anybody
NO_IO = ROWS[:3]
TALKING = {
    "aio_pika",
    "aiormq",
    "asyncio",
    "httpx",
    "http",
    "pamqp",
    "requests",
    "socket",
    "ssl",
    "subprocess",
    "urllib",
}
FORBIDDEN = {"utils", "util", "common", "helpers", "helper", "misc"}
LONGEST = 400


def modules() -> list[str]:
    """The dotted names of all modules, the package's own ``__init__`` first."""
    names = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


MODULES = modules()
EACH = pytest.mark.parametrize("module", MODULES)


def source_of(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(source_of(module).read_text(encoding="utf-8"))


def imports_of(module: str) -> set[str]:
    """Every module that is imported anywhere in it, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: write imports in full"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else str(node.module))
    return found


def ours(module: str) -> set[str]:
    return {name for name in imports_of(module) if name in MODULES}


def part_of(module: str) -> str:
    """The package or module right below ours; the face itself is called by the package's name."""
    return module.split(".")[1] if "." in module else module


def place_of(part: str) -> tuple[int, str]:
    for number, row in enumerate(ROWS):
        for cell in row:
            if part in cell.split():
                return number, cell
    raise AssertionError(f"{part}: new here; say in ROWS of this test between which others it belongs")


@EACH
def test_a_module_imports_only_from_the_rows_above_it_or_its_own_package(module: str) -> None:
    part = part_of(module)
    row, cell = place_of(part)
    for imported in ours(module):
        other = part_of(imported)
        if other == part:
            continue
        other_row, other_cell = place_of(other)
        assert other_row < row or other_cell == cell, f"{module} must not import {imported}"


@EACH
def test_some_modules_see_even_less(module: str) -> None:
    part = part_of(module)
    if part in ONLY:
        assert {part_of(imported) for imported in ours(module)} - {part} <= ONLY[part]


def test_nobody_but_the_command_line_imports_the_command_line() -> None:
    inside = {module for module in MODULES if part_of(module) in {"cli", "__main__"}}

    assert not {
        (module, imported)
        for module in set(MODULES) - inside
        for imported in ours(module)
        if part_of(imported) == "cli"
    }


def test_consumer_and_dead_letters_do_not_know_each_other() -> None:
    for one, other in (("consumer", "dead_letters"), ("dead_letters", "consumer")):
        for module in MODULES:
            if part_of(module) == one:
                assert other not in {part_of(imported) for imported in ours(module)}


def test_no_import_goes_in_a_circle() -> None:
    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " → ".join((*way[way.index(module) :], module))
        if module in seen:
            return
        # a module brings its package's face with it, and a face brings what it shows: only what is written counts
        for imported in sorted(ours(module) - {module}):
            visit(imported, (*way, module))
        seen.add(module)

    seen: set[str] = set()
    for module in MODULES:
        visit(module, ())


@EACH
def test_words_and_values_talk_to_nobody(module: str) -> None:
    quiet = {part for row in NO_IO for cell in row for part in cell.split()}
    if part_of(module) in quiet:
        assert not {name.split(".")[0] for name in imports_of(module)} & TALKING


@EACH
def test_aio_pika_is_known_to_the_broker_package_only(module: str) -> None:
    if part_of(module) != "broker":
        assert not [name for name in imports_of(module) if name.split(".")[0] == "aio_pika"]


@EACH
def test_no_file_is_too_long_to_read_in_one_go(module: str) -> None:
    lines = len(source_of(module).read_text(encoding="utf-8").splitlines())

    assert lines <= LONGEST, f"{source_of(module).name} has {lines} lines; one noun a module"


@EACH
def test_no_module_is_a_drawer_for_everything(module: str) -> None:
    assert not set(module.split(".")) & FORBIDDEN


@pytest.mark.parametrize("module", [module for module in MODULES if not module.endswith(".__main__")])
def test_what_a_module_shows_is_there_and_in_order(module: str) -> None:
    loaded = importlib.import_module(module)
    shown = getattr(loaded, "__all__", [])

    assert list(shown) == sorted(set(shown), key=lambda name: (not name.isupper(), not name[0].isupper(), name))
    assert not [name for name in shown if not hasattr(loaded, name)]


@EACH
def test_every_public_thing_says_what_it_is(module: str) -> None:
    tree = tree_of(module)
    silent = [name for name, node in public_nodes(tree) if ast.get_docstring(node) is None]

    assert not silent, f"without a docstring: {', '.join(silent)}"
    if tree.body:
        assert ast.get_docstring(tree), f"{module} does not say what it is"


@EACH
def test_no_default_shows_the_environment(module: str) -> None:
    """``help()`` prints defaults, and what is in the environment: URLs with passwords."""
    defaults = [
        ast.unparse(default)
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for default in (*node.args.defaults, *node.args.kw_defaults)
        if default is not None
    ]

    assert not [default for default in defaults if "environ" in default]


def public_nodes(
    tree: ast.Module | ast.ClassDef, prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    """Functions, classes and methods without an underscore in front, of public classes only."""
    for node in tree.body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if any("overload" in ast.unparse(decorator) for decorator in node.decorator_list):
            continue
        yield f"{prefix}{node.name}", node
        if isinstance(node, ast.ClassDef):
            yield from public_nodes(node, f"{prefix}{node.name}.")


def test_the_public_face_shows_what_it_imports_and_no_more() -> None:
    imported = {
        alias.asname or alias.name
        for node in tree_of("rabbitdlq").body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert imported == set(rabbitdlq.__all__)
    assert all(inspect.getdoc(getattr(rabbitdlq, name)) for name in rabbitdlq.__all__)
