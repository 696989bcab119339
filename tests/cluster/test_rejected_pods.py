"""Rejected pods that their controller has replaced are deleted, slowly, and the newest few stay to be read."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace

from gpushare_agent.agent.cluster.pod_store import PodStore
from gpushare_agent.agent.cluster.rejected_pods import RejectedPods, plan_deletions
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE, PodUid
from gpushare_agent.core.model.pods import Pod, PodPhase
from tests.cluster.support_kube import Counted, opened, pod, running
from tests.fakes.api_server import Behaviour, FakeApiServer, Seen, answers, answers_html_502, fake_api, raw_status
from tests.support_deadline import Changes

RESOURCES = (VCORE_RESOURCE, VMEMORY_RESOURCE)
MESSAGE = "Pod was rejected: Allocate failed due to rpc error: code = Unavailable desc = no GPU, which is unexpected"


def _rejected(name: str, version: int, **fields: Any) -> Pod:
    defaults = {
        "phase": PodPhase.FAILED,
        "reason": "UnexpectedAdmissionError",
        "message": MESSAGE,
        "controller_kind": "ReplicaSet",
    }
    return pod(name, version=str(version), **(defaults | fields))


def _planned(*pods: Pod, keep: int = 0) -> list[str]:
    return [planned.name for planned in plan_deletions(pods, resources=RESOURCES, keep=keep)]


def test_the_newest_of_each_controller_stay() -> None:
    """The oldest go first; as many as `keep` stay, counted per controller."""
    web = [_rejected(f"web-7d9f-{letter}", version) for version, letter in enumerate("abcde", start=8)]
    api = [_rejected(f"api-5c6b-{letter}", version) for version, letter in enumerate("ab", start=1)]
    assert _planned(*reversed(web), *api, keep=3) == ["web-7d9f-a", "web-7d9f-b"]


def test_only_pods_that_we_rejected_and_others_replace_are_deleted() -> None:
    """A running pod, another reason or resource, a Job's pod, one without a controller or being deleted: all stay."""
    no_resource = _rejected("plain-x", 1, containers=())
    others = [
        _rejected("a-x", 1, phase=PodPhase.RUNNING),
        _rejected("b-x", 1, reason="Evicted"),
        _rejected("c-x", 1, message="requested number of devices unavailable for example.com/foo"),
        _rejected("d-x", 1, controller_kind="Job"),
        _rejected("e-x", 1, controller_kind="DaemonSet"),
        _rejected("f-x", 1, controller_kind=""),
        _rejected("g-x", 1, is_deleting=True),
    ]
    kubelets_own = _rejected(
        "h-x", 1, message=f"cannot allocate unhealthy devices {VCORE_RESOURCE}, which is unexpected"
    )
    assert _planned(no_resource, *others) == []
    assert _planned(kubelets_own, _rejected("i-x", 2, controller_kind="StatefulSet")) == ["h-x", "i-x"]


@pytest.mark.parametrize("version", ["9" * 5000, "²", "-5", ""])
def test_a_garbage_version_counts_as_the_oldest(version: str) -> None:
    """A version that is no number of etcd's does not raise, and its pod goes first."""
    odd = _rejected("web-7d9f-z", 1)
    odd = replace(odd, resource_version=version)
    assert _planned(_rejected("web-7d9f-a", 3), odd, _rejected("web-7d9f-b", 2), keep=2) == ["web-7d9f-z"]


class Deletions(Counted):
    def rejected_pod_deleted(self) -> None:
        self.note("deleted")


class LookedAt(PodStore):
    """A store that counts its reads, one per cycle."""

    def __init__(self) -> None:
        super().__init__()
        self._looks = 0
        self._looked = Changes()

    def pods(self) -> tuple[Pod, ...]:
        self._looks += 1
        self._looked.set()
        return super().pods()

    async def wait_cycles(self, count: int) -> None:
        end = self._looks + count
        await self._looked.until(lambda: self._looks >= end)


def _store(count: int) -> LookedAt:
    store = LookedAt()
    for number in range(count):
        store.upsert(_rejected(f"web-7d9f-{number}", number + 1))
    return store


async def test_deletions_are_bounded_per_minute() -> None:
    """With the clock standing still only so many go; a minute later as many again."""
    now = [0.0]
    counted, store = Deletions(), _store(12)

    async def deletes(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        store.remove(PodUid(seen.body["preconditions"]["uid"]))
        return await answers(200, {})(server, seen, request)

    async with fake_api(others=[deletes]) as server, opened(server.url) as api:
        clocked: dict[str, Any] = {"period_s": 0.001, "clock": lambda: now[0]}
        cleaner = RejectedPods(pods=store, resources=RESOURCES, per_minute=4, metrics=counted, **clocked)
        async with running(lambda: cleaner.run(api)):
            await counted.wait(4)
            await store.wait_cycles(3)
            assert len(server.seen) == 4
            now[0] = 60.0
            await counted.wait(8)
            await store.wait_cycles(3)
            assert len(server.seen) == 8
            now[0] = 120.0
            await counted.wait(9)
    assert [left.name for left in store.pods()] == ["web-7d9f-10", "web-7d9f-11", "web-7d9f-9"]
    assert len(server.seen) == 9


async def test_errors_cost_one_cycle_or_one_pod() -> None:
    """A pod that was deleted or replaced is skipped; a server that cannot answer is tried again."""
    counted = Deletions()
    others: list[Behaviour] = [
        answers_html_502,
        answers(403, raw_status(403)),
        answers(404, raw_status(404)),
        answers(409, raw_status(409)),
        answers(200, {}),
    ]
    async with fake_api(others=others) as server, opened(server.url) as api:
        cleaner = RejectedPods(pods=_store(6), resources=RESOURCES, metrics=counted, period_s=0.001)
        async with running(lambda: cleaner.run(api)):
            await counted.wait(1)
    names = [request.path.rpartition("-")[2] for request in server.seen]
    assert names[:5] == ["0", "0", "0", "1", "2"]
