"""The informer keeps the store equal to the API server, through every kind of bad connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from msgspec import Raw
from structlog.testing import capture_logs

from gpushare_agent.agent.cluster.pod_store import NodePods, PodStore
from gpushare_agent.core.kit.backoff import Backoff
from gpushare_agent.core.kube.client import KubeApi, pods_of_node
from gpushare_agent.core.kube.informer import Informer
from gpushare_agent.core.kube.pods import pod_of_node
from gpushare_agent.core.kube.session import KubeTimeouts
from gpushare_agent.core.model.errors import AgentError, Corrupt, NotFound, Rejected, Unavailable
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import PodPhase
from gpushare_agent.sandbox.api.server import EmbeddedApiServer
from tests.cluster.support_kube import (
    FAST,
    NODE,
    NotedBackoff,
    added,
    bookmark,
    opened,
    pod_named,
    raw_pod,
    running,
    wait_store,
)
from tests.fakes.api_server import (
    Behaviour,
    FakeApiServer,
    Seen,
    answers,
    answers_garbage,
    answers_gone,
    answers_html_502,
    ends_empty,
    fake_api,
    lists_pods,
    raw_status,
    resets,
    stalls_after_headers,
    streams,
    streams_bytes,
)
from tests.support_core import NAMES
from tests.support_deadline import DEADLINE_S, Changes
from tests.support_json import undecoded

SHORT = KubeTimeouts(connect_s=1, request_s=0.3, list_s=0.3, watch_idle_s=0.3)


class Counted:
    """Records what the informer counts."""

    def __init__(self) -> None:
        self.lists = 0
        self.ends: list[str] = []
        self.unreadables = 0
        self._ended = Changes()

    def listed(self, kind: str, duration_s: float) -> None:
        self.lists += 1

    def watch_ended(self, kind: str, outcome: str) -> None:
        self.ends.append(outcome)
        self._ended.set()

    def unreadable(self, kind: str) -> None:
        self.unreadables += 1

    async def wait_ends(self, outcome: str, count: int) -> None:
        await self._ended.until(lambda: self.ends.count(outcome) >= count)


class Kubelet:
    """Answers with static pods, or with an error."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.answer: list[dict[str, Any]] | AgentError = list(pods)
        self.reads = 0

    async def read(self, *, timeout_s: float) -> list[Raw]:
        self.reads += 1
        if isinstance(self.answer, AgentError):
            raise self.answer
        return [undecoded(one) for one in self.answer]


@asynccontextmanager
async def fetching(*others: Behaviour, kubelet: Kubelet | None = None) -> AsyncIterator[tuple[FakeApiServer, NodePods]]:
    """The pods of the node at a server with these answers, without an informer."""
    async with fake_api(others=list(others)) as server, opened(server.url) as api:
        node_pods = NodePods(store=PodStore(), node_name=NODE, resources=NAMES.names, kubelet=kubelet)
        node_pods.attach(api)
        yield server, node_pods


@asynccontextmanager
async def informing(
    api: KubeApi, counted: Counted | None = None, backoff: Backoff = FAST, kubelet: Kubelet | None = None
) -> AsyncIterator[NodePods]:
    """The pods of the node with a running informer."""
    node_pods = NodePods(store=PodStore(), node_name=NODE, resources=NAMES.names, kubelet=kubelet)
    node_pods.attach(api)
    informer = Informer(
        kind="pods", watched=pods_of_node(NODE), handler=node_pods, metrics=counted or Counted(), backoff=backoff
    )
    async with running(lambda: informer.run(api)):
        yield node_pods


@asynccontextmanager
async def informed(
    timeouts: KubeTimeouts | None = None,
    counted: Counted | None = None,
    backoff: Backoff = FAST,
    kubelet: Kubelet | None = None,
    **behaviour: Any,
) -> AsyncIterator[tuple[FakeApiServer, PodStore, NodePods]]:
    """A running informer at a fake server that behaves as asked."""
    async with (
        fake_api(**behaviour) as server,
        opened(server.url, timeouts=timeouts) as api,
        informing(api, counted, backoff, kubelet) as node_pods,
    ):
        yield server, node_pods.store, node_pods


