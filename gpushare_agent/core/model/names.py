"""Names that existing programs expect: resources, annotations, labels, environment variables.

Source: TKEStack gpu-manager 1.1.5 and gpu-admission 1.0 (docs/reference/formats.md). These are contracts: change none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple, NewType, cast

PodUid = NewType("PodUid", str)
GpuUuid = NewType("GpuUuid", str)
DeviceId = NewType("DeviceId", str)
"""A device of the device-plugin API inside the agent: `<GPU UUID>::<n>`, of a unit under NVIDIA's names
`<GPU UUID>::<n>/<layout>` (model/resources.py), and where the kubelet knows it by another text than the present one,
`<GPU UUID>::<n>~<text>`. Its texts are agent/kubelet/device_table.py's."""

VCORE_RESOURCE = "tencent.com/vcuda-core"
VMEMORY_RESOURCE = "tencent.com/vcuda-memory"

NVIDIA_GPU_RESOURCE = "nvidia.com/gpu"
NVIDIA_MIG_PREFIX = "nvidia.com/mig-"
SHARED_SUFFIX = ".shared"
"""Suffix of the name of a resource of replicas, with NVIDIA's renameByDefault."""
MAX_REPLICAS = 1000
"""Units of one GPU."""

CORES_PER_GPU = 100
"""One vcore unit is 1/100 of a GPU's compute."""
MIB, GIB = 1 << 20, 1 << 30
"""Bytes."""
MEMORY_BLOCK_MIB = 256
"""Default size of one vmemory unit, MiB."""

CORE_LIMIT_ANNOTATION = "tencent.com/vcuda-core-limit"
ISOLATION_ANNOTATION = "tencent.com/gpu-isolation"
"""Our own: which of the isolations that the node allows the pod wants."""
RESIZE_ANNOTATION = "gpushare-agent/resize"
"""Our own, on the pod: the sizes that its running shares are to have (docs/explanation/resize.md)."""
RESIZE_STATUS_ANNOTATION = "gpushare-agent/resize-status"
"""Written by the agent: the sizes that are in force."""
RETRY_ANNOTATION = "gpushare-agent/retry-at"
"""Unix time in nanoseconds, by the extender: filter refused the pod, and may take it now."""
PREDICATE_TIME_ANNOTATION = "tencent.com/predicate-time"
PREDICATE_NODE_ANNOTATION = "tencent.com/predicate-node"
PREDICATE_GPU_INDEX_PREFIX = "tencent.com/predicate-gpu-idx-"
"""Followed by the container's position in spec.containers; value "0" or "1,3"."""
GPU_ASSIGNED_ANNOTATION = "tencent.com/gpu-assigned"

GPUSHARE_COUNT_RESOURCE = "aliyun.com/gpu-count"
"""Capacity of the node with its number of GPUs, which GPUShare's inspection tool reads."""
GPUSHARE_INDEX_ANNOTATION = "ALIYUN_COM_GPU_MEM_IDX"
"""GPUShare's, on the pod: the index of the GPU that its extender chose, or that the agent gave."""
GPUSHARE_ASSIGNED_ANNOTATION = "ALIYUN_COM_GPU_MEM_ASSIGNED"
GPUSHARE_ASSUME_TIME_ANNOTATION = "ALIYUN_COM_GPU_MEM_ASSUME_TIME"
GPUSHARE_ALLOCATION_ANNOTATION = "scheduler.framework.gpushare.allocation"
"""Its later form, `{"0":{"1":7}}`: of the container at position 0, 7 units on GPU 1. Its inspection tool adds these up."""
GPU_CHOICE_ANNOTATIONS = (
    *("nvidia.com/use-gputype", "nvidia.com/nouse-gputype", "nvidia.com/use-gpuuuid", "nvidia.com/nouse-gpuuuid"),
    *("nvidia.com/include-gpu-type", "nvidia.com/exclude-gpu-type"),
    *("nvidia.com/include-gpu-uuid", "nvidia.com/exclude-gpu-uuid"),
)
"""HAMi's and vgpu-manager's, on the pod: the models or UUIDs of the GPUs that it accepts."""
MAX_ANNOTATION_CHARS = 1024
"""The characters of an annotation's value that are read, and written."""
ENV_GPU_MEMORY_REQUEST = "NVIDIA_GPU_MEMORY_REQUEST"
ENV_GPU_MEMORY_LIMIT = "NVIDIA_GPU_MEMORY_LIMIT"
ENV_GPUSHARE_INDEX = "ALIYUN_COM_GPU_MEM_IDX"
ENV_GPUSHARE_POD = "ALIYUN_COM_GPU_MEM_POD"
ENV_GPUSHARE_CONTAINER = "ALIYUN_COM_GPU_MEM_CONTAINER"
ENV_GPUSHARE_GPU = "ALIYUN_COM_GPU_MEM_DEV"
"""In the container: GPU index; units asked by the pod, by the container, and those of the GPU."""

DEVICE_CONTAINER_ANNOTATION = "tencent.com/vcuda-device"
"""On the container, in the Allocate response: `/dev/nvidia0,/dev/nvidia1`."""

GPU_MODEL_LABEL = "gaia.tencent.com/gpu-model"

ENV_VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
ENV_LIBRARY_PATH = "LD_LIBRARY_PATH"
ENV_PRELOAD = "LD_PRELOAD"
LIBRARY_DIRECTORY = "/usr/local/nvidia"
"""Where a container finds the driver's libraries and programs."""
VDEVICE_DIRECTORY = "/etc/vcuda"
PRELOAD_PATHS = "/etc/ld.so.preload", "/etc/ld-nix.so.preload"
"""The second is what the dynamic loader of nixpkgs' glibc reads instead of the first."""
GPUSHARE_DIRECTORY = "/usr/local/gpushare"
LIMIT_PATHS = (VDEVICE_DIRECTORY, *PRELOAD_PATHS, GPUSHARE_DIRECTORY, LIBRARY_DIRECTORY)
"""In a container: a volume of the pod's at, below or above one of them may take a limit out of sight."""


