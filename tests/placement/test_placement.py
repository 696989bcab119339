"""Placement's rules one by one: share, whole GPUs, hints, must-include, and what a refusal says."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.gpus import Link, LinkKind, Topology
from gpushare_agent.core.model.resources import Request
from gpushare_agent.core.placement import GpuAccount, Placed, place, validate_request
from gpushare_agent.core.placement.gpu_account import memory_text
from gpushare_agent.core.placement.place import SharePolicy, why_not_chosen
from gpushare_agent.core.placement.topology import build_topology
from tests.gpus.support_gpus import gpu, indexes_of, node, read_topology, uuid_of
from tests.support_core import NAMES

P40 = read_topology("p40-x7-two-switches")
T4 = read_topology("t4-x4-two-sockets")


def placed(
    request: Request, gpus: list[GpuAccount], topology: Topology = T4, share_policy: SharePolicy = "binpack"
) -> tuple[int, ...]:
    answer = place(request, gpus, topology, share_policy=share_policy)
    assert isinstance(answer, Placed), answer
    return indexes_of(answer.gpus)


def refused(request: Request, gpus: list[GpuAccount], topology: Topology = T4) -> Refused:
    answer = place(request, gpus, topology, share_policy="binpack")
    assert isinstance(answer, Refused), answer
    return answer


@pytest.mark.parametrize(("cores", "blocks"), [(1, 1), (99, 4), (100, 0), (100, 5), (200, 0), (1600, 7)])
def test_shares_with_memory_and_whole_gpus_are_valid(cores: int, blocks: int) -> None:
    """Memory is needed for a share and optional for whole GPUs."""
    assert validate_request(Request(cores=cores, blocks=blocks), NAMES, share_mode=True) is None


@pytest.mark.parametrize(
    ("cores", "blocks", "text"),
    [
        (150, 4, "next valid numbers of cores are 100 and 200"),
        (250, 0, "next valid numbers of cores are 200 and 300"),
        (0, 0, "asks for nothing of a GPU"),
        (0, 4, "4 memory blocks (1 GiB) asks for memory without cores"),
        (30, 0, "share of a GPU without memory"),
        (-1, 4, "cannot be negative"),
        (30, -4, "cannot be negative"),
    ],
)
def test_an_invalid_request_is_reported_what_is_valid(cores: int, blocks: int, text: str) -> None:
    """The text names the request, the fault, and the two valid forms."""
    answer = validate_request(Request(cores=cores, blocks=blocks), NAMES, share_mode=True)
    assert answer is not None
    assert answer.reason is RefusalReason.INVALID_REQUEST
    assert text in answer.detail
    assert answer.detail.startswith(f"{cores} cores with {blocks} memory blocks" if blocks else f"{cores} cores ")
    assert "1 to 99 cores with memory (a share of one GPU), or a multiple of 100 (whole GPUs" in answer.detail


@pytest.mark.parametrize(
    ("mib", "text"), [(0, "0 GiB"), (768, "768 MiB"), (1024, "1 GiB"), (24832, "24.25 GiB"), (196608, "192 GiB")]
)
def test_memory_is_in_gib_and_the_smallest_in_mib(mib: int, text: str) -> None:
    """As the dashboard and top show it."""
    assert memory_text(mib) == text


def test_shares_are_refused_where_sharing_is_off() -> None:
    """Whole GPUs still go."""
    for share in (Request(cores=50, blocks=4), Request(units=4)):
        answer = validate_request(share, NAMES, share_mode=False)
        assert answer is not None and answer.reason is RefusalReason.SHARING_DISABLED
        assert "Ask for a multiple of 100 cores" in answer.detail
    assert validate_request(Request(cores=100), NAMES, share_mode=False) is None


SERVED_TOO = {0, 1}


def _some_served(gpus: list[GpuAccount], served: set[int] = SERVED_TOO) -> list[GpuAccount]:
    return [replace(one, serves_parts=one.index in served) for one in gpus]


@pytest.mark.parametrize("share_policy", ["binpack", "spread"])
def test_a_share_goes_first_to_gpus_that_no_other_name_serves(share_policy: SharePolicy) -> None:
    """Whoever asks for nvidia.com/gpu has those alone: an empty one, or one in use, stays as it is while another fits."""
    for shared in ({}, {0: (30, 40)}, {0: (70, 40), 2: (30, 10)}):
        gpus = _some_served(node(T4, shared=shared))
        assert placed(Request(cores=20, blocks=10), gpus, share_policy=share_policy)[0] in (2, 3)
        answer = place(Request(cores=20, blocks=10), gpus, T4, share_policy=share_policy)
        assert isinstance(answer, Placed)
        assert answer.explanation.endswith("of those that no other name serves")
        assert why_not_chosen(gpus[0], Request(cores=20, blocks=10), answer, gpus, T4) == (
            "fits, but another name serves it too"
        )
    full = _some_served(node(T4, used={2, 3}, shared={1: (50, 50)}))
    assert placed(Request(cores=20, blocks=10), full, share_policy=share_policy) == (
        1 if share_policy == "binpack" else 0,
    )
    assert placed(Request(cores=20, blocks=10, hint=(0,)), _some_served(node(T4))) == (0,)
    assert placed(Request(units=1), _some_served(node(T4)), share_policy=share_policy) == (2,)


@pytest.mark.parametrize(
    ("cores", "used", "served", "chosen"),
    [
        (100, (), {0, 1}, (2,)),
        (100, (2, 3), {0, 1}, (0,)),
        # On the P40 machine GPUs 0 to 2 are behind one switch and 3 to 6 behind another.
        (200, (), {0, 1}, (3, 4)),
        (300, (), {3}, (0, 1, 2)),
        (300, (), {0, 3, 4}, (1, 2, 5)),
        (300, (), {0, 1, 2, 3, 4}, (3, 5, 6)),
        (700, (), {0, 1, 2}, (0, 1, 2, 3, 4, 5, 6)),
    ],
)
def test_whole_gpus_are_first_those_that_no_other_name_serves(
    cores: int, used: tuple[int, ...], served: set[int], chosen: tuple[int, ...]
) -> None:
    """As few of the others as can be; among those the links decide."""
    topology = T4 if cores == 100 else P40
    gpus = _some_served(node(topology, used=set(used)), served)
    assert placed(Request(cores=cores, blocks=0), gpus, topology) == chosen


def test_too_little_memory_outweighs_other_names() -> None:
    """Two small GPUs that no other name serves have less than is asked for."""
    small = [replace(one, memory_mib=one.memory_mib // 4) if one.index > 1 else one for one in node(T4)]
    wanted = Request(cores=200, blocks=node(T4)[0].total_blocks)
    assert 0 in placed(wanted, _some_served(small)) or 1 in placed(wanted, _some_served(small))


def test_fragment_takes_from_the_smaller_of_two_branches_with_as_many_free_gpus() -> None:
    """GPUs 0 and 1 share a switch and can both become free again; GPU 2 is alone."""
    own, near, far = (Link(kind=kind) for kind in (LinkKind.SELF, LinkKind.PIX, LinkKind.PHB))
    topology = build_topology([[own, near, far], [near, own, far], [far, far, own]], [None] * 3)
    assert placed(Request(cores=100, blocks=0), node(topology, used={1}), topology) == (2,)


def test_fragment_counts_a_shared_gpu_as_used() -> None:
    """A branch with a shared GPU is already broken up."""
    assert placed(Request(cores=100, blocks=0), node(P40, shared={4: (50, 50), 5: (50, 50)}), P40) == (3,)


@pytest.mark.parametrize(
    ("cores", "hint", "expected"),
    [
        (20, (2,), ((2,), "hint")),
        (20, (1,), ((0,), "share")),
        (20, (-1,), ((0,), "share")),
        (20, (2, 1), ((0,), "share")),
        (100, (1,), ((0,), "fragment")),
        (100, (2, 1), ((0,), "fragment")),
        (200, (3, 0), ((0, 3), "hint")),
        (200, (0, 0), ((2, 3), "link")),
        (200, (0, 10**30), ((2, 3), "link")),
    ],
)
def test_a_hint_is_followed_if_it_fits_and_ignored_otherwise(
    cores: int, hint: tuple[int, ...], expected: tuple[tuple[int, ...], str]
) -> None:
    """A tenant can write the annotation: wrong numbers, doubles and GPUs in use lose it its effect, nothing else."""
    answer = place(
        Request(cores=cores, blocks=10, hint=hint), node(T4, shared={1: (10, 5)}), T4, share_policy="binpack"
    )
    assert isinstance(answer, Placed)
    assert (indexes_of(answer.gpus), answer.policy) == expected


def test_a_hint_without_the_memory_or_the_gpu_that_must_be_is_ignored() -> None:
    """Two small GPUs do not hold what was asked; one with the GPU is followed."""
    gpus, must = [gpu(0, total=40, blocks=40), gpu(1, total=40, blocks=40), gpu(2), gpu(3)], (uuid_of(3),)
    assert placed(Request(cores=200, blocks=100, hint=(0, 1)), gpus) == (2, 3)
    assert placed(Request(cores=200, hint=(0, 1), must_gpus=must), node(T4)) == (2, 3)
    assert placed(Request(cores=200, hint=(0, 3), must_gpus=must), node(T4)) == (0, 3)


def test_must_include_decides_the_gpu_of_a_share() -> None:
    """Even against the policy and the hint."""
    request = Request(cores=20, blocks=10, hint=(1,), must_gpus=(uuid_of(3), uuid_of(3)))
    answer = place(request, node(T4, shared={1: (30, 50)}), T4, share_policy="binpack")
    assert isinstance(answer, Placed)
    assert (indexes_of(answer.gpus), answer.policy) == ((3,), "must-include")


@pytest.mark.parametrize(
    "request_",
    [
        Request(cores=20, blocks=10, must_gpus=(uuid_of(0),)),
        Request(cores=20, blocks=10, must_gpus=(uuid_of(1),)),
        Request(cores=20, blocks=10, must_gpus=(uuid_of(2), uuid_of(3))),
        Request(cores=20, blocks=10, must_gpus=(uuid_of(77),)),
        Request(cores=100, blocks=10, must_gpus=(uuid_of(0),)),
        Request(cores=100, blocks=0, must_gpus=(uuid_of(2), uuid_of(3))),
    ],
)
def test_must_include_that_cannot_be_is_refused_as_wrong_gpus(request_: Request) -> None:
    """Full, unhealthy, unknown, or too many: the text names the GPUs insisted on."""
    gpus = [gpu(0, cores=10), gpu(1, healthy=False), gpu(2), gpu(3)]
    answer = refused(request_, gpus)
    assert answer.reason is RefusalReason.WRONG_GPUS
    assert "the kubelet must include devices of" in answer.detail


def test_too_few_free_gpus_around_an_init_containers_one_are_refused_as_such() -> None:
    """The kubelet is not at fault: to admit the pod again or restart the kubelet would not help."""
    answer = refused(
        Request(cores=200, blocks=0, must_gpus=(uuid_of(2),)), [gpu(0, cores=60), gpu(1, cores=90), gpu(2)]
    )
    assert (answer.reason, "Wait for pods" in answer.detail) == (RefusalReason.FRAGMENTED, True)


@pytest.mark.parametrize(
    ("cores", "blocks", "reason", "texts"),
    [
        (20, 97, RefusalReason.NOT_ENOUGH_MEMORY, ["97 memory blocks (24.25 GiB)", "the largest GPU has", "24 GiB"]),
        (95, 4, RefusalReason.FRAGMENTED, ["130 cores", "closest: 25 cores short, with 70 cores and 8 memory blocks"]),
        (20, 25, RefusalReason.FRAGMENTED, ["28 memory blocks (7 GiB) are free on all", "GPU 0 comes closest"]),
        (20, 40, RefusalReason.NOT_ENOUGH_MEMORY, ["28 memory blocks (7 GiB) are free on all GPUs together"]),
        (300, 0, RefusalReason.NOT_ENOUGH_CORES, ["2 healthy GPUs, 3 whole wanted", "at most 200 cores"]),
        (100, 97, RefusalReason.NOT_ENOUGH_MEMORY, ["the largest GPU has", "24 GiB"]),
        (200, 0, RefusalReason.NOT_ENOUGH_CORES, ["only 0 of 2 GPUs are entirely free, 2 wanted"]),
        (100, 0, RefusalReason.FRAGMENTED, ["0 of 2 GPUs are entirely free, 1 wanted", "130 cores are free on all"]),
    ],
)
def test_a_refusal_says_what_was_asked_what_is_free_and_what_to_do(
    cores: int, blocks: int, reason: RefusalReason, texts: list[str]
) -> None:
    """Fragmented means that the sum would do; the unhealthy and emptiest GPU counts for nothing."""
    gpus = [gpu(0, cores=60, blocks=20, total=40), gpu(1, cores=70, blocks=8), gpu(2, total=500, healthy=False)]
    answer = refused(Request(cores=cores, blocks=blocks), gpus)
    assert answer.reason is reason
    assert answer.detail.startswith(f"no GPU for {cores} cores" + (f" with {blocks} memory blocks" if blocks else ": "))
    assert [text for text in texts if text not in answer.detail] == []
    assert "Wait for pods" in answer.detail or "Ask for at most" in answer.detail


def test_not_enough_cores_counts_all_gpus_together() -> None:
    """Where even the sum is too little, waiting is the advice."""
    answer = refused(Request(cores=50, blocks=4), [gpu(0, cores=20), gpu(1, cores=20)])
    assert answer.reason is RefusalReason.NOT_ENOUGH_CORES
    assert "40 cores and 192 memory blocks (48 GiB) are free on all GPUs together" in answer.detail


def test_free_gpus_that_are_too_small_are_a_matter_of_memory() -> None:
    """The large GPUs exist but are in use."""
    gpus = [gpu(0, total=40, blocks=40), gpu(1, cores=50)]
    answer = refused(Request(cores=100, blocks=60), gpus)
    assert answer.reason is RefusalReason.NOT_ENOUGH_MEMORY
    assert "the largest free GPU has 10 GiB" in answer.detail
