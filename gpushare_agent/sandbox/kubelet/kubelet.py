"""An embedded kubelet: it admits the pods of its node, one at a time, and keeps the node's status.

It behaves towards device plugins and PodResources clients as a real one was measured to (docs/reference/sandbox.md); its
containers are child processes of this one (container_runtime). State owned: the known pods, and what one start of it needs
(`_boot`).

`run` is the only task that its opener starts; `start`, `stop` and `restart` set what it does and wait until it is done.
"""

from __future__ import annotations

import random
import stat
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

import structlog

from gpushare_agent.model.errors import NotFound
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from gpushare_agent.sandbox.behaviour import KubeletTimes, behaviour_of
from gpushare_agent.sandbox.kubelet.boot import KubeletBoot
from gpushare_agent.sandbox.kubelet.calls import CallLog
from gpushare_agent.sandbox.kubelet.device_manager import DeviceManager
from gpushare_agent.sandbox.kubelet.device_records import CHECKPOINT_NAME, DeviceRecord
from gpushare_agent.sandbox.kubelet.dra_manager import MAX_DRA_CALLS, ClaimRecords, DraCalls, DraManager
from gpushare_agent.sandbox.kubelet.pod_worker import KnownPod
from gpushare_agent.sandbox.runtime.containers import ContainerRuntime
from gpushare_agent.sandbox.state_directory import NodePaths

log = structlog.get_logger(__name__)
T = TypeVar("T")

_SWITCH_TIMEOUT_S = 30.0


