"""Archive files: dead letters as they lay in their queue, written down before they are destroyed, and read back.

JSON Lines. The first line says what the file is; each further line is one letter::

    {"format": "rabbitdlq-archive", "version": 1, "queue": "orders", "created_at": …, "who": …, "why": …}
    {"id": …, "park_id": …, "letter": {…}, "crc32": …, "properties": "<base64>", "body": "<base64>"}

``properties`` and ``body`` are the message, byte for byte, and all that is read back. ``letter`` is for people and
grep: the letter's JSON form, without the payload where that is large.
"""

import base64
import contextlib
import errno
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pydantic_core import PydanticSerializationError, to_json

from rabbitdlq.broker import Outgoing
from rabbitdlq.dead_letter import DeadLetter, iso, read_time
from rabbitdlq.errors import ArchiveError, ConfigurationError
from rabbitdlq.parking import restored_properties
from rabbitdlq.texts import printable, shorten
from rabbitdlq.wire import Properties, WireError

__all__ = ["ArchiveHeader", "ArchiveReader", "ArchiveWriter", "ArchivedLetter", "read_archive", "restored"]

FORMAT = "rabbitdlq-archive"
VERSION = 1
#: larger payloads are in the file once only, as base64
READABLE_BYTES = 4_096
#: of each text of the first line
_HEADER_TEXT_BYTES = 10_000
_LONGEST_HEADER = 100_000
#: RabbitMQ takes no message above 512 MiB; base64 makes four bytes of three
_LONGEST_LINE = 1_000_000_000
#: what file systems say that cannot put a directory's entries on the disk by themselves
_NO_DIRECTORY_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}


@dataclass(frozen=True, slots=True)
class ArchiveHeader:
    """What the first line of an archive says."""

    #: the work queue whose dead letters these were
    queue: str
    created_at: datetime | None
    who: str
    #: which letters were meant, in words
    why: str


@dataclass(frozen=True, slots=True)
class ArchivedLetter:
    """One letter of an archive."""

    #: of the file, the first letter is in line 2
    line: int
    id: str
    #: empty on a letter that the broker parked bare
    park_id: str
    body: bytes
    #: the properties as they lay in the queue, byte for byte
    wire: Properties

    @property
    def key(self) -> str:
        """The park id, or the message id of a letter without one."""
        return self.park_id or self.id


class ArchiveWriter:
    """An archive file that is being written. Used as a context manager it is on the disk and closed at the end.

    The file is made anew, readable by its owner only. A letter is safe when :meth:`sync` has returned after its
    :meth:`write`: nothing may be destroyed before. Every method raises :class:`ArchiveError` where the file cannot be
    made or written, and after that always: what the file holds by then are whole lines.
    """

    def __init__(self, path: str | Path, *, queue: str, who: str, why: str) -> None:
        """``queue`` is the work queue, ``why`` the selection in words. A file that exists is never touched."""
        self.path = Path(path)
        #: letters written
        self.count = 0
        self._size = 0
        self._failed = ""
        self._closed = False
        header = {
            "format": FORMAT,
            "version": VERSION,
            "queue": queue,
            "created_at": iso(datetime.now(UTC)),
            "who": shorten(printable(who), _HEADER_TEXT_BYTES),
            "why": shorten(printable(why), _HEADER_TEXT_BYTES),
        }
        try:
            self._file = os.open(
                self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode=0o600
            )
        except FileExistsError as error:
            raise ArchiveError(
                f"archive {self._shown!r}: there is such a file, and it is never overwritten; name another one"
            ) from error
        except (OSError, ValueError) as error:
            raise ArchiveError(f"archive {self._shown!r}: cannot be made: {_reason(error)}") from error
        try:
            self._append(to_json(header) + b"\n")
            self.sync()
            self._sync_directory()
        except BaseException:
            os.close(self._file)
            with contextlib.suppress(OSError):
                self.path.unlink()  # nothing is in it
            raise

    @property
    def _shown(self) -> str:
        return printable(str(self.path))

    def write(self, letter: DeadLetter) -> None:
        """Append one letter. Not for one whose properties could not be read: they would be lost."""
        try:
            properties = letter.wire.encode()
        except WireError as error:
            raise ArchiveError(f"archive {self._shown!r}: letter {letter.id!r}: {error}") from error
        self._append(
            b"".join(
                (
                    b'{"id":',
                    to_json(letter.id),
                    b',"park_id":',
                    to_json(printable(letter.park_id)),
                    b',"letter":',
                    _readable(letter),
                    b',"crc32":%d,"properties":"' % _checksum(properties, letter.body),
                    base64.b64encode(properties),
                    b'","body":"',
                    base64.b64encode(letter.body),
                    b'"}\n',
                )
            )
        )
        self.count += 1

    def sync(self) -> None:
        """Return when every letter written so far is on the disk. It blocks for as long as the disk takes."""
        self._check()
        try:
            os.fsync(self._file)
        except OSError as error:
            # what was not written by now may be forgotten by the system: a second try would say that all is well
            self._fail(f"cannot be written to the disk: {_reason(error)}")
            raise ArchiveError(self._failed) from error

    def close(self) -> None:
        """Sync and close; again is nothing."""
        if self._closed:
            return
        try:
            self.sync()
        finally:
            self._closed = True
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with contextlib.suppress(ArchiveError):  # the first error is the one to tell
            self.close()

    def _append(self, line: bytes) -> None:
        self._check()
        left = memoryview(line)
        try:
            while left:  # a full disk takes a part before it says no
                left = left[os.write(self._file, left) :]
        except BaseException as error:
            self._fail(f"cannot be written: {_reason(error)}")
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            if isinstance(error, OSError):
                raise ArchiveError(self._failed) from error
            raise
        self._size += len(line)

    def _check(self) -> None:
        if self._closed:
            raise ArchiveError(f"archive {self._shown!r}: it is closed")
        if self._failed:
            raise ArchiveError(self._failed)

    def _fail(self, reason: str) -> None:
        self._failed = f"archive {self._shown!r}: {reason}; {self.count:,} letters are in it"

    def _sync_directory(self) -> None:
        """Without it a file may be gone after a power cut, whatever was synced in it."""
        if os.name != "posix":
            return
        try:
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            if error.errno not in _NO_DIRECTORY_SYNC:
                raise ArchiveError(f"archive {self._shown!r}: cannot be made: {_reason(error)}") from error