def _phases(store: PodStore) -> dict[str, PodPhase]:
    return {one.name: one.phase for one in store.pods()}


async def test_a_bookmark_moves_the_version() -> None:
    """After a clean end the next watch starts where the bookmark stood, without a new list."""
    counted = Counted()
    watches = [streams(bookmark("555"), then="ends"), stalls_after_headers]
    async with informed(counted=counted, watches=watches) as (server, _, _):
        assert (await server.wait_watches(2))[1].query["resourceVersion"] == "555"
    assert counted.lists == 1
    assert counted.ends[:1] == ["ended"]


@pytest.mark.parametrize(
    ("bad", "lists"),
    [
        (streams(bookmark("150"), then="cuts"), 1),
        (stalls_after_headers, 1),
        (streams(bookmark("150"), bookmark("120"), then="ends"), 2),
        (resets, 1),
        (answers(403, raw_status(403)), 1),
        (ends_empty, 1),
        (streams_bytes(b"<html>\n"), 2),
        (streams({"type": "SURPRISE", "object": {}}), 2),
        (streams({"type": "DELETED", "object": {"metadata": 7}}), 2),
    ],
)
async def test_after_a_bad_watch_the_next_one_delivers(bad: Behaviour, lists: int) -> None:
    """Cut, silent, reset, refused, empty and garbage watches lose nothing. A new list is made only after one that cannot be
    read or goes back. How each bad answer ends a watch: test_kube_client.py."""
    counted = Counted()
    watches = [bad, streams(added(raw_pod("b", version="160")))]
    async with informed(SHORT, counted, pods=[raw_pod("a")], watches=watches) as (server, store, _):
        await wait_store(store, lambda store: list(_phases(store)) == ["a", "b"])
        assert await server.wait_watches(2)
    assert counted.lists == lists


@pytest.mark.parametrize("bad", [answers_html_502, stalls_after_headers, answers_garbage, resets, answers_gone])
async def test_a_bad_list_is_tried_again(bad: Behaviour) -> None:
    """The store is not synced by a failed list and is by the next good one."""
    async with informed(SHORT, pods=[raw_pod("a")], lists=[bad, lists_pods]) as (_, store, _):
        await wait_store(store, lambda store: store.is_synced)
        assert list(_phases(store)) == ["a"]


@pytest.mark.parametrize("watch", [ends_empty, answers_gone])
async def test_watches_without_an_event_wait_ever_longer(watch: Behaviour) -> None:
    """A server that ends or refuses watches at once is not hammered; the list between two refused ones is no success."""
    waits: list[int] = []
    async with informed(backoff=NotedBackoff(asked=waits), watches=[watch]) as (server, *_):
        await server.wait_watches(5)
    assert waits[:4] == [1, 2, 3, 4]


async def test_a_server_that_is_back_is_asked_for_its_list_at_the_first_step_of_back_off() -> None:
    """One that was away and has started again answers the watch with 410: it is there, and everything waits for the list."""
    waits: list[int] = []
    watches = [answers_html_502, answers_html_502, answers_html_502, answers_gone, stalls_after_headers]
    async with informed(backoff=NotedBackoff(asked=waits), watches=watches) as (server, *_):
        await server.wait_watches(5)
    assert waits == [1, 2, 3, 1]


