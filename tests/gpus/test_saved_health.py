"""Cordons and waits for a reset: their file (how it is kept: tests/kit/test_state_file.py), and when it is written."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.agent.gpus.saved_health import NO_FILE, HealthStateFile, HealthStateWriter
from gpushare_agent.agent.runtime.machine import BOOT_ID
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpu_health import NOTHING_SAVED, SavedHealth
from gpushare_agent.core.model.names import GpuUuid
from tests.cluster.support_kube import running
from tests.gpus.support_health import IMMEDIATE, xid
from tests.support_core import inventory
from tests.support_deadline import Changes

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


GPU, OTHER = GpuUuid("GPU-0"), GpuUuid("GPU-1")
FAST = Backoff(base_s=0.001, cap_s=0.001)


class File:
    """Remembers what was saved; fails while `failure` is set."""

    def __init__(self, kept: SavedHealth = NOTHING_SAVED) -> None:
        self.kept = kept
        self.saves: list[SavedHealth] = []
        self.failure = ""
        self.tries = 0
        self._changed = Changes()

    async def load(self) -> SavedHealth:
        self._fail()
        return self.kept

    async def save(self, kept: SavedHealth) -> None:
        self.tries += 1
        self._changed.set()
        self._fail()
        self.saves.append(kept)

    def _fail(self) -> None:
        if self.failure:
            raise Unavailable(self.failure)

    async def wait(self, tries: int) -> None:
        await self._changed.until(lambda: self.tries >= tries)
        await asyncio.sleep(0)


def _state() -> GpuInventoryState:
    state = GpuInventoryState(IMMEDIATE)
    state.read(inventory())
    return state


def _writer(state: GpuInventoryState, file: File | None) -> HealthStateWriter:
    writer = HealthStateWriter(state, file, backoff=FAST)
    state.subscribe(writer.inventory_changed)
    return writer


async def test_a_wait_for_a_reset_is_written_without_a_request() -> None:
    """An agent that is killed the next moment has saved it."""
    state, file = _state(), File()
    async with running(_writer(state, file).run):
        state.note_events([xid(79)])
        await file.wait(1)
    assert file.saves == [state.saved] and state.saved.waits


async def test_what_changes_nothing_that_is_kept_is_not_written() -> None:
    """A GPU that fails and returns costs no write."""
    state, file = _state(), File()
    writer = _writer(state, file)
    async with running(writer.run):
        state.lost("gone")
        state.read(inventory())
        assert await writer.save_now() == ""
    assert file.tries == 0


async def test_a_write_that_fails_is_reported_once_and_tried_again() -> None:
    """And the caller learns why his cordon may be forgotten."""
    state, file = _state(), File()
    writer = _writer(state, file)
    await writer.restore()
    file.failure = "the disk is full"
    with capture_logs() as logs:
        state.cordon(GPU, "fan")
        assert await writer.save_now() == "the disk is full"
        async with running(writer.run):
            await file.wait(4)
            file.failure = ""
            await file.wait(file.tries + 1)
    assert file.saves == [state.saved]
    assert [line["event"] for line in logs] == ["health_state_not_saved", "health_state_saved_again"]


async def test_a_file_that_cannot_be_read_is_not_written_until_it_was_read() -> None:
    """The agent starts with the GPUs as the driver shows them; what was saved then joins what came since."""
    kept = SavedHealth(cordons={GPU: "fan"}, waits={GPU: "Xid 79"})
    state, file = GpuInventoryState(IMMEDIATE), File(kept)
    writer = _writer(state, file)
    file.failure = "no such disk"
    with capture_logs() as logs:
        await writer.restore()
        state.read(inventory())
        state.cordon(OTHER, "dust")
        assert await writer.save_now() == "no such disk"
        assert [(line["event"], line["log_level"]) for line in logs] == [("health_state_not_read", "warning")]
        async with running(writer.run):
            file.failure = ""
            await file.wait(1)
    assert file.saves == [state.saved] == [replace(kept, cordons={GPU: "fan", OTHER: "dust"})]
    assert not any(gpu.is_healthy for gpu in state.current.gpus)


async def test_what_the_agent_before_saved_last_is_read_later_where_it_cannot_be_read_now() -> None:
    """Also where an earlier state of it was read: else the next change would write over what was saved since."""
    state, file = GpuInventoryState(IMMEDIATE), File()
    writer = _writer(state, file)
    await writer.restore()
    state.read(inventory())
    file.kept, file.failure = SavedHealth(cordons={GPU: "fan"}, waits={}), "the disk is slow"
    await writer.restore(is_newest=True)
    file.failure = ""
    state.cordon(OTHER, "dust")
    assert await writer.save_now() == ""
    assert state.cordoned == {GPU: "fan", OTHER: "dust"} and file.saves == [state.saved]


async def test_what_is_restored_is_not_written_again() -> None:
    """Until it changes."""
    kept = SavedHealth(cordons={GPU: "fan"}, waits={})
    state, file = GpuInventoryState(IMMEDIATE), File(kept)
    writer = _writer(state, file)
    await writer.restore()
    state.read(inventory())
    assert state.cordoned == {GPU: "fan"}
    assert (await writer.save_now(), file.tries) == ("", 0)
    state.uncordon(GPU)
    assert (await writer.save_now(), file.saves) == ("", [NOTHING_SAVED])


async def test_without_a_file_the_asker_is_reported_so() -> None:
    """And nothing else is tried, ever again."""
    state = _state()
    writer = _writer(state, None)
    await writer.restore()
    async with running(writer.run):
        state.cordon(GPU, "fan")
        assert await writer.save_now() == NO_FILE
