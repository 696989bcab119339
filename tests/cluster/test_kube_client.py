"""The API server's client over a real socket: what it sends, what it makes of answers, where its configuration is."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from aiohttp import web
from msgspec import Raw

from gpushare_agent.core.kube.client import (
    ALL_NODES,
    LIVE_PODS,
    KubeApi,
    open_kube_api,
    pods,
    pods_of_node,
    slices_of_node,
)
from gpushare_agent.core.kube.configuration import (
    ConfigurationSource,
    environment_proxy,
    find_configuration,
    open_api_client,
)
from gpushare_agent.core.kube.session import KubeSession, KubeTimeouts, ListLimits, Watched, WentBack
from gpushare_agent.core.model.errors import (
    AgentError,
    Conflict,
    Corrupt,
    NotFound,
    Rejected,
    StartupError,
    Unavailable,
)
from gpushare_agent.core.model.names import PodUid
from tests.cluster.support_kube import NODE, added, bookmark, opened, raw_pod, write_kubeconfig
from tests.fakes.api_server import (
    CERTIFICATE,
    DATA,
    Behaviour,
    FakeApiServer,
    Seen,
    answers,
    answers_garbage,
    answers_gone,
    answers_html_502,
    fake_api,
    lists_pods,
    raw_status,
    resets,
    stalls_after_headers,
    stalls_before_headers,
    streams,
    streams_bytes,
)
from tests.support_deadline import DEADLINE_S
from tests.support_json import built

SHORT = KubeTimeouts(request_s=0.2, list_s=0.2, watch_idle_s=0.2)
UID = PodUid("u1")


def timeouts_for(behaviour: Behaviour) -> KubeTimeouts:
    """Only silence is to outlast them: on a busy machine an answer may take longer than SHORT."""
    if behaviour in (stalls_before_headers, stalls_after_headers):
        return SHORT
    return KubeTimeouts(request_s=DEADLINE_S, list_s=DEADLINE_S, watch_idle_s=DEADLINE_S)


def whole(raw: Raw) -> dict[str, Any]:
    """Reads a listed pod as it is."""
    found: dict[str, Any] = built(raw)
    return found


async def _watch_all(api: KubeApi) -> list[dict[str, Any]]:
    async with api.watch_all(pods_of_node(NODE), "7") as events:
        return [{"type": event.type, "object": built(event.object)} async for event in events]


@pytest.mark.parametrize(
    ("behaviour", "error"),
    [
        (answers_gone, Conflict),
        (answers(409, raw_status(409)), Conflict),
        (answers(404, raw_status(404)), NotFound),
        (answers(404, b"404 page not found\n", "text/plain"), Unavailable),
        (answers(401, raw_status(401)), Rejected),
        (answers(403, raw_status(403)), Rejected),
        (answers(422, raw_status(422)), Rejected),
        (answers(429, raw_status(429)), Unavailable),
        (answers(500, b""), Unavailable),
        (answers_html_502, Unavailable),
        (stalls_before_headers, Unavailable),
        (stalls_after_headers, Unavailable),
        (resets, Unavailable),
        (answers_garbage, Unavailable),
        (answers(200, b'{"metadata": {"name": "\xc3'), Unavailable),
        (answers(200, []), Unavailable),
        (answers(200, b"[" * 100_000), Unavailable),
    ],
)
async def test_each_bad_answer_has_its_error(behaviour: Behaviour, error: type[Exception]) -> None:
    """Status, silence, resets and garbage become the error that names the caller's next move, and name the pod."""
    timeouts = timeouts_for(behaviour)
    async with fake_api(others=[behaviour]) as server, opened(server.url, timeouts=timeouts) as api:
        with pytest.raises(error, match="cannot get pod default/p: "):
            await api.get_pod("default", "p", timeout_s=timeouts.request_s)


