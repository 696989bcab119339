"""The node agent: its order of start, its tasks, its end.

Start: read the GPUs, rebuild the allocation cache from the kubelet's records, serve and register. Only then the slow
libraries are loaded (the Kubernetes client alone costs a third of a second) and the API server, the web endpoints and the
periodic work begin. One TaskGroup holds everything; a task that ends unexpectedly ends the process with its error.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from enum import Enum
from typing import TYPE_CHECKING

import structlog

from gpushare_agent.agent.node_parts import NodeParts, build, check_message_size, open_driver
from gpushare_agent.cluster.kube.configuration import find_configuration
from gpushare_agent.isolation.decisions.device_lists import strategy_warnings
from gpushare_agent.kit.h2_frames import omit_data_texts
from gpushare_agent.kit.open_files import raise_open_files_limit
from gpushare_agent.kit.supervision import forever
from gpushare_agent.kit.systemd import sd_notify
from gpushare_agent.model.errors import AgentError, StartupError, Unavailable
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.settings.settings import Settings, SettingsError

if TYPE_CHECKING:
    from gpushare_agent.cluster.kube.client import KubeApi

log = structlog.get_logger(__name__)

REGISTER_FIRST_S = 1.0
"""How long the slow libraries wait for the first registration: a kubelet that is down must not keep the rest away."""
IDLE_WAIT_S = 2.0
DRIVER_CLOSE_S = 1.0
API_RETRY_S = 2.0


class _Wish(Enum):
    STOP = "stop"
    RELOAD = "reload"


class _WishedEnd(Exception):  # noqa: N818 - not an error
    def __init__(self, wish: _Wish) -> None:
        super().__init__(wish.value)
        self.wish = wish


class _Signals:
    """SIGTERM and SIGINT stop, SIGHUP reloads. The last word wins, but a stop stays a stop."""

    def __init__(self) -> None:
        self._wish: _Wish | None = None
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number, wish in ((signal.SIGTERM, _Wish.STOP), (signal.SIGINT, _Wish.STOP), (signal.SIGHUP, _Wish.RELOAD)):
            loop.add_signal_handler(number, self._note, wish)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)

    async def wait(self) -> _Wish:
        await self._changed.wait()
        self._changed.clear()
        wish, self._wish = self._wish, None
        return wish or _Wish.STOP

    def _note(self, wish: _Wish) -> None:
        if self._wish is not _Wish.STOP:
            self._wish = wish
        self._changed.set()


async def run(settings: Settings, *, reload: Callable[[], Settings]) -> int:
    """Run until a signal ends it; the exit code. `reload` reads the settings again, for SIGHUP.

    Raises AgentError (StartupError and others) for the caller to print in one line, and lets bugs through.
    """
    omit_data_texts()
    soft, hard = raise_open_files_limit()
    log.debug("open_files", most=soft, hard=hard)
    signals = _Signals()
    try:
        earlier: NodeParts | None = None
        while True:
            earlier, next_settings = await _run_once(settings, reload, signals, earlier)
            if next_settings is None:
                return 0
            settings = next_settings
    finally:
        signals.close()


async def _run_once(
    settings: Settings, reload: Callable[[], Settings], signals: _Signals, earlier: NodeParts | None
) -> tuple[NodeParts, Settings | None]:
    """One life between two reloads, and the settings of the next one, None to end. What `earlier` knew and no file keeps is
    taken over."""
    driver = open_driver(settings)
    parts = build(settings, driver, metrics=earlier.metrics if earlier is not None else None)
    if earlier is not None:
        parts.inventory.take_over(earlier.inventory)
        parts.decisions.take_over(earlier.decisions)
        parts.usage_history.take_over(earlier.usage_history)
    chosen: list[Settings] = []

    async def obey() -> None:
        while True:
            if await signals.wait() is _Wish.STOP:
                sd_notify("STOPPING=1", os.environ)
                log.info("stopping")
                raise _WishedEnd(_Wish.STOP)
            try:
                wished = reload()
                build(
                    wished, open_driver(wished)
                )  # files that the settings name are read here: a bad one changes nothing
            except AgentError as e:
                problems = list(e.problems) if isinstance(e, SettingsError) else [str(e)]
                log.error("settings_not_reloaded", problems=problems, then="the old ones stay in force")
                continue
            chosen[:] = [wished]
            await _wait_idle(parts)
            log.info("restarting_with_new_settings")
            raise _WishedEnd(_Wish.RELOAD)

    error: BaseException | None = None
    wishes: list[_Wish] = []
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(forever("obey signals", obey), name="obey signals")
            await live(parts)
    except* _WishedEnd as ended:
        wishes = [e.wish for e in ended.exceptions if isinstance(e, _WishedEnd)]
    except* Exception as failed:  # noqa: BLE001 - the process's edge: the first error is raised below, bugs too
        error = _first(failed)
    if error is not None:
        raise error
    return parts, chosen[0] if _Wish.STOP not in wishes and chosen else None


async def live(parts: NodeParts) -> None:
    """One life of the agent, without signals: until it is cancelled, or a task of it fails (an exception group).

    Raises StartupError where the web address is taken, the GPUs cannot be used, or nothing says where the API server is:
    then the kubelet hears of nothing.
    """
    try:
        async with asyncio.TaskGroup() as group:
            await parts.web.bind()
            await parts.health.writer.restore()  # before the GPUs are read: a cordoned one is never offered
            await _read_gpus(parts)
            find_configuration(parts.settings.kubeconfig, os.environ)
            if parts.isolation.private_caches is not None:
                await parts.isolation.private_caches.install()
            if parts.isolation.mps_watch is not None:  # first, or the kubelet would hear that no share can be had
                await parts.isolation.mps_watch.poll()
                group.create_task(forever("mps watch", parts.isolation.mps_watch.run), name="mps watch")
            if parts.isolation.cdi_watch is not None:  # before a container can name a GPU by it
                await parts.isolation.cdi_watch.check()
                group.create_task(forever("cdi specs", parts.isolation.cdi_watch.run), name="cdi specs")
            _tell_strategies(parts)
            containers = await parts.garbage.recover()
            log.info("allocations_recovered", containers=containers)
            group.create_task(forever("registration", parts.registrar.run), name="registration")
            group.create_task(forever("device tables", parts.tables.run), name="device tables")
            group.create_task(forever("garbage collection", parts.garbage.run), name="garbage collection")
            group.create_task(forever("gpu watch", parts.gpu_watch.run), name="gpu watch")
            group.create_task(forever("health state", parts.health.writer.run), name="health state")
            if parts.isolation.virtual_manager is not None:
                group.create_task(_tell_isolation(parts), name="tell isolation")
                group.create_task(
                    forever("virtual manager", parts.isolation.virtual_manager.run), name="virtual manager"
                )
            if parts.isolation.private_caches is not None:
                group.create_task(forever("private caches", parts.isolation.private_caches.run), name="private caches")
            await _wait_registered(parts)
            group.create_task(forever("kubernetes", lambda: _run_kubernetes(parts)), name="kubernetes")
            group.create_task(forever("usage sampling", parts.usage.run), name="usage sampling")
            group.create_task(forever("web", parts.web.run), name="web")
            if parts.health.control is not None:
                group.create_task(forever("control socket", parts.health.control.run), name="control socket")
            group.create_task(forever("live stream", parts.live_stream.run), name="live stream")
            if parts.display is not None:
                group.create_task(forever("display", parts.display.run), name="display")
            if parts.debug is not None:
                group.create_task(forever("debug", parts.debug.run), name="debug")
            group.create_task(_announce(parts), name="announce readiness")
    finally:
        parts.web.close()
        parts.pod_resources.close()
        parts.runtime.close()
        await _close(parts)


async def _read_gpus(parts: NodeParts) -> None:
    """The first look at the driver. Raises StartupError unless the node may wait for one."""
    try:
        found = await parts.driver.read()
    except StartupError:
        raise
    except AgentError as e:
        if parts.settings.fail_on_init_error:
            raise StartupError(
                f"{e} (To keep the agent running on nodes without a usable driver: --fail-on-init-error=false.)"
            ) from e
        log.error("gpus_unreadable", error=str(e), then="no device is offered; looked at again every 30 s")
        return
    if not found.gpus and found.unreadable and parts.settings.fail_on_init_error:
        index, reason = found.unreadable[0]
        raise StartupError(
            f"none of the {len(found.unreadable)} GPUs can be read (GPU {index}: {reason}). Look at nvidia-smi and the "
            "kernel log on this node; --fail-on-init-error=false keeps the agent waiting for them"
        )
    check_message_size(parts, found)
    parts.inventory.read(found)
    for gpu in parts.inventory.current.gpus:
        log.info(
            "card",
            index=gpu.index,
            minor=gpu.minor,
            uuid=gpu.uuid,
            name=gpu.name,
            memory_mib=gpu.memory_mib,
            numa=gpu.numa_node,
            health=gpu.health.value,
            reason=gpu.unhealthy_reason,
        )
    for index, reason in found.unreadable:
        log.error("gpu_unreadable", index=index, reason=reason)


def _tell_strategies(parts: NodeParts) -> None:
    """What of the device lists contradicts itself or does nothing, once, in the log."""
    settings = parts.settings
    has_nodes = settings.driver == "nvml" or settings.simulated.device_nodes
    mounts_driver = settings.isolation is IsolationName.VCUDA and bool(parts.volumes)
    for text in strategy_warnings(settings.device_list_strategy, mounts_driver=mounts_driver, has_gpu_nodes=has_nodes):
        log.warning("device_list_strategy", detail=text)


async def _tell_isolation(parts: NodeParts) -> None:
    """What keeps shares from being real on this node, once, in the log. Then it is done."""
    settings = parts.settings
    if settings.driver == "nvml":
        missing = [volume.directory for _, volume in sorted(parts.volumes.items()) if not volume.directory.is_dir()]
        if not parts.volumes:
            log.warning("shares_not_enforced", why="volume_config is not set, so no library limits anybody")
        elif missing:
            log.error("driver_directory_missing", directories=list(map(str, missing)), cure="run driver-volume")
    try:
        complaint = await parts.isolation.cgroups.check_driver_in_thread(settings.runtime.cgroup_driver)
    except Unavailable as e:
        complaint = str(e)
    if complaint:
        log.warning("cgroup_driver_differs", detail=complaint)


async def _wait_registered(parts: NodeParts) -> None:
    try:
        async with asyncio.timeout(REGISTER_FIRST_S):
            await parts.registered.wait()
    except TimeoutError:
        log.warning("kubelet_not_there_yet", directory=str(parts.settings.kubelet.device_plugin_path))


async def _run_kubernetes(parts: NodeParts) -> None:
    """Everything that needs the API server. It may be away: then all of this waits."""
    async with AsyncExitStack() as stack:
        api = await _open_api(parts, stack)
        group = await stack.enter_async_context(asyncio.TaskGroup())
        parts.informer.attach(api)
        parts.annotations.attach(api)
        parts.events.attach(api)
        parts.health.events.attach(api)
        group.create_task(forever("pod informer", parts.informer.run), name="pod informer")
        group.create_task(forever("kubelet facts", lambda: parts.facts.run(api)), name="kubelet facts")
        group.create_task(forever("pod annotations", parts.annotations.run), name="pod annotations")
        group.create_task(forever("pod events", parts.events.run), name="pod events")
        group.create_task(forever("node events", parts.health.events.run), name="node events")
        if parts.node_capacity is not None:
            parts.node_capacity.attach(api)
            group.create_task(forever("node capacity", parts.node_capacity.run), name="node capacity")
        if parts.node_facts is not None:
            parts.node_facts.attach(api)
            group.create_task(forever("node facts", parts.node_facts.run), name="node facts")
        if parts.node_allocations is not None:
            parts.node_allocations.attach(api)
            group.create_task(forever("node held", parts.node_allocations.run), name="node held")
        if parts.settings.allocation.cleanup_rejected_pods:
            parts.rejected.attach(api)
            group.create_task(forever("rejected pods", parts.rejected.run), name="rejected pods")


async def _open_api(parts: NodeParts, stack: AsyncExitStack) -> KubeApi:
    """The API server's client. Credentials that are not there yet are waited for; a wrong configuration is not."""
    from gpushare_agent.cluster.kube.client import open_kube_api

    while True:
        try:
            return await stack.enter_async_context(open_kube_api(kubeconfig=parts.settings.kubeconfig))
        except Unavailable as e:
            log.warning("kubernetes_not_ready", error=str(e), retried_in_s=API_RETRY_S)
        await asyncio.sleep(API_RETRY_S)


async def _announce(parts: NodeParts) -> None:
    """Once the pods are listed: compare the ledger with them, and say READY when all is in place. Then it is done."""
    version = parts.store.version
    while not parts.store.is_synced:
        version = await parts.store.wait_change(version)
    parts.garbage.look_now()
    await parts.registered.wait()
    await parts.web.wait_listening()
    sd_notify("READY=1", os.environ)
    log.info("ready", pods=len(parts.store.pods()), containers=len(parts.cache))


async def _wait_idle(parts: NodeParts) -> None:
    """Let an admission that is under way end, so that its Allocate meets the plan that it follows."""
    try:
        async with asyncio.timeout(IDLE_WAIT_S):
            async with parts.gate.quiet():
                return
    except TimeoutError:
        return


async def _close(parts: NodeParts) -> None:
    try:
        async with asyncio.timeout(DRIVER_CLOSE_S):
            await parts.driver.close()
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
