"""The bench's own hands on the broker: a bare AMQP client that fills queues, counts and clears away.

It is none of the contenders, so that none of them is measured against its own feeding, and it sends frames as bytes:
filling takes less time than any contender's emptying.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from pamqp import base, commands, exceptions, frame, header

__all__ = ["Broker", "BrokerRefused", "pid_listening"]

WINDOW = 4_000
BATCH_BYTES = 32_768
FRAME_MAX = 131_072
#: takes the place of a message's id in the header frame that all of them share
_ID = b"0" * 32


class BrokerRefused(Exception):
    """The broker closed the channel or the connection, or answered with something else; its words."""


class Broker:
    """One connection with one channel in confirm mode. Blocking; not for threads to share."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme != "amqp":
            raise ValueError(f"the bench wants an amqp:// URL, not {parts.scheme}://")
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 5672
        self._socket = socket.create_connection((self.host, self.port), timeout=120)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._in, self._place, self._out = b"", 0, bytearray()
        self._sent = 0
        self._unconfirmed: dict[int, None] = {}
        self._socket.sendall(b"AMQP\x00\x00\x09\x01")
        start = self._read()
        assert isinstance(start, commands.Connection.Start)
        self.version_text = str(start.server_properties["version"])
        major, minor = self.version_text.split(".")[:2]
        self.version = int(major), int(minor)
        login = f"\x00{unquote(parts.username or 'guest')}\x00{unquote(parts.password or 'guest')}"
        self._send(0, commands.Connection.StartOk(client_properties={}, mechanism="PLAIN", response=login))
        tune = self._read()
        assert isinstance(tune, commands.Connection.Tune)
        self._frame_max = min(tune.frame_max or FRAME_MAX, FRAME_MAX)
        self._send(0, commands.Connection.TuneOk(tune.channel_max, self._frame_max, 0))
        vhost = unquote(parts.path[1:]) or "/"
        self._call(commands.Connection.Open(virtual_host=vhost), channel=0)
        self._open_channel()

    # --- what the bench asks

    def fill(self, queue: str, bodies: Iterable[bytes], content_type: str = "application/json") -> int:
        """Publish the bodies, persistent and each with an id of its own, and see them confirmed; gives how many."""
        before = self._sent
        for body in bodies:
            self._publish(queue, body, content_type)
            if len(self._unconfirmed) >= WINDOW:
                self._await_confirms(WINDOW // 2)
        self._await_confirms(0)
        return self._sent - before

    def feed(self, queue: str, make: Callable[[int], bytes], messages: int, per_second: float) -> None:
        """Publish at an even pace. A message that comes late does not move those after it."""
        begun = time.monotonic()
        for place in range(messages):
            wait = begun + place / per_second - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            self._publish(queue, make(place), "application/json")
            self._flush()
        self._await_confirms(0)

    def ready(self, queue: str) -> int:
        """How many messages wait, those with a consumer not counted."""
        return self._declared(queue).message_count or 0

    def look(self, queue: str) -> tuple[int, int]:
        """How many messages wait, and how many consumers the queue has."""
        declared = self._declared(queue)
        return declared.message_count or 0, declared.consumer_count or 0

    def delete(self, queues: Iterable[str] = (), exchanges: Iterable[str] = ()) -> None:
        """Delete; what is missing is no error to the broker."""
        for queue in queues:
            self._call(commands.Queue.Delete(queue=queue))
        for exchange in exchanges:
            self._call(commands.Exchange.Delete(exchange=exchange))

    def close(self) -> None:
        """End the connection."""
        try:
            self._call(commands.Connection.Close(reply_code=200, reply_text="", class_id=0, method_id=0), channel=0)
        finally:
            self._socket.close()

    # --- frames

    def _declared(self, queue: str) -> commands.Queue.DeclareOk:
        declared = self._call(commands.Queue.Declare(queue=queue, passive=True))
        assert isinstance(declared, commands.Queue.DeclareOk)
        return declared

    def _publish(self, queue: str, body: bytes, content_type: str) -> None:
        self._out += _head(queue, len(body), content_type).replace(_ID, uuid.uuid4().hex.encode(), 1)
        room = self._frame_max - 8
        for start in range(0, len(body), room):
            piece = body[start : start + room]
            self._out += b"\x03\x00\x01" + len(piece).to_bytes(4, "big") + piece + b"\xce"
        self._sent += 1
        self._unconfirmed[self._sent] = None
        if len(self._out) > BATCH_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._socket.sendall(self._out)
        self._out.clear()

    def _await_confirms(self, at_most: int) -> None:
        self._flush()
        while len(self._unconfirmed) > at_most:
            got = self._read()
            if isinstance(got, commands.Basic.Ack):
                self._note(got.delivery_tag or 0, multiple=bool(got.multiple))
            else:
                raise BrokerRefused(f"while filling: {got}")

    def _note(self, tag: int, *, multiple: bool) -> None:
        for each in [each for each in self._unconfirmed if each <= tag] if multiple else [tag]:
            self._unconfirmed.pop(each, None)

    def _open_channel(self) -> None:
        self._sent = 0
        self._call(commands.Channel.Open())
        self._call(commands.Confirm.Select())

    def _call(self, method: base.Frame, channel: int = 1) -> Any:
        self._await_confirms(0)
        self._send(channel, method)
        answer = self._read()
        if isinstance(answer, commands.Channel.Close):
            self._send(1, commands.Channel.CloseOk())
            self._open_channel()
            refused = True
        else:
            refused = isinstance(answer, commands.Connection.Close)
        if refused:
            raise BrokerRefused(f"{method.name}: {answer.reply_text}")
        return answer

    def _send(self, channel: int, method: base.Frame) -> None:
        self._socket.sendall(frame.marshal(method, channel))

    def _read(self) -> Any:
        while True:
            try:
                size, _, value = frame.unmarshal(self._in[self._place :])
                self._place += size
                return value
            except exceptions.UnmarshalingException:
                data = self._socket.recv(4_096)
                if not data:
                    raise BrokerRefused("the broker closed the bench's connection") from None
                self._in, self._place = self._in[self._place :] + data, 0


@cache
def _head(queue: str, size: int, content_type: str) -> bytes:
    """The frames before a body."""
    properties = commands.Basic.Properties(content_type=content_type, delivery_mode=2, message_id=_ID.decode())
    publish = commands.Basic.Publish(exchange="", routing_key=queue)
    return frame.marshal(publish, 1) + frame.marshal(header.ContentHeader(0, size, properties), 1)


# --- the broker's process, where it is on this machine


def pid_listening(port: int) -> int | None:
    """The process that listens on this port of this machine; none where it cannot be seen, being another's."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(table) as lines:
                rows = [line.split() for line in lines][1:]
        except OSError:
            continue
        inodes |= {f"socket:[{row[9]}]" for row in rows if row[3] == "0A" and int(row[1].split(":")[1], 16) == port}
    for pid in filter(str.isdigit, os.listdir("/proc")) if inodes else ():
        try:
            if any(os.readlink(entry.path) in inodes for entry in os.scandir(f"/proc/{pid}/fd")):
                return int(pid)
        except OSError:
            continue  # ended meanwhile, or not ours to look at
    return None
