"""Whole GPUs and replicas under NVIDIA's names: plan, check, what is offered, the ledger that they share with the others."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.decide import check
from gpushare_agent.agent.admission.decisions.identity import Target
from gpushare_agent.agent.admission.decisions.ledger import Case, Policy
from gpushare_agent.agent.admission.decisions.recovery import Records, rebuild
from gpushare_agent.agent.admission.device_tables import Missing, offered_ids, unit_ids, withheld
from gpushare_agent.agent.kubelet.records import CheckpointEntry
from gpushare_agent.core.model.allocations import NO_CHARGE
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import Refused
from gpushare_agent.core.model.gpus import GpuInventory, Health
from gpushare_agent.core.model.isolation import Sharing
from gpushare_agent.core.model.mig import MigPlace
from gpushare_agent.core.model.names import CORES_PER_GPU, VCORE_RESOURCE, VMEMORY_RESOURCE, GpuUuid, PodUid, unit_id
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import NvidiaNames, ReplicaLayout, ResourceKind, ResourceNames, replica_layout
from tests.placement.support_placement import Node
from tests.support_core import container, inventory, pod

GPU = "nvidia.com/gpu"
MIG = "nvidia.com/mig-"
GPU_MEM = "aliyun.com/gpu-mem"


def names(*, shares_in_mig: bool = False, **changes: object) -> ResourceNames:
    nvidia = NvidiaNames(**changes)  # type: ignore[arg-type]
    profiles = ["1g.10gb", "3g.40gb"]
    return ResourceNames(gpu_mem=GPU_MEM, gpu=nvidia.resources(profiles), nvidia=nvidia, shares_in_mig=shares_in_mig)


def divided() -> GpuInventory:
    """A GPU, and another one that MIG divides into two small instances and a large one."""
    whole = inventory(4)
    rows = [whole.gpus[0]]
    for number, (profile, mib) in enumerate((("1g.10gb", 9856), ("1g.10gb", 9856), ("3g.40gb", 40448)), 1):
        place = MigPlace(profile=profile, number=number, parent=GpuUuid("GPU-9"), parent_index=9, gi=number, ci=0)
        rows.append(replace(whole.gpus[number], uuid=GpuUuid(f"MIG-{number}"), memory_mib=mib, mig=place))
    return replace(whole, gpus=tuple(rows))


def asks(name: str = "main", kind: ContainerKind = ContainerKind.MAIN, **requests: int) -> ContainerSpec:
    """gpu=2 asks for 2 nvidia.com/gpu; memory for GPUShare's units; shared for nvidia.com/gpu.shared."""
    known = {
        "gpu": GPU,
        "memory": GPU_MEM,
        "shared": f"{GPU}.shared",
        "small": f"{MIG}1g.10gb",
        "large": f"{MIG}3g.40gb",
        "cores": VCORE_RESOURCE,
        "blocks": VMEMORY_RESOURCE,
    }
    return replace(container(name, kind=kind), requests={known[word]: count for word, count in requests.items()})


def node(gpus: int = 2, **changes: object) -> Node:
    return Node(inventory(gpus), Policy(names=names(**changes)), seed=1)


def admitted(world: Node, name: str, *containers: ContainerSpec) -> dict[str, tuple[int, ...]]:
    found = world.admit(pod(name, *containers))
    assert not isinstance(found, Refused), found.detail
    return found


def refused(world: Node, name: str, *containers: ContainerSpec) -> str:
    found = world.admit(pod(name, *containers))
    assert isinstance(found, Refused), found
    return found.detail


def healthy(world: Node, resource: str) -> dict[int, int]:
    """How many IDs of each GPU the kubelet may still hand out, and those that are allocated."""
    kind = world.policy.names.by_name[resource]
    ledger = world.cache.ledger(world.found)
    accounts, holders = ledger.accounts(world.policy.names), ledger.holders
    if kind is ResourceKind.GPU:
        ids = unit_ids(world.found.gpus, resource, world.policy.names.nvidia, ())
        unlike = world.policy.names.nvidia.unlike(world.found.gpus)
        kept_back = withheld(
            kind, accounts, ids, holders[kind], world.policy.names, borrowed={}, missing=Missing(units=bool(unlike))
        )
    else:
        ids = {gpu.uuid: offered_ids(gpu.uuid, world.policy.names.units(gpu, kind)) for gpu in world.found.gpus}
        kept_back = withheld(kind, accounts, ids, holders[kind], world.policy.names, borrowed={})
    return {gpu.index: sum(device not in kept_back for device in ids[gpu.uuid]) for gpu in world.found.gpus}


