"""The C client, librabbitmq (Debian: ``librabbitmq-dev`` and ``gcc``), compiled anew for each run."""

import json
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.benchmarks.contenders.protocol import Job

__all__ = ["missing", "version"]

SOURCE = Path(__file__).with_name("c_client.c")


@cache
def missing() -> str:
    """Why it cannot take part, "" if it can."""
    if not shutil.which("gcc"):
        return "gcc is not installed"
    with tempfile.TemporaryDirectory() as directory:
        return "" if _compile(Path(directory)) else "librabbitmq-dev is not installed"


@cache
def version() -> str:
    """The library's version, as its pkg-config file says."""
    if not shutil.which("pkg-config"):
        return ""
    told = subprocess.run(["pkg-config", "--modversion", "librabbitmq"], capture_output=True, text=True, check=False)
    return told.stdout.strip()


def _compile(directory: Path) -> Path | None:
    program = directory / "c_client"
    made = subprocess.run(
        ["gcc", "-O2", "-o", str(program), str(SOURCE), "-lrabbitmq"], capture_output=True, check=False
    )
    return program if made.returncode == 0 else None


def main() -> int:
    scenario, job = sys.argv[1], Job(**json.loads(sys.argv[2]))
    parts = urlsplit(job.url)
    login = [unquote(parts.username or "guest"), unquote(parts.password or "guest"), unquote(parts.path[1:]) or "/"]
    with tempfile.TemporaryDirectory() as directory:
        program = _compile(Path(directory))
        if not program:
            raise SystemExit("it does not compile")
        place = [parts.hostname or "127.0.0.1", str(parts.port or 5672)]
        command = [str(program), scenario, *place, *login, job.queue, str(job.messages), str(job.prefetch)]
        command.append(str(job.broker_pid or 0))
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
