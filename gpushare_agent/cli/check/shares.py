"""The probes of `gpushare-agent check` for the other isolations and the device lists: MPS, HAMi-core, device lists, CDI.

What the node does not use is not probed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from pathlib import Path

from gpushare_agent.cli.check.finding import Finding, error, ok, warning
from gpushare_agent.cli.check.local import read_inventory
from gpushare_agent.gpus.part import open_driver
from gpushare_agent.isolation import ISOLATIONS
from gpushare_agent.isolation.cdi.specs import cdi_specs
from gpushare_agent.isolation.device_lists import strategy_warnings
from gpushare_agent.isolation.driver import limits
from gpushare_agent.isolation.driver_volume.elf import read_interface
from gpushare_agent.isolation.hami_core.edits import lifts_cores
from gpushare_agent.isolation.hami_core.part import hami_core_config, hami_core_files
from gpushare_agent.isolation.kept import Circumstances, NotKept
from gpushare_agent.isolation.mps.part import mps_control
from gpushare_agent.isolation.resource_names import resource_names
from gpushare_agent.kubelet.device_table import MAX_STATUS_BYTES, check_size, check_unit_size, status_bytes
from gpushare_agent.model.errors import AgentError, StartupError, Unavailable
from gpushare_agent.model.isolation import DeviceListStrategy
from gpushare_agent.runtime import node_probes
from gpushare_agent.runtime.cgroups import Cgroups
from gpushare_agent.runtime.kernel_module import read_kernel_module
from gpushare_agent.settings.settings import Settings

_HOOK = "dlsym"
"""HAMi-core's own takes the driver's functions over."""
_USUAL_GLIBC = (2, 28)
"""Of the oldest images that NVIDIA publishes CUDA 12 and 13 for (ubi8)."""


async def check_mps(settings: Settings) -> list[Finding]:
    """The control daemon answers."""
    try:
        await mps_control(settings).check()
    except Unavailable as failure:
        cure = (
            "start the daemon with this pipe directory, or run `gpushare-agent mps` (docs/explanation/mps.md); until then"
            " no share is given under isolation mps"
        )
        return [error("mps", str(failure), cure)]
    return [ok("mps", f"the control daemon of {settings.mps.pipe_directory} answers")]


async def check_hami_core(settings: Settings) -> list[Finding]:
    """The library is there for this machine, and the agent's own directory can be written."""
    hami = settings.hami_core
    try:
        files = hami_core_files(settings)
        await asyncio.to_thread(files.check_library)
        await asyncio.to_thread(files.library_content)
        await asyncio.to_thread(partial(node_probes.require_writable, hami.directory))
    except AgentError as failure:
        cure = "docs/explanation/isolation.md lists what hami-core needs on the node; without it its shares are refused"
        return [error("hami-core", str(failure), cure)]
    text = f"{hami.library} is a library for this machine, {hami.directory} can be written"
    return [ok("hami-core", text), await asyncio.to_thread(_library_finding, hami.library)]


def _library_finding(library: Path) -> Finding:
    """Whether it is HAMi-core's, and in which images it loads."""
    build = "build it with native/build_hami_core.py, as the Containerfile does"
    try:
        found = read_interface(library)
    except AgentError as failure:
        return warning("hami-core", str(failure), build)
    if _HOOK not in found.defined:
        return error("hami-core", f"{library} is not HAMi-core's: it would limit nobody", build)
    needed = ".".join(map(str, found.glibc)) or "of any version"
    text = f"it loads in images with glibc {needed} or newer; in others programs print a line and run without limits"
    return warning("hami-core", text, build) if found.glibc > _USUAL_GLIBC else ok("hami-core", text)


async def check_kept(settings: Settings, failed: Collection[str] = ()) -> list[Finding]:
    """Of a share under each isolation in use: what is kept, by whom, and what is not. Nothing of those that `failed`."""
    module = read_kernel_module(settings.runtime.proc_root) if settings.driver == "nvml" else None
    findings = []
    for name in sorted(settings.isolations_in_use - frozenset(failed)):
        has_core_limit = not lifts_cores(None, hami_core_config(settings))
        found = ISOLATIONS[name].kept(Circumstances(module=module, has_core_limit=has_core_limit))
        detail = f"{name}: {found.text}"
        if NotKept.OPEN_MODULES in found.not_kept:
            cure = "update the driver to 570 or later, or install its proprietary kernel module; isolation mps does without"
            findings.append(warning("isolation", detail, cure))
        else:
            findings.append(ok("isolation", detail))
    return findings


async def check_driver_limits(settings: Settings) -> list[Finding]:
    """Cgroup v2, a driver that limits its cgroups' memory, and the right to set that where the agent is to."""
    driver, may_set = open_driver(settings), settings.driver_limits.set_by_agent
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)
    try:
        await limits.check_driver_limits(driver, cgroups, may_set=may_set)
    except AgentError as failure:
        cure = (
            "docs/explanation/isolation.md lists what isolation driver needs; without it every share of it is refused"
        )
        return [error("driver limits", str(failure), cure)]
    finally:
        await driver.close()
    who = "the agent sets them" if may_set else "NVIDIA's container toolkit has to set them, and the agent checks it"
    return [ok("driver limits", f"the driver limits the memory of cgroups; {who}")]


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
        check_size(found, names.vmemory, names.memory_block_mib)
        check_unit_size(found, names)
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
