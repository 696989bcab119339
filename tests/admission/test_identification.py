"""What the kubelet lists may be unreadable: the call is refused with the reason, never with an exception."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import pytest
from msgspec import Raw
from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.identity import Call, ListedDevices, Target
from gpushare_agent.agent.admission.identification import Identification, ListInside
from gpushare_agent.agent.cluster.runtime_classes import RuntimeClasses
from gpushare_agent.agent.kubelet.pod_resources import PodResourcesClient
from gpushare_agent.agent.node import Node
from gpushare_agent.core.kit.protobuf import bytes_field, string_list
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.device_ids import DeviceIds
from gpushare_agent.core.model.errors import Corrupt, NotFound, RefusalReason, Refused, Unavailable
from gpushare_agent.core.model.names import VCORE_RESOURCE, PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceKind
from tests.fakes.clock import FakeClock
from tests.support_core import Listing, allocation, container, ids, pod
from tests.support_deadline import DEADLINE_S
from tests.support_json import undecoded
from tests.support_node import node_of

vcore_call = partial(Call, resource=VCORE_RESOURCE, kind=ResourceKind.VCORE)


def identification_of(
    node: Node,
    outside: Any,
    *,
    clock: Callable[[], float] = time.monotonic,
    runtime_classes: RuntimeClasses | None = None,
    **timeouts: float,
) -> Identification:
    """`outside` stands for the API server and the kubelet."""
    return Identification(
        node=node,
        fetcher=outside,
        kubelet=outside,
        runtime_classes=runtime_classes or RuntimeClasses(),
        refused=(),
        clock=clock,
        **timeouts,
    )


class Unreadable:
    """A listed pod whose devices cannot be decoded."""

    namespace, name = "default", "a"

    def count_ids(self, resource: str) -> int:
        return 0

    def count_by_container(self, resource: str) -> Mapping[str, int]:
        raise Corrupt("pod default/a: bad bytes")


def listing(*entries: ListedDevices, clock: FakeClock | None = None, takes_s: float = 0.0) -> ListInside:
    """A List of the kubelet, which takes so long."""

    async def inside(*_settled: object) -> Sequence[ListedDevices]:
        if clock is not None:
            clock.now += takes_s
        return entries

    return inside


class Outside:
    has_pod_resources = True

    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None:
        return None

    async def wait_known(self, *, timeout_s: float) -> None:
        return None


async def test_a_pod_that_cannot_be_decoded_refuses_the_call_with_the_reason() -> None:
    """It may be the one that is being admitted."""
    node, outside = node_of(), Outside()
    node.pods.upsert(pod("a", container(cores=10)))
    identification = identification_of(node, outside)
    result = await identification.identify(vcore_call(size=10), listing(Unreadable()))
    assert isinstance(result, Refused) and result.reason is RefusalReason.NOT_READY
    assert "bad bytes" in result.detail and "Create the pod again" in result.detail


class NoApiServer(Outside):
    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None:
        raise Unavailable("connection refused")


async def test_an_api_server_that_did_not_answer_stays_the_reason_when_the_time_is_over() -> None:
    """The second List ends after the two seconds: the API server is not asked again, and the pod is not called deleted."""
    clock, outside = FakeClock(0.0), NoApiServer()
    identification = identification_of(node_of(), outside, clock=clock, lookup_s=2.0)
    unheard = listing(Listing("unheard", {}), clock=clock, takes_s=1.5)
    result = await identification.identify(vcore_call(size=10), unheard)
    assert isinstance(result, Refused) and result.reason is RefusalReason.POD_UNKNOWN
    assert "the API server did not answer" in result.detail and "connection refused" in result.detail


async def test_the_runtime_class_of_the_pod_has_the_time_that_the_pod_left() -> None:
    """And its handler is known when the pod is: the decision follows at once."""
    clock, known = FakeClock(0.0), Static(None, pod("new", container(cores=10), runtime_class="secure"))
    waits: list[float] = []

    class Api:
        async def get_runtime_class(self, name: str, *, timeout_s: float) -> Raw:
            waits.append(timeout_s)
            return undecoded({"handler": f"runsc-{name}"})

    classes = RuntimeClasses(clock=clock)
    classes.attach(cast(KubeApi, Api()))
    identification = identification_of(known.node, known, clock=clock, runtime_classes=classes)
    new = listing(Listing("new", {}), clock=clock, takes_s=1.5)
    found = await identification.identify(vcore_call(size=10), new)
    assert isinstance(found, Target) and found.pod.name == "new"
    assert waits == [0.5] and classes.handlers == {"secure": "runsc-secure"}


class Lists:
    """A kubelet's Lists of `old`, which has 20 cores, and `new`, each in another order; `given` are the pods that each left
    to be looked at."""

    def __init__(self) -> None:
        self.given: list[set[str]] = []

    async def __call__(self, resource: str, settled: Mapping[bytes, int]) -> Sequence[ListedDevices]:
        devices = [bytes_field(2, string_list(1, [VCORE_RESOURCE]) + string_list(2, [str(n)])) for n in range(20)]
        if len(self.given) % 2:
            devices.reverse()
        pods = [_listed(b"old", b"main", b"".join(devices)), _listed(b"new", b"main")]
        if len(self.given) % 2:
            pods.reverse()
        found = PodResourcesClient(None, DeviceIds())._listings(resource, settled, b"".join(pods))
        self.given.append({entry.name for entry in found})
        return found


def _listed(pod_name: bytes, container_name: bytes, devices: bytes = b"") -> bytes:
    inner = bytes_field(1, container_name) + devices
    return bytes_field(1, bytes_field(1, pod_name) + bytes_field(2, b"default") + bytes_field(3, inner))


def _lose_a_core(known: Static, old: Pod, share: Allocation) -> None:
    known.node.cache.put(replace(share, ids={ResourceKind.VCORE: frozenset(ids(0, range(19)))}))


def _come_again(known: Static, old: Pod, share: Allocation) -> None:
    """A StatefulSet's next pod of that name, before the watch reports the end of the one before."""
    known.store.upsert(replace(old, uid=PodUid("uid-again"), resource_version="2"))


