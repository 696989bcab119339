"""Why this GPU, or none: every GPU's verdict, from the same books as the decision."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.decisions.container_edits import EditPolicy
from gpushare_agent.agent.admission.decisions.decide import Decision, explain, offer_accounts, plan
from gpushare_agent.agent.admission.decisions.decide import decide as decide_whole
from gpushare_agent.agent.admission.decisions.identity import Target
from gpushare_agent.agent.admission.decisions.ledger import Case, Policy
from gpushare_agent.agent.admission.outcomes import in_short, with_gpus
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import GpuInventory, Health, Link, LinkKind
from gpushare_agent.core.model.names import PREDICATE_GPU_INDEX_PREFIX, GpuUuid
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.placement.topology import build_topology
from tests.support_core import NAMES, allocation, container, ids, inventory, isolation_config, pod

MIB = 1024 * 1024


def decide(
    cores: int,
    blocks: int,
    *held: Allocation,
    gpus: GpuInventory | None = None,
    hint: tuple[int, ...] = (),
    policy: Policy | None = None,
    annotations: Mapping[str, str] | None = None,
) -> tuple[Decision | Refused, Decision]:
    """Plans a pod's only container among what others hold."""
    policy = policy or Policy(names=NAMES)
    wanted = container(cores=cores, blocks=blocks)
    hints = {PREDICATE_GPU_INDEX_PREFIX + "0": ",".join(map(str, hint))}
    target = Target(pod=pod("p", wanted, annotations={**hints, **(annotations or {})}), container=wanted)
    cache = AllocationCache()
    for one in held:
        cache.put(one)
    found = gpus or inventory()
    ledger = cache.ledger(found)
    offered = [i for gpu in range(len(found.gpus)) for i in ids(gpu, range(100))]
    case = Case(target, ResourceKind.VCORE, offered, ledger, policy)
    outcome = plan(case, offer_accounts(case))
    return outcome, explain(case, offer_accounts(case), outcome)


def share(name: str, gpu: int, cores: range, blocks: range) -> Allocation:
    return allocation(pod(name), "main", ids(gpu, cores), ids(gpu, blocks))


def verdicts(explanation: Decision) -> list[str]:
    return [candidate.verdict for candidate in explanation.candidates]


def sick(found: GpuInventory, *indexes: int, reason: str = "Xid 79") -> GpuInventory:
    gpus = tuple(
        replace(gpu, health=Health.UNHEALTHY, unhealthy_reason=reason) if gpu.index in indexes else gpu
        for gpu in found.gpus
    )
    return replace(found, gpus=gpus)


