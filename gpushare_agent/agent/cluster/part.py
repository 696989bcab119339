"""The API server, for the agent of one node: its pods, and everything that is written to them and to the node's object."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from msgspec.structs import replace

from gpushare_agent.agent.cluster.feature_labels import feature_labels
from gpushare_agent.agent.cluster.node_facts import NodeFacts, gpus_annotation, node_facts
from gpushare_agent.agent.cluster.node_fields import ALLOCATIONS, CAPACITY, FACTS, TAINT, NodeFields, NodeFieldsWriter
from gpushare_agent.agent.cluster.pod_annotations import PodAnnotations, pod_annotations
from gpushare_agent.agent.cluster.pod_store import NodePods
from gpushare_agent.agent.cluster.rejected_pods import RejectedPods
from gpushare_agent.agent.cluster.runtime_classes import RuntimeClasses
from gpushare_agent.agent.kubelet.pod_resources import KubeletFacts
from gpushare_agent.agent.kubelet.registration import KUBELET_SOCKET
from gpushare_agent.agent.kubelet.static_pods import StaticPods
from gpushare_agent.agent.node import Node
from gpushare_agent.agent.runtime.machine import machine_name, pci_class, pci_configuration
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kit.supervision import Tasks, in_pool, retried, start_tasks
from gpushare_agent.core.kube.client import open_kube_api, pods_of_node
from gpushare_agent.core.kube.configuration import load_library
from gpushare_agent.core.kube.events import NodeEvents, PodEvents
from gpushare_agent.core.kube.informer import Informer
from gpushare_agent.core.kube.pods import mistyped_annotations
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.node_report.annotations import AllocatedTo, allocations_annotation, allocations_by_pod
from gpushare_agent.core.placement.free_gpus import FreeGpus, free_gpus
from gpushare_agent.core.settings.settings import Settings

if TYPE_CHECKING:
    from gpushare_agent.core.kube.client import KubeApi

API_RETRY_S = 2.0
PODS_BACKOFF = Backoff(base_s=0.5, cap_s=5.0)
"""After an outage everything else waits for the list of pods; a kubelet that cannot renew its lease tries every 7 s."""


class ClusterPart:
    def __init__(self, node: Node) -> None:
        """Joined, not started."""
        settings, names, node_name = node.settings, node.names, node.settings.node_name
        kubelet, static_pods = settings.kubelet, None
        # Only there: reading the kubelet's own API needs a right that not every installation gives.
        if kubelet.api_address:
            static_pods = StaticPods(
                address=kubelet.api_address, port=kubelet.api_port, ca_file=kubelet.api_ca, node_name=node_name
            )
        self.node = node
        self.node_pods = NodePods(store=node.pods, node_name=node_name, resources=names.names, kubelet=static_pods)
        self.informer = Informer(
            kind="pods",
            watched=pods_of_node(node_name),
            handler=self.node_pods,
            metrics=node.metrics,
            backoff=PODS_BACKOFF,
        )
        self.runtime_classes = RuntimeClasses()
        self.annotations = PodAnnotations(
            pods=node.pods,
            # Read when a pod is compared, not now: allocations and GPUs change.
            desired=lambda pod: pod_annotations(pod, node.cache.view(), node.gpus(), names),
            metrics=node.metrics,
        )
        self.pod_events = PodEvents(node_name, count=node.metrics.pod_event)
        self.node_events = NodeEvents(node_name)
        self._allocations = AllocationsReport(node)
        self.node_fields = {
            fields.name: NodeFieldsWriter(fields=fields, node_name=node_name, desired=partial(desired, node))
            for fields, desired in _written_fields(settings, self._allocations)
        }
        """Those that the settings have the agent write, by name."""
        self.kubelet_facts = KubeletFacts(
            node_name=node_name,
            kubelet_socket=kubelet.device_plugin_path / KUBELET_SOCKET,
            has_pod_resources=kubelet.pod_resources_socket is not None,
        )
        self.may_write = asyncio.Event()
        """Set once this agent serves: one that waits for another to leave reads only."""
        self.further: dict[str, Callable[[KubeApi], Awaitable[object]]] = {}
        """What else writes to the API server; more is put here by the composition."""
        if settings.allocation.cleanup_rejected_pods:
            rejected = RejectedPods(pods=node.pods, resources=names.names, metrics=node.metrics)
            self.further["rejected pods"] = rejected.run

    def late_tasks(self) -> Tasks:
        """Late: the Kubernetes client alone costs a third of a second to load."""
        return {"kubernetes": self._run}

    def gpus_changed(self) -> None:
        """What the node's object says of the GPUs may be another than before."""
        self._allocations.changed(None)
        self._changed(FACTS, TAINT)

    def allocations_changed(self, uid: PodUid | None, *, is_pod: bool = False) -> None:
        """What the node's object says of those of a pod, or of all, may be another than before. `is_pod`: the pod changed,
        and no allocation of it."""
        self._allocations.changed(uid)
        # The taint follows from what is allocated, whosever it is.
        self._changed(ALLOCATIONS, *(() if is_pod else (TAINT,)))

    def _changed(self, *fields: NodeFields[Any]) -> None:
        for one in fields:
            if (writer := self.node_fields.get(one.name)) is not None:
                writer.changed()

    def pod_changed(self, old: Pod | None, new: Pod | None) -> None:
        """The pod's annotations follow from its allocations; those that its owner mistyped are reported to him."""
        self.annotations.pod_changed(old, new)
        # The instance that serves reports it: what one that waits had queued would be sent hours later.
        if not self.may_write.is_set() or new is None or new.is_terminal:
            return
        if old is not None and old.annotations == new.annotations:
            return
        if (self.node.names.wants_any(new) or new.claims) and (text := mistyped_annotations(new.annotations)):
            self.pod_events.mistyped(new, text)

    def not_ready(self) -> list[str]:
        """Why this part is not ready, nothing when it is."""
        why = f": {lost.why}" if (lost := self.informer.lost) is not None else ""
        return [] if self.node.pods.is_synced else [f"the API server has not listed this node's pods yet{why}"]

    async def _run(self) -> NoReturn:
        """All that needs the API server. While it is away, all of this waits."""
        async with AsyncExitStack() as stack:
            await in_pool(load_library, "kubernetes_not_ready")

            async def opened() -> KubeApi:
                return await stack.enter_async_context(open_kube_api(kubeconfig=self.node.settings.kubeconfig))

            # Credentials that are not there yet are waited for; a wrong configuration is not.
            api = await retried(opened, API_RETRY_S, "kubernetes_not_ready")
            # An admission may wait for this already: it reads its pod by name, before the first list.
            self.node_pods.attach(api)
            if self.node.settings.runtime.sandboxed_handlers:
                self.runtime_classes.attach(api)
            async with asyncio.TaskGroup() as group:
                # Readers first: what is written follows from the pods.
                start_tasks(
                    group, _bound(api, {"pod informer": self.informer.run, "kubelet facts": self.kubelet_facts.run})
                )
                # During an update two agents run for a moment: the one that serves writes, or each would undo the
                # other's fields.
                await self.may_write.wait()
                writers = {
                    "pod annotations": self.annotations.run,
                    "pod events": self.pod_events.run,
                    "node events": self.node_events.run,
                    **{f"node {name}": writer.run for name, writer in self.node_fields.items()},
                    **self.further,
                }
                start_tasks(group, _bound(api, writers))
        raise AssertionError("the tasks do not return")


