"""The annotation's grammar, and what a running share may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.resize import (
    MAX_CHARS,
    DesiredSize,
    ResizePolicy,
    ResizeReason,
    ResizeRefused,
    decide_resize,
    enforced,
    is_ending,
    is_resizable,
    mode_refusal,
    parse_resize,
    status_text,
    unknown_name,
)
from gpushare_agent.agent.isolation import ISOLATIONS, Isolation
from gpushare_agent.agent.isolation.request import Follows
from gpushare_agent.core.model.allocations import Allocation, Charge, ClaimRef, ClaimShare, ResizedShare, ShareSize
from gpushare_agent.core.model.isolation import ResizeMode
from gpushare_agent.core.model.names import GpuUuid
from gpushare_agent.core.model.pods import ContainerKind
from gpushare_agent.core.model.resources import ResourceKind, ResourceNames
from gpushare_agent.core.placement import GpuAccount
from tests.support_core import NAMES, allocation, container, ids, pod

VCUDA, MPS = (ISOLATIONS[n] for n in ("vcuda", "mps"))
MEMORY_LIVE = replace(VCUDA, memory_follows=Follows.RUNNING_PROCESSES)
"""Whose running processes follow a new memory limit, and keep their limit of compute."""
POD = pod("web", container("main", cores=30, blocks=8), container("side", cores=10, blocks=4))
MAIN = allocation(POD, "main", ids(0, range(30)), ids(0, range(8)))
FREE = ResizePolicy(names=NAMES, mode=ResizeMode.FREE_CAPACITY)


def account(**changes: object) -> GpuAccount:
    """GPU 0 as charged for the other containers: 96 blocks, 40 cores and 16 blocks of others."""
    empty = GpuAccount(index=0, uuid=GpuUuid("GPU-0"), memory_mib=96 * 256, used=Charge(cores=40, blocks=16))
    return replace(empty, **changes)  # type: ignore[arg-type]


def decided(
    cores: int | None = None, memory: int | None = None, known: ResizedShare | None = None, **changes: object
) -> ResizedShare | ResizeRefused | None:
    return decide_resize(MAIN, DesiredSize(cores=cores, memory=memory), known, account(**changes), MEMORY_LIVE, FREE)


# --- the annotation ---


@pytest.mark.parametrize(
    "text",
    [
        "", ";", "main", "main:", "main:cores", "main:cores=", "main:cores=0", "main:cores=05", "main:cores=-5",
        "main:cores=5%", "main:cores=५", "main:cores=12345678", "main:cores=5,cores=6", "main:cores=5,memory=6,cores=7",
        "main:cores=5;main:memory=6", "main:cores=5;", " main:cores=5", "main: cores=5", "Main:cores=5", "../main:cores=5",
        "main:gpus=5", "main:cores=5\n", "a" * 64 + ":cores=5", ";".join(f"c{n}:cores=5" for n in range(33)),
        "main:cores=5" + ";" * MAX_CHARS,
    ],
)  # fmt: skip
def test_any_other_text_is_refused_as_a_whole(text: str) -> None:
    """Half an annotation would be what nobody wrote. The text is shown in part, and never a new line."""
    refused = parse_resize(text)
    assert isinstance(refused, ResizeRefused) and refused.reason is ResizeReason.INVALID_REQUEST
    assert len(refused.detail) < 400 and "\n" not in refused.detail


@given(st.text(max_size=200))
def test_no_text_raises(text: str) -> None:
    """A tenant may be able to write it."""
    assert isinstance(parse_resize(text), dict | ResizeRefused)


SIZES = st.dictionaries(
    st.from_regex(r"[0-9a-z](?:[0-9a-z-]{0,10}[0-9a-z])?", fullmatch=True),
    st.tuples(st.integers(1, 9_999_999) | st.none(), st.integers(1, 9_999_999) | st.none()).filter(any),
    min_size=1,
    max_size=20,
)


@given(SIZES, st.sampled_from([1, -1]))
def test_what_is_written_is_read(sizes: dict[str, tuple[int | None, int | None]], order: int) -> None:
    """Every size of every container, cores or memory first; what is not named is as allocated."""
    amounts = {
        name: [f"{what}={number}" for what, number in zip(("cores", "memory"), size, strict=True) if number is not None]
        for name, size in sizes.items()
    }
    found = parse_resize(";".join(f"{name}:{','.join(parts[::order])}" for name, parts in amounts.items()))
    assert found == {name: DesiredSize(cores=cores, memory=memory) for name, (cores, memory) in sizes.items()}


def test_containers_that_the_pod_does_not_have_are_named() -> None:
    """A slip of the pen would otherwise go unseen."""
    assert unknown_name(POD, {"main": DesiredSize(cores=1), "mian": DesiredSize(cores=1)}) == "mian"


# --- what may be resized ---


def test_only_whole_allocations_of_shares_are_resizable() -> None:
    """Whole GPUs, init containers, and containers whose second resource is not allocated yet are not."""
    main = [pod("p", container("main", cores=30, blocks=8))]
    assert is_resizable(MAIN, main, NAMES)
    assert not is_resizable(replace(MAIN, ids={**MAIN.ids, ResourceKind.VMEMORY: frozenset()}), main, NAMES)
    assert not is_resizable(replace(MAIN, kind=ContainerKind.INIT), main, NAMES)
    assert not is_resizable(replace(MAIN, is_whole=True), main, NAMES)


def test_what_ends_is_not_resized() -> None:
    """A claim may be there before its pods."""
    share = ClaimShare(ref=ClaimRef("default", "c", "uid"), shown_as="g", request="r", isolation="gpushare")
    claims = replace(MAIN, claim=share)
    deleted = replace(POD, is_deleting=True)
    for pods, own, of_claim in (([], True, False), ([POD], False, False), ([POD, deleted], False, False)):
        assert (is_ending(MAIN, pods), is_ending(claims, pods)) == (own, of_claim)
    assert is_ending(MAIN, [deleted]) and is_ending(claims, [deleted])


@pytest.mark.parametrize(
    ("mode", "cores", "memory", "is_allowed"),
    [
        (ResizeMode.DISABLED, None, None, True),
        (ResizeMode.DISABLED, 30, 8, True),
        (ResizeMode.DISABLED, 10, None, False),
        (ResizeMode.WITHIN_REQUEST, 10, 8, True),
        (ResizeMode.WITHIN_REQUEST, 10, 9, False),
        (ResizeMode.WITHIN_REQUEST, 31, None, False),
        (ResizeMode.FREE_CAPACITY, 99, 90, True),
    ],
)
def test_the_setting_bounds_the_size(mode: ResizeMode, cores: int | None, memory: int | None, is_allowed: bool) -> None:
    """By default an annotation changes nothing, for whoever writes it would escape the ResourceQuota."""
    refused = mode_refusal(MAIN, DesiredSize(cores=cores, memory=memory), ResizePolicy(names=NAMES, mode=mode))
    assert (refused is None) is is_allowed
    assert refused is None or (refused.reason is ResizeReason.DISABLED and "resize.mode" in refused.detail)
    assert ResizePolicy(names=NAMES).mode is ResizeMode.DISABLED


def test_nothing_is_decided_where_nothing_changes() -> None:
    """Each round asks again."""
    assert decided() is None and decided(cores=30) is None
    share = decided(cores=50)
    assert isinstance(share, ResizedShare) and decided(cores=50, known=share) is None


@pytest.mark.parametrize(
    ("cores", "memory", "reason"),
    [
        (60, 80, None),
        (61, None, ResizeReason.NOT_ENOUGH_CORES),
        (None, 81, ResizeReason.NOT_ENOUGH_MEMORY),
        (100, None, ResizeReason.INVALID_REQUEST),
        (10, 81, ResizeReason.NOT_ENOUGH_MEMORY),
        (10, 500, ResizeReason.NOT_ENOUGH_MEMORY),
    ],
)
def test_growth_must_fit_beside_the_others(cores: int | None, memory: int | None, reason: ResizeReason | None) -> None:
    """On the same GPU, and below a whole one; the refusal has the cure."""
    outcome = decided(cores=cores, memory=memory)
    assert (outcome.reason if isinstance(outcome, ResizeRefused) else None) is reason
    # What no GPU of this size ever has free is not promised.
    if isinstance(outcome, ResizeRefused) and reason is not ResizeReason.INVALID_REQUEST:
        assert ("as soon as" in outcome.detail) is (memory != 500) and outcome.detail.endswith("for less.")


def test_what_is_booked_already_needs_no_free_capacity() -> None:
    """A share that shrank, and whose processes may still use the rest, may have it back at once."""
    known = ResizedShare(
        key=MAIN.key,
        gpu=GpuUuid("GPU-0"),
        kind=ResourceKind.VMEMORY,
        allocated=MAIN.allocated_size,
        target=ShareSize(cores=5, memory=2),
        charged=ShareSize(cores=30, memory=2),
    )
    full = {"used": Charge(cores=100, blocks=96)}
    outcome = decided(cores=25, memory=1, known=known, **full)
    assert isinstance(outcome, ResizedShare) and outcome.charged == ShareSize(cores=30, memory=2)
    assert isinstance(decided(cores=25, memory=3, known=known, **full), ResizeRefused)


def test_an_unhealthy_gpu_lets_shares_shrink_only() -> None:
    """Growth waits."""
    assert isinstance(decided(cores=10, is_healthy=False), ResizedShare)
    refused = decided(cores=31, is_healthy=False)
    assert isinstance(refused, ResizeRefused) and refused.reason is ResizeReason.UNHEALTHY_GPU


def test_an_isolation_that_cannot_change_a_running_container_refuses() -> None:
    """MPS reads its limits from the environment of each client, which the container keeps."""
    refused = decide_resize(MAIN, DesiredSize(memory=4), None, account(), MPS, FREE)
    assert isinstance(refused, ResizeRefused) and refused.reason is ResizeReason.UNSUPPORTED


def test_the_compute_of_a_memory_share_follows_its_memory() -> None:
    """GPUShare's rule: cores cannot be named, units can."""
    names = ResourceNames(gpu_mem="aliyun.com/gpu-mem")
    units = Allocation(
        key=MAIN.key,
        namespace="default",
        pod_name="web",
        kind=ContainerKind.MAIN,
        gpus=(GpuUuid("GPU-0"),),
        ids={ResourceKind.GPU_MEM: frozenset(ids(0, range(4)))},  # type: ignore[arg-type]
    )
    policy = ResizePolicy(names=names, mode=ResizeMode.FREE_CAPACITY)
    grown = decide_resize(units, DesiredSize(memory=20), None, account(), MEMORY_LIVE, policy)
    assert isinstance(grown, ResizedShare) and grown.kind is ResourceKind.GPU_MEM
    assert grown.target == ShareSize(cores=0, memory=20)
    assert isinstance(decide_resize(units, DesiredSize(memory=21), None, account(), MEMORY_LIVE, policy), ResizeRefused)
    assert isinstance(decide_resize(units, DesiredSize(cores=5), None, account(), MEMORY_LIVE, policy), ResizeRefused)


