"""The process of the node agent: its order of start, its signals, its end.

Start: read the GPUs, rebuild the allocation cache from the kubelet's records, serve and register. Only then the slow
libraries are loaded (the Kubernetes client alone costs a third of a second) and the API server, the web endpoints and the
periodic work begin. One TaskGroup holds everything; a task that ends unexpectedly ends the process with its error.

SIGHUP reads the settings again, tries them, and starts a new generation of the agent with them between two admissions, in
the same process (a reload). The sockets and registrations of resources that stay are left to it: the kubelet's streams go
on, and its calls wait meanwhile. A generation that does not get as far as to answer the kubelet is followed by one with
the settings before.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from enum import IntEnum
from functools import partial

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.agent.auto_isolation import NodeSettings, resolve_isolation
from gpushare_agent.agent.composition import NodeAgent, build
from gpushare_agent.agent.node_configuration import NodeConfiguration
from gpushare_agent.core.kit.http2_costs import bound_closed_streams, shorten_frame_texts
from gpushare_agent.core.kit.http_answers import load_aiohttp
from gpushare_agent.core.kit.logs import setup_logging
from gpushare_agent.core.kit.process import give_back_memory, raise_open_files_limit, sd_notify
from gpushare_agent.core.kit.supervision import ReportOnce, at_most, forever, in_pool, retried, start_tasks, stop_task
from gpushare_agent.core.kube.configuration import find_configuration
from gpushare_agent.core.model.errors import AgentError, NodeEventReason
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.settings.node_configuration import NamedConfiguration
from gpushare_agent.core.settings.settings import Settings, SettingsError

log = structlog.get_logger(__name__)

DRIVER_CLOSE_S = 1.0
LEAST_GENERATION_S = 5.0
"""The least time from one reload to the next that nobody sent a signal for."""
Reload = Callable[[NamedConfiguration | None], Settings]
FIRST_CHECK_S = 0.5
"""For what the isolations in use need, before the first lists."""
RETRY_S = 1.0
CLAIMS_WAIT_S = 2.0
"""After it pods without claims are served, though the claims' files cannot be read yet."""
SYNC_WAIT_S = 10.0
"""For the pods' list, before an agent asks to take over: an API server that is away must not keep an upgrade away."""


class _End(IntEnum):
    """How this generation ends. Of several that are asked for the greatest is obeyed."""

    RELOAD = 1
    HAND_OVER = 2
    STOP = 3


class _Next(Struct, frozen=True, kw_only=True):
    """The next generation. `is_incoming`: it asks the agent that serves to hand over, instead of waiting until that one
    leaves."""

    settings: NodeSettings
    is_incoming: bool = True
    previous: NodeAgent | None = None
    """The generation before a reload: its sockets, metrics and states go on."""
    fallback: NodeSettings | None = None
    """The settings of the generation that follows if this one does not start."""


class _Signals:
    """SIGTERM and SIGINT stop, SIGHUP reloads, as does what a generation notices itself, and the request of an incoming
    instance hands over."""

    def __init__(self) -> None:
        self._asked: _End | None = None
        self._changed = asyncio.Event()
        self._request: asyncio.TimerHandle | None = None
        self._reloaded_at = float("-inf")
        loop = asyncio.get_running_loop()
        for number, end in ((signal.SIGTERM, _End.STOP), (signal.SIGINT, _End.STOP), (signal.SIGHUP, _End.RELOAD)):
            loop.add_signal_handler(number, self.received, end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))  # one that came since the process began comes now

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._request is not None:
            self._request.cancel()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)

    async def wait(self) -> _End:
        await self._changed.wait()
        if self._asked is _End.STOP:  # for good: a generation that fails while it ends may be followed by another
            return _End.STOP
        self._changed.clear()
        asked, self._asked = self._asked, None
        if asked is _End.RELOAD:
            self._reloaded_at = asyncio.get_running_loop().time()
        assert asked is not None  # noqa: S101 - set with the event
        return asked

    def received(self, end: _End) -> None:
        self._asked = max(end, self._asked or end)
        self._changed.set()

    def request_reload(self, reason: str) -> None:
        """A reload for a reason that the agent notices itself: what changes often must not keep the kubelet's calls
        waiting."""
        if self._request is not None:
            return
        loop = asyncio.get_running_loop()
        at = max(loop.time(), self._reloaded_at + LEAST_GENERATION_S)
        log.info("reload_requested", reason=reason, in_s=round(at - loop.time(), 1))
        self._request = loop.call_at(at, self._due)

    def _due(self) -> None:
        self._request = None
        self.received(_End.RELOAD)


