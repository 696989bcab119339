"""Isolation `auto`: looks at the node once, at the agent's start, and puts the isolation chosen into the settings.

What is found decides (isolation/choice.py); nothing is remembered. The checks are those that later say whether an
isolation can be had.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.agent.gpu_side import NodeDriver, open_driver
from gpushare_agent.agent.values import driver_volumes
from gpushare_agent.isolation.choice import NodeFindings, choose
from gpushare_agent.isolation.driver.limits import check_driver_limits
from gpushare_agent.isolation.driver_volume.check import SharedVolumeCheck
from gpushare_agent.isolation.driver_volume.values import VolumeName
from gpushare_agent.isolation.hami_core.part import hami_core_files
from gpushare_agent.isolation.mps.part import mps_control
from gpushare_agent.isolation.vcuda.files import VDeviceFiles
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.errors import AgentError
from gpushare_agent.model.isolation import IsolationName
from gpushare_agent.model.names import PodUid
from gpushare_agent.runtime.cgroups import Cgroups
from gpushare_agent.runtime.kernel_module import read_kernel_module
from gpushare_agent.settings.settings import Settings

log = structlog.get_logger(__name__)
T = TypeVar("T")

FILES_TIMEOUT_S = 5.0


class NodeSettings(Struct, frozen=True, kw_only=True):
    """Settings without `auto`. `isolation_reason` is why the isolation was chosen, empty where the operator chose it.
    `mig_profiles` are those of the node's MIG instances where resources are named after them."""

    settings: Settings
    isolation_reason: str = ""
    mig_profiles: frozenset[str] = frozenset()

    @property
    def follows_mig(self) -> bool:
        """Resources are named after the profiles of MIG instances."""
        return self.settings.nvidia.enabled and self.settings.nvidia.mig_strategy == "mixed"


async def resolve_isolation(settings: Settings) -> NodeSettings:
    """Each look at the node is bounded, and what does not answer cannot be had. Raises StartupError for wrong settings."""
    node = NodeSettings(settings=settings)
    if settings.isolation is not IsolationName.AUTO and not node.follows_mig:
        return node
    driver = open_driver(settings)
    try:
        if node.follows_mig:
            node = replace(node, mig_profiles=await _mig_profiles(driver))
        if settings.isolation is not IsolationName.AUTO:
            return node
        found = await _find(settings, driver)
    finally:
        await driver.close()
    choice = choose(found)
    log.info("isolation_chosen", isolation=choice.isolation.value, reason=choice.reason)
    chosen = settings.model_copy(update={"isolation": choice.isolation})
    return replace(node, settings=chosen, isolation_reason=choice.reason)


async def _mig_profiles(driver: NodeDriver) -> frozenset[str]:
    """None of a driver that cannot be read now: the agent follows them later."""
    try:
        return (await driver.read()).mig_profiles
    except AgentError:
        return frozenset()


async def _find(settings: Settings, driver: NodeDriver) -> NodeFindings:
    files, is_real = hami_core_files(settings), settings.driver == "nvml"
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)
    may_set = settings.driver_limits.set_by_agent
    checks: dict[IsolationName, Callable[[], Awaitable[object]]] = {
        IsolationName.HAMI_CORE: lambda: _bounded(files.check_library),
        IsolationName.MPS: mps_control(settings).check,
        IsolationName.VCUDA: SharedVolumeCheck(driver_volumes(settings).get(VolumeName.SHARED)).check,
        IsolationName.DRIVER: lambda: check_driver_limits(driver, cgroups, may_set=may_set),
    }
    return NodeFindings(
        problems={name: await _problem(check) for name, check in checks.items()},
        running=await _running(settings, cgroups),
        is_exclusive_process=await _is_exclusive_process(driver),
        module=read_kernel_module(settings.runtime.proc_root) if is_real else None,
        sets_driver_limits=may_set,
    )


async def _problem(check: Callable[[], Awaitable[object]]) -> str:
    try:
        await check()
    except AgentError as e:
        return str(e)
    return ""


async def _is_exclusive_process(driver: NodeDriver) -> bool:
    try:
        return any(gpu.is_exclusive_process for gpu in (await driver.read()).gpus)
    except AgentError:
        return False  # the agent itself reports a driver that does not answer


async def _running(settings: Settings, cgroups: Cgroups) -> frozenset[IsolationName]:
    """Whose files containers have mounted: of the pods with a directory, those that still have a cgroup."""
    places: dict[IsolationName, Callable[[], tuple[PodUid, ...]]] = {
        IsolationName.HAMI_CORE: hami_core_files(settings).list_pods,
        IsolationName.VCUDA: VDeviceFiles(settings.virtual_manager.path).pod_names,
    }
    found = set()
    for name, list_pods in places.items():
        try:
            uids = await _bounded(list_pods)
            if uids and await cgroups.find_pod_directories_in_thread(uids):
                found.add(name)
        except AgentError as e:
            log.warning("running_shares_unknown", isolation=name.value, error=str(e))
    return frozenset(found)


async def _bounded(blocking: Callable[[], T]) -> T:
    thread = DaemonThread("isolation-files", advice="Check the disks of the isolations' directories.")
    return await thread.call(blocking, "looking for what isolations need", FILES_TIMEOUT_S)
