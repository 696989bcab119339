"""The agent's own CDI spec: which GPUs it must name, and its content.

Specs of others (mostly of nvidia-ctk) have precedence, because they also mount the driver's libraries: ours names only the
GPUs that no other names. Two files of one directory that name the same device make its name ambiguous, and runtimes then
reject it; of two directories the later one counts.

Source: the CDI specification 1.1.0 and its reference library. For operators: docs/reference/device-lists.md.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from gpushare_agent.agent.delivery.device_lists import CONTROL_NODES
from gpushare_agent.core.model.allocations import DeviceNode
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.isolation import SpecFile
from gpushare_agent.core.model.names import ENV_LIBRARY_PATH, ENV_VISIBLE_DEVICES, LIBRARY_DIRECTORY, GpuUuid

SPEC_CONTROL_NODES = (*CONTROL_NODES, "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset")
"""All that CUDA and graphics may want. Those that the host lacks are left out: a runtime would not start the container."""

_VOID = f"{ENV_VISIBLE_DEVICES}=void"
"""So that NVIDIA's runtime does not add the GPU a second time."""


class SpecNodes(Struct, frozen=True, kw_only=True):
    """What the host has: the control nodes that exist; whether GPUs have nodes at all (simulated ones may not). Where
    `driver_directory` is given, every container with a GPU of ours gets it at /usr/local/nvidia. `absent` are paths that
    the spec would have and the host lacks."""

    control: tuple[str, ...] = SPEC_CONTROL_NODES
    has_gpu_nodes: bool = True
    driver_directory: Path | None = None
    absent: tuple[str, ...] = ()


class Naming(Struct, frozen=True, kw_only=True):
    """Which file names which requested device: the one that counts, or those that make the name ambiguous."""

    named: Mapping[str, str]
    ambiguous: Mapping[str, tuple[str, ...]]


def naming(files: Iterable[SpecFile], kind: str, devices: Iterable[str]) -> Naming:
    """`files` in the order in which runtimes read: by directory, each directory's together."""
    by_device: dict[str, list[SpecFile]] = {device: [] for device in devices}
    for file in files:
        if file.kind == kind:
            for device in set(file.devices) & by_device.keys():
                by_device[device].append(file)
    named: dict[str, str] = {}
    ambiguous: dict[str, tuple[str, ...]] = {}
    for device, found in by_device.items():
        directories = [file.directory for file in found]
        in_one_directory = tuple(file.path for file in found if directories.count(file.directory) > 1)
        if in_one_directory:
            ambiguous[device] = in_one_directory
        elif found:
            named[device] = found[-1].path
    return Naming(named=named, ambiguous=ambiguous)


def gpus_to_name(gpus: Sequence[Gpu], others: Naming, nodes: SpecNodes) -> tuple[Gpu, ...]:
    """Those that no other spec names, in order of index. A GPU without a minor number has no node yet."""
    return tuple(
        gpu
        for gpu in sorted(gpus, key=lambda gpu: gpu.index)
        if gpu.uuid not in others.named
        and gpu.uuid not in others.ambiguous
        and (gpu.minor >= 0 or not nodes.has_gpu_nodes)
    )


def build_spec(
    gpus: Sequence[Gpu], kind: str, nodes: SpecNodes, *, names_of_others: Collection[str] = ()
) -> dict[str, Any]:
    """The spec for `gpus`, at least one.

    A MIG instance has NVIDIA's second name too, such as `0:1`. A device may not be without edits, so a GPU without a node
    has the variable. There is no device `all`: the agent does not use it, and it would name every GPU even after the agent
    is gone.
    """
    devices: list[dict[str, Any]] = []
    for gpu in gpus:
        edits = {"deviceNodes": [_node(gpu, path) for path in gpu.nodes]} if nodes.has_gpu_nodes else {"env": [_VOID]}
        # By NVIDIA's second name only where nobody else has it: two files with one name make it ambiguous.
        names = (gpu.uuid,) if gpu.mig is None or gpu.label in names_of_others else (gpu.uuid, gpu.label)
        devices += [{"name": str(name), "containerEdits": edits} for name in names]
    common: dict[str, Any] = {"env": [_VOID]}
    if nodes.has_gpu_nodes and nodes.control:
        common["deviceNodes"] = [{"path": path} for path in nodes.control]
    if nodes.driver_directory is not None:
        common["env"].append(f"{ENV_LIBRARY_PATH}={LIBRARY_DIRECTORY}/lib64")
        common["mounts"] = [
            {
                "hostPath": str(nodes.driver_directory),
                "containerPath": LIBRARY_DIRECTORY,
                "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
            }
        ]
    version = spec_version(kind, [device["name"] for device in devices])
    return {"cdiVersion": version, "kind": kind, "devices": devices, "containerEdits": common}


def _node(gpu: Gpu, path: str) -> dict[str, Any]:
    node = DeviceNode(host_path=path, container_path=path, numbers=gpu.cap_nodes.get(path, (0, 0)))
    return {"path": path, **node.cdi_numbers}


def spec_version(kind: str, names: Iterable[GpuUuid | str]) -> str:
    """The version, as low as suffices, so that older runtimes read it: a dot in the class came with 0.6.0, a leading digit
    with 0.5.0."""
    if "." in kind.partition("/")[2]:
        return "0.6.0"
    if any(name[:1].isdigit() for name in names):
        return "0.5.0"
    return "0.3.0"


def encode_spec(spec: Mapping[str, Any]) -> bytes:
    return (json.dumps(spec, indent=2, ensure_ascii=True) + "\n").encode()
