"""Which container a GetPreferredAllocation is for."""

from __future__ import annotations

from functools import partial

from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.identity import Call, Target, Unresolved, identify, next_container_of
from gpushare_agent.core.model.names import VCORE_RESOURCE as CORE
from gpushare_agent.core.model.pods import ContainerKind, PodPhase
from gpushare_agent.core.model.resources import ResourceKind
from tests.support_core import Listing, allocation, container, ids, known, pod

vcore_call = partial(Call, resource=CORE, kind=ResourceKind.VCORE)
VCORE_10 = vcore_call(size=10)


def served_name(result: Target | Unresolved) -> str:
    assert isinstance(result, Target), result
    return f"{result.pod.name}/{result.container.name}"


def test_the_listed_pod_without_its_devices_is_served() -> None:
    """Pods that have what they want are left out, plain pods too."""
    done, plain, new = pod("done", container(cores=10)), pod("plain", container()), pod("new", container(cores=10))
    listed = [Listing("done", {"main": {CORE: 10}}), Listing("plain", {"main": {}}), Listing("new", {"main": {}})]
    allocated = allocation(done, "main", ids(0, range(10)), [])
    assert served_name(identify(VCORE_10, listed, known(done, plain, new, allocations=(allocated,)))) == "new/main"


def test_containers_are_served_in_spec_order() -> None:
    """The first container that lacks the resource is the one, also when a later one asks for the same."""
    two = pod("two", container("a", cores=10), container("b", cores=10))
    assert served_name(identify(VCORE_10, [Listing("two", {"a": {}, "b": {}})], known(two))) == "two/a"
    assert served_name(identify(VCORE_10, [Listing("two", {"a": {CORE: 10}, "b": {}})], known(two))) == "two/b"


def test_the_kubelets_list_overrides_our_cache() -> None:
    """A container with an allocation in the cache that the kubelet lists without devices is the target again, once the API
    server has confirmed that it is the same pod and not a new one of its name."""
    one = pod("one", container(cores=10))
    allocated = allocation(one, "main", ids(0, range(10)), [])
    facts = known(one, allocations=(allocated,))
    listed = [Listing("one", {"main": {}})]
    doubtful = identify(VCORE_10, listed, facts)
    assert isinstance(doubtful, Unresolved) and doubtful.unknown == (("default", "one"),)
    assert served_name(identify(VCORE_10, listed, replace(facts, verified={("default", "one")}))) == "one/main"


def test_an_init_container_is_known_by_our_cache_alone() -> None:
    """The kubelet never lists ordinary init containers."""
    init = container("i", cores=10, kind=ContainerKind.INIT)
    chain = pod("chain", init, container("m", cores=10))
    listed = [Listing("chain", {"m": {}})]
    assert served_name(identify(VCORE_10, listed, known(chain))) == "chain/i"
    allocated = allocation(chain, "i", ids(0, range(10)), [], ContainerKind.INIT)
    assert served_name(identify(VCORE_10, listed, known(chain, allocations=(allocated,)))) == "chain/m"


def test_pods_that_ended_or_were_refused_are_out() -> None:
    """Kubelets up to 1.33 go on listing them without devices."""
    failed = pod("failed", container(cores=10), phase=PodPhase.FAILED)
    refused, new = pod("refused", container(cores=10)), pod("new", container(cores=10))
    listed = [Listing(name, {"main": {}}) for name in ("failed", "refused", "new")]
    facts = known(failed, refused, new, refused=frozenset({refused.uid}))
    assert served_name(identify(VCORE_10, listed, facts)) == "new/main"


def test_a_refused_pod_that_runs_after_all_may_be_served() -> None:
    """A refusal at a container's restart does not end the pod."""
    back = pod("back", container(cores=10), has_started=True)
    facts = replace(known(back, refused=frozenset({back.uid})), verified={("default", "back")})
    assert served_name(identify(VCORE_10, [Listing("back", {"main": {}})], facts)) == "back/main"


def test_two_that_fit_are_never_guessed_between() -> None:
    """The answer names both."""
    a, b = pod("a", container(cores=10)), pod("b", container(cores=10))
    result = identify(VCORE_10, [Listing("a", {"main": {}}), Listing("b", {"main": {}})], known(a, b))
    assert isinstance(result, Unresolved) and result.candidates
    assert [s.pod.name for s in result.candidates] == ["a", "b"]


def test_a_pod_is_one_candidate_though_its_name_is_listed_twice() -> None:
    """The one of this name before it, which ends, has none of the resource either."""
    listed = [Listing("a", {"main": {}})] * 2
    assert served_name(identify(VCORE_10, listed, known(pod("a", container(cores=10))))) == "a/main"


def test_must_include_points_at_the_pod_of_the_init_container() -> None:
    """Those IDs are an init container's of exactly one pod."""
    a, b = (pod(name, container("i", cores=5, kind=ContainerKind.INIT), container("m", cores=10)) for name in "ab")
    given = ids(0, range(10))
    allocated = tuple(
        allocation(owner, "i", own, [], ContainerKind.INIT) for owner, own in ((a, given[:5]), (b, given[5:]))
    )
    listed = [Listing("a", {"m": {}}), Listing("b", {"m": {}})]
    call = vcore_call(size=10, must_include=frozenset(given[5:]))
    assert served_name(identify(call, listed, known(a, b, allocations=allocated))) == "b/m"


def test_an_unknown_listed_pod_without_devices_is_to_be_fetched_first() -> None:
    """It may be the one, even though a known pod fits."""
    a = pod("a", container(cores=10))
    result = identify(VCORE_10, [Listing("a", {"main": {}}), Listing("who", {"main": {}})], known(a))
    assert isinstance(result, Unresolved) and result.unknown == (("default", "who"),)
    target = identify(VCORE_10, [Listing("a", {"main": {}}), Listing("who", {"main": {CORE: 5}})], known(a))
    assert served_name(target) == "a/main"


def test_a_stale_pod_of_the_same_name_is_suspected() -> None:
    """A StatefulSet's pod comes back under its name before the watch has delivered it."""
    old = pod("web-0", container(cores=10), phase=PodPhase.FAILED)
    result = identify(VCORE_10, [Listing("web-0", {"main": {}})], known(old))
    assert isinstance(result, Unresolved) and result.to_recheck == (("default", "web-0"),)


def test_a_container_that_runs_is_not_called_for() -> None:
    """Admitted while the resource was unknown, it runs without devices; a new pod of the same size is the one."""
    bare = pod("bare", container(cores=10), has_started=True, running=frozenset({"main"}))
    new = pod("new", container(cores=10))
    listed = [Listing("bare", {"main": {}}), Listing("new", {"main": {}})]
    facts = known(bare, new)
    doubtful = identify(VCORE_10, listed, facts)
    assert isinstance(doubtful, Unresolved) and doubtful.unknown == (("default", "bare"),)
    assert served_name(identify(VCORE_10, listed, replace(facts, verified={("default", "bare")}))) == "new/main"


def test_a_part_of_a_containers_request_is_not_an_allocate_without_preference() -> None:
    """The kubelet asks where an init container's IDs are not all that the next container needs."""
    owner = pod("chain", container("i", cores=5, kind=ContainerKind.INIT), container("m", cores=10))
    given = ids(0, range(5))
    facts = known(owner, allocations=(allocation(owner, "i", given, [], ContainerKind.INIT),))
    assert next_container_of(given, CORE, {owner.uid: owner}.get, facts) is None
