"""The kubelet's side: device-plugin servers and registration, admission with its ledger, and its preparations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress

import structlog
from msgspec.structs import replace

from gpushare_agent.agent.admission.admission import Admission, RefusedPods
from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.agent.admission.decisions.former_devices import held_back
from gpushare_agent.agent.admission.decisions.ledger import Policy
from gpushare_agent.agent.admission.decisions.resize import ResizePolicy
from gpushare_agent.agent.admission.device_tables import DeviceTables
from gpushare_agent.agent.admission.garbage_collection import GarbageCollection
from gpushare_agent.agent.admission.identification import Identification
from gpushare_agent.agent.admission.outcomes import OutcomeReporter
from gpushare_agent.agent.admission.resizing import ResizeFile, ResizeReports, ShareResizing
from gpushare_agent.agent.cluster.part import ClusterPart
from gpushare_agent.agent.delivery.device_lists import NodeDevices
from gpushare_agent.agent.delivery.device_nodes import ControlNodes, read_extra_devices
from gpushare_agent.agent.delivery.volume_plan import DriverVolume, VolumeName
from gpushare_agent.agent.isolation import IsolationConfig
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.kubelet.device_plugin import CALL_TIMEOUT_S, DevicePlugin
from gpushare_agent.agent.kubelet.handover import (
    LOCK_POLL_S,
    TAKE,
    WAIT,
    Handover,
    QueuedCalls,
    ServingLock,
    StaleSockets,
    ask_for_handover,
    instance_socket_name,
)
from gpushare_agent.agent.kubelet.pod_resources import PodResourcesClient, PodResourcesGate
from gpushare_agent.agent.kubelet.records import KubeletCheckpoint, gpu_managers_checkpoint
from gpushare_agent.agent.kubelet.registration import PluginEndpoint, Registrar
from gpushare_agent.agent.node import Node
from gpushare_agent.core.kit.supervision import Tasks, at_most, bounded, wait_for
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import Unavailable
from gpushare_agent.core.model.gpus import KernelModule
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.settings.settings import Settings

log = structlog.get_logger(__name__)

REGISTER_FIRST_S = 1.0
"""How long the slow libraries wait for the first registration: a kubelet that is down must not keep the rest away."""
PAUSE_WAIT_S = 10.0
"""How long a reload waits for a moment between two admissions. Only PreStartContainer waits meanwhile; it has 20 s."""
HANDOVER_WAIT_S = 90.0
"""How long an agent waits for a moment between two admissions before it hands over: a burst of 100 pods takes the kubelet
30 s, 46 s on a busy machine. terminationGracePeriodSeconds of manifests/base is a little longer."""
QUIET_POLL_S = 0.02
ASK_S = 100.0
"""How long requests for the handover may take; then the GPUs are read again and they are repeated."""
TAKE_OVER_S = 15.0
"""The agent that has handed over ends within seconds; a call of the kubelet may wait for five."""


class AdmissionPart:
    def __init__(
        self, node: Node, cluster: ClusterPart, isolation: Isolations, previous: AdmissionPart | None = None
    ) -> None:
        """Joined, not started. The sockets of new resources have the handover and the queue of the `previous`
        generation."""
        kubelet, ids = node.settings.kubelet, DeviceIds(resources=node.names.names)
        if kubelet.pod_resources_socket is None:
            log.warning(
                "pods_identified_by_api_server_alone",
                because="kubelet.pod_resources_socket is empty",
                then="where two pods that wait ask for the same, they are refused",
            )
        checkpoint = KubeletCheckpoint(kubelet.device_plugin_path, ids, gpu_managers_checkpoint(node.settings))
        self.node = node
        self.facts = cluster.kubelet_facts
        self.refused_pods = RefusedPods()
        self.pod_resources = PodResourcesClient(kubelet.pod_resources_socket, ids)
        self.gate = PodResourcesGate(self.pod_resources, on_list=node.metrics.pod_resources_listed)
        self.garbage = GarbageCollection(
            node=node,
            static_pods=cluster.node_pods,
            gate=self.gate,
            pod_resources=self.pod_resources,
            checkpoint=checkpoint,
            cgroups=isolation.host.cgroups,
            kubelet_age_s=self.facts.age_s,
            has_pod_resources=self.facts.has_pod_resources,
        )
        identification = Identification(
            node=node,
            fetcher=cluster.node_pods,
            kubelet=self.facts,
            runtime_classes=cluster.runtime_classes,
            refused=self.refused_pods,
            # Less than the call's own bound, which would end it before the reason is kept for the Allocate.
            lookup_s=min(kubelet.pod_lookup_timeout_s, CALL_TIMEOUT_S - 1),
        )
        self.admission = Admission(
            node=node,
            gate=self.gate,
            identification=identification,
            policy=Policy(
                names=node.names,
                share_policy=node.settings.placement.share_policy,
                share_mode=node.settings.share_mode,
                max_shares_of_gpu=isolation.max_shares_of_gpu(),
                node_name=node.settings.node_name,
            ),
            edits=edit_policy(
                node.settings, node.names, isolation.host.volumes, handlers=cluster.runtime_classes.handlers
            ),
            refused_pods=self.refused_pods,
            observer=OutcomeReporter(node=node, events=cluster.pod_events),
            records=checkpoint,
            isolation=isolation,
            garbage=self.garbage,
        )
        state = node.settings.state_directory
        self.resizing = ShareResizing(
            node=node,
            policy=ResizePolicy(names=node.names, mode=node.settings.resize.mode),
            file=ResizeFile(state / "resize.json") if state is not None else None,
            enforcement=isolation,
            reports=ResizeReports(node=node, annotations=cluster.annotations, events=cluster.pod_events),
        )
        self.tables = DeviceTables(node=node, isolation=isolation, ids=ids)
        self.handover: Handover = previous.handover if previous is not None else Handover()
        self.calls: QueuedCalls = previous.calls if previous is not None else QueuedCalls()
        self.registrar = _build_registrar(node, self.calls, self.handover, self.tables, ids)
        self.lock = ServingLock(kubelet.device_plugin_path)
        self.stands_by = False
        """Another agent serves, and this one waits until it leaves: nothing is wrong with it."""
        self.has_recovered = False
        """This generation answers the kubelet, or did."""
        self.is_reloaded = False
        """It goes on with what the generation before the reload serves to the kubelet."""

    def go_on_from(self, previous: AdmissionPart) -> None:
        """Go on with what the generation before the reload left: its lock, its sockets, and the kubelet's calls that
        wait."""
        self.facts.take_over(previous.facts)
        self.refused_pods.update(previous.refused_pods)
        if not previous.registrar.stays_registered:
            return
        self.registrar.take_over(previous.registrar)
        # Until this generation answers. If its settings fail before that, the next one needs the sockets.
        self.registrar.stays_registered = True
        if self.node.settings.kubelet.device_plugin_path == previous.node.settings.kubelet.device_plugin_path:
            self.lock = previous.lock
        else:
            previous.lock.release()
        self.is_reloaded = True

    async def recover(self) -> None:
        """The ledger, from the kubelet's records. From then on this generation answers the kubelet."""
        resized = await self.resizing.load()
        containers = await self.garbage.recover(None if self.is_reloaded else self.registrar.all_registered)
        self.node.inventory.hold(held_back(self.node.cache))
        self.resizing.restore(resized)
        self.tables.refresh()
        self.registrar.renew()
        self.calls.open(self.admission)
        self.registrar.stays_registered, self.has_recovered = False, True
        log.info("allocations_recovered", containers=containers)

    async def end(self) -> None:
        """Ends the service to the kubelet. Does nothing if another generation has taken over the sockets."""
        await self.registrar.close()
        self.lock.release()

    async def follow(self, *, is_incoming: bool) -> bool:
        """One attempt to become the agent that serves: asks the one that does, if it is alive. True: register now, then
        `take_over`. This agent may have the lock already."""
        with suppress(Unavailable):
            await self.registrar.serve()
        directory = self.node.settings.kubelet.device_plugin_path
        with suppress(TimeoutError):
            async with asyncio.timeout(ASK_S):
                # Twice: where the agent that served handed over to another one, that one serves now.
                for _ in range(2):
                    if await ask_for_handover(directory, TAKE if is_incoming else WAIT):
                        return True
        if self.lock.try_acquire():
            return True
        await asyncio.sleep(LOCK_POLL_S)
        return False

    async def outlives_other(self, *, within_s: float) -> bool:
        """True if the agent that serves ends within the time without having been asked."""
        return await at_most(within_s, self.lock.acquire())

    async def take_over(self) -> None:
        """Waits until the agent that handed over has ended all that it did on the node. Raises Unavailable."""
        late = f"the agent that handed over to this one did not end within {TAKE_OVER_S:g} s; this one starts over"
        async with bounded(TAKE_OVER_S, late):
            await self.lock.acquire()

    async def leave(self) -> None:
        """If another agent waits, ends the service to the kubelet in a moment between two admissions, and answers that
        agent, which then registers."""
        self.registrar.stays_registered = False
        if not self.handover.waiting:
            return
        await at_most(HANDOVER_WAIT_S, self._wait_quiet())
        await self.registrar.leave(lambda: self.handover.waiting)
        await self.handover.answer()

    async def _wait_quiet(self) -> None:
        """Waits until no call is open, none was just now, and no pod of the node waits for its admission: a slow API server
        or node makes pauses in a burst that are no end of it."""
        while True:
            await self.calls.wait_idle()
            await self.gate.wait_quiet()
            if not any(self._awaits_admission(pod) for pod in self.node.pods.pods()):
                return
            await asyncio.sleep(QUIET_POLL_S)

    def _awaits_admission(self, pod: Pod) -> bool:
        is_over = pod.is_terminal or pod.is_deleting or pod.has_started or pod.uid in self.refused_pods
        return not is_over and self.node.names.wants_any(pod) and not self.node.cache.of_pod(pod.uid)

    def registration(self) -> Tasks:
        return {"registration": self.registrar.run}

    def tasks(self) -> Tasks:
        return {
            "device tables": self.tables.run,
            "garbage collection": self.garbage.run,
            "live resize": self.resizing.run,
            "stale sockets": StaleSockets(self.node.settings.kubelet.device_plugin_path).run,
        }

    async def wait_registered(self) -> None:
        """Waits until every resource was registered once, REGISTER_FIRST_S at most."""
        if not await wait_for(self.registrar.all_registered, REGISTER_FIRST_S):
            log.warning("kubelet_not_there_yet", directory=str(self.node.settings.kubelet.device_plugin_path))

    async def pause(self) -> None:
        """From a moment between two admissions on, lets the kubelet's calls wait for the next generation, and leaves it
        everything that this one serves to the kubelet. What it answered is then in the kubelet's records."""
        try:
            async with asyncio.timeout(PAUSE_WAIT_S):
                await self.calls.close_between(self.admission.is_between_admissions)
                await self.gate.wait_quiet()
        except TimeoutError:
            log.warning("admissions_not_paused", waited_s=PAUSE_WAIT_S, then="the settings change during an admission")
        self.calls.close()
        # One that waits for the lock begins again: another agent may have registered after it.
        self.registrar.stays_registered = self.lock.is_held or self.has_recovered

    def not_ready(self) -> list[str]:
        if self.stands_by:
            return []
        return [
            f"{resource} is not registered with the kubelet"
            for resource in self.node.names.names
            if not self.registrar.is_registered(resource)
        ] + sorted(set(self.node.inventory.held.values()))


