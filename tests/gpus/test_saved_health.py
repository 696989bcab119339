"""The file that remembers cordons and waits for a reset: whole, bounded, and never the end of the agent."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.agent.gpus.saved_health import HealthStateFile
from gpushare_agent.agent.runtime.machine import BOOT_ID
from gpushare_agent.core.kit.state_file import IS_COPY, MAX_BYTES
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpu_health import NOTHING_SAVED, SavedHealth
from gpushare_agent.core.model.names import GpuUuid

FIRST, SECOND = GpuUuid("GPU-1"), GpuUuid("GPU-2")
SAVED = SavedHealth(cordons={FIRST: "fan, “left”", SECOND: ""}, waits={SECOND: "Xid 79"})


@pytest.fixture
def boot(tmp_path: Path) -> Path:
    path = tmp_path / "boot_id"
    path.write_text("boot-1\n")
    return path


async def test_what_is_saved_is_loaded_again(tmp_path: Path, boot: Path) -> None:
    """Its directory is made; the file is root's alone; but for the copy no other file is left."""
    path = tmp_path / "new" / "deeper" / "health.json"
    await HealthStateFile(path, boot_id=boot).save(SAVED)
    assert await HealthStateFile(path, boot_id=boot).load() == SAVED
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sorted(os.listdir(path.parent)) == ["health.json", "health.json.last"]
    document = json.loads(path.read_text())
    assert len(document.pop("digest")) == 64
    assert document == {
        "version": 1,
        "boot_id": "boot-1",
        "gpus": [
            {"uuid": "GPU-1", "cordoned": "fan, “left”"},
            {"uuid": "GPU-2", "cordoned": "", "waits_for_reset": "Xid 79"},
        ],
    }


async def test_a_reboot_ends_the_waits_and_keeps_the_cordons(tmp_path: Path, boot: Path) -> None:
    """The GPUs were reset by it."""
    file = HealthStateFile(tmp_path / "health.json", boot_id=boot)
    await file.save(SAVED)
    boot.write_text("boot-2\n")
    with capture_logs() as logs:
        assert await file.load() == SavedHealth(cordons=SAVED.cordons, waits={})
    assert [(line["event"], line["gpus"]) for line in logs] == [("health_waits_dropped", ["GPU-2"])]


async def test_where_the_boot_cannot_be_reported_the_waits_are_kept(tmp_path: Path, boot: Path) -> None:
    """A GPU that was not reset is worse than one that an operator has to put back."""
    file = HealthStateFile(tmp_path / "health.json", boot_id=boot)
    await file.save(SAVED)
    boot.unlink()
    assert await file.load() == SAVED


async def test_without_a_file_nothing_is_known(tmp_path: Path) -> None:
    """The first start; the kernel's own boot identity is there."""
    assert await HealthStateFile(tmp_path / "none" / "health.json").load() == NOTHING_SAVED
    assert BOOT_ID.read_text().strip()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b"[]",
        b"{}",
        b'{"version": 2, "gpus": []}',
        b'{"version": 1, "gpus": {}}',
        b'{"version": 1, "gpus": ["GPU-1"]}',
        b'{"version": 1, "gpus": [{"cordoned": "x"}]}',
        b'{"version": 1, "gpus": [{"uuid": 7}]}',
        b'{"version": 1, "gpus": [{"uuid": "GPU-1", "cordoned": true}]}',
        b'{"version": 1, "boot_id": [], "gpus": []}',
        b'{"version": 1, "gpus": [{"uuid": "GPU-1", "cordoned": "' + b"x" * 2000 + b'"}]}',
        b'{"version": 1, "gpus": [' + b'{"uuid": "GPU-1"},' * 1025 + b'{"uuid": "GPU-1"}]}',
        b" " * (MAX_BYTES + 1),
    ],
)
async def test_a_file_that_is_not_the_format_is_set_aside_for_a_person(
    tmp_path: Path, boot: Path, content: bytes
) -> None:
    """As it was, with an error in the log that names what is lost; the agent goes on without."""
    path = tmp_path / "health.json"
    path.write_bytes(content)
    file = HealthStateFile(path, boot_id=boot)
    with capture_logs() as logs:
        assert await file.load() == NOTHING_SAVED
    assert [(line["event"], line["log_level"]) for line in logs] == [("health_state_corrupt", "error")]
    assert (tmp_path / "health.json.corrupt").read_bytes() == content and not path.exists()
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
        lambda text: text.replace(b'"cordoned"', b'"\\ud800"').replace(b'"GPU', b'"\\ud800GPU'),
        lambda text: text.replace(b'"GPU-', b'"GPU/', 1),
        lambda text: text.replace(b'"digest": "', b'"digest": "x'),
    ],
    ids=["version", "bit", "bracket", "cut", "empty", "zeros", "half a pair", "another GPU", "digest"],
)
async def test_the_last_good_copy_counts_for_a_damaged_file(
    tmp_path: Path, boot: Path, damage: Callable[[bytes], bytes], is_read_before: bool
) -> None:
    """Also of a file that an agent without copies has written, once it was read. It is said, and the damaged one kept."""
    path, copy = tmp_path / "health.json", tmp_path / "health.json.last"
    file = HealthStateFile(path, boot_id=boot)
    await file.save(SAVED)
    good = path.read_bytes()
    if is_read_before:
        copy.unlink()
        assert await file.load() == SAVED
    path.write_bytes(damage(good))
    with capture_logs() as logs:
        assert await HealthStateFile(path, boot_id=boot).load() == SAVED
    assert [(line["event"], line["then"]) for line in logs] == [("health_state_corrupt", IS_COPY)]
    assert (tmp_path / "health.json.corrupt").read_bytes() == damage(good) and path.read_bytes() == good
    assert sorted(one.name for one in tmp_path.iterdir() if one.name.startswith("health")) == [
        "health.json", "health.json.corrupt", "health.json.last"
    ]  # fmt: skip
    path.unlink()  # by an operator, who wants nothing of it
    assert await file.load() == NOTHING_SAVED


