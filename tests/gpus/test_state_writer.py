"""Cordons and waits for a reset are written as soon as they change, and read before the GPUs are."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from gpushare_agent.agent.gpus.inventory import GpuInventoryState
from gpushare_agent.agent.gpus.saved_health import NO_FILE, HealthStateWriter
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpu_health import NOTHING_SAVED, SavedHealth
from gpushare_agent.core.model.names import GpuUuid
from tests.cluster.support_kube import running
from tests.gpus.support_health import IMMEDIATE, xid
from tests.support_core import inventory
from tests.support_deadline import Changes

GPU = GpuUuid("GPU-0")
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


async def test_a_file_that_cannot_be_read_is_a_warning() -> None:
    """The agent starts; the GPUs are as the driver shows them."""
    state, file = GpuInventoryState(IMMEDIATE), File()
    file.failure = "no such disk"
    with capture_logs() as logs:
        await _writer(state, file).restore()
    assert [(line["event"], line["log_level"]) for line in logs] == [("health_state_not_read", "warning")]
    assert state.saved == NOTHING_SAVED


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