@pytest.mark.parametrize(
    "change",
    [
        lambda known, old, share: known.node.cache.release(share.key),
        _lose_a_core,
        _come_again,
        lambda known, old, share: known.store.upsert(replace(old, resource_version="2", has_started=False)),
    ],
    ids=["allocation-gone", "other-allocation", "same-name", "pod-changed"],
)
async def test_a_pod_that_had_everything_is_looked_at_again_once_something_of_it_changes(
    change: Callable[[Static, Pod, Allocation], object],
) -> None:
    """Though the kubelet lists as many IDs: then pod store, ledger or kubelet may be wrong, and all is compared again. In
    whatever order it lists them, until then it is not looked at."""
    old = pod("old", container(cores=20), has_started=True, resource_version="1")
    new = pod("new", container(cores=10))
    known, lists = Static(None, new), Lists()
    for one in (old, new):
        known.store.upsert(one)
    share = allocation(old, "main", ids(0, range(20)), [])
    known.node.cache.put(share)
    identification = identification_of(known.node, known, poll_again_s=0.0)
    known.store.subscribe(identification.pod_changed)
    known.node.cache.subscribe(identification.allocation_changed)
    for _ in range(3):
        found = await identification.identify(vcore_call(size=10), lists)
        assert isinstance(found, Target) and found.pod is new
    assert (known.fetched, lists.given) == ([], [{"old", "new"}, {"new"}, {"new"}])
    change(known, old, share)
    found = await identification.identify(vcore_call(size=10), lists)
    assert isinstance(found, Target) and found.pod.name == "new"
    assert lists.given[3] == {"old", "new"}


async def test_an_unknown_pod_is_fetched_also_when_the_kubelet_took_all_the_time_to_list_it() -> None:
    """Else it would be refused as unknown to the API server, which nobody asked."""
    clock = FakeClock()

    class Slow(Static):
        async def __call__(self, *_settled: object) -> Sequence[ListedDevices]:
            clock.now += 2.5
            return await super().__call__()

    slow = Slow(None, _static(HASH, 10))
    result = await slow.identify(10, clock=clock)
    assert isinstance(result, Target) and slow.fetched == ["s-node"]


HASH, CHANGED = PodUid("0" * 32), PodUid("1" * 32)


def _static(uid: PodUid, cores: int, mirror: str = "", **fields: Any) -> Pod:
    """A static pod of one name, with its mirror pod's UID or without a mirror pod."""
    return pod("s-node", container(cores=cores), uid=uid, is_static=True, mirror_uid=mirror, **fields)


