"""The informer against a real HTTP server: pages, watches, faults, and lists on demand."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count

import pytest
from aiohttp.web import Request, StreamResponse
from msgspec import Raw as Undecoded

from gpushare_agent.core.kube.client import LIVE_PODS
from gpushare_agent.core.kube.informer import HEALTHY_S, Handler, Informer
from gpushare_agent.core.kube.objects import pod_uid
from gpushare_agent.core.kube.pods import read_pod_json
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.extender.metrics import ExtenderMetrics
from tests.cluster.support_kube import FAST, opened, running
from tests.extender.support_extender import FakeCluster, eventually, fake_cluster, raw_pod
from tests.fakes.api_server import FakeApiServer, Raw, Seen, ends_empty, fake_api


class Pods(Handler):
    """Keeps names and nodes; what is labelled dull is of no interest, what is labelled bad is unreadable."""

    def __init__(self) -> None:
        self.nodes: dict[str, str] = {}
        self.removed: list[str] = []

    def key(self, raw: Undecoded) -> str:
        return pod_uid(raw)

    def put(self, raw: Undecoded) -> bool:
        pod = read_pod_json(raw)
        labels = pod.meta.labels
        if "bad" in labels:
            raise Corrupt("on request")
        if "odd" in labels:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "no error of ours")
        if "dull" in labels:
            return False
        self.nodes[self.key(raw)] = pod.spec.node_name or ""
        return True

    def remove(self, key: str) -> None:
        self.removed.append(key)
        del self.nodes[key]


def labelled(name: str, label: str) -> Raw:
    pod = raw_pod(name, (30, 4))
    pod["metadata"]["labels"] = {label: "true"}
    return pod


@asynccontextmanager
async def informing(cluster: FakeCluster) -> AsyncIterator[tuple[Informer, Pods, ExtenderMetrics]]:
    async with cluster.opened_api() as api:
        pods, metrics = Pods(), ExtenderMetrics()
        informer = Informer(kind="pods", watched=LIVE_PODS, handler=pods, metrics=metrics, backoff=FAST)
        async with running(lambda: informer.run(api)):
            yield informer, pods, metrics


def five() -> list[Raw]:
    return [raw_pod(f"p{i}", (30, 4)) for i in range(5)]


async def test_it_lists_in_pages_and_follows_changes() -> None:
    """Added, changed and deleted pods arrive. One that ends, or is of no interest any more, counts as deleted; one that
    never was of interest is not removed."""
    there = [*five(), labelled("never", "dull")]
    async with fake_cluster(pods=there) as cluster, informing(cluster) as (informer, pods, _):
        await eventually(lambda: informer.has_listed)
        assert sorted(pods.nodes) == [f"uid-p{i}" for i in range(5)]
        cluster.put("pods", raw_pod("late", (30, 4)))
        cluster.change("pods", "default/p0", lambda raw: raw["spec"].update(nodeName="n1"))
        cluster.remove("pods", "default/p1")
        cluster.change("pods", "default/p2", lambda raw: raw["status"].update(phase="Succeeded"))
        cluster.remove("pods", "default/never")
        cluster.change("pods", "default/p3", lambda raw: raw["metadata"].update(labels={"dull": ""}))
        await eventually(lambda: pods.removed == ["uid-p1", "uid-p2", "uid-p3"])
        assert pods.nodes == {"uid-p0": "n1", "uid-p4": "", "uid-late": ""}
        assert informer.count == 3


async def test_what_went_while_the_server_was_away_is_removed() -> None:
    """It is lost meanwhile, with the reason of now. After 410 it lists again and removes what the list has not; nothing is
    removed before."""
    async with fake_cluster(pods=five()) as cluster, informing(cluster) as (informer, pods, _):
        await eventually(lambda: informer.has_listed and informer.lost is None)
        await cluster.stop_listening()
        await eventually(lambda: informer.lost is not None and "refused" in informer.lost.why)
        cluster.remove("pods", "default/p1")
        cluster.put("pods", raw_pod("late", (30, 4)))
        cluster.store.compact()
        assert "uid-p1" in pods.nodes
        cluster.is_down = False
        await cluster.start_listening()
        await eventually(lambda: informer.lost is None)
        assert "uid-late" in pods.nodes and pods.removed == ["uid-p1"]


async def test_refresh_returns_after_a_list_that_began_after_it() -> None:
    """Even where the watch reports nothing: whatever was there when refresh was called is known when it returns."""
    async with fake_cluster(pods=five()) as cluster, informing(cluster) as (informer, pods, _):
        await eventually(lambda: informer.has_listed)
        cluster.mute(True)
        cluster.put("pods", raw_pod("late", (30, 4)))
        cluster.remove("pods", "default/p0")
        await informer.refresh()
        assert "uid-late" in pods.nodes
        assert "uid-p0" not in pods.nodes
        lists = [path for _, path in cluster.requests].count("/api/v1/pods")
        await informer.refresh()
        assert [path for _, path in cluster.requests].count("/api/v1/pods") > lists


async def test_refresh_waits_for_a_server_that_is_away() -> None:
    """It is called while nothing answers, and returns once something does."""
    async with fake_cluster(pods=five()) as cluster:
        cluster.is_down = True
        async with informing(cluster) as (informer, pods, _):
            await cluster.wait(lambda: len(cluster.requests) >= 2)
            assert not informer.has_listed
            cluster.is_down = False
            await informer.refresh()
            assert len(pods.nodes) == 5


async def test_an_unreadable_object_keeps_its_last_readable_state() -> None:
    """It is counted, does not stop the others, and a list does not remove what it cannot read."""
    pods_there = [*five(), labelled("worse", "bad"), labelled("odd", "odd")]
    async with fake_cluster(pods=pods_there) as cluster, informing(cluster) as (informer, pods, metrics):
        await eventually(lambda: informer.has_listed)
        assert len(pods.nodes) == 5
        cluster.change("pods", "default/p0", lambda raw: raw["metadata"].update(labels={"bad": ""}))
        cluster.put("pods", raw_pod("after", (30, 4)))
        await eventually(lambda: "uid-after" in pods.nodes)
        await informer.refresh()
        assert "uid-p0" in pods.nodes
        assert b'objects_unreadable_total{kind="pods"}' in metrics.exposition("")[1]
        assert b'objects_unreadable_total{kind="pods"} 0.0' not in metrics.exposition("")[1]


@pytest.mark.parametrize("step_s", [0.1, HEALTHY_S])
async def test_a_watch_that_ends_without_an_event_was_heard_from_if_it_lasted(step_s: float) -> None:
    """Else an API server that sends no bookmarks would look silent, or a proxy that ends each watch at once not."""
    heard, ticks = list[float | None](), count()

    async def ends(server: FakeApiServer, seen: Seen, request: Request) -> StreamResponse:
        heard.append(informer.last_message_at)
        return await ends_empty(server, seen, request)

    metrics = ExtenderMetrics()
    informer = Informer(
        kind="pods",
        watched=LIVE_PODS,
        handler=Pods(),
        metrics=metrics,
        backoff=FAST,
        clock=lambda: step_s * next(ticks),
    )
    async with fake_api(watches=[ends]) as server, opened(server.url) as api, running(lambda: informer.run(api)):
        await server.wait_watches(2)
    assert heard[0] is not None and heard[1] is not None and (heard[0] < heard[1]) is (step_s == HEALTHY_S)
