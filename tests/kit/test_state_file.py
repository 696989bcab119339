"""A small file that outlives the agent: whole, bounded, and never the end of the agent."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import Struct
from structlog.testing import capture_logs

from gpushare_agent.core.kit import state_file
from gpushare_agent.core.kit.state_file import IS_COPY, MAX_BYTES, StateFile
from gpushare_agent.core.model.errors import Unavailable

NAME, EVENT, LOST = "state.json", "state_corrupt", "nothing is known"


class Document(Struct):
    gpus: dict[str, str]
    version: Literal[1] = 1


SAVED, OTHER = Document({"GPU-1": "fan, “left”", "GPU-2": ""}), Document({})


class File:
    def __init__(self, directory: Path) -> None:
        self.path = directory / NAME
        self._file = StateFile(self.path, "the state", Document, event=EVENT, lost=LOST)

    async def load(self) -> Document | None:
        return await self._file.load(lambda document: document, lambda: None)

    async def save(self, document: Document) -> None:
        await self._file.save(lambda: document)

    async def reported(self, found: Document | None) -> MutableMapping[str, Any]:
        """What is logged where the file is refused, and this found all the same."""
        with capture_logs() as logs:
            assert await self.load() == found
        [line] = logs
        assert (line["event"], line["then"]) == (EVENT, LOST if found is None else IS_COPY)
        return line


@pytest.fixture
async def saved(tmp_path: Path) -> File:
    file = File(tmp_path)
    await file.save(SAVED)
    return file


async def test_what_is_saved_is_loaded_again(tmp_path: Path) -> None:
    """Its directory is made; the file is root's alone; but for the copy no other file is left."""
    file = File(tmp_path / "new" / "deeper")
    assert await file.load() is None
    await file.save(SAVED)
    assert await File(file.path.parent).load() == SAVED
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert sorted(os.listdir(file.path.parent)) == [NAME, f"{NAME}.last"]
    document = json.loads(file.path.read_text())
    assert len(document.pop("digest")) == 64
    assert document == {"version": 1, "gpus": SAVED.gpus}


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe", b"[" * 100_000, b"[]", b"{}", b'{"version": 2, "gpus": {}}', b'{"gpus": {}}' + b" " * MAX_BYTES],
)
async def test_a_file_that_is_not_the_format_is_set_aside_for_a_person(tmp_path: Path, content: bytes) -> None:
    """As it was, with an error in the log that names what is lost; the agent goes on without."""
    file = File(tmp_path)
    file.path.write_bytes(content)
    assert (await file.reported(None))["log_level"] == "error"
    assert (tmp_path / f"{NAME}.corrupt").read_bytes() == content and not file.path.exists()
    await file.save(SAVED)
    assert await file.load() == SAVED


@pytest.mark.parametrize("is_read_before", [False, True])
@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace(b'"version": 1', b'"version": 2'),
        lambda text: text[:40] + bytes([text[40] ^ 0x80]) + text[41:],
        lambda text: text.replace(b"{", b"[", 1),
        lambda text: text[:-20],
        lambda text: b"",
        lambda text: bytes(len(text)),
        lambda text: text.replace(b'"gpus"', b'"\\ud800"').replace(b'"GPU', b'"\\ud800GPU'),
        lambda text: text.replace(b'"GPU-', b'"GPU/', 1),
        lambda text: text.replace(b'"digest": "', b'"digest": "x'),
    ],
    ids=["version", "bit", "bracket", "cut", "empty", "zeros", "half a pair", "another GPU", "digest"],
)
async def test_the_last_good_copy_counts_for_a_damaged_file(
    saved: File, damage: Callable[[bytes], bytes], is_read_before: bool
) -> None:
    """Also of a file that an agent without copies has written, once it was read. It is said, and the damaged one kept."""
    directory, good = saved.path.parent, saved.path.read_bytes()
    if is_read_before:
        (directory / f"{NAME}.last").unlink()
        assert await saved.load() == SAVED
    saved.path.write_bytes(damage(good))
    await File(directory).reported(SAVED)
    assert (directory / f"{NAME}.corrupt").read_bytes() == damage(good) and saved.path.read_bytes() == good
    assert sorted(os.listdir(directory)) == [NAME, f"{NAME}.corrupt", f"{NAME}.last"]
    saved.path.unlink()  # by an operator, who wants nothing of it
    assert await saved.load() is None


