"""The end of a process that threads would keep: made certain, whoever reads what it says; and others are let be."""

import subprocess
import sys

import pytest

HANGING = "threading.Thread(target=time.sleep, args=(20,), name='hangs').start()"
IDLE = "pool = ThreadPoolExecutor(1); pool.submit(print, 'done').result()"
PROGRAM = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from rabbitdlq.consumer.leaving import leave
{thread}
leave(7, queue="orders", last_words="rabbitdlq: why", patience=0.2)
{after}
"""


def program(thread: str, after: str = "") -> "subprocess.Popen[str]":
    code = PROGRAM.format(thread=thread, after=after)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def test_a_thread_that_hangs_is_named_and_the_process_ends_with_its_last_words() -> None:
    with program(HANGING) as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "threads_left_behind" in out + err
    assert "hangs" in out + err
    assert err.endswith("rabbitdlq: why\n")


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_it_ends_too_where_nobody_reads_any_more(stream: str) -> None:
    with program(HANGING) as process:
        getattr(process, stream).close()
        assert process.wait(10) == 7


def test_a_thread_that_has_nothing_to_do_ends_nobody() -> None:
    """What asyncio.to_thread() leaves behind of a call that has ended."""
    with program(IDLE, "time.sleep(1); print('after')") as process:
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out.splitlines()[-1], err) == (0, "after", "")