def _bound(api: KubeApi, runs: Mapping[str, Callable[[KubeApi], Awaitable[object]]]) -> Tasks:
    return {name: partial(run, api) for name, run in runs.items()}


def _written_fields(
    settings: Settings, allocations: AllocationsReport
) -> Iterator[tuple[NodeFields[Any], Callable[[Node], object]]]:
    # GPUShare's tools read the number of GPUs from the node's capacity, which no device plugin serves. An agent that is to
    # write nothing removes nothing either.
    if settings.gpushare.enabled or settings.facts.is_written:
        # A kubelet that registers the node again resets its capacity: the number comes back soon.
        yield replace(CAPACITY, period_s=60.0) if settings.gpushare.enabled else CAPACITY, _desired_capacity
    if settings.facts.is_written:
        yield from ((FACTS, desired_facts), (ALLOCATIONS, lambda _: allocations.text()), (TAINT, desired_free_gpus))


def _desired_capacity(node: Node) -> tuple[str, int | None]:
    gpushare = node.settings.gpushare
    # Where it is switched off the number was this agent's when it was on.
    return gpushare.resource, len(node.gpus().gpus) if gpushare.enabled else None


def desired_facts(node: Node) -> NodeFacts | None:
    """What the node's object should say of its GPUs, now; None until the driver was read once."""
    inventory = node.inventory
    # A driver that has not answered yet names no GPUs: the labels of before would be removed.
    if not inventory.is_read:
        return None
    unhealthy = inventory.unhealthy_reasons
    # The device plugins' GPUs: those that belong to claims are in the ResourceSlices.
    gpus, facts = node.plugins_gpus(), node.settings.facts
    report = gpus_annotation(
        gpus,
        cordoned={uuid: uuid not in unhealthy for uuid in inventory.cordoned},
        memory_block_mib=node.names.memory_block_mib,
        shares_in_mig=node.names.shares_in_mig,
        # A GPU of claims is in use though no device plugin offers it.
        unhealthy=dict(node.gpu_split.not_plugins) | unhealthy,
        in_parts={gpu.uuid for gpu in gpus.gpus if node.names.serves_parts(gpu)},
    )
    labels = node.settings.node_labels
    return node_facts(gpus, report, label_prefix=facts.label_prefix, node_labels=labels, features=_features(node))