async def test_a_pod_that_becomes_unreadable_survives_a_new_list() -> None:
    """A list with an unreadable pod does not take the known pod away."""

    async def lists_broken(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        server.listed = [raw_pod("a", version="200", cores="many"), raw_pod("b", version="201")]
        server.listed_version = "201"
        return await lists_pods(server, seen, request)

    behaviour: dict[str, Any] = {"lists": [lists_pods, lists_broken], "watches": [answers_gone, stalls_after_headers]}
    async with informed(pods=[raw_pod("a")], **behaviour) as (_, store, _):
        await wait_store(store, lambda store: "b" in _phases(store))
        assert list(_phases(store)) == ["a", "b"]


async def test_after_etcd_was_restored_from_a_backup_the_list_counts() -> None:
    """The server counts on from the backup: the state of now has a smaller version than the one that is known, a pod that
    came since is gone, and one that went is there again."""

    async def lists_restored(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        server.listed, server.listed_version = [raw_pod("a", version="110"), raw_pod("went", version="90")], "120"
        return await lists_pods(server, seen, request)

    events = [added(raw_pod("a", version="140")), added(raw_pod("since", version="150"))]
    gone = {"type": "DELETED", "object": raw_pod("went", version="150")}
    behaviour: dict[str, Any] = {
        "lists": [lists_pods, lists_restored],
        "watches": [streams(*events, gone, then="ends"), stalls_after_headers],
    }
    counted = Counted()
    async with informed(SHORT, counted, pods=[raw_pod("went", version="90")], **behaviour) as (_, store, _):
        await wait_store(store, lambda store: list(_phases(store)) == ["a", "since"])
        await wait_store(store, lambda store: list(_phases(store)) == ["a", "went"])
        assert [one.resource_version for one in store.pods()] == ["110", "90"]
    assert counted.ends[:2] == ["ended", "conflict"]


async def test_pods_of_other_nodes_are_left_out() -> None:
    """A server that ignores the selector does not fill the store with pods of other nodes."""
    async with informed(pods=[raw_pod("a"), raw_pod("x", spec={"nodeName": "node-2"})]) as (_, store, _):
        await wait_store(store, lambda store: store.is_synced)
        assert list(_phases(store)) == ["a"]


async def test_fetch_puts_the_pod_into_the_store() -> None:
    """A pod that the watch has not reported yet is read by name, stored and returned."""
    async with fetching(answers(200, raw_pod("a"))) as (_, node_pods):
        fetched = await node_pods.fetch("default", "a", timeout_s=DEADLINE_S)
    assert fetched is not None and node_pods.store.get(fetched.uid) == fetched


@pytest.mark.parametrize(
    "behaviour", [answers(404, raw_status(404)), answers(200, raw_pod("a", spec={"nodeName": "node-2"}))]
)
async def test_fetch_of_a_pod_that_is_not_here_is_none(behaviour: Behaviour) -> None:
    """An absent pod, and one of that name on another node, are not this node's pod."""
    async with fetching(behaviour) as (_, node_pods):
        assert await node_pods.fetch("default", "a", timeout_s=DEADLINE_S) is None
        assert node_pods.store.pods() == ()


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (answers_html_502, Unavailable),
        (answers_gone, Unavailable),
        (stalls_after_headers, Unavailable),
        (answers(403, raw_status(403)), Rejected),
        (answers_garbage, Unavailable),
        (answers(200, {}), Corrupt),
        (answers(200, raw_pod("a", cores="many")), Corrupt),
    ],
)
async def test_fetch_tells_silence_from_a_no_and_an_unreadable_pod(
    behaviour: Behaviour, error: type[Exception]
) -> None:
    """Where the API server cannot answer, the admission can try again; the other errors are no reason to wait for it."""
    async with fetching(behaviour) as (_, node_pods):
        with pytest.raises(error):
            await node_pods.fetch("default", "a", timeout_s=0.2 if behaviour is stalls_after_headers else DEADLINE_S)


@pytest.mark.parametrize("version", ["9" * 5000, "²", "-5"])
async def test_garbage_versions_do_not_stop_the_informer(version: str) -> None:
    """Pods and a list of garbage versions are stored, and a watch refused for one is preceded by a new list next time."""
    counted = Counted()
    pods = [raw_pod("a", version=version), raw_pod("a", uid="other", version=version)]
    behaviour: dict[str, Any] = {"pods": pods, "version": version, "watches": [answers(400, raw_status(400))]}
    async with informed(counted=counted, **behaviour) as (_, store, _):
        await counted.wait_ends("rejected", 2)
        assert len(store.pods()) == 2 and pod_named(store, "a") is not None
    assert counted.lists >= 2