@pytest.mark.parametrize("in_the_way", ["health.json.corrupt", "health.json.new", "health.json.last"])
async def test_cordons_are_kept_whatever_is_in_the_way(tmp_path: Path, boot: Path, in_the_way: str) -> None:
    """The copy counts where the damaged file cannot be set aside, or nothing be written, as on a full disk; and the file is
    written where the copy cannot be."""
    path = tmp_path / "health.json"
    file = HealthStateFile(path, boot_id=boot)
    await file.save(SAVED)
    (tmp_path / in_the_way).unlink(missing_ok=True)
    (tmp_path / in_the_way / "something").mkdir(parents=True)
    if in_the_way.endswith("last"):
        await file.save(NOTHING_SAVED)
        assert await file.load() == NOTHING_SAVED
        return
    path.write_bytes(path.read_bytes()[:-20])
    for _ in range(2):  # and at the next start
        with capture_logs() as logs:
            assert await file.load() == SAVED
        assert [(line["event"], line["then"], line["kept_as"]) for line in logs] == [
            ("health_state_corrupt", IS_COPY, str(path))
        ]


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
async def test_a_file_that_others_may_write_is_not_believed(tmp_path: Path, boot: Path, mode: int) -> None:
    """Whoever may write it could cordon every GPU of the node: it is set aside, with the reason and the cure in the log, and
    the agent's own copy counts."""
    path = tmp_path / "health.json"
    file = HealthStateFile(path, boot_id=boot)
    await file.save(SAVED)
    path.chmod(mode)
    with capture_logs() as logs:
        assert await file.load() == SAVED
    (tmp_path / "health.json.last").chmod(mode)
    path.chmod(mode)
    with capture_logs():
        assert await file.load() == NOTHING_SAVED
    assert f"mode {mode:04o}" in logs[0]["why"] and "chmod go-w" in logs[0]["why"]
    assert (tmp_path / "health.json.corrupt").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file away needs root")
async def test_a_file_of_another_user_is_not_believed(tmp_path: Path, boot: Path) -> None:
    """Nor is a link, whosever file it leads to."""
    path = tmp_path / "health.json"
    file = HealthStateFile(path, boot_id=boot)
    await file.save(SAVED)
    os.chown(path, 1000, 1000)
    with capture_logs() as logs:
        assert await file.load() == SAVED
    assert "UID 1000" in logs[0]["why"] and "chown root" in logs[0]["why"]
    await file.save(SAVED)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with capture_logs():
        assert await file.load() == SAVED
    assert path.is_file() and not path.is_symlink()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
async def test_what_is_no_file_is_set_aside_too(tmp_path: Path, boot: Path, make: object) -> None:
    """A pipe in its place would keep its reader for ever."""
    path = tmp_path / "health.json"
    make(path)  # type: ignore[operator]
    assert await HealthStateFile(path, boot_id=boot).load() == NOTHING_SAVED
    assert (tmp_path / "health.json.corrupt").exists()


async def test_a_directory_that_cannot_be_made_is_reported(tmp_path: Path, boot: Path) -> None:
    """Reading finds nothing there that could be wrong, or reports it; writing reports it."""
    (tmp_path / "taken").write_text("a file")
    file = HealthStateFile(tmp_path / "taken" / "health.json", boot_id=boot)
    with pytest.raises(Unavailable, match="cannot be read"):
        await file.load()
    with pytest.raises(Unavailable, match="cannot be written"):
        await file.save(SAVED)


async def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, boot: Path) -> None:
    """Whole, and nothing half written beside it."""
    path = tmp_path / "health.json"
    file = HealthStateFile(path, boot_id=boot)
    await file.save(SAVED)
    (tmp_path / "health.json.new").mkdir()
    with pytest.raises(Unavailable):
        await file.save(NOTHING_SAVED)
    assert await file.load() == SAVED
