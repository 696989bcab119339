"""Random lives of pods with claims on the embedded node: whatever happens, no GPU has more than it holds, and nothing stays.

Kubelet, scheduler and API server are the sandbox's; the agent's claims, records, CDI specs, slice and sockets are the real
ones, in this process. Its kill is a cancellation that lets the files be as they are; the next agent has nothing else. The
device plugins are their ledger entries: admission decides and commits in one step, as here.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from msgspec import Raw, json
from msgspec.structs import replace

from gpushare_agent.agent.dra.plugin import DraPlugin, DraRegistration
from gpushare_agent.agent.dra.slices import SlicePublisher
from gpushare_agent.agent.node import GpuSplit, gpu_split, plugins_devices
from gpushare_agent.core.claims.devices import DevicePolicy, slice_devices
from gpushare_agent.core.kube.claims import ResourceSlice, SliceContent
from gpushare_agent.core.kube.pods import parse_pod, read_pod_json
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.sandbox.kubelet.pod_worker import PREPARE_FAILED
from gpushare_agent.sandbox.node import EmbeddedNode, running_task
from gpushare_agent.sandbox.pod_manifest import IGNORE_TERM_ANNOTATION, RUN_SECONDS_ANNOTATION, claim_names
from tests.dra.support_claims import NODE, Driver, edit_policy, ref_of
from tests.sandbox.support_sandbox import SHORT_TIMES, open_test_node, pod
from tests.support_core import NAMES, allocation, ids, used_blocks, used_cores
from tests.support_core import pod as core_pod
from tests.support_json import undecoded

GPUS, STEPS = 4, 60
CLASS = "gpu.gpushare-agent"
TIMES = replace(
    SHORT_TIMES, registry_poll_s=0.01, slice_wipe_s=0.02, driver_away_s=0.1, prepare_retry_s=(0.02, 0.1),
    unprepare_retry_s=0.02, claims_reconcile_s=0.05,
)  # fmt: skip
POLICY = DevicePolicy(block_mib=NAMES.memory_block_mib, order="binpack", taint_effect="NoSchedule", isolation="vcuda")


class ApiOfAgent:
    """What the agent asks of the API server, in process."""

    def __init__(self, node: EmbeddedNode) -> None:
        self._api = node.api

    async def get_claim(self, namespace: str, name: str) -> Raw:
        await asyncio.sleep(0)
        return undecoded(self._api.store.get("resourceclaims", (namespace, name)))

    async def get_node(self, name: str) -> Raw:
        return undecoded(self._api.store.get("nodes", ("", name)))

    async def create_slice(self, made: ResourceSlice) -> Raw:
        return undecoded(self._api.create("resourceslices", json.decode(json.encode(made))))

    async def replace_slice(self, name: str, made: ResourceSlice) -> Raw:
        return undecoded(self._api.store.replace("resourceslices", json.decode(json.encode(made))))

    async def delete_slice(self, name: str) -> None:
        self._api.delete("resourceslices", ("", name))


class World:
    """The node, one agent at a time, and the device plugins' pods."""

    def __init__(self, node: EmbeddedNode, rng: Random) -> None:
        self.node, self.rng = node, rng
        self.driver = Driver(node.paths.state, gpus=GPUS, wait_s=0.05, cdi=node.paths.cdi)
        self.driver.policy = edit_policy("none")  # which refuses nothing
        self.booked: set[str] = set()
        """UIDs of all claims that ever were."""
        self.chosen: set[str] = {"all"}
        self.plugins: dict[str, Allocation] = {}
        self.numbers = iter(range(1000))
        self._agent: AsyncExitStack | None = None

    # --- the agent ---

    async def start_agent(self) -> None:
        self.driver.api = ApiOfAgent(self.node)  # type: ignore[assignment]
        self.driver.claims = self.driver.new_claims()
        self.driver.claimable = _Claimable(self)
        cache = self.driver.cache
        for one in self.plugins.values():
            cache.put(one)
        publisher = SlicePublisher(node_name=NODE, desired=self.slices)
        cache.subscribe(lambda _old, _new: self._changed(publisher))
        await self.driver.claims.restore()
        self.check()
        ready = asyncio.Event()
        ready.set()
        registration = DraRegistration(
            instance=f"{self.rng.getrandbits(32):08x}", registry=self.node.paths.plugin_registry,
            plugin_path=self.node.paths.dra_plugin, services=[DraPlugin(self.driver.claims, ready)],
        )  # fmt: skip
        self.publisher = publisher
        self._agent = AsyncExitStack()
        known, api = registration.registration.registered, ApiOfAgent(self.node)
        await self._agent.enter_async_context(running_task("publisher", lambda: publisher.run(api, known)))
        await self._agent.enter_async_context(running_task("watch", lambda: self._watch(publisher)))
        await self._agent.enter_async_context(running_task("driver", registration.run))

    def _changed(self, publisher: SlicePublisher) -> None:
        self.check()
        publisher.changed()

    async def stop_agent(self) -> None:
        assert self._agent is not None
        await self._agent.aclose()
        # Its thread would write on next to the next agent, as that of a process that has ended cannot: it is waited for.
        await self.driver.claims.unprepare(ref_of(0))

    async def _watch(self, publisher: SlicePublisher) -> None:
        """As the informers, which miss no change: the node's slices and its pods."""
        api = self.node.api
        version = api.version
        for raw in api.store.all("resourceslices"):
            publisher.put(undecoded(raw))
        publisher.list_ended((), (), str(version))
        while True:
            for raw in api.pods():
                if raw["spec"].get("nodeName"):
                    self.driver.store.upsert(parse_pod(read_pod_json(undecoded(raw)), NAMES.names))
            for change in api.store.changes_since(version):
                version = change.version
                if change.resource == "resourceslices":
                    raw = change.after or change.before or {}
                    publisher.put(undecoded(raw)) if change.after is not None else publisher.remove(
                        raw["metadata"]["name"]
                    )
            await api.wait_change(version)

    def gpu_split(self) -> GpuSplit:
        return gpu_split(self.chosen, self.driver.gpus.gpus, self.driver.cache)

    def slices(self) -> list[SliceContent]:
        mine = [gpu for gpu in self.driver.gpus.gpus if gpu.uuid in self.gpu_split().claimable]
        return [SliceContent(devices=slice_devices(mine, self.driver.gpus, self.driver.cache.charges(), {}, POLICY))]

    # --- what must always hold ---

    def check(self) -> None:
        cache, found = self.driver.cache, self.gpu_split()
        self.booked |= {one.claim.ref.uid for one in cache if one.claim is not None}
        offered = {gpu.uuid for gpu in plugins_devices(self.driver.gpus, found).gpus}
        assert not offered & found.claimable
        for gpu in self.driver.gpus.gpus:
            assert used_cores(cache).get(gpu.uuid, 0) <= CORES_PER_GPU
            assert used_blocks(cache).get(gpu.uuid, 0) <= NAMES.units(gpu, ResourceKind.VMEMORY)
            users = [one for one in cache if gpu.uuid in one.gpus]
            assert len(users) == 1 or not any(one.is_whole for one in users)
            assert len({one.claim is None for one in users}) <= 1, "both front ends use one GPU"

    # --- what may happen ---

    def create(self) -> None:
        name = f"p{next(self.numbers)}"
        requests: list[list[dict[str, Any]]] = [
            [share("gpu", str(self.rng.choice([5, 30, 60])), f"{self.rng.randint(1, 12)}Gi")],
            [share("gpu", "0", f"{self.rng.randint(1, 24)}Gi")],
            [{"name": "gpu", "exactly": {"deviceClassName": CLASS}}],
            [share("gpu", "20", "2Gi", count=2)],
            [share("a", "40", "4Gi"), share("b", "10", "1Gi")],
        ]
        claim = {"devices": {"requests": self.rng.choice(requests)}}
        self.node.api.create("resourceclaimtemplates", {"metadata": {"name": name}, "spec": {"spec": claim}})
        entry = {"name": "g", "resourceClaimTemplateName": name}
        if self.rng.random() < 0.3:
            entry = {"name": "g", "resourceClaimName": f"shared-{self.rng.randrange(2)}"}
        self._create(name, entry)

    def _create(self, name: str, entry: dict[str, str]) -> None:
        containers = [{"name": c, "image": "x", "resources": {"claims": [{"name": "g"}]}} for c in ("a", "b")]
        annotations = {}
        if self.rng.random() < 0.3:
            annotations[IGNORE_TERM_ANNOTATION] = "0.1"
        if self.rng.random() < 0.3:
            annotations[RUN_SECONDS_ANNOTATION] = "0.05"
        self.node.api.create_pod(
            pod(name, *containers, resourceClaims=[entry], annotations=annotations, restartPolicy="Never",
                terminationGracePeriodSeconds=1)
        )  # fmt: skip

    def delete(self) -> None:
        if pods := self.node.api.pods():
            name = self.rng.choice(pods)["metadata"]["name"]
            self.node.api.delete_pod("default", name, grace_period_s=self.rng.choice([None, None, 0]))

    def switch(self) -> None:
        names = [str(index) for index in range(GPUS)]
        self.chosen = self.rng.choice([{"all"}, {"all"}, set(), *(set(self.rng.sample(names, k)) for k in (2, 3))])
        self.driver.claims.changed()
        self.publisher.changed()
        self.check()

    def plugin_pod(self) -> None:
        """One comes or goes. It gets what a GPU that the plugins offer has free in the ledger."""
        cache = self.driver.cache
        if self.plugins and self.rng.random() < 0.6:
            cache.release(self.plugins.pop(self.rng.choice(sorted(self.plugins))).key)
            return
        cores = self.rng.choice([20, 50, 100])
        for gpu in plugins_devices(self.driver.gpus, self.gpu_split()).gpus:
            if used_cores(cache).get(gpu.uuid, 0) + cores <= CORES_PER_GPU:
                name = f"q{next(self.numbers)}"
                first = used_cores(cache).get(gpu.uuid, 0)
                while any(
                    set(ids(gpu.index, range(first, first + cores))) & one.ids_of(ResourceKind.VCORE) for one in cache
                ):
                    first += CORES_PER_GPU
                self.plugins[name] = allocation(core_pod(name), "c", ids(gpu.index, range(first, first + cores)), [])
                cache.put(self.plugins[name])
                return

    async def restart_agent(self) -> None:
        await self.stop_agent()
        if self.rng.random() < 0.5:
            self.delete()
        await self.start_agent()

    async def settle(self) -> None:
        """Every pod runs, has ended, or waits with a reason; all that are deleted have gone."""
        await self.node.kubelet.wait_for(lambda: all(map(self._is_steady, self.node.api.pods())), what="steady pods")
        prepared = self.driver.claims.prepared
        for raw in self.node.api.pods():
            if raw["status"]["phase"] == "Running" and RUN_SECONDS_ANNOTATION not in raw["metadata"]["annotations"]:
                assert all(self._uid(raw, name) in prepared for name in claim_names(raw).values())

    def _uid(self, raw: dict[str, Any], claim: str) -> str:
        return str(self.node.api.store.get("resourceclaims", (raw["metadata"]["namespace"], claim))["metadata"]["uid"])

    def _is_steady(self, raw: dict[str, Any]) -> bool:
        if "deletionTimestamp" in raw["metadata"] or raw["status"]["phase"] != "Pending":
            return "deletionTimestamp" not in raw["metadata"]
        conditions = raw["status"].get("conditions") or ()
        is_unschedulable = any(one["type"] == "PodScheduled" and one["status"] == "False" for one in conditions)
        events = [one for one in self.node.api.events() if one["reason"] == PREPARE_FAILED]
        return is_unschedulable or any(one["involvedObject"]["uid"] == raw["metadata"]["uid"] for one in events)


