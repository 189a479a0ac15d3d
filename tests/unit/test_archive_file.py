"""The file that dropped letters go to: whose name may change, and whose may not."""

from pathlib import Path

import pytest

from rabbitdlq.cli.operating import ArchiveFile, archive_file
from rabbitdlq.dead_letters import RunReport
from rabbitdlq.dead_letters.archive import ArchiveWriter
from rabbitdlq.errors import ArchiveError


class Drops:
    """Drops that write into the file they are given; before the first ones somebody else makes it."""

    def __init__(self, taken: int) -> None:
        self.taken = taken
        self.paths: list[str] = []

    async def __call__(self, path: Path) -> RunReport:
        self.paths.append(path.name)
        if len(self.paths) <= self.taken:
            path.write_text("precious")
        with ArchiveWriter(path, queue="orders", who="test", why="all"):
            return RunReport("drop")


async def test_a_name_of_ours_that_is_taken_in_the_last_moment_gives_way(tmp_path: Path) -> None:
    drops = Drops(taken=2)

    await ArchiveFile(tmp_path / "a.jsonl", tmp_path / "a.jsonl").write(drops)

    assert drops.paths == ["a.jsonl", "a-2.jsonl", "a-3.jsonl"]


async def test_a_name_that_somebody_gave_does_not(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="there is such a file"):
        await ArchiveFile(tmp_path / "a.jsonl").write(Drops(taken=1))
    nowhere = tmp_path / "nowhere" / "a.jsonl"
    with pytest.raises(ArchiveError, match="cannot be made"):
        await ArchiveFile(nowhere, nowhere).write(Drops(taken=0))


def test_a_name_of_ours_is_that_of_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = archive_file("or/ders", None, no_archive=False)
    assert first is not None
    assert first.path.name.startswith("or_ders-dead-")
    taken = archive_file("orders", Path("given"), no_archive=False)
    assert taken == ArchiveFile(Path("given"))
    assert archive_file("orders", None, no_archive=True) is None
