"""The file that remembers cordons and waits for a reset; how it is kept: tests/kit/test_state_file.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from gpushare_agent.agent.gpus.saved_health import HealthStateFile
from gpushare_agent.agent.runtime.machine import BOOT_ID
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
    """In the documented format."""
    path = tmp_path / "health.json"
    await HealthStateFile(path, boot_id=boot).save(SAVED)
    assert await HealthStateFile(path, boot_id=boot).load() == SAVED
    gpus = [
        {"uuid": "GPU-1", "cordoned": "fan, “left”"},
        {"uuid": "GPU-2", "cordoned": "", "waits_for_reset": "Xid 79"},
    ]
    assert path.with_name("health.json.last").read_bytes() == path.read_bytes()
    document = json.loads(path.read_text())
    assert document.items() >= {"version": 1, "boot_id": "boot-1", "gpus": gpus}.items()


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
        b'{"version": 2, "gpus": []}',
        b'{"version": 1, "gpus": {}}',
        b'{"version": 1, "gpus": ["GPU-1"]}',
        b'{"version": 1, "gpus": [{"cordoned": "x"}]}',
        b'{"version": 1, "gpus": [{"uuid": 7}]}',
        b'{"version": 1, "gpus": [{"uuid": "GPU-1", "cordoned": true}]}',
        b'{"version": 1, "boot_id": [], "gpus": []}',
        b'{"version": 1, "gpus": [{"uuid": "GPU-1", "cordoned": "' + b"x" * 2000 + b'"}]}',
        b'{"version": 1, "gpus": [' + b'{"uuid": "GPU-1"},' * 1025 + b'{"uuid": "GPU-1"}]}',
    ],
)
async def test_what_is_not_the_format_is_not_believed(tmp_path: Path, content: bytes) -> None:
    """An error in the log names what is lost; the agent goes on without."""
    (tmp_path / "health.json").write_bytes(content)
    with capture_logs() as logs:
        assert await HealthStateFile(tmp_path / "health.json").load() == NOTHING_SAVED
    assert [line["event"] for line in logs] == ["health_state_corrupt"]
