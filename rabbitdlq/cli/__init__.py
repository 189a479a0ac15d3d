"""The command line: thin. Data goes to stdout, words and progress to stderr."""

import os
import sys

__all__ = ["main"]


def main() -> None:
    """Run the program; Ctrl-C ends it with 130 and without a word, also while it is being loaded."""
    _replace_closed_streams()
    try:
        # loading takes half a second, in which people press Ctrl-C as well
        from rabbitdlq.cli.program import run_program  # noqa: PLC0415

        run_program()
    except KeyboardInterrupt:
        sys.exit(130)


def _replace_closed_streams() -> None:
    """A daemon may have been started with its streams closed: what it says goes nowhere then, and nothing breaks.

    Without this the next socket would take the place of the missing stream.
    """
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - for the process's life