async def test_fetch_before_the_api_is_there_waits_and_gives_up() -> None:
    """Without a client the fetch waits for one within its bound; attached in time, it is used."""
    node_pods = NodePods(store=PodStore(), node_name=NODE, resources=NAMES.names)
    with pytest.raises(Unavailable, match=r"no connection to the API server within 0.02 s"):
        await node_pods.fetch("default", "a", timeout_s=0.02)
    async with (
        fake_api(others=[answers(200, raw_pod("a"))]) as server,
        opened(server.url) as api,
        asyncio.TaskGroup() as group,
    ):
        fetched = group.create_task(node_pods.fetch("default", "a", timeout_s=DEADLINE_S))
        await asyncio.sleep(0)
        node_pods.attach(api)
        assert await fetched is not None


async def test_fetch_does_not_revive_a_pod_whose_deletion_was_reported() -> None:
    """A GET that was answered before the watch reported the deletion comes too late, and is None."""
    async with fetching(answers(200, raw_pod("a"))) as (_, node_pods):
        node_pods.store.remove(PodUid("uid-a"))
        assert await node_pods.fetch("default", "a", timeout_s=DEADLINE_S) is None


async def test_the_informer_follows_the_embedded_api_server() -> None:
    """Creation, binding, status, deletion, a lost history, a stop and a start of the server all end in the same pods."""
    async with (
        EmbeddedApiServer() as server,
        opened(server.url, user={"token": server.token}) as api,
        informing(api) as node_pods,
    ):
        store = node_pods.store
        await wait_store(store, lambda store: store.is_synced)
        unbound = raw_pod("a")
        del unbound["spec"]["nodeName"]
        server.create_pod(unbound)
        server.bind_pod("default", "a", NODE)
        await wait_store(store, lambda store: list(_phases(store)) == ["a"])
        await server.stop_listening()
        server.create_pod(raw_pod("b"))
        server.set_pod_status("default", "a", {"phase": "Running"})
        await server.start_listening()
        await wait_store(store, lambda store: _phases(store) == {"a": PodPhase.RUNNING, "b": PodPhase.PENDING})
        server.running.clear()
        server.delete_pod("default", "a", grace_period_s=0)
        server.store.compact()
        server.running.set()
        await wait_store(store, lambda store: list(_phases(store)) == ["b"])
        fetched = await node_pods.fetch("default", "b", timeout_s=DEADLINE_S)
        assert fetched is not None and fetched.node_name == NODE


HASH = "0123456789abcdef0123456789abcdef"
OTHER_HASH = "f" * 32
STATIC = f"s-{NODE}"


def _raw_static(uid: str = HASH, name: str = STATIC, cores: str = "30") -> dict[str, Any]:
    """As the kubelet's list has it."""
    annotations = {"kubernetes.io/config.hash": uid, "kubernetes.io/config.source": "file"}
    return raw_pod(name, uid=uid, version="", cores=cores, metadata={"annotations": annotations})


def _raw_mirror(uid: str = HASH, name: str = STATIC, version: str = "5") -> dict[str, Any]:
    """As the API server has it."""
    annotations = {"kubernetes.io/config.mirror": uid, **_OWN}
    return raw_pod(name, uid="api-1", version=version, metadata={"annotations": annotations})


_OWN = {"tencent.com/gpu-assigned": "true"}


async def test_a_static_pod_is_found_at_the_kubelet() -> None:
    """Without the API server, which has nothing of it at its admission."""
    async with fetching(kubelet=Kubelet(_raw_static())) as (server, node_pods):
        found = await node_pods.fetch("default", STATIC, timeout_s=1)
        assert found is not None and (found.uid, found.is_static, found.object_uid) == (HASH, True, None)
        assert node_pods.store.get(PodUid(HASH)) == found and server.seen == []


