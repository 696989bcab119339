"""Isolation `auto`: looks at the node once, at the agent's start, and puts the isolation chosen into the settings.

What is found decides (isolation/choice.py); nothing is remembered. The checks are those that later say whether an
isolation can be had.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import structlog
from msgspec import Struct
from msgspec.structs import replace

from gpushare_agent.agent.gpus.part import NodeDriver, open_driver
from gpushare_agent.agent.isolation.choice import Candidate, Choice, choose
from gpushare_agent.agent.isolation.part import NodeProbe, build_probes, pods_with_files
from gpushare_agent.agent.runtime.cgroups import Cgroups
from gpushare_agent.agent.share_readiness import problem_of
from gpushare_agent.core.kit.daemon_thread import DaemonThread
from gpushare_agent.core.kit.directories import has_files
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.model.gpus import GpuInventory
from gpushare_agent.core.model.isolation import AUTO
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.settings.settings import Settings

log = structlog.get_logger(__name__)

RECORDS_TIMEOUT_S = 1.0


class NodeSettings(Struct, frozen=True, kw_only=True):
    """Settings without `auto`. `isolation_reason` is why the isolation was chosen, empty where the operator chose it.
    `mig_profiles` are those of the node's MIG instances where resources are named after them. `has_claim_records`: there
    are, or may be, claims of an earlier agent."""

    settings: Settings
    isolation_reason: str = ""
    mig_profiles: frozenset[str] = frozenset()
    has_claim_records: bool = False

    @property
    def follows_mig(self) -> bool:
        """Resources are named after the profiles of MIG instances."""
        return self.settings.nvidia.enabled and self.settings.nvidia.mig_strategy == "mixed"


async def resolve_isolation(settings: Settings) -> NodeSettings:
    """The settings with the isolation chosen. Each look at the node is bounded, and what does not answer cannot be had.

    Raises StartupError for wrong settings.
    """
    node = NodeSettings(settings=settings, has_claim_records=await _has_claim_records(settings.claim_directory))
    # The driver is asked only where something depends on it.
    if settings.isolation != AUTO and not node.follows_mig:
        return node
    # A driver of its own, closed again: the parts of the agent are not built yet, or belong to a reload's old generation.
    driver = open_driver(settings)
    try:
        try:
            inventory = await driver.read()
        except AgentError:
            inventory = None  # the agent itself reports a driver that does not answer, and follows profiles later
        if node.follows_mig and inventory is not None:
            node = replace(node, mig_profiles=inventory.mig_profiles)
        if settings.isolation != AUTO:
            return node
        choice = await _choose(settings, driver, inventory)
    finally:
        await driver.close()
    log.info("isolation_chosen", isolation=choice.isolation, reason=choice.reason)
    chosen = settings.model_copy(update={"isolation": choice.isolation})
    return replace(node, settings=chosen, isolation_reason=choice.reason)


async def _has_claim_records(directory: Path | None) -> bool:
    if directory is None:
        return False
    thread = DaemonThread("claim-records", advice=f"Check the disk of {directory}.")
    try:
        return await thread.call(partial(has_files, directory), "looking for claims' records", RECORDS_TIMEOUT_S)
    except AgentError as e:
        # A claim that is not known would have its GPU given to others; records are read again until they can be.
        log.warning("claim_records_unknown", error=str(e))
        return True


async def _choose(settings: Settings, driver: NodeDriver, inventory: GpuInventory | None) -> Choice:
    probes = build_probes(settings, driver)
    running = await _running(settings, probes)
    candidates = [
        Candidate(name=name, standing=probe.standing, problem=await problem_of(probe.check), is_running=name in running)
        for name, probe in probes.items()
    ]
    is_exclusive = inventory is not None and any(gpu.is_exclusive_process for gpu in inventory.gpus)
    return choose(candidates, is_exclusive_process=is_exclusive)


async def _running(settings: Settings, probes: Mapping[str, NodeProbe]) -> frozenset[str]:
    """The isolations whose files containers have mounted: of the pods with a directory, those that still have a cgroup."""
    cgroups = Cgroups(settings.runtime.cgroup_root, settings.runtime.proc_root)
    # Programs that run have a library mounted; another choice would leave them with limits that nobody follows.
    if not (pods := await pods_with_files(probes)):
        return frozenset()
    try:
        # A directory may be left of a pod that has ended; its cgroup is not.
        alive = await cgroups.find_pod_directories_in_thread(frozenset[PodUid]().union(*pods.values()))
    except AgentError as e:
        log.warning("running_shares_unknown", isolations=sorted(pods), error=str(e))
        return frozenset()
    return frozenset(name for name, uids in pods.items() if not uids.isdisjoint(alive))
