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

from gpushare_agent.core.kube.pods import PodJson, PodSpec
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.names import CORE_LIMIT_ANNOTATION, CORES_PER_GPU
from gpushare_agent.core.model.pods import ContainerSpec
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement.mistakes import HAMI, VGPU_MANAGER, FamilyRequest, asked_of_family
from gpushare_agent.extender.decisions.claims import (
    Conversion,
    PatchOperation,
    escaped,
    new_pod,
    refused,
    resources_of,
)

FAMILIES = (HAMI, VGPU_MANAGER)
NAMES = (*HAMI.asking, *VGPU_MANAGER.asking)
_ALL = (*NAMES, HAMI.priority)
_ELASTIC = ("balance", "none")
"""The compute policies under which a share may use what nobody else does; `fixed`, and no policy, are its cores alone."""


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
    asked: dict[str, FamilyRequest] = {}
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


def _asked(container: ContainerSpec, names: ResourceNames) -> FamilyRequest | Refused:
    requests = container.requests
    families = [family for family in FAMILIES if any(requests.get(name) for name in family.asking)]
    if len(families) > 1:
        return refused(f"{families[0].count} and {families[1].count} are names of two programs: write those of one")
    found = asked_of_family(families[0], requests, names)
    return found if isinstance(found, FamilyRequest) else refused(found)


def _container_patches(
    spec: PodSpec, asking: list[ContainerSpec], asked: Mapping[str, FamilyRequest], names: ResourceNames
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
