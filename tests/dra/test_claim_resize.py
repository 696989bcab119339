"""Live resize of a claim's share: by the annotation of a pod that uses it, up to what the claim was allocated."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gpushare_agent.agent.dra.claims import allocations_of
from gpushare_agent.agent.dra.decisions.edits import PreparedClaim, prepare_claim
from gpushare_agent.core.claims.claim import read_claim
from gpushare_agent.core.claims.devices import device_name
from gpushare_agent.core.model.allocations import ContainerKey, ShareSize
from gpushare_agent.core.model.isolation import ResizeMode
from gpushare_agent.core.model.names import RESIZE_ANNOTATION, PodUid
from gpushare_agent.core.model.pods import Pod
from tests.dra.support_claims import NODE, RawClaim, edit_policy, raw_claim, result, uid_of, using
from tests.fakes.resizing import ResizedNode
from tests.support_core import NAMES, inventory, pod
from tests.support_json import undecoded

KEY = ContainerKey(PodUid(uid_of(1)), "gpu")
HELD = ShareSize(cores=40, memory=64)


class World(ResizedNode):
    """A claim on a node of two GPUs, and the pods that the test makes."""

    def __init__(self, raw: RawClaim, mode: ResizeMode = ResizeMode.FREE_CAPACITY, users: Sequence[Pod] = ()) -> None:
        """`users` are the pods that are known when the claim is prepared."""
        super().__init__(inventory(2), mode)
        gpus = {device_name(gpu.uuid): gpu for gpu in inventory(2).gpus}
        claim = read_claim(undecoded(raw), pool=NODE)
        made = prepare_claim(claim, gpus, users, edit_policy("vcuda"), 256)
        assert isinstance(made, PreparedClaim)
        for allocation in allocations_of(made, NAMES, 0.0):
            self.cache.put(allocation)

    def pod(self, name: str, *requests: str, claim: str = "g", **annotations: str) -> None:
        containers = [using(f"c{number}", (claim, request)) for number, request in enumerate(requests or ("",))]
        text = {RESIZE_ANNOTATION: annotations["resize"]} if "resize" in annotations else {}
        self.store.upsert(pod(name, *containers, claims={claim: "claim-1"}, annotations=text))

    async def resized(self, text: str, *requests: str) -> None:
        """A round after the pod p has asked for this."""
        self.pod("p", *requests, resize=text)
        await self.resizing.reconcile()


async def test_a_share_shrinks_and_grows_back_and_every_pod_of_the_claim_is_informed() -> None:
    """The claim is named as in the pod that has the annotation."""
    world = World(raw_claim(result()))
    world.pod("p", resize="g:cores=10,memory=8")
    world.pod("q", claim="other")
    await world.resizing.reconcile()
    assert world.sizes == {"gpu": ShareSize(cores=10, memory=8)} and world.enforced[-1][0] == KEY
    assert world.statuses == dict.fromkeys(("p", "q"), "claim-1:cores=10,memory=8,shrinking")
    assert [name for name, _ in world.events] == ["p", "q"]
    assert world.events[0][1].startswith("Claim claim-1 has 10 cores with 8 memory blocks (2 GiB) now; allocated were")
    world.pod("p")
    await world.resizing.reconcile()
    assert world.sizes == {"gpu": HELD} and not world.cache.resized
    await world.resizing.reconcile()
    assert world.statuses == {"p": None, "q": None}


async def test_after_a_restart_the_size_stays_until_the_pods_are_listed() -> None:
    """Also where one of them is known already, as it asks for another share of a device plugin."""
    before, world = World(raw_claim(result())), World(raw_claim(result()))
    await before.resized("g:cores=10,memory=8")
    world.store.is_synced = False
    world.cache.restore_resized(before.cache.resized.values())
    world.pod("q")
    for is_synced, size in ((False, ShareSize(cores=10, memory=8)), (True, HELD)):
        world.store.is_synced = is_synced
        await world.resizing.reconcile()
        assert world.sizes == {"gpu": size}


async def test_a_share_does_not_grow_beyond_what_the_scheduler_counts() -> None:
    """Whatever the GPU has free: it is the next claim's."""
    world = World(raw_claim(result()))
    await world.resized("g:cores=50")
    assert world.sizes == {"gpu": HELD}
    assert world.statuses == {"p": "claim-1:cores=40,memory=64,refused=ResizeUnsupported"}
    assert "the scheduler counts what the claim was allocated, 40 cores with 64 memory blocks" in world.events[0][1]


async def test_the_setting_counts_for_claims_too() -> None:
    world = World(raw_claim(result()), ResizeMode.DISABLED)
    await world.resized("g:cores=10")
    assert world.sizes == {"gpu": HELD} and "setting resize.mode" in world.events[0][1]


async def test_a_request_of_several_is_named_with_the_claim() -> None:
    """Where containers use them one by one; a container that has both has no size of its own."""
    raw = raw_claim(result("a", 0), result("b", 1))
    each = pod("p", using("x", ("g", "a")), using("y", ("g", "b")), claims={"g": "claim-1"})
    world = World(raw, users=[each])
    await world.resized("g/b:cores=10", "a", "b")
    assert world.sizes == {"a": HELD, "b": ShareSize(cores=10, memory=64)}
    assert world.statuses == {"p": "claim-1/b:cores=10,memory=64,shrinking"}
    both = World(raw_claim(result("a", 0), result("b", 0)))
    await both.resized("g/b:cores=10")
    assert both.sizes == {"a": HELD, "b": HELD}
    assert "use several of the claim's devices together" in both.events[0][1]


async def test_of_several_pods_that_ask_the_first_by_name_counts() -> None:
    world = World(raw_claim(result()))
    world.pod("q", resize="g:cores=20")
    await world.resized("g:cores=10")
    assert world.sizes == {"gpu": ShareSize(cores=10, memory=64)}


async def test_of_several_pods_each_may_ask_for_another_request() -> None:
    raw = raw_claim(result("a", 0), result("b", 1))
    users = [pod(name, using("x", ("g", own)), claims={"g": "claim-1"}) for name, own in (("p", "a"), ("q", "b"))]
    world = World(raw, users=users)
    world.pod("p", "a", resize="g/a:cores=10")
    world.pod("q", "b", resize="g/b:cores=20")
    await world.resizing.reconcile()
    assert {name: size.cores for name, size in world.sizes.items()} == {"a": 10, "b": 20}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("g:cores=ten", "cannot be read"),
        ("h:cores=10", "names a container h, which the pod does not have"),
        ("gpu:cores=10", "which the pod does not have"),  # a request is named with its claim
    ],
)
async def test_what_cannot_be_read_or_names_nothing_is_reported(text: str, why: str) -> None:
    """A slip of the pen would otherwise go unseen."""
    world = World(raw_claim(result()))
    await world.resized(text)
    assert world.sizes == {"gpu": HELD} and why in world.events[-1][1]


async def test_all_cores_with_a_part_of_the_memory_are_not_resized() -> None:
    world = World(raw_claim(result(cores=100)))
    await world.resized("g:memory=8")
    assert "all 100 cores of its GPU" in world.events[-1][1] and not world.cache.resized
