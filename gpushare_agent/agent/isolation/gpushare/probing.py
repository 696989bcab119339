"""Has libgpushare prove itself on the node (probe.py): once for each version of the driver and each library, in the
background, as soon as a GPU is idle. If it fails, shares are refused with the remedy.

The result is kept next to the library, so that a restart does not probe again what passed. What failed stays
refused after a restart until a probe passes. An attempt is written down before it begins: if the agent ends with it, as
when the program's memory counts to the agent's container, it is not made at every start.

    {"version": 1, "driver": "580.95.05", "library": "<SHA-256>", "state": "passed", "text": "…", "at": 1790000000.0,
     "unfinished": 0, "gpu": "NVIDIA H200", "context_bytes": 545259520}

State owned: the result, the last round of usage, and the file probe.json in the setting libgpushare.directory.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import structlog
from msgspec import Meta, Struct, field
from msgspec.structs import replace

from gpushare_agent.agent.isolation.gpushare.library import Library
from gpushare_agent.agent.isolation.gpushare.probe import FILES_TIMEOUT_S, LibraryProbe, idle_gpu, remove_left
from gpushare_agent.agent.isolation.kept import ProbeResult, ProbeState
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.state_file import StateFile
from gpushare_agent.core.kit.supervision import ReportOnce, wait_for
from gpushare_agent.core.model.allocations import Allocation, ContainerKey
from gpushare_agent.core.model.errors import AgentError, Unavailable
from gpushare_agent.core.model.gpus import Gpu, GpuInventory
from gpushare_agent.core.model.usage import SamplesBusy, UsageRound

log = structlog.get_logger(__name__)

STATE_NAME = "probe.json"
PERIOD_S = 55.0
"""The time between two looks for an idle GPU, and for a replaced library. Less than usage.idle_period_s by default: the
round of usage that a look asks for takes the place of the next one that nobody asks for."""
ROUND_TIMEOUT_S = 15.0
MOST_UNFINISHED = 2
_MOST_CHARS = 1024
_Text = Annotated[str, Meta(max_length=_MOST_CHARS)]


class Remembered(Struct, frozen=True, kw_only=True):
    """The file. `library` is the SHA-256 of the file that was proven; `unfinished` counts attempts that have no
    result. On GPUs with the name `gpu` a context takes `context_bytes`; 0: not known."""

    version: Literal[1] = 1
    driver: _Text
    library: _Text
    state: ProbeState = ProbeState.SKIPPED
    text: _Text = ""
    at: float = 0.0
    unfinished: Annotated[int, Meta(ge=0)] = 0
    gpu: _Text = ""
    context_bytes: Annotated[int, Meta(ge=0, le=1 << 32)] = 0

    @property
    def failure(self) -> str:
        """Why shares are not available, and the remedy; empty unless it failed."""
        if self.state is not ProbeState.FAILED:
            return ""
        return (
            f"isolation gpushare: its library does not limit programs under driver {self.driver}: {self.text}. Update the"
            " agent, whose image has the library, or choose another isolation; `gpushare-agent check` probes again, and"
            " --libgpushare.probe=false gives shares all the same"
        )


class ProbedLibrary(Struct, kw_only=True, eq=False):
    """`run` once. `require_passed` is part of the isolation's check. `failed` is called with each new failure."""

    library: Library
    probe: LibraryProbe
    inventory: Callable[[], GpuInventory]
    allocations: Callable[[], Mapping[ContainerKey, Allocation]]
    failed: Callable[[Remembered], None]
    request_usage: Callable[[], None]
    period_s: float = PERIOD_S
    round_timeout_s: float = ROUND_TIMEOUT_S
    clock: Callable[[], float] = time.time
    _thread: DaemonThread = field(
        default_factory=lambda: DaemonThread(
            "gpushare-probe", advice="Check the disk of the setting libgpushare.directory."
        )
    )
    _round: UsageRound | None = None
    _is_sampled: asyncio.Event = field(default_factory=asyncio.Event)
    _known: Remembered | None = None
    _proven: tuple[str, str] | None = None
    """Driver and library of the result that this agent has found or taken over."""
    _is_recalled: bool = False
    _gpu: Gpu | None = None
    _skipped: ReportOnce = field(default_factory=ReportOnce)

    @property
    def result(self) -> ProbeResult | None:
        known = self._known
        if known is None:
            return None
        return ProbeResult(state=known.state, text=known.text, driver_version=known.driver, at=known.at)

    def is_failed(self) -> bool | None:
        """None before it ran."""
        if self._known is None or self._known.state is ProbeState.SKIPPED:
            return None
        return self._known.state is ProbeState.FAILED

    def context_bytes(self, gpu: Gpu) -> int:
        """What a context takes there; 0: not known. In a MIG instance it takes about as much as on its GPU, and rather less:
        what is observed corrects it."""
        known = self._known
        return known.context_bytes if known is not None and known.gpu == gpu.name.partition(" MIG ")[0] else 0

    async def require_passed(self) -> None:
        """What was not tried yet is not refused. Raises Unavailable with the remedy where the library has failed, here
        or, before a new attempt, under a previous agent."""
        if not self._is_recalled and (driver := self.inventory().driver_version):
            _, saved = await recall(self._thread, self.library, driver)
            self._is_recalled = True
            if saved is not None and self._known is None and saved.state is not ProbeState.SKIPPED:
                self._known = saved
        if self._known is not None and (why := self._known.failure):
            raise Unavailable(why)

    def usage_sampled(self, usage: UsageRound | None) -> None:
        """Takes a round of usage; for UsageSampling.subscribe."""
        if usage is not None:
            self._round = usage
            self._is_sampled.set()

    def changed(self) -> None:
        """An allocation: a container that comes to the GPU that is probed does not wait for it."""
        if self._gpu is not None and self._is_allocated(self._gpu):
            self.probe.give_way()

    async def run(self) -> NoReturn:
        """Until cancelled."""
        while True:
            try:
                await self.look()
            except AgentError as e:  # of the files: the isolation's own check says what is wrong
                self._skip(str(e))
            await asyncio.sleep(self.period_s)

    async def look(self) -> None:
        """Probes where that is due and possible now. Raises AgentError."""
        driver = self.inventory().driver_version
        library, saved = await recall(self._thread, self.library, driver)
        key, file = (driver, library), state_file(self.library.directory)
        # Until the driver is read there is no version to prove it for.
        if not driver or key == self._proven:
            return
        # A failure stays in force while it is tried again: shares must not be given in between.
        if saved is not None and saved.state is not ProbeState.SKIPPED:
            self._known = saved
            if saved.state is ProbeState.PASSED:
                self._proven = key
                return
        unfinished = saved.unfinished if saved is not None else 0
        if unfinished >= MOST_UNFINISHED:
            return self._skip(
                f"{unfinished} agents have ended while it ran: is the memory limit of the agent's container too small for a"
                f" CUDA program? It is not tried again until {self.library.directory / STATE_NAME} is removed"
            )
        gpu = await self._idle_gpu()
        if isinstance(gpu, str):
            return self._skip(gpu)
        before = saved or Remembered(driver=driver, library=library)
        # Before the run: an agent that is ended with it, by its memory limit, must know at its next start.
        await file.save(lambda: replace(before, unfinished=unfinished + 1))
        self._gpu = gpu
        try:
            state, text = await self.probe.prove(gpu)
        finally:
            self._gpu = None
        found = Remembered(
            driver=driver, library=library, state=state, text=text[:_MOST_CHARS], at=self.clock(),
            gpu=gpu.name[:_MOST_CHARS], context_bytes=self.probe.context_bytes,
        )  # fmt: skip
        # It came to its end, so it is no attempt that ended the agent.
        if state is ProbeState.SKIPPED:
            await file.save(lambda: replace(before, unfinished=0))
            return self._skip(text)
        self._known, self._proven = found, key
        await file.save(lambda: found)
        if state is ProbeState.PASSED:
            log.info("isolation_probe_passed", isolation="gpushare", driver=driver, gpu=gpu.uuid, found=text)
        else:
            log.error("isolation_probe_failed", isolation="gpushare", driver=driver, gpu=gpu.uuid, found=text)
            # Once: if `auto` finds nothing else it stays with this one, and would choose again after each attempt.
            if saved is None or not saved.failure:
                self.failed(found)

    async def _idle_gpu(self) -> Gpu | str:
        """An idle GPU by a round of usage from now on: an older one may not show who has come since."""
        self._is_sampled.clear()
        self.request_usage()
        await wait_for(self._is_sampled, self.round_timeout_s)
        usage = self._round if self._is_sampled.is_set() else None
        return idle_gpu(self.inventory().gpus, usage.gpus if usage is not None else {}, self._is_allocated)

    def _is_allocated(self, gpu: Gpu) -> bool:
        return any(gpu.uuid in allocation.gpus for allocation in self.allocations().values())

    def _skip(self, why: str) -> None:
        # A result of this driver and library counts for more than an attempt that did not happen.
        if self._known is None or self._known.state is ProbeState.SKIPPED:
            driver = self.inventory().driver_version
            self._known = Remembered(driver=driver, library="", text=why[:_MOST_CHARS], at=self.clock())
        if self._skipped.is_new(why):
            log.info("isolation_probe_skipped", isolation="gpushare", why=why, tried_again_in_s=self.period_s)


def open_probe(library: Library, place: Path | None, driver: SamplesBusy | None = None) -> LibraryProbe:
    """The probe of a library, a place and a driver, as LibraryProbe has them. What an agent that was killed has left in its
    place is removed first."""

    def content() -> bytes:
        if place is not None:
            remove_left(place)
        return library.content()

    thread = DaemonThread("gpushare-probe", advice="Check the disk of the probe's files.")
    return LibraryProbe(library=content, place=place, environment=os.environ, thread=thread, driver=driver)


async def recall(thread: DaemonThread, library: Library, driver: str) -> tuple[str, Remembered | None]:
    """The library's digest, and what is remembered of it under this version of the driver. Raises Unavailable."""
    digest = await thread.call(
        lambda: hashlib.sha256(library.content()).hexdigest(), "reading libgpushare's library", FILES_TIMEOUT_S
    )
    saved = await state_file(library.directory).load(lambda found: found, lambda: None)
    return digest, saved if saved is not None and (saved.driver, saved.library) == (driver, digest) else None


def state_file(directory: Path) -> StateFile[Remembered]:
    return StateFile(
        directory / STATE_NAME,
        "the probe's result",
        Remembered,
        event="isolation_probe_forgotten",
        lost="the library is probed again",
    )