def test_a_gpu_given_whole_is_out_of_the_shares_and_back_when_it_is_free() -> None:
    world = node()
    owner = pod("whole", asks(gpu=1))
    assert world.admit(owner) == {"main": (0,)}
    assert healthy(world, VCORE_RESOURCE) == {0: 0, 1: 100}
    assert healthy(world, VMEMORY_RESOURCE) == {0: 0, 1: 96}
    assert healthy(world, GPU_MEM) == {0: 0, 1: 24}
    assert admitted(world, "share", asks(cores=10, blocks=4)) == {"main": (1,)}
    world.release(owner)
    assert healthy(world, VCORE_RESOURCE) == {0: 100, 1: 100}


@pytest.mark.parametrize("share", [{"cores": 10, "blocks": 4}, {"memory": 1}, {"cores": 100}])
def test_a_shared_gpu_is_given_to_nobody_whole(share: dict[str, int]) -> None:
    world = node(gpus=1)
    admitted(world, "share", asks(**share))
    assert healthy(world, GPU) == {0: 0}
    assert "only 0 of 1 GPUs are entirely free, 1 wanted" in refused(world, "whole", asks(gpu=1))


@pytest.mark.parametrize("replicas", [(), (("*", 3),)])
def test_a_gpu_that_the_pods_annotations_leave_out_is_not_given(replicas: tuple[tuple[str, int], ...]) -> None:
    """Neither as a whole nor a replica; where the kubelet insists on it, the pod is refused."""
    world = node(replicas=replicas)
    owner = pod("p", asks(gpu=1), annotations={"nvidia.com/nouse-gpuuuid": "GPU-0"})
    assert world.admit(owner) == {"main": (1,)}
    found = world.admit(pod("q", asks(gpu=1), annotations={"nvidia.com/use-gpuuuid": "GPU-9"}))
    assert isinstance(found, Refused)


@pytest.mark.parametrize(("is_packed", "expected"), [(False, [0, 1, 0, 1]), (True, [0, 0, 0, 1])])
def test_replicas_are_distributed_or_packed(is_packed: bool, expected: list[int]) -> None:
    world = node(replicas=(("*", 3),), is_packed=is_packed)
    assert [admitted(world, f"p{n}", asks(gpu=1))["main"][0] for n in range(4)] == expected


def test_a_replica_takes_its_part_exactly() -> None:
    """Of three thirds each is not rounded up; what is left of a third of the cores is a share's."""
    world = node(gpus=1, replicas=(("*", 3),))
    for n in range(2):
        admitted(world, f"p{n}", asks(gpu=1))
    assert healthy(world, VCORE_RESOURCE) == {0: 33} and healthy(world, VMEMORY_RESOURCE) == {0: 32}
    admitted(world, "last", asks(gpu=1))
    assert healthy(world, VCORE_RESOURCE) == {0: 0} and healthy(world, GPU_MEM) == {0: 0}


def test_several_replicas_are_refused_where_the_setting_says_so() -> None:
    """NVIDIA's failRequestsGreaterThanOne; whole GPUs are not meant."""
    assert refused(node(replicas=(("*", 2),), refuses_several=True), "two", asks(gpu=2)).endswith("Ask for 1.")
    assert admitted(node(refuses_several=True), "two", asks(gpu=2)) == {"main": (0, 1)}


def test_two_kinds_of_gpu_in_one_container_are_refused_with_the_cure() -> None:
    detail = refused(node(), "both", asks(gpu=1, cores=10, blocks=4))
    assert "nvidia.com/gpu and tencent.com/vcuda-core" in detail and "Ask for one of them" in detail


