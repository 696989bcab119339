"""Why a request does not fit: None exactly where placement succeeds, and what is stated is true of the accounts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.core.model.allocations import Charge
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import Topology
from gpushare_agent.core.model.names import CORES_PER_GPU, GpuUuid
from gpushare_agent.core.model.resources import Request
from gpushare_agent.core.placement import GpuAccount, Placed, place
from gpushare_agent.core.placement.gpu_account import Cause, capacity_of, memory_text
from gpushare_agent.core.placement.place import SharePolicy, why_not_chosen
from tests.gpus.support_gpus import BLOCKS, gpu, indexes_of, set_cost, uuid_of
from tests.placement.support_placement import Machine, topologies

POLICIES = st.sampled_from(["binpack", "spread"])


@st.composite
def accounts(draw: st.DrawFn, index: int) -> GpuAccount:
    """Of a GPU or an instance, free, used in part or wholly, by shares, gpu-mem, whole or by replicas; or out of service."""
    is_instance = draw(st.sampled_from([False, False, False, True]))
    is_used = draw(st.booleans())
    counts = {
        "cores": st.sampled_from([0, 10, 60, 100]),
        "blocks": st.sampled_from([0, 5, 40, 64]),
        "units": st.sampled_from([0, 0, 3, 16]),
        "wholes": st.sampled_from([0, 0, 0, 1]),
        "shares": st.integers(0, 2),
        "part": st.sampled_from([Fraction(0), Fraction(0), Fraction(1, 4), Fraction(1, 3), Fraction(1)]),
    }
    used = {name: draw(strategy) for name, strategy in counts.items()} if is_used else {}
    return GpuAccount(
        index=index,
        uuid=uuid_of(index),
        memory_mib=draw(st.sampled_from([8, 16])) * 1024,
        is_healthy=draw(st.sampled_from([True, True, True, False])),
        instance=f"9:{index}" if is_instance else "",
        takes_shares=not is_instance or draw(st.booleans()),
        is_accepted=draw(st.sampled_from([True, True, True, False])),
        used=Charge(**used),
        reusable=Charge(cores=draw(st.sampled_from([0, 0, 10])) if is_used else 0),
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """All GPUs serve at most so many sharing containers, or any number."""
    topology, most = draw(topologies), draw(st.sampled_from([None, None, 2]))
    return topology, [replace(draw(accounts(index)), max_shares=most) for index in range(len(topology.links))]


@st.composite
def roomy_machines(draw: st.DrawFn) -> Machine:
    """Most requests fit several of the GPUs."""
    topology = draw(topologies)
    cores, blocks = st.sampled_from([100, 100, 100, 60, 50]), st.sampled_from([96, 96, 96, 90, 80])
    gpus = [gpu(n, cores=draw(cores), blocks=draw(blocks)) for n in range(len(topology.links))]
    return topology, gpus


SHARES = st.tuples(st.sampled_from([1, 40, 99]), st.sampled_from([1, 8, 60, 70]))
WHOLE = st.tuples(st.sampled_from([100, 200, 300]), st.sampled_from([0, 0, 60, 100]))
REQUESTS = st.one_of(
    (SHARES | WHOLE).map(lambda asked: Request(cores=asked[0], blocks=asked[1])),
    st.sampled_from([1, 6, 13, 17]).map(lambda units: Request(units=units)),
)
MUST = st.just(()) | st.just(()) | st.lists(st.integers(0, 5).map(uuid_of), max_size=2).map(tuple)


def unlimited(request: Request, gpus: Sequence[GpuAccount]) -> list[GpuAccount]:
    """Whole GPUs are no sharing containers: no number of those bounds them (admission/decisions/ledger.py)."""
    return [replace(one, max_shares=None) for one in gpus] if request.whole_gpus else list(gpus)


@settings(derandomize=True, max_examples=150)
@given(machines(), REQUESTS, POLICIES)
def test_nothing_is_lacking_exactly_where_placement_succeeds(
    machine: Machine, request: Request, share_policy: SharePolicy
) -> None:
    """Of a node; and of one GPU exactly where it would be placed on that one alone."""
    topology, gpus = machine[0], unlimited(request, machine[1])
    lack = capacity_of(gpus).lack(request)
    answer = place(request, gpus, topology, share_policy=share_policy)
    assert (lack is None) is isinstance(answer, Placed)
    if lack is not None:
        assert isinstance(answer, Refused) and answer.reason is lack.reason
    for one in gpus:
        is_placed = isinstance(place(request, [one], topology, share_policy=share_policy), Placed)
        assert one.fits(request) is (one.lack(request) is None)
        if request.whole_gpus < 2:
            assert (one.lack(request) is None) is is_placed
        else:
            assert (one.lack(request) is None) is one.is_free


@settings(derandomize=True, max_examples=100)
@given(machines(), REQUESTS)
def test_what_a_gpu_is_said_to_lack_is_what_it_lacks(machine: Machine, request: Request) -> None:
    """So much more would fit, and a core or a block less would not; what is lasting no end of a pod cures."""
    for one in unlimited(request, machine[1]):
        lack = one.lack(request)
        if lack is None:
            continue
        empty = GpuAccount(
            index=one.index, uuid=one.uuid, memory_mib=one.memory_mib, is_healthy=one.is_healthy,
            instance=one.instance, takes_shares=one.takes_shares, is_accepted=one.is_accepted,
        )  # fmt: skip
        assert lack.is_lasting is not empty.fits(request)
        text, asked = lack.of_gpu(), request.units or request.blocks
        if lack.cause is Cause.SHORT:
            free_mib, _ = one.memory_mib_of(request)
            unit_mib = one.unit_mib if request.units else one.block_mib
            short = [f"{request.cores - one.free_cores} cores"] if request.cores > one.free_cores else []
            short += [memory_text(asked * unit_mib - free_mib)] if asked * unit_mib > free_mib else []
            assert text == f"{' and '.join(short)} short"
        elif lack.cause is Cause.IN_USE:
            assert f"{one.free_cores} cores and {memory_text(one.memory_mib_of(request)[0])} are free" in text


@settings(derandomize=True, max_examples=100)
@given(machines(), st.sampled_from([Fraction(1), Fraction(1, 2), Fraction(1, 4)]))
def test_a_unit_under_nvidias_names_lacks_nothing_exactly_where_a_unit_is_free(
    machine: Machine, part: Fraction
) -> None:
    """As the units are counted that the kubelet is offered; what is free is stated in percent."""
    for one in machine[1]:
        lack = one.lack(Request(part=part))
        assert (lack is None) is (one.is_healthy and one.free_units_of(part.denominator) > 0)
        if lack is not None:
            assert (lack.reason is RefusalReason.NOT_ENOUGH_CORES) is one.is_healthy
        if lack is not None and lack.cause is Cause.IN_USE:
            assert f"{int(one.free_part * CORES_PER_GPU)} % of it are free" in lack.of_gpu()


@settings(derandomize=True, max_examples=250)
@given(roomy_machines() | machines(), REQUESTS, MUST, POLICIES)
def test_every_comparison_with_the_chosen_gpus_is_true_of_them(
    machine: Machine, asked: Request, must: tuple[GpuUuid, ...], share_policy: SharePolicy
) -> None:
    """And the policy would not have had it the other way round: what has more free is emptier, what is dearer costs more."""
    request = asked._replace(must_gpus=must)
    topology, gpus = machine[0], unlimited(request, machine[1])
    answer = place(request, gpus, topology, share_policy=share_policy)
    if isinstance(answer, Refused):
        return
    chosen = indexes_of(answer.gpus)
    for one in gpus:
        if one.index in chosen or not one.fits(request):
            continue
        text = why_not_chosen(one, request, answer, gpus, topology)
        if answer.policy in ("share", "memory"):
            check_shares(text, one, gpus[chosen[0]], request, share_policy)
        elif answer.policy == "fragment":
            check_branches(text, one.index, chosen[0], gpus, topology)
        elif request.whole_gpus:
            check_links(text, one, chosen, request, gpus, topology)
        else:
            assert text == "fits, but the kubelet's IDs name another" and one.uuid not in request.must_gpus


def check_shares(text: str, one: GpuAccount, chosen: GpuAccount, request: Request, share_policy: SharePolicy) -> None:
    own, its = ((g.free_units,) if request.units else (g.free_cores, g.free_blocks) for g in (one, chosen))
    if match := re.fullmatch(r"fits, but has (.+) (more|less) free than GPU ([\d:]+)", text):
        unit = memory_text if "B" in match[1] else "{} cores".format
        position = 0 if request.units or "cores" in match[1] else 1
        difference = (own[position] - its[position]) * (one.unit_mib if request.units else (1, one.block_mib)[position])
        assert (match[1], match[2]) == (unit(abs(difference)), "more" if difference > 0 else "less")
        assert (match[2] == "more") is (share_policy == "binpack") and match[3] == chosen.label
        assert own[:position] == its[:position]
    else:
        assert text == f"fits, but GPU {chosen.label} has as much free and comes first"
        assert own == its and chosen.index < one.index


def check_branches(text: str, one: int, chosen: int, gpus: Sequence[GpuAccount], topology: Topology) -> None:
    branch = topology.root
    while one in branch.gpus and chosen in branch.gpus:
        below = [child for child in branch.children if {one, chosen} & set(child.gpus)]
        if len(below) != 1:
            break
        branch = below[0]
    sides = {
        index: next((child.gpus for child in branch.children if index in child.gpus), ()) for index in (one, chosen)
    }
    free = {index: sum(gpus[n].is_free for n in members) for index, members in sides.items()}
    if not sides[one]:
        assert text == f"free, but GPU {chosen} of the same branch comes first" and chosen < one
    elif free[one] != free[chosen]:
        assert text == f"free, but its branch has {free[one]} free GPUs, that of GPU {chosen} has {free[chosen]}"
        assert free[chosen] < free[one]
    elif len(sides[one]) != len(sides[chosen]):
        assert text.endswith(
            f"as that of GPU {chosen}, and is larger: {len(sides[one])} GPUs, not {len(sides[chosen])}"
        )
        assert len(sides[chosen]) < len(sides[one])
    else:
        assert text == f"free, but its branch is as that of GPU {chosen}, which comes first"
        assert sides[chosen][0] < sides[one][0]


def check_links(
    text: str, one: GpuAccount, chosen: Sequence[int], request: Request, gpus: Sequence[GpuAccount], topology: Topology
) -> None:
    if text == "fits, but the scheduler chose another":
        return
    had = set_cost(topology.links, chosen)
    free = [g.index for g in gpus if g.is_free]
    must = {n for n in chosen if gpus[n].uuid in request.must_gpus}
    if must == set(chosen):
        assert text == "free, but the kubelet's IDs name others"
        return
    sets = [each for each in combinations(free, len(chosen)) if {one.index, *must} <= set(each)]
    costs = [set_cost(topology.links, s) for s in sets if sum(gpus[n].total_blocks for n in s) >= request.blocks]
    if text == "free, but no set with it has enough memory":
        assert costs == []
    elif text == "free, at the same link cost: of equals those in the branches that are broken up most are chosen":
        assert min(costs) == had
    else:
        assert text == f"free, but at a higher link cost: {min(costs)} with it, {had} without" and min(costs) > had


@pytest.mark.parametrize(
    ("gpus", "request_", "reason", "text"),
    [
        ([], Request(cores=10, blocks=1), RefusalReason.NO_HEALTHY_GPU, "the node has no GPU that the driver can name"),
        ([gpu(0, healthy=False)], Request(units=1), RefusalReason.NO_HEALTHY_GPU, "the node has no healthy GPU"),
        ([gpu(0), gpu(1)], Request(cores=300), RefusalReason.NOT_ENOUGH_CORES,
         "the node has 2 healthy GPUs, 3 whole wanted"),
        ([gpu(0, cores=50), gpu(1)], Request(cores=200), RefusalReason.NOT_ENOUGH_CORES,
         "only 1 of 2 GPUs is entirely free, 2 wanted"),
        ([gpu(0), gpu(1, blocks=0)], Request(cores=100, blocks=BLOCKS + 1), RefusalReason.NOT_ENOUGH_MEMORY,
         "the largest GPU has 24 GiB in all"),
        ([gpu(0, cores=60), gpu(1, cores=70)], Request(cores=80, blocks=1), RefusalReason.FRAGMENTED,
         "no GPU has more than 70 cores free"),
        ([gpu(0, cores=60, blocks=4), gpu(1, cores=10)], Request(cores=40, blocks=8), RefusalReason.FRAGMENTED,
         "no GPU has both free: at most 60 cores, and 24 GiB on another"),
        ([gpu(0, blocks=8), gpu(1, blocks=4)], Request(units=3), RefusalReason.FRAGMENTED,
         "no GPU has more than 2 GiB free"),
    ],
)  # fmt: skip
def test_a_nodes_lack_is_one_sentence_without_a_gpus_name(
    gpus: list[GpuAccount], request_: Request, reason: RefusalReason, text: str
) -> None:
    """kube-scheduler counts nodes by equal sentences."""
    lack = capacity_of(gpus).lack(request_)
    assert lack is not None and (lack.reason, lack.of_node()) == (reason, text)


@pytest.mark.parametrize("request_", [Request(cores=30, blocks=4), Request(cores=100, blocks=4), Request(units=1)])
def test_gpus_without_memory_of_their_own_are_given_whole(request_: Request) -> None:
    """And who asks for memory is told so; a replica is a part of the compute alone."""
    gpus = [replace(gpu(0), memory_mib=0), replace(gpu(1), memory_mib=0)]
    lack = capacity_of(gpus).lack(request_)
    assert lack is not None and lack.remedy.startswith("None has memory of its own to share: ask for 100 cores")
    assert capacity_of(gpus).lack(Request(cores=200)) is None
    assert gpus[0].free_units_of(4) == 4
    assert replace(gpus[0], used=Charge(cores=50)).free_units_of(4) == 2
