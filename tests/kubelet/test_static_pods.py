"""The kubelet's list of pods: what a real one answers, and that the token goes to nobody else."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from gpushare_agent.agent.kubelet.static_pods import StaticPods
from gpushare_agent.core.model.errors import Corrupt, Rejected, Unavailable
from tests.fakes.api_server import (
    CERTIFICATE,
    DATA,
    Behaviour,
    FakeApiServer,
    Seen,
    answers,
    fake_api,
    resets,
    stalls_after_headers,
    stalls_before_headers,
)
from tests.support_deadline import DEADLINE_S
from tests.support_json import built

CAPTURE = (DATA / "kubelet" / "kubelet-pods-1.36.json").read_bytes()


@asynccontextmanager
async def kubelet(
    tmp_path: Path,
    *behaviours: Behaviour,
    ca: str = "kube-ca.pem",
    address: str = "127.0.0.1",
    node: str = "node-1",
    max_bytes: int = 1 << 20,
) -> AsyncIterator[tuple[FakeApiServer, StaticPods]]:
    """One that serves HTTPS with the tests' certificate, and the reader with a service account beside it."""
    shutil.copy(DATA / ca, tmp_path / "ca.crt")
    (tmp_path / "token").write_text("secret\n")
    async with fake_api(tls=CERTIFICATE, others=list(behaviours)) as server:
        yield (
            server,
            StaticPods(
                address=address,
                port=server.port,
                ca_file=None,
                node_name=node,
                service_account=tmp_path,
                max_bytes=max_bytes,
            ),
        )


async def test_a_real_kubelets_answer_shows_its_static_pods(tmp_path: Path) -> None:
    """Of the capture: the one of a file, not those of the API server. The UID is the hash."""
    async with kubelet(tmp_path, answers(200, CAPTURE)) as (server, static_pods):
        (raw,) = await static_pods.read(timeout_s=DEADLINE_S)
    found = built(raw)
    assert found["metadata"]["name"] == f"st-{found['spec']['nodeName']}" and len(found["metadata"]["uid"]) == 32
    assert found["metadata"]["uid"] == found["metadata"]["annotations"]["kubernetes.io/config.hash"]
    assert len(json.loads(CAPTURE)["items"]) > 1
    (request,) = server.seen
    assert (request.method, request.path) == ("GET", "/pods")
    assert request.headers["authorization"] == "Bearer secret"


async def test_a_certificate_for_the_nodes_name_is_verified_too(tmp_path: Path) -> None:
    """A kubelet's self-signed one has no address."""
    async with kubelet(tmp_path, answers(200, CAPTURE), address="0.0.0.0", node="localhost") as (server, static_pods):
        assert len(await static_pods.read(timeout_s=DEADLINE_S)) == 1
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("ca", "address", "node"),
    [("kube-other-ca.pem", "127.0.0.1", "localhost"), ("kube-ca.pem", "0.0.0.0", "another-node")],
)
async def test_nobody_else_gets_the_token(tmp_path: Path, ca: str, address: str, node: str) -> None:
    """A certificate of an unknown authority, or of another host: nothing is sent, and the text names the setting."""
    async with kubelet(tmp_path, answers(200, CAPTURE), ca=ca, address=address, node=node) as (server, static_pods):
        with pytest.raises(Unavailable, match=r"not verified by .*ca\.crt.*kubelet\.api_ca"):
            await static_pods.read(timeout_s=DEADLINE_S)
    assert server.seen == []


@pytest.mark.parametrize(("status", "why"), [(401, "has the API server verify"), (403, "needs get of nodes/pods")])
async def test_a_missing_right_is_named(tmp_path: Path, status: int, why: str) -> None:
    """With the kubelet's own text. A token cannot be verified while the API server is down."""
    async with kubelet(tmp_path, answers(status, b"Forbidden (user=x, verb=get)")) as (_, static_pods):
        with pytest.raises(Rejected, match=rf"{status}: Forbidden \(user=x.*{why}"):
            await static_pods.read(timeout_s=DEADLINE_S)


def _list_of(items: str) -> bytes:
    return f'{{"kind":"PodList","apiVersion":"v1","metadata":{{}},"items":{items}}}\n'.encode()


@pytest.mark.parametrize(
    "content",
    [
        b"not JSON",
        b'{"kind":"Status"}',
        _list_of("[{]"),
        _list_of("[{} {}]"),
        _list_of("[" * 100_000),
        b'{"items":[{"a":1}',
        b'{"items":[1,',
    ],
)
async def test_what_is_no_list_of_pods_is_corrupt(tmp_path: Path, content: bytes) -> None:
    """Cut, nested without end, or something else."""
    async with kubelet(tmp_path, answers(200, content)) as (_, static_pods):
        with pytest.raises(Corrupt):
            await static_pods.read(timeout_s=DEADLINE_S)


@pytest.mark.parametrize("items", ["[]", "null", '[1, null, {"metadata": 3}, {"metadata": {"annotations": []}}]'])
async def test_what_is_no_static_pod_is_passed_over(tmp_path: Path, items: str) -> None:
    """An item may be anything."""
    async with kubelet(tmp_path, answers(200, _list_of(items))) as (_, static_pods):
        assert await static_pods.read(timeout_s=DEADLINE_S) == []


async def test_an_endless_answer_is_cut(tmp_path: Path) -> None:
    """At the limit."""
    async with kubelet(tmp_path, answers(200, _list_of("[" + "{}," * 50_000 + "{}]")), max_bytes=100_000) as (_, pods):
        with pytest.raises(Corrupt, match="longer than 100000 bytes"):
            await pods.read(timeout_s=DEADLINE_S)


@pytest.mark.parametrize("bad", [stalls_before_headers, stalls_after_headers, resets, answers(500, b"")])
async def test_a_kubelet_that_does_not_answer_is_unavailable(tmp_path: Path, bad: Behaviour) -> None:
    """Within the caller's time, and the next call asks again."""
    async with kubelet(tmp_path, bad) as (server, static_pods):
        with pytest.raises(Unavailable, match="/pods"):
            await static_pods.read(timeout_s=1.0)
        server.script.others = [answers(200, CAPTURE)]
        assert len(await static_pods.read(timeout_s=DEADLINE_S)) == 1


async def test_calls_that_waited_for_one_another_share_an_answer(tmp_path: Path) -> None:
    """The one that was asked for after they began; a later call asks anew."""
    begun = asyncio.Event()

    async def slow(server: FakeApiServer, seen: Seen, request: web.Request) -> web.StreamResponse:
        begun.set()
        await asyncio.sleep(0)
        return await answers(200, CAPTURE)(server, seen, request)

    async with kubelet(tmp_path, slow) as (server, static_pods):
        async with asyncio.TaskGroup() as group:
            first = group.create_task(static_pods.read(timeout_s=DEADLINE_S))
            await begun.wait()
            late = [group.create_task(static_pods.read(timeout_s=DEADLINE_S)) for _ in range(3)]
        assert len(server.seen) == 2
        assert all(len(task.result()) == 1 for task in (first, *late))
        await static_pods.read(timeout_s=DEADLINE_S)
        assert len(server.seen) == 3


async def test_credentials_that_are_missing_are_unavailable(tmp_path: Path) -> None:
    """No service account is mounted."""
    static_pods = StaticPods(
        address="::1", port=1, ca_file=None, node_name="node-1", service_account=tmp_path / "nowhere"
    )
    with pytest.raises(Unavailable, match=r"https://\[::1\]:1/pods.*nowhere"):
        await static_pods.read(timeout_s=DEADLINE_S)
