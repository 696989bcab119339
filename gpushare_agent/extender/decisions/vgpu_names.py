"""A pod that asks for GPUs by HAMi's or vgpu-manager's names, as one that asks by vcuda-core and vcuda-memory. Pure.

Their device plugins let the kubelet count only GPUs; their schedulers read cores and memory from the pod. No device
IDs could stand for them either: memory in MiB would be 200,000 for a node of eight GPUs, and the kubelet takes some 60,000.
So the pod is changed when it is created.

| a container's limits: gpu n, mem, cores of `Family` | become |
|---|---|
| n without mem, or cores 100 | vcuda-core 100·n; with mem: GPUs that have so much |
| 1, mem, cores 1 to 99 | vcuda-core, vcuda-memory in whole blocks |
| 1, mem | vcuda-core 1, and the pod's ceiling is 100: compute is not limited while nobody else uses it |
| mem or cores without n | as with 1 |
| vgpu-manager's compute policy `balance` or `none` | the pod's ceiling is 100 |
| gpumem-percentage 100 | as if it was not there |
| anything else | the pod is refused |

Sources: pkg/device/nvidia/device.go of HAMi 4707fb0 (MutateAdmission, GenerateResourceRequests); pkg/device/allocator of
vgpu-manager 3d7f66d.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from msgspec import Struct

from gpushare_agent.core.kube.pods import PodJson, PodSpec
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION, CORES_PER_GPU
from gpushare_agent.core.model.pods import ContainerSpec
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.extender.decisions.claims import (
    Conversion,
    PatchOperation,
    escaped,
    new_pod,
    refused,
    resources_of,
)


class Family(Struct, frozen=True, kw_only=True):
    """The names of one program, empty where it has none. The annotation `elastic` lets a share compute beyond its cores, and
    `ignored` have no effect; placement follows those that choose GPUs (core/placement/gpu_choice.py)."""

    count: str
    memory: str
    cores: str
    percentage: str = ""
    priority: str = ""
    elastic: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def asking(self) -> tuple[str, ...]:
        """Those by which a container asks."""
        return tuple(filter(None, (self.count, self.memory, self.cores, self.percentage)))


def _names(*names: str, domain: str = "nvidia.com") -> tuple[str, ...]:
    return tuple(f"{domain}/{name}" for name in names)


HAMI = Family(
    count="nvidia.com/gpu",
    memory="nvidia.com/gpumem",
    cores="nvidia.com/gpucores",
    percentage="nvidia.com/gpumem-percentage",
    priority="nvidia.com/priority",
    ignored=(
        *_names("vgpu-mode", "numa-bind"),
        *_names("node-scheduler-policy", "gpu-scheduler-policy", "device-scoring-weights", domain="hami.io"),
    ),
)
VGPU_MANAGER = Family(
    count="nvidia.com/vgpu-number",
    memory="nvidia.com/vgpu-memory",
    cores="nvidia.com/vgpu-cores",
    elastic="nvidia.com/vgpu-compute-policy",
    ignored=_names(
        *("node-scheduler-policy", "device-scheduler-policy", "memory-scheduler-policy"),
        *("device-topology-mode", "cross-pod-topology"),
    ),
)
FAMILIES = (HAMI, VGPU_MANAGER)
NAMES = (*HAMI.asking, *VGPU_MANAGER.asking)
_ALL = (*NAMES, HAMI.priority)
_ELASTIC = ("balance", "none")
"""The compute policies under which a share may use what nobody else does; `fixed`, and no policy, are its cores alone."""


class _Asked(NamedTuple):
    """`blocks` 0 for none. `is_unlimited`: nothing was said about its compute."""

    cores: int
    blocks: int
    is_unlimited: bool = False


def translate_pod(read: PodJson, names: ResourceNames) -> Conversion | Refused:
    """`read` is the pod as the API server shows it to a webhook, without a UID and perhaps without a name.

    Raises:
        Corrupt: what it asks for cannot be read.
    """
    pod = new_pod(read, _ALL)
    asking = [one for one in pod.containers if any(one.requests.get(name) for name in NAMES)]
    if not asking or pod.is_static:
        return Conversion()
    annotations = read.meta.annotations
    asked: dict[str, _Asked] = {}
    for one in asking:
        found = _asked(one, names)
        if isinstance(found, Refused):
            return refused(f"container {one.name}: {found.detail}")
        asked[one.name] = found
    unlimited = [name for name, one in asked.items() if one.is_unlimited]
    limited = [name for name, one in asked.items() if not one.is_unlimited and one.cores < CORES_PER_GPU]
    # The ceiling is the pod's: it would end the limits of the others.
    if unlimited and limited:
        return refused(
            f"container {unlimited[0]}: it says no number of cores, and {limited[0]} does. Write it for both"
        )
    patch = list(_container_patches(read.spec, asking, asked, names))
    is_elastic = any(annotations.get(family.elastic) in _ELASTIC for family in FAMILIES if family.elastic)
    if (unlimited or (limited and is_elastic)) and CORE_LIMIT_ANNOTATION not in annotations:
        name, ceiling = CORE_LIMIT_ANNOTATION, str(CORES_PER_GPU)
        if annotations:
            patch.append(PatchOperation("add", f"/metadata/annotations/{escaped(name)}", ceiling))
        else:
            patch.append(PatchOperation("add", "/metadata/annotations", {name: ceiling}))
    ignored = (name for family in FAMILIES for name in family.ignored if name in annotations)
    warnings = [f"the annotation {name} has no effect" for name in ignored]
    warnings += [
        f"container {one.name}: {HAMI.priority} has no effect" for one in asking if HAMI.priority in one.requests
    ]
    return Conversion(patch=patch, warnings=tuple(warnings))


def _asked(container: ContainerSpec, names: ResourceNames) -> _Asked | Refused:
    requests = container.requests
    families = [family for family in FAMILIES if any(requests.get(name) for name in family.asking)]
    if len(families) > 1:
        return refused(f"{families[0].count} and {families[1].count} are names of two programs: write those of one")
    (family,) = families
    # Without a number HAMi's webhook adds one, by default 1.
    count = requests.get(family.count, 1)
    memory_mib, percent = requests.get(family.memory, 0), requests.get(family.percentage, 0)
    # For both programs, missing memory means all of the GPU's memory, and then without cores the GPU is the container's own.
    is_all = not memory_mib and percent in (0, CORES_PER_GPU)
    cores = requests.get(family.cores, 0) or (CORES_PER_GPU if is_all else 0)
    blocks = -(-memory_mib // names.memory_block_mib)
    if count < 1 or cores > CORES_PER_GPU:
        return refused(f"{family.count} is at least 1, and {family.cores} at most {CORES_PER_GPU}")
    if cores == CORES_PER_GPU and percent in (0, CORES_PER_GPU):
        return _Asked(count * CORES_PER_GPU, count * blocks)
    if not memory_mib:
        return refused(
            f"how much {percent or CORES_PER_GPU} % of a GPU's memory are is known only once there is one: write"
            f" {family.memory}, in MiB"
        )
    if count > 1:
        return refused(
            f"it asks for parts of {count} GPUs, and a share is of one. Ask for whole GPUs, or for a ResourceClaim with"
            " several requests"
        )
    return _Asked(cores or 1, blocks, is_unlimited=not cores)


def _container_patches(
    spec: PodSpec, asking: list[ContainerSpec], asked: Mapping[str, _Asked], names: ResourceNames
) -> Iterator[PatchOperation]:
    for container in asking:
        (path, resources), one = resources_of(spec, container), asked[container.name]
        for group, written in (("limits", resources.limits), ("requests", resources.requests)):
            for name in _ALL:
                if name in (written or {}):
                    yield PatchOperation("remove", f"{path}/{group}/{escaped(name)}")
        for name, amount in ((names.vcore, one.cores), (names.vmemory, one.blocks)):
            if amount:
                # The API server has set requests to the limits already.
                yield PatchOperation("add", f"{path}/limits/{escaped(name)}", str(amount))
                if resources.requests is not None:
                    yield PatchOperation("add", f"{path}/requests/{escaped(name)}", str(amount))