def test_each_gpu_serves_one_resource() -> None:
    """GPU 0 has replicas under the renamed resource, GPU 1 is given whole, GPU 2 serves shares alone."""
    policy = Policy(names=names(gpus=("0", "1"), replicas=(("0", 2),), is_renamed=True))
    world = Node(inventory(3), policy, seed=1)
    assert world.policy.names.gpu == (GPU, f"{GPU}.shared")
    assert healthy(world, GPU) == {0: 0, 1: 1, 2: 0} and healthy(world, f"{GPU}.shared") == {0: 2, 1: 0, 2: 0}
    assert admitted(world, "replica", asks(shared=1)) == {"main": (0,)}
    assert admitted(world, "whole", asks(gpu=1)) == {"main": (1,)}
    assert "too few" in refused(world, "more", asks(gpu=1))


def test_mig_instances_are_units_of_their_own_names_with_strategy_mixed() -> None:
    policy = Policy(names=names(mig_strategy="mixed", mig_names=(("3g.*", "nvidia.com/half"),)))
    assert policy.names.gpu == (GPU, f"{MIG}1g.10gb", "nvidia.com/half")
    policy = Policy(names=names(mig_strategy="mixed"))
    world = Node(divided(), policy, seed=1)
    assert admitted(world, "small", asks(small=2)) == {"main": (1, 2)}
    assert admitted(world, "large", asks(large=1)) == {"main": (3,)}
    assert admitted(world, "whole", asks(gpu=1)) == {"main": (0,)}
    assert healthy(world, f"{MIG}3g.40gb") == {0: 0, 1: 0, 2: 0, 3: 1}


def test_an_instance_is_given_whole_or_as_shares() -> None:
    """Each takes it from the others; 100 cores are no instance."""
    world = Node(divided(), Policy(names=names(mig_strategy="mixed", shares_in_mig=True)), seed=1)
    assert healthy(world, VCORE_RESOURCE) == dict.fromkeys(range(4), 100)
    assert healthy(world, VMEMORY_RESOURCE) == {0: 96, 1: 38, 2: 38, 3: 158}
    assert healthy(world, GPU_MEM) == {0: 24, 1: 9, 2: 9, 3: 39}
    # The least that fits.
    assert admitted(world, "third", asks(cores=30, blocks=20)) == {"main": (1,)}
    assert admitted(world, "rest", asks(cores=60, blocks=18)) == {"main": (1,)}
    assert healthy(world, f"{MIG}1g.10gb") == {0: 0, 1: 0, 2: 1, 3: 0}
    assert admitted(world, "whole", asks(small=1)) == {"main": (2,)}
    refused(world, "more", asks(small=1))
    assert healthy(world, VCORE_RESOURCE) == {0: 100, 1: 100, 2: 0, 3: 100}  # 90 of them are allocated
    assert admitted(world, "gpu", asks(cores=100)) == {"main": (0,)}
    assert "0 of 1 GPUs are entirely free" in refused(world, "large", asks(cores=100))
    assert admitted(world, "memory", asks(memory=30)) == {"main": (3,)}
    assert f"{MIG}3g.40gb" in refused(world, "three", asks(large=1))


def test_mig_instances_are_units_of_the_plain_name_with_strategy_single_and_none_by_default() -> None:
    alike = {"mig_strategy": "single", "gpus": ("9:1", "9:2")}
    single = Node(divided(), Policy(names=names(**alike)), seed=1)
    assert [admitted(single, f"p{n}", asks(gpu=1))["main"] for n in range(2)] == [(1,), (2,)]
    world = Node(divided(), Policy(names=names()), seed=1)
    assert healthy(world, GPU) == {0: 1, 1: 0, 2: 0, 3: 0}


