"""The GPUs of containers that gpu-manager or GPUShare's plugin started before this agent took its place. Pure.

The device IDs do not name them (`read_former_id` in core/model/names.py). What does, the first that says anything:

| source | names | written by |
|---|---|---|
| the answer in the kubelet's checkpoint | device nodes, UUIDs or an index | the plugin: what the container really has |
| gpu-manager's own checkpoint | device nodes | gpu-manager |
| the pod's annotations or environment | minor numbers | gpu-manager once it is `gpu-assigned`; GPUShare's extender |

The n of `/dev/nvidia<n>` is the minor number of now: containers get their nodes again at each start. An index in NVIDIA's
variable is the driver's, GPUShare's own one is a minor number (`getDevices` in pkg/gpu/nvidia/nvidia.go): where they differ
both GPUs may be meant. Such a container's devices here are `<GPU UUID>::<n>~<its text>`, like every device that a container
holds under another text. One whose GPU is not known, or how much it has of it, is on `one_of` those that it may have:
`held_back` says why nobody else gets these.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from gpushare_agent.agent.kubelet.records import NO_GPU, CheckpointEntry, ListedPod, is_former
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.names import (
    CORES_PER_GPU,
    ENV_GPUSHARE_INDEX,
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_ALLOCATION_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    GpuUuid,
    PodUid,
    device_id,
    is_one_of,
    known_as,
    kubelet_text,
    one_of,
    possible_gpus,
    read_former_id,
)
from gpushare_agent.core.model.pods import ContainerKind, Pod
from gpushare_agent.core.model.resources import ResourceNames

_ASSIGNED = "true"
_NODE = "/dev/nvidia"


class FormerDevices:
    """The devices of the containers on record at one moment; texts that are no former program's stay as they are."""

    def __init__(
        self,
        checkpoint: Collection[CheckpointEntry],
        pods: Iterable[Pod],
        names: ResourceNames,
        inventory: GpuInventory,
    ) -> None:
        self._entries: defaultdict[tuple[PodUid, str], list[CheckpointEntry]] = defaultdict(list)
        self._uids: dict[tuple[str, str, frozenset[str]], PodUid] = {}
        for one in checkpoint:
            if is_former(one.device_ids):
                self._entries[one.pod_uid, one.container].append(one)
                self._uids[one.container, one.resource, one.device_ids] = one.pod_uid
        self._pods = {pod.uid: pod for pod in pods}
        self._names = names
        self._gpus = {gpu.uuid: gpu for gpu in inventory.gpus}
        self.checkpoint = [
            replace(one, device_ids=self._read(one.pod_uid, one.container, one.device_ids)) for one in checkpoint
        ]

    def listed(self, pod: ListedPod) -> ListedPod:
        """The pod with these devices: by its UID in the checkpoint, or by its name."""
        if not any(is_former(ids) for one in pod.containers for ids in one.devices.values()):
            return pod
        named = (one for one in self._pods.values() if (one.namespace, one.name) == (pod.namespace, pod.name))
        uid = next((one.uid for one in named if not one.is_terminal), PodUid(""))

        def read(container: str, resource: str, ids: frozenset[str]) -> frozenset[str]:
            return self._read(self._uids.get((container, resource, ids), uid), container, ids)

        containers = (
            replace(c, devices={r: read(c.name, r, ids) for r, ids in c.devices.items()}) for c in pod.containers
        )
        return replace(pod, containers=tuple(containers))

    def _read(self, uid: PodUid, container: str, ids: frozenset[str]) -> frozenset[str]:
        """The devices of one resource of a container; its cores may be in another entry than its memory."""
        if not is_former(ids):
            return ids
        every = ids.union(*(entry.device_ids for entry in self._entries.get((uid, container), ())))
        former = {text: one for text in every if (one := read_former_id(text)) is not None}
        cores = sum(one.what == "core" for one in former.values())
        gpus = self._gpus_of(uid, container, max(1, cores // CORES_PER_GPU))
        # Blocks of another size than this node's: how much of the GPU it has is not known.
        if any(one.block_mib not in (0, self._names.memory_block_mib) for one in former.values()):
            gpus = [gpus[0] if is_one_of(gpus[0]) else one_of(gpus)]
        # A GPU after the other: of whole GPUs each has its hundred cores.
        own = enumerate(sorted((former[text].number, text) for text in ids if text in former))
        return frozenset(
            known_as(device_id(gpus[min(n // CORES_PER_GPU, len(gpus) - 1)], number), text)
            for n, (number, text) in own
            if gpus[0]
        )

    def _gpus_of(self, uid: PodUid, container: str, count: int) -> list[GpuUuid]:
        """So many GPUs, by index, or `one_of` those that it may have; an empty name where it got none."""
        entries, pod = self._entries.get((uid, container), ()), self._pods.get(uid)
        named = {name for entry in entries for name in entry.gpu_names} or (_by_pod(pod, container) if pod else ())
        if {*named} == {NO_GPU}:
            return [GpuUuid("")]
        # Where another answer of the container names one, it has that. NVIDIA's runtime gives the GPU of a UUID whatever the
        # index says.
        has_uuid = any(name.startswith("GPU-") for name in named)
        left_out = {name for name in named if name == NO_GPU or (has_uuid and name.isdigit())}
        found = {gpu for name in named if name not in left_out for gpu in self._named(name)}
        if len(found) < count:
            found = {*self._gpus}
        if len(found) != count:
            return [one_of(found)]
        return [*(gpu for gpu in self._gpus if gpu in found), *sorted(found - self._gpus.keys())]

    def _named(self, name: str) -> Collection[GpuUuid]:
        gpus = self._gpus.values()
        if name.startswith(_NODE):
            minor = name.removeprefix(_NODE)
            # The driver says no minor number of a GPU that it cannot read: it may be this one.
            return {gpu.uuid for gpu in gpus if str(gpu.minor) == minor} or {g.uuid for g in gpus if g.minor == -1}
        if not name.startswith("GPU-"):
            return {gpu.uuid for gpu in gpus if name in (str(gpu.index), str(gpu.minor))}
        instances = {gpu.uuid for gpu in gpus if gpu.mig is not None and gpu.mig.parent == name}
        return instances or {GpuUuid(name)}


def _by_pod(pod: Pod, container: str) -> Collection[str]:
    """What annotations and environment of the pod say."""
    spec, annotations = pod.container(container), pod.annotations
    if spec is None or spec.kind is not ContainerKind.MAIN:
        return ()
    # Before that it is the extender's plan, from which gpu-manager departs for whole GPUs (`processResult`).
    if annotations.get(GPU_ASSIGNED_ANNOTATION) == _ASSIGNED:
        minors = annotations.get(f"{PREDICATE_GPU_INDEX_PREFIX}{spec.position}", "").split(",")
        if named := [f"{_NODE}{minor}" for minor in minors if minor.isdigit()]:
            return named
    index = annotations.get(GPUSHARE_INDEX_ANNOTATION, "")
    if annotations.get(GPUSHARE_ASSIGNED_ANNOTATION) == _ASSIGNED and index.isdigit():
        return (index,)
    try:
        listed = json.loads(annotations.get(GPUSHARE_ALLOCATION_ANNOTATION, ""))[str(spec.position)]
        return [name for name in listed if isinstance(name, str) and name.isdigit()]
    except (ValueError, LookupError, TypeError, RecursionError):
        # Its extender's first form.
        return tuple(filter(str.isdigit, (spec.env.get(ENV_GPUSHARE_INDEX, ""),)))


def held_back(allocations: Iterable[Allocation]) -> dict[GpuUuid, str]:
    """The GPUs that nobody new gets because a container may have them, each with the reason."""
    found: dict[GpuUuid, str] = {}
    for one in allocations:
        pod = f"{one.namespace}/{one.pod_name}" if one.pod_name else f"with UID {one.key.pod_uid}"
        for uuid in (gpu for name in one.gpus if is_one_of(name) for gpu in possible_gpus(name)):
            found.setdefault(
                uuid,
                f"{one.started_by} started container {one.key.container} of pod {pod}, and nothing tells what it has of"
                " which GPU: nobody else gets it until that pod has ended",
            )
    return found


def texts(ids: Collection[str]) -> frozenset[str]:
    """The devices as their container holds them."""
    return frozenset(kubelet_text(device) or device for device in ids)