async def run(settings: Settings, *, reload: Reload) -> int:
    """Runs until a signal ends it; the exit code. `reload` reads the settings again, with the configuration of this node.

    Raises AgentError (StartupError and others) for the caller to print in one line, and lets bugs through.
    """
    # Both patch h2 for the process; connections that are made before would keep 107 bytes for each of 65,536 streams.
    shorten_frame_texts()
    bound_closed_streams()
    give_back_memory()
    # Each container may have 64 connections on its socket.
    soft, hard = raise_open_files_limit()
    log.debug("open_files", most=soft, hard=hard)
    signals, configuration = _Signals(), NodeConfiguration(reload)
    try:
        await _run_generations(await _first_generation(settings, configuration), configuration, signals)
        return 0
    finally:
        signals.close()


async def _first_generation(base: Settings, configuration: NodeConfiguration) -> _Next:
    """The first generation: with the node's configuration, and with the settings of all nodes if it does not start."""
    own = await configuration.first(base)
    fallback = await resolve_isolation(base) if own != base else None
    try:
        return _Next(settings=await resolve_isolation(own), fallback=fallback)
    except AgentError as e:
        # Without a configuration of its own there is nothing to fall back to, and the operator's settings are wrong.
        if fallback is None:
            raise
        configuration.refused(e)
        return _Next(settings=fallback)


async def _run_generations(this: _Next, configuration: NodeConfiguration, signals: _Signals) -> None:
    """Runs one generation after another, until none follows."""
    agent: NodeAgent | None = None
    failure = ReportOnce()
    try:
        while True:
            logs = this.settings.settings.log
            setup_logging(logs.level, logs.format)  # here: settings that were read may be refused
            try:
                agent = build(
                    this.settings,
                    previous=this.previous,
                    configuration=configuration,
                    request_reload=signals.request_reload,
                )
                upcoming = await _run_until_signal(agent, this, configuration, signals)
                failure.is_over()
            except AgentError as e:
                has_begun = agent is not this.previous  # else it was not even built, and `agent` is the one before
                # Settings that were tried and served are no longer to blame: what fails after the kubelet was answered
                # ends the process, and Kubernetes restarts it. Before that the settings in force are loaded again, for
                # pods would be rejected meanwhile.
                if this.fallback is None or (has_begun and agent is not None and agent.kubelet.has_recovered):
                    raise
                configuration.refused(e)
                is_again = this.settings is this.fallback
                then = "they are tried again" if is_again else "those before are in force"
                if failure.is_new(f"{e}; {then}"):
                    log.error("settings_not_applied", error=str(e), then=then)
                # Sockets and queue that the failed generation took over, but did not answer on yet, go on to the one that
                # follows it.
                previous = agent if agent is not None and agent.kubelet.registrar.stays_registered else None
                if is_again:
                    await asyncio.sleep(RETRY_S)
                # A reload's are tried until they start again, as they did before: an end would cost the waiting calls.
                fallback = this.fallback if previous is not None else None
                upcoming = replace(this, settings=this.fallback, previous=previous, fallback=fallback)
            if upcoming is None:
                return
            this = upcoming
    finally:
        if agent is not None:
            # The last one alone: at a reload its sockets were the next generation's.
            await agent.kubelet.end()


async def _run_until_signal(
    agent: NodeAgent, this: _Next, configuration: NodeConfiguration, signals: _Signals
) -> _Next | None:
    """Runs one generation; returns the next one, None to end the process."""
    try:
        async with asyncio.TaskGroup() as group:
            generation = partial(run_generation, agent, is_incoming=this.is_incoming)
            running = group.create_task(forever("agent", generation), name="agent")
            upcoming = await _obey(agent, this.settings, configuration, signals)
            await stop_task(running)
            return upcoming
    # Also where the end came together with an error, which is not hidden.
    except* Exception as failed:  # noqa: BLE001 - the process's edge: the first error is raised below, bugs too
        error = _first(failed)
    raise error


