"""The program: its commands, the options in front of them, and how an error leaves it."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import rabbitdlq
from rabbitdlq.broker import DEFAULT_URL
from rabbitdlq.cli import broker, consume, demo, dlq, journal, publish, topology
from rabbitdlq.cli.options import Options
from rabbitdlq.errors import RabbitDLQError
from rabbitdlq.logs import configure_logs

__all__ = ["app", "run_program"]

#: as of a program that SIGPIPE ended, which is what `| head` does to others
READER_GONE = 128 + 13


class _Program(TyperGroup):
    """The whole program: what goes wrong in any command passes through here."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        with _reader_may_go():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                raise typer.Exit(130) from None
            except Exception as error:
                self._explain(error)
                raise

    def _explain(self, error: Any) -> None:
        """An option of the program behind the command: say where it goes, not which other one looks like it."""
        name = getattr(error, "option_name", None)
        if name is None or not hasattr(error, "possibilities"):
            return  # it is not about an unknown option
        known = {option for parameter in self.params for option in parameter.opts}
        if name in known:
            command = error.ctx.command_path.partition(" ")[2] if error.ctx is not None else "COMMAND"
            error.message = f"{name} goes before the command: rabbitdlq {name} … {command}"
            error.possibilities = []


@contextlib.contextmanager
def _reader_may_go() -> Iterator[None]:
    """Whoever reads our output may have enough of it, as `| head` does: the end is quiet then."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                os.dup2(nowhere, stream.fileno())  # what is flushed at the end would fail once more
        raise typer.Exit(READER_GONE) from None


app = typer.Typer(
    cls=_Program,
    help="Retries with growing delays, a dead-letter queue with the whole story, and safe replay for RabbitMQ.",
    epilog="Exit codes: 0 done · 1 failed · 2 wrong use · 3 partly done.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(broker.app, name="broker")
app.add_typer(topology.app, name="topology")
app.command()(publish.publish)
app.command()(consume.consume)
app.add_typer(dlq.app, name="dlq")
app.command()(journal.journal)
app.command()(demo.demo)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(rabbitdlq.__version__)
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    url: Annotated[
        str, typer.Option(envvar="RABBITDLQ_URL", help="The broker, as amqp:// or amqps://.", show_envvar=True)
    ] = DEFAULT_URL,
    management_url: Annotated[
        str | None,
        typer.Option(envvar="RABBITDLQ_MANAGEMENT_URL", help="The broker's management API, where it is needed."),
    ] = None,
    topology: Annotated[
        Path, typer.Option(envvar="RABBITDLQ_TOPOLOGY", help="The file that says which queues there are.")
    ] = Path("rabbitdlq.toml"),
    read_only: Annotated[
        bool,
        typer.Option("--read-only", envvar="RABBITDLQ_READ_ONLY", help="Refuse whatever changes something."),
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of every command."""
    # what a library call warns of is told on stderr: stdout is for data
    configure_logs("console", "warning")
    context.obj = Options(url=url, management_url=management_url, topology_file=topology, read_only=read_only)


def run_program() -> None:
    """Run a command and turn errors into one clear line and an exit code."""
    try:
        app(prog_name="rabbitdlq")
    except RabbitDLQError as error:
        _fail(error, error.exit_code)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.ENOENT}:
            raise
        _fail(f"{error.filename or 'writing the output'}: {error.strerror}", 1)


def _fail(error: BaseException | str, code: int) -> None:
    print(f"rabbitdlq: {error}", file=sys.stderr)
    sys.exit(code)