def linked(count: int, branch: int) -> GpuInventory:
    """So many GPUs, PIX apart within branches of this size, and SYS from one to the next."""
    links = [
        [
            Link(kind=LinkKind.SELF if a == b else LinkKind.PIX if a // branch == b // branch else LinkKind.SYS)
            for b in range(count)
        ]
        for a in range(count)
    ]
    return replace(inventory(count), topology=build_topology(links, [None] * count))


def test_a_placed_share_is_explained_by_what_every_gpu_had() -> None:
    """The fuller GPU was chosen; the other fits."""
    outcome, why = decide(30, 10, share("other", 1, range(40), range(20)))
    assert isinstance(outcome, Decision)
    assert verdicts(why) == ["fits, but has 40 cores more free than GPU 1", "chosen"]
    assert (why.policy, why.why) == ("share", "GPU 1: the fullest of 2 GPUs that fit")
    assert [(c.free_cores, c.free_memory_bytes, c.total_memory_bytes) for c in why.candidates] == [
        (100, 96 * 256 * MIB, 96 * 256 * MIB),
        (60, 76 * 256 * MIB, 96 * 256 * MIB),
    ]
    assert (why.asked.cores, why.asked.memory_bytes) == (30, 10 * 256 * MIB)


def test_what_the_first_resource_of_a_container_has_recorded_is_not_made_again_for_the_next() -> None:
    """Neither the verdicts nor, where it does not bind the GPU, the edits; a refusal has its verdicts in any case."""
    wanted = container(cores=30, blocks=10)
    target = Target(pod=pod("p", wanted), container=wanted)
    cache, edits = AllocationCache(), EditPolicy(names=NAMES, config=isolation_config(), isolation="none")

    def made(kind: ResourceKind, offered: int = 96) -> Decision:
        ledger = cache.ledger(inventory(), without=target.key)
        case = Case(target, kind, ids(0, range(offered)), ledger, Policy(names=NAMES))
        return decide_whole(case, edits, lambda _: "")

    first = made(ResourceKind.VCORE)
    cache.put(allocation(target.pod, "main", list(first.ids), []))
    further, refused = made(ResourceKind.VMEMORY), made(ResourceKind.VMEMORY, 9)
    again = made(ResourceKind.VCORE)
    assert first.edits.env and verdicts(first) == ["chosen", "30 cores short"]
    assert (further.gpus, further.edits.env, verdicts(further)) == (first.gpus, (), [])
    assert refused.refused is not None and len(verdicts(refused)) == 2
    # The Allocate of what binds the GPU may be refused for the IDs that come with it, and says why of each GPU.
    assert len(verdicts(again)) == 2
    # Memory came first: the edits are made with the cores, whose answer they are in.
    cache.put(allocation(target.pod, "main", [], ids(0, range(10))))
    assert made(ResourceKind.VCORE).edits == first.edits


def test_a_whole_gpu_is_explained_by_the_branches() -> None:
    """A used GPU cannot be it; a free one was left for its branch."""
    outcome, why = decide(100, 0, share("other", 0, range(10), range(5)), gpus=inventory(3))
    assert isinstance(outcome, Decision)
    assert verdicts(why) == [
        "in use: 90 cores and 22.75 GiB are free, and all of both are needed",
        "chosen",
        "free, but GPU 1 of the same branch comes first",
    ]
    assert why.policy == "fragment"


def test_gpus_at_an_equal_link_cost_are_not_said_to_cost_more() -> None:
    """Next to the chosen pair, and in a pair that has no GPU in common with it; only the cheapest set with each says so."""
    equal = "free, at the same link cost: of equals those in the branches that are broken up most are chosen"
    for gpus, expected in (
        (linked(3, 3), [equal]),
        (linked(5, 2), [equal, equal, "free, but at a higher link cost: 32000 with it, 2000 without"]),
    ):
        _, why = decide(200, 0, gpus=gpus)
        assert verdicts(why) == ["chosen", "chosen", *expected]


def test_an_equal_free_gpu_is_not_said_to_be_in_a_branch_broken_up_less() -> None:
    """GPUs 0 and 1 are a pair of which one is used; 2 and 3 a whole pair."""
    gpus = linked(4, 2)
    _, why = decide(100, 0, share("other", 0, range(10), range(5)), gpus=gpus)
    assert verdicts(why)[1:] == ["chosen", *["free, but its branch has 2 free GPUs, that of GPU 1 has 1"] * 2]
    _, why = decide(100, 0, gpus=gpus)
    equal = "free, but its branch is as that of GPU 0, which comes first"
    assert verdicts(why) == ["chosen", "free, but GPU 0 of the same branch comes first", equal, equal]


def test_free_gpus_that_lack_memory_together_are_not_called_too_few() -> None:
    """There are enough of them."""
    outcome, why = decide(200, 193)
    assert isinstance(outcome, Refused) and outcome.reason is RefusalReason.NOT_ENOUGH_MEMORY
    assert verdicts(why) == ["entirely free; the 2 largest GPUs have 48 GiB in all"] * 2


def test_a_refusal_for_memory_says_what_each_gpu_is_short_of() -> None:
    """Cores are there; memory is not."""
    outcome, why = decide(10, 50, share("a", 0, range(10), range(60)), share("b", 1, range(10), range(70)))
    assert isinstance(outcome, Refused) and outcome.reason is RefusalReason.FRAGMENTED
    assert verdicts(why) == ["3.5 GiB short", "6 GiB short"]
    assert not any(candidate.is_chosen for candidate in why.candidates)


@pytest.mark.parametrize(
    ("reason", "verdict"),
    [("Xid 79", "unhealthy: Xid 79"), ("cordoned: new fan on Monday", "cordoned: new fan on Monday")],
)
def test_a_gpu_out_of_service_is_named_with_the_reason(reason: str, verdict: str) -> None:
    """In the verdicts, and in the refusal where no other fits; one that somebody cordoned is not called unhealthy."""
    outcome, why = decide(60, 10, share("a", 0, range(50), range(5)), gpus=sick(inventory(), 1, reason=reason))
    assert isinstance(outcome, Refused) and outcome.reason is RefusalReason.NOT_ENOUGH_CORES
    assert verdicts(why) == ["10 cores short", verdict]
    assert outcome.detail.endswith(f"Out of service, and not counted: GPU 1: {reason}.")


def test_a_node_without_a_healthy_gpu_names_the_reasons() -> None:
    """At most three of them: the text goes into the pod's status."""
    outcome, why = decide(10, 10, gpus=sick(inventory(5), 0, 1, 2, 3, 4))
    assert isinstance(outcome, Refused) and outcome.reason is RefusalReason.NO_HEALTHY_GPU
    assert "GPU 0: Xid 79; GPU 1: Xid 79; GPU 2: Xid 79; and 2 more." in outcome.detail
    assert verdicts(why) == ["unhealthy: Xid 79"] * 5


def test_an_invalid_request_names_no_unhealthy_gpu() -> None:
    """Whoever asks for 150 cores need not hear of GPUs, nor read verdicts on them."""
    outcome, why = decide(150, 10, gpus=sick(inventory(), 1))
    assert isinstance(outcome, Refused) and "Unhealthy" not in outcome.detail
    assert why.candidates == () and why.asked.cores == 150


def test_a_gpu_that_the_pods_annotations_leave_out_is_not_given() -> None:
    """The fullest would be GPU 1: `explain` says why it is not, and whoever names an unknown model is refused."""
    outcome, why = decide(
        30, 10, share("other", 1, range(40), range(20)), annotations={"nvidia.com/nouse-gpuuuid": "GPU-1"}
    )
    assert isinstance(outcome, Decision)
    assert verdicts(why) == ["chosen", "left out by the pod's annotations"]
    outcome, _ = decide(30, 10, annotations={"nvidia.com/use-gputype": "A100"})
    assert isinstance(outcome, Refused) and "annotations leave out all healthy GPUs" in outcome.detail
    outcome, _ = decide(30, 10, annotations={"nvidia.com/use-gputype": "TEST"})
    assert isinstance(outcome, Decision)


def test_the_schedulers_hint_is_shown_followed_or_not() -> None:
    """A hint that is feasible wins; one that is not stays visible in what was asked."""
    outcome, why = decide(30, 10, share("other", 1, range(40), range(20)), hint=(0,))
    assert isinstance(outcome, Decision) and why.policy == "hint"
    assert verdicts(why) == ["chosen", "fits, but the scheduler chose another"]
    outcome, why = decide(70, 10, share("other", 1, range(40), range(20)), hint=(1,))
    assert isinstance(outcome, Decision) and why.policy == "share" and why.asked.hint == (1,)
    assert verdicts(why) == ["chosen", "10 cores short"]


def test_a_gpu_full_of_mps_clients_says_so() -> None:
    """It may have enough free cores and memory."""
    policy = Policy(names=NAMES, max_shares_of_gpu=1)
    _, why = decide(10, 10, share("other", 1, range(10), range(5)), policy=policy)
    assert verdicts(why) == ["chosen", "1 sharing containers, the most that one GPU serves"]


def test_other_gpus_than_planned_change_the_verdicts() -> None:
    """The kubelet's IDs bind; the explanation follows them."""
    _, why = decide(30, 10)
    changed = with_gpus(why, [GpuUuid("GPU-1")])
    assert verdicts(changed) == [
        "planned, but the kubelet allocated other IDs",
        "chosen: the kubelet allocated its IDs",
    ]
    assert [c.is_chosen for c in changed.candidates] == [False, True]
    assert with_gpus(why, [GpuUuid("GPU-0")]) is why


def test_the_short_form_is_cut_between_gpus() -> None:
    """An Event has 1,024 characters."""
    _, why = decide(60, 10, share("a", 0, range(50), range(5)), share("b", 1, range(50), range(5)))
    assert in_short(why.candidates, 200) == "GPU 0: 10 cores short; GPU 1: 10 cores short"
    assert in_short(why.candidates, 30) == "GPU 0: 10 cores short; …"
    assert in_short(why.candidates, 5) == ""


def test_a_drivers_long_words_are_cut() -> None:
    """What a driver says may be anything."""
    outcome, why = decide(10, 10, gpus=sick(inventory(1), 0, reason="x" * 5000))
    assert isinstance(outcome, Refused) and len(outcome.detail) < 700
    assert len(why.candidates[0].verdict) < 250


def test_the_memory_of_a_gpu_that_is_taken_whole_is_not_free() -> None:
    """Though its container asked for no blocks: the refusal is for memory, not for fragments."""
    taken = allocation(pod("whole"), "main", ids(0, range(100)), [])
    outcome, why = decide(10, 50, taken, share("b", 1, range(10), range(70)))
    assert isinstance(outcome, Refused) and outcome.reason is RefusalReason.NOT_ENOUGH_MEMORY
    assert verdicts(why) == ["10 cores and 12.5 GiB short", "6 GiB short"]
    assert why.candidates[0].free_memory_bytes == 0


def test_equal_gpus_are_not_called_fullest() -> None:
    """The first one was taken, for nothing distinguishes them."""
    _, why = decide(30, 10, gpus=inventory(8))
    assert why.why == "GPU 0: the first of 8 fitting GPUs with equal free capacity"
    _, only = decide(30, 10, share("a", 0, range(90), range(5)))
    assert only.why == "GPU 1: the only GPU that fits"