class ArchiveReader:
    """An archive as it is read: iterating gives the letters, one at a time in memory, each time from the first on."""

    def __init__(self, path: Path, header: ArchiveHeader) -> None:
        self.path = path
        self.header = header
        #: after reading to the end: says which line a crash cut off, None where there is none
        self.cut: str | None = None

    def __iter__(self) -> Iterator[ArchivedLetter]:
        """The letters in the order of the file; raises :class:`ArchiveError` naming the line that is broken."""
        self.cut, number = None, 1
        shown = printable(str(self.path))
        try:
            with self.path.open("rb") as file:
                file.readline(_LONGEST_HEADER)
                while line := file.readline(_LONGEST_LINE):
                    number += 1
                    if line.isspace():
                        continue
                    try:
                        letter = _letter(number, line)
                    except ValueError as error:
                        if line.endswith(b"\n") or len(line) == _LONGEST_LINE:
                            raise ArchiveError(
                                f"archive {shown!r}, line {number}: not a letter: {error}; the lines before are whole"
                            ) from error
                        self.cut = f"archive {shown!r}: its last line, {number}, was cut off while it was written"
                        return
                    yield letter
        except OSError as error:
            raise ArchiveError(f"archive {shown!r}: cannot be read: {_reason(error)}") from error


def read_archive(path: str | Path) -> ArchiveReader:
    """The archive in this file; its letters are read when it is iterated over.

    Raises :class:`ConfigurationError` where there is no such file, or one that is no archive.
    """
    path = Path(path)
    shown = printable(str(path))
    try:
        with path.open("rb") as file:
            first = file.readline(_LONGEST_HEADER)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"archive {shown!r}: cannot be read: {_reason(error)}") from error
    try:
        values = json.loads(first)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ConfigurationError(
            f"archive {shown!r}: its first line does not say that this is an archive of dead letters"
        )
    if values.get("version") != VERSION:
        raise ConfigurationError(
            f"archive {shown!r}: it is of version {values.get('version')!r}, and {VERSION} is the only one known here; "
            "use the rabbitdlq that wrote it"
        )
    queue, who, why = (_text(values, name) for name in ("queue", "who", "why"))
    return ArchiveReader(path, ArchiveHeader(queue, read_time(values.get("created_at")), who, why))


def restored(letter: ArchivedLetter, dlq: str) -> Outgoing:
    """The message that puts an archived letter back into the dead-letter queue itself, past its exchange.

    Others may be bound to the exchange, and have had the letter before.
    """
    return Outgoing("", dlq, letter.body, restored_properties(letter.wire, letter.id))


def _readable(letter: DeadLetter) -> bytes:
    small = len(letter.body) <= READABLE_BYTES
    try:
        values = (letter if small else replace(letter, body=b"")).as_json()
        if not small:
            del values["payload"]
        return to_json(values)
    except (ValueError, RecursionError, PydanticSerializationError):  # it is for people only: the letter is kept anyway
        return b"null"


def _letter(number: int, line: bytes) -> ArchivedLetter:
    """Raises :class:`ValueError` where the line is not one letter, to the last bit."""
    try:
        values = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(values, dict):
        raise WireError("it is no JSON object")
    properties, body = _bytes(values, "properties"), _bytes(values, "body")
    if values.get("crc32") != _checksum(properties, body):
        raise ValueError("its bytes are not those that were written (crc32)")
    return ArchivedLetter(number, _text(values, "id"), _text(values, "park_id"), body, Properties.parse(properties))


def _bytes(values: dict[str, Any], name: str) -> bytes:
    value = values.pop(name, None)
    if not isinstance(value, str):
        raise WireError(f"{name}: missing")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _text(values: dict[str, Any], name: str) -> str:
    value = values.get(name)
    return printable(value) if isinstance(value, str) else ""


def _checksum(properties: bytes, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(properties))


def _reason(error: BaseException) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