ALIKE = "Divide all GPUs alike, name those that are alike in nvidia.gpus, or set nvidia.mig_strategy to mixed."


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        (("9",), "instances of 1g.10gb (9:1 9:2), instances of 3g.40gb (9:3)"),
        (("0", "9:1"), "GPUs that MIG does not divide (0), instances of 1g.10gb (9:1)"),
        (("5", "9:1"), "GPUs in MIG mode without instances (5), instances of 1g.10gb (9:1)"),
    ],
    ids=["two profiles", "a GPU without MIG", "a GPU without instances"],
)
def test_unlike_instances_are_given_to_nobody_with_strategy_single(chosen: tuple[str, ...], found: str) -> None:
    """NVIDIA's plugin does not start there: a pod could not know what it gets. Who has one keeps it, and shares go on."""
    node_gpus = divided()
    empty = replace(node_gpus.gpus[0], index=5, uuid=GpuUuid("GPU-5"), mig_mode=True)
    world = Node(
        replace(node_gpus, gpus=(*node_gpus.gpus, empty)),
        Policy(names=names(mig_strategy="single", gpus=("9:1",))),
        seed=1,
    )
    admitted(world, "earlier", asks(gpu=1))
    world.policy = Policy(names=names(mig_strategy="single", gpus=chosen))
    assert {index for index, count in healthy(world, GPU).items() if count} == {1}
    detail = refused(world, "p", asks(gpu=1))
    assert f"nvidia.com/gpu is not given: nvidia.mig_strategy is single, and the node has {found}." in detail
    assert ALIKE in detail
    # GPU 5 where it is none of those that NVIDIA's names select.
    assert admitted(world, "share", asks(cores=10, blocks=4)) in ({"main": (0,)}, {"main": (5,)})
    assert admitted(Node(node_gpus, Policy(names=names(mig_strategy="mixed")), seed=1), "p", asks(large=1))


def test_an_instance_that_exists_no_more_is_not_unlike_the_others() -> None:
    """A container has it until it ends."""
    found = divided()
    last = found.gpus[3]
    assert last.mig is not None
    gone = replace(last, mig=replace(last.mig, is_gone=True), health=Health.UNHEALTHY)
    single = NvidiaNames(mig_strategy="single", gpus=("9",))
    assert single.unlike(found.gpus) and not single.unlike((*found.gpus[:3], gone))
    assert not NvidiaNames(mig_strategy="mixed").unlike(found.gpus)


@pytest.mark.parametrize("sharing", [Sharing.MPS, Sharing.SHARES])
def test_replicas_of_instances_are_time_slices_alone(sharing: Sharing) -> None:
    """No isolation limits a part of one; NVIDIA's plugin does not start with MPS on instances. They are given whole."""
    by_name = {"mig_strategy": "mixed", "replicas": ((f"{MIG}1g.10gb", 3),)}
    assert healthy(Node(divided(), Policy(names=names(**by_name)), seed=1), f"{MIG}1g.10gb") == {0: 0, 1: 3, 2: 3, 3: 0}
    limited = names(**by_name, sharing=sharing)
    assert healthy(Node(divided(), Policy(names=limited), seed=1), f"{MIG}1g.10gb") == {0: 0, 1: 1, 2: 1, 3: 0}


@pytest.mark.parametrize(
    ("profile", "resource"),
    [("1g.10gb", f"{MIG}1g.10gb"), ("1g.10gb+me", f"{MIG}1g.10gb.me"), ("7g.80gb", f"{MIG}7g.80gb")],
)
def test_an_instances_resource_is_named_as_by_nvidias_plugin(profile: str, resource: str) -> None:
    """strings.ReplaceAll("mig-"+profile, "+", ".") in internal/rm/rm.go, v0.20.0."""
    assert NvidiaNames(mig_strategy="mixed").mig_resource(profile) == resource and len(resource) <= 63


def test_an_init_containers_gpu_is_handed_on() -> None:
    world = node(gpus=1)
    found = admitted(world, "p", asks("init", ContainerKind.INIT, gpu=1), asks(gpu=1))
    assert found == {"init": (0,), "main": (0,)}


def test_an_init_containers_gpu_is_not_handed_on_to_a_share() -> None:
    """The kubelet hands on IDs of one resource alone."""
    world = node(gpus=1)
    assert "0 cores" in refused(world, "p", asks("init", ContainerKind.INIT, gpu=1), asks(cores=10, blocks=4))
    assert not len(world.cache)