async def _obey(
    agent: NodeAgent, current: NodeSettings, configuration: NodeConfiguration, signals: _Signals
) -> _Next | None:
    """Waits for what ends this generation: the next one, None to end the process."""
    agent.kubelet.handover.on_requested = lambda: signals.received(_End.HAND_OVER)
    # Names of resources with the profile in them follow what instances there are; other names cover any instance.
    if current.follows_mig:
        agent.node.inventory.subscribe(lambda found: _follow_mig(found, current, signals))
    while True:
        # Noted at each turn: an Event that is the same is sent at most once in ten minutes.
        if configuration.problem:
            agent.cluster.node_events.note(NodeEventReason.CONFIGURATION_REFUSED, "", configuration.problem)
        end = await signals.wait()
        if end is _End.STOP:
            # Before leave(), which waits for a pause between admissions.
            sd_notify("STOPPING=1", os.environ)
            log.info("stopping", successors=agent.kubelet.handover.waiting)
            await agent.leave()
            return None
        if end is _End.HAND_OVER:
            log.info("handing_over")
            await agent.leave()
            return _Next(settings=current, is_incoming=False)
        try:
            settings = await resolve_isolation(await configuration.read())
            # Tried while the old settings still serve: a mistake in a file must not cost the node an admission.
            # What can be known beforehand: the files that the settings name, and whether the kubelet can receive the lists.
            build(settings).gpus.check_sizes(agent.node.gpus())
        except AgentError as e:
            configuration.refused(e)
            problems = list(e.problems) if isinstance(e, SettingsError) else [str(e)]
            log.error("settings_not_reloaded", problems=problems, then="the old ones stay in force")
            continue
        # The kubelet rejects pods for good while no plugin is registered, so its calls wait in the queue from here on,
        # and streams and sockets stay.
        await agent.kubelet.pause()
        log.info("restarting_with_new_settings")
        # One that stands by goes on to wait: a reload must not make it take the node from the agent that serves.
        is_incoming = not agent.kubelet.stands_by
        return _Next(settings=settings, is_incoming=is_incoming, previous=agent, fallback=current)


def _follow_mig(found: GpuInventory, current: NodeSettings, signals: _Signals) -> None:
    """Reloads for a new profile: its instances have a resource of their own, which the next generation registers."""
    # Profiles that are gone need nothing: their resource stays, with no device, as the kubelet keeps a name that it has
    # seen.
    if new := found.mig_profiles - current.mig_profiles:
        signals.request_reload(f"there are MIG instances of new profiles: {', '.join(sorted(new))}")


async def run_generation(agent: NodeAgent, *, is_incoming: bool = True) -> None:
    """Runs one generation of the agent, without signals: until it is cancelled, or a task of it fails (an exception
    group). Where another agent serves the node this one waits for its turn.

    Raises StartupError where the web address is taken, the GPUs cannot be used, another agent serves the claims, or
    nothing says where the API server is: then nothing is registered with the kubelet.
    """
    kubelet, web = agent.kubelet, agent.observability.web
    try:
        async with asyncio.TaskGroup() as group:
            # First, and without loading the web server: an address that is taken ends the process before the kubelet has
            # a plugin of it.
            await web.bind()
            # An agent without a way to the API server could not tell whose an Allocate is: it would reject every pod.
            find_configuration(agent.node.settings.kubeconfig, os.environ)
            if not is_incoming:
                agent.readiness.is_met.set()  # the generation before served, or handed over
            # A try, no wait: where another agent holds the lock it serves, and this one succeeds it below. One that stood by
            # may have got the lock just before its reload.
            is_first = kubelet.lock.is_held or (is_incoming and kubelet.lock.try_acquire())
            if is_first and agent.dra is not None:
                agent.dra.acquire()
            is_reload = is_first and kubelet.is_reloaded
            if is_reload:
                # At a reload the slow libraries are loaded already, and the kubelet's calls wait in the queue.
                start_tasks(group, {**agent.observability.web_tasks(), **agent.cluster.late_tasks()})
                await agent.gpus.offer(await agent.gpus.read())
            elif is_first:
                await agent.gpus.offer(await agent.gpus.read())
            else:
                await _succeed(agent, group, is_incoming=is_incoming)
            starting = group.create_task(agent.isolation.start(), name="isolations start")
            if is_first and not is_reload:
                # Pods that wait would be placed by lists with shares that cannot be had, and rejected.
                await asyncio.wait({starting}, timeout=FIRST_CHECK_S if agent.isolation.watches else 0)
                kubelet.tables.refresh()
                # Lists and registration as early as can be: a kubelet that starts admits pods a second later, and rejects
                # for good what finds no plugin. The calls wait until the ledger is there.
                start_tasks(group, kubelet.registration())
            await starting
            await kubelet.recover()
            # Registrations that go on have lists of the new settings only now that the ledger says what is used.
            if is_reload:
                start_tasks(group, kubelet.registration())
            await _serve(agent, group)
            group.create_task(agent.readiness.run(), name="share readiness")
            # A third of a second of imports: it must not delay the first registration.
            if is_first and not is_reload:
                await kubelet.wait_registered()
                await _start_late(agent, group)
            # From here on this agent alone writes annotations, labels and Events of the node.
            agent.cluster.may_write.set()
            for tasks in (agent.observability.late_tasks(), agent.gpus.late_tasks()):
                start_tasks(group, tasks)
            group.create_task(_announce(agent), name="announce readiness")
    finally:
        if agent.dra is not None:
            agent.dra.end()
        # A generation that is followed by another leaves sockets and registrations to it.
        if not kubelet.registrar.stays_registered:
            await kubelet.end()
        web.close()
        agent.kubelet.pod_resources.close()
        agent.isolation.host.runtime.close()
        # Last, and bounded: a hung driver must not keep the kubelet's side from its end.
        await _close_driver(agent)