class Identified:
    """Keeps the methods by which containers were found."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    def identified(self, method: str) -> None:
        self.methods.append(method)


class Static(Outside):
    """One static pod is listed. The kubelet's pod replaces what the store has of it, or it cannot be asked."""

    def __init__(self, known: Pod | None, kubelets: Pod | None) -> None:
        self.node = node_of(metrics=Identified())
        self.store = self.node.pods
        self._kubelets = kubelets
        if known is not None:
            self.store.upsert(known)
        self.fetched: list[str] = []

    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None:
        self.fetched.append(name)
        if self._kubelets is None:
            raise NotFound(f"pod {namespace}/{name}: the component is missing")
        self.store.put_static([self._kubelets])
        return self._kubelets

    async def __call__(self, *_settled: object) -> Sequence[ListedDevices]:
        return [Listing("s-node", {})]

    async def identify(
        self,
        cores: int,
        *allocations: Allocation,
        poll_again_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> Target | Refused:
        for one in allocations:
            self.node.cache.put(one)
        identification = identification_of(self.node, self, clock=clock, poll_again_s=poll_again_s)
        return await identification.identify(vcore_call(size=cores), self)


@pytest.mark.parametrize("former", [0, 10, 20])
async def test_of_a_static_pod_whose_file_changed_the_new_one_is_meant(former: int) -> None:
    """Also where the former one asked for nothing, and where it has its share still; its mirror pod is all that is known."""
    known = _static(HASH, former, "api-1", has_started=True, resource_version="5")
    given = allocation(known, "main", ids(0, range(former)), [])
    static = Static(known, _static(CHANGED, 10))
    result = await static.identify(10, *([given] if former else []))
    assert isinstance(result, Target) and result.pod.uid == CHANGED


@pytest.mark.parametrize("former", [None, 0, 10])
async def test_a_static_pod_that_the_kubelet_cannot_be_asked_about_is_refused(former: int | None) -> None:
    """Never taken for the former one of its name. The text says what is missing."""
    known = None if former is None else _static(HASH, former, "api-1", has_started=True, resource_version="5")
    result = await Static(known, None).identify(10)
    assert isinstance(result, Refused) and result.reason is RefusalReason.POD_UNKNOWN
    assert "pod default/s-node: the component is missing" in result.detail


async def test_another_static_pod_that_cannot_be_read_refuses_no_other_pods_call() -> None:
    """One without a mirror pod is listed in every admission of the node: it counts as gone at the second poll."""

    class Both(Static):
        async def __call__(self, *_settled: object) -> Sequence[ListedDevices]:
            return [Listing("s-node", {}), Listing("ordinary", {})]

    result = await Both(pod("ordinary", container(cores=10)), None).identify(10, poll_again_s=DEADLINE_S)
    assert isinstance(result, Target) and result.pod.name == "ordinary"


async def test_a_pod_with_the_name_of_a_static_one_that_cannot_be_read_does_not_hide_it_from_later_calls() -> None:
    """It needs nothing more, and stands for both only in the call in which the static one counts as gone."""
    static = Static(pod("s-node", container(), uid="api"), None)
    static.store.put_static([_static(HASH, 10)])
    clock = FakeClock(0.0)
    identification = identification_of(static.node, static, clock=clock, poll_again_s=0.4)

    async def inside(_resource: str, settled: Mapping[bytes, int]) -> Sequence[ListedDevices]:
        clock.now += 0.3
        return [] if settled else [Listing("s-node", {})]

    assert isinstance(await identification.identify(vcore_call(size=20), inside), Refused)
    found = await identification.identify(vcore_call(size=10), inside)
    assert isinstance(found, Target) and found.pod.uid == HASH


async def test_what_was_found_of_a_pod_that_ends_is_not_kept_for_the_next_of_its_name() -> None:
    """The kubelet lists both for a while, and what it lists of the third pod is what it listed of the first."""
    node, client = node_of(), PodResourcesClient(None, DeviceIds())
    identification = identification_of(node, Outside(), poll_again_s=0.0)
    node.pods.subscribe(identification.pod_changed)

    listed = partial(_listed, b"a")

    async def identify(*names: bytes) -> Target | Refused:
        async def inside(resource: str, settled: Mapping[bytes, int]) -> Sequence[ListedDevices]:
            return client._listings(resource, settled, b"".join(map(listed, names)))

        return await identification.identify(vcore_call(size=10), inside)

    for uid, version, lists in (("1", "1", [(b"first",)]), ("2", "2", [(b"next", b"first")] * 2)):
        node.pods.upsert(pod("a", container("x"), uid=uid, resource_version=version))
        for names in lists:
            assert isinstance(await identify(*names), Refused)
    node.pods.upsert(pod("a", container("first", cores=10), uid="3", resource_version="3"))
    found = await identify(b"first")
    assert isinstance(found, Target) and found.pod.uid == "3"


async def test_ids_that_a_pod_has_lost_are_not_made_up_for_by_two_pods_of_one_name() -> None:
    """The kubelet lists both for a while. The container that lost its IDs starts again, and the call is for it."""
    node = node_of()
    lost, other = pod("lost", container(cores=10), has_started=True), pod("other", container())
    for one in (lost, other):
        node.pods.upsert(one)
    node.cache.put(allocation(lost, "main", ids(0, range(10)), []))
    identification = identification_of(node, Outside(), poll_again_s=0.0)
    cores = b"".join(bytes_field(2, string_list(1, [VCORE_RESOURCE]) + string_list(2, [str(n)])) for n in range(10))
    others = [_listed(b"other", b"main", cores), _listed(b"other", b"main")]

    async def identify(devices: bytes) -> Target | Refused:
        async def inside(resource: str, settled: Mapping[bytes, int]) -> Sequence[ListedDevices]:
            answer = b"".join([_listed(b"lost", b"main", devices), *others])
            return PodResourcesClient(None, DeviceIds())._listings(resource, settled, answer)

        return await identification.identify(vcore_call(size=10), inside)

    assert isinstance(await identify(cores), Refused)
    found = await identify(b"")
    assert isinstance(found, Target) and found.pod is lost
