"""`gpushare-agent mps`: runs NVIDIA's MPS control daemon on this node, in a process of its own.

So the agent can be restarted and updated without touching a client: this process is its daemon's parent, and ends it only
when it ends itself. Exit codes: 0 ended by a signal, 1 the daemon cannot be run (the reason is the last line).
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import structlog

from gpushare_agent.agent.gpus.nvml.compute_mode import ComputeModes
from gpushare_agent.agent.gpus.part import open_driver
from gpushare_agent.agent.isolation.mps.check import check_mps
from gpushare_agent.agent.isolation.mps.control import COMMAND_TIMEOUT_S
from gpushare_agent.agent.isolation.mps.part import mps_control
from gpushare_agent.agent.isolation.mps.supervision import Condition, MpsDaemonProcess, MpsSupervision, Timeouts
from gpushare_agent.core.cli.command_line import Invocation
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.process import sd_notify
from gpushare_agent.core.model.errors import StartupError, Unavailable
from gpushare_agent.core.model.finding import Level
from gpushare_agent.core.settings.settings import Settings

log = structlog.get_logger(__name__)

START_COMMANDS = 4
"""A start may take as long as so many commands: loading the driver costs seconds on a node that has just booted."""
VOLTA = (7, 0)
"""The compute capability from which on one MPS server can serve several users."""
HOST_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the host's own, which is neither created nor labelled here


async def run(call: Invocation) -> int:
    """Raises StartupError."""
    return await (check(call.settings()) if call.options.check else supervise(call.settings(None)))


async def check(settings: Settings) -> int:
    """Probes the daemon once, whoever runs it, and prints the result; 0 when it serves, else 1."""
    [found] = await check_mps(settings)
    print("; ".join(filter(None, (found.detail, found.cure))))
    return int(found.level is not Level.OK)


async def supervise(settings: Settings) -> int:
    """Runs the daemon until SIGTERM or SIGINT; a second one ends the waiting for clients. Raises StartupError."""
    control, modes, mps = mps_control(settings), ComputeModes(), settings.mps
    if mps.multi_user:
        await _check_multi_user(settings)
    # The host's own /dev/shm is there already, and is not to be labelled.
    control.files.make(shared_memory=mps.shm_directory if mps.shm_directory != HOST_SHARED_MEMORY else None)
    supervision = MpsSupervision(
        MpsDaemonProcess(control, is_multi_user=mps.multi_user),
        control,
        percentage=mps.default_active_thread_percentage,
        timeouts=Timeouts(
            start_s=START_COMMANDS * COMMAND_TIMEOUT_S,
            probe_period_s=mps.probe_period_s,
            drain_s=mps.drain_timeout_s,
            end_s=COMMAND_TIMEOUT_S,
            backoff=Backoff(base_s=0.5, cap_s=30.0),
        ),
        on_condition=_notify_service_manager,
    )
    stops = _Stops()
    try:
        if mps.exclusive_process:
            await _make_exclusive(settings, modes)
        await _until_stopped(supervision, stops)
    finally:
        stops.close()
        await _restore(modes)
    return 0


async def _check_multi_user(settings: Settings) -> None:
    """Raises StartupError where the program would take the option, and clients of other users than root would fail."""
    driver, why = open_driver(settings), "" if os.geteuid() == 0 else "the daemon must be started by root"
    try:
        old = [
            gpu.label for gpu in (await driver.read()).gpus if gpu.compute_capability and gpu.compute_capability < VOLTA
        ]
    except Unavailable as error:
        raise StartupError(
            f"{error} So it is not known whether the GPUs can serve several users by one MPS server"
        ) from error
    finally:
        await driver.close()
    if old:
        why = f"GPU {', '.join(old)} is older than Volta (compute capability 7.0)"
    if why:
        raise StartupError(f"one MPS server cannot serve several users: {why}. Set mps.multi_user to false")


async def _make_exclusive(settings: Settings, modes: ComputeModes) -> None:
    # The compute mode is the driver's; simulated GPUs have none.
    if settings.driver != "nvml":
        log.warning("compute_mode_not_set", reason="the GPUs are simulated")
        return
    log.info("compute_mode_exclusive", changed=await modes.make_exclusive())


async def _restore(modes: ComputeModes) -> None:
    try:
        await modes.restore()
    except Unavailable as error:
        # Not raised: the daemon has ended in order, and this must not hide why it did.
        log.error("compute_mode_not_restored", error=str(error), then="set it by `nvidia-smi -c DEFAULT`")


async def _until_stopped(supervision: MpsSupervision, stops: _Stops) -> None:
    """The supervision, until it fails or a stop comes; then the drain. Whatever happens, no daemon is left behind."""
    try:
        await _supervise_and_drain(supervision, stops)
    # Cancellation too: a daemon that outlives its parent would keep the pipes, and the next one could not start.
    except BaseException:
        await supervision.end_now()
        raise


async def _supervise_and_drain(supervision: MpsSupervision, stops: _Stops) -> None:
    """The drain is cut short by a second stop."""
    failed: list[StartupError] = []
    try:
        async with asyncio.TaskGroup() as group:
            supervised = group.create_task(supervision.run(), name="mps supervision")
            stop = group.create_task(stops.wait(), name="stop")
            await asyncio.wait({supervised, stop}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
            # The supervision starts the daemon again when it ends: it must be gone before the drain.
            supervised.cancel()
    except* StartupError as errors:
        # Raised only after the drain: clients of a daemon that goes wrong still have their work to end.
        failed = [error for error in errors.exceptions if isinstance(error, StartupError)]
    # Before the drain, which may take minutes: systemd would else report a unit that serves.
    sd_notify("STOPPING=1", os.environ)
    async with asyncio.TaskGroup() as group:
        drained = group.create_task(supervision.drain(), name="mps drain")
        again = group.create_task(stops.wait(), name="second stop")
        await asyncio.wait({drained, again}, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            log.warning("mps_drain_cut_short", reason="a second signal")
            drained.cancel()
        again.cancel()
    # Cut short by a second signal: clients that still run lose their daemon, as was asked.
    if drained.cancelled():
        await supervision.end_now()
    if failed:
        raise failed[0]


def _notify_service_manager(condition: Condition) -> None:
    if condition is Condition.SERVING:
        sd_notify("READY=1", os.environ)
    sd_notify(f"STATUS=MPS control daemon: {condition.value}", os.environ)


class _Stops:
    """SIGTERM and SIGINT, one `wait` for each."""

    def __init__(self) -> None:
        # A semaphore counts: two signals in quick succession are two stops, of which an Event would keep one.
        self._came = asyncio.Semaphore(0)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._came.release)

    async def wait(self) -> None:
        await self._came.acquire()

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
