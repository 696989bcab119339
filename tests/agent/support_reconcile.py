"""A garbage collection of its own on a running agent's parts: for tests that reconcile when they choose."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpushare_agent.agent.admission.garbage_collection import GarbageCollection
from gpushare_agent.agent.kubelet.records import KubeletCheckpoint
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.sandbox.node import EmbeddedNode
from tests.agent.support_agent import InnerAgent


def collection_of(
    node: EmbeddedNode, agent: InnerAgent, *, kubelet_age_s: Callable[[], float | None] | None = None
) -> GarbageCollection:
    """It compares allocations however young they are. `kubelet_age_s` is the agent's where it is not given."""
    parts = agent.parts
    collection = GarbageCollection(
        node=parts.node,
        static_pods=parts.cluster.node_pods,
        gate=parts.kubelet.gate,
        pod_resources=parts.kubelet.pod_resources,
        checkpoint=KubeletCheckpoint(node.paths.device_plugin_path, DeviceIds()),
        cgroups=Cgroups(parts.node.settings.runtime.cgroup_root),
        kubelet_age_s=kubelet_age_s or parts.kubelet.facts.age_s,
        clock=time.monotonic,
        fresh_s=0.0,
    )
    parts.node.cache.subscribe(collection.allocation_changed)
    return collection