def clean_path(path: str) -> str:
    """The path as the runtime mounts it: absolute, without `.`, `..` and double slashes."""
    parts: list[str] = []
    for part in path.split("/"):
        if part == "..":
            # At the root `..` stays there, as for the kernel: a slice deletes nothing from an empty list.
            del parts[-1:]
        elif part not in ("", "."):
            parts.append(part)
    return "/" + "/".join(parts)


def touches(path: str, other: str) -> bool:
    """One is the other, or lies in it; both clean."""
    return f"{path.rstrip('/')}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path.rstrip('/')}/")


_CONTAINER_ID = re.compile(r"[0-9a-f]{64}")


def is_container_id(text: str) -> bool:
    """True for a container runtime's ID as containerd, CRI-O and Docker write it."""
    # fullmatch, here and elsewhere: `$` also matches before a newline at the end, and names become parts of paths.
    return _CONTAINER_ID.fullmatch(text) is not None


def device_id(uuid: GpuUuid, number: int) -> DeviceId:
    """Unit `number` of a GPU."""
    return DeviceId(f"{uuid}::{number}")


def known_as(device: DeviceId, text: str) -> DeviceId:
    """The device, for a container that holds it under this text."""
    return DeviceId(f"{device}~{text}")


def unit_id(uuid: GpuUuid, number: int, layout: str) -> DeviceId:
    """Unit `number` of a GPU by this replica layout (model/resources.py)."""
    return DeviceId(f"{uuid}::{number}/{layout}")


def unit_suffix(device: str) -> str:
    """The replica layout of `unit_id` as text, empty where it has none. Drivers before R470 name a MIG instance
    `MIG-GPU-…/1/0`."""
    return device.partition("~")[0].partition("::")[2].partition("/")[2]


def gpu_of(device: str) -> GpuUuid:
    """The GPU that a device of this agent names."""
    return GpuUuid(device.partition("::")[0])


def named_gpus(devices: Iterable[str]) -> list[GpuUuid]:
    """`gpu_of` each, without a call for each: a request of the kubelet has thousands."""
    return cast(list[GpuUuid], [device.partition("::")[0] for device in devices])


def kubelet_text(device: str) -> str | None:
    """The text of `known_as`."""
    return device.partition("~")[2] or None


def has_kubelet_text(devices: Iterable[str]) -> bool:
    """Whether `known_as` made any of them."""
    return "~" in "".join(devices)


_FORMER_ID = re.compile(
    r"tencent\.com/vcuda-(?P<what>core|memory)(?:-(?P<block_bytes>[0-9]{1,15}))?-(?P<counter>[0-9]{1,6})"
    r"|(?P<uuid>GPU-[0-9a-f-]{1,64})-_-(?P<unit>[0-9]{1,6})",
    re.ASCII,
)


class FormerId(NamedTuple):
    """A device ID of a program whose place this agent takes. None says which GPU the container has: gpu-manager's are
    counters (`capacity` in pkg/services/allocator/nvidia/allocator.go of tkestack/gpu-manager 8cd842e), and GPUShare's
    extender chooses the GPU whatever units the kubelet takes (`generateFakeDeviceID` in pkg/gpu/nvidia/nvidia.go of
    AliyunContainerService/gpushare-device-plugin 45fb8b8). `what` is core, memory or unit; `block_mib` is of memory."""

    program: str
    what: str
    number: int
    block_mib: int = 0


def read_former_id(text: str) -> FormerId | None:
    """The ID, None where it is another program's."""
    found = _FORMER_ID.fullmatch(text)
    if found is None:
        return None
    if found["uuid"]:
        return FormerId("GPUShare", "unit", int(found["unit"]))
    return FormerId("gpu-manager", found["what"], int(found["counter"]), int(found["block_bytes"] or 0) // MIB)


def former_program(device: str) -> str:
    """The program that named the device as its container holds it; empty for this agent."""
    former = read_former_id(kubelet_text(device) or "")
    return former.program if former is not None else ""


ANY_GPU = GpuUuid("")


def one_of(gpus: Iterable[GpuUuid]) -> GpuUuid:
    """Stands for the GPU of a container that has one or some of these, and nobody knows which, or how much of it; of none:
    whatever GPUs the driver will show."""
    return GpuUuid("".join(f"{gpu}|" for gpu in sorted(gpus)) or "|")


def is_one_of(gpu: GpuUuid) -> bool:
    return "|" in gpu


def possible_gpus(gpu: GpuUuid) -> list[GpuUuid]:
    """The GPUs behind `one_of`, ANY_GPU for whatever there are; of any other that GPU alone."""
    return [GpuUuid(uuid) for uuid in gpu.removesuffix("|").split("|")]


def split_device_id(device: str) -> tuple[GpuUuid, int] | None:
    """The GPU and the number of a device, None where it is not one of this agent."""
    uuid, _, rest = device.partition("::")
    number = rest if rest.isdigit() else rest.partition("~")[0].partition("/")[0]
    # The kubelet's checkpoint may hold other plugins' IDs; isdigit alone accepts digits of other scripts, which int
    # reads.
    if not uuid or not number.isascii() or not number.isdigit() or len(number) > 6:
        return None
    return GpuUuid(uuid), int(number)
