"""What the kubelet lists may be unreadable: the call is refused with the reason, never with an exception."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from gpushare_agent.admission.decisions.identity import Call, ListedDevices
from gpushare_agent.admission.identification import Identification, Timeouts
from gpushare_agent.cluster.pod_store import PodStore
from gpushare_agent.model.errors import Corrupt, RefusalReason, Refused, Unavailable
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceKind
from tests.fakes.clock import FakeClock
from tests.support_core import NAMES, container, pod


class Unreadable:
    """A listed pod whose devices cannot be decoded."""

    namespace, name = "default", "a"

    def count_ids(self, resource: str) -> int:
        return 0

    def count_by_container(self, resource: str) -> Mapping[str, int]:
        raise Corrupt("pod default/a: bad bytes")


class Inside:
    async def list_entries(self) -> Sequence[ListedDevices]:
        return [Unreadable()]


class Outside:
    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None:
        return None

    async def wait_lists_inside(self, *, timeout_s: float) -> bool:
        return True


async def test_a_pod_that_cannot_be_decoded_refuses_the_call_with_the_reason() -> None:
    """It may be the one that is being admitted."""
    store, outside = PodStore(), Outside()
    store.upsert(pod("a", container(cores=10)))
    identification = Identification(
        pods=store,
        fetcher=outside,
        kubelet=outside,
        allocations=dict,
        refused=(),
        names=NAMES,
        clock=time.monotonic,
        timeouts=Timeouts(),
    )
    result = await identification.identify(Call(kind=ResourceKind.VCORE, size=10), Inside())
    assert isinstance(result, Refused) and result.reason is RefusalReason.NOT_READY
    assert "bad bytes" in result.detail and "Create the pod again" in result.detail


class Unheard:
    """A listed pod that neither the watch nor the API server has told of."""

    namespace, name = "default", "unheard"

    def count_ids(self, resource: str) -> int:
        return 0

    def count_by_container(self, resource: str) -> Mapping[str, int]:
        return {}


class SlowKubelet:
    """Each List takes 1.5 s."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock

    async def list_entries(self) -> Sequence[ListedDevices]:
        self._clock.now += 1.5
        return [Unheard()]


class NoApiServer(Outside):
    async def fetch(self, namespace: str, name: str, *, timeout_s: float) -> Pod | None:
        raise Unavailable("connection refused")


async def test_an_api_server_that_did_not_answer_stays_the_reason_when_the_time_is_over() -> None:
    """The second List ends after the two seconds: the API server is not asked again, and the pod is not called deleted."""
    clock, outside = FakeClock(0.0), NoApiServer()
    identification = Identification(
        pods=PodStore(),
        fetcher=outside,
        kubelet=outside,
        allocations=dict,
        refused=(),
        names=NAMES,
        clock=clock,
        timeouts=Timeouts(lookup_s=2.0),
    )
    result = await identification.identify(Call(kind=ResourceKind.VCORE, size=10), SlowKubelet(clock))
    assert isinstance(result, Refused) and result.reason is RefusalReason.POD_UNKNOWN
    assert "the API server did not answer" in result.detail and "connection refused" in result.detail
