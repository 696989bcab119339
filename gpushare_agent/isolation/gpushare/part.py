"""Isolation gpushare on a node: the library, each container's directory with its files and socket, and what is written into
those of running ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from gpushare_agent.isolation.choice import Standing
from gpushare_agent.isolation.gpushare.edits import live_limits
from gpushare_agent.isolation.gpushare.files import GpushareFiles
from gpushare_agent.isolation.gpushare.format import GpuLimits
from gpushare_agent.isolation.gpushare.observed import TIMEOUT_S, ObservedContainers
from gpushare_agent.isolation.gpushare.probing import require_no_failure, with_probe
from gpushare_agent.isolation.part import IsolationHost, IsolationPart, NodeProbe, ProbedDriver, all_of
from gpushare_agent.isolation.private_caches import FILES_TIMEOUT_S, PrivateCaches
from gpushare_agent.kit.daemon_thread import DaemonThread
from gpushare_agent.model.allocations import Allocation, ContainerKey
from gpushare_agent.model.gpus import GpuInventory
from gpushare_agent.model.names import MIB
from gpushare_agent.model.pods import Pod
from gpushare_agent.settings.settings import Settings


def build(host: IsolationHost) -> IsolationPart:
    """Joined, not started."""
    node = host.node

    def limits(key: ContainerKey) -> tuple[GpuLimits, ...] | None:
        return live_limits(
            node.claim_pods.parts(key), node.claim_pods.get(key.pod_uid), node.gpus().by_uuid(), node.names
        )

    def is_claims(key: ContainerKey) -> bool:
        allocation = node.cache.get(key)
        return allocation is not None and allocation.claim is not None

    last: tuple[object, GpuInventory | None, dict[ContainerKey, tuple[GpuLimits, ...]]] = ((), None, {})

    def shares() -> Mapping[ContainerKey, tuple[GpuLimits, ...]]:
        """Asked up to four times a second, so made again only where an allocation, a pod or a GPU has changed."""
        nonlocal last
        version, inventory = node.claim_pods.version, node.gpus()
        if last[0] == version and last[1] is inventory:
            return last[2]
        found: dict[ContainerKey, tuple[GpuLimits, ...]] = {}
        for key, allocation in node.claim_pods.shares().items():
            pod = node.claim_pods.get(key.pod_uid)
            # By the pod's annotation of now: its files are made under any isolation, its limits are kept under this one
            # alone.
            if pod is None or not allocation.is_limited or not host.uses(pod, "gpushare"):
                continue
            if (desired := limits(key)) is not None:
                found[key] = desired
        last = version, inventory, found
        return found

    def share_of(key: ContainerKey) -> ContainerKey:
        allocation = node.cache.get(key)
        # A container may use several results of a claim: one directory, and one share, for all of them.
        if allocation is not None and allocation.claim is not None and allocation.claim.view:
            return ContainerKey(key.pod_uid, allocation.claim.view)
        return key

    files = gpushare_files(node.settings, limits, is_claims)
    manager = host.vdevices()
    caches = PrivateCaches(files=files, allocations=node.claim_pods.shares, pods=node.pods, removes=False)
    seen = ObservedContainers(files=files, shares=shares, driver=host.driver, share_of=share_of)
    thread = DaemonThread("gpushare-limits", advice=f"Check the disk of the setting {files.kind.setting}.")

    async def enforce(allocation: Allocation, pod: Pod) -> str:
        key = share_of(allocation.key)
        if (desired := limits(key)) is None:
            return "a GPU's memory is not known, or the share is not wholly allocated yet"

        def write() -> int:
            files.write_limits(key, desired)
            held = files.held_bytes(key)
            return sum(max(0, held[one.uuid] - one.memory_bytes) for one in desired if one.memory_bytes is not None)

        await manager.enforce(key)
        above = await thread.call(write, f"writing the limits of {key.container}", TIMEOUT_S)
        return f"its processes still have {-(-above // MIB)} MiB more" if above > 0 else ""

    part = IsolationPart(
        services={"virtual manager": manager, "gpushare files": caches, "gpushare observed": seen},
        check=partial(all_of, manager.check, caches.check),
        look=partial(all_of, manager.look, caches.look),
        prepare=(manager.prepare, caches.prepare),
        prepare_ahead=(manager.ahead.add, caches.ahead.add),
        enforce=enforce,
        changed=manager.changed,
        usage_sampled=seen.usage_sampled,
        request_usage_by=seen.request_usage_by,
        paid=seen.paid,
    )
    return with_probe(part, files, host) if node.settings.driver == "nvml" and node.settings.libgpushare.probe else part


def probe(settings: Settings, driver: ProbedDriver) -> NodeProbe:
    files = gpushare_files(settings)
    thread = DaemonThread("isolation-files", advice=f"Check the disk of the setting {files.kind.setting}.")
    library = partial(thread.call, files.check_library, "reading libgpushare", FILES_TIMEOUT_S)

    async def proof() -> None:
        await require_no_failure(files, (await driver.read()).driver_version)

    is_proven = settings.driver == "nvml" and settings.libgpushare.probe
    check = partial(all_of, library, proof if is_proven else None)
    standing = Standing(place=10, because="libgpushare is there for this machine")
    return NodeProbe(
        check=check, standing=standing, pods=files.list_pods, is_for_sandbox=True, note=files.without_library
    )


def gpushare_files(
    settings: Settings,
    limits: Callable[[ContainerKey], Sequence[GpuLimits] | None] = lambda _: None,
    is_claims: Callable[[ContainerKey], bool] = lambda _: False,
) -> GpushareFiles:
    """No program computes on simulated GPUs, so they do without the library: containers get limits and mounts all the same.

    `limits` and `is_claims` are for what prepares containers.
    """
    own = settings.libgpushare
    return GpushareFiles(
        own.library,
        own.directory,
        settings.virtual_manager.path,
        limits,
        is_claims,
        is_library_optional=settings.driver == "simulated",
    )
