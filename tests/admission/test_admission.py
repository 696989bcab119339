"""The admission service: plans, bookings, refusals, and what it undoes."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.admission import Admission, RefusedPods
from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.agent.admission.decisions.decide import Decision
from gpushare_agent.agent.admission.decisions.identity import Call, Known, Target, next_container_of
from gpushare_agent.agent.admission.decisions.ledger import Policy
from gpushare_agent.agent.admission.identification import ListInside
from gpushare_agent.agent.delivery.device_lists import NodeDevices
from gpushare_agent.agent.kubelet.pod_resources import PodListing, PodResourcesGate
from gpushare_agent.agent.kubelet.records import CheckpointEntry, read_checkpoint
from gpushare_agent.core.model.allocations import Allocation, ContainerEdits, ContainerKey
from gpushare_agent.core.model.decision_records import Asked
from gpushare_agent.core.model.errors import RefusalReason, Refused, Unavailable
from gpushare_agent.core.model.names import VCORE_RESOURCE as CORE
from gpushare_agent.core.model.names import VMEMORY_RESOURCE as MEMORY
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.wire.v1beta1 import ContainerAllocateResponse, DeviceSpec, Mount
from tests.support_core import NAMES, container, ids, inventory, isolation_config, known, pod, used_cores, written
from tests.support_node import node_of


class Scripted:
    """Names the target of the next GetPreferredAllocation; records outcomes; has the kubelet's checkpoint."""

    def __init__(self, *pods: Pod, names: ResourceNames = NAMES) -> None:
        self.names = names
        self.node = node_of(names=names, metrics=self)
        self.pods, self.cache = self.node.pods, self.node.cache
        self.pods.replace_all(pods)
        self.next: Target | Refused | None = None
        self.checkpoint: list[CheckpointEntry] | None = []
        self.refused_pods = RefusedPods()
        self.outcomes: list[str] = []
        self.explained: list[Decision | None] = []
        self.waits = self.reads = 0
        self.prepared: list[ContainerKey] = []
        self.ahead: list[ContainerKey] = []
        self.not_prepared: Refused | None = None
        self.on_wait = lambda: False
        config = isolation_config()
        self.edits = EditPolicy(names=names, config=config, isolation="none")
        gate = PodResourcesGate(self, clock=time.monotonic)
        self.admission = Admission(
            node=self.node,
            gate=gate,
            identification=self,
            policy=Policy(names=names, node_name="node"),
            edits=lambda: self.edits,
            refused_pods=self.refused_pods,
            observer=self,
            records=self,
            isolation=self,
            garbage=self,
            clock=time.monotonic,
        )

    async def list_entries(self, *_settled: object, timeout_s: float) -> Sequence[PodListing]:
        raise AssertionError("no List here")

    async def identify(self, call: Call, inside: ListInside) -> Target | Refused:
        assert self.next is not None
        return self.next

    def next_container(self, resource: str, ids: Sequence[str]) -> Target | None:
        pods = known(*self.pods.pods()).pods
        facts = Known(pods=pods, allocations=self.cache.view(), refused=self.refused_pods, names=self.names)
        return next_container_of(ids, resource, self.pods.get, facts)

    async def read(self) -> Sequence[CheckpointEntry]:
        self.reads += 1
        if self.checkpoint is None:
            raise Unavailable("no checkpoint")
        return self.checkpoint

    def ours(self, entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
        return list(entries)

    async def prepare(self, keys: Collection[ContainerKey]) -> Refused | None:
        self.prepared.extend(keys)
        return self.not_prepared

    def prepare_ahead(self, key: ContainerKey) -> None:
        self.ahead.append(key)

    def unavailable_reason(self, isolation: str) -> str:
        return ""

    async def wait_for_release(self) -> bool:
        self.waits += 1
        return self.on_wait()

    def allocated(self, decision: Decision, allocation: Allocation) -> None:
        target = decision.target
        assert target is not None
        self.outcomes.append(f"{target.pod.name}/{target.container.name} {self.names.by_name.get(decision.resource)}")
        self.explained.append(decision if decision.placed is not None else None)

    def refused(self, decision: Decision, refused: Refused) -> None:
        self.outcomes.append(f"refused {refused.reason}")
        self.explained.append(decision)

    def start_refused(self, target: Target | None, resource: str, refused: Refused) -> None:
        self.outcomes.append(f"start refused {target.pod.name if target else '?'} {refused.reason}")

    def taken_ids_offered(self, resource: str, count: int) -> None:
        self.outcomes.append(f"taken {count}")

    def held(self, name: str = "main", kind: ResourceKind = ResourceKind.VCORE) -> list[str]:
        """What the container of this name has."""
        [found] = [one for one in self.cache if one.key.container == name]
        return sorted(found.ids_of(kind))

    async def admit(self, owner: Pod, name: str, resource: str, must: Sequence[str] = ()) -> ContainerEdits | Refused:
        """A whole call pair, the IDs as preferred."""
        found = owner.container(name)
        assert found is not None
        self.next = Target(pod=owner, container=found)
        size = found.requests[resource]
        offered = [i for gpu in range(2) for i in ids(gpu, range(100 if resource == CORE else 96))]
        chosen = list(await self.admission.preferred(resource, offered, must, size))
        chosen += [i for i in offered if i not in chosen][: size - len(chosen)]
        return await self.admission.allocate(resource, chosen)


def chain(*more: ContainerSpec) -> Pod:
    """An init container, and a sidecar that takes its IDs over."""
    init = container("i", cores=5, blocks=2, kind=ContainerKind.INIT)
    return pod("chain", init, container("s", cores=5, blocks=2, kind=ContainerKind.SIDECAR, position=1), *more)


async def test_both_resources_of_a_container_land_on_one_gpu() -> None:
    """In either order; the second call completes the allocation, of which its isolation prepares what it needs."""
    for order in ((CORE, MEMORY), (MEMORY, CORE)):
        owner = pod("a", container(cores=30, blocks=10))
        agent = Scripted(owner)
        for resource in order:
            assert isinstance(await agent.admit(owner, "main", resource), ContainerEdits)
            assert agent.ahead == [ContainerKey(owner.uid, "main")] * (resource is order[1])
        (allocation,) = agent.cache
        assert (allocation.cores, allocation.memory_blocks, allocation.gpus) == (30, 10, ("GPU-0",))
        assert len(agent.outcomes) == 2


async def test_a_refusal_frees_what_the_admission_had_booked_for_the_pod() -> None:
    """The kubelet frees the earlier containers silently; other pods keep theirs."""
    other = pod("other", container(cores=10, blocks=1))
    owner = pod("a", container("first", cores=30, blocks=10), container("second", cores=90, blocks=200))
    agent = Scripted(other, owner)
    await agent.admit(other, "main", CORE)
    await agent.admit(owner, "first", CORE)
    await agent.admit(owner, "first", MEMORY)
    result = await agent.admit(owner, "second", CORE)
    assert isinstance(result, Refused) and result.reason is RefusalReason.NOT_ENOUGH_MEMORY
    assert [a.key.pod_uid for a in agent.cache] == [other.uid]
    assert owner.uid in agent.refused_pods and other.uid not in agent.refused_pods


async def test_a_refusal_at_a_restart_frees_no_other_container_of_the_pod() -> None:
    """The pod goes on; only its container cannot come back."""
    owner = pod(
        "a", container("first", cores=30, blocks=10), container("second", cores=90, blocks=10), has_started=True
    )
    blocker = pod("b", container(cores=100), container("x", cores=60, blocks=1))
    agent = Scripted(owner, blocker)
    await agent.admit(owner, "first", CORE)
    agent.admission.kubelet_restarted()
    await agent.admit(blocker, "main", CORE)
    result = await agent.admit(owner, "second", CORE)
    assert isinstance(result, Refused)
    assert ContainerKey(owner.uid, "first") in {a.key for a in agent.cache}
    assert owner.uid not in agent.refused_pods


async def test_a_chain_of_init_sidecar_and_main_is_followed_without_being_asked() -> None:
    """The sidecar takes the init container's IDs with no GetPreferredAllocation before."""
    agent = Scripted(owner := chain(container("m", cores=10, blocks=4)))
    await agent.admit(owner, "i", CORE)
    await agent.admit(owner, "i", MEMORY)
    cores, blocks = agent.held("i"), agent.held("i", ResourceKind.VMEMORY)
    assert isinstance(await agent.admission.allocate(MEMORY, blocks), ContainerEdits)
    edits = await agent.admission.allocate(CORE, cores)
    assert isinstance(edits, ContainerEdits) and edits.env
    await agent.admit(owner, "m", CORE)
    # The sidecar has taken the five IDs for good: offering them again counts as a fault of the kubelet.
    assert agent.outcomes[2:] == ["chain/s vmemory", "chain/s vcore", "taken 5", "chain/m vcore"]
    # Nobody planned the sidecar's place, and people ask for it all the same: once, by the first of its resources.
    sidecar, further = agent.explained[2:4]
    assert sidecar and (sidecar.gpus, sidecar.asked) == (
        ("GPU-0",),
        Asked(cores=5, memory_bytes=512 << 20, must_gpus=("GPU-0",)),
    )
    assert "kubelet's IDs" in sidecar.why and further is None
    assert used_cores(agent.cache) == {"GPU-0": 15}


async def test_what_is_passed_on_is_on_the_gpu_of_the_ids_that_no_sidecar_took() -> None:
    """Also where memory comes first, whose IDs name no GPU, and the GPU of the sidecar is full."""
    late = container("j", cores=5, blocks=2, kind=ContainerKind.INIT, position=2)
    agent = Scripted(
        owner := chain(late, container("m", cores=5, blocks=2)), (other := pod("b", container(cores=95, blocks=1)))
    )
    for resource in (CORE, MEMORY):
        await agent.admit(owner, "i", resource)
    for resource, kind in ((CORE, ResourceKind.VCORE), (MEMORY, ResourceKind.VMEMORY)):
        await agent.admission.allocate(resource, agent.held("i", kind))
    assert isinstance(await agent.admit(other, "main", CORE), ContainerEdits)
    for resource in (CORE, MEMORY):
        assert isinstance(await agent.admit(owner, "j", resource), ContainerEdits)
    for resource, kind in ((MEMORY, ResourceKind.VMEMORY), (CORE, ResourceKind.VCORE)):
        assert isinstance(await agent.admission.allocate(resource, agent.held("j", kind)), ContainerEdits)
    assert used_cores(agent.cache) == {"GPU-0": 100, "GPU-1": 5}


async def test_the_same_allocate_again_gets_the_same_answer() -> None:
    """Isolation included, and the cache unchanged; once the container runs it is refused."""
    owner = pod("a", container(cores=10, blocks=1))
    agent = Scripted(owner)
    agent.edits = replace(agent.edits, isolation="vcuda")
    first = await agent.admit(owner, "main", CORE)
    (allocation,) = agent.cache
    assert isinstance(first, ContainerEdits) and [m.container_path for m in first.mounts] == ["/etc/vcuda"]
    assert await agent.admission.allocate(CORE, agent.held()) == first and list(agent.cache) == [allocation]
    agent.pods.upsert(replace(owner, running=frozenset({"main"})))
    assert isinstance(await agent.admission.allocate(CORE, agent.held()), Refused)


async def test_an_allocate_without_a_plan_is_refused() -> None:
    """The agent restarted between the two calls, and the text names what to do; a plan is carried out once; those of a
    stopped kubelet are forgotten, for another pod's Allocate must not carry them out."""
    owner = pod("a", container(cores=10, blocks=1))
    agent = Scripted(owner)
    result = await agent.admission.allocate(CORE, ids(0, range(10)))
    assert isinstance(result, Refused) and result.reason is RefusalReason.NOT_READY
    assert "Create the pod again" in result.detail and len(agent.cache) == 0
    assert isinstance(await agent.admit(owner, "main", CORE), ContainerEdits)
    assert isinstance(await agent.admission.allocate(CORE, ids(1, range(10))), Refused)
    agent.cache.release_pod(owner.uid)
    await agent.admission.preferred(CORE, ids(0, range(100)), (), 10)
    agent.admission.kubelet_restarted()
    assert isinstance(await agent.admission.allocate(CORE, ids(0, range(10))), Refused)


async def test_an_unidentified_call_answers_and_its_allocate_says_why() -> None:
    """GetPreferredAllocation must not fail: its error would hide the reason."""
    agent = Scripted()
    agent.next = Refused(reason=RefusalReason.POD_UNKNOWN, detail="unknown")
    assert list(await agent.admission.preferred(CORE, ids(0, range(100)), (), 10)) == []
    assert await agent.admission.allocate(CORE, ids(0, range(10))) == agent.next


async def test_allocations_that_are_released_one_after_the_other_are_all_waited_for() -> None:
    """The end of a pod may reach the kubelet before it reaches us; several end at once."""
    olds = [pod(f"old{n}", container(cores=30, blocks=20)) for n in range(3)]
    new = pod("new", container(cores=90, blocks=60))
    agent = Scripted(*olds, new)
    agent.node.inventory.current = inventory(1)
    for old in olds:
        assert isinstance(await agent.admit(old, "main", CORE), ContainerEdits)
    ending = list(olds)

    def end_one() -> bool:
        if not ending:
            return False
        agent.cache.release_pod(ending.pop().uid)
        return True

    agent.on_wait = end_one
    assert isinstance(await agent.admit(new, "main", CORE), ContainerEdits)
    assert agent.waits == 3


async def test_a_container_starts_with_the_ids_of_the_cache_or_of_the_checkpoint() -> None:
    """Lost allocations are adopted; unknown ones are refused."""
    owner = pod("a", container(cores=10, blocks=1))
    agent = Scripted(owner)
    await agent.admit(owner, "main", CORE)
    assert await agent.admission.pre_start(CORE, agent.held()) is None
    lost = ids(1, range(20))
    assert isinstance(await agent.admission.pre_start(CORE, lost), Refused)
    agent.checkpoint = written("u9", "main", lost, ids(1, range(3)))
    assert await agent.admission.pre_start(CORE, lost) is None
    taken = agent.cache.get(ContainerKey(PodUid("u9"), "main"))
    assert taken is not None and taken.memory_blocks == 3
    agent.checkpoint = None
    assert isinstance(await agent.admission.pre_start(CORE, ids(1, range(40, 50))), Refused)
    assert isinstance(await agent.admission.pre_start(CORE, []), Refused)


def answer(*devices: str, mounts: Sequence[str] = (), **variables: str) -> str:
    """As the kubelet has it in its checkpoint."""
    nodes = [DeviceSpec(host_path=path, container_path=path, permissions="rw") for path in devices]
    places = [Mount(host_path="/dev/null", container_path=path) for path in mounts]
    return base64.b64encode(bytes(ContainerAllocateResponse(envs=variables, devices=nodes, mounts=places))).decode()


@pytest.mark.parametrize("by_this_agent", [True, False])
async def test_a_container_does_not_start_with_the_number_of_another_gpu(by_this_agent: bool) -> None:
    """The kubelet replays what was answered before a boot. Also after a restart of the agent, which answered nothing."""
    owner = pod("a", container(cores=10, blocks=1))
    agent = Scripted(owner)
    await agent.admit(owner, "main", CORE)
    (allocation,) = agent.cache
    cores = agent.held()
    if not by_this_agent:
        [entry] = written(owner.uid, "main", cores, [])
        agent.checkpoint = [replace(entry, gpu_names=frozenset({"/dev/nvidia0"}))]
        agent.cache.put(replace(allocation, gpu_names=None))
    assert await agent.admission.pre_start(CORE, cores) is None
    agent.checkpoint = None  # and with another agent's it is read once
    assert await agent.admission.pre_start(CORE, cores) is None and agent.reads == int(not by_this_agent)
    found = agent.node.inventory.current
    [first, second] = found.gpus
    for gpus, why in (
        ((replace(first, minor=1), replace(second, minor=0)), "other numbers than /dev/nvidia0"),
        ((replace(first, minor=-1), replace(second, minor=0)), "other numbers than /dev/nvidia0"),
        ((replace(second, index=0, minor=0),), "not shown by the driver"),
    ):
        agent.prepared.clear()
        agent.node.inventory.current = replace(found, gpus=gpus)
        refused = await agent.admission.pre_start(CORE, cores)
        assert isinstance(refused, Refused) and refused.reason is RefusalReason.WRONG_GPUS and why in refused.detail
        assert first.uuid in refused.detail and "Delete the pod" in refused.detail and not agent.prepared
    agent.node.inventory.current = found
    assert await agent.admission.pre_start(CORE, cores) is None
    agent.node.inventory.is_read = False
    refused = await agent.admission.pre_start(CORE, cores)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.NOT_READY


@pytest.mark.parametrize(
    ("given", "may_start"),
    [
        (answer("/dev/nvidia1", "/dev/nvidia-uvm", "/dev/fuse"), True),
        (answer("/dev/nvidia0"), False),
        (answer("/dev/nvidia-caps/nvidia-cap1"), True),
        (answer("/dev/nvidia-caps/nvidia-cap2"), False),
        (answer(NVIDIA_VISIBLE_DEVICES="3"), True),
        (answer(NVIDIA_VISIBLE_DEVICES="0"), False),
        (answer(NVIDIA_VISIBLE_DEVICES="0:1"), False),
        (answer(NVIDIA_VISIBLE_DEVICES="GPU-0", ALIYUN_COM_GPU_MEM_IDX="0"), True),
        (answer(NVIDIA_VISIBLE_DEVICES="void", mounts=("/var/run/nvidia-container-devices/0",)), False),
        ("", True),
        ("%%", True),
        ("/////w==", True),
    ],
)
async def test_what_an_earlier_agent_answered_is_compared_with_the_numbers_of_now(
    given: str, may_start: bool, tmp_path: Path
) -> None:
    """Its node, and the index that the driver has for it now; a node that every container gets is no GPU's."""
    owner = pod("a", container(cores=10, blocks=1))
    agent = Scripted(owner)
    agent.edits = replace(agent.edits, devices=NodeDevices(extra=("/dev/nvidia-caps/nvidia-cap1",)))
    await agent.admit(owner, "main", CORE)
    (allocation,) = agent.cache
    found = agent.node.inventory.current
    gpus = replace(found.gpus[0], minor=1, driver_index=3), replace(found.gpus[1], minor=0, driver_index=0)
    agent.node.inventory.current = replace(found, gpus=gpus)
    cores = agent.held()
    entry = {"PodUID": owner.uid, "ContainerName": "main", "ResourceName": CORE, "DeviceIDs": {"-1": cores}}
    file = tmp_path / "kubelet_internal_checkpoint"
    file.write_text(json.dumps({"Data": {"PodDeviceEntries": [{**entry, "AllocResp": given}]}}))
    agent.checkpoint = [*read_checkpoint(file)]
    agent.cache.put(replace(allocation, gpu_names=None))
    assert (await agent.admission.pre_start(CORE, cores) is None) is may_start
    agent.node.inventory.current = replace(found, gpus=gpus[1:])
    assert await agent.admission.pre_start(CORE, cores) is not None, "its GPU is gone"


async def test_a_stale_plan_does_not_claim_the_ids_of_a_successor_container() -> None:
    """A GetPreferredAllocation whose Allocate never came asked for as many units as a sidecar now takes over."""
    stale = pod("stale", container(cores=5, blocks=2))
    agent = Scripted(stale, owner := chain())
    await agent.admit(owner, "i", CORE)
    agent.next = Target(pod=stale, container=stale.containers[0])
    await agent.admission.preferred(CORE, ids(1, range(100)), (), 5)
    assert isinstance(await agent.admission.allocate(CORE, agent.held("i")), ContainerEdits)
    assert agent.outcomes[-1] == "chain/s vcore"


async def test_what_the_isolation_needs_is_prepared_before_a_container_starts() -> None:
    """Init container and sidecar have the same IDs: which of them starts is unknown, so both are prepared. The owner of a
    start that is refused gets the reason."""
    agent = Scripted(owner := chain())
    await agent.admit(owner, "i", CORE)
    cores = agent.held("i")
    await agent.admission.allocate(CORE, cores)
    assert await agent.admission.pre_start(CORE, cores) is None
    assert agent.prepared == [ContainerKey(owner.uid, "i"), ContainerKey(owner.uid, "s")]
    agent.not_prepared = Refused(reason=RefusalReason.NOT_READY, detail="no space")
    assert await agent.admission.pre_start(CORE, cores) is agent.not_prepared
    assert agent.outcomes[-1] == "start refused chain NotReady"