async def test_a_connection_is_kept_from_one_pod_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a minute: a new one begins with a TLS handshake."""
    callers, passed_s = set[object](), [0.0]
    monkeypatch.setattr("aiohttp.connector.monotonic", lambda: time.monotonic() + passed_s[0])

    async def note(_server: FakeApiServer, _seen: Seen, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        callers.add(request.transport.get_extra_info("peername"))
        return web.json_response({})

    async with fake_api(others=[note]) as server, opened(server.url) as api:
        for passed_s[0] in (0.0, 60.0, 120.0):
            await api.get_pod("default", "p")
    assert len(callers) == 1


async def test_the_system_probes_a_connection_that_is_kept() -> None:
    """One whose other end is gone without a word is dropped before a request takes it."""
    callers = list[int]()

    async def note(_server: FakeApiServer, _seen: Seen, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        callers.append(request.transport.get_extra_info("peername")[1])
        return web.json_response({})

    async with fake_api(others=[note]) as server, opened(server.url) as api:
        await api.get_pod("default", "p")
        sockets = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    [timer] = [one[5] for one in sockets if one[1].endswith(f":{callers[0]:04X}")]
    assert timer.startswith("02:") and int(timer[3:], 16) <= 1000  # a probe, in hundredths of a second


async def test_the_servers_own_words_are_in_the_error() -> None:
    """A Status message reaches the reader."""
    refusal = raw_status(403, 'pods "p" is forbidden: User cannot get')
    async with fake_api(others=[answers(403, refusal)]) as server, opened(server.url) as api:
        with pytest.raises(Rejected, match=r"answered 403: .* is forbidden: User cannot get.*ClusterRole"):
            await api.get_pod("default", "p", timeout_s=DEADLINE_S)


async def _in_parts(_server: FakeApiServer, _seen: Seen, request: web.Request) -> web.StreamResponse:
    content = json.dumps(raw_status(422, "spec is immutable")).encode()
    response = web.StreamResponse(status=422, headers={"Content-Length": str(len(content))})
    await response.prepare(request)
    for byte in content:  # each in a packet of its own, as far as the system does as it is asked
        await response.write(bytes([byte]))
        await asyncio.sleep(0)
    return response


async def _breaks_off(_server: FakeApiServer, _seen: Seen, request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(status=422, headers={"Content-Length": "500"})
    await response.prepare(request)
    await response.write(b"spec is immutable")
    assert request.transport is not None
    request.transport.close()
    return response


LONG = raw_status(422, f"{'x' * 400}: spec is immutable") | {"details": {"causes": [{"message": "x" * 5000}]}}


@pytest.mark.parametrize("behaviour", [answers(422, LONG), _in_parts, _breaks_off])
async def test_a_refusal_is_read_to_its_end(behaviour: Behaviour) -> None:
    """However long its text is and however it comes; where it breaks off its status counts all the same."""
    async with fake_api(others=[behaviour]) as server, opened(server.url) as api:
        with pytest.raises(Rejected, match=r"answered 422: (x{400}: )?spec is immutable$"):
            await api.get_pod("default", "p", timeout_s=DEADLINE_S)


async def test_an_endless_answer_is_cut_off() -> None:
    """An object larger than etcd can store is refused instead of filling the memory."""
    huge = json.dumps({"x": "y" * (5 << 20)}).encode()
    async with fake_api(others=[answers(200, huge)]) as server, opened(server.url) as api:
        with pytest.raises(Corrupt, match="longer than"):
            await api.get_pod("default", "p", timeout_s=DEADLINE_S)


@pytest.mark.parametrize(
    "body",
    [
        {"items": 3, "metadata": {"resourceVersion": "1"}},
        {"items": []},
        {"metadata": []},
        {"items": [], "metadata": {"resourceVersion": "1", "continue": 7}},
    ],
)
async def test_a_list_without_its_parts_is_corrupt(body: dict[str, Any]) -> None:
    """No list of items, or no version to watch from, is no PodList."""
    async with fake_api(lists=[answers(200, body)]) as server, opened(server.url) as api:
        with pytest.raises(Corrupt, match="cannot list the pods of node"):
            await api.list_all(pods_of_node(NODE), whole)


SMALL = ListLimits(list_bytes=2000, page_bytes=2000)


def _fat(name: str) -> dict[str, Any]:
    return raw_pod(name, metadata={"annotations": {"fat": "x" * 1000}})


def pages(*, gone_at: int = -1) -> Behaviour:
    """Lists in pages of the asked size; a continue token is the number of the next pod; `gone_at` is refused once."""
    refused: list[int] = []

    async def behave(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        begin = int(seen.query.get("continue", "0"))
        if begin == gone_at and not refused:
            refused.append(begin)
            return await answers_gone(server, seen, request)
        end = begin + int(seen.query.get("limit", "1000"))
        metadata = {"resourceVersion": "77"} | ({"continue": str(end)} if end < len(server.listed) else {})
        return await answers(200, {"items": server.listed[begin:end], "metadata": metadata})(server, seen, request)

    return behave


@pytest.mark.parametrize("gone_at", [-1, 2])
async def test_a_list_that_is_too_long_is_read_in_pages(gone_at: int) -> None:
    """Fat pods are all listed, in order and once, in pages that fit, also when a continue token expires on the way."""
    fat = [_fat(name) for name in "abcd"]
    async with fake_api(pods=fat, lists=[pages(gone_at=gone_at)]) as server, opened(server.url, limits=SMALL) as api:
        names, version = await api.list_all(pods_of_node(NODE), lambda raw: str(built(raw)["metadata"]["name"]))
    assert (names, version) == (["a", "b", "c", "d"], "77")
    first, second, *_, last = [request.query for request in server.seen]
    assert (first.get("limit"), first["resourceVersion"]) == (None, "0")
    assert {query["fieldSelector"] for query in (first, second, last)} == {f"spec.nodeName={NODE}"}
    assert (second["limit"], "resourceVersion" in second) == ("500", False)
    assert (last["limit"], last["continue"]) == ("1", "3")


async def test_a_list_whose_tokens_never_live_is_a_conflict() -> None:
    """After a few new starts the caller gets an error, instead of asking for ever."""

    async def always_gone(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        behaviour = answers_gone if "continue" in seen.query else pages()
        return await behaviour(server, seen, request)

    async with (
        fake_api(pods=[_fat(name) for name in "abcd"], lists=[always_gone]) as server,
        opened(server.url, limits=SMALL) as api,
    ):
        with pytest.raises(Conflict):
            await api.list_all(pods_of_node(NODE), whole)
    assert sum("continue" in request.query for request in server.seen) == 3


async def test_one_pod_that_fits_no_page_is_corrupt() -> None:
    """The smallest page is one pod; what is longer still is refused, not read."""
    async with (
        fake_api(
            pods=[_fat("a"), raw_pod("b", metadata={"annotations": {"fat": "x" * 3000}})], lists=[pages()]
        ) as server,
        opened(server.url, limits=SMALL) as api,
    ):
        with pytest.raises(Corrupt, match="longer than 2000 bytes"):
            await api.list_all(pods_of_node(NODE), whole)


async def test_watch_yields_events_and_bookmarks_in_order() -> None:
    """Events come one by one until the server ends the stream; the request asks for bookmarks and an end."""
    events = [added(raw_pod("a")), bookmark("8"), added(raw_pod("a"), "DELETED")]
    async with fake_api(watches=[streams(*events, then="ends")]) as server, opened(server.url) as api:
        assert await _watch_all(api) == events
    query = server.seen[0].query
    assert (query["resourceVersion"], query["allowWatchBookmarks"]) == ("7", "true")
    assert 290 <= int(query["timeoutSeconds"]) <= 319


@pytest.mark.parametrize(
    ("behaviour", "error", "text"),
    [
        (answers_gone, Conflict, "too old"),
        (streams({"type": "ERROR", "object": raw_status(410, "expired")}), Conflict, "expired"),
        (streams({"type": "ERROR", "object": raw_status(500, "etcd")}), Unavailable, "etcd"),
        (answers_html_502, Unavailable, "Bad Gateway"),
        (stalls_before_headers, Unavailable, "in time"),
        (streams(bookmark("8"), then="cuts"), Unavailable, "inside a line"),
        (streams(bookmark("8"), then="drops"), Unavailable, "cannot watch"),
        (streams_bytes(b"<html>\n"), Corrupt, "no event"),
        (streams_bytes(b"[1]\n"), Corrupt, "no event"),
        (streams_bytes(b'{"type":"ADDED"}\n'), Corrupt, "no event"),
        (streams_bytes(b"x" * (3 << 20)), Corrupt, "longer than allowed"),
    ],
)
async def test_each_bad_watch_has_its_error(behaviour: Behaviour, error: type[Exception], text: str) -> None:
    """Gone, silence, cuts and garbage in the stream end the watch with the right error."""
    async with fake_api(watches=[behaviour]) as server, opened(server.url, timeouts=timeouts_for(behaviour)) as api:
        with pytest.raises(error, match=text):
            await _watch_all(api)


CACHE, ETCD = {"resourceVersion": "0"}, {"limit": "1"}


@pytest.mark.parametrize(
    ("watched", "from_version", "asked"),
    [
        (pods_of_node(NODE), "90", [CACHE]),
        (pods_of_node(NODE), "100", [CACHE, ETCD]),
        (pods_of_node(NODE), "101", [CACHE, ETCD]),
        (pods_of_node(NODE), "opaque", [CACHE, ETCD]),
        (LIVE_PODS, "100", [ETCD]),
        (LIVE_PODS, "101", [ETCD]),
    ],
)
async def test_a_silent_watch_ends_cleanly_where_the_server_has_the_version(
    watched: Watched, from_version: str, asked: list[dict[str, str]]
) -> None:
    """It sends no bookmarks: all objects are not listed again for that. But one that was restored from a backup may not
    have the version for hours. That it lacks a version is no matter of its watch cache, which may lag."""

    async def lists(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        server.listed_version = "90" if "resourceVersion" in seen.query else "100"
        return await lists_pods(server, seen, request)

    timeouts = KubeTimeouts(request_s=DEADLINE_S, list_s=DEADLINE_S, watch_idle_s=SHORT.watch_idle_s)
    fake = fake_api(lists=[lists], watches=[stalls_after_headers])
    async with fake as server, opened(server.url, timeouts=timeouts) as api:
        with nullcontext() if from_version in ("90", "100") else pytest.raises(WentBack, match="in time"):
            async with api.watch_all(watched, from_version) as events:
                assert [event async for event in events] == []
    assert [one.query for one in server.seen[1:]] == [{"fieldSelector": watched.fields, **short} for short in asked]


async def test_a_left_watch_closes_its_connection() -> None:
    """Leaving the watch early hangs up, so that the server need not send on."""
    async with fake_api(watches=[streams(bookmark("8"))]) as server, opened(server.url) as api:
        async with api.watch_all(pods_of_node(NODE), "7") as events:
            async for _ in events:
                break
        await server.wait_hung_up()


async def test_patch_names_the_uid_and_the_annotations() -> None:
    """A merge patch carries the UID as its guard, and null for what is to go."""
    async with fake_api() as server, opened(server.url) as api:
        await api.patch_pod_annotations("default", "p", UID, {"b": "1", "a": None})
    (request,) = server.seen
    assert (request.method, request.path) == ("PATCH", "/api/v1/namespaces/default/pods/p")
    assert request.headers["content-type"] == "application/merge-patch+json"
    assert request.body == {"metadata": {"uid": "u1", "annotations": {"a": None, "b": "1"}}}


async def test_delete_is_guarded_by_the_uid() -> None:
    """Deletion names the UID as precondition, and leaves the grace period to the pod."""
    async with fake_api() as server, opened(server.url) as api:
        await api.delete_pod("default", "p", UID)
    assert server.seen[0].method == "DELETE"
    assert server.seen[0].body == {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": "u1"}}


async def test_names_are_quoted_in_paths() -> None:
    """A name with separators stays one element of the path."""
    async with fake_api(others=[answers(404, raw_status(404))]) as server, opened(server.url) as api:
        with pytest.raises(NotFound):
            await api.get_pod("default", "a/b?c=d#e", timeout_s=DEADLINE_S)
    assert server.seen[0].path == "/api/v1/namespaces/default/pods/a/b?c=d#e"
    assert server.seen[0].query == {}


@pytest.mark.parametrize("name", ["", ".", "..", "x" * 254])
async def test_what_cannot_be_a_name_is_not_sent(name: str) -> None:
    """An empty or dotted name would address something else, so nothing is asked."""
    async with fake_api() as server, opened(server.url) as api:
        with pytest.raises(Rejected):
            await api.get_pod("default", name, timeout_s=DEADLINE_S)
        with pytest.raises(Rejected):
            await api.patch_node(name, "labels", {"metadata": {"labels": {"a": "b"}}})
    assert server.seen == []


async def test_can_i_reads_the_review() -> None:
    """The review's answer is the answer; the question names verb, resource, its group and subresource."""
    review = [answers(201, {"status": {"allowed": allowed}}) for allowed in (True, False, True)]
    async with fake_api(others=review) as server, opened(server.url) as api:
        assert await api.can_i("patch", "pods/status")
        assert not await api.can_i("list", "pods")
        assert await api.can_i("get", "runtimeclasses.node.k8s.io")
    attributes = [request.body["spec"]["resourceAttributes"] for request in server.seen]
    assert attributes == [
        {"verb": "patch", "resource": "pods", "subresource": "status"},
        {"verb": "list", "resource": "pods"},
        {"verb": "get", "resource": "runtimeclasses", "group": "node.k8s.io"},
    ]