async def test_an_agent_that_is_killed_while_it_sets_a_file_aside_loses_nothing(
    saved: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its renames; whatever was set aside before."""
    good, damaged, replace = saved.path.read_bytes(), b"{}", Path.replace
    saved.path.with_name(f"{NAME}.corrupt").write_text("earlier")
    for lives_for in range(2):
        saved.path.write_bytes(damaged)
        left = [lives_for]

        def end(path: Path, target: Path, left: list[int] = left) -> Path:
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            return replace(path, target)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", end)
            await saved.load()
        assert await File(saved.path.parent).load() == SAVED
    assert saved.path.read_bytes() == good and saved.path.with_name(f"{NAME}.corrupt").read_bytes() == damaged


@pytest.mark.parametrize("kind", ["corrupt", "new", "last"])
async def test_it_is_kept_whatever_is_in_the_way(saved: File, kind: str) -> None:
    """The copy counts where the damaged file cannot be set aside, or nothing be written, as on a full disk; and the file is
    written where the copy cannot be."""
    in_the_way = saved.path.with_name(f"{NAME}.{kind}")
    in_the_way.unlink(missing_ok=True)
    (in_the_way / "something").mkdir(parents=True)
    if kind == "last":
        await saved.save(OTHER)
        assert await saved.load() == OTHER
        return
    saved.path.write_bytes(saved.path.read_bytes()[:-20])
    for _ in range(2):  # and at the next start
        assert (await saved.reported(SAVED))["kept_as"] == str(saved.path)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
async def test_a_file_that_others_may_write_is_not_believed(saved: File, mode: int) -> None:
    """Whoever may write it could cordon every GPU of the node: it is set aside, with the reason and the cure in the log, and
    the agent's own copy counts."""
    saved.path.chmod(mode)
    why = (await saved.reported(SAVED))["why"]
    assert f"mode {mode:04o}" in why and "chmod go-w" in why
    saved.path.with_name(f"{NAME}.last").chmod(mode)
    saved.path.chmod(mode)
    await saved.reported(None)
    assert saved.path.with_name(f"{NAME}.corrupt").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
async def test_a_file_of_another_user_is_not_believed(saved: File) -> None:
    """Nor is a link, whosever file it leads to."""
    os.chown(saved.path, 1000, 1000)
    why = (await saved.reported(SAVED))["why"]
    assert "UID 1000" in why and "chown root" in why
    await saved.save(SAVED)
    elsewhere = saved.path.rename(saved.path.with_name("elsewhere"))
    saved.path.symlink_to(elsewhere)
    await saved.reported(SAVED)
    assert saved.path.is_file() and not saved.path.is_symlink()


async def test_the_copy_counts_where_the_disk_has_lost_the_file(saved: File, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may pass is tried again."""
    for number in (errno.EIO, errno.EMFILE):

        def refuse(path: Path, *_: object, number: int = number, **__: object) -> bytes:
            if path == saved.path:
                raise OSError(number, os.strerror(number))
            return path.read_bytes()

        with monkeypatch.context() as patch:
            patch.setattr(state_file, "read_regular", refuse)
            if number == errno.EIO:
                await saved.reported(SAVED)
            else:
                with pytest.raises(Unavailable, match="failed: Too many open files"):
                    await saved.load()
        assert await saved.load() == SAVED


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
async def test_what_is_no_file_is_set_aside_too(tmp_path: Path, make: Callable[[Path], None]) -> None:
    """A pipe in its place would keep its reader for ever."""
    file = File(tmp_path)
    make(file.path)
    await file.reported(None)
    assert (tmp_path / f"{NAME}.corrupt").exists()


async def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    """Reading finds nothing there that could be wrong, or reports it; writing reports it."""
    (tmp_path / "taken").write_text("a file")
    file = File(tmp_path / "taken")
    with pytest.raises(Unavailable, match="reading the state from"):
        await file.load()
    with pytest.raises(Unavailable, match=f"saving the state to {file.path} failed"):
        await file.save(SAVED)


async def test_a_write_that_fails_leaves_the_old_file(saved: File) -> None:
    """Whole, and nothing half written beside it."""
    new = saved.path.with_name(f"{NAME}.new")
    for make in (os.mkfifo, Path.mkdir):  # the pipe is removed then
        make(new)
        with pytest.raises(Unavailable, match="saving the state"):
            await saved.save(OTHER)
        assert await saved.load() == SAVED
    saved.path.unlink()
    (saved.path / "something").mkdir(parents=True)
    new.rmdir()
    with pytest.raises(Unavailable):
        await saved.save(OTHER)
    assert not new.exists()
