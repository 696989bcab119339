"""Builders for the tests of Dynamic Resource Allocation: claims as the API server has them, the driver over fake parts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from itertools import count
from pathlib import Path
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.agent.admission.outcomes import DecisionLog
from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.agent.cluster.runtime_classes import RuntimeClasses
from gpushare_agent.agent.dra.claim_files import ClaimFiles
from gpushare_agent.agent.dra.claims import Claims
from gpushare_agent.agent.dra.decisions.edits import PreparedClaim
from gpushare_agent.agent.node import GpuSplit, Node
from gpushare_agent.core.claims.claim import ClaimPolicy
from gpushare_agent.core.model.allocations import ClaimRef, ContainerKey
from gpushare_agent.core.model.errors import NotFound, Refused
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.core.settings.sections import MpsSettings
from gpushare_agent.core.settings.settings import Settings
from tests.support_core import NAMES, inventory, isolation_config, mig_instance, pod
from tests.support_json import undecoded
from tests.support_node import node_of

DRIVER = "gpushare-agent"
NODE = "node"
RawClaim = dict[str, Any]


def uid_of(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012x}"


def result(request: str = "gpu", index: int = 0, *, cores: int = 40, memory: str = "16Gi", **changes: Any) -> RawClaim:
    """One of status.allocation.devices.results."""
    made = {
        "request": request,
        "driver": DRIVER,
        "pool": NODE,
        "device": f"gpu-{index}",
        "shareID": uid_of(0xFFFF),
        "consumedCapacity": {"cores": str(cores), "memory": memory},
    }
    return made | changes


def whole(request: str = "gpu", index: int = 0) -> RawClaim:
    return result(request, index, cores=100, memory="24Gi")


def admin(request: str = "admin", index: int = 0) -> RawClaim:
    """Admin access to a whole GPU, with the capacity that the API server shows of it."""
    return result(request, index, cores=100, memory="24Gi", adminAccess=True)


def raw_claim(
    *results: RawClaim,
    number: int = 1,
    config: Collection[RawClaim] = (),
    users: Collection[str] = ("p",),
    owner: str = "",
) -> RawClaim:
    """`owner` is the pod for which a template made it."""
    owners = [{"apiVersion": "v1", "kind": "Pod", "name": owner, "uid": f"uid-{owner}", "controller": True}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"namespace": "default", "name": f"claim-{number}", "uid": uid_of(number)}
        | ({"ownerReferences": owners} if owner else {}),
        "status": {
            "allocation": {"devices": {"results": list(results), "config": list(config)}},
            "reservedFor": [{"resource": "pods", "name": name, "uid": f"uid-{name}"} for name in users],
        },
    }


def share_config(source: str = "FromClaim", requests: Collection[str] = (), **fields: Any) -> RawClaim:
    parameters = {"apiVersion": "gpushare-agent/v1alpha1", "kind": "ShareConfig", **fields}
    return {"source": source, "requests": list(requests), "opaque": {"driver": DRIVER, "parameters": parameters}}


def gpu_config(
    strategy: str,
    source: str = "FromClaim",
    requests: Collection[str] = (),
    kind: str = "GpuConfig",
    **sharing: Any,
) -> RawClaim:
    """The configuration of NVIDIA's driver."""
    parameters = {
        "apiVersion": "resource.nvidia.com/v1beta1",
        "kind": kind,
        "sharing": {"strategy": strategy, **sharing},
    }
    return {
        "source": source,
        "requests": list(requests),
        "opaque": {"driver": "gpu.nvidia.com", "parameters": parameters},
    }


def ref_of(number: int = 1) -> ClaimRef:
    return ClaimRef("default", f"claim-{number}", uid_of(number))


def using(name: str, *claims: tuple[str, str]) -> ContainerSpec:
    """A container that uses (claim's name in the pod, request)."""
    return ContainerSpec(name=name, kind=ContainerKind.MAIN, position=0, claims=claims)


def edit_policy(isolation: str = "mps", *allowed: str, is_memory_limited_by_agent: bool = False) -> EditPolicy:
    return EditPolicy(
        names=NAMES,
        config=isolation_config(
            is_memory_limited_by_agent=is_memory_limited_by_agent,
            mps=MpsSettings(pipe_directory=Path("/pipe"), shm_directory=Path("/dev/shm")),
        ),
        isolation=isolation,
        allowed=allowed,
    )


class FakeClaimApi:
    """Claims by name, as `get` answers them. `before` runs before each answer."""

    def __init__(self, *claims: RawClaim) -> None:
        self.claims = {claim["metadata"]["name"]: claim for claim in claims}
        self.before: Callable[[], None] = lambda: None
        self.gets = 0

    async def get_claim(self, namespace: str, name: str) -> Raw:
        await asyncio.sleep(0)
        self.gets += 1
        self.before()
        if name not in self.claims:
            raise NotFound(f"cannot get ResourceClaim {namespace}/{name}: the API server answered 404: no text")
        return undecoded(self.claims[name])


class ClaimedNode(Node, frozen=True, kw_only=True):
    """Claims can have the GPUs that the test says."""

    claimable: set[GpuUuid]

    @property
    def gpu_split(self) -> GpuSplit:
        return GpuSplit(claimable=frozenset(self.claimable))