async def test_a_refused_token_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On 401 the token file is read once more and the request repeated; a second 401 is final."""
    monkeypatch.setattr("gpushare_agent.core.kube.session.RELOAD_INTERVAL_S", 0.0)
    token = tmp_path / "token"
    token.write_text("old\n")

    async def only_new(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        is_new = seen.headers["authorization"] == "Bearer new"
        return await answers(200 if is_new else 401, {} if is_new else raw_status(401))(server, seen, request)

    async with fake_api(others=[only_new]) as server, opened(server.url, user={"tokenFile": str(token)}) as api:
        with pytest.raises(Rejected):
            await api.get_pod("default", "p", timeout_s=DEADLINE_S)
        token.write_text("new\n")
        await api.get_pod("default", "p", timeout_s=DEADLINE_S)
    assert [r.headers["authorization"].removeprefix("Bearer ") for r in server.seen] == ["old", "old", "old", "new"]


async def test_a_token_that_ends_is_read_again_once_for_all_requests(tmp_path: Path) -> None:
    """Of many requests that are refused at once one reads the token again, and all are repeated with it."""
    token = tmp_path / "token"
    token.write_text("old")
    all_seen = asyncio.Event()

    async def only_new(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        if seen.headers["authorization"] == "Bearer new":
            return await answers(200, {})(server, seen, request)
        if len(server.seen) == 3:
            all_seen.set()
        await all_seen.wait()
        return await answers(401, raw_status(401))(server, seen, request)

    async with fake_api(others=[only_new]) as server, opened(server.url, user={"tokenFile": str(token)}) as api:
        api._session._loaded_at = float("-inf")
        token.write_text("new")
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(api.get_pod("default", f"p{number}", timeout_s=DEADLINE_S))
    assert len(server.seen) == 6


async def test_an_exec_plugin_supplies_the_token(tmp_path: Path) -> None:
    """Credentials may come from a program that the kubeconfig names."""
    plugin = tmp_path / "plugin"
    answer = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "made"}}
    plugin.write_text(f"#!/bin/sh\necho '{json.dumps(answer)}'\n")
    plugin.chmod(0o755)
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(plugin)}}
    async with fake_api() as server, opened(server.url, user=user) as api:
        await api.get_node("n")
    assert server.seen[0].headers["authorization"] == "Bearer made"


async def test_a_failing_exec_plugin_is_unavailable() -> None:
    """A plugin that has no credentials now may have them later."""
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/false"}}
    with pytest.raises(Unavailable, match="cannot load the API server's credentials"):
        async with opened("http://127.0.0.1:1", user=user):
            pass


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "a: b", '{"contexts": [], "clusters": [], "current-context": "x"}', "[" * 1000, "a: 2026-13-45",
     f"a: {'1:' * 600}1.0"],
)  # fmt: skip
async def test_a_malformed_kubeconfig_ends_the_start(tmp_path: Path, content: str) -> None:
    """A kubeconfig that can never work is named, with the cure."""
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(content)
    with pytest.raises(StartupError, match=r"cannot use kubeconfig .*kubectl config view"):
        async with open_kube_api(kubeconfig=kubeconfig):
            pass


@pytest.mark.parametrize("server", ["", "foo", "127.0.0.1:6443"])
async def test_a_server_that_is_no_url_ends_the_start(server: str) -> None:
    with pytest.raises(StartupError, match=r"cannot use kubeconfig .* is no URL such as .*kubectl config view"):
        async with opened(server):
            pass


async def test_a_context_is_chosen_among_those_of_the_kubeconfig(tmp_path: Path) -> None:
    """Also in a pod that has a cluster of its own; a context that is not there is named."""
    async with fake_api() as server:
        kubeconfig = write_kubeconfig(tmp_path, "http://127.0.0.1:1")
        config = json.loads(kubeconfig.read_text())
        config["clusters"].append({"name": "other", "cluster": {"server": server.url}})
        config["contexts"].append({"name": "second", "context": {"cluster": "other", "user": "u"}})
        kubeconfig.write_text(json.dumps(config))
        async with open_kube_api(kubeconfig=kubeconfig, context="second") as api:
            await api.get_node("n")
        with pytest.raises(StartupError, match=r"has no context third; it has: \S+, second$"):
            async with open_kube_api(kubeconfig=kubeconfig, context="third"):
                pass
    assert len(server.seen) == 1
    found = find_configuration(None, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBECONFIG": str(kubeconfig)}, "second")
    assert (found.kubeconfig, found.context) == (str(kubeconfig), "second")


async def test_a_service_account_token_that_is_not_there_yet_is_unavailable(tmp_path: Path) -> None:
    """The token is projected a moment after the start on some nodes: wait, do not give up."""
    with pytest.raises(Unavailable, match="service account"):
        await open_api_client(ConfigurationSource(service_account=tmp_path))


async def test_in_cluster_configuration_reads_the_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host, token and certificate authority come from the pod's environment and files."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (tmp_path / "token").write_text("t")
    shutil.copy(DATA / "kube-ca.pem", tmp_path / "ca.crt")
    client = await open_api_client(ConfigurationSource(service_account=tmp_path))
    try:
        assert client.configuration.host == "https://[fd00::1]:443"
    finally:
        await client.close()


@pytest.fixture(autouse=True)
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of this machine."""
    for scheme in ("http", "https", "no"):
        monkeypatch.delenv(f"{scheme}_proxy", raising=False)
        monkeypatch.delenv(f"{scheme}_proxy".upper(), raising=False)