GPU_0 = GpuUuid("GPU-8f3e2b1c-1111-2222-3333-444444444444")
ENTRY = CheckpointEntry(pod_uid=PodUid("u"), container="main", resource=GPU, device_ids=frozenset())


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("8f3e2b1c-0/1", ReplicaLayout(1)),
        ("8f3e2b1c-2/4", ReplicaLayout(4)),
        ("8f3e2b1c-2/4s", ReplicaLayout(4, Sharing.SHARES)),
        ("8f3e2b1c-2/4m", ReplicaLayout(4, Sharing.MPS)),
        (GPU_0, ReplicaLayout(1)),
        (f"{GPU_0}::1", ReplicaLayout(2)),
        (f"{GPU_0}::7", ReplicaLayout(1)),
        (f"MIG-{GPU_0}/1/0::3", ReplicaLayout(1)),  # an instance of a driver before R470
    ],
)
def test_terms_are_read_from_the_ids_and_the_text_comes_back(text: str, terms: ReplicaLayout) -> None:
    """Those of NVIDIA's plugin have no count: the present one's, and where that cannot be, the whole GPU."""
    ids = DeviceIds([GPU_0])
    ids.expect_units({GPU_0: ReplicaLayout(2)})
    (device,) = ids.read([text])
    assert replica_layout(device) == terms
    assert ids.write(device) == text


def test_containers_keep_their_terms_over_a_restart_with_other_settings() -> None:
    """A quarter under a name that is served no more, and NVIDIA's whole GPU: both stay charged."""
    found = inventory(1)
    found = replace(found, gpus=(replace(found.gpus[0], uuid=GPU_0),))
    ids = DeviceIds([GPU_0])
    entries = [replace(ENTRY, device_ids=frozenset(ids.read(["8f3e2b1c-2/4"])))]
    (one,) = rebuild(
        Records(listed=(), checkpoint=entries, pods=None), names(is_renamed=True, replicas=(("*", 2),)), found, 0.0
    )
    assert one.parts == {GPU_0: Fraction(1, 4)} and one.gpu_resource == GPU and not one.is_whole
    entries = [replace(ENTRY, device_ids=frozenset(ids.read([GPU_0])))]
    (one,) = rebuild(Records(listed=(), checkpoint=entries, pods=None), names(), found, 0.0)
    assert one.is_whole and one.gpus == (GPU_0,)
    of_old_driver = [replace(ENTRY, device_ids=frozenset(ids.read([f"MIG-{GPU_0}/1/0::3"])))]
    (one,) = rebuild(Records(listed=(), checkpoint=of_old_driver, pods=None), names(), found, 0.0)
    assert one.is_whole and one.gpus == (f"MIG-{GPU_0}/1/0",)
    assert not rebuild(Records(listed=(), checkpoint=entries, pods=None), ResourceNames(), found, 0.0)


def test_what_a_container_holds_stays_listed_until_it_ends() -> None:
    """On other terms next to the present units; under NVIDIA's text of a present unit in its place."""
    found = replace(inventory(1).gpus[0], uuid=GPU_0)
    ids = DeviceIds([GPU_0])
    ids.expect_units({GPU_0: ReplicaLayout(2)})
    held = ids.read(["8f3e2b1c-2/4", f"{GPU_0}::1"])
    listed = unit_ids([found], GPU, names(replicas=(("*", 2),)).nvidia, held)[GPU_0]
    assert sorted(map(ids.write, listed)) == sorted(["8f3e2b1c-0/2", "8f3e2b1c-2/4", f"{GPU_0}::1"])


def requests() -> st.SearchStrategy[dict[str, int]]:
    return st.one_of(
        st.tuples(st.sampled_from([1, 7, 25, 50, 99]), st.sampled_from([1, 13, 40, 96])).map(
            lambda pair: {"cores": pair[0], "blocks": pair[1]}
        ),
        st.sampled_from([{"cores": 100}, {"cores": 200}]),
        st.sampled_from([{"memory": 1}, {"memory": 11}, {"memory": 24}]),
        st.sampled_from([{"gpu": 1}, {"gpu": 2}, {"gpu": 3}, {"shared": 1}, {"shared": 2}]),
        st.sampled_from([{"small": 1}, {"small": 2}, {"large": 1}]),
    )


