"""Archives: every byte comes back, a crash costs no more than the line it cut, nothing is ever half believed."""

import base64
import errno
import json
import os
import resource
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rabbitdlq import names
from rabbitdlq.dead_letter import DeadLetter
from rabbitdlq.dead_letters import archive
from rabbitdlq.dead_letters.archive import ArchivedLetter, ArchiveWriter, read_archive, restored
from rabbitdlq.errors import ArchiveError, ConfigurationError
from rabbitdlq.message import derived_id
from rabbitdlq.parking import restored_properties
from rabbitdlq.wire import Headers, Properties
from tests.unit.strategies import header_values, properties, quick

#: what a small letter has on the wire
PARKED = Properties(
    message_id="17", headers=Headers({names.PARK_ID: "p17", names.REASON: "exhausted", "tenant": "größe"})
)


def letter(body: bytes = b'{"order": 1}', wire: Properties = PARKED) -> DeadLetter:
    return DeadLetter.parse("orders", body, wire)


def writer(path: Path) -> ArchiveWriter:
    return ArchiveWriter(path, queue="orders", who="ann", why="reason=exhausted")


def written(path: Path, *letters: DeadLetter) -> Path:
    with writer(path) as file:
        for each in letters:
            file.write(each)
    return path


def content(found: ArchivedLetter) -> tuple[bytes, bytes]:
    return found.body, found.wire.encode()


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """No file may grow beyond so many bytes: like a full disk, it takes a part of what is written and then says no."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestRoundTrip:
    @quick
    @given(st.lists(st.tuples(st.binary(max_size=200), properties), max_size=5))
    def test_every_byte_and_every_header_come_back(
        self, tmp_path_factory: pytest.TempPathFactory, messages: list[tuple[bytes, Properties]]
    ) -> None:
        path = tmp_path_factory.mktemp("archive") / "a.jsonl"

        written(path, *(letter(body, wire) for body, wire in messages))

        found = list(read_archive(path))
        assert [content(each) for each in found] == [(body, wire.encode()) for body, wire in messages]
        assert [each.wire.headers is None for each in found] == [wire.headers is None for _, wire in messages]

    @quick
    @given(st.dictionaries(st.text(max_size=20), header_values, max_size=5), st.text(max_size=20))
    def test_the_letter_is_the_same_to_whoever_looks(
        self, tmp_path_factory: pytest.TempPathFactory, headers: dict[str, object], id: str
    ) -> None:
        before = letter(wire=Properties(message_id=id, headers=Headers({**headers, names.PARK_ID: "p"})))
        path = written(tmp_path_factory.mktemp("archive") / "a.jsonl", before)

        (found,) = read_archive(path)

        after = DeadLetter.parse("orders", found.body, found.wire)
        assert after.as_json() == before.as_json()
        assert (found.id, found.park_id, found.key, found.line) == (before.id, "p", "p", 2)

    @pytest.mark.parametrize("body", [b"", bytes(range(256)), b"[" * 100_000, b"NaN", b'"\\ud800"', b"1" * 5_000])
    def test_bodies_that_are_hard_to_show_are_kept(self, tmp_path: Path, body: bytes) -> None:
        path = written(tmp_path / "a", letter(body), letter(b"after"))

        assert [each.body for each in read_archive(path)] == [body, b"after"]

    def test_a_body_of_60_mb_is_kept(self, tmp_path: Path) -> None:
        body = os.urandom(1_000_000) * 60
        path = written(tmp_path / "a", letter(body))

        (found,) = read_archive(path)

        assert found.body == body
        assert path.stat().st_size < len(body) * 4 / 3 + 2_000, "it is there once"

    def test_the_file_can_be_read_again_and_again(self, tmp_path: Path) -> None:
        found = read_archive(written(tmp_path / "a", letter(), letter()))

        assert [each.line for each in found] == [each.line for each in found] == [2, 3]
        assert found.cut is None

    def test_an_archive_without_letters_is_one(self, tmp_path: Path) -> None:
        assert list(read_archive(written(tmp_path / "a"))) == []


class TestForPeople:
    def test_the_first_line_says_what_it_is(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a")
        first = json.loads(path.read_bytes().splitlines()[0])

        assert {name: first[name] for name in ("format", "version", "queue", "who", "why")} == {
            "format": "rabbitdlq-archive",
            "version": 1,
            "queue": "orders",
            "who": "ann",
            "why": "reason=exhausted",
        }
        header = read_archive(path).header
        assert (header.queue, header.who, header.why) == ("orders", "ann", "reason=exhausted")
        assert header.created_at is not None
        assert abs(header.created_at.timestamp() - time.time()) < 60

    def test_a_letter_stands_there_readable_too(self, tmp_path: Path) -> None:
        line = json.loads(written(tmp_path / "a", letter()).read_bytes().splitlines()[1])

        assert line["letter"] == json.loads(json.dumps(letter().as_json()))
        assert line["letter"]["payload"] == {"order": 1}
        assert "größe".encode() in (tmp_path / "a").read_bytes(), "grep finds it"
        assert base64.b64decode(line["body"]) == b'{"order": 1}'

    def test_a_large_payload_is_there_once(self, tmp_path: Path) -> None:
        body = json.dumps({"text": "x" * archive.READABLE_BYTES}).encode()
        path = written(tmp_path / "a", letter(body))
        line = json.loads(path.read_bytes().splitlines()[1])

        assert "payload" not in line["letter"]
        assert line["letter"]["reason"] == "exhausted"
        assert b"xxxx" not in path.read_bytes()

    def test_a_letter_that_cannot_be_shown_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(_: DeadLetter) -> None:
            raise RecursionError

        monkeypatch.setattr(DeadLetter, "as_json", broken)

        assert [each.body for each in read_archive(written(tmp_path / "a", letter()))] == [b'{"order": 1}']


class TestTheFile:
    def test_only_its_owner_may_read_it_whatever_the_umask(self, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            written(tmp_path / "a")
        finally:
            os.umask(before)

        assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600

    @pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
    def test_what_is_there_is_never_overwritten(self, tmp_path: Path, kind: str) -> None:
        path, other = tmp_path / "a", tmp_path / "b"
        if kind != "dangling link":
            other.write_text("precious")
        path.write_text("precious") if kind == "file" else path.symlink_to(other)

        with pytest.raises(ArchiveError, match=r"a': there is such a file, and it is never overwritten"):
            writer(path)

        assert other.exists() == (kind != "dangling link")
        assert kind == "dangling link" or path.read_text() == "precious"

    @pytest.mark.parametrize(
        ("name", "reason"),
        [("missing/a", "No such file or directory"), ("file/a", "Not a directory"), ("a\0b", "null byte")],
    )
    def test_one_that_cannot_be_made_is_told(self, tmp_path: Path, name: str, reason: str) -> None:
        (tmp_path / "file").write_text("")

        with pytest.raises(ArchiveError, match=f"cannot be made: .*{reason}"):
            writer(tmp_path / name)

    def test_without_the_permission_it_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object, **__: object) -> int:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)  # root may write everywhere
        with pytest.raises(ArchiveError, match="cannot be made: Permission denied"):
            writer(tmp_path / "a")

    def test_a_full_disk_leaves_whole_lines(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        with disk_of(20_000), pytest.raises(ArchiveError) as caught:
            written(path, *[letter(b"x" * 1_000)] * 100)
        kept = list(read_archive(path))

        assert (
            str(caught.value) == f"archive '{path}': cannot be written: File too large; {len(kept)} letters are in it"
        )
        assert 2 < len(kept) < 10
        assert path.read_bytes().endswith(b"\n")

    def test_after_an_error_no_sync_says_that_all_is_well(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(_: int) -> None:
            raise OSError(errno.EIO, "Input/output error")

        file = writer(tmp_path / "a")
        file.write(letter())
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            with pytest.raises(ArchiveError, match="cannot be written to the disk: Input/output error"):
                file.sync()

        for again in (file.sync, lambda: file.write(letter()), file.close):
            with pytest.raises(ArchiveError, match="Input/output error"):
                again()

    def test_a_disk_without_room_for_the_first_line_leaves_no_file(self, tmp_path: Path) -> None:
        with disk_of(10), pytest.raises(ArchiveError, match="File too large"):
            writer(tmp_path / "a")

        assert not (tmp_path / "a").exists()

    def test_an_interrupt_in_the_middle_of_a_line_leaves_whole_lines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write = os.write

        def interrupted(file: int, data: bytes) -> int:
            if len(data) < 150:
                raise KeyboardInterrupt
            return write(file, data[:100])

        file = writer(tmp_path / "a")
        file.write(letter())
        monkeypatch.setattr(os, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.write(letter())
        monkeypatch.undo()

        with pytest.raises(ArchiveError, match="KeyboardInterrupt; 1 letters are in it"):
            file.close()
        assert len(list(found := read_archive(tmp_path / "a"))) == 1
        assert found.cut is None

    def test_it_is_on_the_disk_with_its_directory_before_a_letter_is_taken(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []

        def note(file: int) -> None:
            synced.append("directory" if stat.S_ISDIR(os.fstat(file).st_mode) else "file")

        monkeypatch.setattr(os, "fsync", note)
        with writer(tmp_path / "a") as file:
            assert synced == ["file", "directory"]
            file.write(letter())
            assert len(synced) == 2
            file.sync()
            assert synced[2:] == ["file"]
            file.close()
            file.close()

    def test_what_is_closed_takes_no_more(self, tmp_path: Path) -> None:
        with writer(tmp_path / "a") as file:
            pass
        with pytest.raises(ArchiveError, match="it is closed"):
            file.write(letter())

    def test_the_callers_own_error_is_the_one_that_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            with writer(tmp_path / "a") as file:
                file.write(letter())
                monkeypatch.setattr(os, "fsync", lambda _: os.stat("/dev/null/missing"))
                raise RuntimeError("mine")

        with pytest.raises(RuntimeError, match="mine"):
            fail()
        assert len(list(read_archive(tmp_path / "a"))) == 1

    def test_twenty_thousand_letters_are_written_in_no_time(self, tmp_path: Path) -> None:
        body = json.dumps({"text": "x" * 1_000}).encode()
        one = letter(body)
        began = time.process_time()
        with writer(tmp_path / "a") as file:
            for _ in range(20_000):
                file.write(one)

        assert time.process_time() - began < 4, "it takes under one on a quiet machine"
        assert sum(1 for _ in read_archive(tmp_path / "a")) == 20_000


class TestBroken:
    def test_a_file_cut_anywhere_in_its_last_line_gives_all_lines_before_it(self, tmp_path: Path) -> None:
        whole = written(tmp_path / "a", letter(b"one"), letter(b"two"), letter(b"last")).read_bytes()
        last = whole.rindex(b"\n", 0, -1) + 1
        path = tmp_path / "cut"

        for end in range(last, len(whole) + 1):
            path.write_bytes(whole[:end])
            found = read_archive(path)
            bodies = [each.body for each in found]
            if end >= len(whole) - 1:  # without its line feed only, it is whole
                assert (bodies, found.cut) == ([b"one", b"two", b"last"], None)
            else:
                assert bodies == [b"one", b"two"]
                assert (found.cut is None) == (end == last)
                if found.cut is not None:
                    assert found.cut == f"archive '{path}': its last line, 4, was cut off while it was written"

    @pytest.mark.parametrize(
        ("spoil", "reason"),
        [
            (lambda line: line[:50] + line[60:], "crc32|Expecting|delimiter|properties|Extra data|Invalid"),
            (lambda line: b"{}", "properties: missing"),
            (lambda line: b"[]", "it is no JSON object"),
            (lambda line: b"\xff\xfe", "decode"),
            (lambda line: line.replace(b'"body":"b25l"', b'"body":"b25m"'), r"not those that were written \(crc32\)"),
            (lambda line: line.replace(b'"body":"b25l"', b'"body":"b2*l"'), "body: "),
            (lambda line: b"[" * 100_000, "nested too deeply"),
        ],
    )
    def test_a_broken_line_is_one_error_with_its_number(self, tmp_path: Path, spoil: object, reason: str) -> None:
        path = written(tmp_path / "a", letter(b"none"), letter(b"one"), letter(b"two"))
        lines = path.read_bytes().splitlines(keepends=True)
        assert callable(spoil)
        lines[2] = spoil(lines[2].rstrip(b"\n")) + b"\n"
        path.write_bytes(b"".join(lines))

        found = iter(read_archive(path))
        assert next(found).body == b"none"
        with pytest.raises(ArchiveError, match=rf"^archive '{path}', line 3: not a letter: .*({reason})"):
            next(found)

    @pytest.mark.parametrize(
        "text", [b"", b"\n", b"{", b"[]\n", b"null\n", b'{"id": "17"}\n', b"\x00\xff" * 1_000_000, b"[" * 90_000]
    )
    def test_what_is_no_archive_is_refused(self, tmp_path: Path, text: bytes) -> None:
        (tmp_path / "a").write_bytes(text)

        with pytest.raises(ConfigurationError, match=r"/a': its first line does not say that this is an archive"):
            read_archive(tmp_path / "a")

    def test_one_of_a_later_version_is_refused(self, tmp_path: Path) -> None:
        path = written(tmp_path / "a")
        path.write_bytes(path.read_bytes().replace(b'"version":1', b'"version":2'))

        with pytest.raises(ConfigurationError, match="it is of version 2, and 1 is the only one known here"):
            read_archive(path)

    @pytest.mark.parametrize(("name", "reason"), [("missing", "No such file"), (".", "Is a directory")])
    def test_what_cannot_be_read_is_told(self, tmp_path: Path, name: str, reason: str) -> None:
        with pytest.raises(ConfigurationError, match=f"cannot be read: {reason}"):
            read_archive(tmp_path / name)

    def test_a_file_that_goes_away_is_told(self, tmp_path: Path) -> None:
        found = read_archive(written(tmp_path / "a", letter()))
        found.path.unlink()

        with pytest.raises(ArchiveError, match="cannot be read: No such file"):
            list(found)


class TestRestored:
    @quick
    @given(properties)
    def test_a_letter_goes_back_as_it_was_less_what_the_broker_would_act_on(self, wire: Properties) -> None:
        back = restored_properties(wire, "derived-1")

        assert (back.expiration, back.user_id) == (None, None)
        assert not {"CC", "BCC", "x-delivery-count", "x-acquired-count"} & set(back.table)
        if not wire.message_id:
            assert (back.message_id, back.table.get(names.ID_DERIVED)) == ("derived-1", True)
        elif wire.expiration is None and wire.user_id is None:
            assert back.encode() == wire.encode()
        own = {names.ORIGINAL, names.ID_DERIVED}
        kept = back.table.without(lambda name: name in own)
        assert kept.encode() == wire.table.without(lambda name: name in own or name not in kept).encode()
        assert restored_properties(back, "derived-1").encode() == back.encode(), "doing it again changes nothing"

    def test_a_message_without_a_header_table_gets_none(self) -> None:
        for headers in (None, Headers()):
            wire = Properties(message_id="1", headers=headers)
            assert restored_properties(wire, "").encode() == wire.encode()

    def test_what_is_moved_is_told(self) -> None:
        headers = {
            "CC": ["a"],
            "x-death": [{"queue": "orders", "reason": "rejected", "count": 1}],
            "x-delivery-count": 3,
            "x-first-death-queue": "orders",
            names.ORIGINAL: '{"priority": 3}',
        }
        wire = Properties(message_id="1", expiration="50", user_id="bob", headers=Headers(headers))
        back = restored_properties(wire, "")

        assert set(back.table) == {"x-death", "x-first-death-queue", names.ORIGINAL}
        assert back.table.raw("x-death") == wire.table.raw("x-death")
        assert json.loads(back.table.text(names.ORIGINAL) or "") == {
            "priority": 3,
            "CC": ["a"],
            "expiration": "50",
            "user_id": "bob",
        }
        assert DeadLetter.parse("orders", b"", back).reason == "exhausted"

    def test_direct_reply_to_is_moved_and_another_one_stays(self) -> None:
        direct, other = (
            restored_properties(Properties(message_id="1", reply_to=to), "")
            for to in ("amq.rabbitmq.reply-to.x", "answers")
        )

        assert (direct.reply_to, other.reply_to) == (None, "answers")
        assert "amq.rabbitmq.reply-to.x" in (direct.table.text(names.ORIGINAL) or "")

    def test_it_goes_to_the_dead_letter_queue_itself(self) -> None:
        found = ArchivedLetter(2, "17", "p17", b"body", PARKED)
        back = restored(found, "orders.dlq")

        assert (back.exchange, back.routing_key, back.body) == ("", "orders.dlq", b"body")
        assert back.properties.encode() == PARKED.encode()

    def test_one_without_an_id_keeps_the_one_it_is_known_by(self) -> None:
        wire = Properties(user_id="bob", headers=Headers({"x-death": [{"queue": "orders", "reason": "expired"}]}))
        before = letter(b"body", wire)
        assert before.id == derived_id(b"body", wire, "")
        back = restored(ArchivedLetter(2, before.id, "", b"body", wire), "orders.dlq")

        after = letter(b"body", back.properties)
        assert (after.id, after.id_derived, after.reason) == (before.id, True, before.reason)
