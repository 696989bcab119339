"""What an Allocate answer puts into a container: environment, device nodes, container annotations. Pure.

Source of the names: docs/formats.md, section on resources. What makes a share real inside the container (the isolation)
adds to this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpushare_agent.model.allocations import ContainerEdits, DeviceNode
from gpushare_agent.model.gpus import Card
from gpushare_agent.model.names import (
    DEVICE_CONTAINER_ANNOTATION,
    ENV_LIBRARY_PATH,
    ENV_VISIBLE_DEVICES,
    LIBRARY_DIRECTORY,
)
from gpushare_agent.model.pods import ContainerSpec
from gpushare_agent.model.resources import ResourceKind, ResourceNames

CONTROL_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm")
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDevices:
    """What the host has besides the cards: further device nodes from the extra-config file.

    `has_card_nodes` is false for simulated cards on a real node, where /dev/nvidia0 does not exist and a container
    that names it would not start.
    """

    extra: tuple[str, ...] = ()
    has_card_nodes: bool = True


def container_edits(
    container: ContainerSpec, cards: Sequence[Card], names: ResourceNames, devices: NodeDevices
) -> ContainerEdits:
    """The edits for a container that holds a share of, or all of, `cards` (in order of index)."""
    nodes = tuple(f"/dev/nvidia{card.minor}" for card in cards)
    paths = (*nodes, *CONTROL_NODES) if devices.has_card_nodes else ()
    libraries = [f"{LIBRARY_DIRECTORY}/lib64"]
    if container.env.get("compat32", "").lower() == "true":
        libraries.append(f"{LIBRARY_DIRECTORY}/lib")
    cores = names.wanted(container, ResourceKind.VCORE)
    blocks = names.wanted(container, ResourceKind.VMEMORY)
    return ContainerEdits(
        env=(
            (ENV_LIBRARY_PATH, ":".join(libraries)),
            (ENV_VISIBLE_DEVICES, ",".join(card.uuid for card in cards)),
        ),
        devices=tuple(
            DeviceNode(host_path=path, container_path=path) for path in dict.fromkeys((*paths, *devices.extra))
        ),
        annotations=(
            (names.vcore, str(cores)),
            (names.vmemory, str(blocks * names.memory_block_mib * MIB)),
            (DEVICE_CONTAINER_ANNOTATION, ",".join(nodes)),
        ),
    )


def merged(*parts: ContainerEdits) -> ContainerEdits:
    """All of them together; of one variable or annotation the last counts."""
    return ContainerEdits(
        env=tuple(sorted({name: value for part in parts for name, value in part.env}.items())),
        mounts=tuple(dict.fromkeys(mount for part in parts for mount in part.mounts)),
        devices=tuple(dict.fromkeys(device for part in parts for device in part.devices)),
        annotations=tuple(sorted({name: value for part in parts for name, value in part.annotations}.items())),
        cdi_devices=tuple(dict.fromkeys(device for part in parts for device in part.cdi_devices)),
    )