class EmbeddedKubelet:
    """`cgroups` insists on a kind of them (cgroup_tree.py). Raises StartupError where it cannot be had."""

    def __init__(
        self,
        *,
        paths: NodePaths,
        node_name: str,
        api: EmbeddedApiServer,
        version: str,
        seed: int,
        times: KubeletTimes | None,
        cgroups: str | None,
    ) -> None:
        self.behaviour = behaviour_of(version)
        self.node_name = node_name
        self._paths = paths
        self.signal = api.signal
        self.log = CallLog()
        self._api = api
        self._rng = random.Random(seed)
        self._times = times or KubeletTimes()
        self.claims: ClaimRecords = {}
        """Prepared claims, over all starts."""
        self.dra_calls: DraCalls = deque(maxlen=MAX_DRA_CALLS)
        self._boots = 0
        for path in (paths.device_plugin_path, paths.pod_resources_socket.parent, paths.plugin_registry):
            path.mkdir(parents=True, exist_ok=True)
        self.runtime = ContainerRuntime(paths.state, self.signal, cgroups)
        self._boot: KubeletBoot | None = None
        self._is_wanted = False

    # --- running ---

    async def run(self) -> None:
        """Endless: one boot after another, while one is wanted. Cancelling ends the containers too."""
        try:
            while True:
                await self.signal_until(lambda: self._is_wanted)
                await self._run_boot()
        finally:
            self.runtime.close()

    async def _run_boot(self) -> None:
        self._clean_plugin_directory()
        devices = DeviceManager(
            directory=self._paths.device_plugin_path, calls=self.log, rng=self._rng, active_pods=self._active_pods,
            is_running=self.runtime.is_running, notify=self.signal.notify,
        )  # fmt: skip
        self._boots += 1
        dra = DraManager(
            registry=self._paths.plugin_registry, node_name=self.node_name, api=self._api, records=self.claims,
            boot=self._boots, times=self._times, calls=self.dra_calls,
        )  # fmt: skip
        boot = KubeletBoot(
            node_name=self.node_name, behaviour=self.behaviour, api=self._api, devices=devices, dra=dra,
            runtime=self.runtime, calls=self.log, rng=self._rng, times=self._times,
        )  # fmt: skip
        self._boot = boot
        try:
            await boot.run(self._paths, until=self.signal_until(lambda: not self._is_wanted))
        finally:
            self._boot = None
            self.signal.notify()

    async def signal_until(self, condition: Callable[[], bool]) -> None:
        """Without a deadline: for bodies that wait for their whole life."""
        while not condition():
            await self.signal.wait(self.signal.count)

    async def start(self) -> None:
        """Returns when both sockets listen; admissions begin `times.admission_delay_s` later."""
        self._is_wanted = True
        self.signal.notify()
        await self.signal.wait_until(
            lambda: self._boot is not None and self._boot.is_listening, _SWITCH_TIMEOUT_S, "the kubelet's sockets"
        )

    async def stop(self) -> None:
        """Containers run on and socket files stay, as with a real kubelet."""
        self._is_wanted = False
        self.signal.notify()
        await self.signal.wait_until(lambda: self._boot is None, _SWITCH_TIMEOUT_S, "the end of the kubelet")

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    @property
    def is_running(self) -> bool:
        return self._boot is not None and self._boot.is_listening

    @property
    def has_wiped_slices(self) -> bool:
        """Slices that are there now are of after this start."""
        return self._boot is not None and self._boot.dra.has_wiped_slices

    def begin_admissions(self) -> None:
        """At once, instead of after `times.admission_delay_s`: for who waits for something else first."""
        if self._boot is not None:
            self._boot.begin_admissions()

    def push_node_status(self) -> None:
        """At once, instead of at the next interval."""
        if self._boot is not None:
            self._boot.push_node_status()

    def _active_pods(self) -> set[str]:
        return self._boot.active_pods() if self._boot is not None else set()

    def _clean_plugin_directory(self) -> None:
        for path in self._paths.device_plugin_path.iterdir():
            mode = path.lstat().st_mode
            is_file = not stat.S_ISDIR(mode) and path.name != CHECKPOINT_NAME
            if stat.S_ISSOCK(mode) or (is_file and self.behaviour.removes_plugin_files):
                path.unlink()

    # --- what happened, for views and tests ---

    def records(self) -> list[DeviceRecord]:
        """The allocations on record, entries of ended pods included until they are forgotten."""
        return self._boot.devices.records.all() if self._boot is not None else []

    def active_records(self) -> list[DeviceRecord]:
        """Records of active pods."""
        active = self._active_pods()
        return [record for record in self.records() if record.pod_uid in active]

    def records_of(self, pod_uid: str, container: str) -> Mapping[str, DeviceRecord]:
        """One container's allocations, by resource."""
        return self._boot.devices.records.of_container(pod_uid, container) if self._boot is not None else {}

    def allocated(self, resource: str) -> frozenset[str]:
        """The IDs that the device manager counts as allocated: not always those of the records."""
        return self._boot.devices.allocated(resource) if self._boot is not None else frozenset()

    def capacity(self) -> dict[str, tuple[int, int]]:
        """By resource: devices, healthy devices. The Node object follows at the next status update."""
        return self._boot.devices.capacity() if self._boot is not None else {}

    def devices(self, resource: str) -> dict[str, bool]:
        """The plugin's devices and whether the kubelet holds them for healthy, in the plugin's order."""
        return self._boot.devices.devices(resource) if self._boot is not None else {}

    def listed_pods(self) -> list[KnownPod]:
        """What PodResources List would name now."""
        return self._boot.listed_pods() if self._boot is not None else []

    async def wait_for(self, found: Callable[[], T], deadline_s: float = 60.0, what: str = "") -> T:
        """The first true value of `found`; raises TimeoutError naming `what`."""
        return await self.signal.wait_until(found, deadline_s, what)

    def kill_container(self, namespace: str, pod_name: str, container: str) -> None:
        """Ends a container's process as a crash would. Raises NotFound."""
        uid = self._api.pod(namespace, pod_name)["metadata"]["uid"]
        found = self.runtime.find(uid, container)
        if found is None or not found.is_running:
            raise NotFound(f"no running container {container} in pod {namespace}/{pod_name}")
        self.runtime.kill(found)
