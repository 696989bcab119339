"""The probes of `gpushare-agent check` for the other isolations and the device lists: MPS, HAMi-core, device lists, CDI.

What the node does not use is not probed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from gpushare_agent.cli.check.local import read_inventory
from gpushare_agent.isolation import ISOLATIONS
from gpushare_agent.isolation.cdi.specs import cdi_specs
from gpushare_agent.isolation.check import node_circumstances
from gpushare_agent.isolation.device_lists import strategy_warnings
from gpushare_agent.isolation.kept import Circumstances, NotKept
from gpushare_agent.isolation.resource_names import resource_names
from gpushare_agent.kubelet.device_table import MAX_STATUS_BYTES, check_lists, status_bytes
from gpushare_agent.model.errors import AgentError, StartupError
from gpushare_agent.model.finding import Finding, error, ok, warning
from gpushare_agent.model.isolation import DeviceListStrategy
from gpushare_agent.runtime.machine import read_kernel_module
from gpushare_agent.settings.settings import Settings


async def check_kept(settings: Settings, failed: Collection[str] = ()) -> list[Finding]:
    """Of a share under each isolation in use: what is kept, by whom, and what is not. Nothing of those that `failed`."""
    module = read_kernel_module(settings.runtime.proc_root) if settings.driver == "nvml" else None
    findings = []
    for name in sorted(settings.isolations_in_use - frozenset(failed)):
        found = ISOLATIONS[name].kept(node_circumstances(name, settings, Circumstances(module=module)))
        detail = f"{name}: {found.text}"
        if NotKept.OPEN_MODULES in found.not_kept:
            cure = "update the driver to 570 or later, or install its proprietary kernel module; isolation mps does without"
            findings.append(warning("isolation", detail, cure))
        else:
            findings.append(ok("isolation", detail))
    return findings


async def check_device_lists(settings: Settings) -> list[Finding]:
    """The strategies do not contradict each other, and CDI names every GPU where it provides them."""
    has_nodes = settings.driver == "nvml" or settings.simulated.device_nodes
    mounts_driver = ISOLATIONS[settings.isolation].mounts_driver and settings.volume_config is not None
    texts = strategy_warnings(settings.device_list_strategy, mounts_driver=mounts_driver, has_gpu_nodes=has_nodes)
    findings = [warning("device lists", text, "see docs/reference/device-lists.md") for text in texts]
    if not {DeviceListStrategy.CDI_ANNOTATIONS, DeviceListStrategy.CDI_CRI} & set(settings.device_list_strategy):
        return findings
    return [*findings, *await _check_cdi(settings)]


async def check_list_sizes(settings: Settings) -> list[Finding]:
    """The lists of memory blocks and of GPUShare's units fit the kubelet: else the agent does not start."""
    try:
        found = await read_inventory(settings)
    except AgentError:
        return []  # the driver's own line has it
    names = resource_names(settings)
    try:
        check_lists(found, names)
    except StartupError as failure:
        return [error("list sizes", str(failure), "set the unit or block size that the text names")]
    fits = ok("list sizes", f"the lists of {', '.join(names.names)} fit the kubelet's messages")
    return [fits, _status_finding(status_bytes(found.gpus, names))]


def _status_finding(size: int) -> Finding:
    """Kubelets from 1.36 on write each device ID of a container into its pod's status."""
    detail = f"that of a pod with all cores and memory of this node has {size} bytes of device IDs"
    if size <= MAX_STATUS_BYTES:
        return ok("pod status", detail)
    cure = "set a larger resources.memory_block_mib, or have whole GPUs asked for without memory (docs/reference/formats.md)"
    return warning("pod status", f"{detail}, more than {MAX_STATUS_BYTES}", cure)


async def _check_cdi(settings: Settings) -> list[Finding]:
    cure = "see docs/reference/device-lists.md; `gpushare-agent cdi list` prints who names which GPU"
    try:
        inventory = await read_inventory(settings)
        state = await asyncio.to_thread(cdi_specs(settings).plan, inventory.gpus)
    except AgentError as failure:
        return [error("cdi", str(failure), cure)]
    found = [warning("cdi", f"passed over: {text}", cure) for text in state.passed_over]
    if state.unnamed or state.troubles:
        return [*found, *(error("cdi", text, cure) for text in state.troubles or state.unnamed)]
    return [*found, ok("cdi", f"{len(state.named)} GPUs have a name of kind {state.kind}, or get it from the agent")]
