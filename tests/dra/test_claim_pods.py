"""Who uses a claim, what of it is one share, and whose processes are whose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from gpushare_agent.agent.admission.allocation_cache import AllocationCache
from gpushare_agent.agent.admission.claim_pods import ClaimPods
from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.core.model.allocations import Allocation, Charge, ClaimRef, ClaimShare, ContainerKey
from gpushare_agent.core.model.names import GpuUuid, PodUid
from gpushare_agent.core.model.pods import ContainerKind
from tests.dra.support_claims import ref_of, uid_of, using
from tests.support_core import pod

KEY_A, KEY_B = ContainerKey(PodUid(uid_of(1)), "a"), ContainerKey(PodUid(uid_of(1)), "b")


def booked(key: ContainerKey, gpu: int) -> Allocation:
    share = ClaimShare(ref=ref_of(), shown_as="g", request=key.container, isolation="mps", core_limit=80)
    return Allocation(
        key=key,
        namespace="default",
        pod_name="p",
        kind=ContainerKind.MAIN,
        gpus=(GpuUuid(f"GPU-{gpu}"),),
        claim=share,
    )


def made() -> tuple[PodStore, ClaimPods]:
    store, cache = PodStore(), AllocationCache()
    cache.put(booked(KEY_A, 0))
    cache.put(booked(KEY_B, 1))
    return store, ClaimPods(store, cache)


def test_a_container_uses_the_requests_that_it_names_or_all() -> None:
    """Also one of a pod that came after the claim was prepared; one of another namespace's claim of that name does not."""
    store, pods = made()
    store.upsert(pod("one", using("x", ("g", "a")), using("y", ("g", "")), claims={"g": "claim-1"}))
    store.upsert(pod("two", using("z", ("h", "b")), claims={"h": "claim-1"}))
    store.upsert(pod("other", using("w", ("g", "")), claims={"g": "claim-1"}, namespace="elsewhere"))
    assert pods.claims_of_containers() == {
        ContainerKey(PodUid("uid-one"), "x"): (KEY_A,),
        ContainerKey(PodUid("uid-one"), "y"): (KEY_A, KEY_B),
        ContainerKey(PodUid("uid-two"), "z"): (KEY_B,),
    }


def test_a_claim_of_one_result_and_one_user_runs_as_that_container() -> None:
    store, cache = PodStore(), AllocationCache()
    cache.put(booked(KEY_A, 0))
    pods = ClaimPods(store, cache)
    assert pods.instance(KEY_A) == ""
    ids = {"x": "c" * 64}
    one = pod("one", using("x", ("g", "a")), claims={"g": "claim-1"}, running=frozenset({"x"}), container_ids=ids)
    store.upsert(one)
    x = ContainerKey(PodUid("uid-one"), "x")
    assert pods.sharers(KEY_A) == {x: "c" * 64}
    assert pods.instance(KEY_A) == pods.instance(x) == "c" * 64
    store.upsert(pod("two", using("z", ("g", "a")), claims={"g": "claim-1"}))
    assert pods.instance(KEY_A) == ""
    cache.put(booked(KEY_B, 1))
    store.remove(PodUid("uid-two"))
    assert pods.instance(KEY_A) == ""


def test_a_view_of_two_requests_is_one_share() -> None:
    """A container that has both sees one GPU with the sum; the claim's elastic ceiling is the higher one."""
    cache = AllocationCache()
    for key, cores in ((KEY_A, 20), (KEY_B, 30)):
        made = booked(key, 0)
        assert made.claim is not None
        claim = replace(made.claim, view="a", core_limit=cores + 20)
        cache.put(replace(made, charge=Charge(cores=cores), claim=claim))
    (share,) = ClaimPods(PodStore(), cache).shares().values()
    assert (share.key, share.size.cores, share.gpus) == (KEY_A, 50, (GpuUuid("GPU-0"),))
    assert share.claim is not None and share.claim.core_limit == 50


CLAIMS = [ContainerKey(PodUid(uid_of(number)), name) for number in (1, 2) for name in "ab"]
STEPS = st.lists(st.tuples(st.sampled_from(range(8)), st.sampled_from(["", "claim-1", "claim-2", "gone"])), max_size=25)


@given(STEPS)
def test_after_any_changes_it_says_what_one_made_of_them_all_would(steps: list[tuple[int, str]]) -> None:
    """Claims and pods in any order, pods that come back under one UID with another claim, views of two requests."""
    store, cache = PodStore(), AllocationCache()
    pods = ClaimPods(store, cache)
    for number, (which, name) in enumerate(steps):
        if which < 4 and name == "gone":
            cache.release(CLAIMS[which])
        elif which < 4:
            made = booked(CLAIMS[which], which)
            assert made.claim is not None
            ref = ClaimRef("default", f"claim-{1 + which // 2}", CLAIMS[which].pod_uid)
            cache.put(replace(made, claim=replace(made.claim, ref=ref, view="a" if name == "claim-1" else "")))
        else:
            # As a list has them: what it lacks is gone, and may be back under its UID in the next.
            one = pod(f"p{which}", using("x", ("g", "a")), using("y", ("g", "")), claims={"g": name} if name else {})
            others = [other for other in store.pods() if other.uid != one.uid]
            new = replace(one, resource_version=str(number + 1))
            store.replace_all(others if name == "gone" else [*others, new], resource_version=str(number + 1))
        fresh = ClaimPods(store, cache)
        assert pods.shares() == fresh.shares() and pods.users == fresh.users
        assert pods.claims_of_containers() == fresh.claims_of_containers()
        for key in (*CLAIMS, *fresh.shares()):
            assert pods.parts(key) == fresh.parts(key) and pods.sharers(key) == fresh.sharers(key)
            assert {k: one for k, one in fresh.shares().items() if k.pod_uid == key.pod_uid} == pods.shares_of(
                key.pod_uid
            )
        for one in store.pods():
            users = {uid for uid in {key.pod_uid for key in CLAIMS} if one in pods.using(uid)}
            assert users <= pods.subjects(one)