def _features(node: Node) -> Mapping[str, str]:
    """The labels of GPU Feature Discovery, where the setting asks for them."""
    nvidia, inventory = node.settings.nvidia, node.inventory.current
    if not nvidia.labels:
        return {}
    # PCI devices: an instance has none of its own.
    physical = [gpu for gpu in inventory.known if gpu.mig is None]
    return feature_labels(
        inventory,
        served=node.names.nvidia.served if nvidia.enabled else lambda _: None,
        mig_strategy=nvidia.mig_strategy,
        machine=machine_name(),
        pci_classes=[found for gpu in physical if (found := pci_class(gpu.bus_id)) is not None],
        pci_configurations=[space for gpu in physical if (space := pci_configuration(gpu.bus_id)) is not None],
        written_at=int(time.time()),
    )


class AllocationsReport:
    """Which pod has what, for the node's object. State owned: what each pod has, worked out again where the pod or an
    allocation of it has changed."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._of_pod: dict[PodUid, AllocatedTo] = {}
        self._changed: frozenset[PodUid] | None = None
        self._has_resized = False
        self._text = ""

    def changed(self, uid: PodUid | None) -> None:
        """None: a GPU, or anything."""
        self._changed = None if uid is None or self._changed is None else self._changed | {uid}

    def text(self) -> str | None:
        """None until the pods are listed and the GPUs read: a text that leaves out what is allocated would give it away."""
        node, cache, gpus = self._node, self._node.cache, self._node.gpus().gpus
        if not node.pods.is_synced or not gpus:
            return None
        changed, self._changed = self._changed, frozenset()
        # What is shown of a resized share depends on the others of its GPU.
        if self._has_resized or cache.resized:
            changed = None
        self._has_resized = bool(cache.resized)
        own = cache if changed is None else [one for uid in changed for one in cache.of_pod(uid)]
        # What claims have is in the claims, where kube-scheduler counts it.
        by_plugins = [one for one in own if one.claim is None]
        found = allocations_by_pod(
            by_plugins, gpus, node.pods.get, node.names, cache.charge_differences(), cache.charges_of_pod
        )
        before = self._of_pod if changed is None else {uid: self._of_pod[uid] for uid in changed if uid in self._of_pod}
        if not self._text or found != before:
            for uid in before.keys() - found.keys():
                del self._of_pod[uid]
            self._of_pod |= found
            self._text = allocations_annotation(self._of_pod.values())
        return self._text


def desired_free_gpus(node: Node) -> FreeGpus | None:
    """None until it is known what is allocated: a node that has just started would seem free."""
    if not node.pods.is_synced or not node.inventory.is_read:
        return None
    above = node.settings.facts.taint_above
    # Switched off, it has no taint whatever is free.
    if above >= 1:
        return FreeGpus(part=0.0, taint_above=above)
    # Those for claims too. One that nobody here may use would be free for good.
    gpus = [gpu for gpu in node.gpus().gpus if not gpu.is_selected(node.settings.excluded_gpus)]
    return free_gpus(gpus, node.cache.charges(), node.names, above)