async def test_the_mirror_pod_of_the_watch_is_the_kubelets_pod() -> None:
    """One pod in the store, under the kubelet's UID, with the annotations of its object."""
    events = [added(_raw_mirror()), added(raw_pod("last", version="6"))]
    async with informed(kubelet=Kubelet(_raw_static()), version="4", watches=[streams(*events)]) as (
        _,
        store,
        node_pods,
    ):
        await node_pods.refresh_static(timeout_s=1)
        await wait_store(store, lambda store: pod_named(store, "last") is not None)
        static = store.get(PodUid(HASH))
        assert static is not None and (static.object_uid, dict(static.annotations)) == ("api-1", _OWN)
        assert len(store.pods()) == 2


async def test_of_a_changed_file_the_kubelets_pod_counts() -> None:
    """The API server still has the mirror pod of the former one."""
    kubelet = Kubelet(_raw_static(OTHER_HASH, cores="40"))
    async with fetching(answers(200, _raw_mirror()), kubelet=kubelet) as (server, node_pods):
        node_pods.store.upsert(pod_of_node(undecoded(_raw_mirror()), NAMES.names))
        found = await node_pods.fetch("default", STATIC, timeout_s=1)
    assert found is not None and found.uid == OTHER_HASH
    assert sorted(pod.uid for pod in node_pods.store.pods()) == [HASH, OTHER_HASH]
    assert server.seen == []


@pytest.mark.parametrize("object_of_the_name", [answers(404, raw_status(404)), answers(200, _raw_mirror())])
@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "manifests/components/static-pods"),
        (Rejected("the kubelet answered 403"), "the kubelet answered 403"),
        ([_raw_static("my-own-uid")], "leave metadata.uid out"),
    ],
)
async def test_why_a_static_pod_cannot_be_known(object_of_the_name: Behaviour, answer: Any, text: str) -> None:
    """No component, no right, or a file that sets its UID: a mirror pod of that name may be the former one's."""
    kubelet = None
    if answer is not None:
        kubelet = Kubelet()
        kubelet.answer = answer
    async with fetching(object_of_the_name, kubelet=kubelet) as (_, node_pods):
        with pytest.raises(NotFound, match=text):
            await node_pods.fetch("default", STATIC, timeout_s=DEADLINE_S)


async def test_an_ordinary_pod_may_have_a_static_pods_name() -> None:
    """It is the API server's, whatever the kubelet answers; and with neither the text has both reasons."""
    kubelet = Kubelet()
    others = [answers(200, raw_pod(STATIC)), answers(200, raw_pod(STATIC)), answers_html_502]
    async with fetching(*others, kubelet=kubelet) as (_, node_pods):
        for answer in ([], Unavailable("no kubelet")):
            kubelet.answer = answer
            found = await node_pods.fetch("default", STATIC, timeout_s=DEADLINE_S)
            assert found is not None and found.uid == f"uid-{STATIC}"
        with pytest.raises(Unavailable, match=r"502.*no kubelet"):
            await node_pods.fetch("default", STATIC, timeout_s=DEADLINE_S)


async def test_static_pods_that_cannot_be_read_stay_and_are_logged_once() -> None:
    """Until the kubelet answers without them."""
    kubelet = Kubelet(_raw_static())
    node_pods = NodePods(store=(store := PodStore()), node_name=NODE, resources=NAMES.names, kubelet=kubelet)
    await node_pods.refresh_static(timeout_s=1)
    with capture_logs() as logs:
        kubelet.answer = Unavailable("down")
        for _ in range(3):
            await node_pods.refresh_static(timeout_s=1)
        assert len(store.pods()) == 1
        kubelet.answer = []
        await node_pods.refresh_static(timeout_s=1)
    assert store.pods() == ()
    assert [entry["event"] for entry in logs] == ["static_pods_unreadable", "static_pods_readable"]


def test_only_the_kubelets_hash_makes_a_mirror_pod_another_pod() -> None:
    """A forged one that names a pod's UUID stays what it is."""
    forged = pod_of_node(undecoded(_raw_mirror("12345678-1234-1234-1234-123456789abc")), NAMES.names)
    assert (forged.uid, forged.object_uid) == ("api-1", "api-1")