def _build_registrar(
    node: Node, calls: QueuedCalls, handover: Handover, tables: DeviceTables, ids: DeviceIds
) -> Registrar:
    directory = node.settings.kubelet.device_plugin_path
    return Registrar(
        device_plugin_path=directory,
        endpoints=[
            PluginEndpoint(
                device_plugin_path=directory,
                socket_name=instance_socket_name(node.names.socket(resource)),
                plugin=DevicePlugin(
                    resource,
                    table,
                    calls,
                    node.metrics.rpc_finished,
                    ids,
                    has_pre_start=node.names.by_name[resource].binds_gpu,
                ),
                handover=handover,
            )
            for resource, table in tables.tables.items()
        ],
    )


def edit_policy(
    settings: Settings,
    names: ResourceNames,
    volumes: Mapping[VolumeName, DriverVolume],
    module: KernelModule | None = None,
    *,
    handlers: Mapping[str, str],
) -> Callable[[], EditPolicy]:
    """The driver directory is mounted where volume.conf says it is."""
    shared, whole = volumes.get(VolumeName.SHARED), volumes.get(VolumeName.ORIGIN)
    is_real = settings.driver == "nvml"
    policy = EditPolicy(
        names=names,
        config=IsolationConfig(
            settings=settings,
            shared_driver=shared.directory if shared is not None else None,
            whole_driver=whole.directory if whole is not None else None,
        ),
        isolation=settings.isolation,
        allowed=settings.isolations_allowed,
        strategies=settings.device_list_strategy,
        devices=NodeDevices(
            extra=read_extra_devices(settings.extra_config),
            has_gpu_nodes=is_real or settings.simulated.device_nodes,
        ),
        cdi_kind=settings.cdi.kind,
        is_named_by_index=settings.nvidia.device_ids == "index",
        kernel_module=module,
        handlers=handlers,
    )
    nodes = ControlNodes()
    if not is_real:
        return lambda: policy
    return lambda: replace(policy, devices=replace(policy.devices, control=nodes.present()))