# --- what is given back ---


@pytest.mark.parametrize(("isolation", "memory"), [(MEMORY_LIVE, 4), (VCUDA, 8)], ids=["memory-live", "vcuda"])
def test_what_running_processes_follow_is_given_back_at_once_and_the_rest_with_the_next_container(
    isolation: Isolation, memory: int
) -> None:
    """They keep the compute limit that they have copied; whether one will read vcuda's file again nobody can tell."""
    share = decided(cores=10, memory=4)
    assert isinstance(share, ResizedShare)
    assert enforced(share, isolation, "a" * 64, uses_no_more=False).charged == share.charged
    now = enforced(share, isolation, "a" * 64, uses_no_more=True)
    assert now.charged == ShareSize(cores=30, memory=memory) and now.instance == "a" * 64
    assert enforced(now, isolation, "a" * 64, uses_no_more=True) == now
    assert enforced(now, isolation, "", uses_no_more=True) == now
    assert enforced(now, isolation, "b" * 64, uses_no_more=False).charged == share.target


# --- the status ---


def test_the_status_says_what_is_in_force() -> None:
    """In the order of the containers' names; none where none is resized."""
    side = allocation(POD, "side", ids(0, range(30, 40)), ids(0, range(8, 12)))
    share = decided(cores=50)
    assert isinstance(share, ResizedShare)
    granted = replace(MAIN, resized_to=share.target)
    resized = {MAIN.key: share}
    refused = {side.key: ResizeReason.NOT_ENOUGH_MEMORY.value}
    assert (
        status_text([side, granted], resized, refused, ())
        == "main:cores=50,memory=8,in-force;side:cores=10,memory=4,refused=NotEnoughMemory"
    )
    assert status_text([granted], resized, {}, [MAIN.key]) == "main:cores=50,memory=8,pending"
    assert status_text([MAIN], resized, {}, ()) == "main:cores=30,memory=8,pending"
    kept = {MAIN.key: replace(share, charged=ShareSize(cores=60, memory=8))}
    assert status_text([granted], kept, {}, ()) == "main:cores=50,memory=8,shrinking"
    assert status_text([MAIN, side], {}, {}, ()) is None


def test_the_status_fits_what_is_read_of_an_annotation() -> None:
    """A longer one would be read back cut, and written again for ever."""
    many = [allocation(POD, f"container-{n:020}", ids(0, range(1)), ids(0, range(1))) for n in range(32)]
    text = status_text(many, {}, {one.key: ResizeReason.NOT_ENOUGH_MEMORY.value for one in many}, ())
    assert text is not None and len(text) < MAX_CHARS
