"""How a container gets its GPUs' devices: one function per strategy; several may be configured at once.

Source: docs/reference/formats.md, section 1; NVIDIA's container toolkit and device plugin for the names of each way
in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from msgspec import Struct

from gpushare_agent.core.model.allocations import VOLUME_MOUNT_ROOT, ContainerEdits, ContainerMount, DeviceNode, merged
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.isolation import DeviceListStrategy
from gpushare_agent.core.model.names import ENV_VISIBLE_DEVICES

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
"""In addition to the GPUs' own; further ones are for the extra-config file, or a CDI spec."""


class NodeDevices(Struct, frozen=True, kw_only=True):
    """What the host has in addition to the GPUs: the control nodes that exist, and further nodes from the extra-config file.

    `has_gpu_nodes` is false for simulated GPUs on a real node, where /dev/nvidia0 does not exist and a container
    that names it would not start.
    """

    control: tuple[str, ...] = CONTROL_NODES
    extra: tuple[str, ...] = ()
    has_gpu_nodes: bool = True


class DeviceListRequest(Struct, frozen=True, kw_only=True):
    """`gpus` in order of index. `unique` names the container among all of the node, in characters of a label's name."""

    gpus: tuple[Gpu, ...]
    node: NodeDevices
    cdi_kind: str
    unique: str
    by_index: bool = False
    """Name the GPUs to NVIDIA's runtime by its index of now in place of UUID. CDI specs name them by UUID."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(gpu.number_label if self.by_index else gpu.uuid for gpu in self.gpus)


def _envvar(request: DeviceListRequest) -> ContainerEdits:
    return ContainerEdits(env=((ENV_VISIBLE_DEVICES, ",".join(request.names)),))


def _volume_mounts(request: DeviceListRequest) -> ContainerEdits:
    return ContainerEdits(
        env=((ENV_VISIBLE_DEVICES, VOLUME_MOUNT_ROOT),),
        mounts=tuple(
            ContainerMount(host_path="/dev/null", container_path=f"{VOLUME_MOUNT_ROOT}/{name}")
            for name in request.names
        ),
    )


def _device_nodes(request: DeviceListRequest) -> ContainerEdits:
    # Simulated GPUs have no nodes: the runtime would not create a container with one that is missing.
    gpus = tuple(path for gpu in request.gpus for path in gpu.nodes)
    paths = (*gpus, *request.node.control) if request.node.has_gpu_nodes else ()
    numbers = {path: found for gpu in request.gpus for path, found in gpu.cap_nodes.items()}
    return ContainerEdits(
        devices=tuple(
            DeviceNode(host_path=path, container_path=path, numbers=numbers.get(path, (0, 0)))
            for path in dict.fromkeys((*paths, *request.node.extra))
        )
    )


def _cdi_names(request: DeviceListRequest) -> tuple[str, ...]:
    return tuple(f"{request.cdi_kind}={gpu.uuid}" for gpu in request.gpus)


def _cdi_annotations(request: DeviceListRequest) -> ContainerEdits:
    return ContainerEdits(annotations=((f"cdi.k8s.io/gpushare_{request.unique}", ",".join(_cdi_names(request))),))


def _cdi_cri(request: DeviceListRequest) -> ContainerEdits:
    return ContainerEdits(cdi_devices=_cdi_names(request))


STRATEGIES: Mapping[DeviceListStrategy, Callable[[DeviceListRequest], ContainerEdits]] = {
    DeviceListStrategy.ENVVAR: _envvar,
    DeviceListStrategy.VOLUME_MOUNTS: _volume_mounts,
    DeviceListStrategy.DEVICE_NODES: _device_nodes,
    DeviceListStrategy.CDI_ANNOTATIONS: _cdi_annotations,
    DeviceListStrategy.CDI_CRI: _cdi_cri,
}


def device_edits(request: DeviceListRequest, strategies: Iterable[DeviceListStrategy]) -> ContainerEdits:
    """All of the strategies together, in the order of the enumeration: of envvar and volume-mounts the latter's variable
    counts. Where neither is given it is "void": CUDA images set it to "all", which NVIDIA's runtime would follow.

    docs/reference/device-lists.md lists which of them go together.
    """
    # In the order of STRATEGIES: where two set one variable the later counts, whatever order the setting has.
    chosen = [strategy for strategy in STRATEGIES if strategy in set(strategies)]
    return merged(ContainerEdits(env=((ENV_VISIBLE_DEVICES, "void"),)), *(STRATEGIES[name](request) for name in chosen))


_CDI = (DeviceListStrategy.CDI_ANNOTATIONS, DeviceListStrategy.CDI_CRI)
_BY_NVIDIAS_RUNTIME = (DeviceListStrategy.ENVVAR, DeviceListStrategy.VOLUME_MOUNTS)


def strategy_warnings(
    strategies: Iterable[DeviceListStrategy], *, mounts_driver: bool = True, has_gpu_nodes: bool = True
) -> list[str]:
    """Strategies that contradict each other or have no effect, each with the remedy, for the log and `check`.

    `mounts_driver`: containers get the driver's libraries from the driver directory. `has_gpu_nodes` as in NodeDevices.
    """
    given = set(strategies)
    cdi = [name for name in _CDI if name in given]
    by_runtime = [name for name in _BY_NVIDIAS_RUNTIME if name in given]
    found = []
    if len(by_runtime) == len(_BY_NVIDIAS_RUNTIME):
        found.append(
            "envvar and volume-mounts both set NVIDIA_VISIBLE_DEVICES, and volume-mounts wins: where NVIDIA's runtime does"
            " not accept the list as volume mounts, containers do not start. Drop one of the two"
        )
    if by_runtime and cdi:
        found.append(
            f"{' and '.join((*by_runtime, *cdi))} ask two programs, NVIDIA's runtime and the CDI support of the container"
            " runtime, for the same GPU: a container may get it and the driver's files twice, and which of the two sets"
            " NVIDIA_VISIBLE_DEVICES depends on them. Configure only one of the ways"
        )
    if given == {DeviceListStrategy.DEVICE_NODES} and has_gpu_nodes and not mounts_driver:
        found.append(
            "device-nodes alone adds no libraries of the driver, and this isolation mounts none: CUDA programs will not"
            " find libcuda. Add envvar (with NVIDIA's runtime) or a CDI strategy"
        )
    if given == {DeviceListStrategy.DEVICE_NODES} and not has_gpu_nodes:
        found.append("device-nodes alone has no effect here: the simulated GPUs have no device nodes")
    return found
