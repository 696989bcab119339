"""Dynamic Resource Allocation for one agent: the driver's sockets, the claims, the slice."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NoReturn

import structlog
from msgspec.structs import replace

from gpushare_agent.agent.admission.part import edit_policy
from gpushare_agent.agent.cluster.runtime_classes import RuntimeClasses
from gpushare_agent.agent.dra.claim_files import ClaimFiles
from gpushare_agent.agent.dra.claims import Claims
from gpushare_agent.agent.dra.decisions.edits import PreparedClaim
from gpushare_agent.agent.dra.plugin import SOCKET_NAMES, DeviceHealth, DraPlugin, DraRegistration
from gpushare_agent.agent.dra.slices import SlicePublisher
from gpushare_agent.agent.dra.stale_claims import StaleClaims
from gpushare_agent.agent.dra.wake_pods import PodWaker
from gpushare_agent.agent.isolation import ISOLATIONS
from gpushare_agent.agent.isolation.isolations import Isolations
from gpushare_agent.agent.kubelet.handover import ServingLock, StaleSockets
from gpushare_agent.agent.mig.instances import MigInstances
from gpushare_agent.agent.node import Node
from gpushare_agent.core.claims.claim import DRIVER, ClaimPolicy
from gpushare_agent.core.claims.devices import DevicePolicy, is_placement_name, slice_devices
from gpushare_agent.core.claims.mig_devices import pool_slices
from gpushare_agent.core.kit.supervision import Tasks, run_together, wait_while
from gpushare_agent.core.kube.claims import SliceContent
from gpushare_agent.core.kube.client import KubeApi, slices_of_node
from gpushare_agent.core.kube.informer import Informer
from gpushare_agent.core.model.errors import StartupError

log = structlog.get_logger(__name__)

LEAVE_S = 5.0


class DraPart:
    def __init__(
        self, node: Node, isolation: Isolations, classes: RuntimeClasses, records: Path, mig: MigInstances
    ) -> None:
        """Joined, not started. `records` is the directory of the prepared claims' records."""
        settings, pool = node.settings, node.settings.node_name
        registry = settings.kubelet.root_dir / "plugins_registry"
        self.settings = settings
        self.mig = mig
        self.ready = asyncio.Event()
        self.claims = Claims(
            node=node,
            policy=edit_policy(
                settings, node.names, isolation.host.volumes, isolation.kernel_module, handlers=classes.handlers
            ),
            runtime_classes=classes,
            claim_policy=ClaimPolicy(
                nvidia_names=settings.dra.nvidia_names, has_unlimited=settings.dra.consumable_shares != "memory"
            ),
            files=ClaimFiles(records, settings.cdi.spec_directories[-1]),
            isolation=isolation,
            mig=mig,
        )
        self.health, self.plugin = DeviceHealth(node, mig), DraPlugin(self.claims, self.ready)
        self.registration = DraRegistration(
            instance=secrets.token_hex(4),
            registry=registry,
            plugin_path=settings.kubelet.root_dir / "plugins" / DRIVER,
            services=[self.plugin, self.health],
        )
        self.publisher = SlicePublisher(
            node_name=pool,
            desired=lambda: _slices(node, mig, self.claims.prepared.values()) if self.ready.is_set() else None,
        )
        self.informer = Informer(
            kind="resource slices", watched=slices_of_node(pool, DRIVER), handler=self.publisher, metrics=node.metrics
        )
        self.stale_claims = StaleClaims(self.claims, isolation.host.cgroups)
        self.waker = PodWaker(claims=self.claims)
        mig.on_change = self._mig_changed
        self.locks = {
            "kubelet.root_dir": ServingLock(registry),
            "state_directory": ServingLock(records),
        }
        """The locks of directories that only one agent may use, by setting."""

    def acquire(self) -> None:
        """Raises StartupError if an agent serves the claims that does not hand over to this one, because it serves another
        directory of device plugins: the kubelet would call the one that registered last."""
        plugins = self.settings.kubelet.device_plugin_path
        for name, lock in self.locks.items():
            if not lock.try_acquire(in_doubt=True):  # `start` tries again
                raise StartupError(
                    f"claims cannot be served: another agent of this node has the directory {lock.directory} (setting"
                    f" {name}), but not {plugins} (setting kubelet.device_plugin_path), and so does not hand over. Stop it,"
                    " or give this one kubelet.root_dir, state_directory and cdi.spec_directories of its own"
                )

    async def start(self) -> None:
        """Once the allocation cache is there: the claims' part of it. Raises Unavailable, and StartupError as `acquire`."""
        self.acquire()
        await self.mig.load()
        await self.claims.restore()
        self.ready.set()
        self.publisher.changed()

    def tasks(self) -> Tasks:
        """Does nothing if they run already: an agent that takes over from another registers before that one leaves, and its
        calls wait until `start`."""
        if self.registration.is_running:
            return {}
        registration = self.registration
        return {
            "dra registration": registration.run,
            "claims": self.claims.run,
            "stale dra registrations": StaleSockets(registration.registry, SOCKET_NAMES).run,
            "stale dra sockets": StaleSockets(registration.plugin_path, SOCKET_NAMES).run,
        }

    def serving_tasks(self) -> Tasks:
        """After `start`: what only one agent of the node does."""
        return {"mig instances": self.mig.run}

    def end(self) -> None:
        """Ends the driver before the lock of the device plugins is free, for which the incoming instance waits."""
        for lock in self.locks.values():
            lock.release()

    async def leave(self) -> None:
        """Gives open calls time to end: a claim with a cut-off call waits for the kubelet's next try."""
        await self.registration.leave()
        await wait_while(lambda: self.plugin.open_calls, LEAVE_S, poll_s=0.01)
        # For the rest of this agent's time, which may be a minute: it waits for a pause between admissions.
        await self.mig.leave()

    def not_served(self) -> list[str]:
        """Why pods can get no claim of this node now; nothing if they can."""
        missing = {
            "the kubelet has not registered the driver of claims (setting kubelet.root_dir)": self._registered,
            "the node's ResourceSlice is not published": self.publisher.published,
        }
        return [f"{text}; the log names the cause" for text, event in missing.items() if not event.is_set()]

    async def wait_served(self) -> None:
        """Returns once the kubelet has registered the driver and the slice was published."""
        await self._registered.wait()
        await self.publisher.published.wait()

    @property
    def _registered(self) -> asyncio.Event:
        return self.registration.registration.registered

    def changed(self) -> None:
        """An allocation or a GPU."""
        self.mig.changed()
        self._mig_changed()

    def _mig_changed(self) -> None:
        self.claims.changed()
        self.health.changed()
        self.publisher.changed()

    async def run(self, api: KubeApi) -> NoReturn:
        """What needs the API server, until cancelled."""
        self.claims.attach(api)
        tasks: dict[str, Callable[[], Awaitable[object]]] = {
            "slice informer": partial(self.informer.run, api),
            "slice publisher": partial(self.publisher.run, api, self._registered),
            "stale claims": partial(self.stale_claims.run, api),
            "pod waker": partial(self.waker.run, api),
        }
        if self.settings.mig.on_demand:
            tasks["own node"] = partial(self.mig.own_node.run, api)
        await run_together(tasks)


