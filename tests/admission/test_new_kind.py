"""A kind of resource that the agent does not have is a row and its rule: here slices, eight of each GPU."""

from __future__ import annotations

from fractions import Fraction

from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.identity import Target
from gpushare_agent.agent.admission.decisions.recovery import Records, rebuild
from gpushare_agent.agent.admission.device_tables import DeviceTables
from gpushare_agent.agent.kubelet.records import ListedContainer, ListedPod
from gpushare_agent.core.kit.supervision import forever
from gpushare_agent.core.model.allocations import Allocation, Charge, ContainerEdits
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import Gpu
from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.names import MIB, VCORE_RESOURCE, VMEMORY_RESOURCE
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import (
    KINDS,
    Measure,
    ReplicaLayout,
    ResourceKind,
    ResourceNames,
    ServedUnits,
    UnitLayout,
)
from gpushare_agent.core.model.shares import ShareLimits, share_limits
from gpushare_agent.core.node_report.annotations import allocations_by_pod
from tests.admission.test_admission import Scripted
from tests.agent.support_agent import poll_until
from tests.cluster.support_kube import running
from tests.observability.support_usage import facts, snapshot
from tests.support_core import allocation, container, ids, inventory, pod
from tests.support_json import written_node
from tests.support_node import FreeIsolations

RESOURCE = "example.com/slice"


class Eighths(UnitLayout, frozen=True, kw_only=True):
    """The rule: every GPU serves eight."""

    def served(self, gpu: Gpu) -> ServedUnits | None:
        return ServedUnits(RESOURCE, ReplicaLayout(8, self.sharing))


SLICE = ResourceKind(
    value="slice",
    socket="slice",
    measure=Measure.PART,
    names=lambda names: (RESOURCE,),
    layout=lambda names: Eighths(sharing=Sharing.SHARES, is_packed=True),
)
NAMES = ResourceNames(table=(*KINDS, SLICE))
GPUS = inventory(2)


class Kubelet:
    """The agent's admission, and the device lists that it sends."""

    def __init__(self, *pods: Pod) -> None:
        self.agent, self.ids = Scripted(*pods, names=NAMES), DeviceIds()
        self.tables = DeviceTables(node=self.agent.node, isolation=FreeIsolations(), ids=self.ids)

    def healthy(self, resource: str = RESOURCE) -> list[str]:
        self.tables.refresh()
        return [row.id for row in self.tables.tables[resource].devices if row.healthy]

    async def admit(self, owner: Pod) -> ContainerEdits | Refused:
        """Of the devices that no container has, those that the agent prefers."""
        self.agent.next = Target(pod=owner, container=owner.containers[0])
        self.tables.refresh()
        listed = self.ids.read([row.id for row in self.tables.tables[RESOURCE].devices])
        free = [device for device in listed if device not in self.agent.cache.holders(SLICE)]
        size = owner.containers[0].requests[RESOURCE]
        chosen = list(await self.agent.admission.preferred(RESOURCE, free, [], size))
        return await self.agent.admission.allocate(RESOURCE, chosen or free[:size])


def asks(name: str, **requests: int) -> Pod:
    known = {"slices": RESOURCE, "cores": VCORE_RESOURCE, "blocks": VMEMORY_RESOURCE}
    return pod(name, replace(container(), requests={known[word]: count for word, count in requests.items()}))


async def admitted() -> tuple[Kubelet, Allocation]:
    """Three slices of one GPU."""
    kubelet = Kubelet(owner := asks("a", slices=3))
    edits = await kubelet.admit(owner)
    assert isinstance(edits, ContainerEdits) and ("NVIDIA_VISIBLE_DEVICES", "GPU-0") in edits.env
    (slices,) = kubelet.agent.cache
    assert slices.parts == {"GPU-0": Fraction(3, 8)}
    return kubelet, slices


def test_its_name_has_a_device_plugin_of_its_own() -> None:
    """Next to those of the kinds of before."""
    assert NAMES.names == (VCORE_RESOURCE, VMEMORY_RESOURCE, RESOURCE)
    assert NAMES.by_name[RESOURCE] is SLICE and NAMES.socket(RESOURCE) == "slice"
    kubelet = Kubelet()
    assert [NAMES.units(gpu, SLICE) for gpu in GPUS.gpus] == [8, 8] and len(kubelet.healthy()) == 16
    assert all(text.endswith("/8s") for text in kubelet.healthy())