SETTINGS = (
    {},
    {"replicas": (("*", 4),)},
    {"replicas": (("0", 3), ("*", 2)), "is_packed": True},
    {"replicas": (("0", 7),), "is_renamed": True},
    {"gpus": ("0", "2"), "replicas": (("2", 10),), "sharing": Sharing.SHARES},
    {"mig_strategy": "mixed", "replicas": ((f"{MIG}1g.10gb", 3),)},
    {"mig_strategy": "single", "gpus": ("9:1", "9:2")},
    {"mig_strategy": "mixed", "shares_in_mig": True},
    {"mig_strategy": "single", "gpus": ("9:1", "9:2"), "replicas": (("*", 3),), "shares_in_mig": True},
)


def assert_no_gpu_is_over(world: Node) -> None:
    used = world.cache.ledger(world.found)
    whole = [gpu for one in world.cache if one.is_whole for gpu in one.gpus]
    for gpu in world.found.gpus:
        charge = used.charges.get(gpu.uuid, NO_CHARGE)
        cores = charge.cores + charge.part * CORES_PER_GPU
        mib = charge.blocks * 256 + charge.units * 1024 + charge.part * gpu.memory_mib
        assert cores <= CORES_PER_GPU and mib <= gpu.memory_mib
        on_gpu = [one for one in world.cache if gpu.uuid in one.gpus and one.kind is not ContainerKind.INIT]
        assert gpu.uuid not in whole or len(on_gpu) <= 1
        assert gpu.mig is None or not any(one.is_whole and one.ids_of(ResourceKind.VCORE) for one in on_gpu)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_gpu_is_ever_over_its_memory_or_compute(data: st.DataObject) -> None:
    """Shares, GPUShare's units, whole GPUs, replicas and MIG instances come and go, the settings change; released, all is
    free."""
    world = Node(
        data.draw(st.sampled_from([inventory(3), divided()])),
        Policy(names=names(**data.draw(st.sampled_from(SETTINGS)))),
        seed=data.draw(st.integers(0, 99)),
    )
    alive: list[Pod] = []
    for number in range(data.draw(st.integers(1, 16))):
        step = data.draw(st.sampled_from(["admit"] * 6 + ["release"] * 2 + ["settings"]))
        if step == "release" and alive:
            world.release(alive.pop(data.draw(st.integers(0, len(alive) - 1))))
        elif step == "settings":
            world.policy = Policy(names=names(**data.draw(st.sampled_from(SETTINGS))))
        else:
            specs: Sequence[ContainerSpec] = [asks(**data.draw(requests()))]
            if data.draw(st.booleans()):
                specs = [asks("init", ContainerKind.INIT, **data.draw(requests())), *specs]
            owner = pod(f"p{number}", *specs)
            if not isinstance(world.admit(owner), Refused):
                alive.append(owner)
        assert_no_gpu_is_over(world)
    for owner in alive:
        world.release(owner)
    for resource in world.policy.names.names:
        kind = world.policy.names.by_name[resource]
        for gpu in world.found.gpus:
            served = world.policy.names.nvidia.served(gpu)
            is_served = kind is not ResourceKind.GPU or (served is not None and served.resource == resource)
            assert healthy(world, resource)[gpu.index] == (world.policy.names.units(gpu, kind) if is_served else 0)


@pytest.mark.parametrize(("unit", "is_accepted"), [("0/16", True), ("15/16", True), ("16/16", False), ("0/1", False)])
def test_a_unit_on_the_terms_of_before_is_given_where_it_has_room(unit: str, is_accepted: bool) -> None:
    """The kubelet may have begun the admission before it had the list with the new terms."""
    world = node(1, replicas=((GPU, 8),))
    admitted(world, "other", asks(gpu=1))
    (gpu,) = world.found.gpus
    number, _, terms = unit.partition("/")
    target = Target(pod=pod("late", asks(gpu=1)), container=asks(gpu=1))
    ids = [unit_id(gpu.uuid, int(number), terms)]
    found = check(Case(target, ResourceKind.GPU, ids, world.cache.ledger(world.found), world.policy), ())
    assert (found == (gpu.uuid,)) is is_accepted