@pytest.mark.parametrize(("excluded", "seen"), [("", ["/api/v1/pods"]), ("cluster.invalid", [])])
async def test_the_proxy_of_the_environment_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, excluded: str, seen: list[str]
) -> None:
    """For an API server that NO_PROXY does not name; credentials of a ~/.netrc never are."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("default login somebody password secret\n")
    async with fake_api() as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        monkeypatch.setenv("no_proxy", excluded)
        refused = pytest.raises(Unavailable, match=r"no connection to the API server at cluster\.invalid")
        async with opened("http://cluster.invalid") as api:
            with refused if excluded else nullcontext():
                await api.list_all(pods_of_node(NODE), whole)
        assert [request.path for request in proxy.seen] == seen
        assert all(request.headers["authorization"] == "Bearer secret" for request in proxy.seen)


EXCLUDED = [
    ("", "https://127.0.0.1:6443"),
    ("", "https://127.8.9.1"),
    ("", "https://LOCALHOST:6443"),
    ("", "https://[::1]:6443"),
    ("", "https://[::ffff:127.0.0.1]:6443"),
    ("10.96.0.0/12", "https://10.96.0.1:443"),
    ("corp.example, 10.96.0.1/12", "https://10.111.255.254"),
    ("10.0.0.0/8", "https://[::ffff:10.1.2.3]"),
    ("fd00::/8", "https://[fd00::1]:443"),
    ("10.96.0.1", "https://10.96.0.1"),
    ("10.96.0.1:443", "https://10.96.0.1"),
    ("fd00::1", "https://[fd00:0::1]"),
    ("[fd00::1]", "https://[fd00::1]:6443"),
    ("[fd00::1]:6443", "https://[fd00::1]:6443"),
    ("::ffff:10.96.0.1", "https://10.96.0.1"),
    ("dev.corp,\tcorp\n", "https://api.corp"),
    ("corp", "https://corp:6443"),
    ("corp", "https://api.corp:6443"),
    (".corp", "https://api.corp:6443"),
    ("*.corp", "https://API.dev.corp:6443"),
    ("api.corp:6443", "https://api.corp:6443"),
    ("*.corp:443", "https://api.corp"),
    ("*", "https://api.corp"),
    ("one.example,*", "https://[fd00::1]:6443"),
]
PROXIED = [
    ("", "https://api.corp"),
    ("", "https://128.0.0.1"),
    ("", "https://localhost.corp"),
    ("10.96.0.0/12", "https://10.112.0.1"),
    ("10.0.0.0/8", "https://api.corp"),
    ("fd00::/8", "https://10.0.0.1"),
    ("10.96.0.1:80", "https://10.96.0.1"),
    ("[fd00::1]:443", "https://[fd00::1]:6443"),
    (".corp", "https://corp"),
    ("*.corp", "https://corp"),
    ("orp", "https://api.corp"),
    ("*corp", "https://api.corp"),
    ("*:443", "https://api.corp"),
    ("10.0.0.0/8:443", "https://10.0.0.1"),
    ("dev.corp corp", "https://api.corp"),
    ("api.corp:443", "https://api.corp:6443"),
    ("10.0.0.0/99,[,],/,:,,::::,[]:1,*.", "https://10.0.0.1"),
]


@pytest.mark.parametrize(
    ("excluded", "url", "is_proxied"), [*((*one, False) for one in EXCLUDED), *((*one, True) for one in PROXIED)]
)
def test_no_proxy_is_read_as_kubectl_reads_it(excluded: str, url: str, is_proxied: bool) -> None:
    """Networks, suffixes, ports and IPv6 addresses; this machine never needs a proxy (golang.org/x/net/http/httpproxy)."""
    found = environment_proxy(url, {"https_proxy": "proxy.corp:3128", "no_proxy": excluded})
    assert found == (("http://proxy.corp:3128", "https_proxy") if is_proxied else ("", ""))


def test_variables_in_upper_case_come_first() -> None:
    """An empty one is none, and ALL_PROXY is not one of kubectl's."""
    both = {"HTTPS_PROXY": "https://upper", "https_proxy": "http://lower", "NO_PROXY": "a", "no_proxy": "b"}
    assert environment_proxy("https://b", both) == ("https://upper", "HTTPS_PROXY")
    assert environment_proxy("https://a", both) == ("", "")
    assert environment_proxy("https://b", both | {"HTTPS_PROXY": "", "NO_PROXY": ""}) == ("", "")
    assert environment_proxy("http://c", {"ALL_PROXY": "http://all", **both}) == ("", "")


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_the_message_names_a_proxy_that_fails(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy without its password, and the variable: of the API server nothing is known."""
    url, variable = f"{scheme}://cluster.invalid", f"{scheme.upper()}_PROXY"
    monkeypatch.setenv(variable, "http://me:s3cret@127.0.0.1:9")
    async with opened(url) as api:
        with pytest.raises(Unavailable) as refused:
            await api.get_node(NODE)
    async with fake_api(others=[answers_html_502]) as proxy:
        monkeypatch.setenv(variable, f"http://me:s3cret@127.0.0.1:{proxy.port}")
        async with opened(url) as api:
            with pytest.raises(Unavailable) as answered:
                await api.get_node(NODE)
    through = f"through the proxy 127.0.0.1:9 (from {variable}; NO_PROXY lists the servers that need none)"
    assert f"no connection to the API server {through}: refused" in str(refused.value)
    assert through.replace(":9 ", f":{proxy.port} ") in str(answered.value)
    assert "s3cret" not in f"{refused.value} {answered.value}"


@pytest.mark.parametrize(
    "proxy",
    [
        "http://me:s3cret@proxy:port", "http://me:s3cret@proxy:99999", "http://me:s3cret@", "http://me:s3/cret@proxy:3128",
        "http://me:3/cret@proxy:3128", "http://me:s3#cret@proxy:3128", "http://me:s3?cret@proxy:3128",
        "http://me:s3[cret@proxy:3128", "http:/me:s3cret@proxy:3128", "socks5://me:s3cret@proxy:1080", "http://",
    ],
)  # fmt: skip
@pytest.mark.parametrize("is_in_kubeconfig", [False, True])
async def test_a_proxy_that_is_no_url_is_not_shown(
    proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_in_kubeconfig: bool
) -> None:
    """The error says where it comes from. A password is often what makes it none."""
    kubeconfig = write_kubeconfig(tmp_path, "https://cluster.invalid")
    if is_in_kubeconfig:
        document = json.loads(kubeconfig.read_text())
        document["clusters"][0]["cluster"]["proxy-url"] = proxy
        kubeconfig.write_text(json.dumps(document))
    else:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
    where = "proxy-url of the kubeconfig" if is_in_kubeconfig else "HTTPS_PROXY"
    with pytest.raises(StartupError, match=rf"cannot use the proxy \(from {where}.*it is no URL such as") as refused:
        async with open_kube_api(kubeconfig=kubeconfig):
            pass
    assert "cret" not in str(refused.value)


@asynccontextmanager
async def proxy_that_answers(answer: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Its address, and what it was asked."""
    asked: list[bytes] = []

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(answer)
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as proxy:
        yield f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", asked


@pytest.mark.parametrize(
    "answer", [b"no http\r\n\r\n", b"HTTP/1.1 407 " + b"x" * 9000 + b"\r\n\r\n", b"HTTP/1.1 407 no\r\n\r\n"]
)
async def test_a_proxy_that_does_not_connect_is_shown_without_its_password(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it answers: the HTTP library's own text has the whole URL."""
    async with proxy_that_answers(answer) as (where, _):
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:s3cret@{where}")
        said = f"no connection through the proxy {where} .* it answered 4"
        async with opened("https://cluster.invalid") as api:
            with pytest.raises(Unavailable, match=said) as refused:
                await api.get_node(NODE)
    assert "cret" not in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize("password", ["s3cret", "p%40s%3As", "caf%C3%A9", "%E2%82%AC", "\u20acuro"])
async def test_a_proxy_gets_the_password_as_from_kubectl(password: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In UTF-8; the HTTP library knows Latin-1 alone."""
    async with proxy_that_answers(b"HTTP/1.1 407 no\r\n\r\n") as (where, sent):
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:{password}@{where}")
        async with opened("https://cluster.invalid") as api:
            with pytest.raises(Unavailable, match="it answered 407"):
                await api.get_node(NODE)
    (header,) = [line for line in sent[0].split(b"\r\n") if line.startswith(b"Proxy-Authorization: Basic ")]
    assert base64.b64decode(header.split()[-1]).decode() == f"me:{unquote(password)}"


async def test_an_ipv6_address_is_named_in_brackets() -> None:
    """With its port, as in a kubeconfig."""
    async with opened("https://[::1]:9") as api:
        with pytest.raises(Unavailable, match=r"no connection to the API server at \[::1\]:9: "):
            await api.get_node(NODE)


async def test_a_rotated_certificate_authority_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TLS with a service account: an unknown authority is Unavailable, and the renewed file serves the next try."""
    monkeypatch.setattr("gpushare_agent.core.kube.session.RELOAD_INTERVAL_S", 0.0)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    (tmp_path / "token").write_text("t\n")
    shutil.copy(DATA / "kube-other-ca.pem", tmp_path / "ca.crt")
    async with fake_api(tls=CERTIFICATE) as server:
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        session = KubeSession(ConfigurationSource(service_account=tmp_path), connect_s=5)
        await session.open()
        try:
            api = KubeApi(session, KubeTimeouts(), ListLimits())
            shutil.copy(DATA / "kube-ca.pem", tmp_path / "ca.crt")
            with pytest.raises(Unavailable, match=r"certificate verify failed.*and its certificate authority$"):
                await api.list_all(pods_of_node(NODE), whole)
            await api.list_all(pods_of_node(NODE), whole)
        finally:
            await session.close()
    assert [request.headers["authorization"] for request in server.seen] == ["Bearer t"]


def test_the_explicit_kubeconfig_comes_first(tmp_path: Path) -> None:
    """--kubeconfig, then the pod's own cluster, then $KUBECONFIG, then the home directory; else an error with the cure."""
    kubeconfig = tmp_path / ".kube" / "config"
    kubeconfig.parent.mkdir()
    kubeconfig.write_text("{}")
    in_cluster = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "KUBECONFIG": str(kubeconfig)}
    assert find_configuration(kubeconfig, in_cluster).kubeconfig == str(kubeconfig)
    assert find_configuration(None, in_cluster).kubeconfig == ""
    assert find_configuration(None, {"KUBECONFIG": f"/none:{kubeconfig}"}).kubeconfig == f"/none:{kubeconfig}"
    assert find_configuration(None, {"HOME": str(tmp_path)}).kubeconfig == str(kubeconfig)
    with pytest.raises(StartupError, match="give --kubeconfig FILE"):
        find_configuration(None, {"HOME": "/nowhere"})
    with pytest.raises(StartupError, match="/nowhere is no file"):
        find_configuration(Path("/nowhere"), in_cluster)


def test_the_agent_registers_before_it_imports_what_it_needs_later() -> None:
    program = (
        "import sys; import gpushare_agent.agent.program; "
        "drivers = 'pynvml', 'gpushare_agent.agent.gpus.simulated.driver'; "
        "print([m for m in ('kubernetes_asyncio', 'aiohttp', 'asyncinotify', *drivers) if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_no_certificates_of_the_system_are_read_for_contexts_that_nobody_uses() -> None:
    """Whoever makes a context afterwards has them."""
    program = (
        "import os, ssl; from gpushare_agent.core.kit.http_answers import load_aiohttp; load_aiohttp(); load_aiohttp(); "
        "from aiohttp import connector; own = ssl.create_default_context(); "
        "contexts = connector._SSL_CONTEXT_VERIFIED, connector._SSL_CONTEXT_UNVERIFIED, own; "
        "print([len(one.get_ca_certs()) for one in contexts], os.environ.get('SSL_CERT_DIR'))"
    )
    environment = {"SSL_CERT_FILE": str(DATA / "kube-ca.pem")}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    assert done.stdout.strip() == "[0, 0, 1] None"


def listing(names: list[str], token: str = "") -> Behaviour:
    items = [{"metadata": {"name": name}} for name in names]
    return answers(200, {"kind": "List", "items": items, "metadata": {"resourceVersion": "7", "continue": token}})


async def test_nodes_are_listed_in_pages() -> None:
    """A cluster's list may be long: each page is read and let go before the next is asked for."""
    script = [listing(["a", "b"], "more"), listing(["c"])]
    async with fake_api(others=script) as server, opened(server.url) as api:
        names, _ = await api.list_all(
            ALL_NODES, lambda raw: name if (name := built(raw)["metadata"]["name"]) != "b" else None
        )
    assert names == ["a", "c"]
    assert [(seen.path, seen.query) for seen in server.seen] == [
        ("/api/v1/nodes", {"limit": "500"}),
        ("/api/v1/nodes", {"limit": "500", "continue": "more"}),
    ]


async def test_pods_are_listed_by_selectors_in_all_namespaces_or_one() -> None:
    """Selectors that are empty are not sent."""
    async with fake_api(lists=[listing(["a"])], others=[listing(["b"])]) as server, opened(server.url) as api:
        unfinished, _ = await api.list_all(pods(fields="status.phase!=Failed"), whole)
        of_namespace, _ = await api.list_all(pods("ns", labels="a=b"), whole)
    assert (unfinished, of_namespace) == ([{"metadata": {"name": "a"}}], [{"metadata": {"name": "b"}}])
    assert [(seen.path, seen.query) for seen in server.seen] == [
        ("/api/v1/pods", {"fieldSelector": "status.phase!=Failed", "limit": "500"}),
        ("/api/v1/namespaces/ns/pods", {"labelSelector": "a=b", "limit": "500"}),
    ]


async def test_a_kind_that_is_not_served_is_not_found() -> None:
    """An API server answers so without a Status; of a single object that says nothing."""
    async with (
        fake_api(others=[answers(404, b"404 page not found\n", "text/plain")]) as server,
        opened(server.url) as api,
    ):
        with pytest.raises(NotFound, match="404 page not found"):
            await api.list_all(slices_of_node("n", "d"), lambda raw: raw)


async def test_any_answer_shows_that_the_server_is_there() -> None:
    """Also one that refuses; silence and no connection do not."""
    behaviours = [answers(403, raw_status(403)), answers(200, {}), stalls_before_headers]
    async with fake_api(others=behaviours) as server, opened(server.url) as api:
        for _ in range(2):
            await api.check_answers(timeout_s=DEADLINE_S)
        with pytest.raises(Unavailable, match="in time"):
            await api.check_answers(timeout_s=0.05)


async def test_a_pods_http_server_is_read_through_the_api_server() -> None:
    """The path names the pod's port; the query is passed on."""
    async with fake_api(others=[answers(200, {"x": 1})]) as server, opened(server.url) as api:
        answer = await api.get_through_pod("ns", "agent-1", 5678, "/api/v1/node", {"b": "2", "a": "1"})
        assert built(answer) == {"x": 1}
        with pytest.raises(Rejected, match="no object's name"):
            await api.get_through_pod("ns", "..", 5678, "/api/v1/node", {})
    (seen,) = server.seen
    assert seen.path == "/api/v1/namespaces/ns/pods/http:agent-1:5678/proxy/api/v1/node"
    assert list(seen.query.items()) == [("a", "1"), ("b", "2")]


async def test_a_pod_that_redirects_is_not_followed() -> None:
    """It would lead with this program's network, and on the API server's own address with its credentials, anywhere."""
    redirects = answers(302, b"", headers={"Location": "/api/v1/namespaces/ns/secrets"})
    async with fake_api(others=[redirects, answers(200, {"x": 1})]) as server, opened(server.url) as api:
        with pytest.raises(AgentError, match="302"):
            await api.get_through_pod("ns", "agent-1", 5678, "/api/v1/node", {})
    assert len(server.seen) == 1


async def test_the_cure_for_a_missing_right_is_the_callers(tmp_path: Path) -> None:
    """A person's commands do not run with the agent's service account."""
    async with fake_api(others=[answers(403, raw_status(403))]) as server, opened(server.url) as api:
        kubeconfig = write_kubeconfig(tmp_path, server.url)
        async with open_kube_api(kubeconfig=kubeconfig, advice="ask your administrator") as own:
            with pytest.raises(Rejected, match=r"on request; ask your administrator$"):
                await own.list_all(ALL_NODES, whole)
        with pytest.raises(Rejected, match="service account"):
            await api.list_all(ALL_NODES, whole)