async def test_slices_are_charged_to_the_gpu_that_they_are_of() -> None:
    """Its compute and its memory: the device lists of the other kinds offer so much less."""
    kubelet, _ = await admitted()
    assert kubelet.agent.cache.charges() == {"GPU-0": Charge(part=Fraction(3, 8), shares=1)}
    assert len(kubelet.healthy(VCORE_RESOURCE)) == 200 - 38 and len(kubelet.healthy(VMEMORY_RESOURCE)) == 192 - 36
    kubelet.agent.cache.put(allocation(asks("b"), "main", ids(1, range(50)), ids(1, range(8))))
    assert len(kubelet.healthy()) == 8 + 4


async def test_a_share_beside_slices_is_followed_by_their_list() -> None:
    """The table is brought up to date after each allocation, whichever its kind."""
    kubelet, _ = await admitted()
    kubelet.agent.cache.subscribe(kubelet.tables.allocation_changed)
    async with running(lambda: forever("tables", kubelet.tables.run)):
        kubelet.agent.cache.put(allocation(asks("b"), "main", ids(1, range(50)), ids(1, range(8))))
        rows = kubelet.tables.tables[RESOURCE]
        await poll_until(lambda: sum(row.healthy for row in rows.devices) == 8 + 4, "the list of slices")


async def test_its_isolation_keeps_it_to_its_part_of_the_gpu() -> None:
    """The limits of the share, and what the node's document says of it."""
    _, slices = await admitted()
    limits = share_limits(slices, None, GPUS.by_uuid(), NAMES)
    assert limits == ShareLimits(cores=37, memory_bytes=9216 * MIB, core_limit=0, is_limited=True)
    (shown,) = written_node(snapshot(facts(slices)))["containers"]
    assert shown["units"] == {"resource": RESOURCE, "count": 3, "sharing": "shares"}


async def test_the_node_reports_it_and_explains_its_place() -> None:
    """In the annotation that the extender reads, and in the record of the decision."""
    kubelet, slices = await admitted()
    (reported,) = allocations_by_pod([slices], GPUS.gpus, kubelet.agent.pods.get, NAMES).values()
    assert reported.gpus == {0: (38, 36)}
    why = kubelet.agent.explained[-1]
    assert why is not None and [one.verdict for one in why.candidates if one.is_chosen] == ["chosen"]


async def test_what_does_not_fit_is_refused_by_its_name() -> None:
    """More than the GPUs have room for; and together with another kind, which no GPU could serve."""
    kubelet = Kubelet(many := asks("many", slices=13), mixed := asks("mixed", slices=1, cores=10))
    for gpu in range(2):
        kubelet.agent.cache.put(allocation(asks(f"share-{gpu}"), "main", ids(gpu, range(30)), ids(gpu, range(8))))
    refused = await kubelet.admit(many)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NOT_ENOUGH_CORES
    assert f"asks for 13 {RESOURCE}" in refused.detail and "13 units wanted, 10 have room" in refused.detail
    refused = await kubelet.admit(mixed)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.INVALID_REQUEST
    assert f"{RESOURCE} and {VCORE_RESOURCE} together" in refused.detail


async def test_a_restarted_agent_has_it_from_the_kubelets_records() -> None:
    """Under the same IDs."""
    kubelet, slices = await admitted()
    devices = frozenset(kubelet.ids.read([kubelet.ids.write(device) for device in slices.ids_of(SLICE)]))
    listed = ListedPod(
        namespace="default", name="a", containers=(ListedContainer(name="main", devices={RESOURCE: devices}),)
    )
    owner = kubelet.agent.pods.get(slices.key.pod_uid)
    (found,) = rebuild(Records(listed=[listed], checkpoint=[], pods=[owner]), NAMES, GPUS, slices.allocated_at)
    assert replace(found, gpu_names=slices.gpu_names) == slices