async def _succeed(agent: NodeAgent, group: asyncio.TaskGroup, *, is_incoming: bool) -> None:
    """Prepares all that only reads, waits until the agent that serves hands over or dies, and registers in its place: the
    kubelet's calls wait until the ledger is there. Does not ask for the handover before shares can be given."""
    kubelet = agent.kubelet
    kubelet.stands_by = not is_incoming
    kubelet.handover.is_serving = False  # of a reload the sockets stay: this agent must not ask itself
    log.info("another_agent_serves", then="this one asks it to hand over" if is_incoming else "this one waits")
    await _start_late(agent, group)
    # A version or settings that could give no share leave the kubelet to the agent that serves. If that one ends, this
    # one serves all the same: whole GPUs can be had.
    while not await agent.readiness.look() and not await kubelet.outlives_other(within_s=agent.readiness.period_s):
        pass
    # Two DRA plugins may be registered at once, and the kubelet calls the newest: claims need no gap.
    if agent.dra is not None and is_incoming:
        start_tasks(group, agent.dra.tasks())
    # The ledger is rebuilt from the kubelet's records; pods only help it, so an API server that is away is not waited
    # for.
    await at_most(SYNC_WAIT_S, agent.node.pods.wait_synced())
    found = await agent.gpus.read()
    while not await kubelet.follow(is_incoming=is_incoming):
        # The wait may have taken hours: GPUs may have been reset or repartitioned meanwhile.
        found = await agent.gpus.read()
    # From here on: others that waited for the agent that leaves would take the lock next, if nobody kept them waiting.
    kubelet.handover.is_serving = True
    await agent.gpus.offer(found)
    start_tasks(group, kubelet.registration())
    # Registered before the lock is free: the kubelet's calls wait in this agent's queue until the other one has ended
    # what it does on the node.
    await kubelet.take_over()
    # Again: until its end the other one took cordons from people, and events from the driver.
    await agent.gpus.writer.restore(is_newest=True)
    kubelet.stands_by = False


async def _start_late(agent: NodeAgent, group: asyncio.TaskGroup) -> None:
    """The web server and the API server's client, with the slow libraries."""
    await in_pool(load_aiohttp, "web_not_loaded")
    start_tasks(group, {**agent.observability.web_tasks(), **agent.cluster.late_tasks()})


async def _serve(agent: NodeAgent, group: asyncio.TaskGroup) -> None:
    """What only one agent of the node does, with the kubelet and apart from it."""
    agent.kubelet.handover.is_serving = True
    for tasks in (agent.kubelet.tasks(), agent.gpus.tasks()):
        start_tasks(group, tasks)
    containers = group.create_task(_serve_containers(agent, group), name="serve containers")
    await asyncio.wait({containers}, timeout=CLAIMS_WAIT_S)


async def _serve_containers(agent: NodeAgent, group: asyncio.TaskGroup) -> None:
    """What would remove files and instances of claims that are not known yet, when they are."""
    if agent.dra is not None:
        # After the ledger: a claim's GPU must be known as used before the slice offers it.
        await retried(agent.dra.start, RETRY_S, "claims_not_restored")
        start_tasks(group, {**agent.dra.tasks(), **agent.dra.serving_tasks()})
    start_tasks(group, agent.isolation.tasks())
    group.create_task(agent.isolation.log_contradictions(), name="log contradictions")


async def _announce(agent: NodeAgent) -> None:
    """Compares the ledger with the pods once they are listed, and says when all is in place. Then it is done."""
    await agent.node.pods.wait_synced()
    # Only now: before the list a pod that is not there might just not have been seen yet.
    agent.kubelet.garbage.request_reconcile()
    await agent.kubelet.registrar.all_registered.wait()
    # Before READY=1: probes and metrics are answered then.
    await agent.observability.web.wait_listening()
    sd_notify("READY=1", os.environ)  # whole GPUs can be had, and systemd would end an agent that goes on to wait
    await agent.readiness.is_met.wait()
    log.info("ready", pods=len(agent.node.pods.pods()), containers=len(agent.node.cache))


async def _close_driver(agent: NodeAgent) -> None:
    if not await at_most(DRIVER_CLOSE_S, agent.gpus.driver.close()):
        log.warning("driver_not_closed", then="left to the end of the process")


def _first(group: ExceptionGroup[Exception]) -> Exception:
    """The error to show: the first that a person can act on, else the first at all."""
    found: Exception = group.subgroup(AgentError) or group
    while isinstance(found, ExceptionGroup):
        found = found.exceptions[0]
    return found
