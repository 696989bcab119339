"""Adds up what is allocated on the GPUs of a node, from what its agent reports on the node's object.

Pure sums for `inspect --all-nodes`; for one node its agent's ledger is read instead. Of a pod only names and requests are
read, for display: any tenant can write its annotations. Format of the report: docs/reference/node-facts.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.model.charges import NO_CHARGE, Charge, add_charges
from gpushare_agent.model.gpus import GpuReport
from gpushare_agent.model.names import MIB
from gpushare_agent.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.model.requests import request_of
from gpushare_agent.model.resources import ResourceNames
from gpushare_agent.observability.gpu_summaries import GpuSummaries
from gpushare_agent.placement.gpu_account import account_of


class GpuSums(Struct, frozen=True, kw_only=True):
    """One GPU and what of it is allocated. `health_reason` is what is wrong with the GPU itself, None where that is not
    known."""

    gpu: GpuReport
    cores_allocated: int
    memory_allocated_bytes: int
    health_reason: str | None


class ContainerSums(Struct, frozen=True, kw_only=True):
    """One container's part. `gpus` are those that it is charged to, none where it is unplaced; `remark` says why, or what
    a reader should know."""

    namespace: str
    pod: str
    container: str
    gpus: tuple[int, ...]
    cores: int
    memory_bytes: int
    remark: str = ""


class NodeSums(Struct, frozen=True, kw_only=True):
    """One node. What unplaced containers ask for is in no GPU's sum."""

    node: str
    gpus: tuple[GpuSums, ...]
    containers: tuple[ContainerSums, ...]
    remark: str = ""

    @property
    def unplaced(self) -> tuple[ContainerSums, ...]:
        return tuple(container for container in self.containers if not container.gpus)


def node_sums(node: str, gpus: GpuSummaries, pods: Sequence[Pod], names: ResourceNames) -> NodeSums:
    """`pods` are those of the node that have not ended. A GPU's sums are the report's alone, whatever the pods say."""
    names = replace(names, memory_block_mib=gpus.memory_block_mib)
    by_index = {gpu.index: gpu for gpu in gpus.gpus}
    allocated = gpus.allocated if gpus.allocated is not None else {}
    by_uid = {pod.uid: pod for pod in pods if not pod.is_terminal}
    found = [
        container
        for uid, pod in by_uid.items()
        for container in _containers_of(pod, allocated.get(uid, {}), by_index, names)
    ]
    found += [
        ContainerSums(
            namespace="", pod=uid, container="", gpus=tuple(charges), **_amounts(charges, by_index, names),
            remark="the API server lists no such pod on the node that runs",
        )
        for uid, charges in allocated.items()
        if uid not in by_uid
    ]  # fmt: skip
    charged: dict[int, Charge] = {}
    for charges in allocated.values():
        add_charges(charged, charges)
    return NodeSums(
        node=node,
        gpus=tuple(_gpu_sums(gpu, charged.get(index, NO_CHARGE), names) for index, gpu in sorted(by_index.items())),
        containers=tuple(sorted(found, key=lambda one: (one.namespace, one.pod))),
        remark=gpus.remark,
    )


def _gpu_sums(gpu: GpuReport, charge: Charge, names: ResourceNames) -> GpuSums:
    account = account_of(gpu, names, charge)
    return GpuSums(
        gpu=gpu,
        cores_allocated=min(account.allocated_cores, gpu.cores),
        memory_allocated_bytes=account.allocated_mib * MIB,
        health_reason="" if gpu.is_healthy else None,  # not in the annotation
    )


class _Amounts(TypedDict):
    cores: int
    memory_bytes: int


def _amounts(charges: Mapping[int, Charge], by_index: Mapping[int, GpuReport], names: ResourceNames) -> _Amounts:
    accounts = [account_of(by_index[index], names, charge) for index, charge in charges.items()]
    return {
        "cores": sum(account.allocated_cores for account in accounts),
        "memory_bytes": sum(account.allocated_mib for account in accounts) * MIB,
    }


def _containers_of(
    pod: Pod, charges: Mapping[int, Charge], by_index: Mapping[int, GpuReport], names: ResourceNames
) -> list[ContainerSums]:
    """The report is by pod: of several containers each is shown with its request, and with all GPUs of the pod. An init
    container is left out: the main containers take over what it has."""
    asking = [
        container
        for container in pod.containers
        if container.kind is not ContainerKind.INIT and any(names.wanted(container, kind) for kind in names.kinds)
    ]
    indexes = tuple(charges)
    if indexes and len(asking) <= 1:
        container = asking[0].name if asking else ""  # asks under a name that is not among the settings here
        amounts = _amounts(charges, by_index, names)
        return [ContainerSums(namespace=pod.namespace, pod=pod.name, container=container, gpus=indexes, **amounts)]
    remark = (
        "the node's agent has not reported it" if not indexes
        else "the node's agent reports the GPUs of the whole pod" if len(indexes) > 1
        else ""
    )  # fmt: skip
    return [
        ContainerSums(
            namespace=pod.namespace, pod=pod.name, container=container.name, gpus=indexes, remark=remark,
            **_requested(container, names),
        )
        for container in asking
    ]  # fmt: skip


def _requested(container: ContainerSpec, names: ResourceNames) -> _Amounts:
    return {
        "cores": request_of(container, names).cores,
        "memory_bytes": names.memory_mib(container) * MIB,
    }
