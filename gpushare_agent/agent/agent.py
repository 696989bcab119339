"""The life of the node agent: its order of start, its signals, its end.

Start: read the GPUs, rebuild the allocation cache from the kubelet's records, serve and register. Only then the slow
libraries are loaded (the Kubernetes client alone costs a third of a second) and the API server, the web endpoints and the
periodic work begin. One TaskGroup holds everything; a task that ends unexpectedly ends the process with its error.

SIGHUP reads the settings again, tries them, and starts a new life with them between two admissions.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from enum import Enum

import structlog

from gpushare_agent.agent.auto_isolation import NodeSettings, resolve_isolation
from gpushare_agent.agent.composition import NodeAgent, build
from gpushare_agent.agent.gpu_side import open_driver
from gpushare_agent.cluster.kube.configuration import find_configuration
from gpushare_agent.kit.h2_frames import omit_data_texts
from gpushare_agent.kit.process import raise_open_files_limit, sd_notify
from gpushare_agent.kit.supervision import forever, start_tasks
from gpushare_agent.model.errors import AgentError
from gpushare_agent.settings.settings import Settings, SettingsError

log = structlog.get_logger(__name__)

DRIVER_CLOSE_S = 1.0


class _End(Enum):
    STOP = "stop"
    RELOAD = "reload"


class _Ended(Exception):  # noqa: N818 - not an error
    """A signal ends this life; `settings` are those of the next one, None to end the process."""

    def __init__(self, settings: NodeSettings | None) -> None:
        super().__init__("reload" if settings is not None else "stop")
        self.settings = settings


class _Signals:
    """SIGTERM and SIGINT stop, SIGHUP reloads. The last signal counts, but a stop stays a stop."""

    def __init__(self) -> None:
        self._asked: _End | None = None
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number, end in ((signal.SIGTERM, _End.STOP), (signal.SIGINT, _End.STOP), (signal.SIGHUP, _End.RELOAD)):
            loop.add_signal_handler(number, self._received, end)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)

    async def wait(self) -> _End:
        await self._changed.wait()
        self._changed.clear()
        asked, self._asked = self._asked, None
        return asked or _End.STOP

    def _received(self, end: _End) -> None:
        if self._asked is not _End.STOP:
            self._asked = end
        self._changed.set()


async def run(settings: Settings, *, reload: Callable[[], Settings]) -> int:
    """Runs until a signal ends it; the exit code. `reload` reads the settings again, for SIGHUP.

    Raises AgentError (StartupError and others) for the caller to print in one line, and lets bugs through.
    """
    omit_data_texts()
    soft, hard = raise_open_files_limit()
    log.debug("open_files", most=soft, hard=hard)
    signals = _Signals()
    agent: NodeAgent | None = None
    try:
        upcoming: NodeSettings | None = await resolve_isolation(settings)
        while upcoming is not None:
            earlier, agent = agent, _build(upcoming, agent)
            if earlier is not None:
                agent.take_over(earlier)
            upcoming = await _run_until_signal(agent, reload, signals)
        return 0
    finally:
        signals.close()


def _build(node: NodeSettings, earlier: NodeAgent | None = None) -> NodeAgent:
    """`earlier` is the life before a reload, whose metrics count on. Raises StartupError."""
    return build(
        node.settings,
        open_driver(node.settings),
        metrics=earlier.state.metrics if earlier is not None else None,
        isolation_reason=node.isolation_reason,
    )


async def _run_until_signal(agent: NodeAgent, reload: Callable[[], Settings], signals: _Signals) -> NodeSettings | None:
    """One life; the settings of the next one, None to end the process."""
    error: BaseException | None = None
    ends: list[_Ended] = []
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("signals", lambda: _obey(agent, reload, signals)), name="signals")
            await live(agent)
    except* _Ended as group_of_ends:
        ends = [e for e in group_of_ends.exceptions if isinstance(e, _Ended)]
    except* Exception as failed:  # noqa: BLE001 - the process's edge: the first error is raised below, bugs too
        error = _first(failed)
    if error is not None:
        raise error
    return ends[0].settings if ends else None


async def _obey(agent: NodeAgent, reload: Callable[[], Settings], signals: _Signals) -> None:
    while True:
        if await signals.wait() is _End.STOP:
            sd_notify("STOPPING=1", os.environ)
            log.info("stopping")
            raise _Ended(None)
        try:
            settings = await resolve_isolation(reload())
            # Files that the settings name are read here: a bad one changes nothing.
            _build(settings)
        except AgentError as e:
            problems = list(e.problems) if isinstance(e, SettingsError) else [str(e)]
            log.error("settings_not_reloaded", problems=problems, then="the old ones stay in force")
            continue
        await agent.kubelet.wait_idle()
        log.info("restarting_with_new_settings")
        raise _Ended(settings)


async def live(agent: NodeAgent) -> None:
    """One life of the agent, without signals: until it is cancelled, or a task of it fails (an exception group).

    Raises StartupError where the web address is taken, the GPUs cannot be used, or nothing says where the API server is:
    then the kubelet hears of nothing.
    """
    web = agent.observability.web
    try:
        async with asyncio.TaskGroup() as group:
            await web.bind()
            await agent.gpus.read()
            find_configuration(agent.state.settings.kubeconfig, os.environ)
            await agent.isolation.start()
            await agent.kubelet.recover()
            for tasks in (agent.kubelet.tasks(), agent.gpus.tasks(), agent.isolation.tasks()):
                start_tasks(group, tasks)
            group.create_task(agent.isolation.log_cgroup_driver(), name="log cgroup driver")
            await agent.kubelet.wait_registered()
            for tasks in (agent.cluster.late_tasks(), agent.observability.late_tasks(), agent.gpus.late_tasks()):
                start_tasks(group, tasks)
            group.create_task(_announce(agent), name="announce readiness")
    finally:
        web.close()
        agent.kubelet.pod_resources.close()
        agent.isolation.runtime.close()
        await _close_driver(agent)


async def _announce(agent: NodeAgent) -> None:
    """Once the pods are listed: compare the ledger with them, and say READY when all is in place. Then it is done."""
    await agent.cluster.wait_synced()
    agent.kubelet.garbage.request_reconcile()
    await agent.kubelet.first_registration.done.wait()
    await agent.observability.web.wait_listening()
    sd_notify("READY=1", os.environ)
    log.info("ready", pods=len(agent.state.store.pods()), containers=len(agent.state.cache))


async def _close_driver(agent: NodeAgent) -> None:
    try:
        async with asyncio.timeout(DRIVER_CLOSE_S):
            await agent.gpus.driver.close()
    except TimeoutError:
        log.warning("driver_not_closed", then="left to the end of the process")


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: the first that a person can act on, else the first at all."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        one = pending.pop(0)
        if isinstance(one, BaseExceptionGroup):
            pending = [*one.exceptions, *pending]
        else:
            flat.append(one)
    return next((e for e in flat if isinstance(e, AgentError)), flat[0])
