"""The command line: thin. Data goes to stdout, words and progress to stderr."""

import errno
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import rabbitdlq
from rabbitdlq.broker import DEFAULT_URL
from rabbitdlq.cli import broker, consume, demo, dlq, journal, publish, topology
from rabbitdlq.cli.options import Options
from rabbitdlq.errors import ConfigurationError, RabbitDLQError
from rabbitdlq.logs import configure_logs

__all__ = ["app", "main"]

app = typer.Typer(
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


def main() -> None:
    """Run a command and turn errors into one clear line and an exit code."""
    _replace_closed_streams()
    try:
        app(prog_name="rabbitdlq")
    except ConfigurationError as error:
        _fail(error, 2)
    except RabbitDLQError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        # whoever read our output has gone, as `| head` does; flushing it at exit would fail once more
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.EIO, errno.ENOENT}:
            raise
        _fail(f"{error.filename or 'writing the output'}: {error.strerror}", 1)


def _replace_closed_streams() -> None:
    """A daemon may have been started with its streams closed: what it says goes nowhere then, and nothing breaks.

    Without this the next socket would take the place of the missing stream.
    """
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the process's life


def _fail(error: BaseException | str, code: int) -> None:
    print(f"rabbitdlq: {error}", file=sys.stderr)
    sys.exit(code)