class _Claimable(set[GpuUuid]):
    """The GPUs that are claims' at the moment of asking."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __contains__(self, uuid: object) -> bool:
        return uuid in self._world.gpu_split().claimable


def share(name: str, cores: str, memory: str, **more: Any) -> dict[str, Any]:
    capacity = {"requests": {"cores": cores, "memory": memory}}
    return {"name": name, "exactly": {"deviceClassName": CLASS, "capacity": capacity, **more}}


@pytest.mark.parametrize("seed", range(4))
async def test_no_gpu_is_over_its_capacity_and_nothing_stays(seed: int) -> None:
    rng = Random(seed)
    async with open_test_node(times=TIMES, node_name=NODE, cgroups="none", seed=seed) as node:
        world = World(node, rng)
        node.kubelet.push_node_status()
        node.api.create("deviceclasses", {"metadata": {"name": CLASS}, "spec": {}})
        for number in range(2):
            claim = {"devices": {"requests": [share("gpu", "15", "2Gi")]}}
            node.api.create("resourceclaims", {"metadata": {"name": f"shared-{number}"}, "spec": claim})
        await world.start_agent()
        try:
            world.create()  # the slice may have to come a second time
            await node.kubelet.wait_for(lambda: world.booked, what="a prepared claim")
            for _ in range(STEPS):
                what = rng.choices(
                    ["create", "delete", "plugin", "switch", "restart-agent", "restart-kubelet", "settle"],
                    [10, 5, 3, 1, 2, 1, 5],
                )[0]
                match what:
                    case "create":
                        world.create()
                    case "delete":
                        world.delete()
                    case "plugin":
                        world.plugin_pod()
                    case "switch":
                        world.switch()
                    case "restart-agent":
                        await world.restart_agent()
                    case "restart-kubelet":
                        await node.kubelet.restart()
                    case "settle":
                        await world.settle()
                world.check()
                for _ in range(rng.choice([0, 0, 5, 50, 500])):  # so much of what goes on goes on before the next
                    await asyncio.sleep(0)
            for raw in node.api.pods():
                node.api.delete_pod("default", raw["metadata"]["name"])
            await node.kubelet.wait_for(lambda: not node.api.pods() and not node.kubelet.claims, what="all unprepared")
            assert not world.driver.claims.prepared
            assert [one for one in world.driver.cache if one.claim is not None] == []
            assert world.driver.records() == [] and world.driver.specs() == []
            claims = node.api.store.all
            await node.kubelet.wait_for(lambda: not any(raw.get("status") for raw in claims("resourceclaims")))
        finally:
            await world.stop_agent()
