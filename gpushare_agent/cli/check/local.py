"""The probes of `gpushare-agent check` that need nothing but the node: driver, the kubelet's sockets, directories, files.

The other probes: containers.py, isolation.py, shares.py, api.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from gpushare_agent.gpus.part import open_driver
from gpushare_agent.isolation import isolations_in_use
from gpushare_agent.isolation.resource_names import resource_names
from gpushare_agent.kit.sockets import MAX_ADDRESS_BYTES
from gpushare_agent.kubelet.handover import instance_socket_name
from gpushare_agent.model.errors import AgentError, Unavailable
from gpushare_agent.model.finding import Finding, Level, error, ok, warning
from gpushare_agent.model.gpus import Gpu, GpuInventory
from gpushare_agent.model.names import MIB
from gpushare_agent.model.resources import ResourceKind
from gpushare_agent.runtime import node_probes
from gpushare_agent.settings.settings import Settings

DRIVER_TIMEOUT_S = 15.0
"""Without persistence mode a GPU takes a second or two to wake."""


async def check_driver(settings: Settings) -> list[Finding]:
    """The GPUs, and with NVML the device nodes that containers need."""
    try:
        inventory = await read_inventory(settings)
    except AgentError as failure:
        cure = "make `nvidia-smi` work on the host; a node without GPUs can rehearse with --driver simulated"
        if settings.driver == "simulated":
            cure = "check --topology, --cards and --card-memory-mib"
        level = Level.ERROR if settings.fail_on_init_error else Level.WARNING
        return [Finding(level=level, what="driver", detail=str(failure), cure=cure)]
    findings = [_gpus_finding(settings, inventory)]
    findings += [_unhealthy_finding(gpu) for gpu in inventory.gpus if not gpu.is_healthy]
    findings += [
        warning(
            "card",
            f"number {index} cannot be read: {reason}",
            "see `nvidia-smi -q` and the kernel log; it is not offered",
        )
        for index, reason in inventory.unreadable
    ]
    names = resource_names(settings, inventory.mig_profiles)
    offered = [gpu for gpu in inventory.gpus if not gpu.is_selected(settings.excluded_gpus)]
    if names.gpu and (why := names.nvidia.unlike(offered)):
        reported, _, cure = why.partition(". ")
        findings.append(error("mig", reported, cure))
    if settings.driver == "nvml":
        findings.append(_device_nodes_finding(inventory))
    return findings


async def read_inventory(settings: Settings) -> GpuInventory:
    """One read of the configured driver. Raises AgentError."""
    driver = open_driver(settings)
    try:
        return await driver.read()
    finally:
        await driver.close()


def _gpus_finding(settings: Settings, inventory: GpuInventory) -> Finding:
    if not inventory.gpus:
        return warning("driver", "it answers, but there is no GPU", "the node will offer nothing; is a GPU plugged in?")
    memory = sum(gpu.memory_mib for gpu in inventory.gpus)
    kind = "simulated GPUs" if settings.driver == "simulated" else f"GPUs, driver {inventory.driver_version}"
    return ok("driver", f"{len(inventory.gpus)} {kind}, {memory} MiB in all")


def _unhealthy_finding(gpu: Gpu) -> Finding:
    detail = f"number {gpu.label} ({gpu.uuid}) is unhealthy: {gpu.unhealthy_reason}"
    return warning("card", detail, "see `nvidia-smi -q` and the kernel log; it is not given to pods until it recovers")


def device_paths(gpus: Sequence[Gpu]) -> list[Path]:
    """The device nodes of NVIDIA's driver. It says none of a GPU that was lost before the start: see Gpu."""
    of_gpus = (Path(f"/dev/nvidia{gpu.minor}") for gpu in gpus if gpu.minor >= 0)
    return [Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm"), *of_gpus]


def _device_nodes_finding(inventory: GpuInventory) -> Finding:
    paths = device_paths(inventory.gpus)
    missing: list[str] = []
    for path in paths:
        try:
            node_probes.require_device_node(path)
        except Unavailable as failure:
            missing.append(str(failure))
    if missing:
        cure = "run `nvidia-modprobe -c 0 -u` on the host; in a pod, set NVIDIA_DRIVER_CAPABILITIES to compute,utility"
        return error("device nodes", "; ".join(missing), cure)
    return ok("device nodes", f"{len(paths)} present")


async def check_kubelet(settings: Settings) -> list[Finding]:
    """The device-plugin directory, the kubelet's socket in it, and the length of our own sockets' paths."""
    directory = settings.kubelet.device_plugin_path
    findings: list[Finding] = []
    try:
        await node_probes.connect_to_socket(directory / "kubelet.sock")
        findings.append(ok("kubelet socket", f"{directory / 'kubelet.sock'} answers"))
    except Unavailable as failure:
        cure = "start the kubelet, or set --device-plugin-path to its device-plugins directory (mounted into the pod)"
        findings.append(error("kubelet socket", str(failure), cure))
    longest = str(directory / instance_socket_name(ResourceKind.VMEMORY.socket))
    length, limit = len(longest.encode()), MAX_ADDRESS_BYTES
    if length > limit:
        detail = f"{longest} has {length} bytes, a socket's path may have {limit}"
        findings.append(error("socket path", detail, "mount the kubelet's directory at a shorter path"))
    else:
        findings.append(ok("socket path", f"{length} of {limit} bytes used"))
    return findings


async def check_pod_resources(settings: Settings) -> list[Finding]:
    """Connects and hangs up: asking it for a List here could harm an admission under way."""
    path = settings.kubelet.pod_resources_socket
    try:
        await node_probes.connect_to_socket(path)
    except Unavailable as failure:
        cure = "mount the kubelet's pod-resources directory into the pod, or set --kubelet.pod-resources-socket"
        return [error("pod resources", str(failure), cure)]
    return [ok("pod resources", f"{path} answers (not asked for its list: that could disturb an admission)")]


async def check_directories(settings: Settings) -> list[Finding]:
    """The directory of the device-plugin sockets; the kubelet makes it."""
    directory, flag = settings.kubelet.device_plugin_path, "--device-plugin-path"
    try:
        found = await asyncio.to_thread(node_probes.require_writable, directory)
    except Unavailable as failure:
        cure = f"run the agent as root with the directory mounted for writing and room on its disk, or set {flag}"
        return [error("directory", str(failure), cure)]
    if found.directory != directory:
        cure = f"start the kubelet, mount the directory, or set {flag}"
        return [error("directory", f"{directory}: not there", cure)]
    return [ok("directory", f"{directory} writable, {found.free_bytes // MIB} MiB free")]


async def check_files(settings: Settings) -> list[Finding]:
    """Files that settings name. Where volume.conf is read for the driver directory, that line reports it."""
    named = {"--extra-config": settings.extra_config}
    if not any(isolation.mounts_driver for isolation in isolations_in_use(settings)):
        named["--volume-config"] = settings.volume_config
    findings: list[Finding] = []
    for flag, path in named.items():
        if path is None:
            continue
        try:
            node_probes.require_readable_file(path)
            findings.append(ok("file", f"{path} is readable ({flag})"))
        except Unavailable as failure:
            findings.append(error("file", f"{failure} ({flag})", f"create the file, mount it, or leave {flag} out"))
    return findings
