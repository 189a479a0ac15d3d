"""Handlers for processes of their own: at the top of a module, where another process finds them."""

import asyncio
import ctypes
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rabbitdlq import Drop, External, Message, Permanent, RetryAfter, handler


class Order(BaseModel):
    id: int
    tags: list[str] = []


class Unpicklable(ValueError):
    """Its arguments are not those of its constructor: ``pickle.loads`` fails."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")
        self.lock = threading.Lock()


def note(path: str, text: str) -> None:
    """Add a line to a file."""
    with Path(path).open("a") as file:
        file.write(f"{text}\n")


def _mischief(what: str, payload: Any) -> None:
    match what:
        case "segfault":
            ctypes.string_at(0)
        case "exit":
            os._exit(payload["code"])
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            bytearray(2**32)
        case "unpicklable":
            raise Unpicklable("this", "that")
        case "permanent":
            raise Permanent("no such customer")
        case "external":
            raise External("503")
        case "drop":
            raise Drop("nobody")
        case "later":
            raise RetryAfter(7, "not now")
        case "key":
            raise KeyError("id")
        case "quit":
            raise SystemExit(3)
        case "note":
            note(payload["path"], f"{os.getpid()}")
        case "terminate":
            with subprocess.Popen(["sleep", "60"]) as program:
                try:
                    program.send_signal(payload["signal"])
                    program.wait(10)
                finally:
                    program.kill()
        case "fork":
            forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
            forked.start()
            try:
                os.kill(forked.pid or 0, payload["signal"])
                forked.join(10)
                if forked.exitcode is None:
                    raise TimeoutError("it does not end")
            finally:
                forked.kill()
        case "leave":
            left = [subprocess.Popen(["sleep", "60"], start_new_session=own) for own in (False, True)]
            note(payload["path"], " ".join(str(program.pid) for program in left))


def plain(message: Message) -> None:
    """Do what the payload says."""
    payload = message.payload
    what = payload["do"]
    match what:
        case "wait":
            try:
                if "path" in payload:
                    note(payload["path"], f"began {os.getpid()}")
                time.sleep(payload.get("seconds", 60))
            finally:
                if "path" in payload:
                    note(payload["path"], "cleaned up")
        case "hold":
            note(payload["path"], f"began {os.getpid()}")
            while not Path(payload["until"]).exists():
                time.sleep(0.01)
        case "deaf":
            note(payload["path"], f"began {os.getpid()}")
            while True:
                try:
                    time.sleep(60)
                except BaseException:
                    note(payload["path"], "deaf")
        case "program":
            program = subprocess.Popen(["sleep", "60"])
            note(payload["path"], f"began {os.getpid()} {program.pid}")
            while True:
                try:
                    program.wait()
                except BaseException:
                    note(payload["path"], "deaf")
        case "echo":
            note(payload["path"], repr((os.getpid(), message)))
        case _:
            _mischief(what, payload)


async def in_loop(message: Message) -> None:
    """The same, on an event loop."""
    payload = message.payload
    if payload["do"] != "wait":
        await asyncio.sleep(0)
        _mischief(payload["do"], payload)
        return
    note(payload["path"], f"began {os.getpid()}")
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0)
        note(payload["path"], "cleaned up")


@handler(payload_type=Order)
def ordered(message: Message) -> None:
    """Takes a model."""
    note(message.payload.tags[0], repr(message.payload))


def undecorated(message: Message) -> Any:
    """An async handler behind a plain one."""
    return in_loop(message)


def broken_setup() -> None:
    """What a program does in each child, and does wrong."""
    raise OSError("no log directory")