class FakeInstances:
    """As MigInstances: makes an instance at once, of which each life has another UUID, unless `refusal` says why not."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lives = count(1)
        self.gpus: dict[str, Gpu] = {}
        self.made: set[GpuUuid] = set()
        self.held: dict[str, set[str]] = {}
        self.holds = 0
        self.waits: list[float] = []
        self.refusal: Refused | None = None

    def restore(self, held: dict[str, dict[str, GpuUuid]]) -> None:
        self.held = {uid: {*places} for uid, places in held.items()}

    async def hold(self, uid: str, places: Collection[str], at_most_s: float = 0.0) -> Refused | None:
        self.holds += 1
        self.waits.append(at_most_s)
        self.held.setdefault(uid, set()).update(places)
        await asyncio.sleep(0)
        if self.refusal is None:
            for name in {*places} - self.gpus.keys():
                self._make(name)
        return self.refusal

    def release(self, uid: str) -> None:
        self.held.pop(uid, None)

    def lose(self) -> None:
        """All of them, as a reboot or a person does it."""
        inventory = self._driver.node.inventory
        lost = {gpu.uuid for gpu in self.gpus.values()}
        others = tuple(gpu for gpu in inventory.current.gpus if gpu.uuid not in lost)
        inventory.current = replace(inventory.current, gpus=others)
        self.gpus.clear()

    def _make(self, name: str) -> None:
        life, inventory = next(self._lives), self._driver.node.inventory
        start = int(name.rpartition("-")[2])
        gpu = mig_instance(20 + life, 0, start)
        assert gpu.mig is not None
        place = replace(gpu.mig, gi_cap=100 + life, ci_cap=200 + life, caps_major=511, start=start)
        self.gpus[name] = gpu = replace(gpu, uuid=GpuUuid(f"MIG-{life}"), mig=place)
        self.made.add(gpu.uuid)
        self._driver.claimable.add(gpu.uuid)
        inventory.current = replace(inventory.current, gpus=(*inventory.current.gpus, gpu))


class Driver:
    """The claims of a node of two GPUs of 24 GiB over real files; everything else is the test's. `policy` as ClaimPolicy."""

    def __init__(
        self,
        directory: Path,
        *claims: RawClaim,
        gpus: int = 2,
        wait_s: float = 0.0,
        cdi: Path | None = None,
        **policy: bool,
    ) -> None:
        self.directory, self.cdi = directory, cdi or directory / "cdi"
        self.api = FakeClaimApi(*claims)
        self.store = PodStore()
        self.decisions = DecisionLog(100)
        self.counted: list[tuple[str, str, str]] = []
        self.gpus = inventory(gpus)
        self.claimable = {gpu.uuid for gpu in self.gpus.gpus}
        self.policy, self.claim_policy = edit_policy(), ClaimPolicy(**policy)
        self.prepared_keys: list[ContainerKey] = []
        self.refusal: Refused | None = None
        self.unavailable = ""
        self.wait_s = wait_s
        self.mig = FakeInstances(self)
        self.cdi_watch: Any = None
        self.host, self.warnings = self, list[tuple[str, str, str]]()
        self.claims = self.new_claims()
        users: dict[str, list[str]] = {}
        for claim in claims:
            for user in claim["status"]["reservedFor"]:
                users.setdefault(user["name"], []).append(claim["metadata"]["name"])
        for name, own in users.items():
            self.pod(name, *(using(one, (one, "")) for one in own), claims={one: one for one in own})

    def new_claims(self) -> Claims:
        """As another process of the agent would make them: over the same files, with a ledger of its own."""
        self.node = node_of(
            replace(self.gpus, gpus=(*self.gpus.gpus, *self.mig.gpus.values())),
            settings=Settings(node_name=NODE),
            kind=ClaimedNode,
            metrics=self,
            pods=self.store,
            decisions=self.decisions,
            claimable=self.claimable,
        )
        self.cache = self.node.cache
        self.files = ClaimFiles(self.directory / "records", self.cdi)
        made = Claims(
            node=self.node,
            policy=lambda: self.policy,
            claim_policy=self.claim_policy,
            runtime_classes=RuntimeClasses(),
            files=self.files,
            isolation=self,
            mig=self.mig,
            pods_timeout_s=0.5,
            prepare_wait_s=self.wait_s,
        )
        made.attach(self.api)
        self.cache.subscribe(lambda _old, _new: made.changed())
        return made

    async def restart(self) -> None:
        """Of the agent, which reads its files."""
        self.claims = self.new_claims()
        await self.claims.restore()

    def admission(self, resource: str, outcome: str, reason: str) -> None:
        self.counted.append((resource, outcome, reason))

    def pod(self, name: str, *containers: ContainerSpec, claims: dict[str, str]) -> None:
        self.store.upsert(pod(name, *containers, claims=claims))

    def pod_with_both(self) -> None:
        """A pod whose one container uses both claims."""
        self.pod("p", using("x", ("one", ""), ("two", "")), claims={"one": "claim-1", "two": "claim-2"})

    def specs(self) -> list[str]:
        return sorted(path.name for path in self.cdi.glob("*"))

    def records(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "records").glob("*"))

    # As Isolations:

    def unavailable_reason(self, isolation: str) -> str:
        return self.unavailable

    def warn_of(self, key: ContainerKey, reason: str, text: str) -> None:
        self.warnings += [(pod.name, reason, text) for pod in self.node.claim_pods.using(key.pod_uid)]

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        self.prepared_keys += keys
        await asyncio.sleep(0)
        return self.refusal


async def prepared(driver: Driver, number: int = 1) -> PreparedClaim:
    made = await driver.claims.prepare(ref_of(number))
    assert isinstance(made, PreparedClaim), made
    return made