def _slices(node: Node, mig: MigInstances, claims: Iterable[PreparedClaim]) -> list[SliceContent] | None:
    """The slices as they should be, None until the driver was read once."""
    if not node.inventory.is_read:
        return None
    settings, gpus, claimable = node.settings, node.gpus(), node.gpu_split.claimable - {*mig.made}
    keeps = ISOLATIONS[settings.isolation].keeps
    policy = DevicePolicy(
        block_mib=node.names.memory_block_mib,
        order=settings.dra.order,
        taint_effect=settings.dra.taint_effect,
        isolation=settings.isolation,
        memory_by=keeps.memory_by,
        compute_by=keeps.compute_by,
        nvidia_names=settings.dra.nvidia_names,
        shares=settings.dra.consumable_shares,
    )
    cordoned, excluded = node.inventory.cordoned, settings.excluded_gpus
    # One that is gone stays in the inventory while the ledger has it. Of a place it had no device of its own, and one for
    # that moment would have the whole pool written twice.
    named = {one.gpu for claim in claims for one in claim.results if not is_placement_name(one.device)}
    gone = {gpu.uuid for gpu in gpus.gpus if gpu.is_gone} - named
    mine = [gpu for gpu in gpus.gpus if gpu.uuid in claimable - gone]
    parents = tuple(gpu for gpu in gpus.mig_partitioned if not gpu.is_selected(excluded))
    return pool_slices(
        slice_devices(mine, gpus, node.cache.charges(), cordoned, policy),
        replace(gpus, mig_partitioned=parents),
        cordoned,
        policy,
        instances=mig.gpus,
        blocked=mig.blocked,
    )
